// layer_norm and rms_norm as operators of torch, with the residual addition before them.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "nn_pass.h"

namespace ampfuse {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What all passes take of rows like those of s, and of weights like `affine`.
NnArgs args_of(const Tensor& s, const Tensor& mean, const Tensor& rstd, int64_t columns) {
  NnArgs args;
  args.image = {rstd.numel(), columns, dtype_of(s, "x")};
  const auto pointer = [&](const Tensor& tensor, const char* what) {
    return pointer_to<float>(tensor, what, args.image.rows, s.device());
  };
  if (mean.numel() != 0) args.vectors[Norm::kMean] = pointer(mean, "mean");
  args.vectors[Norm::kRstd] = pointer(rstd, "rstd");
  return args;
}

void* image(const Tensor& tensor, const Tensor& like, const char* name) {
  TORCH_CHECK_VALUE(
      tensor.is_contiguous() && tensor.sizes() == like.sizes() &&
          tensor.scalar_type() == like.scalar_type() && tensor.device() == like.device(),
      name, " has to be contiguous and ", like.scalar_type(), " of shape ", like.sizes(), " on ",
      like.device(), "; it is ", tensor.scalar_type(), " of shape ", tensor.sizes(),
      " with strides ", tensor.strides(), " on ", tensor.device());
  return const_cast<void*>(tensor.const_data_ptr());
}

void* of_columns(const Tensor& tensor, int64_t columns, const char* name) {
  TORCH_CHECK_VALUE(tensor.is_contiguous() && tensor.numel() == columns, name,
                    " has to hold a contiguous value for each of ", columns,
                    " columns; it has shape ", tensor.sizes());
  return const_cast<void*>(tensor.const_data_ptr());
}

template <class Op>
void run(const Tensor& like, const NnArgs& args) {
  const DeviceScope scope(like.device());
  scope.backend().run(nn_op<Op>(), args, scope.stream());
}

// y, x + residual (empty without one), and what the backward pass needs of each row.
std::tuple<Tensor, Tensor, Tensor, Tensor> forward_pass(const Tensor& x,
                                                        const OptionalTensor& residual,
                                                        const OptionalTensor& weight,
                                                        const OptionalTensor& bias, int64_t columns,
                                                        double eps, bool centered) {
  const auto rows = x.sym_numel() / columns;
  const auto vector = [&](bool there) {
    return at::empty_symint({there ? rows : c10::SymInt(0)}, x.options().dtype(at::kFloat));
  };
  const Tensor y = at::empty_like(x), mean = vector(centered), rstd = vector(true);
  const Tensor sum = given(residual) ? at::empty_like(x) : nothing(x, x.scalar_type());
  if (x.is_meta()) return {y, sum, mean, rstd};
  NnArgs args = args_of(x, mean, rstd, columns);
  args.images[LayerNorm::kX] = image(x, x, "x");
  args.images[LayerNorm::kY] = image(y, x, "y");
  if (given(residual)) {
    args.images[LayerNorm::kResidual] = image(*residual, x, "residual");
    args.images[LayerNorm::kSum] = image(sum, x, "sum");
  }
  if (given(weight)) {
    args.affine.dtype = dtype_of(*weight, "weight");
    args.affine.weight = of_columns(*weight, columns, "weight");
  }
  if (given(bias)) args.affine.bias = of_columns(*bias, columns, "bias");
  args.numbers[LayerNorm::kEps] = float(eps);
  centered ? run<LayerNorm>(x, args) : run<RmsNorm>(x, args);
  return {y, sum, mean, rstd};
}

// The gradients of x, which is the residual's, too, weight and bias: empty unless they are wanted.
std::tuple<Tensor, Tensor, Tensor> backward_pass(const Tensor& dy, const OptionalTensor& ds,
                                                 const Tensor& s, const Tensor& mean,
                                                 const Tensor& rstd, const OptionalTensor& weight,
                                                 int64_t columns, std::array<bool, 3> wanted) {
  const Tensor dx = wanted[0] ? at::empty_like(s) : nothing(s, s.scalar_type());
  const auto of_weight = [&](bool is_wanted) {
    return is_wanted && given(weight) ? at::empty_like(*weight) : nothing(s, s.scalar_type());
  };
  const Tensor dweight = of_weight(wanted[1]), dbias = of_weight(wanted[2]);
  if (s.is_meta()) return {dx, dweight, dbias};
  NnArgs args = args_of(s, mean, rstd, columns);
  if (given(weight)) args.affine.dtype = dtype_of(*weight, "weight");
  args.images[NormBackward::kDy] = image(dy, s, "dy");
  args.images[NormBackward::kS] = image(s, s, "x");
  if (wanted[0]) {
    NnArgs rows = args;
    if (given(weight)) rows.affine.weight = of_columns(*weight, columns, "weight");
    if (given(ds)) rows.images[NormBackward::kDs] = image(*ds, s, "the sum's gradient");
    rows.images[NormBackward::kDx] = image(dx, s, "dx");
    run<NormBackward>(s, rows);
  }
  if (dweight.numel() + dbias.numel() == 0) return {dx, dweight, dbias};
  if (dweight.numel() != 0) args.affine.weight = dweight.data_ptr();
  if (dbias.numel() != 0) args.affine.bias = dbias.data_ptr();
  const int64_t bytes = columns * args.image.spans() * int64_t(sizeof(NormWeights::Partial));
  const Tensor partials = at::empty({bytes}, s.options().dtype(at::kByte));
  args.partials = partials.data_ptr();
  run<NormWeights>(s, args);
  return {dx, dweight, dbias};
}

// By torch's operations, statistics in FP32.
Tensor norm_by_torch(const Tensor& s, at::IntArrayRef shape, const OptionalTensor& weight,
                     const OptionalTensor& bias, double eps, bool centered) {
  const auto type = at::isReducedFloatingType(s.scalar_type()) ? at::kFloat : s.scalar_type();
  const auto cast = [&](const OptionalTensor& t) {
    return given(t) ? OptionalTensor(t->to(type)) : std::nullopt;
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
    auto [y, sum, mean, rstd] = Call<forward_pass>::of(AMPFUSE_OP("norm_forward"), x, residual,
                                                       weight, bias, columns, eps, centered);
    const Tensor& s = given(residual) ? sum : x;
    context->save_for_backward({s, mean, rstd, weight.value_or(Tensor()), bias.value_or(Tensor())});
    context->saved_data["shape"] = shape.vec();
    context->saved_data["eps"] = eps;
    context->saved_data["centered"] = centered;
    context->set_materialize_grads(false);
    if (given(residual)) return {y, sum};
    return {y};
  }
  enum { kX, kResidual, kWeight, kBias, kArguments = 7 };

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &s = saved[0], &mean = saved[1], &rstd = saved[2];
    const OptionalTensor weight = optional(saved[3]), bias = optional(saved[4]);
    const Tensor &dy = gradients[0], ds = gradients.size() > 1 ? gradients[1] : Tensor();
    const bool has_residual = gradients.size() > 1;
    // (Edges are those of the tensors that were given.)
    size_t edge = 0;
    const auto wants = [&](bool is_given) { return is_given && context->needs_input_grad(edge++); };
    const bool to_x = wants(true), to_residual = wants(has_residual);
    const bool to_weight = wants(given(weight)), to_bias = wants(given(bias));
    variable_list result(kArguments);
    Tensor dx = ds;
    if (dy.defined() && at::GradMode::is_enabled()) {
      dx = differentiable(*context, dy, ds, s, weight, bias, result);
    } else if (dy.defined()) {
      const auto shape = context->saved_data["shape"].toIntVector();
      const OptionalTensor added = ds.defined() ? OptionalTensor(ds.contiguous()) : std::nullopt;
      std::tie(dx, result[kWeight], result[kBias]) = Call<backward_pass>::of(
          AMPFUSE_OP("norm_backward"), dy.contiguous(), added, s, mean, rstd, weight,
          c10::multiply_integers(shape), {to_x || to_residual, to_weight, to_bias});
      if (!to_weight) result[kWeight] = Tensor();
      if (!to_bias) result[kBias] = Tensor();
    }
    result[kX] = to_x ? dx : Tensor();
    result[kResidual] = to_residual ? dx : Tensor();
    return result;
  }

 private:
  // create_graph: what torch differentiates once more.
  static Tensor differentiable(AutogradContext& context, const Tensor& dy, const Tensor& ds,
                               const Tensor& s, const OptionalTensor& weight,
                               const OptionalTensor& bias, variable_list& result) {
    variable_list inputs;
    std::vector<int> places;
    // (Views: gradients end there, where those of a sum would go on through this very node.)
    const auto ask = [&](const OptionalTensor& tensor, int place) -> OptionalTensor {
      if (!given(tensor) || !tensor->requires_grad()) return tensor;
      inputs.push_back(tensor->view_as(*tensor));
      places.push_back(place);
      return inputs.back();
    };
    const Tensor rows = *ask(s, kX);
    const OptionalTensor scale = ask(weight, kWeight), shift = ask(bias, kBias);
    const Tensor y = norm_by_torch(rows, context.saved_data["shape"].toIntVector(), scale, shift,
                                   context.saved_data["eps"].toDouble(),
                                   context.saved_data["centered"].toBool());
    const variable_list found = torch::autograd::grad({y}, inputs, {dy}, true, true);
    for (size_t i = 0; i < places.size(); ++i) result[places[i]] = found[i];
    return ds.defined() && result[kX].defined() ? result[kX] + ds : result[kX];
  }
};

// Whether the kernels take it: everything else is torch's.
bool has_kernels(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                 const OptionalTensor& bias, at::IntArrayRef shape) {
  const at::ScalarType type = x.scalar_type();
  if (type != at::kFloat && type != at::kHalf && type != at::kBFloat16) return false;
  if (!(x.is_cpu() || x.is_cuda() || x.is_meta()) || x.sym_numel() == 0) return false;
  if (given(residual) && (residual->scalar_type() != type || residual->device() != x.device() ||
                          residual->sym_sizes() != x.sym_sizes()))
    return false;
  if (given(bias) && (!given(weight) || bias->scalar_type() != weight->scalar_type())) return false;
  for (const OptionalTensor& tensor : {weight, bias}) {
    if (given(tensor) &&
        ((tensor->scalar_type() != at::kFloat && tensor->scalar_type() != type) ||
         tensor->device() != x.device() || tensor->sizes() != shape || !tensor->is_contiguous()))
      return false;
  }
  const auto sizes = x.sym_sizes();
  if (shape.empty() || sizes.size() < shape.size()) return false;
  for (size_t i = 0; i < shape.size(); ++i)
    if (sizes[sizes.size() - shape.size() + i] != shape[i]) return false;
  return true;
}

variable_list norm(const Tensor& x, const OptionalTensor& residual, at::IntArrayRef shape,
                   const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                   bool centered) {
  if (has_kernels(x, residual, weight, bias, shape)) {
    const OptionalTensor added =
        given(residual) ? OptionalTensor(residual->contiguous()) : std::nullopt;
    return NormFunction::apply(x.contiguous(), added, weight, bias, shape, eps, centered);
  }
  if (!given(residual)) return {norm_by_torch(x, shape, weight, bias, eps, centered)};
  const Tensor sum = x + *residual;
  return {norm_by_torch(sum, shape, weight, bias, eps, centered), sum};
}

AMPFUSE_LIBRARY_FRAGMENT(AMPFUSE_NAMESPACE, library) {
  library.def(
      "norm(Tensor x, Tensor? residual, int[] shape, Tensor? weight, Tensor? bias, float eps, "
      "bool centered) -> Tensor[]",
      norm);
  library.def(
      "norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int columns, "
      "float eps, bool centered) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "norm_backward(Tensor dy, Tensor? ds, Tensor s, Tensor mean, Tensor rstd, Tensor? weight, "
      "int columns, bool[3] wanted) -> (Tensor, Tensor, Tensor)");
}

void add_kernels(torch::Library& library) {
  library.impl("norm_forward", forward_pass);
  library.impl("norm_backward", backward_pass);
}
AMPFUSE_KERNELS(AMPFUSE_NAMESPACE, CPU, library) { add_kernels(library); }
AMPFUSE_KERNELS(AMPFUSE_NAMESPACE, CUDA, library) { add_kernels(library); }
AMPFUSE_KERNELS(AMPFUSE_NAMESPACE, Meta, library) { add_kernels(library); }

}  // namespace
}  // namespace ampfuse
