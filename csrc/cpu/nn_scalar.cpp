// The kernels of a header of core/nn_ops, for every machine.
#include AMPFUSE_OPS_HEADER

#include "row_kernels.h"
#include "simd_scalar.h"

namespace ampfuse {
[[gnu::used]] static constexpr auto kCompiled = nn_kernels_of<Scalar>(AMPFUSE_OPS());
}  // namespace ampfuse
