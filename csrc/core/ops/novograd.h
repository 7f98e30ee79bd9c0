// NovoGrad (Ginsburg et al., arXiv:1905.11286): one second moment per tensor, the average of its
// gradients' norms. It is stored as a norm, because a squared one overflows FP32.
#pragma once

#include "core/metered.h"

namespace ampfuse {

// The norms are in the row's coefficients; for an element it is momentum.
struct NovoGradOp : OptimizerOp<NovoGradOp> {
  static constexpr const char* kName = "novograd";
  static constexpr const char* kStates[] = {"exp_avg"};
  static constexpr HyperInfo kHypers[] = {
      hyper::lr(1e-3),
      hyper::beta1(0.9),
      hyper::beta2(0.999),
      hyper::eps(1e-8),
      hyper::weight_decay(),
      hyper::uncorrected(),
      hyper::unaveraged(),
      {"infinity_norm", "norm_type", -1, 2, nullptr, kInfinityNorm, 2},
      hyper::flag("init_zero", kInitZero, "init_zero"),
      hyper::unless("decoupled", kDecoupled, "reg_inside_moment", false)};
  static constexpr bool kGradNorms = true;
  static constexpr List kExpAvg = kState0;
  static constexpr unsigned kReads = kGradient | kStepped | bit(kExpAvg);
  static constexpr unsigned kWrites = kLeft | bit(kExpAvg);

  HD static void prepare(RowStep& step, RowCoef& c) {
    const RowHyper& hyper = step.hyper;
    c.beta1 = float(hyper.beta1);
    c.grad_weight = hyper.flags & kUnaveraged ? 1.0f : float(1 - hyper.beta1);
    const double divisor =
        average_norm(hyper, step.multiplier * step.grad_norm(), step.count, step.norm_average());
    // With decoupled decay the moment holds whole gradients and is divided as it is used.
    const bool late = step.flags & kDecoupled;
    c.correction = float(1 / (late ? step.bias1() * divisor : step.bias1()));
    if (!late) step.multiplier /= divisor;
  }

  // Takes the norm of this step's gradient into the average and returns what divides the gradient.
  HD static double average_norm(const RowHyper& hyper, double norm, int64_t count, float* average) {
    const bool starts = count == 1 && !(hyper.flags & kInitZero);
    const double old = starts ? norm : double(*average);
    const double sum = hyper.flags & kInfinityNorm
                           ? hyper.beta2 * old + (1 - hyper.beta2) * norm
                           : square_root(hyper.beta2 * old * old + (1 - hyper.beta2) * norm * norm);
    *average = float(sum);
    // An average that started at the first norm is not biased towards zero.
    const bool corrected = hyper.flags & kInitZero && !(hyper.flags & kUncorrected);
    return (corrected ? sum / square_root(1 - power(hyper.beta2, count)) : sum) + hyper.eps;
  }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    const F p = x[kParam];
    const F g = decayed_gradient(step_gradient(x, c), p, c);
    x[kExpAvg] = fma(F(c.grad_weight), g, F(c.beta1) * x[kExpAvg]);
    const F u = F(c.correction) * x[kExpAvg];
    x[kParam] = fma(F(-c.lr), decayed_update(u, p, c), p);
    leave(x);
  }
};

using novograd_ops = OpList<NovoGradOp, Metered<NovoGradOp>>;

}  // namespace ampfuse
