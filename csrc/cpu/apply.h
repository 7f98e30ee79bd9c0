// Applies an op to chunks, in vectors of F. The remainder goes through the same functions with
// loads and stores of fewer elements, so a value's result does not depend on where in the tensor it
// sits.
#pragma once

#include "kernels.h"
#include "walk.h"

namespace ampfuse {
namespace {

template <class F, class Op, class Types>
HD bool apply_chunk(const Op& op, const Walk& walk, const Types& types) {
  const ChunkLists lists = walk.lists;
  typename F::Magnitude largest;
  for_steps<F, F::kWidth, Prefetch<Op::kReads>>(
      walk, types, (Op::kReads | Op::kWrites) & ~kRewritten,
      [&](int64_t i, int count, auto whole) __attribute__((always_inline)) {
        F x[kLists];
        run_vector<F, decltype(whole)::value, Op::kWrites>(op, lists, types, i, count, x);
#pragma GCC unroll 10
        for (int list = 0; list < kLists; ++list) {
          if (Op::kChecked & bit(list)) largest.include(x[list]);
        }
      });
  return Op::kChecked && largest.reduce() >= kInfinityBits;
}

// Applies an op to one chunk whose model weights are streamed: by whole cache lines, because two
// halves of one, stored at different times, are two writes to memory (1 % of a large Adam step).
template <class F, class Op, class Types>
HD void apply_streaming(const Op& op, const Walk& walk, const Types& types) {
  static_assert(Op::kChecked == 0 && kChunk % kStrip == 0 && kStrip % F::kWidth == 0);
  constexpr int kVectors = kStrip / F::kWidth;
  constexpr unsigned kStored = Op::kWrites & ~bit(kModel);
  const ChunkLists lists = walk.lists;
  for_steps<F, kStrip, Prefetch<Op::kReads>>(
      walk, types, (Op::kReads | kStored) & ~kRewritten,
      [&](int64_t i, int, auto) __attribute__((always_inline)) {
        F model[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          F x[kLists];
          run_vector<F, true, kStored>(op, lists, types, i + v * F::kWidth, F::kWidth, x);
          model[v] = x[kModel];
        }
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          stream_vector(model[v], lists.data[kModel], types(kModel), i + v * F::kWidth);
      });
}

// Applies an op to one chunk of which states are codes.
template <class F, class Op, class Types>
HD void apply_blocks(const Op& op, const Walk& walk, const Types& types) {
  static_assert(kChunk % kBlock == 0);
  constexpr unsigned kStored = Op::kWrites & ~bit(kModel);
  const ChunkLists lists = walk.lists;
  for_steps<F, kBlock, Prefetch<Op::kReads>>(
      walk, types, (Op::kReads | kStored) & ~kRewritten,
      [&](int64_t i, int count, auto whole) __attribute__((always_inline)) {
        run_block<F, kStored, decltype(whole)::value>(
            op, lists, types, i, count,
            [&](int64_t at, int n, auto all, const F(&x)[kLists]) HD_LAMBDA {
              if (!(Op::kWrites & bit(kModel))) return;
              if (lists.streams_model) {
                stream_vector(x[kModel], lists.data[kModel], types(kModel), at);
              } else {
                store<F, decltype(all)::value>(x, lists, types, kModel, at, n);
              }
            });
      });
}

// Applies an op to one chunk; true if a checked list holds a non-finite value.
template <class F, class Op>
bool apply_op(const Op& op, const Walk& walk) {
  bool found = false;
  with_types<Op>(walk.lists, [&](const auto& types) {
    if constexpr (Op::kPackable) {
      if (types.has_codes()) return apply_blocks<F>(op, walk, types);
    }
    if constexpr (Op::kWrites & bit(kModel)) {
      if (walk.lists.streams_model) return apply_streaming<F>(op, walk, types);
    }
    found = apply_chunk<F>(op, walk, types);
  });
  return found;
}

}  // namespace
}  // namespace ampfuse
