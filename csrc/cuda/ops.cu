// The kernels of one header of core/ops.
#include AMPFUSE_OPS_HEADER

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

[[gnu::used]] static const auto compiled =
    each_of(AMPFUSE_OPS(), [](auto op) { return &DeviceKernel<typename decltype(op)::type>::run; });

}  // namespace ampfuse
