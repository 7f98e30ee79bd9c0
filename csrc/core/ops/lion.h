// Lion (Chen et al., arXiv:2302.06675): the sign of a mixture of momentum and gradient.
#pragma once

#include "core/metered.h"

namespace ampfuse {

struct LionOp : OptimizerOp<LionOp> {
  static constexpr const char* kName = "lion";
  static constexpr const char* kStates[] = {"exp_avg"};
  static constexpr List kExpAvg = kState0;
  static constexpr unsigned kReads = kGradient | kStepped | bit(kExpAvg);
  static constexpr unsigned kWrites = kLeft | bit(kExpAvg);
  static constexpr bool kPackable = true;

  HD static void prepare(RowStep& step, RowCoef& c) {
    c.one_minus_beta1 = float(1 - step.hyper.beta1);
    c.one_minus_beta2 = float(1 - step.hyper.beta2);
  }

  // -1, 0, 1, or NaN of NaN.
  template <class F>
  HD static F sign(const F& x) {
    const F zero(0.0f), minus = zero - x;
    const F below = select_equal(max_nan(minus, zero), minus, F(-1.0f), x);
    const F apart = select_equal(max_nan(x, zero), x, F(1.0f), below);
    return select_equal(x, zero, zero, apart);
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
