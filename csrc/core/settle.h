// Between an op and the stores of what it left: the values as the row's types hold them, where that
// takes more than the value itself.
#pragma once

#include "core/table.h"

namespace ampfuse {

// `first`: of the elements x, counted from the row's first; `lane`: each one's distance from it.
template <unsigned kStored, class F, class Types>
HD void settle(F (&x)[kLists], const Types& types, uint32_t row_key, int64_t first,
               const BitsOf<F>& lane) {
  UNROLL_LISTS
  for (int list = 0; list < kLists; ++list) {
    if (!(kStored & (bit(kParam) | kStates) & bit(list))) continue;
    if (types(list) != DType::kRandomBFloat16) continue;
    const BitsOf<F> key(list_key(row_key, list, first));
    x[list] = round_at_random(x[list], hash((BitsOf<F>(uint32_t(first)) + lane) ^ key));
  }
  if (kStored & bit(kParam)) {
    with_split(types(kParam), [&](auto split) HD_LAMBDA {
      x[kParam] = split.limit(x[kParam]);
      x[kModel] = split.high(x[kParam]);
    });
  }
}

}  // namespace ampfuse
