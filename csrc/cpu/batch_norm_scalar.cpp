#include "batch_norm_kernels.h"
#include "simd_scalar.h"

namespace ampfuse {
template struct BatchNormKernels<Scalar>;
}  // namespace ampfuse
