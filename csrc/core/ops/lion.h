// Lion (Chen et al., arXiv:2302.06675): the sign of a mixture of momentum and gradient.
#pragma once

#include "core/metered.h"

namespace ampfuse {

struct LionOp : OptimizerOp<LionOp> {
  static constexpr const char* kName = "lion";
  static constexpr const char* kStates[] = {"exp_avg"};
  static constexpr bool kUsesCount = false;
  static constexpr HyperInfo kHypers[] = {
      hyper::lr(1e-4),       hyper::beta1(0.9), hyper::beta2(0.99),
      hyper::weight_decay(), hyper::maximize(), hyper::always("decoupled", kDecoupled)};
  static constexpr List kExpAvg = kState0;
  static constexpr unsigned kReads = kGradient | kStepped | bit(kExpAvg);
  static constexpr unsigned kWrites = kLeft | bit(kExpAvg);
  static constexpr bool kQuantizable = true;

  HD static void prepare(RowStep& step, RowCoef& c) {
    c.one_minus_beta1 = float(1 - step.hyper.beta1);
    c.one_minus_beta2 = float(1 - step.hyper.beta2);
  }

  // -1, 0, 1, or NaN of NaN.
  template <class F>
  HD static F sign(const F& x) {
    using B = BitsOf<F>;
    const B bits = bits_of(x), one = (bits & B(0x80000000u)) | B(bits_of(1.0f));
    const F sign = from_bits(x, select_less(B(kInfinityBits), magnitude_of(x), bits, one));
    return select_equal(x, F(0.0f), F(0.0f), sign);
  }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    const F p = x[kParam];
    const F g = decayed_gradient(step_gradient(x, c), p, c);
    const F difference = g - x[kExpAvg];
    const F u = sign(fma(F(c.one_minus_beta1), difference, x[kExpAvg]));
    x[kExpAvg] = fma(F(c.one_minus_beta2), difference, x[kExpAvg]);
    x[kParam] = fma(F(-c.lr), decayed_update(u, p, c), p);
    leave(x);
  }
};

using lion_ops = OpList<LionOp, Metered<LionOp>>;

}  // namespace ampfuse
