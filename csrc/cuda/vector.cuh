// The value type of a thread's neighbouring elements, with the functions of scalar.h: a branch is
// taken once for all of them, and their arithmetic, long chains each, runs in parallel.
#pragma once

#include "core/quantized.h"
#include "core/scalar.h"

namespace ampfuse {

template <class T, int kWidth>
struct Vector {
  T lane[kWidth];

  Vector() = default;
  HD explicit Vector(T value) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) lane[k] = value;
  }
  // run(k) of each lane.
  template <class Run>
  HD static Vector of(const Run& run) {
    Vector made;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) made.lane[k] = run(k);
    return made;
  }
  // A bit for each lane, of what run(k) gives.
  template <class Run>
  HD static uint32_t mask_of(const Run& run) {
    uint32_t mask = 0;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) mask |= uint32_t(run(k)) << k;
    return mask;
  }
};

// A function of scalar.h, or an operator.
#define AMPFUSE_LANEWISE(name)                                                                  \
  template <class T, int kWidth, class... More>                                                 \
  HD auto name(const Vector<T, kWidth>& a, const Vector<More, kWidth>&... more) {               \
    using Result = decltype(name(a.lane[0], more.lane[0]...));                                  \
    return Vector<Result, kWidth>::of([&](int k) { return name(a.lane[k], more.lane[k]...); }); \
  }
AMPFUSE_LANEWISE(fma)
AMPFUSE_LANEWISE(reciprocal_of_normal)
AMPFUSE_LANEWISE(max_nan)
AMPFUSE_LANEWISE(absolute)
AMPFUSE_LANEWISE(min_number)
AMPFUSE_LANEWISE(saturate)
AMPFUSE_LANEWISE(select_equal)
AMPFUSE_LANEWISE(bits_of)
AMPFUSE_LANEWISE(from_bits)
AMPFUSE_LANEWISE(to_float)
AMPFUSE_LANEWISE(max_signed)
AMPFUSE_LANEWISE(blend)
AMPFUSE_LANEWISE(select_less)
#undef AMPFUSE_LANEWISE

#define AMPFUSE_LANEWISE(op)                                                                 \
  template <class T, int kWidth>                                                             \
  HD Vector<T, kWidth> operator op(const Vector<T, kWidth>& a, const Vector<T, kWidth>& b) { \
    return Vector<T, kWidth>::of([&](int k) { return a.lane[k] op b.lane[k]; });             \
  }
AMPFUSE_LANEWISE(+)
AMPFUSE_LANEWISE(-)
AMPFUSE_LANEWISE(*)
AMPFUSE_LANEWISE(&)
AMPFUSE_LANEWISE(|)
AMPFUSE_LANEWISE(^)
#undef AMPFUSE_LANEWISE

template <int kCount, int kWidth>
HD Vector<uint32_t, kWidth> shift_left(const Vector<uint32_t, kWidth>& a) {
  return Vector<uint32_t, kWidth>::of([&](int k) { return a.lane[k] << kCount; });
}
template <int kCount, int kWidth>
HD Vector<uint32_t, kWidth> shift_right(const Vector<uint32_t, kWidth>& a) {
  return Vector<uint32_t, kWidth>::of([&](int k) { return a.lane[k] >> kCount; });
}

template <int kWidth>
HD Vector<float, kWidth> round_to(DType dtype, Vector<float, kWidth> a) {
  with_storage(dtype, [&](auto storage) {
    a = a.of([&](int k) { return storage.widen(storage.narrow(a.lane[k])); });
  });
  return a;
}
template <int kWidth>
HD uint32_t differ_as(DType dtype, const Vector<float, kWidth>& a, const Vector<float, kWidth>& b) {
  uint32_t mask = 0;
  with_storage(dtype, [&](auto storage) {
    mask = a.mask_of([&](int k) { return storage.narrow(a.lane[k]) != storage.narrow(b.lane[k]); });
  });
  return mask;
}
template <int kWidth>
HD uint32_t below(const Vector<float, kWidth>& a, float bound) {
  return a.mask_of([&](int k) { return below(a.lane[k], bound); });
}
template <int kWidth>
HD uint32_t above_zero(const Vector<float, kWidth>& a) {
  return a.mask_of([&](int k) { return above_zero(a.lane[k]); });
}
template <int kWidth>
HD Vector<float, kWidth> keep(uint32_t bits, const Vector<float, kWidth>& a) {
  return a.of([&](int k) { return keep(bits >> k, a.lane[k]); });
}

// Whether all magnitudes are in [2^-kExponent, 2^kExponent).
template <int kExponent, int kWidth>
HD bool magnitudes_within(const Vector<float, kWidth>& a) {
  constexpr uint32_t kLow = uint32_t(127 - kExponent) << 24, kSpan = uint32_t(2 * kExponent) << 24;
  bool all = true;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) all = all & ((float_bits(a.lane[k]) << 1) - kLow < kSpan);
  return all;
}

// Division by the instructions that nvcc generates for it, with one branch for all lanes. In the
// ranges checked for, no step over- or underflows, and nvcc's own check lets them pass.
template <int kWidth>
HD Vector<float, kWidth> operator/(const Vector<float, kWidth>& a, const Vector<float, kWidth>& b) {
#if defined(__CUDA_ARCH__)
  if (kWidth > 1 && magnitudes_within<80>(a) && magnitudes_within<40>(b)) {
    return a.of([&](int k) {
      const float over = a.lane[k], under = b.lane[k];
      const float inverse = reciprocal_of_normal(under), near = over * inverse;
      return fma(fma(-under, near, over), inverse, near);
    });
  }
#endif
  return a.of([&](int k) { return a.lane[k] / b.lane[k]; });
}
// The same for 1 / (sqrt(v) + eps) of an update. The second moments of an embedding's rows without
// a gradient are zero, for which rsqrt() would be infinite: 2^-126 is added, which makes it finite
// and is lost in rounding for every v of at least 2^-101.
template <int kWidth>
HD Vector<float, kWidth> reciprocal_of_root(const Vector<float, kWidth>& v, float eps) {
#if defined(__CUDA_ARCH__)
  constexpr uint32_t kLeast = 0x0d000000u;  // 2^-101
  uint32_t most = 0, least = ~0u;           // `least`: of the bits less one, so that zero passes
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    most = max(most, float_bits(v.lane[k]));
    least = min(least, float_bits(v.lane[k]) - 1);
  }
  if (most < kInfinityBits && least >= kLeast - 1 && eps >= 0x1p-126f && eps <= 0x1p100f) {
    return v.of([&](int k) {
      float inverse;
      asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(v.lane[k] + 0x1p-126f));
      const float near = v.lane[k] * inverse;
      return reciprocal_of_normal(fma(fma(-near, near, v.lane[k]), inverse * 0.5f, near) + eps);
    });
  }
#endif
  return v.of([&](int k) { return 1.0f / (sqrt(v.lane[k]) + eps); });
}

}  // namespace ampfuse
