// Applies an op to chunks, in vectors of F. The remainder goes through the same functions with
// loads and stores of fewer elements, so a value's result does not depend on where in the tensor it
// sits.
#pragma once

#include "chunk_lists.h"
#include "kernels.h"
#include "stage.h"
#include "walk.h"

namespace ampfuse {
namespace {

template <class Op, class F>
HD void include_checked(const F (&x)[kLists], typename F::Magnitude& largest) {
  UNROLL_LISTS
  for (int list = 0; list < kLists; ++list) {
    if (Op::kChecked & bit(list)) largest.include(x[list]);
  }
}

template <class F, class Op, class Types>
HD bool apply_chunk(const Op& op, const Walk& walk, const Types& types) {
  const ChunkLists lists = walk.lists;
  typename F::Magnitude largest;
  for_steps<F::kWidth, Prefetch<Op::kReads>>(
      walk, types, (Op::kReads | Op::kWrites) & ~kRewritten,
      [&](int64_t i, int count, auto whole, const auto& fetch) HD_LAMBDA {
        fetch(0);
        F x[kLists];
        run_vector<F, decltype(whole)::value, Op::kWrites>(op, lists, types, i, count, x);
        include_checked<Op>(x, largest);
      });
  return Op::kChecked && largest.reduce() >= kInfinityBits;
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

// Applies an op to one chunk by blocks: run(i, count, whole, fetch, after) runs it on one.
template <class F, class Op, class Types, class Run>
HD bool apply_blocks(const Walk& walk, const Types& types, const Run& run) {
  static_assert(kChunk % kScaleBlock == 0);
  typename F::Magnitude largest;
  for_steps<kScaleBlock, Prefetch<Op::kReads>>(
      walk, types, (Op::kReads | Op::kWrites) & ~kRewritten,
      [&](int64_t i, int count, auto whole, const auto& fetch) HD_LAMBDA {
        run(i, count, whole, fetch, [&](int64_t, int, auto, const F(&x)[kLists]) HD_LAMBDA {
          include_checked<Op>(x, largest);
        });
      });
  return Op::kChecked && largest.reduce() >= kInfinityBits;
}

// Applies an op to one chunk; true if a checked list holds a non-finite value.
template <class F, class Op>
bool apply_op(const Op& given, const Walk& walk) {
  const Op op = given;  // a copy that no store can change
  const ChunkLists& lists = walk.lists;
  bool found = false;
  with_types<Op>(lists, [&](const auto& types) {
    using Types = std::decay_t<decltype(types)>;
    if constexpr (!Types::kKnown) {
      found = apply_blocks<F, Op>(walk, types,
                                  [&](int64_t i, int n, auto, const auto& fetch, const auto& after)
                                      HD_LAMBDA { run_staged<F>(op, lists, i, n, fetch, after); });
    } else if constexpr (!Types::kByVectors) {
      found = apply_blocks<F, Op>(
          walk, types,
          [&](int64_t i, int n, auto whole, const auto& fetch, const auto& after) HD_LAMBDA {
            run_block<F, Op::kWrites, decltype(whole)::value, Types>(op, lists, i, n, fetch, after);
          });
    } else {
      if constexpr (Op::kWrites & bit(kModel)) {
        if (lists.streams_model) return apply_streaming<F>(op, walk, types);
      }
      found = apply_chunk<F>(op, walk, types);
    }
  });
  return found;
}

}  // namespace
}  // namespace ampfuse
