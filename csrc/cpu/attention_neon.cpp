// The kernels of attention.h, for NEON.
#include "attention_kernels.h"
#include "simd_neon.h"

namespace ampfuse {
template struct AttentionKernel<Neon>;
}  // namespace ampfuse
