// Exponentials and the logarithm, as one sequence of operations for every backend and vector
// width.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/hd.h"
#include "core/scalar.h"

namespace ampfuse {

// e^a = 2^n power, for magnitudes of a up to 2^17; NaN of NaN. power is within two units of FP32,
// and n an integer.
//
// a = n log(2) + r with |r| <= log(2) / 2, and e^r = 1 + r + r^2 q(r) with a minimax polynomial of
// degree 4. (Cody & Waite 1980.)
template <class F>
struct Exponential {
  F shifted, n, power;  // shifted: n + kRoundToInteger

  HD explicit Exponential(const F& a)
      : shifted(fma(a, F(1.44269504f), F(kRoundToInteger))), n(shifted - F(kRoundToInteger)) {
    const F r = fma(n, F(2.12194440e-4f), fma(n, F(-0.693359375f), a));
    F q = fma(F(1.38145984e-3f), r, F(8.36871690e-3f));
    q = fma(q, r, F(4.16683881e-2f));
    q = fma(q, r, F(1.66665206e-1f));
    q = fma(q, r, F(4.99999934e-1f));
    power = fma(fma(q, r, F(1.0f)), r, F(1.0f));
  }
};

// 2^n of an integer n from -2^22 to 127; zero below -126, where FP32 has no normal numbers left.
template <class F>
HD F power_of_two(const F& n) {
  using Bits = decltype(bits_of(n));
  const Bits exponent = bits_of(n + F(kRoundToInteger + 127.0f)) - bits_of(F(kRoundToInteger));
  return from_bits(n, shift_left<23>(max_signed(exponent, Bits(0u))));
}

// e^a within two units of FP32, for a that is not far above zero (at most 88); zero below -87.3,
// where FP32 has no normal numbers left; NaN of NaN.
template <class F>
HD F exponential(const F& a) {
  constexpr float kLeast = -87.33654f;
  const F bounded = max_nan(F(kLeast), a);
  const Exponential<F> e(bounded);
  using Bits = decltype(bits_of(a));
  const F scale = from_bits(a, shift_left<23>(bits_of(e.shifted) + Bits(127u)));
  return select_equal(bounded, F(kLeast), F(0.0f), e.power * scale);
}

// 2^w within two units of FP32, or with kShort within 2.9e-6 of itself, for w from -254 to 0; some
// smaller number where FP32 has no normal numbers left. It is cheaper than exponential(), for
// factors of something that is small there anyway. w = n + f with |f| <= 1 / 2, and n is added to
// the exponent.
template <bool kShort, class F>
HD F two_to(const F& w) {
  const F shifted = w + F(kRoundToInteger);
  const F f = w - (shifted - F(kRoundToInteger));
  F power;
  if constexpr (kShort) {
    power = fma(F(9.581047e-3f), f, F(5.590597e-2f));
    power = fma(power, f, F(2.4024145e-1f));
    power = fma(power, f, F(6.9312435e-1f));
  } else {
    power = fma(F(1.32647e-3f), f, F(9.67151e-3f));
    power = fma(power, f, F(5.550734e-2f));
    power = fma(power, f, F(2.4022242e-1f));
    power = fma(power, f, F(6.9314698e-1f));
  }
  power = fma(power, f, F(1.0f));
  using Bits = decltype(bits_of(w));
  const Bits bits = bits_of(power) + shift_left<23>(bits_of(shifted));
  return from_bits(w, max_signed(bits, Bits(0u)));
}

// log(x) of a normal x below 1.7e308, exact but for the last digit; -inf of zero. x itself if it is
// larger, negative or NaN.
HD double logarithm(double x) {
  if (!(x > 0.0) || !(x < 1.7e308)) return x == 0.0 ? -double(bits_float(kInfinityBits)) : x;
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  int exponent = int(bits >> 52) - 1023;
  bits = (bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull;
  double f;
  std::memcpy(&f, &bits, sizeof f);
  if (f > 1.4142135623730951) {
    f *= 0.5;
    ++exponent;
  }
  // log(f) = 2 artanh(s), of which s^23 is past the last digit.
  const double s = (f - 1.0) / (f + 1.0), square = s * s;
  double sum = 0.0;
  for (int n = 21; n > 0; n -= 2) sum = sum * square + 1.0 / double(n);
  return double(exponent) * 0.6931471805599453 + 2.0 * s * sum;
}

}  // namespace ampfuse
