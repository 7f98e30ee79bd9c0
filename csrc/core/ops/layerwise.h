// LARC (You et al., arXiv:1708.03888) before another optimizer's step: the decay and the ratio of
// the row's coefficients, which hyper.h computes, go into the gradient.
#pragma once

#include "core/ops/op.h"

namespace ampfuse {

struct LayerwiseOp : OptimizerOp<LayerwiseOp> {
  static constexpr const char* kName = "layerwise";
  static constexpr HyperInfo kHypers[] = {hyper::lr(1e-3), hyper::weight_decay()};
  static constexpr unsigned kReads = bit(kGrad) | bit(kParam);
  static constexpr unsigned kWrites = bit(kGradOut);
  static constexpr bool kPlain = true;

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    x[kGradOut] = decayed_gradient(F(c.grad_scale) * x[kGrad], x[kParam], c);
  }
};

using layerwise_ops = OpList<LayerwiseOp>;

}  // namespace ampfuse
