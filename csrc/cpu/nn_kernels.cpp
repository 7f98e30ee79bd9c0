// The kernels of a header of core/nn_ops for one instruction set, which CMake names.
#include AMPFUSE_OPS_HEADER

#include "row_kernels.h"
#include AMPFUSE_SIMD_HEADER

namespace ampfuse {
[[gnu::used]] static constexpr auto kCompiled = each_of(AMPFUSE_OPS(), [](auto op) {
  using Op = typename decltype(op)::type;
  using Kernel = NnKernel<AMPFUSE_ISA, Op>;
  if constexpr (Op::kKind == PassKind::kChannelSum) return &Kernel::sum;
  if constexpr (Op::kKind == PassKind::kChannelMap) return &Kernel::map;
  if constexpr (Op::kKind == PassKind::kRowSum) return &Kernel::row_sum;
  if constexpr (Op::kKind == PassKind::kRowMap) return &Kernel::row_map;
  if constexpr (Op::kKind == PassKind::kRowPass) return &Kernel::row_pass;
});
}  // namespace ampfuse
