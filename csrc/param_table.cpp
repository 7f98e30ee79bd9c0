#include "param_table.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>

#include "memory.h"
#include "names.h"
#include "torch_backend.h"

namespace ampfuse {
namespace {

// Where a tensor's storage is, for the price of two cache lines; data_ptr() takes four.
const void* base_of(const torch::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->data_ptr().get();
}

// Where a tensor counts its versions, to fetch it: a VariableVersion is a pointer to its counter.
const void* counter_of(const torch::Tensor& tensor) {
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  static_assert(sizeof version == sizeof(void*));
  return *reinterpret_cast<const void* const*>(&version);
}

}  // namespace

// --- identity of gradients -----------------------------------------------------------------------

void ParamTable::Identity::remember(const torch::Tensor& grad) {
  if (!is_same_tensor(grad)) impl.emplace(grad.getIntrusivePtr());  // counting costs 10 ns
}

bool ParamTable::Identity::is_same_tensor(const torch::Tensor& grad) const {
  return impl && grad.defined() && impl->_unsafe_get_target() == grad.unsafeGetTensorImpl();
}

void ParamTable::Contents::remember(const torch::Tensor& grad) {
  Identity::remember(grad);
  version = version_of(grad);
}

bool ParamTable::Contents::is_unchanged(const torch::Tensor& grad) const {
  return is_same_tensor(grad) && version == version_of(grad);
}

// --- rows ----------------------------------------------------------------------------------------

ParamTable::ParamTable(const std::string& algorithm, torch::Device device)
    : algorithm_(algorithm_of(algorithm)), device_(device) {
  check_device(device);
  const StepState initial;
  state_ = torch::empty({int64_t(sizeof initial)}, torch::kUInt8);
  std::memcpy(state_.data_ptr(), &initial, sizeof initial);
  state_ = state_.to(device);
  steps_ = torch::zeros({0}, torch::TensorOptions().dtype(torch::kFloat32).device(device));
  norm_averages_ = norms_ = steps_;
}

int64_t ParamTable::add_row(torch::Tensor param, std::optional<torch::Tensor> model,
                            std::string name, int64_t model_version) {
  Row row;
  row.name = std::move(name);
  dtype_of(param, row.name);
  for (const torch::Tensor& tensor : {param, model.value_or(param)}) {
    TORCH_CHECK_TYPE(tensor.layout() == torch::kStrided, row.name,
                     " is sparse; ampfuse steps dense parameters");
    TORCH_CHECK_TYPE(
        !tensor.key_set().has(c10::DispatchKey::Python), row.name,
        " is a tensor subclass without "
        "memory of its own (such as DTensor); ampfuse does not step it. Pass its local tensor.");
    TORCH_CHECK(tensor.device() == device_, row.name, " is on ", tensor.device(),
                " and another parameter on ", device_, "; use one optimizer per device");
    TORCH_CHECK(is_dense(tensor), row.name, " of shape ", tensor.sizes(), " and strides ",
                tensor.strides(),
                " has gaps or overlaps in memory. Make the parameter contiguous before building "
                "the optimizer.");
  }
  if (model) {
    TORCH_CHECK(model->strides() == param.strides(), row.name,
                ": master and model weight differ in strides, ", param.strides(), " and ",
                model->strides());
    row.model = *model;
    row.model_version = model_version;
    row.model_data = model->data_ptr();
  }
  row.param = std::move(param);
  row.is_contiguous = row.param.is_contiguous();
  rows_.push_back(std::move(row));
  table_.reset();
  return rows() - 1;
}

std::optional<torch::Tensor> ParamTable::model(int64_t row) const {
  const torch::Tensor& model = rows_.at(row).model;
  return model.defined() ? std::optional(model) : std::nullopt;
}

// A column that grows with the rows.
static torch::Tensor grown(const torch::Tensor& column, int64_t rows) {
  if (column.numel() >= rows) return column;
  return torch::cat({column, torch::zeros({rows - column.numel()}, column.options())});
}

torch::Tensor ParamTable::steps() { return steps_ = grown(steps_, rows()); }

torch::Tensor ParamTable::norm_averages() { return norm_averages_ = grown(norm_averages_, rows()); }

float* ParamTable::row_norms(NormColumn column) {
  if (norms_.numel() < kNormColumns * rows()) {
    norms_ = torch::zeros({kNormColumns, rows()}, norms_.options());
    row_norms_known_ = false;
  }
  return norms_.data_ptr<float>() + column * norms_.size(1);
}

void ParamTable::set_states(
    int64_t index, const std::optional<std::vector<std::optional<torch::Tensor>>>& states) {
  Row& row = rows_.at(index);
  row.has_states = states.has_value();
  const size_t count = states ? states->size() : 0;
  TORCH_CHECK_VALUE(count <= 3, "a row has at most three states");
  for (size_t i = 0; i < 3; ++i) {
    const torch::Tensor state = i < count && (*states)[i] ? *(*states)[i] : torch::Tensor();
    TORCH_CHECK(
        !state.defined() ||
            (state.scalar_type() == torch::kFloat32 && state.strides() == row.param.strides() &&
             state.sizes() == row.param.sizes() && state.device() == device_),
        "state ", i, " of ", row.name, " has to be float32, on ", device_,
        " and laid out as the parameter");
    row.states[i] = state;
    set(kState0 + int(i), index, state);
  }
}

void ParamTable::set_hyper(int64_t begin, int64_t end,
                           const std::optional<torch::Tensor>& lr_tensor,
                           const std::map<std::string, double>& values,
                           const std::map<std::string, torch::Tensor>& schedule) {
  RowHyper hyper = hyper_of(values);
  hyper.lr_tensor = float_pointer(lr_tensor, "lr", device_);
  for (const auto& [name, column] : schedule) {
    TORCH_CHECK_VALUE(column.scalar_type() == torch::kFloat64 && column.dim() == 1 &&
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
  layerwise_ = layerwise_ || hyper.flags & kLayerwise;
}

Table& ParamTable::table() {
  if (table_) return *table_;
  std::vector<int64_t> numel;
  for (const Row& row : rows_) numel.push_back(row.param.numel());
  table_ = std::make_unique<Table>(std::move(numel));
  for (int64_t i = 0; i < rows(); ++i) {
    const Row& row = rows_[i];
    set(kParam, i, row.param);
    set(kModel, i, row.model);
    for (int state = 0; state < 3; ++state) set(kState0 + state, i, row.states[state]);
  }
  return *table_;
}

void ParamTable::set(int list, int64_t row, const torch::Tensor& tensor) {
  static char no_elements;  // null would say that the row has no such list, and so no gradient
  if (tensor.defined()) {
    void* data = tensor.numel() > 0 ? tensor.data_ptr() : &no_elements;
    table().set(list, row, data, dtype_of(tensor, rows_[row].name));
  } else {
    table().set(list, row, nullptr, DType::kNone);
  }
}

// `param.data = other`, module.to() and the like give a tensor other memory while it stays the same
// tensor.
void ParamTable::follow_storage(int64_t index) {
  Row& row = rows_[index];
  const void* found[] = {base_of(row.param), base_of(row.states[0]), base_of(row.states[1]),
                         base_of(row.states[2]), row.leaf().data_ptr()};
  if (std::equal(std::begin(found), std::end(found), row.memory)) return;
  const bool fits = row.param.device() == device_ && row.param.numel() == table().numel(index) &&
                    (!row.model.defined() ||
                     (row.model.device() == device_ && row.model.strides() == row.param.strides()));
  TORCH_CHECK(fits, row.name,
              " was moved to another device or changed its shape or strides after the optimizer's "
              "first use; do that before building the optimizer");
  set(kParam, index, row.param);
  set(kModel, index, row.model);
  for (int state = 0; state < 3; ++state) {
    TORCH_CHECK(!row.states[state].defined() || row.states[state].strides() == row.param.strides(),
                row.name,
                " changed its strides after the optimizer's first step; its state is laid out as "
                "it was before");
    set(kState0 + state, index, row.states[state]);
  }
  row.is_contiguous = row.param.is_contiguous();
  std::copy(std::begin(found), std::end(found), row.memory);
}

void ParamTable::set_gradient(int64_t row, const torch::Tensor& grad, bool scaled,
                              const torch::Tensor& accumulated, const torch::Tensor& out) {
  set(kGrad, row, grad);
  set(kAccumulated, row, accumulated);
  set(kGradOut, row, out);
  table().set_scaled(row, scaled);
}

StepState* ParamTable::state() const { return static_cast<StepState*>(state_.data_ptr()); }

torch::Tensor ParamTable::state_field(const std::string& name) const {
  struct Field {
    size_t offset;
    torch::ScalarType dtype;
  };
  static const std::map<std::string, Field> fields = {
      {"sum_squares", {offsetof(StepState, sum_squares), torch::kFloat64}},
      {"found_inf", {offsetof(StepState, found_inf), torch::kFloat32}},
      {"pass_found_inf", {offsetof(StepState, pass_found_inf), torch::kFloat32}},
      {"skip", {offsetof(StepState, skip), torch::kFloat32}},
      {"grad_norm", {offsetof(StepState, grad_norm), torch::kFloat32}},
      {"clip_coef", {offsetof(StepState, clip_coef), torch::kFloat32}},
      {"loss_scale", {offsetof(StepState, loss_scale), torch::kFloat32}},
      {"schedule_step", {offsetof(StepState, schedule_step), torch::kInt64}},
      {"last_bad_row", {offsetof(StepState, last_bad_row), torch::kInt32}},
      {"last_bad_bits", {offsetof(StepState, last_bad_bits), torch::kInt32}},
      {"skipped_steps", {offsetof(StepState, skipped_steps), torch::kInt32}},
  };
  const auto field = fields.find(name);
  TORCH_CHECK_VALUE(field != fields.end(), "StepState has no field '", name, "'");
  const int64_t size = int64_t(torch::elementSize(field->second.dtype));
  const int64_t offset = int64_t(field->second.offset);
  return state_.slice(0, offset, offset + size).view(field->second.dtype).squeeze(0);
}

// --- gradients -----------------------------------------------------------------------------------

// Zeroing the gradients of the model or those of the masters empties a materialized row alike.
const torch::Tensor& ParamTable::source(const Row& row) const {
  const torch::Tensor& grad = row.leaf().mutable_grad();
  return is_materialized(row) && grad.defined() ? row.param.mutable_grad() : grad;
}

const torch::Tensor& ParamTable::checked_gradient(Row& row, const torch::Tensor& grad) const {
  const char* what = "the gradient of ";
  TORCH_CHECK(grad.layout() == torch::kStrided, what, row.name,
              " is sparse; ampfuse steps dense gradients. Build the layer with sparse=False, or "
              "keep its parameters "
              "in a torch.optim.SparseAdam.");
  TORCH_CHECK_TYPE(!grad.is_complex(), what, row.name,
                   " is complex; ampfuse steps real parameters. Use torch.view_as_real.");
  dtype_of(grad, what, row.name);
  TORCH_CHECK(grad.device() == device_, what, row.name, " is on ", grad.device(),
              ", the parameter on ", device_);
  TORCH_CHECK(!grad.key_set().has(c10::DispatchKey::Python), what, row.name,
              " is a tensor subclass without memory of its own (such as DTensor); ampfuse does not "
              "read it");
  if (row.is_contiguous && grad.is_contiguous()) return grad;
  if (grad.strides() == row.param.strides()) return grad;
  row.copied_grad = empty_laid_out_as(row.param, grad.scalar_type());
  row.copied_grad.copy_(grad);
  return row.copied_grad;
}

// The core's inspect over whatever set_gradient() put in place. With `record` the step state hears
// of it.
void ParamTable::inspect(const torch::Tensor& scale, bool record, const Preparation& preparation,
                         bool same_pass, bool fresh) {
  InspectArgs args;
  args.preparation = preparation;
  args.same_pass = same_pass;
  args.fresh = fresh;
  args.scale = scale.defined() ? scale.data_ptr<float>() : nullptr;
  args.state = record ? state() : nullptr;
  if (record && needs_row_norms()) {
    args.row_norms = row_norms(kGradNorm);
    args.row_largest = row_norms(kGradLargest);
  }
  row_norms_known_ = args.row_norms != nullptr;
  Table& rows = table();
  const DeviceScope scope(device_);
  const pybind11::gil_scoped_release release;
  scope.backend().inspect(rows, args, scope.stream());
}

void ParamTable::begin_backward() {
  const torch::Tensor none;
  bool fold = false;
  all_inspected_ = true;
  for (int64_t i = 0; i < rows(); ++i) {
    Row& row = rows_[i];
    torch::Tensor& grad = row.leaf().mutable_grad();
    const bool pending = row.pending.is_same_tensor(grad);
    if (is_materialized(row)) {
      row.accumulated = source(row);
      if (row.accumulated.defined() && !row.inspected.is_unchanged(row.accumulated))
        edited_sums_ = true;
      row.param.mutable_grad().reset();
    } else if (grad.defined() && row.model.defined() && !row.spent.is_same_tensor(grad)) {
      const torch::Tensor& used = checked_gradient(row, grad);
      const torch::Tensor earlier = row.accumulated;
      if (!earlier.defined()) row.accumulated = empty_laid_out_as(row.param);
      set_gradient(i, used, pending, earlier, row.accumulated);
      fold = true;
      continue;
    } else if (grad.defined() && !row.model.defined() && pending) {
      grad = checked_gradient(row, grad);
      set_gradient(i, grad, true, none, grad);
      fold = true;
      continue;
    } else if (grad.defined() && !row.model.defined() && !row.inspected.is_unchanged(grad)) {
      all_inspected_ = false;
    }
    set_gradient(i, none, false, none, none);
  }
  if (fold) inspect(pending_scale_, true, {}, false, true);
  began_early_ = fold && delayed_;
  delayed_ = false;
  for (Row& row : rows_) {
    torch::Tensor& grad = row.leaf().mutable_grad();
    if (!row.model.defined()) row.accumulated = grad;  // stashed until end_backward
    grad.reset();
    row.copied_grad.reset();
    row.pending.forget();
    row.spent.forget();
  }
  materialized_ = false;
  norm_known_ = false;
  unread_ = true;
}

void ParamTable::mark_backward(const torch::Tensor& scale) {
  delayed_ = true;
  pending_scale_ = scale.clone();
  for (Row& row : rows_) {
    torch::Tensor& grad = row.leaf().mutable_grad();
    if (grad.defined()) row.pending.remember(grad);
    row.inspected.forget();
    if (row.model.defined() || !row.accumulated.defined()) continue;
    // The stash is unscaled and the new gradient is not, so they meet in the scaled one.
    if (grad.defined()) {
      grad.add_(row.accumulated * scale);
    } else {
      grad = row.accumulated;
    }
    row.accumulated.reset();
  }
}

void ParamTable::end_backward(const torch::Tensor& scale, bool check) {
  const torch::Tensor none;
  pending_scale_ = scale.clone();
  unread_ = true;
  bool any = false;
  norm_known_ = check;
  for (int64_t i = 0; i < rows(); ++i) {
    Row& row = rows_[i];
    torch::Tensor& grad = row.leaf().mutable_grad();
    row.has_grad = grad.defined();
    set_gradient(i, none, false, none, none);
    if (row.accumulated.defined() && (row.model.defined() || !grad.defined())) norm_known_ = false;
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
      const torch::Tensor& used = checked_gradient(row, grad);
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
  if (any || check) inspect(pending_scale_, check, {}, began_early_, all_inspected_);
  delayed_ = began_early_ = false;
  for (Row& row : rows_) {
    if (!row.has_grad) continue;
    const torch::Tensor& grad = row.leaf().mutable_grad();
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
}

void ParamTable::cancel_backward() {
  for (Row& row : rows_) {
    torch::Tensor& grad = row.leaf().mutable_grad();
    grad.reset();
    if (!row.model.defined()) grad = std::move(row.accumulated);
  }
}

void ParamTable::materialize() {
  if (materialized_ || !unread_) return;
  std::vector<int64_t> found;
  for (int64_t i = 0; i < rows(); ++i) {
    const Row& row = rows_[i];
    if (!row.model.defined()) continue;
    if (row.accumulated.defined() || row.pending.is_same_tensor(row.model.mutable_grad()))
      found.push_back(i);
  }
  if (found.empty()) return;
  std::vector<int64_t> numel;
  for (int64_t i : found) numel.push_back(rows_[i].param.numel());
  Table table(std::move(numel));
  const torch::Tensor scale = pending_scale_;
  std::vector<torch::Tensor> alive;
  for (size_t i = 0; i < found.size(); ++i) {
    Row& row = rows_[found[i]];
    const torch::Tensor accumulated = std::move(row.accumulated);
    torch::Tensor out = accumulated.defined() ? accumulated : empty_laid_out_as(row.param);
    bool inspected = true;
    if (row.pending.is_same_tensor(row.model.mutable_grad())) {
      inspected = row.inspected.is_unchanged(row.model.mutable_grad());
      const torch::Tensor grad = checked_gradient(row, row.model.mutable_grad());
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
  args.scale = scale.defined() ? scale.data_ptr<float>() : nullptr;
  const DeviceScope scope(device_);
  scope.backend().inspect(table, args, scope.stream());
  materialized_ = true;
  norm_known_ = false;
}

void ParamTable::zero_grad(bool set_to_none) {
  for (Row& row : rows_) {
    torch::Tensor& grad = row.leaf().mutable_grad();
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
  materialized_ = unread_ = delayed_ = edited_sums_ = false;
  norm_known_ = false;
}

// --- masters and model weights -------------------------------------------------------------------

bool ParamTable::Row::was_edited() const {
  return model.defined() && (version_of(model) != model_version || model.data_ptr() != model_data);
}

void ParamTable::Row::match_model() {
  if (!model.defined()) return;
  model_version = version_of(model);
  model_data = model.data_ptr();
}

void ParamTable::accept_model_weights() {
  for (Row& row : rows_) row.match_model();
}

void ParamTable::map_masters(MapOp op, const std::vector<int64_t>& rows) {
  if (rows.empty()) return;
  std::vector<int64_t> numel;
  for (int64_t i : rows) numel.push_back(rows_[i].param.numel());
  Table table(std::move(numel));
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows_[rows[i]];
    TORCH_CHECK(
        row.model.strides() == row.param.strides() && row.model.device() == device_, row.name,
        " was moved or laid out anew after the optimizer was built; build the optimizer, or call "
        "amp.initialize, after that");
    table.set(kParam, int64_t(i), row.param.data_ptr(), dtype_of(row.param, row.name));
    table.set(kModel, int64_t(i), row.model.data_ptr(), dtype_of(row.model, row.name));
  }
  const DeviceScope scope(device_);
  scope.backend().map(table, op, {}, scope.stream());
  for (int64_t i : rows) {
    Row& row = rows_[i];
    bump_version(op == MapOp::kPublish ? row.model : row.param);
    row.match_model();
  }
}

void ParamTable::refresh_masters(bool all) {
  std::vector<int64_t> edited;
  for (int64_t i = 0; i < rows(); ++i) {
    if (all ? rows_[i].model.defined() : rows_[i].was_edited()) edited.push_back(i);
  }
  map_masters(MapOp::kRefresh, edited);
}

void ParamTable::publish_masters() {
  std::vector<int64_t> mastered;
  for (int64_t i = 0; i < rows(); ++i) {
    if (rows_[i].model.defined()) mastered.push_back(i);
  }
  map_masters(MapOp::kPublish, mastered);
}

// --- the step ------------------------------------------------------------------------------------

// A row's tensors are a dozen cache lines behind three pointers in a row. Fetching them some rows
// ahead, a pointer further each time, halves the time of a scan over thousands of rows.
void ParamTable::prefetch_row(int64_t i) const {
  const auto impl = [](const torch::Tensor& tensor) {
    return reinterpret_cast<const char*>(tensor.unsafeGetTensorImpl());
  };
  constexpr int64_t kTensors = 12, kInside = 8, kGradient = 4;
  constexpr int64_t kLine = 64;
  if (i + kTensors < rows()) {
    const Row& row = rows_[i + kTensors];
    for (const torch::Tensor* tensor : {&row.leaf(), &row.param, &row.states[0], &row.states[1]})
      __builtin_prefetch(impl(*tensor));
    __builtin_prefetch(impl(row.leaf()) + 2 * kLine);
  }
  if (i + kInside < rows()) {
    const Row& row = rows_[i + kInside];
    __builtin_prefetch(row.leaf().unsafeGetTensorImpl()->autograd_meta());
    for (const torch::Tensor* tensor : {&row.leaf(), &row.param, &row.states[0], &row.states[1]}) {
      if (tensor->defined())
        __builtin_prefetch(tensor->unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    }
  }
  if (i + kGradient < rows()) {
    const char* grad = impl(rows_[i + kGradient].leaf().mutable_grad());
    for (int line = 0; line < 4; ++line) __builtin_prefetch(grad + line * kLine);
  }
}

std::vector<int64_t> ParamTable::collect(const std::optional<torch::Tensor>& scale, bool unscales) {
  const torch::Tensor none;
  bool any_pending = false;
  unchanged_ = !edited_sums_;
  edited_.clear();
  std::vector<int64_t> stateless;
  // Every check comes before the first change of a tensor.
  for (int64_t i = 0; i < rows(); ++i) {
    prefetch_row(i);
    Row& row = rows_[i];
    follow_storage(i);
    if (row.was_edited()) edited_.push_back(i);
    const torch::Tensor& grad = source(row);
    row.has_grad = grad.defined();
    TORCH_CHECK(row.model.defined() || !row.accumulated.defined(),
                "step() inside a backward pass of scale_loss; call "
                "it after the context has ended");
    bool scaled = scale && !is_materialized(row);
    const torch::Tensor& used = row.has_grad ? checked_gradient(row, grad) : none;
    row.unscales = unscales && scaled && row.has_grad && used.scalar_type() == torch::kFloat32;
    if (row.has_grad && row.pending.is_same_tensor(grad)) scaled = any_pending = true;
    set_gradient(i, used, scaled, row.accumulated, none);
    set(kUnscaled, i, row.unscales ? used : none);
    if (row.has_grad && !row.inspected.is_unchanged(grad)) unchanged_ = false;
    const bool has_gradient = row.has_grad || row.accumulated.defined();
    if (has_gradient && algorithm_ != Algorithm::kNone && !row.has_states) stateless.push_back(i);
  }
  TORCH_CHECK(!(any_pending && scale),
              "these gradients carry the loss scale of amp.scale_loss and a GradScaler's as "
              "well; use one of the two");
  // After scale_loss the step belongs to its scale, also where every gradient is unscaled by now.
  collected_scale_ = any_pending || (unread_ && !scale) ? pending_scale_ : scale ? *scale : none;
  return stateless;
}

// Whether the last inspection was of the gradients that collect() found.
bool ParamTable::is_measured() const {
  return norm_known_ && (row_norms_known_ || !needs_row_norms()) && unchanged_;
}

void ParamTable::inspect_collected(const Preparation& preparation) {
  inspect(collected_scale_, true, preparation);
  norm_known_ = unchanged_ = true;
}

void ParamTable::measure() {
  if (!is_measured()) inspect_collected({});
  for (Row& row : rows_) {
    if (row.has_grad) row.inspected.remember(source(row));
  }
}

void ParamTable::decide(const std::optional<torch::Tensor>& found_inf, double max_norm,
                        bool inspect, bool skip_nonfinite) {
  const bool inspects =
      (max_norm > 0 || needs_row_norms() || (inspect && !unchanged_)) && !is_measured();
  Preparation preparation;
  preparation.state = state();
  StepDecision& decision = preparation.decision;
  decision.loss_scale = collected_scale_.defined() ? collected_scale_.data_ptr<float>() : nullptr;
  decision.found_inf = float_pointer(found_inf, "found_inf", device_);
  decision.max_norm = max_norm;
  decision.norm_known = inspects || (norm_known_ && unchanged_);
  decision.skip_nonfinite = skip_nonfinite;
  RowColumns& columns = preparation.columns;
  columns.steps = steps().data_ptr<float>();
  if (needs_row_norms()) {
    columns.grad_norms = row_norms(kGradNorm);
    columns.grad_largest = row_norms(kGradLargest);
  }
  if (algorithm_ == Algorithm::kNovoGrad) columns.norm_averages = norm_averages().data_ptr<float>();
  float* const param_norms = layerwise_ ? row_norms(kParamNorm) : nullptr;
  columns.param_norms = param_norms;
  Table& rows = table();
  {
    const DeviceScope scope(device_);
    const pybind11::gil_scoped_release release;
    if (param_norms) scope.backend().measure_params(rows, param_norms, scope.stream());
    if (!inspects) scope.backend().prepare(rows, preparation, scope.stream());
  }
  if (inspects) inspect_collected(preparation);
}

void ParamTable::update(const std::optional<torch::Tensor>& found_inf, double max_norm,
                        bool inspect, bool skip_nonfinite) {
  if (rows_.empty()) return;
  map_masters(MapOp::kRefresh, edited_);
  decide(found_inf, max_norm, inspect, skip_nonfinite);
  {
    Table& rows = table();
    const DeviceScope scope(device_);
    const pybind11::gil_scoped_release release;
    scope.backend().update(rows, algorithm_, state(), scope.stream());
  }
  spend_gradients(true);
}

void ParamTable::Row::mark_stepped() {
  // What autograd may have saved; states have no graph.
  bump_version(param);
  if (!model.defined()) return;
  bump_version(model);
  model_version = version_of(model);
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

void ParamTable::prefetch_versions(int64_t i) const {
  constexpr int64_t kTensors = 12, kInside = 6;
  if (i + kTensors < rows()) {
    const Row& row = rows_[i + kTensors];
    for (const torch::Tensor* tensor : {&row.param, &row.model})
      __builtin_prefetch(tensor->unsafeGetTensorImpl());
  }
  if (i + kInside < rows()) {
    const Row& row = rows_[i + kInside];
    __builtin_prefetch(row.leaf().unsafeGetTensorImpl()->autograd_meta());
    for (const torch::Tensor* tensor : {&row.param, &row.model}) {
      if (tensor->defined()) __builtin_prefetch(counter_of(*tensor));
    }
  }
}

// `stepped`: the rows that have a gradient were, by an update of ours.
void ParamTable::spend_gradients(bool stepped) {
  for (int64_t i = 0; i < rows(); ++i) {
    prefetch_versions(i);
    Row& row = rows_[i];
    if (stepped && (row.has_grad || row.accumulated.defined())) row.mark_stepped();
    if (stepped && row.unscales) {
      torch::Tensor& grad = row.leaf().mutable_grad();
      if (row.copied_grad.defined()) grad = row.copied_grad;
      bump_version(grad);
    }
    if (row.model.defined()) {
      const torch::Tensor& grad = row.model.mutable_grad();
      if (grad.defined()) row.spent.remember(grad);
      if (materialized_) row.param.mutable_grad().reset();
      row.accumulated.reset();
    }
    row.copied_grad.reset();
    row.inspected.forget();
  }
  materialized_ = unread_ = delayed_ = edited_sums_ = false;
  norm_known_ = false;
}

}  // namespace ampfuse
