// GELU, its tanh form and SiLU, with the bias before them and the gate's product behind them.
//
//   forward    z = x + bias;  y = f(z), gated: f(z) * up
//   backward   dx = dy * up * f'(z);  dup = dy * f(z);  dbias = the sum of dx over the rows
//
// All three are f(z) = z * P(z) with a P from 0 to 1 (Hendrycks & Gimpel 2016; Elfwing et al. 2017;
// gates: Shazeer 2020). P comes of e^-s, s >= 0, alone, so that nothing overflows and the left tail
// keeps its digits, which 1 + erf(z / sqrt(2)) and 1 + tanh(u) lose.
//
// Bytes moved per element of half precision: forward 4, gated 6; backward 6, gated 10. The bias
// costs none: a product of matrices need not add it, and its gradient needs no pass of its own.
#pragma once

#include "core/exponent.h"
#include "core/nn_ops/nn_op.h"

namespace ampfuse {

// P(z) and z * P'(z).
template <class F>
struct Gate {
  F value, slope;
};

// |z|, at most 128: far past where P is 0 or 1 to the last digit, so that no square overflows. (Of
// NaN too; the factor z brings it back.)
template <class F>
HD F bounded_magnitude(const F& z) {
  using Bits = decltype(bits_of(z));
  return from_bits(z, min_signed(bits_of(z) & Bits(0x7fffffffu), Bits(0x43000000u)));
}

template <class F>
HD F if_negative(const F& z, const F& then, const F& otherwise) {
  using Bits = decltype(bits_of(z));
  return from_bits(z, select_less(bits_of(z), Bits(0u), bits_of(then), bits_of(otherwise)));
}

// P(z) = 1 / (1 + e^-u) with u = z (c + d z^2).
template <class F>
HD Gate<F> sigmoid_gate(const F& z, float c, float d) {
  const F a = bounded_magnitude(z), square = a * a;
  const F u = d == 0.0f ? a * F(c) : a * fma(square, F(d), F(c));
  const F e = exponential(F(0.0f) - u);
  const F right = F(1.0f) / (F(1.0f) + e), left = e * right;
  const F du = d == 0.0f ? F(c) : fma(square, F(3.0f * d), F(c));
  return {if_negative(z, left, right), z * (left * right * du)};
}

struct Silu {
  static constexpr const char* kName = "silu";
  template <class F>
  HD static Gate<F> gate(const F& z) {
    return sigmoid_gate(z, 1.0f, 0.0f);
  }
};

// (1 + tanh(v)) / 2 = 1 / (1 + e^-2v) with v = sqrt(2 / pi) (z + 0.044715 z^3).
struct GeluTanh {
  static constexpr const char* kName = "gelu_tanh";
  template <class F>
  HD static Gate<F> gate(const F& z) {
    return sigmoid_gate(z, 1.59576912f, 0.0713548163f);
  }
};

// P is the distribution of a normal variable: of -a it is e^(-a^2 / 2) t q(t) with
// t = 1 / (1 + 0.28 a), q fitted to 1.3e-7 of itself (in the form of Hastings 1955).
struct Gelu {
  static constexpr const char* kName = "gelu";
  template <class F>
  HD static Gate<F> gate(const F& z) {
    const F a = bounded_magnitude(z);
    const F e = exponential(a * a * F(-0.5f));
    const F t = F(1.0f) / fma(F(0.28f), a, F(1.0f));
    F q = fma(F(2.53786016e-2f), t, F(-9.61900428e-2f));
    q = fma(q, t, F(9.66150835e-2f));
    q = fma(q, t, F(-1.00053651e-2f));
    q = fma(q, t, F(7.44834095e-2f));
    q = fma(q, t, F(8.31676275e-2f));
    q = fma(q, t, F(1.03151262e-1f));
    q = fma(q, t, F(1.11695431e-1f));
    q = fma(q, t, F(1.11703947e-1f));
    const F left = e * (q * t);
    return {if_negative(z, left, F(1.0f) - left), z * (e * F(0.398942280f))};
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

  template <unsigned kLists>
  HD static void coefs(const NnArgs& args, int64_t, int64_t c, float (&coef)[kCoefs]) {
    coef[0] = bias_of(args, c);
  }

  template <unsigned kLists, class F>
  HD static void apply(F (&x)[kMaxImages], const F (&coef)[kCoefs], uint32_t&) {
    const F z = x[kX] + coef[0];
    F y = z * Curve::gate(z).value;
    if constexpr (kLists & bit(kUp)) y = y * x[kUp];
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

  template <unsigned kLists>
  HD static void coefs(const NnArgs& args, int64_t, int64_t c, float (&coef)[kCoefs]) {
    coef[0] = bias_of(args, c);
  }

  template <unsigned kLists, class F>
  HD static void add(F (&x)[kMaxImages], const F (&coef)[kCoefs], uint32_t, F& sum, F&) {
    const F z = x[kX] + coef[0];
    const Gate<F> gate = Curve::gate(z);
    F dz = x[kDy];
    if constexpr (kLists & bit(kUp)) {
      x[kDup] = dz * (z * gate.value);
      dz = dz * x[kUp];
    }
    x[kDx] = dz * (gate.value + gate.slope);
    sum = sum + x[kDx];
  }

  HD static Partial partial(const float (&)[kCoefs], float sum, float) { return {sum}; }

  template <class Sum>
  HD static void finish(const NnArgs& args, int64_t c, const Sum& sum) {
    const Partial* parts = args.partials_of<Partial>(c);
    const double total = sum([&](int64_t i) HD_LAMBDA { return double(parts[i].sum); });
    if (sum.writes() && args.vectors[kDbias]) args.vectors[kDbias][c] = float(total);
  }
};

using activation_ops =
    OpList<ActivationForward<Gelu>, ActivationForward<GeluTanh>, ActivationForward<Silu>,
           ActivationBackward<Gelu>, ActivationBackward<GeluTanh>, ActivationBackward<Silu>>;

}  // namespace ampfuse
