// The multi-tensor ops for users: lists of tensors in, one call to a backend.
#pragma once

#include <torch/extension.h>

#include <optional>
#include <tuple>
#include <vector>

namespace ampfuse {

using TensorList = std::vector<torch::Tensor>;

void scale(const TensorList& src, const TensorList& dst, double factor,
           const std::optional<torch::Tensor>& found_inf);
void axpby(const TensorList& x, const TensorList& y, const TensorList& out, double a, double b,
           const std::optional<torch::Tensor>& found_inf, int64_t check);
void copy(const TensorList& src, const TensorList& dst);
void unscale(const TensorList& grads, const TensorList& out, const torch::Tensor& inv_scale,
             const std::optional<torch::Tensor>& found_inf);
std::tuple<torch::Tensor, torch::Tensor> l2norm(const TensorList& tensors, bool per_tensor);

// LARC's rescaling in place: grads = ratio * (grads + weight_decay * params), per tensor.
void layerwise(const TensorList& grads, const TensorList& params, double lr,
               const std::optional<torch::Tensor>& lr_tensor, double weight_decay,
               double trust_coefficient, double eps, bool clip);

// The loss-scale rule over the OR of `found_infs`; see step_state.h. A static scale passes dynamic
// = false.
void update_scale(const torch::Tensor& scale, const torch::Tensor& growth_tracker,
                  const torch::Tensor& hysteresis_tracker, const TensorList& found_infs,
                  double growth_factor, double backoff_factor, int64_t growth_interval,
                  double min_scale, double max_scale, int64_t hysteresis, bool share, bool dynamic);

}  // namespace ampfuse
