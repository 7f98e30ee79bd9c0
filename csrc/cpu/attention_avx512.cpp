// The kernels of attention.h, for AVX-512.
#include "attention_kernels.h"
#include "simd_avx512.h"

namespace ampfuse {
template struct AttentionKernel<Avx512>;
}  // namespace ampfuse
