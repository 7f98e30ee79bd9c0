// The kernels of a header of core/nn_ops, for AVX2.
#include AMPFUSE_OPS_HEADER

#include "row_kernels.h"
#include "simd_avx2.h"

namespace ampfuse {
[[gnu::used]] static constexpr auto kCompiled = nn_kernels_of<Avx2>(AMPFUSE_OPS());
}  // namespace ampfuse
