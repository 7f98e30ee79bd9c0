// The kernels of a header of ops, for every machine.
#include AMPFUSE_OPS_HEADER

#include "op_kernels.h"
#include "simd_scalar.h"

namespace ampfuse {
[[gnu::used]] static constexpr auto kCompiled = kernels_of<Scalar>(AMPFUSE_OPS());
}  // namespace ampfuse
