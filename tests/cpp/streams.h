// Streams of the emulated runtime (host_cuda/cuda_runtime.h).
#pragma once

#include "world.h"

namespace ampfuse {

struct Deferred {
  Deferred() { emulation::set_deferred(true); }
  ~Deferred() { emulation::set_deferred(false); }
};

struct Stream {
  cudaStream_t handle = nullptr;
  Stream() { cuda(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
  ~Stream() { (void)cudaStreamDestroy(handle); }
  operator cudaStream_t() const { return handle; }
};

}  // namespace ampfuse
