// Applies an op to chunks, in vectors of F. The remainder goes through the same functions with
// loads and stores of fewer elements, so a value's result does not depend on where in the tensor it
// sits.
#pragma once

#include "chunk_lists.h"
#include "kernels.h"
#include "stage.h"

namespace ampfuse {
namespace {

template <class Op, class F>
HD void include_checked(const F (&x)[kLists], typename F::Magnitude& largest) {
  UNROLL_LISTS
  for (int list = 0; list < kLists; ++list) {
    if (Op::kChecked & bit(list)) largest.include(x[list]);
  }
}

// Applies an op to one chunk whose model weights are streamed: by whole cache lines, because two
// halves of one, stored at different times, are two writes to memory (1 % of a large Adam step).
template <class F, class Op, class Types>
HD void apply_streaming(const Op& op, const Walk& walk, const Types& types) {
  static_assert(Op::kChecked == 0 && kChunk % kLine == 0 && kLine % F::kWidth == 0);
  constexpr int kVectors = kLine / F::kWidth;
  constexpr unsigned kStored = Op::kWrites & ~bit(kModel);
  const ChunkLists lists = walk.lists;
  for_steps<kLine, Prefetch<Op::kReads>>(
      walk, types, (Op::kReads | kStored) & ~kRewritten,
      [&](int64_t i, int, auto, const auto& fetch) HD_LAMBDA {
        F model[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          fetch(v * F::kWidth);
          F x[kLists];
          run_vector<F, true, kStored>(op, lists, types, i + v * F::kWidth, F::kWidth, x);
          model[v] = x[kModel];
        }
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          stream_vector(model[v], lists.data[kModel], types(kModel), i + v * F::kWidth);
      });
}

// Applies an op to one chunk; true if a checked list holds a non-finite value.
template <class F, class Op>
bool apply_op(const Op& given, const Walk& walk) {
  const Op op = given;  // a copy that no store can change
  const ChunkLists& lists = walk.lists;
  bool found = false;
  with_types<Op>(lists, [&](const auto& types) {
    using Types = std::decay_t<decltype(types)>;
    if constexpr (Types::kByVectors && (Op::kWrites & bit(kModel))) {
      if (lists.streams_model) return apply_streaming<F>(op, walk, types);
    }
    typename F::Magnitude largest;
    run_steps<F, Op::kWrites>(op, walk, types, (Op::kReads | Op::kWrites) & ~kRewritten,
                              [&](int64_t, int, auto, const F(&x)[kLists])
                                  HD_LAMBDA { include_checked<Op>(x, largest); });
    found = Op::kChecked && largest.reduce() >= kInfinityBits;
  });
  return found;
}

}  // namespace
}  // namespace ampfuse
