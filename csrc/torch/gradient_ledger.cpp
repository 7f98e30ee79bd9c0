#include "gradient_ledger.h"

#include <ATen/ops/ones.h>

#include "memory.h"
#include "shards.h"
#include "torch_backend.h"

namespace ampfuse {

GradientLedger::GradientLedger(ParamTable& table, Inspector& inspector)
    : table_(table),
      inspector_(inspector),
      scale_(at::ones({}, at::TensorOptions().dtype(at::kFloat).device(table.device))) {}

// Zeroing the gradients of the model or those of the masters empties a materialized row alike.
const at::Tensor& GradientLedger::gradient(const Row& row) const {
  const at::Tensor& grad = row.gradient();
  return is_materialized(row) && grad.defined() ? row.param.mutable_grad() : grad;
}

void GradientLedger::begin_backward() {
  const LocalGradients local(table_);
  const at::Tensor none;
  bool fold = false;
  knows_earlier_ = true;
  std::vector<Row>& rows = table_.rows();
  for (size_t i = 0; i < rows.size(); ++i) {
    Row& row = rows[i];
    at::Tensor& grad = row.leaf().mutable_grad();
    const bool pending = row.pending.is_or_was(grad);
    if (is_materialized(row)) {
      row.accumulated = gradient(row);
      if (row.accumulated.defined() && !row.inspected.is_unchanged(row.accumulated))
        edited_sums_ = true;
      row.param.mutable_grad().reset();
    } else if (grad.defined() && row.model.defined() && !row.spent.is_or_was(grad)) {
      const at::Tensor& used = row.checked(grad, table_.device);
      const at::Tensor earlier = row.accumulated;
      if (!earlier.defined()) row.accumulated = empty_laid_out_as(row.param);
      table_.set_gradient(i, used, pending, earlier, row.accumulated);
      fold = true;
      continue;
    } else if (grad.defined() && !row.model.defined() && pending) {
      grad = row.checked(grad, table_.device);
      table_.set_gradient(i, grad, true, none, grad);
      fold = true;
      continue;
    } else if (grad.defined() && !row.model.defined()) {
      row.checked(grad, table_.device);
      if (!row.inspected.is_unchanged(grad)) knows_earlier_ = false;
    }
    table_.set_gradient(i, none, false, none, none);
  }
  if (fold) {
    Inspection inspection;
    inspection.record = inspection.fresh = true;
    inspector_.inspect(scale_, inspection);
  }
  includes_delayed_ = fold && phase_ == Phase::kDelayed;
  phase_ = Phase::kBackward;
  materialized_ = false;
  for (Row& row : table_.rows()) {
    at::Tensor& grad = row.leaf().mutable_grad();
    if (!row.model.defined()) {  // stashed until end_backward
      row.accumulated = row.copied_grad.defined() ? row.copied_grad : grad;
      // The next pass writes over a gradient in a bucket of DistributedDataParallel.
      if (grad.defined() && grad.storage().use_count() > 1)
        row.accumulated = empty_laid_out_as(row.param, grad.scalar_type()).copy_(grad);
    }
    grad.reset();
    row.copied_grad.reset();
    row.pending.forget();
    row.spent.forget();
  }
  inspector_.knows_norm = false;
}

void GradientLedger::mark_backward(const at::Tensor& scale) {
  const LocalGradients local(table_);
  phase_ = Phase::kDelayed;
  scale_.copy_(scale);
  for (Row& row : table_.rows()) {
    at::Tensor& grad = row.leaf().mutable_grad();
    if (grad.defined()) row.pending.remember(grad);
    row.inspected.forget();
    if (row.model.defined() || !row.accumulated.defined()) continue;
    // The stash is unscaled and the new gradient is not, so they meet in the scaled one.
    if (grad.defined()) {
      grad.add_(row.accumulated.mul(scale));
    } else {
      grad = row.accumulated;
    }
    row.accumulated.reset();
  }
}

bool GradientLedger::end_backward(const at::Tensor& scale, bool check) {
  const LocalGradients local(table_);
  const at::Tensor none;
  bool any = false, left = includes_delayed_;
  inspector_.knows_norm = check;
  std::vector<Row>& rows = table_.rows();
  for (size_t i = 0; i < rows.size(); ++i) {
    Row& row = rows[i];
    at::Tensor& grad = row.leaf().mutable_grad();
    row.has_grad = grad.defined();
    left |= row.has_grad;
    table_.set_gradient(i, none, false, none, none);
    if (row.accumulated.defined() && (row.model.defined() || !grad.defined()))
      inspector_.knows_norm = false;
    if (!grad.defined()) {
      if (row.model.defined() || !row.accumulated.defined()) continue;
      grad = std::move(row.accumulated);
      if (!check || row.inspected.is_unchanged(grad)) continue;
      // Nobody has looked at it, as at zeros. By the next pass all are inspected.
      grad = row.checked(grad, table_.device);
      table_.set_gradient(i, none, false, grad, none);
      row.inspected.remember(grad);
      continue;
    }
    if (row.model.defined()) {
      const at::Tensor& used = row.checked(grad, table_.device);
      row.pending.remember(grad);
      if (!check) continue;
      table_.set_gradient(i, used, true, none, none);
    } else {
      grad = row.checked(grad, table_.device);
      table_.set_gradient(i, grad, true, row.accumulated, grad);
    }
    any = true;
  }
  // Also when the pass left no gradient: the loss scale asks for its verdict.
  // An overflow that an earlier pass was told of is not this one's.
  if (any || check) {
    Inspection inspection;
    inspection.record = check;
    inspection.same_pass = includes_delayed_;
    inspection.fresh = knows_earlier_;
    inspection.kept_scale = scale_.data_ptr<float>();
    inspector_.inspect(scale, inspection);
  } else {
    scale_.copy_(scale);
  }
  phase_ = Phase::kPending;
  includes_delayed_ = false;
  for (Row& row : rows) {
    if (!row.has_grad) continue;
    row.copied_grad.reset();
    if (row.model.defined()) continue;
    bump_version(row.param.mutable_grad());
    row.accumulated.reset();
  }
  for (Row& row : rows) {  // views of one bucket have one version
    if (!row.has_grad) continue;
    if (check) {
      row.inspected.remember(row.leaf().mutable_grad());
    } else {
      row.inspected.forget();
    }
  }
  return left;
}

bool GradientLedger::take_new() {
  const LocalGradients local(table_);
  bool found = phase_ == Phase::kIdle;
  for (const Row& row : table_.rows()) {
    if (!row.model.defined() || !row.model.mutable_grad().defined()) continue;
    const at::Tensor& grad = row.model.mutable_grad();
    found |=
        materialized_ ? !grad.is_same(row.param.mutable_grad()) : !row.pending.is_unchanged(grad);
  }
  if (found && materialized_) {
    for (Row& row : table_.rows())
      if (row.model.defined()) row.param.mutable_grad().reset();
    materialized_ = false;
  }
  return found;
}

std::optional<at::Tensor> GradientLedger::accumulated(int64_t index, bool make) {
  Row& row = table_.rows().at(index);
  if (!row.accumulated.defined()) {
    if (!make) return std::nullopt;
    TORCH_CHECK(row.param.numel() == row.numel, row.name,
                " changed its shape after the optimizer was built");
    const at::ScalarType type = row.model.defined() ? at::kFloat : row.param.scalar_type();
    row.accumulated = empty_laid_out_as(row.param, type).zero_();
  }
  return row.accumulated;
}

void GradientLedger::cancel_backward() {
  const LocalGradients local(table_);
  for (Row& row : table_.rows()) {
    at::Tensor& grad = row.leaf().mutable_grad();
    grad.reset();
    if (!row.model.defined()) grad = std::move(row.accumulated);
  }
  phase_ = Phase::kPending;
}

void GradientLedger::materialize() {
  if (materialized_ || !may_be_pending()) return;
  const LocalGradients local(table_);
  std::vector<int64_t> found;
  std::vector<Row>& rows = table_.rows();
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    if (!row.model.defined()) continue;
    if (row.accumulated.defined() || row.pending.is_or_was(row.model.mutable_grad()))
      found.push_back(i);
  }
  if (found.empty()) return;
  std::vector<int64_t> numel;
  for (int64_t i : found) numel.push_back(rows[i].numel);
  Table table(std::move(numel));
  std::vector<at::Tensor> alive;
  for (size_t i = 0; i < found.size(); ++i) {
    Row& row = rows[found[i]];
    const at::Tensor accumulated = std::move(row.accumulated);
    at::Tensor out = accumulated.defined() ? accumulated : empty_laid_out_as(row.param);
    bool inspected = true;
    if (row.pending.is_or_was(row.model.mutable_grad())) {
      inspected = row.inspected.is_unchanged(row.model.mutable_grad());
      const at::Tensor grad = row.checked(row.model.mutable_grad(), table_.device);
      row.copied_grad.reset();
      table.set(kGrad, int64_t(i), grad.data_ptr(), dtype_of(grad, row.name));
      alive.push_back(grad);
    }
    if (accumulated.defined())
      table.set(kAccumulated, int64_t(i), accumulated.data_ptr(), DType::kFloat32);
    table.set(kGradOut, int64_t(i), out.data_ptr(), DType::kFloat32);
    table.set_scaled(int64_t(i), true);
    // One tensor under both names: whoever edits it, through the master or the model, edits what
    // the step uses.
    row.param.mutable_grad() = out;
    row.model.mutable_grad() = out;
    row.pending.forget();
    row.inspected.forget();
    if (inspected) row.inspected.remember(out);
  }
  InspectArgs args;
  args.scale = scale_.data_ptr<float>();
  const DeviceScope scope(table_.device);
  scope.backend().inspect(table, args, scope.stream());
  materialized_ = true;
  inspector_.knows_norm = false;
}

void GradientLedger::zero_grad(bool set_to_none) {
  const LocalGradients local(table_);
  for (Row& row : table_.rows()) {
    at::Tensor& grad = row.leaf().mutable_grad();
    if (set_to_none) {
      grad.reset();
    } else if (grad.defined()) {
      if (grad.grad_fn()) grad = grad.detach();
      grad.zero_();
    }
    if (row.model.defined()) row.param.mutable_grad().reset();
    row.accumulated.reset();
    row.pending.forget();
    row.inspected.forget();
    row.spent.forget();
  }
  go_idle();
}

void GradientLedger::spend(bool stepped) {
  std::vector<Row>& rows = table_.rows();
  for (size_t i = 0; i < rows.size(); ++i) {
    prefetch_versions(rows, i);
    Row& row = rows[i];
    if (stepped && (row.has_grad || row.accumulated.defined())) row.mark_stepped();
    if (stepped && row.unscales) {
      if (row.copied_grad.defined()) row.set_gradient(row.copied_grad);
      bump_version(row.gradient());
    }
    if (row.model.defined()) {
      const at::Tensor& grad = row.gradient();
      if (grad.defined()) row.spent.remember(grad);
      if (materialized_) row.param.mutable_grad().reset();
      row.accumulated.reset();
    }
    row.copied_grad.reset();
    row.inspected.forget();
    row.borrowed = nullptr;
  }
  ++table_.changes;
  go_idle();
}

void GradientLedger::go_idle() {
  phase_ = Phase::kIdle;
  materialized_ = false;
  inspector_.knows_norm = edited_sums_ = false;
}

}  // namespace ampfuse
