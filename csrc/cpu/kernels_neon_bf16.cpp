// The kernels of a header of ops, for NEON with BF16 instructions.
#include AMPFUSE_OPS_HEADER

#include "op_kernels.h"
#include "simd_neon.h"

namespace ampfuse {
[[gnu::used]] static constexpr auto kCompiled = kernels_of<NeonBf16>(AMPFUSE_OPS());
}  // namespace ampfuse
