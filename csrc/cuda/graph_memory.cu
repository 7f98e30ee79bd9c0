#include <mutex>
#include <utility>

#include "graph_memory.cuh"
#include "launch.cuh"

namespace ampfuse {
namespace {

struct Orphans {
  std::mutex mutex;
  std::vector<void*> memory;

  void add(void* p) {
    const std::lock_guard<std::mutex> lock(mutex);
    memory.push_back(p);
  }
  // Without the lock, which the graph's thread takes: cudaFree may wait for the device.
  void free_all() {
    std::vector<void*> freed;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      freed.swap(memory);
    }
    for (void* p : freed) (void)cudaFree(p);
  }
};

Orphans& orphans() {
  static auto* orphans = new Orphans;  // outlives every graph
  return *orphans;
}

}  // namespace

Capture current_capture(cudaStream_t stream) {
  Capture capture;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
#if CUDART_VERSION >= 13000
  CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &capture.id, &capture.graph));
#else
  CUDA_CHECK(cudaStreamGetCaptureInfo_v2(stream, &status, &capture.id, &capture.graph));
#endif
  if (status != cudaStreamCaptureStatusActive) return {};
  return capture;
}

SideStream::SideStream() { CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }

std::shared_ptr<void> allocate_for_graph(size_t bytes) {
  void* memory = nullptr;
  CUDA_CHECK(cudaMalloc(&memory, bytes));
  return {memory, [](void* p) { orphans().add(p); }};
}

void free_orphans() { orphans().free_all(); }

void give_to_graph(const Capture& capture, std::vector<std::shared_ptr<void>> owned) {
  using Owned = std::vector<std::shared_ptr<void>>;
  auto kept = std::make_unique<Owned>(std::move(owned));
  const auto destroy = [](void* last) { delete static_cast<Owned*>(last); };
  cudaUserObject_t object = nullptr;
  CUDA_CHECK(cudaUserObjectCreate(&object, kept.get(), destroy, 1, cudaUserObjectNoDestructorSync));
  (void)kept.release();
  const cudaError_t retained =
      cudaGraphRetainUserObject(capture.graph, object, 1, cudaGraphUserObjectMove);
  if (retained != cudaSuccess) (void)cudaUserObjectRelease(object, 1);
  CUDA_CHECK(retained);
}

}  // namespace ampfuse
