// Layer and RMS normalization of rows, with the residual addition that comes before it in
// transformers.
//
//   forward    s = x + residual;  y = (s - mean) * rstd * weight + bias
//              rstd = 1 / sqrt(mean((s - mean)^2) + eps);  RMS: mean is 0, and there is no bias
//   backward   g = dy * weight,  s_hat = (s - mean) * rstd
//              dx = rstd * (g - mean(g) - s_hat * mean(g * s_hat)) + ds, also the residual's
//              gradient; dweight, dbias = the sums of dy * s_hat and dy over the rows
//
// (Ba, Kiros & Hinton 2016; Zhang & Sennrich 2019.) Statistics are FP32 whatever the storage. A
// shift, the row's first value, is subtracted from all values: if the mean is large against the
// deviation, rounding it to FP32 would move them all. As the shift is one of the n values, at most
// eps * sqrt(n) is lost.
//
// Bytes moved per element of half precision: forward 4, with a residual 8; backward 6, with the
// gradient of the sum 8, and 4 for the gradients of the weights.
#pragma once

#include "core/nn_ops/nn_op.h"

namespace ampfuse {

// The results of the passes for a row, which they read again.
struct Norm : NnPass {
  // The mean is less the shift; RMS has none. A value for each row.
  enum Vector { kMean, kRstd };
  static constexpr unsigned kPerRowVectors = bit(kMean) | bit(kRstd);
  enum Coef { kShift, kMeanOfRow, kRstdOfRow, kG, kGHat };

  // The address of the row of `image`.
  template <class Coefs>
  HD static void load_row(const NnArgs& args, int image, int64_t row, Coefs& coef) {
    const bool centered = args.vectors[kMean] != nullptr;
    const int64_t first = row * args.image.channels;
    coef[kShift] = centered ? load_float(args.images[image], args.image.dtype, first) : 0.0f;
    coef[kMeanOfRow] = centered ? args.vectors[kMean][row] : 0.0f;
    coef[kRstdOfRow] = args.vectors[kRstd][row];
  }
  template <class F, class Coefs>
  HD static F centered(const F& s, const Coefs& coef) {
    return (s - coef[kShift]) - coef[kMeanOfRow];
  }
  // (In FP32: many GPUs compute FP64 at 1/32 or 1/64 of the rate.)
  HD static float mean_of(const NnArgs& args, float sum) {
    return sum / float(args.image.channels);
  }
};

template <bool kCentered>
struct NormForward : Norm {
  static constexpr const char* kName = kCentered ? "layer_norm" : "rms_norm";
  static constexpr PassKind kKind = PassKind::kRowPass;
  enum Image { kX, kResidual, kSum, kY };
  enum Number { kEps };
  static constexpr unsigned kReads = bit(kX) | bit(kResidual), kWrites = bit(kSum) | bit(kY);
  static constexpr unsigned kOptional = bit(kResidual) | bit(kSum), kTogether = kOptional;
  static constexpr int kStages = kCentered ? 2 : 1, kSums = 1, kCoefs = 3;

  // The image of s.
  HD static constexpr int normed(unsigned used) { return used & bit(kSum) ? kSum : kX; }
  HD static constexpr unsigned reads(unsigned used, int stage) {
    return stage == 0 ? used & kReads : bit(normed(used));
  }
  HD static constexpr unsigned writes(unsigned used, int stage) {
    return stage == kStages ? bit(kY) : stage == 0 ? used & bit(kSum) : 0u;
  }

  template <unsigned kUsed>
  HD static void begin(const NnArgs& args, int64_t row, float (&coef)[kCoefs]) {
    const int64_t first = row * args.image.channels;
    coef[kShift] = coef[kMeanOfRow] = 0.0f;
    if (!kCentered) return;
    coef[kShift] = load_float(args.images[kX], args.image.dtype, first);
    if (!(kUsed & bit(kResidual))) return;
    coef[kShift] = coef[kShift] + load_float(args.images[kResidual], args.image.dtype, first);
    coef[kShift] = round_to(args.image.dtype, coef[kShift]);
  }

  template <unsigned kUsed, class F>
  HD static void first(F (&x)[kMaxImages]) {
    if constexpr (kUsed & bit(kSum)) x[kSum] = x[kX] + x[kResidual];
  }

  template <int kStage, unsigned kUsed, class F>
  HD static void add(const F (&x)[kMaxImages], const F (&coef)[kCoefs], const F&, uint32_t bits,
                     F (&sums)[kSums]) {
    const F d = keep(bits, centered(x[normed(kUsed)], coef));
    sums[0] = kStage + 1 == kStages ? fma(d, d, sums[0]) : sums[0] + d;
  }

  template <int kStage>
  HD static void finish_stage(const NnArgs& args, int64_t row, const float (&sums)[kSums],
                              float (&coef)[kCoefs]) {
    if (kStage + 1 < kStages) {
      coef[kMeanOfRow] = args.vectors[kMean][row] = mean_of(args, sums[0]);
      return;
    }
    const float var = mean_of(args, sums[0]);
    coef[kRstdOfRow] = args.vectors[kRstd][row] = 1.0f / sqrt(var + args.numbers[kEps]);
  }

  template <unsigned kUsed, class F>
  HD static void apply(F (&x)[kMaxImages], const F (&coef)[kCoefs], const F& weight,
                       const F& bias) {
    x[kY] = fma(centered(x[normed(kUsed)], coef) * coef[kRstdOfRow], weight, bias);
  }
};
using LayerNorm = NormForward<true>;
using RmsNorm = NormForward<false>;

struct NormBackward : Norm {
  static constexpr const char* kName = "norm_backward";
  static constexpr PassKind kKind = PassKind::kRowPass;
  enum Image { kDy, kS, kDs, kDx };  // ds may be absent
  static constexpr unsigned kReads = bit(kDy) | bit(kS) | bit(kDs), kWrites = bit(kDx);
  static constexpr unsigned kOptional = bit(kDs);
  static constexpr int kStages = 1, kSums = 2, kCoefs = 5;

  HD static constexpr unsigned reads(unsigned used, int stage) {
    return stage == kStages ? used & kReads : bit(kDy) | bit(kS);
  }
  HD static constexpr unsigned writes(unsigned, int stage) {
    return stage == kStages ? kWrites : 0u;
  }

  template <unsigned kUsed>
  HD static void begin(const NnArgs& args, int64_t row, float (&coef)[kCoefs]) {
    load_row(args, kS, row, coef);
  }

  template <unsigned kUsed, class F>
  HD static void first(F (&)[kMaxImages]) {}

  template <int kStage, unsigned kUsed, class F>
  HD static void add(const F (&x)[kMaxImages], const F (&coef)[kCoefs], const F& weight,
                     uint32_t bits, F (&sums)[kSums]) {
    const F g = keep(bits, x[kDy] * weight);
    sums[0] = sums[0] + g;
    sums[1] = fma(g, keep(bits, centered(x[kS], coef) * coef[kRstdOfRow]), sums[1]);
  }

  template <int kStage>
  HD static void finish_stage(const NnArgs& args, int64_t, const float (&sums)[kSums],
                              float (&coef)[kCoefs]) {
    coef[kG] = args.vectors[kMean] ? mean_of(args, sums[0]) : 0.0f;
    coef[kGHat] = mean_of(args, sums[1]);
  }

  template <unsigned kUsed, class F>
  HD static void apply(F (&x)[kMaxImages], const F (&coef)[kCoefs], const F& weight, const F&) {
    const F s_hat = centered(x[kS], coef) * coef[kRstdOfRow];
    F dx = ((x[kDy] * weight - coef[kG]) - s_hat * coef[kGHat]) * coef[kRstdOfRow];
    if constexpr (kUsed & bit(kDs)) dx = dx + x[kDs];
    x[kDx] = dx;
  }
};

// The gradients of weight and bias, to where these are in the other passes; either may be absent.
struct NormWeights : Norm {
  static constexpr const char* kName = "norm_weights";
  static constexpr PassKind kKind = PassKind::kChannelSum;
  enum Image { kDy, kS };
  static constexpr unsigned kReads = bit(kDy) | bit(kS), kWrites = 0;
  static constexpr int kCoefs = 3;
  static constexpr bool kCoefsOfRow = true;

  struct Partial {
    float weight, bias;
  };

  template <unsigned kUsed>
  HD static void coefs(const NnArgs& args, int64_t row, int64_t, float (&coef)[kCoefs]) {
    load_row(args, kS, row, coef);
  }

  template <unsigned kUsed, class F>
  HD static void add(F (&x)[kMaxImages], const F (&coef)[kCoefs], uint32_t, F& weight, F& bias) {
    weight = fma(x[kDy], centered(x[kS], coef) * coef[kRstdOfRow], weight);
    bias = bias + x[kDy];
  }

  HD static Partial partial(const float (&)[kCoefs], float weight, float bias) {
    return {weight, bias};
  }

  template <class Parts, class Sum>
  HD static void finish(const NnArgs& args, int64_t c, const Parts& parts, const Sum& sum) {
    const double weight = sum([&](int64_t i) HD_LAMBDA { return double(parts[i].weight); });
    const double bias = sum([&](int64_t i) HD_LAMBDA { return double(parts[i].bias); });
    if (!sum.writes()) return;
    const NnArgs::Affine& affine = args.affine;
    if (affine.weight) store_float(affine.weight, affine.dtype, c, float(weight));
    if (affine.bias) store_float(affine.bias, affine.dtype, c, float(bias));
  }
};

using norm_ops = OpList<LayerNorm, RmsNorm, NormBackward, NormWeights>;

}  // namespace ampfuse
