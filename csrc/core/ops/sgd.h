// torch.optim.SGD.
#pragma once

#include "core/metered.h"

namespace ampfuse {

struct SgdOp : OptimizerOp<SgdOp> {
  static constexpr const char* kName = "sgd";
  static constexpr const char* kStates[] = {"momentum_buffer"};
  static constexpr const char* kLastStateIf = "momentum";
  static constexpr bool kUsesCount = false;
  static constexpr HyperInfo kHypers[] = {
      hyper::lr(1e-3),
      hyper::number("momentum", &RowHyper::momentum, 0),
      hyper::number("dampening", &RowHyper::dampening, 0),
      hyper::weight_decay(),
      hyper::flag("nesterov", kNesterov, "nesterov"),
      hyper::maximize(),
      hyper::flag("late_decay", kLateDecay, "wd_after_momentum")};
  static constexpr List kMomentumBuffer = kState0;
  static constexpr unsigned kReads = kGradient | kStepped | bit(kMomentumBuffer);
  static constexpr unsigned kWrites = kLeft | bit(kMomentumBuffer);
  static constexpr bool kQuantizable = true;

  HD static void prepare(RowStep& step, RowCoef& c) {
    c.momentum = float(step.hyper.momentum);
    c.one_minus_dampening = float(1 - step.hyper.dampening);
  }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    const bool late = c.flags & kLateDecay;
    F g = step_gradient(x, c);
    if (c.weight_decay != 0 && !late) g = fma(F(c.weight_decay), x[kParam], g);
    if (c.momentum != 0) {
      F buffer = g;
      if (!(c.flags & kFirstStep)) {
        buffer = fma(F(c.momentum), x[kMomentumBuffer], F(c.one_minus_dampening) * g);
      }
      x[kMomentumBuffer] = buffer;
      g = c.flags & kNesterov ? fma(F(c.momentum), buffer, g) : buffer;
    }
    if (c.weight_decay != 0 && late) g = fma(F(c.weight_decay), x[kParam], g);
    x[kParam] = fma(F(-c.lr), g, x[kParam]);
    leave(x);
  }
};

using sgd_ops = OpList<SgdOp, Metered<SgdOp>>;

}  // namespace ampfuse
