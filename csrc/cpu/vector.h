// The operations that the harness needs on a SIMD value, made from those of an instruction set.
//
// A value F has kWidth floats, arithmetic, and for each storage type a F::Lanes<DType>: `Stored`, a
// vector as it lies in memory; load() and store(); load_first() and store_first() of fewer
// elements, which touch nothing past them; stream(), past the caches, aligned; widen() and
// narrow(); differ(), a bit for each element whose stored bits do.
#pragma once

#include <type_traits>

#include "core/dtype.h"

namespace ampfuse {

template <class Lanes>
HD char* element(const void* data, int64_t i) {
  return const_cast<char*>(static_cast<const char*>(data)) + i * Lanes::kSize;
}

// load_first() and store_first() for instruction sets without masks: through a buffer, so that
// nothing past the tensor is touched. `Lanes` inherits it.
template <class Lanes>
struct FirstByBuffer {
  template <class Stored>
  HD static void store_first(void* data, Stored stored, int count) {
    alignas(32) char buffer[32];
    Lanes::store(buffer, stored);
    __builtin_memcpy(data, buffer, size_t(count) * Lanes::kSize);
  }
  HD static auto load_first(const void* data, int count) {
    alignas(32) char buffer[32] = {};
    __builtin_memcpy(buffer, data, size_t(count) * Lanes::kSize);
    return Lanes::load(buffer);
  }
};

// Calls run(i, n, whole) for the vectors of `count` elements: the first one's index, how many
// elements it has, and true_type if these are F::kWidth.
template <class F, class Count, class Run>
HD void for_vectors(Count count, const Run& run) {
  Count i = 0;
  for (; i + F::kWidth <= count; i += F::kWidth) run(i, F::kWidth, std::true_type());
  if (i < count) run(i, int(count - i), std::false_type());
}

// Calls run(Lanes) unless the list is absent.
template <class F, class Run>
HD void with_lanes(DType dtype, const Run& run) {
  with_storage(dtype, [&](auto storage) HD_LAMBDA {
    run(typename F::template Lanes<decltype(storage)::kType>());
  });
}

// The elements of an absent list are zero, and are not stored. `count`: how many there are, if it
// is not a whole vector.
template <class F, bool kWhole = true>
HD F load_vector(const void* data, DType dtype, int64_t i, int count = F::kWidth) {
  F x(0.0f);
  with_lanes<F>(dtype, [&](auto lanes) HD_LAMBDA {
    const char* from = element<decltype(lanes)>(data, i);
    x = lanes.widen(kWhole ? lanes.load(from) : lanes.load_first(from, count));
  });
  return x;
}

template <bool kWhole = true, class F>
HD void store_vector(const F& x, void* data, DType dtype, int64_t i, int count = F::kWidth) {
  with_lanes<F>(dtype, [&](auto lanes) HD_LAMBDA {
    char* to = element<decltype(lanes)>(data, i);
    kWhole ? lanes.store(to, lanes.narrow(x)) : lanes.store_first(to, lanes.narrow(x), count);
  });
}

template <class F>
HD void stream_vector(const F& x, void* data, DType dtype, int64_t i) {
  with_lanes<F>(dtype, [&](auto lanes) HD_LAMBDA {
    lanes.stream(element<decltype(lanes)>(data, i), lanes.narrow(x));
  });
}

// A bit for each element, set where a and b, stored as `dtype`, differ.
template <class F, int = F::kWidth>
HD uint32_t differ_as(DType dtype, const F& a, const F& b) {
  uint32_t bits = 0;
  with_lanes<F>(
      dtype, [&](auto lanes) HD_LAMBDA { bits = lanes.differ(lanes.narrow(a), lanes.narrow(b)); });
  return bits;
}

// The values that storing as `dtype` and loading again gives.
template <class F, int = F::kWidth>
HD F round_to(DType dtype, F x) {
  with_lanes<F>(dtype, [&](auto lanes) HD_LAMBDA { x = lanes.widen(lanes.narrow(x)); });
  return x;
}

}  // namespace ampfuse
