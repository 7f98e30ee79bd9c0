// float32 of a tensor that holds half data, where a graph is traced: a cast there, and back.
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
    return at::_to_copy(data, at::kFloat);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    if (!context->saved_data["half"].toBool() || at::GradMode::is_enabled()) return gradients;
    const auto type = at::ScalarType(context->saved_data["type"].toInt());
    return {half_data().widened(gradients[0].to(type))};
  }
};

Tensor float32(const Tensor& input) { return Float32Function::apply(input); }

AMPFUSE_LIBRARY_FRAGMENT(AMPFUSE_NAMESPACE, library) {
  library.def("float32(Tensor input) -> Tensor", float32);
}

}  // namespace
}  // namespace ampfuse
