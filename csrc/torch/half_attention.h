// torch's flash attention on the CPU and its backward pass; in BF16, as products of large tiles.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <tuple>

namespace ampfuse {

// As at::_scaled_dot_product_flash_attention_for_cpu.
std::tuple<at::Tensor, at::Tensor> tiled_attention(const at::Tensor& query, const at::Tensor& key,
                                                   const at::Tensor& value, double dropout_p,
                                                   bool is_causal,
                                                   const std::optional<at::Tensor>& mask,
                                                   std::optional<double> scale);

// As at::_scaled_dot_product_flash_attention_for_cpu_backward.
std::tuple<at::Tensor, at::Tensor, at::Tensor> tiled_attention_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& out, const at::Tensor& logsumexp, double dropout_p, bool is_causal,
    const std::optional<at::Tensor>& mask, std::optional<double> scale);

}  // namespace ampfuse
