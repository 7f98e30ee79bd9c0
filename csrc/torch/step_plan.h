// One step: what is inspected, how it is decided, what is updated. No other file decides that.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "gradient_ledger.h"
#include "inspector.h"
#include "masters.h"
#include "param_table.h"

namespace ampfuse {

// What a step is decided by, apart from the gradients.
struct StepOptions {
  std::optional<at::Tensor> found_inf;  // the flag of an inspection elsewhere
  double max_norm = 0;                  // gradients are clipped to it; 0: not at all
  bool inspect = false;                 // look at the gradients even if nothing below needs it
  bool skip_nonfinite = false;
  // A step is skipped whose norm lies more than so many deviations above the mean, both of the
  // norm's logarithm; 0: none.
  double skip_spikes = 0;
};

class StepPlan {
 public:
  // Called between the two stages of the given rows, it works on their scratch memory; if it
  // throws, nothing has changed. The function that it returns is called after all other rows are
  // updated; if that throws, half of the step is done, and the training has to start again from a
  // checkpoint.
  using Between = std::function<std::function<void()>(const std::vector<int64_t>&)>;

  bool knew_norm = false;  // whether the last step knew the norm of its gradients

  StepPlan(ParamTable& table, Inspector& inspector, GradientLedger& ledger)
      : table_(table), inspector_(inspector), ledger_(ledger) {}

  // `write_back`: the update writes gradients in FP32 back without `scale`; `write_back_half`: the
  // others too.
  std::optional<std::vector<int64_t>> collect(const std::optional<at::Tensor>& scale,
                                              bool write_back, bool write_back_half,
                                              pybind11::handle groups, pybind11::handle states);
  void measure();
  void decide(const StepOptions& options);
  // Counts, zeros, int32 [rows, kMeterCounts]; norms, zeros, float32 [2, rows]; and, if asked for,
  // bits of changed weights, uint8 [chunks, kChunk / 8], which are valid in rows that are stepped.
  // See core/meter.h.
  std::vector<at::Tensor> new_meter(bool changed);
  // Returns true if the host knows that the step was skipped, which it does on a CPU.
  bool update(const StepOptions& options, const std::optional<std::vector<at::Tensor>>& meter,
              const std::optional<Between>& between);
  void finish_step();
  void mark_stepped();

 private:
  bool collect_gradient(int64_t index, const std::optional<at::Tensor>& scale, bool write_back,
                        bool write_back_half);
  bool is_measured() const;
  void check_collected() const;
  void inspect_collected(const Preparation& preparation);
  std::function<void()> undo_of_decision();
  // `with_scratch`: the rows whose algorithm works on scratch memory; else all others.
  void run_first_stages(const DeviceScope& scope, bool with_scratch);
  void update_rows(const DeviceScope& scope, bool with_scratch, const Meter* meter);
  Meter meter_of(const std::vector<at::Tensor>& buffers);

  ParamTable& table_;
  Inspector& inspector_;
  GradientLedger& ledger_;
  // What collect() found; valid as long as nothing has changed since.
  int64_t collected_at_ = -1;    // table_.changes then
  at::Tensor scale_;             // of the gradients; undefined: 1
  bool unchanged_ = false;       // the gradients are those that were inspected last
  std::vector<int64_t> staged_;  // rows that have work between two stages
  std::vector<int64_t> edited_;  // rows whose model weight was edited
};

}  // namespace ampfuse
