#include "tensor_ops.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>

#include "core/backend.h"
#include "core/ops.h"
#include "schema.h"
#include "torch_backend.h"

namespace ampfuse {
namespace {

struct NamedList {
  const char* name;
  const TensorList& tensors;
  int list;
  bool written;
};

std::string item(const NamedList& list, size_t i) {
  return std::string(list.name) + "[" + std::to_string(i) + "]";
}

// Checks everything before anything is read, then fills the table.
Table make_table(const std::vector<NamedList>& lists) {
  const TensorList& first = lists[0].tensors;
  if (!first.empty()) check_device(first[0].device());
  std::vector<int64_t> numel;
  for (const at::Tensor& tensor : first) numel.push_back(tensor.numel());
  Table table(std::move(numel));
  for (const NamedList& list : lists) {
    TORCH_CHECK_VALUE(list.tensors.size() == first.size(), list.name, " holds ",
                      list.tensors.size(), " tensors and ", lists[0].name, " ", first.size(),
                      "; the lists must have the same length");
    for (size_t i = 0; i < first.size(); ++i) {
      const at::Tensor& tensor = list.tensors[i];
      TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, item(list, i),
                       " is sparse; pass dense tensors");
      const DType dtype = dtype_of(tensor, list.name, "[", i, "]");
      TORCH_CHECK_VALUE(tensor.device() == first[0].device(), item(list, i), " is on ",
                        tensor.device(), " and ", item(lists[0], 0), " on ", first[0].device(),
                        "; call once per device");
      TORCH_CHECK_VALUE(is_dense(tensor), item(list, i), " of shape ", tensor.sizes(),
                        " and strides ", tensor.strides(),
                        " has gaps or overlaps in memory; pass a contiguous copy");
      TORCH_CHECK_VALUE(
          tensor.sizes() == first[i].sizes() && tensor.strides() == first[i].strides(),
          item(list, i), " has shape ", tensor.sizes(), " and strides ", tensor.strides(), ", ",
          item(lists[0], i), " shape ", first[i].sizes(), " and strides ", first[i].strides(),
          "; they have to match");
      TORCH_CHECK(!(list.written && tensor.requires_grad() && at::GradMode::is_enabled()),
                  item(list, i),
                  " requires grad and would be written in place; call under torch.no_grad()");
      table.set(list.list, int64_t(i), memory_of(tensor, list.name, "[", i, "]"), dtype);
    }
  }
  return table;
}

void bump_versions(const TensorList& tensors) {
  for (const at::Tensor& tensor : tensors) bump_version(tensor);
}

void bump_written(const std::vector<NamedList>& lists) {
  for (const NamedList& list : lists) {
    if (list.written) bump_versions(list.tensors);
  }
}

void map(const std::vector<NamedList>& lists, MapOp op, MapArgs args,
         const std::optional<at::Tensor>& found_inf) {
  Table table = make_table(lists);
  if (lists[0].tensors.empty()) return;
  const at::Device device = lists[0].tensors[0].device();
  args.found_inf = float_pointer(found_inf, "found_inf", device);
  {
    const DeviceScope scope(device);
    const pybind11::gil_scoped_release release;
    scope.backend().map(table, op, args, scope.stream());
  }
  bump_written(lists);
  if (found_inf) bump_version(*found_inf);
}

// The lists of a step; `models` and `updates` may be empty. Updates are written in place of
// parameters.
std::vector<NamedList> lists_of_step(const TensorList& grads, const TensorList& params,
                                     const TensorList& models,
                                     const std::vector<TensorList>& states,
                                     const TensorList& updates) {
  static const char* const names[kMaxStates] = {"states[0]", "states[1]", "states[2]"};
  std::vector<NamedList> lists = {{"grads", grads, kGrad, false},
                                  {"params", params, kParam, updates.empty()}};
  for (size_t i = 0; i < states.size(); ++i)
    lists.push_back({names[i], states[i], kState0 + int(i), true});
  if (!models.empty()) lists.push_back({"models", models, kModel, true});
  if (!updates.empty()) lists.push_back({"updates", updates, kGradOut, true});
  return lists;
}

// The address of a column: a number for each row, float32, on the device.
float* column(const at::Tensor& tensor, const char* name, int64_t rows, at::Device device) {
  TORCH_CHECK_VALUE(tensor.numel() == rows, name, " has ", tensor.numel(), " elements for ", rows,
                    " tensors");
  return pointer_to<float>(tensor, name, rows, device);
}

// Gives all rows `hyper`, with the one rate of `lr_tensor`, or a rate for each row, in its place.
void set_hyper(Table& table, RowHyper hyper, const std::optional<at::Tensor>& lr_tensor,
               at::Device device) {
  const int64_t rows = table.rows();
  const bool one_rate = !lr_tensor || lr_tensor->numel() <= 1;
  hyper.lr_tensor =
      one_rate ? float_pointer(lr_tensor, "lr", device) : column(*lr_tensor, "lr", rows, device);
  if (one_rate) return table.set_hyper(0, rows, hyper);
  for (int64_t row = 0; row < rows; ++row, ++hyper.lr_tensor) table.set_hyper(row, row + 1, hyper);
}

at::Tensor new_step_state(at::Device device) {
  return at::zeros({int64_t(sizeof(StepState))},
                   at::TensorOptions().device(device).dtype(at::kByte));
}

}  // namespace

void scale(const TensorList& src, const TensorList& dst, double factor,
           const std::optional<at::Tensor>& found_inf) {
  map({{"src", src, kSource, false}, {"dst", dst, kTarget, true}}, MapOp::of<ScaleOp>(),
      {float(factor), 0, nullptr}, found_inf);
}

void axpby(const TensorList& x, const TensorList& y, const TensorList& out, double a, double b,
           const std::optional<at::Tensor>& found_inf, int64_t check) {
  TORCH_CHECK_VALUE(check >= -1 && check <= 1, "check is ", check,
                    "; it must be -1 (x and y), 0 (x) or 1 (y)");
  constexpr unsigned kX = bit(kSource), kY = bit(kSource2);
  MapOp op = MapOp::of<AxpbyOp<kX | kY>>();
  if (check == 0) op = MapOp::of<AxpbyOp<kX>>();
  if (check == 1) op = MapOp::of<AxpbyOp<kY>>();
  map({{"x", x, kSource, false}, {"y", y, kSource2, false}, {"out", out, kTarget, true}}, op,
      {float(a), float(b), nullptr}, found_inf);
}

void unscale(const TensorList& grads, const TensorList& out, const at::Tensor& inv_scale,
             const std::optional<at::Tensor>& found_inf) {
  Table table = make_table({{"grads", grads, kGrad, false}, {"out", out, kGradOut, true}});
  if (grads.empty()) return;
  for (int64_t row = 0; row < table.rows(); ++row) table.set_scaled(row, true);
  const at::Device device = grads[0].device();
  InspectArgs args;
  args.scale = float_pointer(inv_scale, "inv_scale", device);
  args.scale_is_inverse = true;
  args.found_inf = float_pointer(found_inf, "found_inf", device);
  {
    const DeviceScope scope(device);
    const pybind11::gil_scoped_release release;
    scope.backend().inspect(table, args, scope.stream());
  }
  bump_versions(out);
  if (found_inf) bump_version(*found_inf);
}

std::tuple<at::Tensor, at::Tensor> l2norm(const TensorList& tensors, bool per_tensor,
                                          const std::optional<at::Tensor>& inv_scale,
                                          const std::optional<at::Tensor>& found_inf) {
  Table table = make_table({{"tensors", tensors, kGrad, false}});
  const auto options = at::TensorOptions().dtype(at::kFloat);
  if (tensors.empty()) return {at::zeros({}, options), at::zeros({0}, options)};
  const at::Device device = tensors[0].device();
  at::Tensor norm = at::empty({}, options.device(device));
  at::Tensor norms = at::empty({per_tensor ? table.rows() : 0}, options.device(device));
  for (int64_t row = 0; row < table.rows(); ++row) table.set_scaled(row, inv_scale.has_value());
  InspectArgs args;
  args.scale = float_pointer(inv_scale, "inv_scale", device);
  args.scale_is_inverse = true;
  args.found_inf = float_pointer(found_inf, "found_inf", device);
  args.norm = norm.data_ptr<float>();
  args.row_norms = per_tensor ? norms.data_ptr<float>() : nullptr;
  if (found_inf) bump_version(*found_inf);
  const DeviceScope scope(device);
  const pybind11::gil_scoped_release release;
  scope.backend().inspect(table, args, scope.stream());
  return {norm, norms};
}

void step(const std::string& algorithm, const TensorList& grads, const TensorList& params,
          const TensorList& models, const std::vector<TensorList>& states,
          const TensorList& updates, const at::Tensor& steps,
          const std::optional<at::Tensor>& norm_averages,
          const std::optional<at::Tensor>& lr_tensor, const std::map<std::string, double>& values,
          const std::optional<at::Tensor>& loss_scale, const std::optional<at::Tensor>& found_inf) {
  const Algorithm chosen = algorithm_of(algorithm);
  const AlgorithmInfo& about = info(chosen);
  TORCH_CHECK_VALUE(about.scratch < 0, algorithm, " has no step on lists: it needs scratch memory");
  const size_t most = about.states.size(), least = about.last_state_if ? most - 1 : most;
  TORCH_CHECK_VALUE(least <= states.size() && states.size() <= most, algorithm, " has ", most,
                    " lists of states, got ", states.size());
  const std::vector<NamedList> lists = lists_of_step(grads, params, models, states, updates);
  Table table = make_table(lists);
  if (grads.empty()) return;
  const at::Device device = grads[0].device();
  const int64_t rows = table.rows();
  const RowHyper hyper = hyper_of(chosen, values);
  set_hyper(table, hyper, lr_tensor, device);
  for (int64_t row = 0; row < rows; ++row) table.set_scaled(row, loss_scale.has_value());
  const at::Tensor state = new_step_state(device);
  const at::Tensor norms =
      at::empty({3, rows}, at::TensorOptions().device(device).dtype(at::kFloat));
  auto* const step_state = static_cast<StepState*>(state.data_ptr());
  Preparation preparation;
  preparation.state = step_state;
  RowColumns& columns = preparation.columns;
  columns.steps = column(steps, "steps", rows, device);
  StepDecision& decision = preparation.decision;
  decision.loss_scale = float_pointer(loss_scale, "loss_scale", device);
  decision.found_inf = float_pointer(found_inf, "found_inf", device);
  decision.skip_nonfinite = true;
  InspectArgs args;
  const bool layerwise = hyper.flags & kLayerwise, inspects = about.grad_norms || layerwise;
  if (about.grad_norms) {
    TORCH_CHECK_VALUE(norm_averages, algorithm, " needs norm_averages");
    columns.norm_averages = column(*norm_averages, "norm_averages", rows, device);
  }
  float* const param_norms = layerwise ? norms.data_ptr<float>() + 2 * rows : nullptr;
  columns.param_norms = param_norms;
  if (inspects) {
    args.scale = decision.loss_scale;
    args.row_norms = norms.data_ptr<float>();
    args.row_largest = args.row_norms + rows;
    columns.grad_norms = args.row_norms;
    columns.grad_largest = args.row_largest;
    args.preparation = preparation;
  }
  const auto set_updates = [&](bool are_written) {
    for (size_t row = 0; row < updates.size(); ++row)
      table.set(kGradOut, int64_t(row), are_written ? updates[row].data_ptr() : nullptr,
                are_written ? dtype_of(updates[row]) : DType::kNone);
  };
  {
    const DeviceScope scope(device);
    const pybind11::gil_scoped_release release;
    Backend& backend = scope.backend();
    if (layerwise) backend.measure_params(table, param_norms, scope.stream());
    if (inspects) {
      set_updates(false);  // an inspection would write them, and they may be the gradients
      backend.inspect(table, args, scope.stream());
      set_updates(true);
    } else {
      backend.prepare(table, preparation, scope.stream());
    }
    backend.first_stage(table, chosen, step_state, scope.stream());
    backend.update(table, chosen, step_state, nullptr, scope.stream());
  }
  bump_written(lists);
  bump_version(steps);
  if (about.grad_norms) bump_version(*norm_averages);
}

namespace {

struct Placed {
  int list;
  DType type;
  const at::Tensor& tensor;
};

// Runs Op over one tensor in several lists. Those that it only reads keep their version: a weight
// of a split master may be saved for a backward pass.
template <class Op>
void convert(std::initializer_list<Placed> lists) {
  const at::Tensor& first = lists.begin()->tensor;
  Table table({first.numel()});
  for (const auto& [list, type, tensor] : lists) {
    TORCH_CHECK_TYPE(
        tensor.layout() == at::kStrided && tensor.scalar_type() == scalar_type_of(type),
        "a tensor of a state is ", tensor.scalar_type(), " and ", tensor.layout());
    TORCH_CHECK_VALUE(tensor.device() == first.device(), "tensors of one state are on ",
                      tensor.device(), " and ", first.device());
    TORCH_CHECK_VALUE(list >= kScale0
                          ? tensor.numel() == blocks_of(first.numel()) && tensor.is_contiguous()
                          : is_laid_out_as(tensor, first) && is_dense(tensor),
                      "tensors of one state have shapes ", tensor.sizes(), " and ", first.sizes());
    table.set(list, 0, memory_of(tensor, "a tensor of a state"), type);
  }
  const DeviceScope scope(first.device());
  scope.backend().map(table, MapOp::of<Op>(), {}, scope.stream());
  for (const Placed& placed : lists) {
    const int list = placed.list >= kScale0 ? placed.list - kScale0 + kState0 : placed.list;
    if (Op::kWrites & bit(list)) bump_version(placed.tensor);
  }
}

DType remainder_type(const at::Tensor& model) {
  return dtype_of(model, "the weight") == DType::kFloat16 ? DType::kRemainderFloat16
                                                          : DType::kRemainderBFloat16;
}

// The lists of a state in a quantized storage type: values and scales.
struct Quantized {
  DType type;
  const at::Tensor &values, &scales;

  Quantized(const std::string& algorithm, int64_t state, const std::string& storage,
            const TensorList& lists)
      : values(lists.at(0)), scales(lists.at(1)) {
    TORCH_CHECK_INDEX(0 <= state && state < kMaxStates, "state ", state, " of ", kMaxStates);
    const StorageInfo& found = storage_of(storage);
    TORCH_CHECK_VALUE(found.block > 0, storage, " is not quantized in blocks; copy the state");
    const unsigned unsigned_states = info(algorithm_of(algorithm)).unsigned_states;
    type = found.type(unsigned_states & bit(kState0 + int(state)));
  }
};

}  // namespace

void join_master(const at::Tensor& model, const at::Tensor& remainder, const at::Tensor& out) {
  convert<JoinOp>({{kParam, remainder_type(model), remainder},
                   {kModel, dtype_of(model), model},
                   {kTarget, DType::kFloat32, out}});
}

void split_master(const at::Tensor& master, const at::Tensor& model, const at::Tensor& remainder) {
  convert<SplitOp>({{kParam, remainder_type(model), remainder},
                    {kModel, dtype_of(model), model},
                    {kSource, DType::kFloat32, master}});
}

void decode_state(const std::string& algorithm, int64_t state, const std::string& storage,
                  const TensorList& lists, const at::Tensor& out) {
  const Quantized quantized(algorithm, state, storage, lists);
  convert<DecodeOp>({{kState0, quantized.type, quantized.values},
                     {kScale0, DType::kFloat32, quantized.scales},
                     {kTarget, DType::kFloat32, out}});
}

void encode_state(const std::string& algorithm, int64_t state, const at::Tensor& value,
                  const std::string& storage, const TensorList& lists) {
  const Quantized quantized(algorithm, state, storage, lists);
  convert<EncodeOp>({{kState0, quantized.type, quantized.values},
                     {kScale0, DType::kFloat32, quantized.scales},
                     {kSource, DType::kFloat32, value}});
}

void update_scale(const at::Tensor& scale, const at::Tensor& growth_tracker,
                  const at::Tensor& hysteresis_tracker, const TensorList& found_infs,
                  double growth_factor, double backoff_factor, int64_t growth_interval,
                  double min_scale, double max_scale, int64_t hysteresis, const TensorList& shared,
                  bool dynamic) {
  LossScale rule;
  rule.scale = float_pointer(scale, "scale", scale.device());
  rule.growth_tracker = pointer_to<int32_t>(growth_tracker, "growth_tracker", 1, scale.device());
  rule.hysteresis_tracker =
      pointer_to<int32_t>(hysteresis_tracker, "hysteresis_tracker", 1, scale.device());
  rule.growth_factor = growth_factor;
  rule.backoff_factor = backoff_factor;
  rule.growth_interval = int32_t(std::min<int64_t>(growth_interval, INT32_MAX));
  rule.min_scale = min_scale;
  rule.max_scale = max_scale;
  rule.hysteresis = int32_t(std::min<int64_t>(hysteresis, INT32_MAX));
  const size_t count = std::max(found_infs.size(), shared.size());
  TORCH_CHECK_VALUE(count <= OverflowFlags::kMax, "a loss scaler takes at most ",
                    OverflowFlags::kMax, " optimizers, and this one has ", count);
  OverflowFlags flags;
  for (const at::Tensor& flag : found_infs)
    flags.found_inf[flags.found_infs++] = float_pointer(flag, "found_inf", scale.device());
  for (const at::Tensor& flag : shared)
    flags.shared[flags.shareds++] = float_pointer(flag, "a shared flag", scale.device());
  const DeviceScope scope(scale.device());
  scope.backend().update_scale(rule, flags, !dynamic, scope.stream());
  bump_versions(shared);
  if (dynamic) {
    for (const at::Tensor& tensor : {scale, growth_tracker, hysteresis_tracker})
      bump_version(tensor);
  }
}

}  // namespace ampfuse
