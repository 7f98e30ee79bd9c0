// What a metered pass counts in a chunk, vector by vector. See core/meter.h.
#pragma once

#include "core/metered.h"
#include "vector.h"

namespace ampfuse {
namespace {

struct Counts {
  uint32_t changed = 0, moved = 0, zero = 0, tiny = 0;
  uint32_t exponents[kExponentBins] = {};
  uint8_t* bits;  // of changed weights, or null

  // Adds those of `number` elements to the row's, which other threads may add to.
  HD void add_to(uint32_t* counts, uint32_t number) const {
    const auto add = [&](int i, uint32_t count) {
      if (count != 0) __atomic_fetch_add(counts + i, count, __ATOMIC_RELAXED);
    };
    add(kElements, number);
    add(kChanged, changed);
    add(kStale, moved - changed);
    add(kZero, zero);
    add(kSubnormal, tiny - zero);
    for (int bin = 0; bin < kExponentBins; ++bin) add(kExponents + bin, exponents[bin]);
  }
};

// Writes the bits of `count` elements from i on. A narrow value leaves the rest of a byte to the
// next one.
template <int kWidth>
HD void store_marks(uint32_t marks, uint8_t* bits, int64_t i, int count) {
  if constexpr (kWidth < 8) {
    const uint8_t before = i % 8 == 0 ? 0 : bits[i / 8];
    bits[i / 8] = uint8_t(before | marks << i % 8);
  } else {
    for (int byte = 0; 8 * byte < count; ++byte) bits[i / 8 + byte] = uint8_t(marks >> 8 * byte);
  }
}

// Counts what Op, which is metered, left in x. Zeroes the lanes past the last element, which would
// be measured too.
template <class F, bool kWhole, class Op, class Types>
HD void count_vector(const Types& types, int64_t i, int count, F (&x)[kLists], Counts& counts) {
  const uint32_t there = kWhole ? ~0u : (1u << count) - 1;
  const DType param = types(kParam), half = types(kModel) != DType::kNone ? types(kModel) : param;
  const Marks marks = Op::marks(x, plain(half), param, types(kGrad)).within(there);
  counts.changed += uint32_t(__builtin_popcount(marks.changed));
  counts.moved += uint32_t(__builtin_popcount(marks.moved));
  counts.zero += uint32_t(__builtin_popcount(marks.zero));
  counts.tiny += uint32_t(__builtin_popcount(marks.tiny));
  if (counts.bits != nullptr) store_marks<F::kWidth>(marks.changed, counts.bits, i, count);
  if (is_sampled(i)) {
    float gradient[F::kWidth];
    store_vector(x[kGrad], gradient, DType::kFloat32, 0);
    for (int k = 0; k < count; ++k) ++counts.exponents[exponent_bin(gradient[k])];
  }
  if constexpr (!kWhole) {
    x[kUpdate] = keep(there, x[kUpdate]);
    x[kParam] = keep(there, x[kParam]);
  }
}

}  // namespace
}  // namespace ampfuse
