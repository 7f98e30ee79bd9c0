// Checked CUDA calls and the one way to launch a kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "core/check.h"

// A parameter that a kernel reads where it was passed. GPUs before Volta copy it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#define GRID_CONSTANT
#else
#define GRID_CONSTANT __grid_constant__
#endif

namespace ampfuse {

// Note [launch bounds]
// The second argument of __launch_bounds__ is how many blocks a multiprocessor must have registers
// for, so a thread gets 65536 / (threads * blocks) at most. Functions named ..._blocks give it: the
// most without a spill, or fewer where those have enough loads in flight.
// tests/core/test_cuda_code.py finds spills in the machine code.

inline void check_cuda(cudaError_t status, const char* what, const char* file, int line) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // so that the next call does not report this one's error
  const char* advice =
      status == cudaErrorNoKernelImageForDevice
          ? "; this build holds no code for this GPU: rebuild ampfuse on this machine"
      : status == cudaErrorInsufficientDriver
          ? "; the driver is older than the CUDA toolkit of this build"
          : "";
  throw std::runtime_error(message("CUDA: ", cudaGetErrorString(status), " (",
                                   cudaGetErrorName(status), ") in ", what, " at ", file, ":", line,
                                   advice));
}

#define CUDA_CHECK(call) ::ampfuse::check_cuda((call), #call, __FILE__, __LINE__)

// A kernel with the name and the place that an error message gives.
template <class... Params>
struct NamedKernel {
  const char* name;
  void (*function)(Params...);
  const char* file;
  int line;

  NamedKernel(const char* kernel_name, void (*kernel)(Params...),
              const char* where = __builtin_FILE(), int at = __builtin_LINE())
      : name(kernel_name), function(kernel), file(where), line(at) {}
};

// Queues `kernel` on `stream`, if there are blocks. A launch fails here at once if it cannot run at
// all; what goes wrong while it runs shows up in a later call, as always with CUDA
// (CUDA_LAUNCH_BLOCKING=1 finds the place).
template <class... Params, class... Args>
void launch(const NamedKernel<Params...>& kernel, int64_t blocks, int threads, cudaStream_t stream,
            Args&&... args) {
  if (blocks == 0) return;
  AMPFUSE_CHECK(blocks <= INT32_MAX, kernel.name, " needs ", blocks, " blocks, and a grid holds ",
                INT32_MAX, "; split the list of tensors");
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(unsigned(threads));
  config.stream = stream;
  check_cuda(cudaLaunchKernelEx(&config, kernel.function, std::forward<Args>(args)...), kernel.name,
             kernel.file, kernel.line);
}

}  // namespace ampfuse
