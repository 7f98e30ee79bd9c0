// One parameter with everything that belongs to it. A step calls these functions for every row, so
// they are inline.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "core/algorithms.h"
#include "core/table.h"
#include "torch_backend.h"

namespace ampfuse {

// The state of a row's gradient; gradient_ledger.h has what changes it.
enum class Grad : uint8_t {
  kUnscaled,  // leaf.grad is what autograd or the user left there, without a loss scale of ours
  kMirrored,  // leaf.grad and, in FP32, the master's are one tensor, unscaled
  kScaled,    // leaf.grad carries the ledger's scale; `accumulated` has what came before it
  kStashed,   // a pass runs: leaf.grad is of that pass alone, `accumulated` what came before it
  kConsumed,  // a step has used it, in a row with a master. The next pass drops it
  kConsumedScaled,  // the same, and it carries the scale
};

// Tells whether a gradient is still the tensor that we last saw, with the same contents. The weak
// reference keeps a freed gradient's successor from looking like it.
struct Contents {
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> impl;
  int64_t version = -1;
  void remember(const at::Tensor& grad) {
    if (!is_same_tensor(grad)) impl.emplace(grad.getIntrusivePtr());  // counting costs 10 ns
    version = version_of(grad);
  }
  void forget() { impl.reset(); }
  bool is_same_tensor(const at::Tensor& grad) const {
    return impl && grad.defined() && impl->_unsafe_get_target() == grad.unsafeGetTensorImpl();
  }
  // (An inference tensor counts no versions, so nobody knows.)
  bool is_unchanged(const at::Tensor& grad) const {
    return is_same_tensor(grad) && !grad.is_inference() && version == version_of(grad);
  }
};

// What a row has if its leaf is the local shard of a DTensor.
struct Shard {
  // The local tensor of the gradient, from collect() to the end of the step; nobody sets .grad in
  // between. (Owning it would count references of Python objects, twice for each row.)
  const at::Tensor* borrowed = nullptr;
  at::Tensor whole;  // the DTensor; undefined if there is none
  pybind11::object whole_object, gradient_spec;
  int64_t origin = 0;               // where the shard begins among the elements of the whole
  const void* localized = nullptr;  // the gradient's local shard, as LocalGradients found it
};

struct Row {
  // The `param` of a split master is the remainder, int16. Scales belong to quantized states.
  at::Tensor param, model;
  Shard shard;
  at::Tensor states[kMaxStates], scales[kMaxStates], average;
  Algorithm algorithm;
  const StorageInfo* storage = &storages().front();
  at::Tensor accumulated;
  at::Tensor copied_grad;  // the gradient in the parameter's layout, if it has another
  std::vector<at::Tensor> hyper_tensors;  // their values are what the hyper-parameters point to
  std::string name;
  int64_t numel = 0;  // of the parameter when the row was made
  // The model weight when the master last matched it.
  int64_t model_version = 0;
  const void* model_data = nullptr;
  // Where leaf, param, average, states and scales were: ParamTable::follow_storage().
  static constexpr size_t kTrackedPointers = 3 + 2 * kMaxStates;
  std::array<const void*, kTrackedPointers> memory = {};
  bool has_states = false;
  bool has_grad = false;  // the current pass reads one
  Grad grad_state = Grad::kUnscaled;
  bool is_contiguous = false;
  bool is_split = false;
  bool is_layerwise = false;      // stepped as in LARC
  bool rounds_at_random = false;  // the parameter, in BF16
  bool writes_unscaled = false;   // the update of this step writes the gradient back, unscaled
  Contents inspected;
  int64_t taken_version = 0;  // of a gradient in kScaled, as its pass ended

  bool carries_scale() const {
    return grad_state == Grad::kScaled || grad_state == Grad::kConsumedScaled;
  }
  bool is_used() const {
    return grad_state == Grad::kConsumed || grad_state == Grad::kConsumedScaled;
  }
  // Whether the model weight was edited since the master last matched it. A split master follows by
  // itself.
  bool was_edited() const {
    return model.defined() && !is_split &&
           (version_of(model) != model_version || model.data_ptr() != model_data);
  }
  void match_model() {
    if (!model.defined()) return;
    model_version = version_of(model);
    model_data = model.data_ptr();
  }
  void mark_stepped() {
    // Autograd may have saved these; states have no graph.
    bump_version(param);
    bump_version(average);
    if (!model.defined()) return;
    bump_version(model);
    model_version = version_of(model);
  }
  const at::Tensor& leaf() const { return model.defined() ? model : param; }
  // The gradient that a step reads.
  const at::Tensor& gradient() const {
    return shard.borrowed ? *shard.borrowed : leaf().mutable_grad();
  }
  // Sets the gradient of a whole parameter; a DTensor's is wrapped in a DTensor.
  void set_gradient(const at::Tensor& gradient);
  // `grad`, or a copy in the parameter's layout, which `copied_grad` keeps. Throws an error that
  // names the row if no kernel on `device` can read it.
  const at::Tensor& checked(const at::Tensor& grad, at::Device device);
};

// A row's tensors are a dozen cache lines after three pointers in a row. Fetching them some rows
// ahead of row i, a pointer further each time, halves the time of a scan over thousands of rows.
// One function is for scans of all tensors, the other for scans of versions and gradients.
void prefetch_row(const std::vector<Row>& rows, int64_t i);
void prefetch_versions(const std::vector<Row>& rows, int64_t i);

}  // namespace ampfuse
