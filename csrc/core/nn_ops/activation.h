// GELU, its tanh form and SiLU, with the bias before them and the gate's product after them.
//
//   forward    z = x + bias;  y = f(z), gated: f(z) * up
//   backward   dx = dy * up * f'(z);  dup = dy * f(z);  dbias = the sum of dx over the rows
//
// All three are f(z) = z * P(z) with a P from 0 to 1 (Hendrycks & Gimpel 2016; Elfwing et al. 2017;
// gates: Shazeer 2020). P comes from e^-s, s >= 0, and is computed for z <= 0 only, so that nothing
// overflows and the tail keeps its digits, which 1 + erf(z / sqrt(2)) and 1 + tanh(u) lose. For
// FP16 and BF16, P is exact to 2^-16 of itself, by polynomials of a degree less.
//
// Bytes moved per element of half precision: forward 4, gated 6; backward 6, gated 10. The bias
// costs none: a product of matrices need not add it, and its gradient needs no pass of its own.
#pragma once

#include "core/exponent.h"
#include "core/nn_ops/nn_op.h"

namespace ampfuse {

// f(z) and f'(z).
template <class F>
struct Point {
  F value, slope;
};

// -|z|, at least `least`, where P is zero; NaN of NaN.
template <class F>
HD F left_of_zero(const F& z, float least) {
  using Bits = decltype(bits_of(z));
  return max_nan(F(least), from_bits(z, bits_of(z) | Bits(0x80000000u)));
}

// From m = -|z| to z: f(z) = max(z, 0) + m P(m) and f'(z) = 1 - f'(-z).
template <class F>
HD Point<F> mirrored(const F& z, const F& m, const F& p, const F& slope) {
  using Bits = decltype(bits_of(z));
  const F positive = from_bits(z, max_signed(bits_of(z), Bits(0u)));
  const Bits right = bits_of(F(1.0f) - slope);
  return {fma(m, p, positive),
          from_bits(z, select_less(bits_of(z), Bits(0u), bits_of(slope), right))};
}

// P(z) = 1 / (1 + 2^-w) with w = z (c + d z^2), which is 2^w / (1 + 2^w).
template <bool kHalf, class F>
HD Point<F> sigmoid_point(const F& z, float least, float c, float d) {
  const F m = left_of_zero(z, least), square = m * m;
  const F w = d == 0.0f ? m * F(c) : m * fma(square, F(d), F(c));
  const F e = two_to<kHalf>(w);
  const F p = e * reciprocal_of_normal(F(1.0f) + e);
  constexpr float kLog2 = 0.693147181f;
  const F du = d == 0.0f ? m : m * fma(square, F(3.0f * d * kLog2), F(c * kLog2));
  return mirrored(z, m, p, fma(p, du * (F(1.0f) - p), p));
}

struct Silu {
  static constexpr const char* kName = "silu";
  template <bool kHalf, class F>
  HD static Point<F> at(const F& z) {
    return sigmoid_point<kHalf>(z, -128.0f, 1.44269504f, 0.0f);
  }
};

// (1 + tanh(v)) / 2 = 1 / (1 + e^-2v) with v = sqrt(2 / pi) (z + 0.044715 z^3).
struct GeluTanh {
  static constexpr const char* kName = "gelu_tanh";
  template <bool kHalf, class F>
  HD static Point<F> at(const F& z) {
    return sigmoid_point<kHalf>(z, -12.0f, 2.3022082f, 0.102943240f);
  }
};

// P is the distribution of a normal variable: of m it is e^(-m^2 / 2) q(m) with a rational q,
// fitted to 1.5e-7 of itself down to m = -3, to 3e-6 where P is 1e-38. For half types to 1.5e-5
// down to m = -5.8, where FP16 has no numbers left, to 3e-4 where P is 1e-38.
struct Gelu {
  static constexpr const char* kName = "gelu";
  template <bool kHalf, class F>
  HD static Point<F> at(const F& z) {
    const F m = left_of_zero(z, -18.0f);
    const F e = two_to<kHalf>(m * m * F(-0.72134752f));
    F above, below;
    if constexpr (kHalf) {
      above = fma(F(-0.39970911f), m, F(1.83514953f));
      above = fma(above, m, F(-3.41651559f));
      below = m + F(-4.64637518f);
      below = fma(below, m, F(9.12553120f));
      below = fma(below, m, F(-6.83292961f));
    } else {
      above = fma(F(-0.398843616f), m, F(2.92339778f));
      above = fma(above, m, F(-9.10329533f));
      above = fma(above, m, F(13.0518703f));
      below = m + F(-7.31933975f);
      below = fma(below, m, F(23.9415321f));
      below = fma(below, m, F(-39.034153f));
      below = fma(below, m, F(26.1037445f));
    }
    const F q = above * reciprocal_of_normal(below);
    return mirrored(z, m, e * q, e * fma(F(0.398942280f), m, q));
  }
};

struct Activation {
  // The bias, which may be absent, is that of NnArgs' affine.
  HD static float bias_of(const NnArgs& args, int64_t c) {
    const NnArgs::Affine& affine = args.affine;
    return affine.bias ? load_float(affine.bias, affine.dtype, c) : 0.0f;
  }
};

template <class Curve>
struct ActivationForward : ChannelMap, Activation {
  static constexpr const char* kName = Curve::kName;
  enum Image { kX, kUp, kY };
  static constexpr unsigned kReads = bit(kX) | bit(kUp), kWrites = bit(kY), kOptional = bit(kUp);
  static constexpr int kCoefs = 1;

  template <unsigned kUsed>
  HD static void coefs(const NnArgs& args, int64_t, int64_t c, float (&coef)[kCoefs]) {
    coef[0] = bias_of(args, c);
  }

  template <unsigned kUsed, class F>
  HD static void apply(F (&x)[kMaxImages], const F (&coef)[kCoefs], uint32_t&) {
    const F z = x[kX] + coef[0];
    F y = Curve::template at<(kUsed & kHalfImages) != 0>(z).value;
    if constexpr (kUsed & bit(kUp)) y = y * x[kUp];
    x[kY] = y;
  }
};

// dx may be dy.
template <class Curve>
struct ActivationBackward : ChannelSum, Activation {
  static constexpr const char* kName = Curve::kName;
  enum Image { kX, kDy, kUp, kDx, kDup };
  enum Vector { kDbias };  // may be absent
  static constexpr unsigned kReads = bit(kX) | bit(kDy) | bit(kUp);
  static constexpr unsigned kWrites = bit(kDx) | bit(kDup);
  static constexpr unsigned kOptional = bit(kUp) | bit(kDup), kTogether = kOptional;
  static constexpr int kCoefs = 1;

  struct Partial {
    float sum;
  };

  template <unsigned kUsed>
  HD static void coefs(const NnArgs& args, int64_t, int64_t c, float (&coef)[kCoefs]) {
    coef[0] = bias_of(args, c);
  }

  template <unsigned kUsed, class F>
  HD static void add(F (&x)[kMaxImages], const F (&coef)[kCoefs], uint32_t, F& sum, F&) {
    const F z = x[kX] + coef[0];
    const Point<F> point = Curve::template at<(kUsed & kHalfImages) != 0>(z);
    F dz = x[kDy];
    if constexpr (kUsed & bit(kUp)) {
      x[kDup] = dz * point.value;
      dz = dz * x[kUp];
    }
    x[kDx] = dz * point.slope;
    sum = sum + x[kDx];
  }

  HD static Partial partial(const float (&)[kCoefs], float sum, float) { return {sum}; }

  template <class Parts, class Sum>
  HD static void finish(const NnArgs& args, int64_t c, const Parts& parts, const Sum& sum) {
    const double total = sum([&](int64_t i) HD_LAMBDA { return double(parts[i].sum); });
    if (sum.writes() && args.vectors[kDbias]) args.vectors[kDbias][c] = float(total);
  }
};

using activation_ops =
    OpList<ActivationForward<Gelu>, ActivationForward<GeluTanh>, ActivationForward<Silu>,
           ActivationBackward<Gelu>, ActivationBackward<GeluTanh>, ActivationBackward<Silu>>;

}  // namespace ampfuse
