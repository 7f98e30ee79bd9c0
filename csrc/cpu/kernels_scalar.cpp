// Plain C++: every machine has it, and every other instruction set must give its bits.
#include "apply.h"

namespace ampfuse {
namespace {

struct Scalar {
  static constexpr int kWidth = 1;
  float value;

  Scalar() = default;
  HD explicit Scalar(float v) : value(v) {}

  HD static Scalar load(const void* data, DType dtype, int64_t i) {
    return Scalar(dtype == DType::kNone ? 0.0f : load_float(data, dtype, i));
  }
  HD static Scalar load_partial(const void* data, DType dtype, int64_t i, int) {
    return load(data, dtype, i);
  }
  HD void store(void* data, DType dtype, int64_t i) const {
    if (dtype != DType::kNone) store_float(data, dtype, i, value);
  }
  HD void stream(void* data, DType dtype, int64_t i) const { store(data, dtype, i); }
  HD void store_partial(void* data, DType dtype, int64_t i, int) const { store(data, dtype, i); }

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
HD Scalar round_to(DType dtype, Scalar a) { return Scalar(ampfuse::round_to(dtype, a.value)); }
HD Scalar select_equal(Scalar a, Scalar b, Scalar then, Scalar otherwise) {
  return Scalar(ampfuse::select_equal(a.value, b.value, then.value, otherwise.value));
}

}  // namespace

const CpuKernels kScalarKernels = make_kernels<Scalar>("scalar");

}  // namespace ampfuse
