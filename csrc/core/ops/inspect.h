// The inspection of gradients before a step.
#pragma once

#include "core/ops/op.h"

namespace ampfuse {

// The unscaled gradient with what earlier passes accumulated: inspect measures it, and writes it if
// a row has kGradOut. `fresh`: an overflow belongs to the pass that made it, so if the accumulated
// value is not finite, only the new gradient is measured. kAgain: it is measured once more, from
// kGradOut if it was written there, which may be where it was read.
template <bool kAgain = false>
struct InspectOp : RowOp<InspectOp<kAgain>> {
  static constexpr const char* kName = "inspect";
  static constexpr bool kGradientRows = true;
  static constexpr unsigned kReads = bit(kGrad) | bit(kAccumulated) | (kAgain ? bit(kGradOut) : 0);
  static constexpr unsigned kWrites = kAgain ? 0 : bit(kGradOut);
  static constexpr unsigned kMeasured = bit(kUnscaled);
  float inv_scale;
  bool fresh, written;

  HD static InspectOp for_row(const TableView& view, int64_t row, float inv_scale, float fresh) {
    InspectOp op;
    op.inv_scale = view.scaled[row] ? inv_scale : 1.0f;
    op.fresh = fresh != 0 && view.pointer(kAccumulated, row) != nullptr;
    op.written = view.pointer(kGradOut, row) != nullptr;
    return op;
  }
  HD InspectOp<true> again() const {
    InspectOp<true> op;
    op.inv_scale = inv_scale;
    op.fresh = fresh;
    op.written = written;
    return op;
  }

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

using inspect_ops = OpList<InspectOp<>>;

}  // namespace ampfuse
