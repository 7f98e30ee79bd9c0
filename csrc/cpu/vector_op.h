// Runs an op on a vector of F: loads of a chunk's lists in any plain type and of split masters, and
// the stores.
#pragma once

#include "chunk_lists.h"
#include "core/round_to_storage.h"
#include "vector.h"

namespace ampfuse {
namespace {

// Elements that are integers.
template <class F, class Stored, bool kWhole>
HD BitsOf<F> load_integers(const char* data, int64_t i, int count) {
  using Part = typename F::template Part<Stored>;
  const char* address = data + i * int64_t(sizeof(Stored));
  return kWhole ? Part::load(address) : Part::load_first(address, count);
}

template <class F, class Stored, bool kWhole>
HD void store_integers(const BitsOf<F>& bits, char* data, int64_t i, int count) {
  using Part = typename F::template Part<Stored>;
  char* address = data + i * int64_t(sizeof(Stored));
  kWhole ? Part::store(address, bits) : Part::store_first(address, bits, count);
}

template <class F, bool kWhole, class Types>
HD F load_list(const ChunkLists& lists, const Types& types, int list, int64_t i, int count) {
  const DType type = types(list);
  char* data = lists.data[list];
  F x(0.0f);
  if (list == kParam && is_remainder(type)) {
    const F high = load_vector<F, kWhole>(lists.data[kModel], types(kModel), i, count);
    with_split(type, [&](auto split) HD_LAMBDA {
      x = split.join(high, load_integers<F, int16_t, kWhole>(data, i, count));
    });
  } else {
    x = load_vector<F, kWhole>(data, plain(type), i, count);
  }
  return x;
}

// Stores a value that is rounded to storage; `weight`: its model weight.
template <class F, bool kWhole, class Types>
HD void store_list(const F& x, const F& weight, const ChunkLists& lists, const Types& types,
                   int list, int64_t i, int count) {
  const DType type = types(list);
  char* data = lists.data[list];
  if (list == kParam && is_remainder(type)) {
    with_split(type, [&](auto split) HD_LAMBDA {
      store_integers<F, int16_t, kWhole>(split.remainder(x, weight), data, i, count);
    });
  } else if (list == kModel && types(kParam) == DType::kRemainderBFloat16) {
    // It has no digits to round.
    store_integers<F, int16_t, kWhole>(shift_right<16>(bits_of(x)), data, i, count);
  } else {
    store_vector<kWhole>(x, data, plain(type), i, count);
  }
}

// Runs the op on `count` elements from i on, a vector of them if kWhole, and stores the lists of
// kStored. x ends as what the op left.
template <class F, bool kWhole, unsigned kStored, class Op, class Types>
HD void run_vector(const Op& op, const ChunkLists& lists, const Types& types, int64_t i, int count,
                   F (&x)[kLists]) {
  UNROLL_LISTS
  for (int list = 0; list < kLists; ++list) {
    x[list] = Op::kReads & bit(list) ? load_list<F, kWhole>(lists, types, list, i, count) : F(0.0f);
  }
  op(x);
  round_to_storage<Op::kWrites>(x, types, lists.random_key, lists.random_first + i, F::count_up());
  UNROLL_LISTS
  for (int list = 0; list < kLists; ++list) {
    if (kStored & bit(list))
      store_list<F, kWhole>(x[list], x[kModel], lists, types, list, i, count);
  }
}

}  // namespace
}  // namespace ampfuse
