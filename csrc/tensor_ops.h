// The multi-tensor ops for users: lists of tensors in, one call to a backend.
#pragma once

#include <torch/extension.h>

#include <map>
#include <optional>
#include <string>
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
std::tuple<torch::Tensor, torch::Tensor> l2norm(const TensorList& tensors, bool per_tensor,
                                                const std::optional<torch::Tensor>& inv_scale,
                                                const std::optional<torch::Tensor>& found_inf);

// One step of an algorithm on lists. `steps` [n] counts the steps before this one and is advanced;
// `lr_tensor` [1] or [n] replaces lr; gradients are divided by `loss_scale`, and nothing happens
// where `found_inf` is set. `norm_averages` [n] is NovoGrad's, `updates` receives lamb_update's.
void step(const std::string& algorithm, const TensorList& grads, const TensorList& params,
          const TensorList& models, const std::vector<TensorList>& states,
          const TensorList& updates, const torch::Tensor& steps,
          const std::optional<torch::Tensor>& norm_averages,
          const std::optional<torch::Tensor>& lr_tensor,
          const std::map<std::string, double>& values,
          const std::optional<torch::Tensor>& loss_scale,
          const std::optional<torch::Tensor>& found_inf);

// LARC's rescaling in place: grads = ratio * (grads + weight_decay * params), per tensor.
void layerwise(const TensorList& grads, const TensorList& params, double lr,
               const std::optional<torch::Tensor>& lr_tensor, double weight_decay,
               double trust_coefficient, double eps, bool clip);

// The loss-scale rule over the OR of `found_infs`; see step_state.h. A static scale passes dynamic
// = false.
void update_scale(const torch::Tensor& scale, const torch::Tensor& growth_tracker,
                  const torch::Tensor& hysteresis_tracker, const TensorList& found_infs,
                  double growth_factor, double backoff_factor, int64_t growth_interval,
                  double min_scale, double max_scale, int64_t hysteresis, const TensorList& shared,
                  bool dynamic);

}  // namespace ampfuse
