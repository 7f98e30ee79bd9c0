// torch's convolution and its backward pass on the CPU; in BF16, over few rows, as products of
// matrices.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <optional>
#include <tuple>

namespace ampfuse {

// As at::_convolution.
at::Tensor small_convolution(const at::Tensor& x, const at::Tensor& weight,
                             const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                             c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                             bool transposed, c10::SymIntArrayRef output_padding,
                             c10::SymInt groups, bool benchmark, bool deterministic,
                             bool cudnn_enabled, bool allow_tf32);

// As at::convolution_backward.
std::tuple<at::Tensor, at::Tensor, at::Tensor> small_convolution_backward(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
    at::OptionalSymIntArrayRef bias_sizes, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> output_mask);

}  // namespace ampfuse
