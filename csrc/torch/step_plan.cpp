#include "step_plan.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <pybind11/pybind11.h>

#include "core/ops.h"
#include "shards.h"
#include "torch_backend.h"

namespace ampfuse {
namespace {

// pass(algorithm) for each algorithm of the table, over the rows that have it.
template <class Pass>
void for_algorithms(ParamTable& table, const Pass& pass) {
  struct AllRowsAgain {
    Table& rows;
    ~AllRowsAgain() { rows.only_algorithm = -1; }
  };
  const AllRowsAgain after{table.core()};
  const std::vector<Algorithm>& all = table.algorithms();
  for (const Algorithm algorithm : all) {
    if (all.size() > 1) after.rows.only_algorithm = algorithm.index();
    pass(algorithm);
  }
}

}  // namespace

// Checks the gradient of a row and gives it to the core. Returns whether it carries the ledger's
// loss scale.
bool StepPlan::collect_gradient(int64_t index, const std::optional<at::Tensor>& scale,
                                bool write_back, bool write_back_half) {
  const at::Tensor none;
  Row& row = table_.rows()[size_t(index)];
  const at::Tensor& grad = ledger_.synced_gradient(row);
  row.has_grad = grad.defined();
  TORCH_CHECK(row.grad_state != Grad::kStashed,
              "step() inside a backward pass of scale_loss; call it after the context has ended");
  const bool carries_scale = row.has_grad && row.carries_scale();
  const at::Tensor& used = row.has_grad ? row.checked(grad, table_.device) : none;
  row.writes_unscaled =
      write_back && scale && row.has_grad && (write_back_half || used.scalar_type() == at::kFloat);
  table_.set_gradient(index, used, scale || carries_scale, row.accumulated, none);
  table_.set_unscaled(index, row.writes_unscaled ? used : none);
  if (row.has_grad ? !row.inspected.is_unchanged(grad) : row.inspected.impl.has_value())
    unchanged_ = false;
  return carries_scale;
}

std::optional<std::vector<int64_t>> StepPlan::collect(const std::optional<at::Tensor>& scale,
                                                      bool write_back, bool write_back_half,
                                                      pybind11::handle groups,
                                                      pybind11::handle states) {
  collected_at_ = -1;
  if (!table_.matches(groups, states)) return std::nullopt;
  std::vector<Row>& rows = table_.rows();
  if (table_.has_shards) borrow_local_gradients(rows);
  bool of_pass = ledger_.had_pass();
  unchanged_ = !ledger_.has_edited_sums();
  edited_.clear();
  staged_.clear();
  std::vector<int64_t> stateless;
  // Every check comes before the first change of a value. (Tensors may be laid out anew before.)
  for (size_t i = 0; i < rows.size(); ++i) {
    prefetch_row(rows, i);
    Row& row = rows[i];
    table_.follow_storage(i);
    if (row.was_edited()) edited_.push_back(i);
    of_pass |= collect_gradient(i, scale, write_back, write_back_half);
    if (!row.has_grad && !row.accumulated.defined()) continue;
    if (row.algorithm != Algorithm::of<NoOp>() && !row.has_states) stateless.push_back(i);
    if (info(row.algorithm).scratch >= 0) staged_.push_back(i);
  }
  TORCH_CHECK(!(scale && of_pass),
              "these gradients carry the loss scale of amp.scale_loss and a GradScaler's as "
              "well; use one of the two");
  // After scale_loss the step belongs to its scale, even if every gradient is unscaled by now.
  collected_at_ = table_.changes;
  scale_ = of_pass ? ledger_.scale() : scale.value_or(at::Tensor());
  return stateless;
}

// Whether the last inspection was of the gradients that collect() found.
bool StepPlan::is_measured() const {
  return unchanged_ && inspector_.knows_norm &&
         (inspector_.knows_row_norms || !inspector_.needs_row_norms());
}

void StepPlan::inspect_collected(const Preparation& preparation) {
  Inspection inspection;
  inspection.record = true;
  inspection.preparation = preparation;
  inspector_.inspect(scale_, inspection);
  inspector_.knows_norm = unchanged_ = true;
}

void StepPlan::check_collected() const {
  TORCH_CHECK(collected_at_ == table_.changes,
              "the gradients changed after collect(); call it again");
}

void StepPlan::measure() {
  check_collected();
  if (!is_measured()) inspect_collected({});
  for (Row& row : table_.rows()) {
    if (row.has_grad) row.inspected.remember(ledger_.gradient(row));
  }
}

void StepPlan::decide(const StepOptions& options) {
  check_collected();
  const bool needs_norm =
      options.max_norm > 0 || options.skip_spikes > 0 || inspector_.needs_row_norms();
  const bool inspects = (needs_norm || (options.inspect && !unchanged_)) && !is_measured();
  Preparation preparation;
  preparation.state = inspector_.state();
  StepDecision& decision = preparation.decision;
  decision.loss_scale = float_pointer(scale_, "scale", table_.device);
  decision.found_inf = float_pointer(options.found_inf, "found_inf", table_.device);
  decision.max_norm = options.max_norm;
  decision.norm_known = knew_norm = inspects || (inspector_.knows_norm && unchanged_);
  TORCH_INTERNAL_ASSERT(decision.norm_known || !needs_norm);
  decision.skip_nonfinite = options.skip_nonfinite;
  decision.skip_spikes = options.skip_spikes;
  RowColumns& columns = preparation.columns;
  columns.steps = table_.steps().data_ptr<float>();
  if (inspector_.needs_row_norms()) {
    columns.grad_norms = inspector_.row_norms(Inspector::kGradNorm);
    columns.grad_largest = inspector_.row_norms(Inspector::kGradLargest);
  }
  if (table_.needs_grad_norms()) columns.norm_averages = table_.norm_averages().data_ptr<float>();
  float* const param_norms =
      table_.is_layerwise() ? inspector_.row_norms(Inspector::kParamNorm) : nullptr;
  columns.param_norms = param_norms;
  Table& rows = table_.core();
  const DeviceScope scope(table_.device);
  if (param_norms) {
    const pybind11::gil_scoped_release release;
    scope.backend().measure_params(rows, param_norms, scope.stream());
  }
  if (inspects) return inspect_collected(preparation);
  inspector_.share_row_norms(false, param_norms != nullptr);
  scope.backend().prepare(rows, preparation, scope.stream());
}

std::vector<at::Tensor> StepPlan::new_meter(bool changed) {
  for (const Row& row : table_.rows()) {
    TORCH_CHECK(row.param.numel() >> 32 == 0, row.name, " has ", row.param.numel(),
                " elements; the meter counts in 32 bits. Step it with an optimizer of its own.");
  }
  const int64_t rows = table_.row_count();
  const auto options = at::TensorOptions().device(table_.device);
  std::vector<at::Tensor> buffers = {at::zeros({rows, kMeterCounts}, options.dtype(at::kInt)),
                                     at::zeros({2, rows}, options.dtype(at::kFloat))};
  if (changed) {
    const int64_t chunks = table_.core().view().chunk_count;
    buffers.push_back(at::empty({chunks, kChunk / 8}, options.dtype(at::kByte)));
  }
  return buffers;
}

Meter StepPlan::meter_of(const std::vector<at::Tensor>& buffers) {
  const int64_t rows = table_.row_count();
  Meter meter;
  meter.counts = reinterpret_cast<uint32_t*>(
      pointer_to<int32_t>(buffers.at(0), "counts", rows * kMeterCounts, table_.device));
  meter.norms = pointer_to<float>(buffers.at(1), "norms", 2 * rows, table_.device);
  if (buffers.size() > 2) {
    const int64_t bytes = table_.core().view().chunk_count * (kChunk / 8);
    meter.changed = pointer_to<uint8_t>(buffers[2], "changed", bytes, table_.device);
  }
  return meter;
}

// Returns a function that takes the next decision back. First stages on scratch memory, which come
// before `between`, change nothing else.
std::function<void()> StepPlan::undo_of_decision() {
  return [this, state = inspector_.state_bytes().clone(), counts = table_.steps().clone(),
          averages = table_.needs_grad_norms() ? table_.norm_averages().clone() : at::Tensor(),
          inspector_knew = inspector_.knows_norm, plan_knew = knew_norm] {
    inspector_.state_bytes().copy_(state);
    table_.steps().copy_(counts);
    if (averages.defined()) table_.norm_averages().copy_(averages);
    inspector_.knows_norm = inspector_knew;
    knew_norm = plan_knew;
    collected_at_ = -1;
  };
}

void StepPlan::run_first_stages(const DeviceScope& scope, bool with_scratch) {
  const pybind11::gil_scoped_release release;
  for_algorithms(table_, [&](Algorithm algorithm) {
    if (with_scratch != (info(algorithm).scratch >= 0)) return;
    float* const norms =
        scope.backend().first_stage(table_.core(), algorithm, inspector_.state(), scope.stream());
    if (norms && inspector_.is_shared()) {
      const pybind11::gil_scoped_acquire acquire;
      inspector_.share_measures(norms);
    }
  });
}

void StepPlan::update_rows(const DeviceScope& scope, bool with_scratch, const Meter* meter) {
  const pybind11::gil_scoped_release release;
  for_algorithms(table_, [&](Algorithm algorithm) {
    if (with_scratch != (info(algorithm).scratch >= 0)) return;
    scope.backend().update(table_.core(), algorithm, inspector_.state(), meter, scope.stream());
  });
}

bool StepPlan::update(const StepOptions& options,
                      const std::optional<std::vector<at::Tensor>>& meter,
                      const std::optional<Between>& between) {
  if (table_.rows().empty()) return false;
  check_collected();
  TORCH_CHECK_VALUE(between || staged_.empty(), "rows have a step of two stages; pass `between`");
  const Meter metered = meter ? meter_of(*meter) : Meter();
  Masters(table_).refresh(edited_);
  std::function<void()> undo, finish;
  if (between) undo = undo_of_decision();
  decide(options);
  const DeviceScope scope(table_.device);
  run_first_stages(scope, true);
  // On a CPU the host sees the skip decision. A device runs `between` in vain if it skips.
  const bool skipped = !table_.device.is_cuda() && inspector_.state()->skip != 0;
  if (between && !skipped) {
    try {
      finish = (*between)(staged_);
    } catch (...) {
      undo();
      throw;
    }
  }
  const Meter* const into = meter ? &metered : nullptr;
  run_first_stages(scope, false);
  update_rows(scope, false, into);
  if (finish) finish();
  update_rows(scope, true, into);
  ledger_.consume(true);
  return skipped;
}

void StepPlan::finish_step() { ledger_.consume(false); }

void StepPlan::mark_stepped() {
  for (Row& row : table_.rows()) row.mark_stepped();
}

}  // namespace ampfuse
