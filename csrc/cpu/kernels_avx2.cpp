// The kernels of a header of ops, for AVX2.
#include AMPFUSE_OPS_HEADER

#include "op_kernels.h"
#include "simd_avx2.h"

namespace ampfuse {
[[gnu::used]] static constexpr auto kCompiled = kernels_of<Avx2>(AMPFUSE_OPS());
}  // namespace ampfuse
