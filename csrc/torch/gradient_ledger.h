// Gradients between two steps: passes, loss scales, accumulation. The only one that knows phases.
//
// Where they are, per row with a master (`model` is set):
//   - autograd fills model.grad. Between scale_loss and step it is *pending*: scaled by `scale()`.
//   - `accumulated` holds earlier passes, FP32 and unscaled.
//   - once somebody reads a gradient of a master or of its model weight, both .grad are one FP32
//     unscaled tensor, until the step or the next backward: they are *materialized*.
// A row without a master has param.grad alone; during a backward pass its earlier gradient is
// stashed in `accumulated`.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "inspector.h"
#include "param_table.h"

namespace ampfuse {

class GradientLedger {
 public:
  GradientLedger(ParamTable& table, Inspector& inspector);

  void begin_backward();
  bool end_backward(const at::Tensor& scale, bool check);
  void mark_backward(const at::Tensor& scale);
  void cancel_backward();
  std::optional<at::Tensor> accumulated(int64_t row, bool make);
  void materialize();
  void zero_grad(bool set_to_none);

  // A row's gradient now; of a materialized row empty after zeroing that of either tensor.
  const at::Tensor& gradient(const Row& row) const;
  bool is_materialized(const Row& row) const { return row.model.defined() && materialized_; }
  const at::Tensor& scale() const { return scale_; }  // of pending gradients
  // Whether a gradient came from outside a pass, or since it ended. What was materialized before is
  // forgotten then.
  bool take_new();
  // Since the last step there was a pass.
  bool may_be_pending() const { return phase_ != Phase::kIdle; }
  // Somebody edited what earlier passes left beside a master, which no inspection has seen.
  bool has_edited_sums() const { return edited_sums_; }
  // A step is over. `stepped`: the rows that have a gradient were, by an update of ours.
  void spend(bool stepped);

 private:
  enum class Phase {
    kIdle,      // gradients are as autograd or a user left them
    kBackward,  // a pass of scale_loss runs; what came before it is stashed
    kPending,   // it ended
    kDelayed,   // it ended without an inspection: the next pass begins with it, or the step
  };

  void go_idle();

  ParamTable& table_;
  Inspector& inspector_;
  at::Tensor scale_;
  Phase phase_ = Phase::kIdle;
  bool materialized_ = false;      // masters have their gradients
  bool includes_delayed_ = false;  // the running pass: its overflow may be the delayed one's
  bool knows_earlier_ = true;      // every gradient that the running pass found was inspected
  bool edited_sums_ = false;
};

}  // namespace ampfuse
