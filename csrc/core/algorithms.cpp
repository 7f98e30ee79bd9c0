#include "core/algorithms.h"

#include <type_traits>

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
  info.quantizable = Op::kQuantizable;
  info.grad_norms = Op::kGradNorms;
  if constexpr (kHyperCount<Op> > 0) info.hypers.assign(Op::kHypers, Op::kHypers + kHyperCount<Op>);
  info.last_state_if = Op::kLastStateIf;
  info.filled_with = Op::kFilledWith;
  info.uses_count = Op::kUsesCount;
  info.follows_norms = Op::kGradNorms || !std::is_void_v<typename Op::Before>;
  info.scratch = Op::kScratch;
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

// Small parameters take little memory, and are often biases and norms, whose neighbours differ in
// size (Dettmers et al., arXiv:2110.02861).
const std::vector<StorageInfo>& storages() {
  constexpr int64_t kMinQuantized = 4096;
  static const std::vector<StorageInfo> found = {
      {"fp32", DType::kFloat32, DType::kFloat32, 32, false, nullptr, 0, 0},
      {"bf16", DType::kRandomBFloat16, DType::kRandomBFloat16, 16, true, nullptr, 0, 0},
      {"8bit", DType::kSigned8, DType::kUnsigned8, 8, false, "_8bit", kScaleBlock, kMinQuantized},
  };
  return found;
}

}  // namespace ampfuse
