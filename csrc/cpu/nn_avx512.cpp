// The kernels of a header of core/nn_ops, for AVX-512.
#include AMPFUSE_OPS_HEADER

#include "row_kernels.h"
#include "simd_avx512.h"

namespace ampfuse {
[[gnu::used]] static constexpr auto kCompiled = nn_kernels_of<Avx512>(AMPFUSE_OPS());
}  // namespace ampfuse
