// Any mixture of types, a block at a time: each list is widened into floats by a loop for its type,
// the op runs over floats, and each list is narrowed again. So there is one loop for each op and
// one for each type, and none branches on types within.
#pragma once

#include "chunk_lists.h"
#include "core/ops/op.h"
#include "vector_op.h"
#include "walk.h"

namespace ampfuse {
namespace {

// One list's type, and that of the model weights.
template <DType kType, DType kWeight>
struct OneType {
  HD constexpr DType operator()(int list) const { return list == kModel ? kWeight : kType; }
};

// Calls run(OneType) for a list that exists.
template <class Run>
HD void with_one_type(DType type, const Run& run) {
  with_split(type, [&](auto split) HD_LAMBDA {
    constexpr DType kWeight = decltype(split)::kWeight;
    constexpr bool kHalf = kWeight == DType::kFloat16;
    run(OneType<kHalf ? DType::kRemainderFloat16 : DType::kRemainderBFloat16, kWeight>());
  });
  if (is_plain(plain(type))) {
    with_storage(plain(type), [&](auto storage) HD_LAMBDA {
      constexpr DType kType = decltype(storage)::kType;
      run(OneType<kType, kType>());
    });
  }
}

// For the `count` elements from element `first` on, at most a block, of a quantized list: decoded
// values; the scale that values need; quantized values. There is one loop for each type, however
// many ops there are.
template <class F>
void decode_block(const ChunkLists& lists, int list, int64_t first, int count, float* to) {
  const F scale(lists.scales[list - kState0][first / kScaleBlock]);
  with_quantizer(lists.dtype[list], [&](auto quantizer) HD_LAMBDA {
    using Stored = typename decltype(quantizer)::Stored;
    for_vectors<F>(count, [&](int i, int n, auto whole) HD_LAMBDA {
      const BitsOf<F> quantized =
          load_integers<F, Stored, decltype(whole)::value>(lists.data[list], first + i, n);
      store_vector(quantizer.decode(quantizer.root(to_float(scale, quantized)), scale), to,
                   DType::kFloat32, i);
    });
  });
}

template <class F>
float scale_block(const ChunkLists& lists, int list, int64_t first, int count, const float* from) {
  typename F::Magnitude largest;
  for_vectors<F>(count, [&](int i, int n, auto whole) HD_LAMBDA {
    const F x = load_vector<F>(from, DType::kFloat32, i);
    // The lanes past the end are not part of the block.
    largest.include(whole ? x : keep((1u << n) - 1, x));
  });
  float& scale = lists.scales[list - kState0][first / kScaleBlock];
  with_quantizer(lists.dtype[list],
                 [&](auto quantizer) HD_LAMBDA { scale = quantizer.scale(largest.reduce()); });
  return scale;
}

template <class F>
void encode_block(const ChunkLists& lists, int list, int64_t first, int count, const float* from,
                  float scale, bool steps) {
  with_quantizer(lists.dtype[list], [&](auto quantizer) HD_LAMBDA {
    const F encoder(quantizer.encoder(scale)), offset(quantizer.offset(steps));
    const BitsOf<F> byte(0xffu);
    const auto quantized_at = [&](int i) HD_LAMBDA {
      const F x = load_vector<F>(from, DType::kFloat32, i);
      return quantizer.encode(x, encoder, offset) & byte;
    };
    int whole = 0;
    for (; whole + 4 * F::kWidth <= count; whole += 4 * F::kWidth) {
      const BitsOf<F> quantized[] = {quantized_at(whole), quantized_at(whole + F::kWidth),
                                     quantized_at(whole + 2 * F::kWidth),
                                     quantized_at(whole + 3 * F::kWidth)};
      F::store_bytes(lists.data[list] + first + whole, quantized);
    }
    for (int i = whole; i < count; i += F::kWidth) {
      const int n = count - i < F::kWidth ? count - i : F::kWidth;
      F::template Part<uint8_t>::store_first(lists.data[list] + first + i, quantized_at(i), n);
    }
  });
}

// Widens the `count` elements of a list from element `first` on.
template <class F>
void widen_list(const ChunkLists& lists, int list, int64_t first, int count, float* to) {
  if (is_state(list) && is_quantized(lists.dtype[list]))
    return decode_block<F>(lists, list, first, count, to);
  with_one_type(lists.dtype[list], [&](auto types) HD_LAMBDA {
    for_vectors<F>(count, [&](int i, int n, auto whole) HD_LAMBDA {
      const F x = load_list<F, decltype(whole)::value>(lists, types, list, first + i, n);
      store_vector(x, to, DType::kFloat32, i);
    });
  });
}

// Stores values of a list that are rounded to storage; `weight`: those of the model weights.
template <class F>
void narrow_list(const ChunkLists& lists, int list, int64_t first, int count, const float* from,
                 const float* weight, bool steps) {
  if (is_state(list) && is_quantized(lists.dtype[list])) {
    const float scale = scale_block<F>(lists, list, first, count, from);
    return encode_block<F>(lists, list, first, count, from, scale, steps);
  }
  const auto at = [](const float* floats, int i)
                      HD_LAMBDA { return load_vector<F>(floats, DType::kFloat32, i); };
  with_one_type(lists.dtype[list], [&](auto types) HD_LAMBDA {
    for_vectors<F>(count, [&](int i, int n, auto whole) HD_LAMBDA {
      store_list<F, decltype(whole)::value>(at(from, i), at(weight, i), lists, types, list,
                                            first + i, n);
    });
  });
}

// Runs the op on the `count` elements from `first` on, at most a block, and stores what it writes.
// No type is known: every list that is not FP32 goes through a stage. fetch(i) is called before
// each vector (see walk.h), after(i, count, whole, x) with what it becomes.
template <class F, class Op, class Fetch, class After>
HD void run_staged(const Op& op, const ChunkLists& lists, int64_t first, int count,
                   const Fetch& fetch, const After& after) {
  alignas(kCacheLine) static const float kZeros[kScaleBlock] = {};
  alignas(kCacheLine) float stage[kLists][kScaleBlock];
  const float* read[kLists];
  float* written[kLists];  // null: the row lacks the list
  UNROLL_LISTS
  for (int list = 0; list < kLists; ++list) {
    if (!((Op::kReads | Op::kWrites) & bit(list))) continue;
    const DType type = lists.dtype[list];
    // FP32 lists are used in place.
    written[list] = type == DType::kNone ? nullptr : stage[list];
    if (type == DType::kFloat32) written[list] = reinterpret_cast<float*>(lists.data[list]) + first;
    read[list] = written[list] ? written[list] : kZeros;
    if (written[list] == stage[list] && (Op::kReads & bit(list)))
      widen_list<F>(lists, list, first, count, stage[list]);
  }
  const AnyTypes types{lists.dtype};
  bool needs_rounding = false;
  for (int list = kParam; list < kState0 + kMaxStates; ++list)
    needs_rounding |= !is_plain(types(list)) && !is_quantized(types(list));
  for_vectors<F>(count, [&](int i, int n, auto whole) HD_LAMBDA {
    fetch(i);
    constexpr bool kWhole = decltype(whole)::value;
    constexpr DType kFloats = DType::kFloat32;
    F x[kLists];
    UNROLL_LISTS
    for (int list = 0; list < kLists; ++list) {
      x[list] = F(0.0f);
      if (Op::kReads & bit(list)) x[list] = load_vector<F, kWhole>(read[list], kFloats, i, n);
    }
    op(x);
    if (needs_rounding)
      round_to_storage<Op::kWrites>(x, types, lists.random_key, lists.random_first + first + i,
                                    F::count_up());
    UNROLL_LISTS
    for (int list = 0; list < kLists; ++list) {
      if (!(Op::kWrites & bit(list)) || !written[list]) continue;
      store_vector<kWhole>(x[list], written[list], kFloats, i, n);
    }
    after(first + i, n, whole, x);
  });
  const float* const weights = Op::kWrites & bit(kModel) ? stage[kModel] : kZeros;
  UNROLL_LISTS
  for (int list = 0; list < kLists; ++list) {
    if (Op::kWrites & bit(list) && written[list] == stage[list])
      narrow_list<F>(lists, list, first, count, stage[list], weights, kSteps<Op>);
  }
}

// Runs the op on the `count` elements from `first` on, at most a block, whose types are known
// except those of quantized lists: these are widened into floats before and narrowed after.
template <class F, unsigned kStored, bool kWhole, class Types, class Op, class Fetch, class After>
HD void run_block(const Op& op, const ChunkLists& given, int64_t first, int count,
                  const Fetch& fetch, const After& after) {
  constexpr unsigned kQuantizedStates = Types::kQuantizedStates;
  alignas(kCacheLine) float stage[kMaxStates][kScaleBlock];
  ChunkLists lists = given;
  UNROLL_LISTS
  for (int s = 0; s < kMaxStates; ++s) {
    if (!(kQuantizedStates & bit(kState0 + s))) continue;
    // Where the chunk's element 0 would be, so that element first + i is stage[s][i]. (As a number:
    // no pointer may point so far before an array.)
    const auto block = reinterpret_cast<uintptr_t>(stage[s]);
    lists.data[kState0 + s] = reinterpret_cast<char*>(block - uintptr_t(first) * sizeof(float));
    decode_block<F>(given, kState0 + s, first, count, stage[s]);
  }
  for_vectors<F>(kWhole ? kScaleBlock : count, [&](int i, int n, auto whole) HD_LAMBDA {
    fetch(i);
    F x[kLists];
    run_vector<F, decltype(whole)::value, kStored>(op, lists, typename Types::Widened(), first + i,
                                                   n, x);
    after(first + i, n, whole, x);
  });
  // All scales come before all quantized values: each waits for its block's largest and a division.
  float scale[kMaxStates];
  UNROLL_LISTS
  for (int s = 0; s < kMaxStates; ++s) {
    if (kQuantizedStates & kStored & bit(kState0 + s))
      scale[s] = scale_block<F>(given, kState0 + s, first, count, stage[s]);
  }
  UNROLL_LISTS
  for (int s = 0; s < kMaxStates; ++s) {
    if (kQuantizedStates & kStored & bit(kState0 + s))
      encode_block<F>(given, kState0 + s, first, count, stage[s], scale[s], kSteps<Op>);
  }
}

// Runs the op on all elements of a chunk: by vectors, or by blocks where a type asks for it.
// after(i, count, whole, x) gets what each vector becomes.
template <class F, unsigned kStored, class Op, class Types, class After>
HD void run_steps(const Op& op, const Walk& walk, const Types& types, unsigned fetched,
                  const After& after) {
  const ChunkLists lists = walk.lists;
  constexpr int kStep = Types::kByVectors ? F::kWidth : kScaleBlock;
  static_assert(kChunk % kScaleBlock == 0);
  for_steps<kStep, Prefetch<Op::kReads>>(
      walk, types, fetched, [&](int64_t i, int count, auto whole, const auto& fetch) HD_LAMBDA {
        constexpr bool kWhole = decltype(whole)::value;
        if constexpr (!Types::kKnown) {
          run_staged<F>(op, walk.lists, i, count, fetch, after);
        } else if constexpr (!Types::kByVectors) {
          run_block<F, kStored, kWhole, Types>(op, lists, i, count, fetch, after);
        } else {
          fetch(0);
          F x[kLists];
          run_vector<F, kWhole, kStored>(op, lists, types, i, count, x);
          after(i, count, whole, x);
        }
      });
}

}  // namespace
}  // namespace ampfuse
