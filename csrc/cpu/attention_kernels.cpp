// The kernels of attention.h for one instruction set, which CMake names.
#include "attention_kernels.h"
#include AMPFUSE_SIMD_HEADER

namespace ampfuse {
template struct AttentionKernel<AMPFUSE_ISA>;
}  // namespace ampfuse
