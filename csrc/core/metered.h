// An optimizer's op in a metered step. See core/meter.h.
#pragma once

#include "core/meter.h"
#include "core/ops/op.h"

namespace ampfuse {

// A bit for each element of F. A changed element is also moved, and a zero one is also tiny.
struct Marks {
  uint32_t changed, moved, zero, tiny;

  HD Marks within(uint32_t mask) const {
    return {changed & mask, moved & mask, zero & mask, tiny & mask};
  }
};

// Runs the op and measures the update and the new weight; marks() is for the same elements.
template <class Op>
struct Metered : Op {
  static constexpr bool kMetered = true;
  static constexpr unsigned kReads = Op::kReads | Op::kGradient;
  static constexpr unsigned kMeasured = bit(kUpdate) | bit(kParam);
  static constexpr List kOld = kAccumulated;  // where the op leaves the weight as it was

  bool has_grad;

  HD static Metered for_row(const TableView& view, int64_t row, float a, float b) {
    return {Op::for_row(view, row, a, b), view.pointer(kGrad, row) != nullptr};
  }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    const F old = x[kParam];
    Op::operator()(x);
    if (!has_grad) x[kGrad] = x[kAccumulated];
    x[kOld] = old;
    x[kUpdate] = (x[kParam] - old) * F(kUpdateFactor);
  }

  // `half`: the type of the model weight, or of the parameter where there is none; `split`: that of
  // a split master; `gradient`: that of the gradient.
  template <class F>
  HD static Marks marks(const F (&x)[kLists], DType half, DType split, DType gradient) {
    Marks marks;
    marks.changed =
        differ_as(half, model_weight_of(split, x[kOld]), model_weight_of(split, x[kParam]));
    marks.moved = differ_as(DType::kFloat32, x[kOld], x[kParam]);
    marks.zero = below(x[kGrad], bits_float(1));
    marks.tiny = below(x[kGrad], smallest_normal(gradient));
    return marks;
  }
};

}  // namespace ampfuse
