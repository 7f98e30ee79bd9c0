// Tensors that are float32 to autograd and hold half data: a model's outputs. See
// python/ampfuse/amp/float32_output.py, which sets these functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

namespace ampfuse {

struct HalfData {
  // The half data of such a tensor, without history; nothing if it has FP32 memory, and for any
  // other tensor.
  std::function<std::optional<at::Tensor>(const at::Tensor&)> of;
  // The float32 tensor that holds half data.
  std::function<at::Tensor(const at::Tensor&)> widened;
};

HalfData& half_data();
std::optional<at::Tensor> half_data_of(const at::Tensor& tensor);

}  // namespace ampfuse
