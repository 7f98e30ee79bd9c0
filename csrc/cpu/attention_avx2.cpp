// The kernels of attention.h, for AVX2.
#include "attention_kernels.h"
#include "simd_avx2.h"

namespace ampfuse {
template struct AttentionKernel<Avx2>;
}  // namespace ampfuse
