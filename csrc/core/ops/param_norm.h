// The norms of parameters, for LARC.
#pragma once

#include "core/ops/op.h"

namespace ampfuse {

struct ParamNormOp : RowOp<ParamNormOp> {
  static constexpr const char* kName = "param_norms";
  static constexpr bool kGradientRows = true;
  static constexpr unsigned kReads = bit(kParam);
  static constexpr unsigned kMeasured = bit(kParam);

  HD ParamNormOp again() const { return {}; }

  template <class F>
  HD void operator()(F (&)[kLists]) const {}
};

using param_norm_ops = OpList<ParamNormOp>;

}  // namespace ampfuse
