// apex's multi_tensor_scale and multi_tensor_axpby.
#pragma once

#include "core/ops/op.h"

namespace ampfuse {

// target = a * source.
struct ScaleOp : RowOp<ScaleOp> {
  static constexpr const char* kName = "scale";
  static constexpr unsigned kReads = bit(kSource);
  static constexpr unsigned kWrites = bit(kTarget);
  static constexpr unsigned kChecked = bit(kSource);
  float a;

  HD static ScaleOp for_row(const TableView&, int64_t, float a, float) {
    ScaleOp op;
    op.a = a;
    return op;
  }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    x[kTarget] = F(a) * x[kSource];
  }
};

// target = a * source + b * source2, checking the lists of kCheck.
template <unsigned kCheck>
struct AxpbyOp : RowOp<AxpbyOp<kCheck>> {
  static constexpr const char* kName = "axpby";
  static constexpr unsigned kReads = bit(kSource) | bit(kSource2);
  static constexpr unsigned kWrites = bit(kTarget);
  static constexpr unsigned kChecked = kCheck;
  float a, b;

  HD static AxpbyOp for_row(const TableView&, int64_t, float a, float b) {
    AxpbyOp op;
    op.a = a;
    op.b = b;
    return op;
  }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    x[kTarget] = fma(F(a), x[kSource], F(b) * x[kSource2]);
  }
};

using arithmetic_ops = OpList<ScaleOp, AxpbyOp<bit(kSource) | bit(kSource2)>, AxpbyOp<bit(kSource)>,
                              AxpbyOp<bit(kSource2)>>;

}  // namespace ampfuse
