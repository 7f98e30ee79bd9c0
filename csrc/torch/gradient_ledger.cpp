#include "gradient_ledger.h"

#include <ATen/ops/ones.h>

#include "memory.h"
#include "shards.h"
#include "torch_backend.h"

namespace ampfuse {

static at::Tensor& grad_of(const Row& row) { return row.leaf().mutable_grad(); }

static bool is_float(const at::Tensor& grad) {
  return grad.defined() && grad.scalar_type() == at::kFloat;
}

GradientLedger::GradientLedger(ParamTable& table, Inspector& inspector)
    : table_(table),
      inspector_(inspector),
      scale_(at::ones({}, at::TensorOptions().dtype(at::kFloat).device(table.device))) {}

const at::Tensor& GradientLedger::gradient(const Row& row) const {
  const at::Tensor& grad = row.gradient();
  // DistributedDataParallel rebuilds its buckets after the first pass, and replaces gradients with
  // views of them, in the weights' types. The master's gradient is still exact.
  const bool was_rounded = row.grad_state == Grad::kMirrored && grad.defined() && !is_float(grad);
  return was_rounded ? row.param.mutable_grad() : grad;
}

const at::Tensor& GradientLedger::synced_gradient(Row& row) {
  const at::Tensor& grad = gradient(row);
  if (!grad.defined() && row.grad_state == Grad::kScaled) row.accumulated.reset();
  if (!grad.defined() && row.grad_state != Grad::kStashed) row.grad_state = Grad::kUnscaled;
  return grad;
}

// The gradient in the parameter's layout; throws if no kernel can read it.
const at::Tensor& GradientLedger::checked(Row& row) {
  row.copied_grad.reset();
  const at::Tensor& grad = synced_gradient(row);
  return grad.defined() ? row.checked(grad, table_.device) : grad;
}

void GradientLedger::check() {
  const LocalGradients local(table_);
  for (Row& row : table_.rows()) checked(row);
}

// Whether the gradient of a row with a master is added to its sum: with `all` if no step has used
// it, else if it carries the scale.
static bool is_added(const Row& row, bool all) {
  return row.model.defined() && (all ? !row.is_used() : row.carries_scale());
}

// Adds these when a pass begins or a gradient is read. They are checked already.
void GradientLedger::add_up(bool begins, bool all) {
  const at::Tensor none;
  std::vector<Row>& rows = table_.rows();
  std::vector<at::Tensor> sums(rows.size());
  std::vector<size_t> read;  // by a kernel
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    if (!is_added(row, all)) continue;
    const at::Tensor& grad = row.copied_grad.defined() ? row.copied_grad : gradient(row);
    if (!row.carries_scale() && (!grad.defined() || is_float(grad))) {
      sums[i] = grad;
    } else {
      sums[i] = row.accumulated.defined() ? row.accumulated : empty_laid_out_as(row.param);
      read.push_back(i);
    }
  }
  if (!read.empty()) {
    for (size_t i = 0; i < rows.size(); ++i) table_.set_gradient(i, none, false, none, none);
    for (size_t i : read) {
      const Row& row = rows[i];
      const at::Tensor& grad = row.copied_grad.defined() ? row.copied_grad : gradient(row);
      table_.set_gradient(i, grad, row.carries_scale(), row.accumulated, sums[i]);
    }
    Inspection inspection;
    inspection.record = inspection.fresh = begins;
    inspection.same_pass = delayed_;
    inspector_.inspect(scale_, inspection);
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    if (sums[i].defined()) rows[i].accumulated = std::move(sums[i]);
  }
  inspector_.knows_norm = any_scaled_ = false;
}

// Puts the stashed gradient back into .grad.
void GradientLedger::restore(Row& row) {
  at::Tensor& grad = grad_of(row);
  grad = std::move(row.accumulated);
  row.copied_grad.reset();
  const bool is_mirrored = row.model.defined() && !row.shard.whole.defined();
  if (is_mirrored) row.param.mutable_grad() = grad;
  row.grad_state = is_mirrored && grad.defined() ? Grad::kMirrored : Grad::kUnscaled;
}

void GradientLedger::begin_backward() {
  const LocalGradients local(table_);
  std::vector<Row>& rows = table_.rows();
  std::vector<at::Tensor> stash(rows.size());
  bool knows_earlier = true, edited = false;
  for (size_t i = 0; i < rows.size(); ++i) {
    Row& row = rows[i];
    TORCH_CHECK(row.grad_state != Grad::kStashed, "a pass of scale_loss runs already");
    const at::Tensor& used = checked(row);
    if (!used.defined()) continue;
    const at::Tensor& grad = gradient(row);
    const bool inspected = row.inspected.is_unchanged(grad);
    if (row.model.defined()) {  // add_up() inspects what it reads
      edited |= !inspected && !row.carries_scale() && !row.is_used() && is_float(grad);
      continue;
    }
    knows_earlier &= inspected;
    stash[i] = used;
    // The pass writes over a gradient in a bucket of DistributedDataParallel.
    if (used.is_same(grad) && grad.storage().use_count() > 1)
      stash[i] = empty_laid_out_as(row.param, grad.scalar_type()).copy_(grad);
  }
  add_up(true, true);
  earlier_were_inspected_ = knows_earlier;
  edited_sums_ |= edited;
  stepped_ = false;
  for (size_t i = 0; i < rows.size(); ++i) {
    Row& row = rows[i];
    if (stash[i].defined()) row.accumulated = std::move(stash[i]);
    if (row.grad_state == Grad::kMirrored) row.param.mutable_grad().reset();
    grad_of(row).reset();
    row.copied_grad.reset();
    row.grad_state = Grad::kStashed;
  }
}

bool GradientLedger::end_backward(const at::Tensor& scale, bool check, bool delay) {
  const LocalGradients local(table_);
  const at::Tensor none;
  bool inspects = check, left_gradient = delayed_, knows_norm = check;
  std::vector<Row>& rows = table_.rows();
  for (size_t i = 0; i < rows.size(); ++i) {
    Row& row = rows[i];
    const at::Tensor &grad = checked(row), &earlier = row.accumulated;
    const bool has_model = row.model.defined();
    row.has_grad = grad.defined();
    left_gradient |= row.has_grad;
    if (earlier.defined() && (has_model || !row.has_grad)) knows_norm = false;
    if (row.has_grad && !has_model) {
      table_.set_gradient(i, grad, true, earlier, grad);
      inspects = true;
    } else if (row.has_grad && check) {
      table_.set_gradient(i, grad, true, none, none);
    } else {
      // The sum that this pass leaves unchanged may not be inspected yet. After this, all are.
      const bool is_unseen = check && !has_model && !row.inspected.is_unchanged(earlier);
      table_.set_gradient(i, none, false, is_unseen ? earlier : none, none);
    }
  }
  // Inspects also when the pass left no gradient: the loss scale needs its found_inf. An overflow
  // that an earlier pass reported is not counted again.
  if (inspects) {
    Inspection inspection;
    inspection.record = check;
    inspection.same_pass = delayed_;
    inspection.fresh = earlier_were_inspected_;
    inspection.kept_scale = scale_.data_ptr<float>();
    inspector_.inspect(scale, inspection);
  } else {
    scale_.copy_(scale);
  }
  inspector_.knows_norm = knows_norm;
  any_scaled_ = had_pass_ = true;
  stepped_ = false;
  delayed_ = delay;
  for (Row& row : rows) {
    if (!row.has_grad) {
      if (row.grad_state == Grad::kStashed) restore(row);
      continue;
    }
    if (row.model.defined()) {
      if (row.grad_state == Grad::kMirrored) row.param.mutable_grad().reset();
      row.grad_state = Grad::kScaled;
      row.taken_version = version_of(grad_of(row));
    } else {
      if (row.copied_grad.defined()) grad_of(row) = row.copied_grad;
      bump_version(grad_of(row));
      row.accumulated.reset();
      row.grad_state = Grad::kUnscaled;
    }
    row.copied_grad.reset();
  }
  for (Row& row : rows) {  // views of one bucket have one version
    const at::Tensor& grad = grad_of(row);
    if (!check && row.has_grad) row.inspected.forget();
    if (check && grad.defined() && (row.has_grad || !row.model.defined() || !edited_sums_))
      row.inspected.remember(grad);
  }
  return left_gradient;
}

bool GradientLedger::has_gradient_from_outside() {
  const LocalGradients local(table_);
  bool found = !had_pass_;
  for (Row& row : table_.rows()) {
    const at::Tensor& grad = synced_gradient(row);
    if (!row.model.defined() || !grad.defined()) continue;
    found |= row.grad_state == Grad::kUnscaled ||
             (row.grad_state == Grad::kScaled && version_of(grad) != row.taken_version);
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
    if (row.grad_state == Grad::kStashed) restore(row);
  }
  had_pass_ = true;
}

void GradientLedger::materialize(bool all) {
  if (!any_scaled_ && !all) return;
  const LocalGradients local(table_);
  std::vector<Row>& rows = table_.rows();
  std::vector<bool> inspected;
  for (Row& row : rows) {
    if (is_added(row, all)) checked(row);
    inspected.push_back(row.inspected.is_unchanged(gradient(row)));
  }
  add_up(false, all);
  for (size_t i = 0; i < rows.size(); ++i) {
    Row& row = rows[i];
    if (row.grad_state == Grad::kStashed || !row.accumulated.defined()) continue;
    restore(row);
    row.inspected.forget();
    if (inspected[i]) row.inspected.remember(grad_of(row));
  }
}

void GradientLedger::before_read(const at::Tensor& param) {
  Row* const row = table_.row_of(param);
  if (!row) return;
  const bool of_master = !param.is_same(row->leaf());
  const bool master_lacks_it =
      row->grad_state == Grad::kUnscaled || row->grad_state == Grad::kScaled;
  if (row->grad_state == Grad::kMirrored) {
    grad_of(*row) = gradient(*row);
  } else if (of_master ? master_lacks_it && grad_of(*row).defined() : any_scaled_ && !stepped_) {
    materialize(of_master);
  }
}

void GradientLedger::assign(const at::Tensor& param, const std::optional<at::Tensor>& value) {
  const at::Tensor grad = value.value_or(at::Tensor());
  TORCH_CHECK(!grad.defined() || (grad.sizes() == param.sizes() && grad.device() == param.device()),
              "attempting to assign a gradient of size ", grad.sizes(), " on ", grad.device(),
              " to a tensor of size ", param.sizes(), " on ", param.device());
  Row* const row = table_.row_of(param);
  if (!row) {
    param.mutable_grad() = grad;
    return;
  }
  ++table_.changes;
  inspector_.knows_norm = false;
  const bool has_master = row->model.defined(), in_pass = row->grad_state == Grad::kStashed;
  const bool is_mirrored = has_master && is_float(grad) && !in_pass;
  grad_of(*row) = grad;
  if (has_master) row->param.mutable_grad() = is_mirrored ? grad : at::Tensor();
  if (in_pass) return;  // it belongs to this pass, like what autograd leaves
  row->accumulated.reset();
  row->grad_state = is_mirrored ? Grad::kMirrored : Grad::kUnscaled;
}

void GradientLedger::zero_grad(bool set_to_none) {
  const LocalGradients local(table_);
  for (Row& row : table_.rows()) {
    at::Tensor& grad = grad_of(row);
    if (row.grad_state == Grad::kMirrored) row.param.mutable_grad().reset();
    if (set_to_none) {
      grad.reset();
    } else if (grad.defined()) {
      if (grad.grad_fn()) grad = grad.detach();
      grad.zero_();
    }
    row.accumulated.reset();
    row.inspected.forget();
    row.grad_state = Grad::kUnscaled;
  }
  any_scaled_ = stepped_ = false;
  forget_pass();
}

void GradientLedger::consume(bool stepped) {
  std::vector<Row>& rows = table_.rows();
  for (size_t i = 0; i < rows.size(); ++i) {
    prefetch_versions(rows, i);
    Row& row = rows[i];
    if (stepped && (row.has_grad || row.accumulated.defined())) row.mark_stepped();
    if (stepped && row.writes_unscaled) {
      if (row.copied_grad.defined()) row.set_gradient(row.copied_grad);
      bump_version(row.gradient());
    }
    if (row.model.defined()) {
      if (row.grad_state == Grad::kMirrored) row.param.mutable_grad().reset();
      row.accumulated.reset();
      row.grad_state = !row.gradient().defined() ? Grad::kUnscaled
                       : row.carries_scale()     ? Grad::kConsumedScaled
                                                 : Grad::kConsumed;
    }
    row.copied_grad.reset();
    row.inspected.forget();
    row.shard.borrowed = nullptr;
  }
  ++table_.changes;
  stepped_ = true;
  forget_pass();
}

void GradientLedger::forget_pass() {
  had_pass_ = delayed_ = false;
  inspector_.knows_norm = edited_sums_ = false;
}

}  // namespace ampfuse
