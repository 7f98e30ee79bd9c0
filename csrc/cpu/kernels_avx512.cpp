// The kernels of a header of ops, for AVX-512.
#include AMPFUSE_OPS_HEADER

#include "op_kernels.h"
#include "simd_avx512.h"

namespace ampfuse {
[[gnu::used]] static constexpr auto kCompiled = kernels_of<Avx512>(AMPFUSE_OPS());
}  // namespace ampfuse
