// The kernels of one header of core/ops.
#include AMPFUSE_OPS_HEADER

#include <tuple>

#include "apply.cuh"
#include "measure.cuh"

namespace ampfuse {

template <class Op>
void DeviceKernel<Op>::run(const DevicePass& pass) {
  if constexpr (Op::kMeasured != 0) {
    measure<Op>(pass);
  } else {
    apply<Op>(pass);
  }
}

// Makes the compiler emit them.
template <class... Ops>
static auto kernels_of(OpList<Ops...>) {
  return std::make_tuple(&DeviceKernel<Ops>::run...);
}
[[gnu::used]] static const auto compiled = kernels_of(AMPFUSE_OPS());

}  // namespace ampfuse
