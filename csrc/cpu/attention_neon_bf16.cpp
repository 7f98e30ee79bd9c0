// The kernels of attention.h, for NEON with BF16 instructions.
#include "attention_kernels.h"
#include "simd_neon.h"

namespace ampfuse {
template struct AttentionKernel<NeonBf16>;
}  // namespace ampfuse
