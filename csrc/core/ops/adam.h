// torch.optim.Adam (Kingma and Ba, arXiv:1412.6980) and AdamW (Loshchilov and Hutter,
// arXiv:1711.05101).
#pragma once

#include "core/metered.h"

namespace ampfuse {

// amsgrad is a row that has max_exp_avg_sq: the maximum with the zero that an absent list reads as
// is exp_avg_sq itself.
struct AdamOp : OptimizerOp<AdamOp> {
  static constexpr const char* kName = "adam";
  static constexpr const char* kStates[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  static constexpr const char* kLastStateIf = "amsgrad";
  static constexpr HyperInfo kHypers[] = {
      hyper::lr(1e-3),       hyper::beta1(0.9), hyper::beta2(0.999), hyper::eps(1e-8),
      hyper::weight_decay(), hyper::maximize(), hyper::decoupled(),  hyper::uncorrected()};
  static constexpr List kExpAvg = kState0, kExpAvgSq = kState1, kMaxExpAvgSq = kState2;
  static constexpr unsigned kMoments = bit(kExpAvg) | bit(kExpAvgSq) | bit(kMaxExpAvgSq);
  static constexpr unsigned kReads = kGradient | kStepped | kMoments;
  static constexpr unsigned kWrites = kLeft | kMoments;
  static constexpr unsigned kUnsigned = bit(kExpAvgSq) | bit(kMaxExpAvgSq);
  static constexpr bool kQuantizable = true;

  // p -= lr / bias1 * m / (sqrt(v) / sqrt(bias2) + eps), with fraction and eps multiplied by
  // sqrt(bias2): the same value with a division and a rounding less per element.
  HD static void prepare(RowStep& step, RowCoef& c) {
    c.one_minus_beta1 = float(1 - step.hyper.beta1);
    c.beta2 = float(step.hyper.beta2);
    c.one_minus_beta2 = float(1 - step.hyper.beta2);
    c.step_size = float(step.lr * step.sqrt_bias2() / step.bias1());
    c.eps = float(step.hyper.eps * step.sqrt_bias2());
  }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    F g = step_gradient(x, c);
    F p = x[kParam];
    if (c.flags & kDecoupled) {
      p = p * F(c.decay);
    } else if (c.weight_decay != 0) {
      g = fma(F(c.weight_decay), p, g);
    }
    const F exp_avg = fma(F(c.one_minus_beta1), g - x[kExpAvg], x[kExpAvg]);
    const F exp_avg_sq = fma(F(c.one_minus_beta2) * g, g, F(c.beta2) * x[kExpAvgSq]);
    x[kExpAvg] = exp_avg;
    x[kExpAvgSq] = exp_avg_sq;
    x[kMaxExpAvgSq] = max_nan(x[kMaxExpAvgSq], exp_avg_sq);
    x[kParam] = fma(F(-c.step_size), exp_avg * reciprocal_of_root(x[kMaxExpAvgSq], c.eps), p);
    leave(x);
  }
};

using adam_ops = OpList<AdamOp, Metered<AdamOp>>;

}  // namespace ampfuse
