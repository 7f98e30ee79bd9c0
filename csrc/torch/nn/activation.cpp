// Activations after a bias, and gated ones, as an operator of torch.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "nn_pass.h"

namespace ampfuse {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// run(Curve) of the one with this name.
template <class Run>
void with_curve(c10::string_view name, const Run& run) {
  if (name == Gelu::kName) return run(Gelu());
  if (name == GeluTanh::kName) return run(GeluTanh());
  TORCH_CHECK_VALUE(name == Silu::kName, "activation is \"", name, "\"; it must be \"", Gelu::kName,
                    "\", \"", GeluTanh::kName, "\" or \"", Silu::kName, "\"");
  run(Silu());
}

Tensor activation_pass(const Tensor& x, const OptionalTensor& up, const OptionalTensor& bias,
                       c10::string_view name) {
  const Tensor y = at::empty_like(x);
  if (x.is_meta()) return y;
  with_curve(name, [&](auto curve) {
    using Op = ActivationForward<decltype(curve)>;
    PassArgs(x, x.size(-1))
        .image(Op::kX, x, "x")
        .image(Op::kUp, up, "up")
        .image(Op::kY, y, "y")
        .affine(std::nullopt, bias)
        .template run<Op>();
  });
  return y;
}

// To dx, which may be dy: also the gradients of up, empty if there is none, and of the bias, FP32.
std::tuple<Tensor, Tensor> backward_into(const Tensor& dy, const Tensor& x,
                                         const OptionalTensor& up, const OptionalTensor& bias,
                                         c10::string_view name, const Tensor& dx) {
  const Tensor dup = is_given(up) ? at::empty_like(x) : empty_placeholder(x, x.scalar_type());
  const Tensor dbias = empty_floats(x, is_given(bias) ? x.sym_size(-1) : c10::SymInt(0));
  if (x.is_meta()) return {dup, dbias};
  with_curve(name, [&](auto curve) {
    using Op = ActivationBackward<decltype(curve)>;
    PassArgs args(x, x.size(-1));
    if (is_given(up)) args.image(Op::kDup, dup, "dup");
    if (is_given(bias)) args.vector(Op::kDbias, dbias, "dbias");
    args.image(Op::kX, x, "x")
        .image(Op::kDy, dy, "dy")
        .image(Op::kUp, up, "up")
        .image(Op::kDx, dx, "dx")
        .affine(std::nullopt, bias)
        .template run<Op>();
  });
  return {dup, dbias};
}

std::tuple<Tensor, Tensor, Tensor> activation_backward_pass(const Tensor& dy, const Tensor& x,
                                                            const OptionalTensor& up,
                                                            const OptionalTensor& bias,
                                                            c10::string_view name) {
  const Tensor dx = at::empty_like(x);
  return std::tuple_cat(std::tuple(dx), backward_into(dy, x, up, bias, name, dx));
}

// Computed by torch's operations, rounded once.
Tensor activation_by_torch(const Tensor& x, const OptionalTensor& up, const OptionalTensor& bias,
                           c10::string_view name) {
  const at::ScalarType type = compute_type(x);
  const Tensor z = is_given(bias) ? x.to(type) + bias->to(type) : x.to(type);
  Tensor y;
  with_curve(name, [&](auto curve) {
    using Curve = decltype(curve);
    y = std::is_same_v<Curve, Silu> ? at::silu(z)
                                    : at::gelu(z, std::is_same_v<Curve, Gelu> ? "none" : "tanh");
  });
  return (is_given(up) ? y * up->to(type) : y).to(x.scalar_type());
}

struct ActivationFunction : torch::autograd::Function<ActivationFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const OptionalTensor& up,
                        const OptionalTensor& bias, const std::string& name) {
    context->save_for_backward({x, up.value_or(Tensor()), bias.value_or(Tensor())});
    context->saved_data["name"] = name;
    context->set_materialize_grads(false);
    return Call<activation_pass>::of(x, up, bias, name);
  }

  // The arguments of forward() that have gradients, which it saves, and how many there are.
  enum { kX, kUp, kBias, kArguments = 4 };

  static variable_list backward(AutogradContext* context, variable_list& gradients) {
    variable_list result(kArguments);
    if (!gradients[0].defined()) return result;
    const variable_list saved = context->get_saved_variables();
    const Tensor& x = saved[kX];
    const OptionalTensor up = optional(saved[kUp]), bias = optional(saved[kBias]);
    const std::string name = context->saved_data["name"].toStringRef();
    if (at::GradMode::is_enabled()) {
      const auto found = differentiable_gradients(
          {x, up, bias}, gradients[0], [&](const std::vector<OptionalTensor>& inputs) {
            return activation_by_torch(*inputs[0], inputs[1], inputs[2], name);
          });
      std::copy(found.begin(), found.end(), result.begin());
      return result;
    }
    Tensor dy = std::move(gradients[0]), dup, dbias;
    dy = dy.contiguous();
    if (may_overwrite_gradient(dy)) {
      std::tie(dup, dbias) = backward_into(dy, x, up, bias, name, dy);
      result[kX] = dy;
    } else {
      std::tie(result[kX], dup, dbias) = Call<activation_backward_pass>::of(dy, x, up, bias, name);
    }
    if (is_given(up)) result[kUp] = dup;
    if (is_given(bias)) result[kBias] = dbias.to(bias->scalar_type());
    return result;
  }
};

// torch computes what the kernels do not support.
Tensor activation(const Tensor& x, const OptionalTensor& up, const OptionalTensor& bias,
                  c10::string_view name) {
  with_curve(name, [](auto) {});
  if (!is_supported(x) || x.dim() == 0 || (is_given(up) && !match_in_type_and_shape(*up, x)) ||
      (is_given(bias) && (bias->dim() != 1 || bias->sym_size(0) != x.sym_size(-1) ||
                          !fits_as_affine(bias, x, bias->sizes()))))
    return activation_by_torch(x, up, bias, name);
  const auto apply = [&](const Tensor& rows, const OptionalTensor& gated) {
    return ActivationFunction::apply(rows.contiguous(), contiguous(gated), bias, std::string(name));
  };
  if (is_given(bias) || x.dim() != 4 || x.suggest_memory_format() != kChannelsLast)
    return apply(x, up);
  // As it lies: channels last.
  const auto turned = [](const Tensor& images) { return images.permute({0, 2, 3, 1}); };
  return apply(turned(x), is_given(up) ? optional(turned(*up)) : std::nullopt)
      .permute({0, 3, 1, 2});
}

AMPFUSE_LIBRARY_FRAGMENT(AMPFUSE_NAMESPACE, library) {
  library.def("activation(Tensor x, Tensor? up, Tensor? bias, str name) -> Tensor", activation);
  define<activation_pass>(
      library, "activation_forward(Tensor x, Tensor? up, Tensor? bias, str name) -> Tensor");
  define<activation_backward_pass>(
      library,
      "activation_backward(Tensor dy, Tensor x, Tensor? up, Tensor? bias, str name) -> "
      "(Tensor, Tensor, Tensor)");
}

}  // namespace
}  // namespace ampfuse
