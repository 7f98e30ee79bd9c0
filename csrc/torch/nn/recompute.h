// Saved tensors of autograd, with outputs of batch_norm_act computed again.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <type_traits>
#include <utility>

namespace ampfuse {

// Hooks for saved tensors. The output of a batch_norm_act is not kept, unless it added a residual,
// which would be kept in its place.
class SavedTensor {
 public:
  explicit SavedTensor(const at::Tensor& tensor);
  // The tensor, or one with the same bits. Throws if it was changed since.
  at::Tensor unpack() const;

 private:
  // The node that returned it; shared or intrusive, by torch's version.
  std::decay_t<decltype(std::declval<const at::Tensor&>().grad_fn())> producer_;
  at::Tensor tensor_;
  int64_t version_ = 0;
};

}  // namespace ampfuse
