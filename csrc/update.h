// The per-element maths of everything ampfuse computes, once, for every backend.
//
// An op is a function of the values x[list] of one element. F is float on the device and in scalar
// code and a SIMD vector otherwise. `kReads` and `kWrites` say which lists are loaded and stored
// back; a list that a row lacks reads as zero and is not stored. `kMeasured` lists are those whose
// norms a measuring pass takes, of the values that the op leaves in x, stored or not. Branches
// depend on the row alone, never on an element. `fma` is spelled where it is meant and the compiler
// adds none, so every backend rounds alike.
#pragma once

#include "hd.h"
#include "hyper.h"
#include "scalar.h"
#include "table.h"

namespace ampfuse {

// The gradient of this step: unscaled, clipped, with what earlier passes accumulated. Whoever looks
// at it after the step finds it unscaled and not clipped.
template <class F>
HD F step_gradient(F (&x)[kLists], const RowCoef& c) {
  x[kUnscaled] = F(c.inverse_scale) * x[kGrad];
  return fma(x[kGrad], F(c.grad_scale), x[kAccumulated] * F(c.accum_scale));
}

// torch.optim.SGD.
struct SgdOp {
  static constexpr unsigned kReads = bit(kGrad) | bit(kAccumulated) | bit(kParam) | bit(kState0);
  static constexpr unsigned kWrites = bit(kParam) | bit(kModel) | bit(kState0) | bit(kUnscaled);
  static constexpr unsigned kChecked = 0;
  RowCoef c;

  HD static SgdOp for_row(const TableView& view, int64_t row, float, float) {
    return {view.coefs[row]};
  }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    const bool late = c.flags & kLateDecay;
    F g = step_gradient(x, c);
    if (c.weight_decay != 0 && !late) g = fma(F(c.weight_decay), x[kParam], g);
    if (c.momentum != 0) {
      F buffer = g;
      if (!(c.flags & kFirstStep)) {
        buffer = fma(F(c.momentum), x[kState0], F(c.one_minus_dampening) * g);
      }
      x[kState0] = buffer;
      g = c.flags & kNesterov ? fma(F(c.momentum), buffer, g) : buffer;
    }
    if (c.weight_decay != 0 && late) g = fma(F(c.weight_decay), x[kParam], g);
    x[kParam] = fma(F(-c.lr), g, x[kParam]);
    x[kModel] = x[kParam];
  }
};

// torch.optim.Adam and AdamW. amsgrad is a row that has kState2: the maximum with the zero that an
// absent list reads as is exp_avg_sq itself.
struct AdamOp {
  static constexpr unsigned kReads =
      bit(kGrad) | bit(kAccumulated) | bit(kParam) | bit(kState0) | bit(kState1) | bit(kState2);
  static constexpr unsigned kWrites =
      bit(kParam) | bit(kModel) | bit(kState0) | bit(kState1) | bit(kState2) | bit(kUnscaled);
  static constexpr unsigned kChecked = 0;
  RowCoef c;

  HD static AdamOp for_row(const TableView& view, int64_t row, float, float) {
    return {view.coefs[row]};
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
    const F exp_avg = fma(F(c.one_minus_beta1), g - x[kState0], x[kState0]);
    const F exp_avg_sq = fma(F(c.one_minus_beta2) * g, g, F(c.beta2) * x[kState1]);
    x[kState0] = exp_avg;
    x[kState1] = exp_avg_sq;
    x[kState2] = max_nan(x[kState2], exp_avg_sq);
    x[kParam] = fma(F(-c.step_size), exp_avg / (sqrt(x[kState2]) + F(c.eps)), p);
    x[kModel] = x[kParam];
  }
};

// Weight decay where torch does not set the form: in the gradient, or (decoupled) in the update u
// of p -= lr * u. Then each step rounds p once; 1 - lr * weight_decay, rounded, would be off in the
// same direction at every step.
template <class F>
HD F decayed_gradient(const F& g, const F& p, const RowCoef& c) {
  return c.flags & kDecoupled || c.weight_decay == 0 ? g : fma(F(c.weight_decay), p, g);
}
template <class F>
HD F decayed_update(const F& u, const F& p, const RowCoef& c) {
  return c.flags & kDecoupled && c.weight_decay != 0 ? fma(F(c.weight_decay), p, u) : u;
}

// torch.optim.Adagrad (Duchi et al., JMLR 2011), with decoupled decay if asked for.
struct AdagradOp {
  static constexpr unsigned kReads = bit(kGrad) | bit(kAccumulated) | bit(kParam) | bit(kState0);
  static constexpr unsigned kWrites = bit(kParam) | bit(kModel) | bit(kState0) | bit(kUnscaled);
  static constexpr unsigned kChecked = 0;
  RowCoef c;

  HD static AdagradOp for_row(const TableView& view, int64_t row, float, float) {
    return {view.coefs[row]};
  }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    const F p = x[kParam];
    const F g = decayed_gradient(step_gradient(x, c), p, c);
    x[kState0] = fma(g, g, x[kState0]);
    const F u = g / (sqrt(x[kState0]) + F(c.eps));
    x[kParam] = fma(F(-c.lr), decayed_update(u, p, c), p);
    x[kModel] = x[kParam];
  }
};

// NovoGrad. The norms are in the row's coefficients (advance_row): here it is momentum.
struct NovoGradOp {
  static constexpr unsigned kReads = bit(kGrad) | bit(kAccumulated) | bit(kParam) | bit(kState0);
  static constexpr unsigned kWrites = bit(kParam) | bit(kModel) | bit(kState0) | bit(kUnscaled);
  static constexpr unsigned kChecked = 0;
  RowCoef c;

  HD static NovoGradOp for_row(const TableView& view, int64_t row, float, float) {
    return {view.coefs[row]};
  }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    const F p = x[kParam];
    const F g = decayed_gradient(step_gradient(x, c), p, c);
    x[kState0] = fma(F(c.grad_weight), g, F(c.beta1) * x[kState0]);
    const F u = F(c.correction) * x[kState0];
    x[kParam] = fma(F(-c.lr), decayed_update(u, p, c), p);
    x[kModel] = x[kParam];
  }
};

constexpr float kSmallestNormal = 1.17549435e-38f;

// LAMB (You et al., arXiv:1904.00962) needs the norms of a row's weights and of its whole update u
// before the first weight changes. The first pass (LambMomentsOp) advances the moments and measures
// both; the second (LambOp) computes u again from the moments. To keep u between the passes would
// move the same bytes (4 written and 4 read, instead of two moments read) and take 4 bytes a
// parameter of memory; to keep it where a half gradient was would save 6 of 42 bytes, but round
// every update to half and destroy the gradients. An eps of 0 is the smallest normal number, so
// that an element that never had a gradient, or the padding behind the last one, has no update
// rather than 0 / 0, which would be the row's norm.
template <class F>
HD F lamb_update(const F& p, const F& exp_avg, const F& exp_avg_sq, const RowCoef& c) {
  const float eps = c.eps > 0 ? c.eps : kSmallestNormal;
  const F u = F(c.correction) * (exp_avg / (sqrt(exp_avg_sq) + F(eps)));
  return decayed_update(u, p, c);
}

// kAgain: the moments are advanced already, and the pass only measures.
template <bool kAgain = false>
struct LambMomentsOp {
  static constexpr unsigned kReads =
      (kAgain ? 0 : bit(kGrad) | bit(kAccumulated)) | bit(kParam) | bit(kState0) | bit(kState1);
  static constexpr unsigned kWrites = kAgain ? 0 : bit(kState0) | bit(kState1) | bit(kUnscaled);
  static constexpr unsigned kChecked = 0;
  static constexpr unsigned kMeasured = bit(kParam) | bit(kUpdate);
  RowCoef c;

  HD static LambMomentsOp for_row(const TableView& view, int64_t row, float, float) {
    return {view.coefs[row]};
  }
  HD LambMomentsOp<true> again() const { return {c}; }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    if (!kAgain) {
      const F g = decayed_gradient(step_gradient(x, c), x[kParam], c);
      x[kState0] = fma(F(c.grad_weight), g, F(c.beta1) * x[kState0]);
      x[kState1] = fma(F(c.one_minus_beta2) * g, g, F(c.beta2) * x[kState1]);
    }
    x[kUpdate] = lamb_update(x[kParam], x[kState0], x[kState1], c);
  }
};

// LAMB in two calls: the first leaves the update where the row says, the second is a plain step.
struct LambUpdateOp : LambMomentsOp<> {
  static constexpr unsigned kWrites = LambMomentsOp<>::kWrites | bit(kUpdate);

  HD static LambUpdateOp for_row(const TableView& view, int64_t row, float, float) {
    return {LambMomentsOp<>{view.coefs[row]}};
  }
};

// The ratio of the norms, 1 where one of them is zero or where the row has none.
HD float trust_ratio(const RowCoef& c, float param_norm, float update_norm) {
  if (c.weight_decay == 0 && !(c.flags & kTrustAll)) return 1;
  return param_norm > 0 && update_norm > 0 ? param_norm / update_norm : 1.0f;
}

struct LambOp {
  static constexpr unsigned kReads = bit(kParam) | bit(kState0) | bit(kState1);
  static constexpr unsigned kWrites = bit(kParam) | bit(kModel);
  static constexpr unsigned kChecked = 0;
  RowCoef c;
  float step_size;

  HD static LambOp for_row(const TableView& view, int64_t row, float, float) {
    const RowCoef& c = view.coefs[row];
    const auto norm = [&](int list) {
      return view.norms[measure_of(LambMomentsOp<>::kMeasured, list) * view.rows + row];
    };
    return {c, c.lr * trust_ratio(c, norm(kParam), norm(kUpdate))};
  }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    const F u = lamb_update(x[kParam], x[kState0], x[kState1], c);
    x[kParam] = fma(F(-step_size), u, x[kParam]);
    x[kModel] = x[kParam];
  }
};

// LARC in front of another's step: the gradient takes in decay and ratio of the row's coefficients.
struct LayerwiseOp {
  static constexpr unsigned kReads = bit(kGrad) | bit(kParam);
  static constexpr unsigned kWrites = bit(kGradOut);
  static constexpr unsigned kChecked = 0;
  RowCoef c;

  HD static LayerwiseOp for_row(const TableView& view, int64_t row, float, float) {
    return {view.coefs[row]};
  }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    x[kGradOut] = decayed_gradient(F(c.grad_scale) * x[kGrad], x[kParam], c);
  }
};

// Masters follow edits of the model: an element whose rounding the model weight no longer is takes
// its value.
struct RefreshOp {
  static constexpr unsigned kReads = bit(kParam) | bit(kModel);
  static constexpr unsigned kWrites = bit(kParam);
  static constexpr unsigned kChecked = 0;
  DType model;

  HD static RefreshOp for_row(const TableView& view, int64_t row, float, float) {
    return {view.type(kModel, row)};
  }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    if (model == DType::kNone) return;  // no model weight to follow
    x[kParam] = select_equal(round_to(model, x[kParam]), x[kModel], x[kParam], x[kModel]);
  }
};

// Model weights from masters.
struct PublishOp {
  static constexpr unsigned kReads = bit(kParam);
  static constexpr unsigned kWrites = bit(kModel);
  static constexpr unsigned kChecked = 0;

  HD static PublishOp for_row(const TableView&, int64_t, float, float) { return {}; }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    x[kModel] = x[kParam];
  }
};

// target = a * source; `kChecked` lists set the flag when they hold a non-finite value.
struct ScaleOp {
  static constexpr unsigned kReads = bit(kSource);
  static constexpr unsigned kWrites = bit(kTarget);
  static constexpr unsigned kChecked = bit(kSource);
  float a;

  HD static ScaleOp for_row(const TableView&, int64_t, float a, float) { return {a}; }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    x[kTarget] = F(a) * x[kSource];
  }
};

// target = a * source + b * source2, checking the lists of kCheck.
template <unsigned kCheck>
struct AxpbyOp {
  static constexpr unsigned kReads = bit(kSource) | bit(kSource2);
  static constexpr unsigned kWrites = bit(kTarget);
  static constexpr unsigned kChecked = kCheck;
  float a, b;

  HD static AxpbyOp for_row(const TableView&, int64_t, float a, float b) { return {a, b}; }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    x[kTarget] = fma(F(a), x[kSource], F(b) * x[kSource2]);
  }
};

// The unscaled gradient with what earlier passes accumulated: inspect writes it where a row asks
// for it, and measures it. `fresh`: an overflow belongs to the pass that made it, so where what
// earlier passes left is not finite, the new gradient alone is measured. kAgain: it is measured
// once more, from where it was written if it was: that may be where it was read.
template <bool kAgain = false>
struct InspectOp {
  static constexpr unsigned kReads = bit(kGrad) | bit(kAccumulated) | (kAgain ? bit(kGradOut) : 0);
  static constexpr unsigned kWrites = kAgain ? 0 : bit(kGradOut);
  static constexpr unsigned kChecked = 0;
  static constexpr unsigned kMeasured = bit(kUnscaled);
  float inv_scale;
  bool fresh, written;

  HD static InspectOp for_row(const TableView& view, int64_t row, float inv_scale, float fresh) {
    return {view.scaled[row] ? inv_scale : 1.0f,
            fresh != 0 && view.pointer(kAccumulated, row) != nullptr,
            view.pointer(kGradOut, row) != nullptr};
  }
  HD InspectOp<true> again() const { return {inv_scale, fresh, written}; }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    // A difference with itself is 0 for finite values and NaN for others.
    if (kAgain && written) {
      x[kUnscaled] = x[kGradOut];
      if (fresh) {
        x[kUnscaled] = select_equal(x[kGradOut] - x[kGradOut], F(0.0f), x[kGradOut], F(0.0f));
      }
      return;
    }
    x[kUnscaled] = x[kGradOut] = fma(x[kGrad], F(inv_scale), x[kAccumulated]);
    if (fresh) {
      x[kUnscaled] = select_equal(x[kAccumulated] - x[kAccumulated], F(0.0f), x[kUnscaled],
                                  x[kGrad] * F(inv_scale));
    }
  }
};

// Measures the parameters themselves.
struct ParamNormOp {
  static constexpr unsigned kReads = bit(kParam);
  static constexpr unsigned kWrites = 0;
  static constexpr unsigned kChecked = 0;
  static constexpr unsigned kMeasured = bit(kParam);

  HD static ParamNormOp for_row(const TableView&, int64_t, float, float) { return {}; }
  HD ParamNormOp again() const { return {}; }

  template <class F>
  HD void operator()(F (&)[kLists]) const {}
};

}  // namespace ampfuse
