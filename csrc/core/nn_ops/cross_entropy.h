// Softmax cross-entropy over the classes of each row, in FP32, from logits of any type.
//
//   forward    lse = max(z) + log(sum(exp(z - max(z))));  loss = w_t (lse - z_t)
//              with label smoothing s: (1 - s) w_t (lse - z_t) + s / C sum_j(w_j (lse - z_j))
//   backward   dz_j = g ((1 - s) w_t (p_j - [j = t]) + s / C (W p_j - w_j)),  p_j = exp(z_j - lse)
//
// with weights w of the classes, W their sum. As torch's cross_entropy, which makes an FP32 copy of
// half logits and keeps log_softmax; here a pass reads the logits once (2 bytes an element), and
// one reads them and writes the gradient (4), which may be over them. The sum is scaled by a power
// of two, which is raised on the way: it changes no bits, so it need not be exactly the maximum's.
#pragma once

#include "core/exponent.h"
#include "core/nn_ops/nn_op.h"

namespace ampfuse {

// The arguments of both passes. Losses, lse and gradients belong to rows, weights to columns.
struct CrossEntropy : NnPass {
  enum Image { kLogits, kGradient };
  // The rounded lse and what it lacks: to an FP32 lse alone, large logits would lose digits of
  // their difference. Weights may be absent, and so may their sum (one value).
  enum Vector { kLse, kLoss, kRowGradient, kWeight, kWeightSum };
  enum Number { kSmoothing };
  static constexpr unsigned kPerRowVectors = bit(kLse) | bit(kLoss) | bit(kRowGradient);

  HD static bool is_plain(const NnArgs& args) { return args.numbers[kSmoothing] == 0.0f; }
  HD static bool exists(const NnArgs& args, int64_t target) {
    return target >= 0 && target < args.image.channels;
  }
  HD static bool counts(const NnArgs& args, int64_t row) {
    const int64_t target = args.targets[row];
    return target != args.ignored && exists(args, target);
  }
  HD static float target_weight(const NnArgs& args, int64_t row) {
    const float* weights = args.vectors[kWeight];
    return (weights ? weights[args.targets[row]] : 1.0f) * (1.0f - args.numbers[kSmoothing]);
  }
  HD static float weight_sum(const NnArgs& args) {
    const float* sum = args.vectors[kWeightSum];
    return sum ? *sum : float(args.image.channels);
  }
  HD static float share(const NnArgs& args) {
    return args.numbers[kSmoothing] / float(args.image.channels);
  }
};

struct CrossEntropyLoss : CrossEntropy {
  static constexpr const char* kName = "cross_entropy_loss";
  static constexpr PassKind kKind = PassKind::kRowSum;
  static constexpr unsigned kReads = bit(kLogits), kWrites = 0;
  static constexpr int kInput = kLogits;
  // The sum of exponentials is kSum * 2^kExponent.
  enum Value { kExponent, kSum, kSmooth };
  static constexpr int kValues = 3;
  // Logits below the first count as that; to the second, kExponent and a sum are far from their
  // limits.
  static constexpr float kLeast = -131072.0f, kLeastExponent = -189098.0f, kMostAbove = 60.0f;

  template <class F>
  HD static void start(F (&value)[kValues]) {
    value[kExponent] = F(kLeastExponent);
    value[kSum] = value[kSmooth] = F(0.0f);
  }

  template <class F>
  HD static void raise(F (&value)[kValues], const F& exponent) {
    const F raised = max_nan(value[kExponent], exponent);
    value[kSum] = value[kSum] * power_of_two(value[kExponent] - raised);
    value[kExponent] = raised;
  }

  // x of a column; -inf past the last one, where `bits` are not set.
  template <bool kPlain, class F>
  HD static void add(F (&value)[kValues], const F& x, const F& weight, uint32_t bits) {
    const Exponential<F> e(max_nan(F(kLeast), x));
    if (above_zero(e.n - value[kExponent] - F(kMostAbove))) raise(value, e.n);
    value[kSum] = fma(e.power, power_of_two(e.n - value[kExponent]), value[kSum]);
    if constexpr (!kPlain) value[kSmooth] = fma(weight, keep(bits, x), value[kSmooth]);
  }
  static constexpr float kAbsent = -__builtin_inff();

  template <class F>
  HD static void merge(F (&value)[kValues], const F (&other)[kValues]) {
    raise(value, other[kExponent]);
    value[kSum] = fma(other[kSum], power_of_two(other[kExponent] - value[kExponent]), value[kSum]);
    value[kSmooth] = value[kSmooth] + other[kSmooth];
  }

  HD static void finish(const NnArgs& args, int64_t row, const float (&value)[kValues]) {
    const double exponent = value[kExponent], sum = value[kSum];
    const bool is_inside = exponent > -180000.0 && exponent < 180000.0 && sum < 1e38;
    const double lse =
        is_inside ? exponent * 0.6931471805599453 + logarithm(sum) : lse_of_any(args, row);
    args.vectors[kLse][2 * row] = float(lse);
    args.vectors[kLse][2 * row + 1] = float(lse - double(float(lse)));
    args.vectors[kLoss][row] = float(loss_of(args, row, lse, double(value[kSmooth])));
  }

 private:
  // Of a row with NaN, or whose largest logit is beyond +-2^17, which no training has: one by one.
  HD static double lse_of_any(const NnArgs& args, int64_t row) {
    const int64_t columns = args.image.channels;
    const auto logit = [&](int64_t c) HD_LAMBDA {
      return load_float(args.images[kLogits], args.image.dtype, row * columns + c);
    };
    float largest = logit(0);
    for (int64_t c = 1; c < columns; ++c) largest = max_nan(largest, logit(c));
    double sum = 0.0;
    for (int64_t c = 0; c < columns; ++c) sum += double(exponential(logit(c) - largest));
    return double(largest) + logarithm(sum);
  }

  // NaN if there is no such class: a device cannot raise an error.
  HD static double loss_of(const NnArgs& args, int64_t row, double lse, double smooth) {
    const int64_t target = args.targets[row], columns = args.image.channels;
    if (target == args.ignored) return 0.0;
    if (!exists(args, target)) return double(bits_float(kNanBits));
    const float logit = load_float(args.images[kLogits], args.image.dtype, row * columns + target);
    const double loss = double(target_weight(args, row)) * (lse - double(logit));
    if (is_plain(args)) return loss;
    return loss + double(share(args)) * (lse * double(weight_sum(args)) - smooth);
  }
};

struct CrossEntropyGradient : CrossEntropy {
  static constexpr const char* kName = "cross_entropy_gradient";
  static constexpr PassKind kKind = PassKind::kRowMap;
  static constexpr unsigned kReads = bit(kLogits), kWrites = bit(kGradient);
  static constexpr int kInput = kLogits, kOutput = kGradient;
  static constexpr int kCoefs = 5;

  HD static void coefs(const NnArgs& args, int64_t row, float (&coef)[kCoefs]) {
    const float gradient = args.vectors[kRowGradient][row], hit = target_weight(args, row);
    coef[0] = args.vectors[kLse][2 * row];
    coef[1] = gradient * fma(share(args), weight_sum(args), hit);
    coef[2] = gradient * -share(args);
    coef[3] = gradient * hit;
    coef[4] = args.vectors[kLse][2 * row + 1];
  }

  // `hit`: a bit where the column is the target.
  template <bool kPlain, class F>
  HD static F apply(const F& x, const F (&coef)[kCoefs], const F& weight, uint32_t hit) {
    const F p = exponential((x - coef[0]) - coef[4]);
    F y = keep(hit, coef[3]);
    if constexpr (!kPlain) y = y - coef[2] * weight;
    return p * coef[1] - y;
  }
};

using cross_entropy_ops = OpList<CrossEntropyLoss, CrossEntropyGradient>;

}  // namespace ampfuse
