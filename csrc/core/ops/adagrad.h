// torch.optim.Adagrad (Duchi et al., JMLR 2011), with decoupled decay if asked for.
#pragma once

#include "core/metered.h"

namespace ampfuse {

struct AdagradOp : OptimizerOp<AdagradOp> {
  static constexpr const char* kName = "adagrad";
  static constexpr const char* kStates[] = {"sum"};
  static constexpr const char* kFilledWith = "initial_accumulator_value";
  static constexpr HyperInfo kHypers[] = {
      hyper::lr(1e-2),       hyper::number("lr_decay", &RowHyper::lr_decay, 0),
      hyper::weight_decay(), hyper::eps(1e-10),
      hyper::maximize(),     hyper::decoupled()};
  static constexpr List kSum = kState0;
  static constexpr unsigned kReads = kGradient | kStepped | bit(kSum);
  static constexpr unsigned kWrites = kLeft | bit(kSum);
  static constexpr unsigned kUnsigned = bit(kSum);
  static constexpr bool kQuantizable = true;

  HD static void prepare(RowStep& step, RowCoef& c) { c.eps = float(step.hyper.eps); }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    const F p = x[kParam];
    const F g = decayed_gradient(step_gradient(x, c), p, c);
    x[kSum] = fma(g, g, x[kSum]);
    const F u = g * reciprocal_of_root(x[kSum], c.eps);
    x[kParam] = fma(F(-c.lr), decayed_update(u, p, c), p);
    leave(x);
  }
};

using adagrad_ops = OpList<AdagradOp, Metered<AdagradOp>>;

}  // namespace ampfuse
