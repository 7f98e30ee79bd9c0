#include "param_table.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <utility>

#include "memory.h"
#include "schema.h"
#include "shards.h"
#include "torch_backend.h"

namespace ampfuse {

ParamTable::ParamTable(const std::string& algorithm, at::Device device)
    : algorithm(algorithm_of(algorithm)), device(device) {
  check_device(device);
  steps_ = at::zeros({0}, at::TensorOptions().dtype(at::kFloat).device(device));
  norm_averages_ = steps_;
}

// Throws an error that names the row if no kernel on `device` can walk its parameter or weight.
static void check_can_be_walked(const at::Tensor& tensor, const std::string& name,
                                at::Device device) {
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, name,
                   " is sparse; ampfuse steps dense parameters");
  TORCH_CHECK_TYPE(!tensor.key_set().has(c10::DispatchKey::Python), name,
                   " is a tensor subclass without memory of its own; ampfuse steps plain tensors "
                   "and DTensors of them (FP8 layers of torchao have plain weights with "
                   "enable_fsdp_float8_all_gather=False)");
  TORCH_CHECK(tensor.device() == device, name, " is on ", tensor.device(),
              " and another parameter on ", device, "; use one optimizer per device");
  TORCH_CHECK(is_dense(tensor), name, " of shape ", tensor.sizes(), " and strides ",
              tensor.strides(),
              " has gaps or overlaps in memory. Make the parameter contiguous before building "
              "the optimizer.");
}

// Throws, naming the row, unless its master, or the remainder of one, fits its model weight.
static void check_master(const at::Tensor& param, const at::Tensor& model, const Row& row) {
  TORCH_CHECK(is_laid_out_as(model, param), row.name,
              ": master and model weight differ, in shapes ", param.sizes(), " and ", model.sizes(),
              " or in strides ", param.strides(), " and ", model.strides());
  TORCH_CHECK_TYPE(!row.is_split || element_size(dtype_of(model)) == 2, row.name,
                   ": the remainder of a split master needs a weight of float16 or bfloat16");
}

// The DTensor whose local shard is the row's leaf.
static Shard shard_of(const at::Tensor& whole, int64_t origin, const Row& row) {
  Shard shard;
  shard.whole = whole;
  shard.origin = origin;
  shard.whole_object = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(whole));
  TORCH_CHECK_TYPE(is_shard_of(shard.whole_object, row.leaf()), row.name,
                   " is not the local shard of the DTensor that it is said to be");
  return shard;
}

// Takes over a master's gradient, as a table before this one may have left it.
static void adopt_gradient(Row& row) {
  if (!row.model.defined() || !row.param.grad().defined()) return;
  row.grad_state = Grad::kMirrored;
  if (!row.model.grad().defined()) row.model.mutable_grad() = row.param.grad();
}

int64_t ParamTable::add_row(at::Tensor param, std::optional<at::Tensor> model, std::string name,
                            int64_t model_version, bool at_random, std::optional<at::Tensor> whole,
                            int64_t origin, const std::optional<std::string>& algorithm) {
  Row row;
  row.algorithm = algorithm ? algorithm_of(*algorithm) : this->algorithm;
  row.name = std::move(name);
  row.is_split = model && param.scalar_type() == at::kShort;
  row.rounds_at_random = at_random && !model && param.scalar_type() == at::kBFloat16;
  if (model) dtype_of(*model, row.name);
  if (!row.is_split) dtype_of(param, row.name);
  TORCH_CHECK_VALUE(origin >= 0, "a shard begins at element ", origin);
  for (const at::Tensor& tensor : {param, model.value_or(param)})
    check_can_be_walked(tensor, row.name, device);
  if (model) {
    if (!whole) lay_out_as(*model, param);
    check_master(param, *model, row);
    row.model = *model;
    row.model_version = model_version;
    row.model_data = model->data_ptr();
  }
  row.param = std::move(param);
  row.is_contiguous = row.param.is_contiguous();
  row.numel = row.param.numel();
  if (whole) {
    row.shard = shard_of(*whole, origin, row);
    has_shards = true;
  }
  if (std::find(algorithms_.begin(), algorithms_.end(), row.algorithm) == algorithms_.end())
    algorithms_.push_back(row.algorithm);
  adopt_gradient(row);
  for (const at::Tensor& tensor : {row.param, row.leaf()})
    row_of_[tensor.unsafeGetTensorImpl()] = rows_.size();
  rows_.push_back(std::move(row));
  core_.reset();  // and with it all hyper-parameters, which the caller sends again
  ++changes;
  return row_count() - 1;
}

Row* ParamTable::row_of(const at::Tensor& param) {
  const auto found = row_of_.find(param.unsafeGetTensorImpl());
  return found == row_of_.end() ? nullptr : &rows_[found->second];
}

// A column that grows with the rows.
static at::Tensor grown(const at::Tensor& column, int64_t rows) {
  if (column.numel() >= rows) return column;
  return at::cat({column, at::zeros({rows - column.numel()}, column.options())});
}

at::Tensor ParamTable::steps() { return steps_ = grown(steps_, row_count()); }

at::Tensor ParamTable::norm_averages() {
  return norm_averages_ = grown(norm_averages_, row_count());
}

void ParamTable::remember(pybind11::handle groups, pybind11::handle states) {
  if (!groups.is_none()) containers_.remember_params(groups);
  if (!states.is_none()) containers_.remember_states(states);
}

bool ParamTable::matches(pybind11::handle groups, pybind11::handle states) {
  if (!groups.is_none() && !containers_.have_params(groups)) return false;
  if (!groups.is_none() && has_shards && !have_their_shards(rows_)) return false;
  return states.is_none() || containers_.have_states(states);
}

void ParamTable::set_states(int64_t index, const std::optional<States>& states,
                            const std::string& storage, const std::optional<at::Tensor>& average) {
  Row& row = rows_.at(index);
  const StorageInfo& stored = storage_of(storage);
  const size_t count = states ? states->size() : 0;
  TORCH_CHECK_VALUE(count <= kMaxStates, "a row has at most three states");
  TORCH_CHECK(stored.block == 0 || info(row.algorithm).quantizable, info(row.algorithm).name,
              " keeps no states in ", storage);
  const auto check = [&](const at::Tensor& tensor, const auto&... what) {
    TORCH_CHECK(is_laid_out_as(tensor, row.param) && tensor.device() == device, what..., " of ",
                row.name, " must be on ", device, " and laid out as the parameter");
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
                    lists[1].device() == device,
                "state ", i, " of ", row.name, " needs float32 scales on ", device,
                ", one for each ", stored.block, " elements");
  }
  if (average) {
    lay_out_as(row.param, *average);
    check(*average, "the average");
    TORCH_CHECK_TYPE(average->scalar_type() == at::kFloat, "the average of ", row.name, " is ",
                     average->scalar_type(), "; it must be float32");
  }
  row.has_states = states.has_value();
  row.storage = &stored;
  row.average = average.value_or(at::Tensor());
  for (size_t i = 0; i < kMaxStates; ++i) {
    row.states[i] = i < count ? (*states)[i][0] : at::Tensor();
    row.scales[i] = i < count && stored.block ? (*states)[i][1] : at::Tensor();
  }
  set_lists(index);
}

void ParamTable::set_scratch(const std::vector<std::pair<int64_t, at::Tensor>>& scratch) {
  for (const auto& [index, memory] : scratch) {
    const Row& row = rows_.at(index);
    const int list = info(row.algorithm).scratch;
    TORCH_CHECK_VALUE(list >= 0, info(row.algorithm).name, " has no scratch memory");
    TORCH_CHECK_VALUE(is_laid_out_as(memory, row.param) && memory.device() == device,
                      "the scratch memory of ", row.name, " must be on ", device,
                      " and laid out as the parameter");
    core().set(list, index, memory_of(memory, row.name), dtype_of(memory, row.name));
  }
}

bool ParamTable::needs_grad_norms() const {
  return std::any_of(algorithms_.begin(), algorithms_.end(),
                     [](Algorithm algorithm) { return info(algorithm).grad_norms; });
}

void ParamTable::set_hyper(int64_t begin, int64_t end, const std::optional<at::Tensor>& lr_tensor,
                           const std::map<std::string, double>& values,
                           const std::map<std::string, at::Tensor>& on_device) {
  TORCH_CHECK_INDEX(0 <= begin && begin <= end && end <= row_count(), "rows ", begin, " to ", end,
                    " of ", row_count());
  RowHyper hyper = hyper_of(begin < end ? rows_[begin].algorithm : algorithm, values);
  hyper.lr_tensor = float_pointer(lr_tensor, "lr", device);
  std::vector<at::Tensor> read;
  if (lr_tensor) read.push_back(*lr_tensor);
  for (const auto& [name, number] : on_device) {
    number_on_device(hyper.on_device, name) = pointer_to<double>(number, name.c_str(), 1, device);
    read.push_back(number);
  }
  core().set_hyper(begin, end, hyper);
  for (int64_t i = begin; i < end; ++i) {
    rows_[i].hyper_tensors = read;
    layerwise_rows_ -= std::exchange(rows_[i].is_layerwise, hyper.flags & kLayerwise);
    layerwise_rows_ += rows_[i].is_layerwise;
  }
}

Table& ParamTable::core() {
  if (core_) return *core_;
  std::vector<int64_t> numel, origin;
  for (const Row& row : rows_) {
    numel.push_back(row.numel);
    origin.push_back(row.shard.origin);
  }
  core_ = std::make_unique<Table>(std::move(numel), std::move(origin));
  for (int64_t i = 0; i < row_count(); ++i) set_lists(i);
  return *core_;
}

void ParamTable::set_lists(int64_t index) {
  const Row& row = rows_[index];
  set(kParam, index, row.param);
  set(kModel, index, row.model);
  for (int state = 0; state < kMaxStates; ++state) {
    set(kState0 + state, index, row.states[state]);
    set(kScale0 + state, index, row.scales[state]);
  }
  set(kAverage, index, row.average);
}

DType ParamTable::type_in(int list, int64_t index, const at::Tensor& tensor) const {
  const Row& row = rows_[index];
  if (is_state(list)) return row.storage->type(info(row.algorithm).unsigned_states & bit(list));
  if (list == kParam && row.rounds_at_random) return DType::kRandomBFloat16;
  if (list == kParam && row.is_split)
    return row.model.scalar_type() == at::kHalf ? DType::kRemainderFloat16
                                                : DType::kRemainderBFloat16;
  return dtype_of(tensor, row.name);
}

void ParamTable::set(int list, int64_t row, const at::Tensor& tensor) {
  static char no_elements;  // null would say that the row has no such list, and so no gradient
  if (tensor.defined()) {
    void* data = tensor.numel() > 0 ? memory_of(tensor, rows_[row].name) : &no_elements;
    core().set(list, row, data, type_in(list, row, tensor));
  } else {
    core().set(list, row, nullptr, DType::kNone);
  }
}

void ParamTable::follow_layout(int64_t index) {
  const Row& row = rows_[index];
  if (row.shard.whole.defined()) return;
  for (const at::Tensor* tensor : {&row.param, &row.average, &row.accumulated})
    lay_out_as(row.leaf(), *tensor);
  // Blocks of quantized values are neighbours in memory.
  for (const at::Tensor& state : row.states) {
    if (row.storage->block == 0) lay_out_as(row.leaf(), state);
  }
}

static std::array<const void*, Row::kTrackedPointers> tracked_pointers_of(const Row& row) {
  std::array<const void*, Row::kTrackedPointers> found = {row.leaf().data_ptr(), base_of(row.param),
                                                          base_of(row.average)};
  for (int state = 0; state < kMaxStates; ++state) {
    found[3 + state] = base_of(row.states[state]);
    found[3 + kMaxStates + state] = base_of(row.scales[state]);
  }
  return found;
}

// `param.data = other`, module.to() and the like give a tensor other memory while it stays the same
// tensor.
void ParamTable::follow_storage(int64_t index) {
  Row& row = rows_[index];
  if (tracked_pointers_of(row) == row.memory) return;
  follow_layout(index);
  const auto fits_param = [&](const at::Tensor& tensor) {
    return !tensor.defined() || (tensor.device() == device && is_laid_out_as(tensor, row.param));
  };
  const bool fits = row.param.device() == device && row.param.numel() == row.numel &&
                    is_dense(row.param) && fits_param(row.model);
  TORCH_CHECK(fits, row.name,
              " was moved to another device or changed its shape or strides after the optimizer's "
              "first use; do that before building the optimizer");
  for (int state = 0; state < kMaxStates; ++state) {
    const at::Tensor &values = row.states[state], &scales = row.scales[state];
    TORCH_CHECK(fits_param(values), row.name,
                " changed its strides after the optimizer's first step, and states in blocks are "
                "laid out as it was before; do that before building the optimizer");
    TORCH_CHECK(
        (!values.defined() || values.scalar_type() == scalar_type_of(row.storage->signed_type)) &&
            (!scales.defined() ||
             (scales.scalar_type() == at::kFloat && scales.numel() == blocks_of(row.numel) &&
              scales.device() == device && scales.is_contiguous())),
        "a state of ", row.name,
        " was given memory of another type or size; assign to optimizer.state instead");
  }
  set_lists(index);
  row.is_contiguous = row.param.is_contiguous();
  row.memory = tracked_pointers_of(row);
}

void ParamTable::set_gradient(int64_t row, const at::Tensor& grad, bool scaled,
                              const at::Tensor& accumulated, const at::Tensor& out) {
  set(kGrad, row, grad);
  set(kAccumulated, row, accumulated);
  set(kGradOut, row, out);
  core().set_scaled(row, scaled);
}

}  // namespace ampfuse
