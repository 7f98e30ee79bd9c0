// The plain C++ value: every machine has it, and every other instruction set gives its bits of
// every number. (A NaN stays one, with other bits.)
#pragma once

#include "core/dtype.h"
#include "core/scalar.h"

namespace ampfuse {

struct Scalar {
  static constexpr int kWidth = 1;
  float value;

  Scalar() = default;
  HD explicit Scalar(float v) : value(v) {}

  template <DType kType>
  struct Lanes {
    using Stored = typename Storage<kType>::Stored;
    static constexpr int64_t kSize = sizeof(Stored);
    HD static Stored load(const void* data) {
      Stored stored;
      std::memcpy(&stored, data, sizeof stored);
      return stored;
    }
    HD static void store(void* data, Stored stored) { std::memcpy(data, &stored, sizeof stored); }
    HD static Stored load_first(const void* data, int) { return load(data); }
    HD static void store_first(void* data, Stored stored, int) { store(data, stored); }
    HD static void stream(void* data, Stored stored) { store(data, stored); }
    HD static Scalar widen(Stored stored) { return Scalar(Storage<kType>::widen(stored)); }
    HD static Stored narrow(Scalar x) { return Storage<kType>::narrow(x.value); }
    HD static uint32_t differ(Stored a, Stored b) { return a != b; }
  };

  HD static uint32_t count_up() { return 0; }
  HD static void store_bytes(void* data, const uint32_t (&x)[4]) {
    for (int k = 0; k < 4; ++k) static_cast<uint8_t*>(data)[k] = uint8_t(x[k]);
  }

  // An integer that is stored as a smaller one.
  template <class Stored>
  struct Part {
    HD static uint32_t load(const void* data) {
      Stored stored;
      std::memcpy(&stored, data, sizeof stored);
      return uint32_t(int32_t(stored));
    }
    HD static void store(void* data, uint32_t bits) {
      const auto stored = Stored(bits);
      std::memcpy(data, &stored, sizeof stored);
    }
    HD static uint32_t load_first(const void* data, int) { return load(data); }
    HD static void store_first(void* data, uint32_t bits, int) { store(data, bits); }
  };

  struct Magnitude {
    uint32_t bits = 0;
    HD void include(Scalar x) {
      const uint32_t magnitude = float_bits(x.value) & 0x7fffffffu;
      if (magnitude > bits) bits = magnitude;
    }
    HD uint32_t reduce() const { return bits; }
  };
};

HD Scalar operator+(Scalar a, Scalar b) { return Scalar(a.value + b.value); }
HD Scalar operator-(Scalar a, Scalar b) { return Scalar(a.value - b.value); }
HD Scalar operator*(Scalar a, Scalar b) { return Scalar(a.value * b.value); }
HD Scalar operator/(Scalar a, Scalar b) { return Scalar(a.value / b.value); }
HD Scalar fma(Scalar a, Scalar b, Scalar c) {
  return Scalar(ampfuse::fma(a.value, b.value, c.value));
}
HD Scalar sqrt(Scalar a) { return Scalar(ampfuse::sqrt(a.value)); }
HD Scalar max_nan(Scalar a, Scalar b) { return Scalar(ampfuse::max_nan(a.value, b.value)); }
HD Scalar min_number(Scalar a, Scalar b) { return Scalar(ampfuse::min_number(a.value, b.value)); }
HD Scalar saturate(Scalar a) { return Scalar(ampfuse::saturate(a.value)); }
HD Scalar select_equal(Scalar a, Scalar b, Scalar then, Scalar otherwise) {
  return Scalar(ampfuse::select_equal(a.value, b.value, then.value, otherwise.value));
}

HD uint32_t bits_of(Scalar a) { return float_bits(a.value); }
HD Scalar from_bits(Scalar, uint32_t bits) { return Scalar(bits_float(bits)); }
HD Scalar to_float(Scalar, uint32_t a) { return Scalar(float(int32_t(a))); }

HD uint32_t above_zero(Scalar a) { return ampfuse::above_zero(a.value); }
HD uint32_t below(Scalar a, float bound) { return ampfuse::below(a.value, bound); }
HD Scalar keep(uint32_t bits, Scalar a) { return Scalar(ampfuse::keep(bits, a.value)); }

}  // namespace ampfuse
