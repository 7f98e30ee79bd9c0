// The kernels of a header of core/ops for one instruction set, which CMake names.
#include AMPFUSE_OPS_HEADER

#include "op_kernels.h"
#include AMPFUSE_SIMD_HEADER

namespace ampfuse {
[[gnu::used]] static constexpr auto kCompiled = each_of(
    AMPFUSE_OPS(), [](auto op) { return &Kernel<AMPFUSE_ISA, typename decltype(op)::type>::run; });
}  // namespace ampfuse
