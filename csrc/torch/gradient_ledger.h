// Gradients between two steps: passes, loss scales, accumulation.
//
// Every row's gradient is in one state (Grad, row.h), which this class alone changes. What it was in,
// and what happens to it:
//
//             begin     end       cancel    read      write     step      zero_grad
//   kTrue     kStashed  kScaled   -         kTrue     kTrue     -         -
//   kShown    kStashed  kScaled   -         -         kTrue     -         kTrue
//   kScaled   kStashed  kScaled   -         kShown    kTrue     -         kTrue
//   kStashed  error     kScaled   kShown    -         -         error     kTrue
//
// In a row without a master, where kTrue is all that it is in outside of a pass, read kTrue for
// kScaled and kShown: its gradient is unscaled in place. So is, with a new tensor, that of a DTensor.
//   - read: somebody looks at .grad, of the master or of its weight. Looking at a weight's changes
//     what carries the scale alone, and nothing after a step: model.zero_grad() looks at all.
//   - write: somebody assigns .grad, of either. That is the gradient then, in true values; in FP32
//     under both names (kShown).
//   - end, outside of a pass: a GradScaler unscales. The gradients are as autograd left them.
//   - a delayed end leaves the verdict on its pass to the next one.
// A state that says more than .grad is defined where .grad is: who drops that of a row whose weight
// has no property of ours drops all. In each function every check, and what takes memory, comes
// before the first change.
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
  bool end_backward(const at::Tensor& scale, bool check, bool delay);
  void cancel_backward();
  std::optional<at::Tensor> accumulated(int64_t row, bool make);
  void look(const at::Tensor& param);
  void assign(const at::Tensor& param, const std::optional<at::Tensor>& value);
  void materialize(bool all);
  void zero_grad(bool set_to_none);

  // A row's gradient now; beside it there is what earlier passes left in `accumulated`.
  const at::Tensor& gradient(const Row& row) const;
  // ... without what was left beside one that somebody has dropped, or zeroed after a step.
  const at::Tensor& settled_gradient(Row& row);
  const at::Tensor& scale() const { return scale_; }  // of gradients in kScaled
  // Since the last step there was a pass.
  bool had_pass() const { return had_pass_; }
  // Its verdict is left to the next one.
  bool is_delayed() const { return delayed_; }
  // Somebody edited what earlier passes left beside a master, which no inspection has seen.
  bool has_edited_sums() const { return edited_sums_; }
  // A step is over. `stepped`: the rows that have a gradient were, by an update of ours.
  void spend(bool stepped);

 private:
  const at::Tensor& laid_out(const Row& row) const;
  void check_rows();
  void add_up(bool all, bool record);
  void restore(Row& row);
  void go_idle();

  ParamTable& table_;
  Inspector& inspector_;
  at::Tensor scale_;
  bool any_scaled_ = false;  // some row may be
  bool had_pass_ = false;
  bool stepped_ = false;        // nothing has come since the last step
  bool delayed_ = false;
  bool knows_earlier_ = true;  // every gradient that the running pass found was inspected
  bool edited_sums_ = false;
};

}  // namespace ampfuse
