// The gradients of an optimizer's rows between two steps.
#include <pybind11/pybind11.h>

#include "memory.h"
#include "param_table.h"
#include "torch_backend.h"

namespace ampfuse {

void ParamTable::begin_backward() {
  const at::Tensor none;
  bool fold = false;
  known_.before_pass = true;
  for (int64_t i = 0; i < rows(); ++i) {
    Row& row = rows_[i];
    at::Tensor& grad = row.leaf().mutable_grad();
    const bool pending = row.pending.is_or_was(grad);
    if (is_materialized(row)) {
      row.accumulated = source(row);
      if (row.accumulated.defined() && !row.inspected.is_unchanged(row.accumulated))
        known_.edited_sums = true;
      row.param.mutable_grad().reset();
    } else if (grad.defined() && row.model.defined() && !row.spent.is_or_was(grad)) {
      const at::Tensor& used = checked_gradient(row, grad);
      const at::Tensor earlier = row.accumulated;
      if (!earlier.defined()) row.accumulated = empty_laid_out_as(row.param);
      set_gradient(i, used, pending, earlier, row.accumulated);
      fold = true;
      continue;
    } else if (grad.defined() && !row.model.defined() && pending) {
      grad = checked_gradient(row, grad);
      set_gradient(i, grad, true, none, grad);
      fold = true;
      continue;
    } else if (grad.defined() && !row.model.defined()) {
      checked_gradient(row, grad);
      if (!row.inspected.is_unchanged(grad)) known_.before_pass = false;
    }
    set_gradient(i, none, false, none, none);
  }
  if (fold) {
    Inspection inspection;
    inspection.record = inspection.fresh = true;
    inspect(pending_scale_, inspection);
  }
  phase_.begin(fold);
  for (Row& row : rows_) {
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
  known_.norm = false;
}

void ParamTable::mark_backward(const at::Tensor& scale) {
  phase_.end_delayed();
  pending_scale_.copy_(scale);
  for (Row& row : rows_) {
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

bool ParamTable::end_backward(const at::Tensor& scale, bool check) {
  const at::Tensor none;
  bool any = false, left = phase_.includes_delayed();
  known_.norm = check;
  for (int64_t i = 0; i < rows(); ++i) {
    Row& row = rows_[i];
    at::Tensor& grad = row.leaf().mutable_grad();
    row.has_grad = grad.defined();
    left |= row.has_grad;
    set_gradient(i, none, false, none, none);
    if (row.accumulated.defined() && (row.model.defined() || !grad.defined())) known_.norm = false;
    if (!grad.defined()) {
      if (row.model.defined() || !row.accumulated.defined()) continue;
      grad = std::move(row.accumulated);
      if (!check || row.inspected.is_unchanged(grad)) continue;
      // Nobody has looked at it, as at zeros. By the next pass all are inspected.
      grad = checked_gradient(row, grad);
      set_gradient(i, none, false, grad, none);
      row.inspected.remember(grad);
      continue;
    }
    if (row.model.defined()) {
      const at::Tensor& used = checked_gradient(row, grad);
      row.pending.remember(grad);
      if (!check) continue;
      set_gradient(i, used, true, none, none);
    } else {
      grad = checked_gradient(row, grad);
      set_gradient(i, grad, true, row.accumulated, grad);
    }
    any = true;
  }
  // Also when the pass left no gradient: the loss scale asks for its verdict.
  // An overflow that an earlier pass was told of is not this one's.
  if (any || check) {
    Inspection inspection;
    inspection.record = check;
    inspection.same_pass = phase_.includes_delayed();
    inspection.fresh = known_.before_pass;
    inspection.keeps_scale = true;
    inspect(scale, inspection);
  } else {
    pending_scale_.copy_(scale);
  }
  phase_.end();
  for (Row& row : rows_) {
    if (!row.has_grad) continue;
    const at::Tensor& grad = row.leaf().mutable_grad();
    if (!row.model.defined()) {
      bump_version(grad);
      row.accumulated.reset();
    }
    row.copied_grad.reset();
    if (check) {
      row.inspected.remember(grad);
    } else {
      row.inspected.forget();
    }
  }
  return left;
}

std::optional<at::Tensor> ParamTable::accumulated(int64_t index, bool make) {
  Row& row = rows_.at(index);
  if (!row.accumulated.defined()) {
    if (!make) return std::nullopt;
    TORCH_CHECK(row.param.numel() == row.numel, row.name,
                " changed its shape after the optimizer was built");
    const at::ScalarType type = row.model.defined() ? at::kFloat : row.param.scalar_type();
    row.accumulated = empty_laid_out_as(row.param, type).zero_();
  }
  return row.accumulated;
}

void ParamTable::cancel_backward() {
  for (Row& row : rows_) {
    at::Tensor& grad = row.leaf().mutable_grad();
    grad.reset();
    if (!row.model.defined()) grad = std::move(row.accumulated);
  }
  phase_.cancel();
}

void ParamTable::materialize() {
  if (phase_.is_materialized() || !phase_.may_be_pending()) return;
  std::vector<int64_t> found;
  for (int64_t i = 0; i < rows(); ++i) {
    const Row& row = rows_[i];
    if (!row.model.defined()) continue;
    if (row.accumulated.defined() || row.pending.is_or_was(row.model.mutable_grad()))
      found.push_back(i);
  }
  if (found.empty()) return;
  std::vector<int64_t> numel;
  for (int64_t i : found) numel.push_back(rows_[i].numel);
  Table table(std::move(numel));
  std::vector<at::Tensor> alive;
  for (size_t i = 0; i < found.size(); ++i) {
    Row& row = rows_[found[i]];
    const at::Tensor accumulated = std::move(row.accumulated);
    at::Tensor out = accumulated.defined() ? accumulated : empty_laid_out_as(row.param);
    bool inspected = true;
    if (row.pending.is_or_was(row.model.mutable_grad())) {
      inspected = row.inspected.is_unchanged(row.model.mutable_grad());
      const at::Tensor grad = checked_gradient(row, row.model.mutable_grad());
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
  args.scale = pending_scale_.data_ptr<float>();
  const DeviceScope scope(device_);
  scope.backend().inspect(table, args, scope.stream());
  phase_.materialize();
  known_.norm = false;
}

void ParamTable::zero_grad(bool set_to_none) {
  for (Row& row : rows_) {
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
  phase_.spend();
  known_.norm = known_.edited_sums = false;
}

}  // namespace ampfuse
