#include <algorithm>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <vector>

#include "cuda_runtime.h"

// Does a part of its work and says whether that was the last: a block of a kernel, or all of it.
using Work = std::function<bool()>;

struct CUgraph_st {
  std::vector<Work> nodes;
  std::vector<std::shared_ptr<CUuserObject_st>> objects;
  unsigned long long id = 0;
  bool valid = true;
};

struct CUgraphExec_st {
  CUgraph_st graph;
};

struct CUuserObject_st {
  void* owned;
  cudaHostFn_t destroy;
  ~CUuserObject_st() { destroy(owned); }
};

// A handle is only a name: see Runtime::streams.
struct CUstream_st {
  std::deque<Work> queue;
  unsigned long long id = 0;
  int64_t issued = 0, done = 0;
  CUgraph_st* capture = nullptr;

  void run_part() {
    bool last = true;  // also where it throws
    try {
      last = queue.front()();
    } catch (...) {
      finish_front();
      throw;
    }
    if (last) finish_front();
  }
  void run_until(int64_t position) {
    while (done < position) run_part();
  }
  void finish_front() {
    queue.pop_front();
    ++done;
  }
};

struct CUevent_st {
  std::shared_ptr<CUstream_st> stream;  // recorded on; outlives the handle
  int64_t position = 0;
};

namespace {

// One lock for everything: the stand-in is for right results, not for speed.
struct Runtime {
  std::recursive_mutex mutex;
  std::map<cudaStream_t, std::shared_ptr<CUstream_st>> streams;
  std::vector<cudaStream_t> free_handles;
  std::vector<std::shared_ptr<CUstream_st>> destroyed;  // with work that has not run yet
  std::shared_ptr<CUstream_st> default_stream = std::make_shared<CUstream_st>();
  std::set<void*> device_memory, pinned_memory;
  bool deferred = false;
  std::vector<CUgraph_st*> captures;
  unsigned long long next_id = 1;
  int fails_after = -1;
  int64_t launches = 0, copies = 0, waits = 0;
};

Runtime& runtime() {
  static auto* runtime = new Runtime;
  return *runtime;
}

using Lock = std::lock_guard<std::recursive_mutex>;

thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// A capture in global mode forbids calls that allocate or wait, unless this thread has relaxed its
// mode.
bool forbidden() {
  if (runtime().captures.empty() || capture_mode == cudaStreamCaptureModeRelaxed) return false;
  for (CUgraph_st* graph : runtime().captures) graph->valid = false;
  return true;
}

bool fails() { return runtime().fails_after >= 0 && runtime().fails_after-- == 0; }

std::shared_ptr<CUstream_st> find(cudaStream_t handle) {
  if (handle == nullptr) return runtime().default_stream;
  const auto stream = runtime().streams.find(handle);
  if (stream == runtime().streams.end())
    throw std::runtime_error("emulation: a stream that does not exist, or does no longer");
  return stream->second;
}

void enqueue(cudaStream_t handle, Work work) {
  const auto stream = find(handle);
  if (stream->capture != nullptr) {
    stream->capture->nodes.push_back(std::move(work));
    return;
  }
  stream->queue.push_back(std::move(work));
  ++stream->issued;
  if (!runtime().deferred) stream->run_until(stream->issued);
}

template <class Whole>
Work at_once(Whole whole) {
  return [=] {
    whole();
    return true;
  };
}

// Streams take turns, block by block.
void run_everything() {
  auto streams = std::exchange(runtime().destroyed, {});
  streams.push_back(runtime().default_stream);
  for (const auto& [_, stream] : runtime().streams) streams.push_back(stream);
  for (bool any = true; any;) {
    any = false;
    for (const auto& stream : streams) {
      if (stream->done == stream->issued) continue;
      stream->run_part();
      any = true;
    }
  }
}

}  // namespace

const char* cudaGetErrorName(cudaError_t error) {
  static const std::map<cudaError_t, const char*> names = {
      {cudaSuccess, "cudaSuccess"},
      {cudaErrorInvalidValue, "cudaErrorInvalidValue"},
      {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation"},
      {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration"},
      {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver"},
      {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice"},
      {cudaErrorNotReady, "cudaErrorNotReady"},
      {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported"},
      {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated"},
  };
  return names.at(error);
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

static thread_local int current_device = 0;

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  const Lock lock(runtime().mutex);
  ++runtime().waits;
  if (forbidden()) return result(cudaErrorStreamCaptureUnsupported);
  run_everything();
  return cudaSuccess;
}

// --- memory --------------------------------------------------------------------------------------

static cudaError_t allocate(void** memory, size_t bytes, std::set<void*>& registry) {
  const Lock lock(runtime().mutex);
  if (fails()) return result(cudaErrorMemoryAllocation);
  if (forbidden()) return result(cudaErrorStreamCaptureUnsupported);
  if (posix_memalign(memory, 256, bytes) != 0) return result(cudaErrorMemoryAllocation);
  std::memset(*memory, 0xcd, bytes);  // no zeros that nobody wrote
  registry.insert(*memory);
  return cudaSuccess;
}

static cudaError_t release(void* memory, std::set<void*>& registry) {
  const Lock lock(runtime().mutex);
  if (memory == nullptr) return cudaSuccess;
  if (forbidden()) return result(cudaErrorStreamCaptureUnsupported);
  if (registry.erase(memory) == 0) return result(cudaErrorInvalidValue);
  run_everything();
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  return allocate(memory, bytes, runtime().device_memory);
}
cudaError_t cudaFree(void* memory) { return release(memory, runtime().device_memory); }
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  return allocate(memory, bytes, runtime().pinned_memory);
}
cudaError_t cudaFreeHost(void* memory) { return release(memory, runtime().pinned_memory); }

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  const Lock lock(runtime().mutex);
  if (fails()) return result(cudaErrorInvalidValue);
  ++runtime().copies;
  enqueue(stream, at_once([=] { std::memcpy(to, from, bytes); }));
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  const Lock lock(runtime().mutex);
  if (fails()) return result(cudaErrorInvalidValue);
  enqueue(stream, at_once([=] { std::memset(memory, value, bytes); }));
  return cudaSuccess;
}

// --- streams and events --------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  const Lock lock(runtime().mutex);
  if (fails()) return result(cudaErrorMemoryAllocation);
  auto& handles = runtime().free_handles;
  if (handles.empty()) handles.push_back(new CUstream_st);
  *stream = handles.back();
  handles.pop_back();
  (runtime().streams[*stream] = std::make_shared<CUstream_st>())->id = runtime().next_id++;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  const Lock lock(runtime().mutex);
  runtime().destroyed.push_back(find(handle));
  runtime().streams.erase(handle);
  runtime().free_handles.push_back(handle);
  return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
  const Lock lock(runtime().mutex);
  *id = find(handle)->id;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  const Lock lock(runtime().mutex);
  ++runtime().waits;
  const auto stream = find(handle);
  if (forbidden() || stream->capture) return result(cudaErrorStreamCaptureUnsupported);
  stream->run_until(stream->issued);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (fails()) return result(cudaErrorMemoryAllocation);
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  const Lock lock(runtime().mutex);
  event->stream = find(handle);
  event->position = event->stream->issued;
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Lock lock(runtime().mutex);
  if (forbidden()) return result(cudaErrorStreamCaptureUnsupported);
  if (!event->stream || event->stream->done >= event->position) return cudaSuccess;
  return result(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const Lock lock(runtime().mutex);
  ++runtime().waits;
  if (forbidden()) return result(cudaErrorStreamCaptureUnsupported);
  if (event->stream) event->stream->run_until(event->position);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const Lock lock(runtime().mutex);
  if (!event->stream) return cudaSuccess;
  enqueue(stream, at_once([other = event->stream, position = event->position] {
            other->run_until(position);
          }));
  return cudaSuccess;
}

// --- graphs --------------------------------------------------------------------------------------

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  const Lock lock(runtime().mutex);
  const auto stream = find(handle);
  if (handle == nullptr || stream->capture != nullptr)
    return result(cudaErrorStreamCaptureUnsupported);
  stream->capture = new CUgraph_st;
  stream->capture->id = runtime().next_id++;
  runtime().captures.push_back(stream->capture);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  const Lock lock(runtime().mutex);
  const auto stream = find(handle);
  if (stream->capture == nullptr) return result(cudaErrorInvalidValue);
  *graph = std::exchange(stream->capture, nullptr);
  auto& captures = runtime().captures;
  captures.erase(std::find(captures.begin(), captures.end(), *graph));
  if ((*graph)->valid) return cudaSuccess;
  delete std::exchange(*graph, nullptr);
  return result(cudaErrorStreamCaptureInvalidated);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph) {
  const Lock lock(runtime().mutex);
  const auto stream = find(handle);
  *status = stream->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (stream->capture == nullptr) return cudaSuccess;
  *id = stream->capture->id;
  *graph = stream->capture;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new CUgraphExec_st{*graph};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  const Lock lock(runtime().mutex);
  for (const Work& node : exec->graph.nodes) enqueue(stream, node);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* owned, cudaHostFn_t destroy,
                                 unsigned, unsigned) {
  if (fails()) return result(cudaErrorMemoryAllocation);
  *object = new CUuserObject_st{owned, destroy};
  return cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned) {
  delete object;
  return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned,
                                      unsigned) {
  if (fails()) return result(cudaErrorMemoryAllocation);
  graph->objects.emplace_back(object);
  return cudaSuccess;
}

// --- kernels -------------------------------------------------------------------------------------

namespace ampfuse {
namespace emulation {

void set_deferred(bool deferred) {
  const Lock lock(runtime().mutex);
  run_everything();
  runtime().deferred = deferred;
}

void fail_after(int calls) { runtime().fails_after = calls; }
int64_t launch_count() { return runtime().launches; }
int64_t copy_count() { return runtime().copies; }
int64_t wait_count() { return runtime().waits; }
int64_t live_allocations() { return int64_t(runtime().device_memory.size()); }

// A kernel's blocks, one at each call.
class Grid {
 public:
  Grid(dim3 grid, dim3 block, std::function<void()> thread)
      : grid_(grid), block_(block), thread_(std::move(thread)) {}
  bool operator()() {
    if (next_ == 0) sequence_.emplace(grid_.x);
    gridDim = grid_;
    blockDim = block_;
    blockIdx.x = unsigned((*sequence_)[next_++]);
    run_block(int(block_.x), [&](int index) {
      threadIdx.x = unsigned(index);
      thread_();
    });
    return next_ == grid_.x;
  }

 private:
  dim3 grid_, block_;
  std::function<void()> thread_;
  std::optional<Sequence> sequence_;
  int64_t next_ = 0;
};

cudaError_t enqueue_kernel(const cudaLaunchConfig_t& config, size_t argument_bytes,
                           std::function<void()> thread) {
  const Lock lock(runtime().mutex);
  const dim3 grid = config.gridDim, block = config.blockDim;
  if (grid.x == 0 || block.x == 0 || block.x > 1024) return result(cudaErrorInvalidConfiguration);
  if (argument_bytes > 4096) return result(cudaErrorInvalidValue);
  enqueue(config.stream, Grid(grid, block, std::move(thread)));
  ++runtime().launches;
  return cudaSuccess;
}

}  // namespace emulation
}  // namespace ampfuse
