// Between an op and the stores of what it left: the values as the row's types hold them, where that
// takes more than the value itself.
#pragma once

#include "core/table.h"

namespace ampfuse {

// `first`: of the elements x, counted from the first of the whole parameter; `lane`: each one's
// distance from it.
template <unsigned kStored, class F, class Types>
HD void settle(F (&x)[kLists], const Types& types, uint32_t row_key, int64_t first,
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
    const BitsOf<F> key(list_key(row_key, list, first));
    const BitsOf<F> random = hash((BitsOf<F>(uint32_t(first)) + lane) ^ key);
    if (first_is) x[list] = round_at_random(x[list], random);
    if (second_is) x[list + 1] = round_at_random(x[list + 1], shift_right<16>(random));
  }
  if (kStored & bit(kParam)) {
    with_split(types(kParam), [&](auto split) HD_LAMBDA {
      x[kParam] = split.limit(x[kParam]);
      x[kModel] = split.high(x[kParam]);
    });
  }
}

}  // namespace ampfuse
