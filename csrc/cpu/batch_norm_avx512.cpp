#include "batch_norm_kernels.h"
#include "simd_avx512.h"

namespace ampfuse {
template struct BatchNormKernels<Avx512>;
}  // namespace ampfuse
