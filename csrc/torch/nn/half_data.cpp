// ampfuse::float32, the cast of a model's half output to float32. The result keeps the half memory
// and is float32 to everything above kernels (see ampfuse/amp/float32_output.py); its gradient
// stays half where it can.
#include "half_data.h"

#include <ATen/ops/_to_copy.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "nn_pass.h"

namespace ampfuse {

HalfData& half_data() {
  static HalfData* const data = new HalfData;  // Python's functions, which its end would outlive
  return *data;
}

std::optional<at::Tensor> half_data_of(const at::Tensor& tensor) {
  if (!tensor.key_set().has(c10::DispatchKey::Python) || !half_data().of) return std::nullopt;
  return half_data().of(tensor);
}

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Float32Function : torch::autograd::Function<Float32Function> {
  static Tensor forward(AutogradContext* context, const Tensor& input) {
    const OptionalTensor half = half_data_of(input);
    const Tensor data = half.value_or(input);
    context->saved_data["half"] = half.has_value();
    context->saved_data["type"] = int64_t(data.scalar_type());
    if (data.scalar_type() == at::kFloat || data.key_set().has_any(kFunctorch) ||
        (!half && is_of_a_leaf(input)))
      return at::_to_copy(data, at::kFloat);
    const bool is_dense = data.unsafeGetTensorImpl()->is_non_overlapping_and_dense_or_false();
    return half_data().widened(is_dense ? data.detach() : data.clone());
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const bool creates_graph = at::GradMode::is_enabled();
    // While a graph is traced the input may have half data, and be float32 to autograd.
    const bool is_half = context->saved_data["half"].toBool();
    if (is_half && creates_graph) return gradients;
    const auto type = at::ScalarType(context->saved_data["type"].toInt());
    OptionalTensor half;
    if (!creates_graph) half = half_data_of(gradients[0]);
    if (!half || half->scalar_type() != type) half = gradients[0].to(type);
    return {is_half ? half_data().widened(*half) : *half};
  }

 private:
  static constexpr c10::DispatchKeySet kFunctorch{c10::DispatchKey::FuncTorchBatched,
                                                  c10::DispatchKey::FuncTorchGradWrapper};

  // A parameter, or a view of one: a step will change it.
  static bool is_of_a_leaf(const Tensor& input) {
    return input.is_leaf() || (input.is_view() && input._base().is_leaf());
  }
};

Tensor float32(const Tensor& input) { return Float32Function::apply(input); }

AMPFUSE_LIBRARY_FRAGMENT(AMPFUSE_NAMESPACE, library) {
  library.def("float32(Tensor input) -> Tensor", float32);
}

}  // namespace
}  // namespace ampfuse
