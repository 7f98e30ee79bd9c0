// Conversions between FP32 masters and their model weights, apart from a step.
#pragma once

#include "core/ops/op.h"

namespace ampfuse {

// Masters follow edits of the model: an element that no longer rounds to the model weight takes its
// value.
struct RefreshOp : RowOp<RefreshOp> {
  static constexpr const char* kName = "refresh";
  static constexpr unsigned kReads = bit(kParam) | bit(kModel);
  static constexpr unsigned kWrites = bit(kParam);
  DType model;

  HD static RefreshOp for_row(const TableView& view, int64_t row, float, float) {
    RefreshOp op;
    op.model = view.type(kModel, row);
    return op;
  }

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    if (model == DType::kNone) return;  // no model weight to follow
    x[kParam] = select_equal(round_to(model, x[kParam]), x[kModel], x[kParam], x[kModel]);
  }
};

// Copies one list to another, whatever their types. A split master is written with its weight.
template <int kFrom, int kTo>
struct CopyOp : RowOp<CopyOp<kFrom, kTo>> {
  static constexpr const char* kName = "copy";
  static constexpr unsigned kReads = bit(kFrom);
  static constexpr unsigned kWrites = bit(kTo) | (kTo == kParam ? bit(kModel) : 0);
  static constexpr bool kQuantizable = is_state(kFrom) || is_state(kTo);

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    x[kTo] = x[kFrom];
  }
};

using PublishOp = CopyOp<kParam, kModel>;   // model weights from masters
using JoinOp = CopyOp<kParam, kTarget>;     // values from split masters
using SplitOp = CopyOp<kSource, kParam>;    // ... and back
using DecodeOp = CopyOp<kState0, kTarget>;  // FP32 values from a quantized state
using EncodeOp = CopyOp<kSource, kState0>;  // ... and back

using masters_ops = OpList<RefreshOp, PublishOp, JoinOp, SplitOp, DecodeOp, EncodeOp>;

}  // namespace ampfuse
