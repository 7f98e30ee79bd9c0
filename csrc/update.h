// The per-element maths of everything ampfuse computes, once, for every backend.
//
// An op is a function of the values x[list] of one element. F is float on the device and in scalar
// code and a SIMD vector otherwise. `kReads` and `kWrites` say which lists are loaded and stored
// back; a list that a row lacks reads as zero and is not stored. Branches depend on the row alone,
// never on an element. `fma` is spelled where it is meant and the compiler adds none, so every
// backend rounds alike.
#pragma once

#include "hd.h"
#include "hyper.h"
#include "scalar.h"
#include "table.h"

namespace ampfuse {

// The gradient of this step: unscaled, clipped, with what earlier passes accumulated.
template <class F>
HD F step_gradient(const F (&x)[kLists], const RowCoef& c) {
  return fma(x[kGrad], F(c.grad_scale), x[kAccumulated] * F(c.accum_scale));
}

// torch.optim.SGD.
struct SgdOp {
  static constexpr unsigned kReads = bit(kGrad) | bit(kAccumulated) | bit(kParam) | bit(kState0);
  static constexpr unsigned kWrites = bit(kParam) | bit(kModel) | bit(kState0);
  static constexpr unsigned kChecked = 0;
  RowCoef c;

  HD static SgdOp for_row(const TableView& view, int64_t row, float, float) {
    return {view.coefs[row]};
  }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    F g = step_gradient(x, c);
    if (c.weight_decay != 0) g = fma(F(c.weight_decay), x[kParam], g);
    if (c.momentum != 0) {
      F buffer = g;
      if (!(c.flags & kFirstStep)) {
        buffer = fma(F(c.momentum), x[kState0], F(c.one_minus_dampening) * g);
      }
      x[kState0] = buffer;
      g = c.flags & kNesterov ? fma(F(c.momentum), buffer, g) : buffer;
    }
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
      bit(kParam) | bit(kModel) | bit(kState0) | bit(kState1) | bit(kState2);
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

// The unscaled gradient that inspect measures and, where a row asks for it, writes.
template <class F>
HD F unscaled_gradient(const F& grad, const F& accumulated, float inv_scale) {
  return fma(grad, F(inv_scale), accumulated);
}

}  // namespace ampfuse
