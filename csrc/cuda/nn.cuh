// The launches of the CUDA backend for an op of a fused layer. Each header of core/nn_ops has its
// own translation unit, in which nn.cu defines the function declared here.
#pragma once

#include <cuda_runtime.h>

#include "core/nn_ops/nn_op.h"

namespace ampfuse {

template <class Op>
struct NnDeviceKernel {
  static void run(const NnArgs& args, cudaStream_t stream);
};

}  // namespace ampfuse
