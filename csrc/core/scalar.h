// The value type of device code and of the scalar CPU backend: plain float, with the same functions
// as the SIMD values, so that an op is written once for all of them.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/dtype.h"
#include "core/hd.h"

namespace ampfuse {

HD float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

HD float sqrt(float a) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(a);
#else
  return __builtin_sqrtf(a);
#endif
}

// 1 / (sqrt(v) + eps) of a second moment, which each element of an update multiplies by.
template <class F>
HD F reciprocal_of_root(const F& v, float eps) {
  return F(1.0f) / (sqrt(v) + F(eps));
}

// 1 / b, correctly rounded, if b and it are normal numbers. (A product with it is cheaper than a
// quotient. On a GPU by the instructions that nvcc generates, without its branch to a slow path
// that is right for all values.)
HD float reciprocal_of_normal(float b) {
#if defined(__CUDA_ARCH__)
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
  return fma(fma(-b, inverse, 1.0f), inverse, inverse);
#else
  return 1.0f / b;
#endif
}
template <class F>
HD F reciprocal_of_normal(const F& b) {
  return F(1.0f) / b;
}

HD double square_root(double a) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(a);
#else
  return __builtin_sqrt(a);
#endif
}

// The larger of two values; NaN if either is, as torch.maximum.
HD float max_nan(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
#else
  return a > b || a != a ? a : b;
#endif
}

// The smaller of two values, or the second if the first is NaN.
HD float min_number(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fminf(a, b);
#else
  return a < b ? a : b;
#endif
}
HD float absolute(float a) { return __builtin_fabsf(a); }
// Limited to [0, 1]; zero if it is NaN.
HD float saturate(float a) {
#if defined(__CUDA_ARCH__)
  return __saturatef(a);
#else
  return a > 0 ? (a < 1 ? a : 1.0f) : 0.0f;
#endif
}

// `then` where a equals b, else `otherwise`.
HD float select_equal(float a, float b, float then, float otherwise) {
  return a == b ? then : otherwise;
}

// Adding it rounds to an integer, for magnitudes below 2^22, and leaves that in the lower bits.
constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23

// The bits of a value, and arithmetic on them: for float, plain integers.
HD uint32_t bits_of(float a) { return float_bits(a); }
HD float from_bits(float, uint32_t bits) { return bits_float(bits); }
template <int kCount>
HD uint32_t shift_left(uint32_t a) {
  return a << kCount;
}
template <int kCount>
HD uint32_t shift_right(uint32_t a) {
  return a >> kCount;
}
HD uint32_t max_signed(uint32_t a, uint32_t b) { return int32_t(a) > int32_t(b) ? a : b; }
// The bits of a where the mask has ones, else those of b.
HD uint32_t blend(uint32_t mask, uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  // (With a constant mask, the compiler makes two instructions of the expression.)
  uint32_t blended;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(blended) : "r"(mask), "r"(a), "r"(b));
  return blended;
#else
  return b ^ ((a ^ b) & mask);
#endif
}
// As a signed integer, which a float holds exactly.
HD float to_float(float, uint32_t a) { return float(int32_t(a)); }
// `then` where a < b as signed integers, else `otherwise`.
HD uint32_t select_less(uint32_t a, uint32_t b, uint32_t then, uint32_t otherwise) {
  return int32_t(a) < int32_t(b) ? then : otherwise;
}

// A bit for each element (of a float, one): set where it is above zero or NaN, as a ReLU passes it.
HD uint32_t above_zero(float a) { return !(a <= 0.0f); }

// Zero where the bit is not set.
HD float keep(uint32_t bits, float a) { return bits & 1 ? a : 0.0f; }

// A bit for each element, set where a and b, stored as `dtype`, differ.
HD uint32_t differ_as(DType dtype, float a, float b) {
  uint32_t bits = 0;
  with_storage(dtype,
               [&](auto storage) HD_LAMBDA { bits = storage.narrow(a) != storage.narrow(b); });
  return bits;
}

// A bit for each element, set where the magnitude is below `bound`.
HD uint32_t below(float a, float bound) {
  return (float_bits(a) & 0x7fffffffu) < float_bits(bound);
}

// The value that storing as `dtype` and loading again gives.
HD float round_to(DType dtype, float a) {
  with_storage(dtype, [&](auto storage) HD_LAMBDA { a = storage.widen(storage.narrow(a)); });
  return a;
}

}  // namespace ampfuse
