// Encoded storage: split masters, quantized states, and BF16 with stochastic rounding. Each format
// is written once, for a value F, which is float or a SIMD vector, and its bits B (scalar.h).
#pragma once

#include <type_traits>

#include "core/scalar.h"
#include "core/step_state.h"

namespace ampfuse {

template <class F>
using BitsOf = decltype(bits_of(F(0.0f)));

template <class F>
HD BitsOf<F> magnitude_of(const F& x) {
  return bits_of(x) & BitsOf<F>(0x7fffffffu);
}
template <class F>
HD F absolute(const F& x) {
  return from_bits(x, magnitude_of(x));
}

// --- split masters -------------------------------------------------------------------------------

// An FP32 master as its half-precision model weight, `high`, and a `remainder`, a signed integer of
// 16 bits. The stored value is limit(x). high() gives its weight, and remainder() has the remainder
// in its lower bits.
template <DType>
struct Split;

// The remainder is the difference between the bits of the master and those of the weight, so every
// value comes back. 65,537 masters round to an even weight, one too many: here a tie goes away from
// zero, and the weight differs from the one rounded to even in one of 131,072 values.
template <>
struct Split<DType::kRemainderBFloat16> {
  static constexpr DType kWeight = DType::kBFloat16;

  template <class F>
  HD static F limit(const F& x) {
    return x;
  }
  template <class F>
  HD static F high(const F& x) {
    using B = BitsOf<F>;
    const B bits = bits_of(x), nan = bits | B(0x00400000u);
    const B rounded = select_less(B(kInfinityBits), magnitude_of(x), nan, bits + B(0x8000u));
    return from_bits(x, rounded & B(0xffff0000u));
  }
  template <class F>
  HD static BitsOf<F> remainder(const F& x, const F& high) {
    return bits_of(x) - bits_of(high);
  }
  // A weight that was set to zero has a master of its sign, whatever the remainder is.
  template <class F>
  HD static F join(const F& high, const BitsOf<F>& remainder) {
    using B = BitsOf<F>;
    const B magnitude = max_signed(magnitude_of(high) + remainder, B(0u));
    return from_bits(high, blend(B(0x80000000u), bits_of(high), magnitude));
  }
};

// The remainder counts 2^-15 of the weight's unit in the last place, so masters from 2^-16 on come
// back. Smaller masters are multiples of 2^-39. A finite master is at most 65504, FP16's largest
// number.
template <>
struct Split<DType::kRemainderFloat16> {
  static constexpr DType kWeight = DType::kFloat16;

  template <class F>
  HD static F limit(const F& x) {
    using B = BitsOf<F>;
    const B magnitude = magnitude_of(x), largest(0x477fe000u);
    const B limited = select_less(magnitude, B(kInfinityBits), largest, magnitude);
    const B kept = select_less(largest, magnitude, limited, magnitude);
    return from_bits(x, blend(B(0x80000000u), bits_of(x), kept));
  }
  template <class F>
  HD static F high(const F& x) {
    return round_to(kWeight, x);
  }
  template <class F>
  HD static BitsOf<F> remainder(const F& x, const F& high) {
    using B = BitsOf<F>;
    const F count = (x - high) * from_bits(x, B(279u << 23) - exponent(high));
    return select_less(magnitude_of(high), B(kInfinityBits), bits_of(count + F(kRoundToInteger)),
                       B(0u));
  }
  // If the weight was edited, the remainder may lead to a tie, or, where units become half as large
  // below it, to another weight. This cannot happen below FP16's normal numbers, whose units are
  // equal.
  template <class F>
  HD static F join(const F& high, const BitsOf<F>& remainder) {
    using B = BitsOf<F>;
    const F x =
        fma(to_float(high, remainder), from_bits(high, exponent(high) - B(25u << 23)), high);
    const F near = select_equal(round_to(kWeight, x), high, x, high);
    const B smallest(113u << 23);
    return from_bits(x, select_less(magnitude_of(high), smallest, bits_of(x), bits_of(near)));
  }

 private:
  // The bits of the weight's power of two, which is 2^-14 for a subnormal weight.
  template <class F>
  HD static BitsOf<F> exponent(const F& high) {
    using B = BitsOf<F>;
    return max_signed(bits_of(high) & B(kInfinityBits), B(113u << 23));
  }
};

// Calls run(Split) if the type is a remainder.
template <class Run>
HD void with_split(DType dtype, const Run& run) {
  if (dtype == DType::kRemainderFloat16) return run(Split<DType::kRemainderFloat16>());
  if (dtype == DType::kRemainderBFloat16) return run(Split<DType::kRemainderBFloat16>());
}

// The model weight of the master x.
template <class F>
HD F model_weight_of(DType param, F x) {
  with_split(param, [&](auto split) HD_LAMBDA { x = split.high(split.limit(x)); });
  return x;
}

// --- 8-bit quantized values ----------------------------------------------------------------------

// kScaleBlock neighbouring elements of a state share a scale (block-wise quantization: Dettmers et
// al., arXiv:2110.02861). Blocks begin with the row, and a chunk is a whole number of them.
constexpr int kScaleBlock = 128;

HD constexpr int64_t blocks_of(int64_t numel) { return (numel + kScaleBlock - 1) / kScaleBlock; }

// Magnitudes are companded, so that small ones keep some digits: a quantized value counts steps of
// a root of the fraction of the scale, the square root for first moments and the fourth root for
// second ones, of which Adam takes a square root itself. The true root is not needed: halving the
// bits of a float, exponent and mantissa alike, gives a root that is piecewise linear, and doubling
// them inverts it. First moments then reach down to 2^-14 of the largest, second ones to 2^-32. The
// upper two, or four, octaves have about 32 levels each, the next ones half as many, and so on.
// (Companding of moments: FlashOptim, arXiv:2602.23349.)
//
// The scale is the largest magnitude of the block, and of a second moment two thirds of that: the
// steps double above each power of two, and most second moments of a block are a little smaller
// than its largest, so they lie on the fine side. (x / 1.5 * 1.5 is x, so the largest one stays
// what it is.)
//
// A NaN makes the whole block NaN. An infinite second moment, the square of a finite gradient,
// makes the block infinite, so its steps are zero, as the element's are with FP32 states. An
// infinite first moment is limited.
template <bool kHasSign>
struct Quantizer {
  static constexpr bool kSign = kHasSign;
  using Stored = std::conditional_t<kSign, int8_t, uint8_t>;
  static constexpr int kRoot = kSign ? 1 : 2;  // the 2^kRoot-th
  static constexpr uint32_t kOne = 0x3f800000u, kOffset = kOne - (kOne >> kRoot);
  // The largest fraction, its root, and the quantized value that it has.
  static constexpr float kLargest = kSign ? 1.0f : 1.5f, kLargestRoot = kSign ? 1.0f : 1.125f;
  static constexpr float kLevels = kSign ? 127.0f : 255.0f;
  static constexpr float kRootOfOne = kLargestRoot / kLevels;  // of the quantized value 1

  // A block's scale, from the bits of its largest magnitude. One that is not zero has a reciprocal.
  HD static float scale(uint32_t largest) {
    constexpr uint32_t kSmallest = kSign ? 0x00800000u : 0x00c00000u;
    if (largest > kInfinityBits) return bits_float(kNanBits);
    if (kSign && largest == kInfinityBits) return bits_float(kInfinityBits - 1);
    return bits_float(largest == 0 || largest > kSmallest ? largest : kSmallest) / kLargest;
  }
  // The factor that encode() takes with each value of the block.
  HD static float encoder(float scale) { return scale > 0 ? 1 / scale : 0.0f; }

  // What encode() adds to the fractions of first moments in a step. Rounded to nearest, a small one
  // would stay where it is though its gradients are zero, and the weight would drift: a tenth of
  // it, which a beta1 of 0.9 takes off, is less than half a step. (Enough for one of up to 0.92.)
  HD static float offset(bool steps) { return kSign && steps ? -3.25f / (1 << 14) : 0.0f; }

  // The quantized value of x in the lower 8 bits. Those of second moments begin at 1, also that of
  // zero: a second moment near zero with a first moment that is not would make the step explode. (A
  // block of zeros has scale zero, so it decodes to zeros.)
  template <class F>
  HD static BitsOf<F> encode(const F& x, const F& encoder, const F& offset) {
    using B = BitsOf<F>;
    if constexpr (kSign) {
      const B root = shift_right<1>(bits_of(saturate(fma(absolute(x), encoder, offset))));
      const F with_sign = from_bits(x, blend(B(0x80000000u), bits_of(x), root + B(kOffset)));
      return bits_of(fma(with_sign, F(kLevels), F(kRoundToInteger)));
    }
    const F fraction = min_number(absolute(x) * encoder, F(kLargest));
    const F root = from_bits(x, shift_right<2>(bits_of(fraction)) + B(kOffset));
    const B quantized = bits_of(fma(root, F(kLevels / kLargestRoot), F(kRoundToInteger)));
    return max_signed(quantized, B(float_bits(kRoundToInteger) + 1));
  }
  // Of the quantized value, as a float. Where it is zero, the root is what kOffset has as its bits,
  // which other roots absorb.
  template <class F>
  HD static F root(const F& count) {
    return kSign ? fma(count, F(kRootOfOne), from_bits(count, BitsOf<F>(kOffset)))
                 : count * F(kRootOfOne);
  }
  template <class F>
  HD static F decode(const F& root, const F& scale) {
    using B = BitsOf<F>;
    const B fraction = shift_left<kRoot>(bits_of(root)) - B(kOffset << kRoot);
    const F x = from_bits(scale, fraction) * scale;
    return kSign ? from_bits(x, blend(B(0x80000000u), bits_of(root), bits_of(x))) : x;
  }
};

// Calls run(quantizer) for a quantized type.
template <class Run>
HD void with_quantizer(DType dtype, const Run& run) {
  if (dtype == DType::kSigned8) return run(Quantizer<true>());
  return run(Quantizer<false>());
}

// --- stochastic rounding -------------------------------------------------------------------------

// A hash of 32 bits with little bias (Wellons, "Prospecting for Hash Functions", 2018). The random
// bits are hashes of a counter: the same on any device, in any order, after a resume.
template <class B>
HD B hash(B x) {
  x = (x ^ shift_right<16>(x)) * B(0x7feb352du);
  x = (x ^ shift_right<15>(x)) * B(0x846ca68bu);
  return x ^ shift_right<16>(x);
}

// The keys of a row in its step `count`, and of a list in it at elements whose index has these
// upper 32 bits.
HD uint32_t row_key(uint32_t seed, int64_t row, float count) {
  return hash(hash(hash(seed) + uint32_t(row)) + uint32_t(count));
}
HD uint32_t list_key(uint32_t row_key, int list, uint32_t index_high) {
  return hash(row_key + uint32_t(list) * 0x9e3779b9u + index_high * 0x85ebca6bu);
}

// One of the two BF16 values around x, the nearer the likelier; the mean is x.
template <class F>
HD F stochastic_round(const F& x, const BitsOf<F>& random) {
  using B = BitsOf<F>;
  const B bits = bits_of(x), rounded = (bits + (random & B(0xffffu))) & B(0xffff0000u);
  return from_bits(x, select_less(magnitude_of(x), B(kInfinityBits), rounded, bits));
}

}  // namespace ampfuse
