// layer_norm and rms_norm as operators of torch, with the residual addition before them.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>

#include "nn_pass.h"

namespace ampfuse {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// y, x + residual (empty without one), and what the backward pass needs of each row.
std::tuple<Tensor, Tensor, Tensor, Tensor> forward_pass(const Tensor& x,
                                                        const OptionalTensor& residual,
                                                        const OptionalTensor& weight,
                                                        const OptionalTensor& bias, int64_t columns,
                                                        double eps, bool centered) {
  TORCH_CHECK_VALUE(columns > 0, "a norm over ", columns, " columns");
  const c10::SymInt rows = x.sym_numel() / columns;
  const Tensor y = at::empty_like(x), rstd = empty_floats(x, rows);
  const Tensor mean = empty_floats(x, centered ? rows : c10::SymInt(0));
  const Tensor sum = is_given(residual) ? at::empty_like(x) : empty_placeholder(x, x.scalar_type());
  if (x.is_meta()) return {y, sum, mean, rstd};
  PassArgs args(x, columns);
  if (is_given(residual)) args.image(LayerNorm::kSum, sum, "sum");
  if (centered) args.row_vector(Norm::kMean, mean, "mean");
  args.image(LayerNorm::kX, x, "x")
      .image(LayerNorm::kResidual, residual, "residual")
      .image(LayerNorm::kY, y, "y")
      .row_vector(Norm::kRstd, rstd, "rstd")
      .affine(weight, bias)
      .number(LayerNorm::kEps, eps);
  centered ? args.run<LayerNorm>() : args.run<RmsNorm>();
  return {y, sum, mean, rstd};
}

// Returns the gradients of weight and bias, empty unless they are wanted. Writes to dx, which may
// be dy, the gradient of x, which is also the residual's.
std::tuple<Tensor, Tensor> backward_into(const Tensor& dy, const OptionalTensor& ds,
                                         const Tensor& s, const Tensor& mean, const Tensor& rstd,
                                         const OptionalTensor& weight, int64_t columns,
                                         std::array<bool, 3> wanted, const Tensor& dx) {
  const auto of_weight = [&](bool is_wanted) {
    return is_wanted && is_given(weight) ? at::empty_like(*weight)
                                         : empty_placeholder(s, s.scalar_type());
  };
  const Tensor dweight = of_weight(wanted[1]), dbias = of_weight(wanted[2]);
  if (s.is_meta()) return {dweight, dbias};
  const auto pass = [&] {
    PassArgs args(s, columns);
    if (mean.numel() != 0) args.row_vector(Norm::kMean, mean, "mean");  // none of an RMS norm
    args.image(NormBackward::kDy, dy, "dy")
        .image(NormBackward::kS, s, "s")
        .row_vector(Norm::kRstd, rstd, "rstd");
    return args;
  };
  if (dweight.numel() + dbias.numel() != 0) pass().affine(dweight, dbias).run<NormWeights>();
  if (wanted[0]) {
    pass()
        .image(NormBackward::kDs, ds, "the sum's gradient")
        .image(NormBackward::kDx, dx, "dx")
        .affine(weight, std::nullopt)
        .run<NormBackward>();
  }
  return {dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor> backward_pass(const Tensor& dy, const OptionalTensor& ds,
                                                 const Tensor& s, const Tensor& mean,
                                                 const Tensor& rstd, const OptionalTensor& weight,
                                                 int64_t columns, std::array<bool, 3> wanted) {
  const Tensor dx = wanted[0] ? at::empty_like(s) : empty_placeholder(s, s.scalar_type());
  return std::tuple_cat(std::tuple(dx),
                        backward_into(dy, ds, s, mean, rstd, weight, columns, wanted, dx));
}

// Computed by torch's operations, statistics in FP32.
Tensor norm_by_torch(const Tensor& s, at::IntArrayRef shape, const OptionalTensor& weight,
                     const OptionalTensor& bias, double eps, bool centered) {
  const at::ScalarType type = compute_type(s);
  const auto cast = [&](const OptionalTensor& t) {
    return is_given(t) ? OptionalTensor(t->to(type)) : std::nullopt;
  };
  const Tensor y = centered ? at::layer_norm(s.to(type), shape, cast(weight), cast(bias), eps)
                            : at::rms_norm(s.to(type), shape, cast(weight), eps);
  return y.to(s.scalar_type());
}

struct NormFunction : torch::autograd::Function<NormFunction> {
  // y, and x + residual where there is one.
  static variable_list forward(AutogradContext* context, const Tensor& x,
                               const OptionalTensor& residual, const OptionalTensor& weight,
                               const OptionalTensor& bias, at::IntArrayRef shape, double eps,
                               bool centered) {
    const int64_t columns = c10::multiply_integers(shape);
    auto [y, sum, mean, rstd] =
        Call<forward_pass>::of(x, residual, weight, bias, columns, eps, centered);
    const Tensor& s = is_given(residual) ? sum : x;
    context->save_for_backward({s, mean, rstd, weight.value_or(Tensor()), bias.value_or(Tensor())});
    context->saved_data["shape"] = shape.vec();
    context->saved_data["eps"] = eps;
    context->saved_data["centered"] = centered;
    context->set_materialize_grads(false);
    if (is_given(residual)) return {y, sum};
    return {y};
  }
  // Of forward()'s arguments, those that have gradients, and their count; what it saves.
  enum { kX, kResidual, kWeight, kBias, kArguments = 7 };
  enum { kSavedS, kSavedMean, kSavedRstd, kSavedWeight, kSavedBias };

  static variable_list backward(AutogradContext* context, variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &s = saved[kSavedS], &mean = saved[kSavedMean], &rstd = saved[kSavedRstd];
    const OptionalTensor weight = optional(saved[kSavedWeight]);
    const OptionalTensor bias = optional(saved[kSavedBias]);
    const bool has_residual = gradients.size() > 1;
    Tensor dy = std::move(gradients[0]);
    const Tensor ds = has_residual ? gradients[1] : Tensor();
    // (Edges are those of the tensors that were given.)
    size_t edge = 0;
    const auto wants = [&](bool is_given) { return is_given && context->needs_input_grad(edge++); };
    const bool to_x = wants(true), to_residual = wants(has_residual);
    const bool to_weight = wants(is_given(weight)), to_bias = wants(is_given(bias));
    variable_list result(kArguments);
    Tensor dx = ds;
    if (dy.defined() && at::GradMode::is_enabled()) {
      const auto compute = [&](const std::vector<OptionalTensor>& inputs) {
        return norm_by_torch(*inputs[0], context->saved_data["shape"].toIntVector(), inputs[1],
                             inputs[2], context->saved_data["eps"].toDouble(),
                             context->saved_data["centered"].toBool());
      };
      const variable_list found = differentiable_gradients({s, weight, bias}, dy, compute);
      if (found[0].defined()) dx = ds.defined() ? found[0] + ds : found[0];
      result[kWeight] = found[1], result[kBias] = found[2];
    } else if (dy.defined()) {
      const int64_t columns = c10::multiply_integers(context->saved_data["shape"].toIntVector());
      const OptionalTensor added = contiguous(ds);
      const std::array<bool, 3> wanted = {to_x || to_residual, to_weight, to_bias};
      dy = dy.contiguous();
      if (may_overwrite_gradient(dy)) {
        std::tie(result[kWeight], result[kBias]) =
            backward_into(dy, added, s, mean, rstd, weight, columns, wanted, dy);
        dx = dy;
      } else {
        std::tie(dx, result[kWeight], result[kBias]) =
            Call<backward_pass>::of(dy, added, s, mean, rstd, weight, columns, wanted);
      }
      if (!to_weight) result[kWeight] = Tensor();
      if (!to_bias) result[kBias] = Tensor();
    }
    result[kX] = to_x ? dx : Tensor();
    result[kResidual] = to_residual ? dx : Tensor();
    return result;
  }
};

// Whether the kernels support it: torch computes everything else.
bool has_kernels(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                 const OptionalTensor& bias, at::IntArrayRef shape) {
  if (!is_supported(x) || (is_given(residual) && !match_in_type_and_shape(*residual, x)))
    return false;
  if (is_given(bias) && (!is_given(weight) || bias->scalar_type() != weight->scalar_type()))
    return false;
  if (!fits_as_affine(weight, x, shape) || !fits_as_affine(bias, x, shape)) return false;
  const auto sizes = x.sym_sizes();
  if (shape.empty() || sizes.size() < shape.size()) return false;
  for (size_t i = 0; i < shape.size(); ++i)
    if (sizes[sizes.size() - shape.size() + i] != shape[i]) return false;
  return true;
}

variable_list norm(const Tensor& x, const OptionalTensor& residual, at::IntArrayRef shape,
                   const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                   bool centered) {
  TORCH_CHECK_VALUE(centered || !is_given(bias), "an RMS norm has no bias");
  if (has_kernels(x, residual, weight, bias, shape)) {
    return NormFunction::apply(x.contiguous(), contiguous(residual), weight, bias, shape, eps,
                               centered);
  }
  if (!is_given(residual)) return {norm_by_torch(x, shape, weight, bias, eps, centered)};
  const Tensor sum = x + *residual;
  return {norm_by_torch(sum, shape, weight, bias, eps, centered), sum};
}

AMPFUSE_LIBRARY_FRAGMENT(AMPFUSE_NAMESPACE, library) {
  library.def(
      "norm(Tensor x, Tensor? residual, int[] shape, Tensor? weight, Tensor? bias, float eps, "
      "bool centered) -> Tensor[]",
      norm);
  define<forward_pass>(
      library,
      "norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int columns, "
      "float eps, bool centered) -> (Tensor, Tensor, Tensor, Tensor)");
  define<backward_pass>(
      library,
      "norm_backward(Tensor dy, Tensor? ds, Tensor s, Tensor mean, Tensor rstd, Tensor? weight, "
      "int columns, bool[3] wanted) -> (Tensor, Tensor, Tensor)");
}

}  // namespace
}  // namespace ampfuse
