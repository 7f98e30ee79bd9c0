// Gradients between two steps: passes, loss scales, accumulation.
//
// A row's gradient is in one state (Grad, row.h), which this class alone changes:
//
//                    begin     end      cancel     read       write      step             zero_grad
//   kUnscaled        kStashed  kScaled  -          -          kUnscaled  kConsumed        -
//   kMirrored        kStashed  kScaled  -          -          kUnscaled  kConsumed        kUnscaled
//   kScaled          kStashed  kScaled  -          kMirrored  kUnscaled  kConsumedScaled  kUnscaled
//   kStashed         error     kScaled  kMirrored  -          -          error            kUnscaled
//   kConsumed        kStashed  kScaled  -          -          kUnscaled  -                kUnscaled
//   kConsumedScaled  kStashed  kScaled  -          -          kUnscaled  -                kUnscaled
//
// A row without a master is kUnscaled outside of a pass: the end unscales its gradient in place.
//   - begin adds the present gradient, unscaled, to `accumulated`, unless a step has used it.
//   - end without a begin: a GradScaler unscales what autograd left.
//   - read: .grad of a weight or of its master is read. A master in kUnscaled becomes kMirrored,
//     too; after an end a DTensor, whose reads are not seen, is kUnscaled.
//   - write: .grad of either is set. It is the gradient then, unscaled, and if it is FP32,
//     kMirrored.
// Every check, and every allocation, comes before the first change.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "inspector.h"
#include "param_table.h"

namespace ampfuse {

class GradientLedger {
 public:
  GradientLedger(ParamTable& table, Inspector& inspector);

  void check();
  void begin_backward();
  // Whether the pass, or the delayed one before it, left a gradient.
  bool end_backward(const at::Tensor& scale, bool check, bool delay);
  void cancel_backward();
  std::optional<at::Tensor> accumulated(int64_t row, bool make);
  void before_read(const at::Tensor& param);
  void assign(const at::Tensor& param, const std::optional<at::Tensor>& value);
  void materialize(bool all);
  void zero_grad(bool set_to_none);

  // A row's gradient now, without what earlier passes left in `accumulated`.
  const at::Tensor& gradient(const Row& row) const;
  // The same, after updating the row's state if the gradient was dropped unseen.
  const at::Tensor& synced_gradient(Row& row);
  // Whether the gradient of some master came from outside a pass, or since it ended.
  bool has_gradient_from_outside();
  const at::Tensor& scale() const { return scale_; }  // of gradients in kScaled
  // Whether there was a pass since the last step.
  bool had_pass() const { return had_pass_; }
  // Whether the next pass decides about its overflow.
  bool is_delayed() const { return delayed_; }
  // Whether the sum of earlier passes of some master was edited, which no inspection has seen.
  bool has_edited_sums() const { return edited_sums_; }
  // Ends a step. `stepped`: an update of ours stepped the rows that have a gradient.
  void consume(bool stepped);

 private:
  const at::Tensor& checked(Row& row);
  void add_up(bool begins, bool all);
  void restore(Row& row);
  void forget_pass();

  ParamTable& table_;
  Inspector& inspector_;
  at::Tensor scale_;
  bool any_scaled_ = false;  // some row may be in kScaled
  bool had_pass_ = false;
  bool stepped_ = false;  // no pass began or ended since the last step, and no zero_grad()
  bool delayed_ = false;
  bool earlier_were_inspected_ = true;  // every gradient that the running pass found was inspected
  bool edited_sums_ = false;
};

}  // namespace ampfuse
