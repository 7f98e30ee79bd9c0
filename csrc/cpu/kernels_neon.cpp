// The kernels of a header of ops, for NEON.
#include AMPFUSE_OPS_HEADER

#include "op_kernels.h"
#include "simd_neon.h"

namespace ampfuse {
[[gnu::used]] static constexpr auto kCompiled = kernels_of<Neon>(AMPFUSE_OPS());
}  // namespace ampfuse
