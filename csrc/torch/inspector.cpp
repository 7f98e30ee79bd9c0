#include "inspector.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <cstddef>
#include <cstring>
#include <map>

#include "torch_backend.h"

namespace ampfuse {

Inspector::Inspector(ParamTable& table) : table_(table) {
  const StepState initial;
  state_ = at::empty({int64_t(sizeof initial)}, at::kByte);
  std::memcpy(state_.data_ptr(), &initial, sizeof initial);
  state_ = state_.to(table.device);
  norms_ = at::zeros({kKept, 0}, at::TensorOptions().dtype(at::kFloat).device(table.device));
}

at::Tensor Inspector::state_field(const std::string& name) const {
  struct Field {
    size_t offset;
    at::ScalarType dtype;
    size_t size = 0;  // that of one element if 0
  };
  static const std::map<std::string, Field> fields = {
      {"sum_squares", {offsetof(StepState, sum_squares), at::kDouble}},
      {"found_inf", {offsetof(StepState, found_inf), at::kFloat}},
      {"pass_found_inf", {offsetof(StepState, pass_found_inf), at::kFloat}},
      {"skip", {offsetof(StepState, skip), at::kFloat}},
      {"grad_norm", {offsetof(StepState, grad_norm), at::kFloat}},
      {"clip_coef", {offsetof(StepState, clip_coef), at::kFloat}},
      {"loss_scale", {offsetof(StepState, loss_scale), at::kFloat}},
      {"bad_row", {offsetof(StepState, bad_row), at::kInt}},
      {"bad_bits", {offsetof(StepState, bad_bits), at::kInt}},
      {"last_bad_row", {offsetof(StepState, last_bad_row), at::kInt}},
      {"last_bad_bits", {offsetof(StepState, last_bad_bits), at::kInt}},
      {"history", {offsetof(StepState, history), at::kDouble, sizeof(StepHistory)}},
  };
  const auto field = fields.find(name);
  TORCH_CHECK_VALUE(field != fields.end(), "StepState has no field '", name, "'");
  const auto& [offset, dtype, size] = field->second;
  const int64_t begin = int64_t(offset), end = begin + int64_t(size ? size : elementSize(dtype));
  return state_.slice(0, begin, end).view(dtype).squeeze(0);
}

bool Inspector::needs_row_norms() const {
  return table_.needs_grad_norms() || table_.is_layerwise();
}

float* Inspector::row_norms(Column column) {
  const int64_t rows = table_.row_count();
  if (norms_.numel() < kKept * rows) {
    norms_ = at::zeros({kKept, rows}, norms_.options());
    knows_row_norms = false;
  }
  return norms_.data_ptr<float>() + column * norms_.size(1);
}

void Inspector::inspect(const at::Tensor& scale, const Inspection& inspection) {
  InspectArgs args;
  // The ranks of a group decide when all of them have looked.
  const bool together = inspection.record && is_shared();
  if (!together) args.preparation = inspection.preparation;
  args.same_pass = inspection.same_pass;
  args.fresh = inspection.fresh;
  args.scale = float_pointer(scale, "scale", table_.device);
  args.kept_scale = inspection.kept_scale;
  args.state = inspection.record ? state() : nullptr;
  if (inspection.record && (needs_row_norms() || counted_elsewhere_.defined())) {
    args.row_norms = row_norms(kGradNorm);
    args.row_largest = row_norms(kGradLargest);
  }
  knows_row_norms = args.row_norms != nullptr;
  Table& rows = table_.core();
  const DeviceScope scope(table_.device);
  {
    const pybind11::gil_scoped_release release;
    scope.backend().inspect(rows, args, scope.stream());
  }
  if (!together) return;
  const Preparation& preparation = inspection.preparation;
  share_row_norms(true, preparation.columns.param_norms != nullptr);
  if (preparation.state) scope.backend().prepare(rows, preparation, scope.stream());
}

void Inspector::set_gather(Gather gather, const std::optional<at::Tensor>& counted_elsewhere) {
  gather_ = std::move(gather);
  counted_elsewhere_ = counted_elsewhere.value_or(at::Tensor());
}

void Inspector::share(bool found, at::Tensor norms, std::optional<int64_t> largest) {
  if (counted_elsewhere_.defined() && norms.defined()) norms.masked_fill_(counted_elsewhere_, 0);
  const int64_t rows = table_.row_count();
  at::Tensor mine = state_;
  RankResults findings;
  findings.stride = state_.numel();
  if (norms.defined()) {
    const at::Tensor bytes = norms.view(-1).view(at::kByte);
    // Each rank's part begins where a step state may.
    constexpr int64_t kAlign = alignof(StepState);
    const int64_t padding = (kAlign - bytes.numel() % kAlign) % kAlign;
    mine = at::cat({state_, bytes, state_.slice(0, 0, padding)});
    findings.stride = mine.numel();
    findings.norms = norms.data_ptr<float>();
    findings.values = norms.numel();
    findings.first_largest = largest.value_or(0) * rows;
    findings.end_largest = findings.first_largest + (largest ? rows : 0);
  }
  const at::Tensor everyone = gather_(mine);
  TORCH_CHECK_VALUE(everyone.numel() > 0 && everyone.numel() % findings.stride == 0,
                    "the ranks' parts have ", findings.stride, " bytes each, and together ",
                    everyone.numel());
  findings.everyone = reinterpret_cast<const char*>(
      pointer_to<uint8_t>(everyone, "what the ranks found", everyone.numel(), table_.device));
  findings.ranks = everyone.numel() / findings.stride;
  if (found) findings.state = state();
  const DeviceScope scope(table_.device);
  scope.backend().merge(findings, scope.stream());
}

void Inspector::share_row_norms(bool found, bool of_params) {
  if (!is_shared() || !(found || of_params)) return;
  if (found && counted_elsewhere_.defined()) {
    const at::Tensor counted = norms_[kGradNorm].masked_fill(counted_elsewhere_, 0);
    state_field("sum_squares").copy_(counted.to(at::kDouble).square_().sum());
  }
  const int64_t begin = found ? kGradNorm : kParamNorm;
  const int64_t end = of_params ? kKept : kParamNorm;
  const bool by_row = needs_row_norms();
  share(found, by_row ? norms_.slice(0, begin, end) : at::Tensor(),
        found ? std::optional<int64_t>(kGradLargest) : std::nullopt);
}

void Inspector::share_measures(float* norms) {
  const at::Tensor all = at::from_blob(norms, {kMeasures, table_.row_count()}, norms_.options());
  share(false, all, std::nullopt);
}

}  // namespace ampfuse
