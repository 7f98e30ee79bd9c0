// Any mixture of types, a block at a time: each list is widened into floats by a loop that knows
// its type, the op runs over floats, and each list is narrowed again. So there is one loop of each
// op and one of each type, and none asks for types within.
#pragma once

#include "walk.h"

namespace ampfuse {
namespace {

// One list's type, and that of the model weights.
template <DType kType, DType kWeight>
struct OneType {
  HD constexpr DType operator()(int list) const { return list == kModel ? kWeight : kType; }
};

// Calls run(OneType) for a list that is there.
template <class Run>
HD void with_one_type(DType type, const Run& run) {
  with_split(type, [&](auto split) HD_LAMBDA {
    constexpr DType kWeight = decltype(split)::kWeight;
    constexpr bool kHalf = kWeight == DType::kFloat16;
    run(OneType<kHalf ? DType::kRestFloat16 : DType::kRestBFloat16, kWeight>());
  });
  if (type == DType::kSigned8) run(OneType<DType::kSigned8, DType::kNone>());
  if (type == DType::kUnsigned8) run(OneType<DType::kUnsigned8, DType::kNone>());
  if (is_plain(plain(type))) {
    with_storage(plain(type), [&](auto storage) HD_LAMBDA {
      constexpr DType kType = decltype(storage)::kType;
      run(OneType<kType, kType>());
    });
  }
}

// run(i, n, whole) for the vectors of `count` elements.
template <class F, class Run>
HD void for_vectors(int count, const Run& run) {
  int i = 0;
  for (; i + F::kWidth <= count; i += F::kWidth) run(i, F::kWidth, std::true_type());
  if (i < count) run(i, count - i, std::false_type());
}

// Widens the `count` elements of a list from element `first` on.
template <class F>
void widen_list(const ChunkLists& lists, int list, int64_t first, int count, float* to) {
  with_one_type(lists.dtype[list], [&](auto types) HD_LAMBDA {
    for_vectors<F>(count, [&](int i, int n, auto whole) HD_LAMBDA {
      const F x = load<F, decltype(whole)::value>(lists, types, list, first + i, n);
      store_vector(x, to, DType::kFloat32, i);
    });
  });
}

// Stores settled values of a list; `weight`: those of the model weights.
template <class F>
void narrow_list(const ChunkLists& lists, int list, int64_t first, int count, const float* from,
                 const float* weight) {
  const auto at = [](const float* floats, int i)
                      HD_LAMBDA { return load_vector<F>(floats, DType::kFloat32, i); };
  with_one_type(lists.dtype[list], [&](auto types) HD_LAMBDA {
    for_vectors<F>(count, [&](int i, int n, auto whole) HD_LAMBDA {
      store<F, decltype(whole)::value>(at(from, i), at(weight, i), lists, types, list, first + i,
                                       n);
    });
  });
  if (!is_state(list)) return;
  with_code(lists.dtype[list], [&](auto code) HD_LAMBDA {
    typename F::Magnitude largest;
    for_vectors<F>(count, [&](int i, int n, auto whole) HD_LAMBDA {
      // What an op makes of the lanes past the end is no part of the block.
      largest.include(whole ? at(from, i) : keep((1u << n) - 1, at(from, i)));
    });
    const float scale = code.scale(largest.reduce());
    lists.scales[list - kState0][first / kBlock] = scale;
    const F encoder(code.encoder(scale));
    for_vectors<F>(count, [&](int i, int n, auto whole) HD_LAMBDA {
      store_integers<F, uint8_t, decltype(whole)::value>(code.encode(at(from, i), encoder),
                                                         lists.data[list], first + i, n);
    });
  });
}

// Runs the op on the `count` elements from `first` on, at most a block, and stores what it writes;
// take(i, count, whole, x) has each vector with what the op left.
template <class F, class Op, class Take>
HD void run_staged(const Op& op, const ChunkLists& lists, int64_t first, int count,
                   const Take& take) {
  alignas(kCacheLine) static const float kZeros[kBlock] = {};
  alignas(kCacheLine) float stage[kLists][kBlock];
  const float* read[kLists];
  float* written[kLists];  // null: the row lacks the list
  UNROLL_LISTS
  for (int list = 0; list < kLists; ++list) {
    if (!((Op::kReads | Op::kWrites) & bit(list))) continue;
    const DType type = lists.dtype[list];
    // FP32 lists are where they are.
    written[list] = type == DType::kNone ? nullptr : stage[list];
    if (type == DType::kFloat32) written[list] = reinterpret_cast<float*>(lists.data[list]) + first;
    read[list] = written[list] ? written[list] : kZeros;
    if (written[list] == stage[list] && (Op::kReads & bit(list)))
      widen_list<F>(lists, list, first, count, stage[list]);
  }
  const AnyTypes types{lists.dtype};
  bool settles = false;
  for (int list = kParam; list < kState0 + kMaxStates; ++list)
    settles |= !is_plain(types(list)) && !is_code(types(list));
  for_vectors<F>(count, [&](int i, int n, auto whole) HD_LAMBDA {
    constexpr bool kWhole = decltype(whole)::value;
    constexpr DType kFloats = DType::kFloat32;
    F x[kLists];
    UNROLL_LISTS
    for (int list = 0; list < kLists; ++list) {
      x[list] = F(0.0f);
      if (Op::kReads & bit(list))
        x[list] = load_plain<F, kWhole>(reinterpret_cast<const char*>(read[list]), kFloats, i, n);
    }
    op(x);
    if (settles)
      settle<Op::kWrites>(x, types, lists.random_key, lists.random_first + first + i,
                          F::count_up());
    UNROLL_LISTS
    for (int list = 0; list < kLists; ++list) {
      if (!(Op::kWrites & bit(list)) || !written[list]) continue;
      if (kWhole) {
        store_vector(x[list], written[list], kFloats, i);
      } else {
        store_first(x[list], written[list], kFloats, i, n);
      }
    }
    take(first + i, n, whole, x);
  });
  UNROLL_LISTS
  for (int list = 0; list < kLists; ++list) {
    if (Op::kWrites & bit(list) && written[list] == stage[list])
      narrow_list<F>(lists, list, first, count, stage[list], stage[kModel]);
  }
}

}  // namespace
}  // namespace ampfuse
