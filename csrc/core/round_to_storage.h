// Rounding between an op and its stores, for types whose rounding takes more than the value itself:
// BF16 with stochastic rounding, and split masters.
#pragma once

#include "core/table.h"

namespace ampfuse {

constexpr uint32_t kMostLanes = 16;

// `first`: the first element of x, counted from the start of the whole parameter; `lane`: the
// distance of each element from it.
template <unsigned kStored, class F, class Types>
HD void round_to_storage(F (&x)[kLists], const Types& types, uint32_t row_key, int64_t first,
                         const BitsOf<F>& lane) {
  const auto is_random = [&](int list) HD_LAMBDA {
    return ((kStored & (bit(kParam) | kStates)) & bit(list)) &&
           types(list) == DType::kRandomBFloat16;
  };
  // Two lists share the halves of 32 random bits.
  UNROLL_LISTS
  for (int list = kParam; list < kState0 + kMaxStates; list += 2) {
    const bool first_is = is_random(list), second_is = is_random(list + 1);
    if (!first_is && !second_is) continue;
    const uint32_t high = uint32_t(first >> 32);
    const BitsOf<F> index = BitsOf<F>(uint32_t(first)) + lane;
    BitsOf<F> key(list_key(row_key, list, high));
    // A shard may begin anywhere: some elements are past a multiple of 2^32, and wrapped.
    if (uint32_t(first) > 0u - kMostLanes) {
      key = select_less(index, BitsOf<F>(0u), key, BitsOf<F>(list_key(row_key, list, high + 1)));
    }
    const BitsOf<F> random = hash(index ^ key);
    if (first_is) x[list] = stochastic_round(x[list], random);
    if (second_is) x[list + 1] = stochastic_round(x[list + 1], shift_right<16>(random));
  }
  if (kStored & bit(kParam)) {
    with_split(types(kParam), [&](auto split) HD_LAMBDA {
      x[kParam] = split.limit(x[kParam]);
      x[kModel] = split.high(x[kParam]);
    });
  }
}

}  // namespace ampfuse
