#include "batch_norm_kernels.h"
#include "simd_avx2.h"

namespace ampfuse {
template struct BatchNormKernels<Avx2>;
}  // namespace ampfuse
