#include "row.h"

#include "memory.h"

namespace ampfuse {

// Where a tensor counts its versions, to fetch it: a VariableVersion is a pointer to its counter.
static const void* counter_of(const at::Tensor& tensor) {
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  static_assert(sizeof version == sizeof(void*));
  return *reinterpret_cast<const void* const*>(&version);
}

void prefetch_row(const std::vector<Row>& rows, int64_t i) {
  const auto impl = [](const at::Tensor& tensor) {
    return reinterpret_cast<const char*>(tensor.unsafeGetTensorImpl());
  };
  constexpr int64_t kTensors = 12, kInside = 8, kGradient = 4;
  constexpr int64_t kLine = 64;
  if (i + kTensors < int64_t(rows.size())) {
    const Row& row = rows[i + kTensors];
    for (const at::Tensor* tensor : {&row.leaf(), &row.param, &row.states[0], &row.states[1]})
      __builtin_prefetch(impl(*tensor));
    __builtin_prefetch(impl(row.leaf()) + 2 * kLine);
  }
  if (i + kInside < int64_t(rows.size())) {
    const Row& row = rows[i + kInside];
    __builtin_prefetch(row.leaf().unsafeGetTensorImpl()->autograd_meta());
    for (const at::Tensor* tensor : {&row.leaf(), &row.param, &row.states[0], &row.states[1]}) {
      if (tensor->defined())
        __builtin_prefetch(tensor->unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    }
  }
  if (i + kGradient < int64_t(rows.size())) {
    const char* grad = impl(rows[i + kGradient].gradient());
    for (int line = 0; line < 4; ++line) __builtin_prefetch(grad + line * kLine);
  }
}

void prefetch_versions(const std::vector<Row>& rows, int64_t i) {
  constexpr int64_t kTensors = 12, kInside = 6;
  if (i + kTensors < int64_t(rows.size())) {
    const Row& row = rows[i + kTensors];
    for (const at::Tensor* tensor : {&row.param, &row.model})
      __builtin_prefetch(tensor->unsafeGetTensorImpl());
  }
  if (i + kInside < int64_t(rows.size())) {
    const Row& row = rows[i + kInside];
    __builtin_prefetch(row.leaf().unsafeGetTensorImpl()->autograd_meta());
    for (const at::Tensor* tensor : {&row.param, &row.model}) {
      if (tensor->defined()) __builtin_prefetch(counter_of(*tensor));
    }
  }
}

const at::Tensor& Row::checked(const at::Tensor& grad, at::Device device) {
  copied_grad.reset();  // which an earlier call may have left
  const char* what = "the gradient of ";
  TORCH_CHECK(grad.layout() == at::kStrided, what, name,
              " is sparse, and ampfuse takes dense gradients: build the layer with sparse=False.");
  TORCH_CHECK_TYPE(!grad.is_complex(), what, name,
                   " is complex; ampfuse steps real parameters. Use torch.view_as_real.");
  dtype_of(grad, what, name);
  TORCH_CHECK(grad.device() == device, what, name, " is on ", grad.device(), ", the parameter on ",
              device);
  TORCH_CHECK(!grad.key_set().has(c10::DispatchKey::Python), what, name,
              " is a tensor subclass without memory of its own (such as DTensor); ampfuse does not "
              "read it");
  TORCH_CHECK(grad.sizes() == param.sizes() && grad.numel() == numel, what, name, " has shape ",
              grad.sizes(), ", the parameter ", param.sizes(),
              " and when the "
              "optimizer was built ",
              numel, " elements");
  if (is_contiguous && grad.is_contiguous()) return grad;
  if (grad.strides() == param.strides()) return grad;
  copied_grad = empty_laid_out_as(param, grad.scalar_type());
  copied_grad.copy_(grad);
  return copied_grad;
}

}  // namespace ampfuse
