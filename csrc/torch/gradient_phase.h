// The life of gradients between two steps.
//
// Where they are, per row with a master (`model` is set):
//   - autograd fills model.grad. Between scale_loss and step it is *pending*: scaled by
//     `pending_scale`.
//   - `accumulated` holds earlier passes, FP32 and unscaled.
//   - once somebody reads a gradient of a master or of its model weight, both .grad are one FP32
//     unscaled tensor, until the step or the next backward: they are *materialized*.
// A row without a master has param.grad alone; during a backward pass its earlier gradient is
// stashed in `accumulated`.
#pragma once

namespace ampfuse {

enum class Phase {
  kIdle,      // gradients are as autograd or a user left them
  kBackward,  // a pass of scale_loss runs; what came before it is stashed
  kPending,   // it ended
  kDelayed,   // it ended without an inspection: the next pass begins with it, or the step
};

class GradientPhase {
 public:
  // A pass begins. `folds`: gradients from before were inspected as they were put away.
  void begin(bool folds) {
    includes_delayed_ = folds && phase_ == Phase::kDelayed;
    phase_ = Phase::kBackward;
    materialized_ = false;
  }
  void end() {
    phase_ = Phase::kPending;
    includes_delayed_ = false;
  }
  void end_delayed() { phase_ = Phase::kDelayed; }
  void cancel() { phase_ = Phase::kPending; }
  void materialize() { materialized_ = true; }
  // A step used them up, or they were zeroed.
  void spend() {
    phase_ = Phase::kIdle;
    materialized_ = false;
  }

  // Since the last step there was a pass: gradients may be pending.
  bool may_be_pending() const { return phase_ != Phase::kIdle; }
  // Masters have their gradients.
  bool is_materialized() const { return materialized_; }
  // An overflow of the delayed pass before counts as one of the running pass.
  bool includes_delayed() const { return includes_delayed_; }

 private:
  Phase phase_ = Phase::kIdle;
  bool materialized_ = false;
  bool includes_delayed_ = false;
};

}  // namespace ampfuse
