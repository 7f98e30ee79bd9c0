// LAMB (You et al., arXiv:1904.00962).
//
// It needs the norms of a row's weights and of its whole update u before the first weight changes.
// The first pass (LambMomentsOp) advances the moments and measures both; the second (LambOp)
// computes u again from the moments. Keeping u between the passes would move the same bytes (4
// written and 4 read, instead of two moments read) and take 4 bytes a parameter of memory; keeping
// it in place of a half gradient would save 6 of 42 bytes, but round every update to half and
// destroy the gradients.
#pragma once

#include "core/metered.h"

namespace ampfuse {

constexpr float kSmallestNormal = 1.17549435e-38f;

template <class Self>
struct LambMaths : OptimizerOp<Self> {
  static constexpr const char* kStates[] = {"exp_avg", "exp_avg_sq"};
  static constexpr HyperInfo kHypers[] = {hyper::lr(1e-3),
                                          hyper::beta1(0.9),
                                          hyper::beta2(0.999),
                                          hyper::eps(1e-6),
                                          hyper::weight_decay(0.01),
                                          hyper::uncorrected(),
                                          hyper::unaveraged(),
                                          hyper::decoupled(true),
                                          hyper::flag("trust_all", kTrustAll, "use_nvlamb")};
  static constexpr List kExpAvg = kState0, kExpAvgSq = kState1;
  static constexpr unsigned kMoments = bit(kExpAvg) | bit(kExpAvgSq);
  using OptimizerOp<Self>::c;

  HD static void prepare(RowStep& step, RowCoef& c) {
    const RowHyper& hyper = step.hyper;
    c.beta1 = float(hyper.beta1);
    c.grad_weight = hyper.flags & kUnaveraged ? 1.0f : float(1 - hyper.beta1);
    c.beta2 = float(hyper.beta2);
    c.one_minus_beta2 = float(1 - hyper.beta2);
    c.correction = float(step.sqrt_bias2() / step.bias1());
    c.eps = float(hyper.eps * step.sqrt_bias2());
  }

  template <class F>
  HD void advance_moments(F (&x)[kLists]) const {
    const F g = decayed_gradient(step_gradient(x, c), x[kParam], c);
    x[kExpAvg] = fma(F(c.grad_weight), g, F(c.beta1) * x[kExpAvg]);
    x[kExpAvgSq] = fma(F(c.one_minus_beta2) * g, g, F(c.beta2) * x[kExpAvgSq]);
  }

  // An eps of 0 becomes the smallest normal number, so that an element that never had a gradient,
  // or the padding after the last one, has no update rather than 0 / 0, which would be the row's
  // norm.
  template <class F>
  HD F update(const F (&x)[kLists]) const {
    const float eps = c.eps > 0 ? c.eps : kSmallestNormal;
    const F u = F(c.correction) * (x[kExpAvg] * reciprocal_of_root(x[kExpAvgSq], eps));
    return decayed_update(u, x[kParam], c);
  }
};

// kAgain: the moments are advanced already, and the pass only measures.
template <bool kAgain = false>
struct LambMomentsOp : LambMaths<LambMomentsOp<kAgain>> {
  using Maths = LambMaths<LambMomentsOp>;
  static constexpr const char* kName = "lamb_moments";
  static constexpr unsigned kReads =
      (kAgain ? 0 : Maths::kGradient) | bit(kParam) | Maths::kMoments;
  static constexpr unsigned kWrites = kAgain ? 0 : Maths::kMoments | bit(kUnscaled);
  static constexpr unsigned kMeasured = bit(kParam) | bit(kUpdate);

  HD LambMomentsOp<true> again() const {
    LambMomentsOp<true> op;
    op.c = this->c;
    return op;
  }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    if (!kAgain) this->advance_moments(x);
    x[kUpdate] = this->update(x);
  }
};

struct LambOp : LambMaths<LambOp> {
  using Before = LambMomentsOp<>;
  static constexpr const char* kName = "lamb";
  static constexpr unsigned kReads = kStepped | kMoments;
  static constexpr unsigned kWrites = kStepped | bit(kModel);
  float step_size;

  HD static LambOp for_row(const TableView& view, int64_t row, float, float) {
    const auto norm = [&](int list) HD_LAMBDA {
      return view.norms[measure_of(Before::kMeasured, list) * view.rows + row];
    };
    LambOp op;
    op.c = view.coefs[row];
    op.step_size = op.c.lr * trust_ratio(op.c, norm(kParam), norm(kUpdate));
    return op;
  }

  // The ratio of the norms, 1 where one of them is zero or where the row has none.
  HD static float trust_ratio(const RowCoef& c, float param_norm, float update_norm) {
    if (c.weight_decay == 0 && !(c.flags & kTrustAll)) return 1;
    return param_norm > 0 && update_norm > 0 ? param_norm / update_norm : 1.0f;
  }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    x[kParam] = fma(F(-step_size), update(x), x[kParam]);
    leave(x);
  }
};

// LAMB in two calls: the first writes the update to the row's kUpdate, the second is a plain step.
struct LambUpdateOp : LambMaths<LambUpdateOp> {
  static constexpr const char* kName = "lamb_update";
  static constexpr unsigned kReads = kGradient | bit(kParam) | kMoments;
  static constexpr unsigned kWrites = kMoments | bit(kUnscaled) | bit(kUpdate);
  static constexpr bool kPlain = true;

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    advance_moments(x);
    x[kUpdate] = update(x);
  }
};

using lamb_ops = OpList<LambMomentsOp<>, LambOp, LambUpdateOp, Metered<LambOp>>;

}  // namespace ampfuse
