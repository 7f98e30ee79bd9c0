// A stand-in for the CUDA runtime, enough for csrc/cuda/: g++ compiles the very same .cu files with
// this folder first on its include path, and the kernels run on the CPU (fibers.h). Never put this
// folder on nvcc's path.
//
// Streams run their work at once, or, after emulation::set_deferred(true), only when someone waits
// for it: then a staging buffer that is reused too early, or a stream that does not wait for
// another, gives wrong results. Who waits for the device runs a block of each stream in turn, so
// that kernels which must not share memory give wrong results, too.
//
// The handle of a destroyed stream is the next one's. A call that a capture forbids ends the
// capture.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>

#include "fibers.h"

#define CUDART_VERSION 13000

#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define __grid_constant__ __attribute__((unused))

// --- what device code uses -----------------------------------------------------------------------

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct alignas(8) uint2 {
  uint32_t x, y;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

inline thread_local dim3 threadIdx{0, 0, 0}, blockIdx{0, 0, 0}, blockDim, gridDim;

#define __syncthreads()                                      \
  do {                                                       \
    const unsigned thread_ = threadIdx.x;                    \
    ::ampfuse::emulation::block_barrier(__FILE__, __LINE__); \
    threadIdx.x = thread_;                                   \
  } while (0)

namespace ampfuse {
namespace emulation {
// The value of the lane `from`, or the own one where there is no such lane.
template <class T>
T shuffle(T value, unsigned from, const char* file, int line) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves at most 8 bytes");
  const unsigned thread = threadIdx.x, lane = thread % kWarp;
  const unsigned warp_size =
      blockDim.x - thread / kWarp * kWarp < kWarp ? blockDim.x % kWarp : kWarp;
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = warp_exchange(bits, int(from < warp_size ? from : lane), file, line);
  threadIdx.x = thread;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
}  // namespace emulation
}  // namespace ampfuse

// The mask is always the whole warp.
#define __shfl_down_sync(mask, value, offset) \
  ::ampfuse::emulation::shuffle(value, threadIdx.x % 32 + unsigned(offset), __FILE__, __LINE__)
#define __shfl_xor_sync(mask, value, offset) \
  ::ampfuse::emulation::shuffle(value, (threadIdx.x % 32) ^ unsigned(offset), __FILE__, __LINE__)
#define __shfl_sync(mask, value, lane) \
  ::ampfuse::emulation::shuffle(value, unsigned(lane), __FILE__, __LINE__)

// Byte k of the result is the byte that the k-th hexadecimal digit names, of y's and x's.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned digits) {
  const unsigned long long bytes = (unsigned long long)y << 32 | x;
  unsigned made = 0;
  for (int k = 0; k < 4; ++k) made |= unsigned(bytes >> 8 * (digits >> 4 * k & 7) & 0xff) << 8 * k;
  return made;
}

template <class T>
T __ldcg(const T* address) {
  return *address;
}
inline void __threadfence() {}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned atomicAdd(unsigned* address, unsigned value) {
  const unsigned old = *address;
  *address = old + value;
  return old;
}
inline unsigned atomicInc(unsigned* address, unsigned limit) {
  const unsigned old = *address;
  *address = old >= limit ? 0 : old + 1;
  return old;
}

// --- the runtime ---------------------------------------------------------------------------------

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorNotReady = 600,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901,
};
const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
using cudaGraph_t = struct CUgraph_st*;
using cudaGraphExec_t = struct CUgraphExec_st*;
using cudaUserObject_t = struct CUuserObject_st*;
using cudaHostFn_t = void (*)(void*);

enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed };
constexpr unsigned cudaEventDisableTiming = 2, cudaStreamNonBlocking = 1, cudaHostAllocDefault = 0,
                   cudaUserObjectNoDestructorSync = 1, cudaGraphUserObjectMove = 1;

inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceSynchronize();

cudaError_t cudaMalloc(void** memory, size_t bytes);
cudaError_t cudaFree(void* memory);
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream);

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                 unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* owned, cudaHostFn_t destroy,
                                 unsigned references, unsigned flags);
cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count);
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count,
                                      unsigned flags);

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream = nullptr;
};

namespace ampfuse {
namespace emulation {

void set_deferred(bool deferred);
int64_t launch_count();      // kernels launched so far
int64_t copy_count();        // copies queued so far
int64_t wait_count();        // calls in which the host waits for the device
int64_t live_allocations();  // of device memory
// After `calls` more calls that can fail, one does; negative: none.
void fail_after(int calls);
cudaError_t enqueue_kernel(const cudaLaunchConfig_t& config, size_t argument_bytes,
                           std::function<void()> thread);

}  // namespace emulation
}  // namespace ampfuse

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  std::tuple<Params...> values(std::forward<Args>(args)...);
  return ampfuse::emulation::enqueue_kernel(*config, (sizeof(Params) + ... + 0),
                                            [kernel, values] { std::apply(kernel, values); });
}
