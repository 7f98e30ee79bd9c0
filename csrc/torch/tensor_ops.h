// Operations on lists of tensors, one call to a backend each; bind_tensor_ops.cpp documents them.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace ampfuse {

using TensorList = std::vector<at::Tensor>;

void scale(const TensorList& src, const TensorList& dst, double factor,
           const std::optional<at::Tensor>& found_inf);
void axpby(const TensorList& x, const TensorList& y, const TensorList& out, double a, double b,
           const std::optional<at::Tensor>& found_inf, int64_t check);
void unscale(const TensorList& grads, const TensorList& out, const at::Tensor& inv_scale,
             const std::optional<at::Tensor>& found_inf);
std::tuple<at::Tensor, at::Tensor> l2norm(const TensorList& tensors, bool per_tensor,
                                          const std::optional<at::Tensor>& inv_scale,
                                          const std::optional<at::Tensor>& found_inf);

void step(const std::string& algorithm, const TensorList& grads, const TensorList& params,
          const TensorList& models, const std::vector<TensorList>& states,
          const TensorList& updates, const at::Tensor& steps,
          const std::optional<at::Tensor>& norm_averages,
          const std::optional<at::Tensor>& lr_tensor, const std::map<std::string, double>& values,
          const std::optional<at::Tensor>& loss_scale, const std::optional<at::Tensor>& found_inf);

// Conversions between FP32 values and encoded storage; see core/quantized.h. All tensors have the
// same layout, with one scale for each kScaleBlock elements.
void join_master(const at::Tensor& model, const at::Tensor& remainder, const at::Tensor& out);
void split_master(const at::Tensor& master, const at::Tensor& model, const at::Tensor& remainder);
void decode_state(const std::string& algorithm, int64_t state, const std::string& storage,
                  const TensorList& lists, const at::Tensor& out);
void encode_state(const std::string& algorithm, int64_t state, const at::Tensor& value,
                  const std::string& storage, const TensorList& lists);

void update_scale(const at::Tensor& scale, const at::Tensor& growth_tracker,
                  const at::Tensor& hysteresis_tracker, const TensorList& found_infs,
                  double growth_factor, double backoff_factor, int64_t growth_interval,
                  double min_scale, double max_scale, int64_t hysteresis, const TensorList& shared,
                  bool dynamic);

}  // namespace ampfuse
