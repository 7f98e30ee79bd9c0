#include "core/algorithms.h"

#include "core/ops.h"

namespace ampfuse {
namespace {

template <class Op>
AlgorithmInfo info_of() {
  AlgorithmInfo info;
  info.algorithm = Algorithm::of<Op>();
  info.name = Op::kName;
  if constexpr (kStateCount<Op> > 0) info.states.assign(Op::kStates, Op::kStates + kStateCount<Op>);
  info.unsigned_states = Op::kUnsigned;
  info.packable = Op::kPackable;
  info.grad_norms = Op::kGradNorms;
  return info;
}

template <class... Ops>
std::vector<AlgorithmInfo> all(OpList<Ops...>) {
  return {info_of<Ops>()...};
}

}  // namespace

const std::vector<AlgorithmInfo>& algorithms() {
  static const std::vector<AlgorithmInfo> found = all(Algorithms());
  return found;
}

}  // namespace ampfuse
