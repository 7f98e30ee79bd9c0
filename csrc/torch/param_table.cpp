#include "param_table.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>

#include "memory.h"
#include "schema.h"
#include "torch_backend.h"

namespace ampfuse {
// --- rows ----------------------------------------------------------------------------------------

ParamTable::ParamTable(const std::string& algorithm, at::Device device)
    : algorithm_(algorithm_of(algorithm)), device_(device) {
  check_device(device);
  const StepState initial;
  state_ = at::empty({int64_t(sizeof initial)}, at::kByte);
  std::memcpy(state_.data_ptr(), &initial, sizeof initial);
  state_ = state_.to(device);
  steps_ = at::zeros({0}, at::TensorOptions().dtype(at::kFloat).device(device));
  norm_averages_ = norms_ = steps_;
  pending_scale_ = at::ones({}, steps_.options());
}

int64_t ParamTable::add_row(at::Tensor param, std::optional<at::Tensor> model, std::string name,
                            int64_t model_version, bool at_random, std::optional<at::Tensor> whole,
                            int64_t origin) {
  Row row;
  row.name = std::move(name);
  row.is_split = model && param.scalar_type() == at::kShort;
  row.rounds_at_random = at_random && !model && param.scalar_type() == at::kBFloat16;
  dtype_of(row.is_split ? *model : param, row.name);
  TORCH_CHECK_VALUE(origin >= 0, "a shard begins at element ", origin);
  for (const at::Tensor& tensor : {param, model.value_or(param)}) {
    TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, row.name,
                     " is sparse; ampfuse steps dense parameters");
    TORCH_CHECK_TYPE(!tensor.key_set().has(c10::DispatchKey::Python), row.name,
                     " is a tensor subclass without memory of its own; ampfuse steps plain tensors "
                     "and DTensors");
    TORCH_CHECK(tensor.device() == device_, row.name, " is on ", tensor.device(),
                " and another parameter on ", device_, "; use one optimizer per device");
    TORCH_CHECK(is_dense(tensor), row.name, " of shape ", tensor.sizes(), " and strides ",
                tensor.strides(),
                " has gaps or overlaps in memory. Make the parameter contiguous before building "
                "the optimizer.");
  }
  if (model) {
    TORCH_CHECK(is_laid_out_as(*model, param), row.name,
                ": master and model weight differ, in shapes ", param.sizes(), " and ",
                model->sizes(), " or in strides ", param.strides(), " and ", model->strides());
    TORCH_CHECK_TYPE(!row.is_split || element_size(dtype_of(*model)) == 2, row.name,
                     ": the rest of a split master stands beside a weight of float16 or bfloat16");
    row.model = *model;
    has_models_ = true;
    row.model_version = model_version;
    row.model_data = model->data_ptr();
  }
  row.param = std::move(param);
  row.is_contiguous = row.param.is_contiguous();
  row.numel = row.param.numel();
  if (whole) {
    row.whole = *whole;
    row.origin = origin;
    row.whole_object = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(*whole));
    TORCH_CHECK_TYPE(is_shard_of(row.whole_object, row.leaf()), row.name,
                     " is not the local shard of the DTensor that it is said to be");
    sharded_ = true;
  }
  rows_.push_back(std::move(row));
  table_.reset();
  is_collected_ = false;
  return rows() - 1;
}

std::optional<at::Tensor> ParamTable::model(int64_t row) const {
  const at::Tensor& model = rows_.at(row).model;
  return model.defined() ? std::optional(model) : std::nullopt;
}

// A column that grows with the rows.
static at::Tensor grown(const at::Tensor& column, int64_t rows) {
  if (column.numel() >= rows) return column;
  return at::cat({column, at::zeros({rows - column.numel()}, column.options())});
}

at::Tensor ParamTable::steps() { return steps_ = grown(steps_, rows()); }

at::Tensor ParamTable::norm_averages() { return norm_averages_ = grown(norm_averages_, rows()); }

float* ParamTable::row_norms(NormColumn column) {
  if (norms_.numel() < kNormColumns * rows()) {
    norms_ = at::zeros({kNormColumns, rows()}, norms_.options());
    known_.row_norms = false;
  }
  return norms_.data_ptr<float>() + column * norms_.size(1);
}

void ParamTable::set_states(int64_t index, const std::optional<States>& states,
                            const std::string& storage, const std::optional<at::Tensor>& average) {
  Row& row = rows_.at(index);
  const StorageInfo& stored = storage_of(storage);
  const size_t count = states ? states->size() : 0;
  TORCH_CHECK_VALUE(count <= kMaxStates, "a row has at most three states");
  TORCH_CHECK(stored.block == 0 || info(algorithm_).packable, info(algorithm_).name,
              " keeps no states in ", storage);
  const auto check = [&](const at::Tensor& tensor, const auto&... what) {
    TORCH_CHECK(is_laid_out_as(tensor, row.param) && tensor.device() == device_, what..., " of ",
                row.name, " has to be on ", device_, " and laid out as the parameter");
  };
  const at::ScalarType element = scalar_type_of(stored.signed_type);
  for (size_t i = 0; i < count; ++i) {
    const std::vector<at::Tensor>& lists = (*states)[i];
    TORCH_CHECK_VALUE(lists.size() == (stored.block ? 2 : 1), "state ", i, " of ", row.name,
                      " has ", lists.size(), " tensors; in ", storage, " it has ",
                      stored.block ? "elements and scales" : "one");
    check(lists[0], "state ", i);
    TORCH_CHECK_TYPE(lists[0].scalar_type() == element, "state ", i, " of ", row.name, " is ",
                     lists[0].scalar_type(), "; in ", storage, " it is ", element);
    if (stored.block == 0) continue;
    TORCH_CHECK(lists[1].numel() == blocks_of(lists[0].numel()) &&
                    lists[1].scalar_type() == at::kFloat && lists[1].is_contiguous() &&
                    lists[1].device() == device_,
                "state ", i, " of ", row.name, " needs float32 scales on ", device_,
                ", one for each ", stored.block, " elements");
  }
  if (average) {
    check(*average, "the average");
    TORCH_CHECK_TYPE(average->scalar_type() == at::kFloat, "the average of ", row.name, " is ",
                     average->scalar_type(), "; it has to be float32");
  }
  row.has_states = states.has_value();
  row.storage = &stored;
  row.average = average.value_or(at::Tensor());
  for (size_t i = 0; i < kMaxStates; ++i) {
    row.states[i] = i < count ? (*states)[i][0] : at::Tensor();
    row.scales[i] = i < count && stored.block ? (*states)[i][1] : at::Tensor();
    set(kState0 + int(i), index, row.states[i]);
    set(kScale0 + int(i), index, row.scales[i]);
  }
  set(kAverage, index, row.average);
}

void ParamTable::set_hyper(int64_t begin, int64_t end, const std::optional<at::Tensor>& lr_tensor,
                           const std::map<std::string, double>& values,
                           const std::map<std::string, at::Tensor>& schedule) {
  TORCH_CHECK_INDEX(0 <= begin && begin <= end && end <= rows(), "rows ", begin, " to ", end,
                    " of ", rows());
  RowHyper hyper = hyper_of(algorithm_, values);
  hyper.lr_tensor = float_pointer(lr_tensor, "lr", device_);
  for (const auto& [name, column] : schedule) {
    TORCH_CHECK_VALUE(column.scalar_type() == at::kDouble && column.dim() == 1 &&
                          column.numel() > 0 && column.is_contiguous() &&
                          column.device() == device_,
                      "the schedule's ", name, " has to be a float64 vector on ", device_);
    TORCH_CHECK_VALUE(hyper.schedule.steps == 0 || hyper.schedule.steps == column.numel(),
                      "the schedule's ", name, " has ", column.numel(), " steps, another column ",
                      hyper.schedule.steps);
    schedule_column(hyper.schedule, name) = column.data_ptr<double>();
    hyper.schedule.steps = column.numel();
    schedules_[column.data_ptr()] = column;
  }
  table().set_hyper(begin, end, hyper);
  for (int64_t i = begin; i < end; ++i) rows_[i].lr = lr_tensor.value_or(at::Tensor());
  layerwise_ = layerwise_ || hyper.flags & kLayerwise;
}

Table& ParamTable::table() {
  if (table_) return *table_;
  std::vector<int64_t> numel, origin;
  for (const Row& row : rows_) {
    numel.push_back(row.numel);
    origin.push_back(row.origin);
  }
  table_ = std::make_unique<Table>(std::move(numel), std::move(origin));
  for (int64_t i = 0; i < rows(); ++i) {
    const Row& row = rows_[i];
    set(kParam, i, row.param);
    set(kModel, i, row.model);
    for (int state = 0; state < kMaxStates; ++state) {
      set(kState0 + state, i, row.states[state]);
      set(kScale0 + state, i, row.scales[state]);
    }
    set(kAverage, i, row.average);
  }
  return *table_;
}

DType ParamTable::type_in(int list, int64_t index, const at::Tensor& tensor) const {
  const Row& row = rows_[index];
  if (is_state(list)) return row.storage->type(info(algorithm_).unsigned_states & bit(list));
  if (list == kParam && row.rounds_at_random) return DType::kRandomBFloat16;
  if (list == kParam && row.is_split)
    return row.model.scalar_type() == at::kHalf ? DType::kRestFloat16 : DType::kRestBFloat16;
  return dtype_of(tensor, row.name);
}

void ParamTable::set(int list, int64_t row, const at::Tensor& tensor) {
  static char no_elements;  // null would say that the row has no such list, and so no gradient
  if (tensor.defined()) {
    void* data = tensor.numel() > 0 ? tensor.data_ptr() : &no_elements;
    TORCH_CHECK(data, rows_[row].name, " or what belongs to it has lost its memory");
    table().set(list, row, data, type_in(list, row, tensor));
  } else {
    table().set(list, row, nullptr, DType::kNone);
  }
}

// `param.data = other`, module.to() and the like give a tensor other memory while it stays the same
// tensor.
void ParamTable::follow_storage(int64_t index) {
  Row& row = rows_[index];
  const void* found[Row::kPlaces] = {row.leaf().data_ptr(), base_of(row.param),
                                     base_of(row.average)};
  for (int state = 0; state < kMaxStates; ++state) {
    found[3 + state] = base_of(row.states[state]);
    found[3 + kMaxStates + state] = base_of(row.scales[state]);
  }
  if (std::equal(std::begin(found), std::end(found), row.memory)) return;
  const auto fits_param = [&](const at::Tensor& tensor) {
    return !tensor.defined() || (tensor.device() == device_ && is_laid_out_as(tensor, row.param));
  };
  const bool fits = row.param.device() == device_ && row.param.numel() == row.numel &&
                    is_dense(row.param) && fits_param(row.model);
  TORCH_CHECK(fits, row.name,
              " was moved to another device or changed its shape or strides after the optimizer's "
              "first use; do that before building the optimizer");
  set(kParam, index, row.param);
  set(kModel, index, row.model);
  for (int state = 0; state < kMaxStates; ++state) {
    const at::Tensor &values = row.states[state], &scales = row.scales[state];
    TORCH_CHECK(fits_param(values), row.name,
                " changed its strides after the optimizer's first step; its state is laid out as "
                "it was before");
    TORCH_CHECK(
        (!values.defined() || values.scalar_type() == scalar_type_of(row.storage->signed_type)) &&
            (!scales.defined() ||
             (scales.scalar_type() == at::kFloat && scales.numel() == blocks_of(row.numel) &&
              scales.device() == device_ && scales.is_contiguous())),
        "a state of ", row.name,
        " was given memory of another type or size; assign to optimizer.state instead");
    set(kState0 + state, index, row.states[state]);
    set(kScale0 + state, index, row.scales[state]);
  }
  set(kAverage, index, row.average);
  row.is_contiguous = row.param.is_contiguous();
  std::copy(std::begin(found), std::end(found), row.memory);
}

void ParamTable::set_gradient(int64_t row, const at::Tensor& grad, bool scaled,
                              const at::Tensor& accumulated, const at::Tensor& out) {
  set(kGrad, row, grad);
  set(kAccumulated, row, accumulated);
  set(kGradOut, row, out);
  table().set_scaled(row, scaled);
}

StepState* ParamTable::state() const { return static_cast<StepState*>(state_.data_ptr()); }

at::Tensor ParamTable::state_field(const std::string& name) const {
  struct Field {
    size_t offset;
    at::ScalarType dtype;
  };
  static const std::map<std::string, Field> fields = {
      {"sum_squares", {offsetof(StepState, sum_squares), at::kDouble}},
      {"found_inf", {offsetof(StepState, found_inf), at::kFloat}},
      {"pass_found_inf", {offsetof(StepState, pass_found_inf), at::kFloat}},
      {"skip", {offsetof(StepState, skip), at::kFloat}},
      {"grad_norm", {offsetof(StepState, grad_norm), at::kFloat}},
      {"clip_coef", {offsetof(StepState, clip_coef), at::kFloat}},
      {"loss_scale", {offsetof(StepState, loss_scale), at::kFloat}},
      {"schedule_step", {offsetof(StepState, schedule_step), at::kLong}},
      {"bad_row", {offsetof(StepState, bad_row), at::kInt}},
      {"bad_bits", {offsetof(StepState, bad_bits), at::kInt}},
      {"last_bad_row", {offsetof(StepState, last_bad_row), at::kInt}},
      {"last_bad_bits", {offsetof(StepState, last_bad_bits), at::kInt}},
      {"skipped_steps", {offsetof(StepState, skipped_steps), at::kInt}},
  };
  const auto field = fields.find(name);
  TORCH_CHECK_VALUE(field != fields.end(), "StepState has no field '", name, "'");
  const int64_t size = int64_t(at::elementSize(field->second.dtype));
  const int64_t offset = int64_t(field->second.offset);
  return state_.slice(0, offset, offset + size).view(field->second.dtype).squeeze(0);
}

// --- gradients -----------------------------------------------------------------------------------

// Zeroing the gradients of the model or those of the masters empties a materialized row alike.
const at::Tensor& ParamTable::source(const Row& row) const {
  const at::Tensor& grad = row.gradient();
  return is_materialized(row) && grad.defined() ? row.param.mutable_grad() : grad;
}

const at::Tensor& ParamTable::checked_gradient(Row& row, const at::Tensor& grad) const {
  const char* what = "the gradient of ";
  TORCH_CHECK(
      grad.layout() == at::kStrided, what, row.name,
      " is sparse; ampfuse steps dense gradients. Build the layer with sparse=False, or keep "
      "its parameters in a torch.optim.SparseAdam of their own, which amp.initialize and "
      "amp.scale_loss take beside this optimizer.");
  TORCH_CHECK_TYPE(!grad.is_complex(), what, row.name,
                   " is complex; ampfuse steps real parameters. Use torch.view_as_real.");
  dtype_of(grad, what, row.name);
  TORCH_CHECK(grad.device() == device_, what, row.name, " is on ", grad.device(),
              ", the parameter on ", device_);
  TORCH_CHECK(!grad.key_set().has(c10::DispatchKey::Python), what, row.name,
              " is a tensor subclass without memory of its own (such as DTensor); ampfuse does not "
              "read it");
  TORCH_CHECK(grad.sizes() == row.param.sizes() && grad.numel() == row.numel, what, row.name,
              " has shape ", grad.sizes(), ", the parameter ", row.param.sizes(),
              " and when the "
              "optimizer was built ",
              row.numel, " elements");
  if (row.is_contiguous && grad.is_contiguous()) return grad;
  if (grad.strides() == row.param.strides()) return grad;
  row.copied_grad = empty_laid_out_as(row.param, grad.scalar_type());
  row.copied_grad.copy_(grad);
  return row.copied_grad;
}

// The core's inspect over whatever set_gradient() put in place.
void ParamTable::inspect(const at::Tensor& scale, const Inspection& inspection) {
  InspectArgs args;
  // The ranks of a group decide when all of them have looked.
  const bool together = inspection.record && gather_;
  if (!together) args.preparation = inspection.preparation;
  args.same_pass = inspection.same_pass;
  args.fresh = inspection.fresh;
  args.scale = float_pointer(scale, "scale", device_);
  if (inspection.keeps_scale) args.kept_scale = pending_scale_.data_ptr<float>();
  args.state = inspection.record ? state() : nullptr;
  if (inspection.record && (needs_row_norms() || counted_elsewhere_.defined())) {
    args.row_norms = row_norms(kGradNorm);
    args.row_largest = row_norms(kGradLargest);
  }
  known_.row_norms = args.row_norms != nullptr;
  Table& rows = table();
  const DeviceScope scope(device_);
  {
    const pybind11::gil_scoped_release release;
    scope.backend().inspect(rows, args, scope.stream());
  }
  if (!together) return;
  const Preparation& preparation = inspection.preparation;
  share_row_norms(true, preparation.columns.param_norms != nullptr);
  if (preparation.state) scope.backend().prepare(rows, preparation, scope.stream());
}

// --- the step ------------------------------------------------------------------------------------

std::optional<std::vector<int64_t>> ParamTable::collect(const std::optional<at::Tensor>& scale,
                                                        bool unscales, bool unscales_half,
                                                        pybind11::handle groups,
                                                        pybind11::handle states) {
  is_collected_ = false;
  if (!groups.is_none() && !has_params(groups)) return std::nullopt;
  if (!states.is_none() && !has_states(states)) return std::nullopt;
  lend_shards();
  const at::Tensor none;
  bool any_pending = false;
  unchanged_ = !known_.edited_sums;
  edited_.clear();
  std::vector<int64_t> stateless;
  // Every check comes before the first change of a tensor.
  for (int64_t i = 0; i < rows(); ++i) {
    prefetch_row(rows_, i);
    Row& row = rows_[i];
    follow_storage(i);
    if (row.was_edited()) edited_.push_back(i);
    const at::Tensor& grad = source(row);
    row.has_grad = grad.defined();
    TORCH_CHECK(row.model.defined() || !row.accumulated.defined(),
                "step() inside a backward pass of scale_loss; call "
                "it after the context has ended");
    bool scaled = scale && !is_materialized(row);
    const at::Tensor& used = row.has_grad ? checked_gradient(row, grad) : none;
    row.unscales =
        unscales && scaled && row.has_grad && (unscales_half || used.scalar_type() == at::kFloat);
    if (row.has_grad && row.pending.is_or_was(grad)) scaled = any_pending = true;
    set_gradient(i, used, scaled, row.accumulated, none);
    set(kUnscaled, i, row.unscales ? used : none);
    if (row.has_grad && !row.inspected.is_unchanged(grad)) unchanged_ = false;
    const bool has_gradient = row.has_grad || row.accumulated.defined();
    if (has_gradient && algorithm_ != Algorithm::of<NoOp>() && !row.has_states)
      stateless.push_back(i);
  }
  TORCH_CHECK(!(any_pending && scale),
              "these gradients carry the loss scale of amp.scale_loss and a GradScaler's as "
              "well; use one of the two");
  // After scale_loss the step belongs to its scale, also where every gradient is unscaled by now.
  is_collected_ = true;
  collected_scale_ = any_pending || (phase_.may_be_pending() && !scale) ? pending_scale_
                     : scale                                            ? *scale
                                                                        : none;
  return stateless;
}

// Whether the last inspection was of the gradients that collect() found.
bool ParamTable::is_measured() const {
  return known_.norm && (known_.row_norms || !needs_row_norms()) && unchanged_;
}

void ParamTable::inspect_collected(const Preparation& preparation) {
  Inspection inspection;
  inspection.record = true;
  inspection.preparation = preparation;
  inspect(collected_scale_, inspection);
  known_.norm = unchanged_ = true;
}

void ParamTable::check_collected() const {
  TORCH_CHECK(is_collected_, "the gradients changed after collect(); call it again");
}

void ParamTable::measure() {
  check_collected();
  if (!is_measured()) inspect_collected({});
  for (Row& row : rows_) {
    if (row.has_grad) row.inspected.remember(source(row));
  }
}

void ParamTable::decide(const std::optional<at::Tensor>& found_inf, double max_norm, bool inspect,
                        bool skip_nonfinite) {
  check_collected();
  const bool inspects =
      (max_norm > 0 || needs_row_norms() || (inspect && !unchanged_)) && !is_measured();
  Preparation preparation;
  preparation.state = state();
  preparation.algorithm = algorithm_;
  StepDecision& decision = preparation.decision;
  decision.loss_scale = float_pointer(collected_scale_, "scale", device_);
  decision.found_inf = float_pointer(found_inf, "found_inf", device_);
  decision.max_norm = max_norm;
  decision.norm_known = inspects || (known_.norm && unchanged_);
  decision.skip_nonfinite = skip_nonfinite;
  RowColumns& columns = preparation.columns;
  columns.steps = steps().data_ptr<float>();
  if (needs_row_norms()) {
    columns.grad_norms = row_norms(kGradNorm);
    columns.grad_largest = row_norms(kGradLargest);
  }
  if (info(algorithm_).grad_norms) columns.norm_averages = norm_averages().data_ptr<float>();
  float* const param_norms = layerwise_ ? row_norms(kParamNorm) : nullptr;
  columns.param_norms = param_norms;
  Table& rows = table();
  const DeviceScope scope(device_);
  if (param_norms) {
    const pybind11::gil_scoped_release release;
    scope.backend().measure_params(rows, param_norms, scope.stream());
  }
  if (inspects) return inspect_collected(preparation);
  share_row_norms(false, param_norms != nullptr);
  scope.backend().prepare(rows, preparation, scope.stream());
}

std::vector<at::Tensor> ParamTable::new_meter(bool changed) {
  for (const Row& row : rows_) {
    TORCH_CHECK(row.param.numel() >> 32 == 0, row.name, " has ", row.param.numel(),
                " elements; the meter counts in 32 bits. Step it with an optimizer of its own.");
  }
  std::vector<at::Tensor> buffers = {
      at::zeros({rows(), kMeterCounts}, steps_.options().dtype(at::kInt)),
      at::zeros({2, rows()}, steps_.options())};
  if (changed) {
    const int64_t chunks = table().view().chunk_count;
    buffers.push_back(at::empty({chunks, kChunk / 8}, steps_.options().dtype(at::kByte)));
  }
  return buffers;
}

Meter ParamTable::meter_of(const std::vector<at::Tensor>& buffers) {
  Meter meter;
  meter.counts = reinterpret_cast<uint32_t*>(
      pointer_to<int32_t>(buffers.at(0), "counts", rows() * kMeterCounts, device_));
  meter.norms = pointer_to<float>(buffers.at(1), "norms", 2 * rows(), device_);
  if (buffers.size() > 2) {
    const int64_t bytes = table().view().chunk_count * (kChunk / 8);
    meter.changed = pointer_to<uint8_t>(buffers[2], "changed", bytes, device_);
  }
  return meter;
}

void ParamTable::update(const std::optional<at::Tensor>& found_inf, double max_norm, bool inspect,
                        bool skip_nonfinite, const std::optional<std::vector<at::Tensor>>& meter) {
  if (rows_.empty()) return;
  check_collected();
  const Meter metered = meter ? meter_of(*meter) : Meter();
  map_masters(MapOp::of<RefreshOp>(), edited_);
  decide(found_inf, max_norm, inspect, skip_nonfinite);
  {
    Table& rows = table();
    const DeviceScope scope(device_);
    Backend& backend = scope.backend();
    pybind11::gil_scoped_release release;
    float* norms = backend.measure_update(rows, algorithm_, state(), scope.stream());
    if (norms && gather_) {
      const pybind11::gil_scoped_acquire acquire;
      share(false, at::from_blob(norms, {kMeasures, this->rows()}, norms_.options()), kMeasures);
    }
    backend.update(rows, algorithm_, state(), meter ? &metered : nullptr, scope.stream());
  }
  spend_gradients(true);
}

void ParamTable::mark_stepped() {
  for (Row& row : rows_) row.mark_stepped();
}

std::vector<int64_t> ParamTable::fingerprint() const {
  std::vector<int64_t> found;
  found.reserve(3 * rows_.size());
  for (const Row& row : rows_) {
    found.push_back(reinterpret_cast<int64_t>(row.param.data_ptr()));
    found.push_back(row.model.defined() ? reinterpret_cast<int64_t>(row.model.data_ptr()) : 0);
    found.push_back(row.leaf().requires_grad());
  }
  return found;
}

void ParamTable::finish_step() { spend_gradients(false); }

// `stepped`: the rows that have a gradient were, by an update of ours.
void ParamTable::spend_gradients(bool stepped) {
  for (int64_t i = 0; i < rows(); ++i) {
    prefetch_versions(rows_, i);
    Row& row = rows_[i];
    if (stepped && (row.has_grad || row.accumulated.defined())) row.mark_stepped();
    if (stepped && row.unscales) {
      if (row.copied_grad.defined()) set_leaf_gradient(row, row.copied_grad);
      bump_version(row.gradient());
    }
    if (row.model.defined()) {
      const at::Tensor& grad = row.gradient();
      if (grad.defined()) row.spent.remember(grad);
      if (phase_.is_materialized()) row.param.mutable_grad().reset();
      row.accumulated.reset();
    }
    row.copied_grad.reset();
    row.inspected.forget();
    row.lent = nullptr;
  }
  phase_.spend();
  is_collected_ = false;
  known_.norm = known_.edited_sums = false;
}

}  // namespace ampfuse
