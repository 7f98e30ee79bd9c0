// batch_norm_act as an operator of torch.
//
// The operator is a composition: torch traces, compiles and exports the passes it is made of, and
// autograd's formula stands here once for the CPU, CUDA and tracing.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "nn_pass.h"
#include "recompute.h"

namespace ampfuse {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ---- the passes ----
//
// Each serves CPU, CUDA and meta tensors; for meta tensors it makes only the results' shapes.

std::tuple<Tensor, Tensor> moments_pass(const Tensor& x) {
  using Op = BatchNormMoments;
  const Tensor mean = empty_vector(x), var = empty_vector(x);
  if (!x.is_meta())
    PassArgs(x)
        .image(Op::kX, x, "x")
        .vector(Op::kMean, mean, "mean")
        .vector(Op::kVar, var, "var")
        .run<Op>();
  return {mean, var};
}

std::tuple<Tensor, Tensor> statistics_pass(const Tensor& x, const OptionalTensor& running_mean,
                                           const OptionalTensor& running_var,
                                           const OptionalTensor& batches, double momentum,
                                           double eps) {
  using Op = BatchNormMoments;
  const Tensor mean = empty_vector(x), invstd = empty_vector(x);
  if (!x.is_meta()) {
    PassArgs(x)
        .image(Op::kX, x, "x")
        .vector(Op::kMean, mean, "mean")
        .vector(Op::kInvstd, invstd, "invstd")
        .vector(Op::kRunningMean, running_mean, "running_mean")
        .vector(Op::kRunningVar, running_var, "running_var")
        .batches(batches)
        .number(Op::kMomentum, momentum)
        .number(Op::kEps, eps)
        .run<Op>();
  }
  return {mean, invstd};
}

std::tuple<Tensor, Tensor> apply_pass(const Tensor& x, const OptionalTensor& residual,
                                      const Tensor& mean, const Tensor& invstd,
                                      const OptionalTensor& weight, const OptionalTensor& bias,
                                      bool relu) {
  using Op = BatchNormApply;
  const Tensor y = empty_laid_out_as(x, x.scalar_type());
  const Tensor mask = relu ? empty_mask(x) : empty_placeholder(x, at::kByte);
  if (x.is_meta()) return {y, mask};
  PassArgs(x)
      .image(Op::kX, x, "x")
      .image(Op::kResidual, residual, "residual")
      .image(Op::kY, y, "y")
      .mask(mask)
      .vector(Op::kMean, mean, "mean")
      .vector(Op::kInvstd, invstd, "invstd")
      .vector(Op::kWeight, weight, "weight")
      .vector(Op::kBias, bias, "bias")
      .run<Op>();
  return {y, mask};
}

// g: for the gradient under the mask, which is not kept if it has no elements; may be dy.
std::tuple<Tensor, Tensor, Tensor> reduce_into_pass(const Tensor& dy, const Tensor& x,
                                                    const Tensor& mean, const Tensor& invstd,
                                                    const Tensor& mask, const Tensor& g) {
  using Op = BatchNormReduce;
  const Tensor sum = empty_vector(x), centered = empty_vector(x), dweight = empty_vector(x);
  if (x.is_meta()) return {sum, centered, dweight};
  PassArgs args(x);
  if (g.numel() > 0) args.image(Op::kG, g, "g");
  args.image(Op::kX, x, "x")
      .image(Op::kDy, dy, "dy")
      .mask(mask)
      .vector(Op::kMean, mean, "mean")
      .vector(Op::kInvstd, invstd, "invstd")
      .vector(Op::kSum, sum, "sum")
      .vector(Op::kCentered, centered, "centered")
      .vector(Op::kDweight, dweight, "dweight")
      .run<Op>();
  return {sum, centered, dweight};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> reduce_pass(const Tensor& dy, const Tensor& x,
                                                       const Tensor& mean, const Tensor& invstd,
                                                       const Tensor& mask, bool keep) {
  const Tensor g =
      keep ? empty_laid_out_as(x, x.scalar_type()) : empty_placeholder(x, x.scalar_type());
  return std::tuple_cat(reduce_into_pass(dy, x, mean, invstd, mask, g), std::tuple(g));
}

// The sums are absent where statistics are frozen. dx may be dy.
void dx_into_pass(const Tensor& dy, const Tensor& mask, const Tensor& x, const Tensor& mean,
                  const Tensor& invstd, const OptionalTensor& weight, const OptionalTensor& sum_dy,
                  const OptionalTensor& sum_dy_centered, c10::SymInt count, const Tensor& dx) {
  using Op = BatchNormDx;
  if (x.is_meta()) return;
  PassArgs args(x);
  if (is_given(sum_dy)) args.image(Op::kX, x, "x");
  args.image(Op::kDy, dy, "dy")
      .image(Op::kDx, dx, "dx")
      .mask(mask)
      .vector(Op::kMean, mean, "mean")
      .vector(Op::kInvstd, invstd, "invstd")
      .vector(Op::kWeight, weight, "weight")
      .vector(Op::kSum, sum_dy, "sum_dy")
      .vector(Op::kCentered, sum_dy_centered, "sum_dy_centered")
      .number(Op::kInverseCount, 1.0 / double(count.expect_int()))
      .run<Op>();
}

Tensor dx_pass(const Tensor& dy, const Tensor& mask, const Tensor& x, const Tensor& mean,
               const Tensor& invstd, const OptionalTensor& weight, const OptionalTensor& sum_dy,
               const OptionalTensor& sum_dy_centered, c10::SymInt count) {
  const Tensor dx = empty_laid_out_as(x, x.scalar_type());
  dx_into_pass(dy, mask, x, mean, invstd, weight, sum_dy, sum_dy_centered, std::move(count), dx);
  return dx;
}

// ---- the operator ----

struct BatchNormAct : torch::autograd::Function<BatchNormAct> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const OptionalTensor& residual,
                        const OptionalTensor& weight, const OptionalTensor& bias,
                        const OptionalTensor& running_mean, const OptionalTensor& running_var,
                        const OptionalTensor& batches, bool training, double momentum, double eps,
                        bool relu) {
    // (needs_input_grad() counts the tensors that are there, not the arguments.)
    std::vector<bool> needs = {x.requires_grad()};
    for (const OptionalTensor* tensor : {&residual, &weight, &bias})
      needs.push_back(is_given(*tensor) && (*tensor)->requires_grad());
    Tensor mean, invstd;
    if (training) {
      std::tie(mean, invstd) =
          Call<statistics_pass>::of(x, running_mean, running_var, batches, momentum, eps);
    } else {
      // A later pass in training mode changes it, maybe before the backward pass.
      const bool any = std::any_of(needs.begin(), needs.end(), [](bool need) { return need; });
      mean = any ? running_mean->clone() : *running_mean;
      invstd = at::rsqrt(*running_var + eps);
    }
    auto [y, mask] = Call<apply_pass>::of(x, residual, mean, invstd, weight, bias, relu);
    context->save_for_backward(
        {x, weight.value_or(Tensor()), mean, invstd, mask, bias.value_or(Tensor())});
    context->saved_data["training"] = training;
    context->saved_data["residual"] = is_given(residual);
    context->saved_data["relu"] = relu;
    context->saved_data["needs"] = needs;
    context->set_materialize_grads(false);
    return y;
  }
  // Of forward()'s arguments, those that have gradients, and their count; what it saves.
  enum { kX, kResidual, kWeight, kBias, kArguments = 11 };
  enum { kSavedX, kSavedWeight, kSavedMean, kSavedInvstd, kSavedMask, kSavedBias };

  static bool needs(AutogradContext* context, int argument) {
    return context->saved_data["needs"].toBoolList().get(argument);
  }

  static variable_list backward(AutogradContext* context, variable_list& gradients) {
    if (!gradients[0].defined()) return variable_list(kArguments);
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "a fused batch norm has no second derivative (create_graph=True): use "
                "ampfuse.nn.unfuse(model), or amp.initialize without fuse");
    return gradients_of(context, std::move(gradients[0]));
  }

  // The output once more, from what is saved, in the same bits.
  static Tensor recompute(AutogradContext& context) {
    const variable_list saved = context.get_saved_variables();
    return std::get<0>(Call<apply_pass>::of(saved[kSavedX], std::nullopt, saved[kSavedMean],
                                            saved[kSavedInvstd], optional(saved[kSavedWeight]),
                                            optional(saved[kSavedBias]),
                                            context.saved_data["relu"].toBool()));
  }

 private:
  // The gradients of the arguments, from that of the output.
  static variable_list gradients_of(AutogradContext* context, Tensor dy) {
    variable_list result(kArguments);
    const variable_list saved = context->get_saved_variables();
    const Tensor &x = saved[kSavedX], &weight = saved[kSavedWeight];
    const Tensor &mean = saved[kSavedMean], &invstd = saved[kSavedInvstd];
    Tensor mask = saved[kSavedMask];
    const bool training = context->saved_data["training"].toBool();
    const bool to_residual = needs(context, kResidual);
    const bool to_weight = needs(context, kWeight), to_bias = needs(context, kBias);
    dy = dy.contiguous(kChannelsLast);
    bool ours = may_overwrite_gradient(dy);
    Tensor sum, centered, dweight;
    if (training || to_weight || to_bias || to_residual) {
      if (to_residual && ours) {
        std::tie(sum, centered, dweight) =
            Call<reduce_into_pass>::of(dy, x, mean, invstd, mask, dy);
      } else {
        Tensor g;
        std::tie(sum, centered, dweight, g) =
            Call<reduce_pass>::of(dy, x, mean, invstd, mask, to_residual);
        if (to_residual) dy = g;
      }
    }
    if (to_residual) {
      result[kResidual] = dy;
      mask = empty_placeholder(x, at::kByte);
      ours = false;
    }
    if (to_weight) result[kWeight] = dweight;
    if (to_bias) result[kBias] = sum;
    if (!needs(context, kX)) return result;
    const auto if_training = [&](const Tensor& t) { return training ? optional(t) : std::nullopt; };
    const c10::SymInt count = x.sym_numel() / x.sym_size(1);
    if (ours) {
      Call<dx_into_pass>::of(dy, mask, x, mean, invstd, optional(weight), if_training(sum),
                             if_training(centered), count, dy);
      result[kX] = dy;
    } else {
      result[kX] = Call<dx_pass>::of(dy, mask, x, mean, invstd, optional(weight), if_training(sum),
                                     if_training(centered), count);
    }
    return result;
  }
};

using Node = torch::autograd::CppNode<BatchNormAct>;

// Whether the kernels support it: torch computes everything else.
bool has_kernels(const Tensor& x, const OptionalTensor& residual,
                 const std::vector<const OptionalTensor*>& per_channel, bool complete) {
  if (!complete || x.dim() != 4 || !is_supported(x)) return false;
  for (const OptionalTensor* tensor : per_channel) {
    if (is_given(*tensor) &&
        ((*tensor)->scalar_type() != at::kFloat || (*tensor)->device() != x.device() ||
         (*tensor)->dim() != 1 || (*tensor)->sym_size(0) != x.sym_size(1)))
      return false;
  }
  if (is_given(residual) && !match_in_type_and_shape(*residual, x)) return false;
  if (x.is_contiguous(kChannelsLast) || x.suggest_memory_format() == kChannelsLast) return true;
  TORCH_WARN_ONCE(
      "ampfuse's fused batch norm works on channels-last memory; this input is in another layout ",
      "and goes through torch's own operations. The fast way is torch.channels_last, for the "
      "model ",
      "(model.to(memory_format=torch.channels_last)) and its input.");
  return false;
}

Tensor batch_norm_act(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                      const OptionalTensor& bias, const OptionalTensor& running_mean,
                      const OptionalTensor& running_var, bool training, double momentum, double eps,
                      bool relu, const OptionalTensor& num_batches_tracked) {
  const bool fuses = has_kernels(x, residual, {&weight, &bias, &running_mean, &running_var},
                                 training || (is_given(running_mean) && is_given(running_var)));
  const bool counts = fuses && training && is_given(num_batches_tracked) &&
                      num_batches_tracked->device() == x.device() &&
                      num_batches_tracked->scalar_type() == at::kLong;
  if (training && is_given(num_batches_tracked) && !counts) num_batches_tracked->add_(1);
  if (fuses) {
    return BatchNormAct::apply(x.contiguous(kChannelsLast), contiguous(residual, kChannelsLast),
                               weight, bias, running_mean, running_var,
                               counts ? num_batches_tracked : std::nullopt, training, momentum, eps,
                               relu);
  }
  Tensor y = at::batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps,
                            at::globalContext().userEnabledCuDNN());
  if (is_given(residual)) y = y + *residual;
  return relu ? at::relu(y) : y;
}

AMPFUSE_LIBRARY(AMPFUSE_NAMESPACE, library) {
  library.def(
      "batch_norm_act(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, bool training, float momentum, "
      "float eps, bool relu, Tensor(c!)? num_batches_tracked=None) -> Tensor",
      batch_norm_act);
  define<moments_pass>(library, "batch_norm_moments(Tensor x) -> (Tensor, Tensor)");
  define<statistics_pass>(
      library,
      "batch_norm_statistics(Tensor x, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
      "Tensor(c!)? num_batches_tracked, float momentum, float eps) -> (Tensor, Tensor)");
  define<apply_pass>(
      library,
      "batch_norm_apply(Tensor x, Tensor? residual, Tensor mean, Tensor invstd, Tensor? weight, "
      "Tensor? bias, bool relu) -> (Tensor, Tensor)");
  define<reduce_pass>(
      library,
      "batch_norm_reduce(Tensor dy, Tensor x, Tensor mean, Tensor invstd, Tensor mask, bool keep) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  define<dx_pass>(
      library,
      "batch_norm_dx(Tensor dy, Tensor mask, Tensor x, Tensor mean, Tensor invstd, Tensor? weight, "
      "Tensor? sum_dy, Tensor? sum_dy_centered, SymInt count=1) -> Tensor");
  define<reduce_into_pass>(
      library,
      "batch_norm_reduce_into(Tensor dy, Tensor x, Tensor mean, Tensor invstd, Tensor mask, "
      "Tensor(a!) g) -> (Tensor, Tensor, Tensor)");
  define<dx_into_pass>(
      library,
      "batch_norm_dx_into(Tensor dy, Tensor mask, Tensor x, Tensor mean, Tensor invstd, "
      "Tensor? weight, Tensor? sum_dy, Tensor? sum_dy_centered, SymInt count, Tensor(a!) dx) -> "
      "()");
}

}  // namespace

SavedTensor::SavedTensor(const at::Tensor& tensor) {
  const auto& producer = tensor.grad_fn();
  auto* node = dynamic_cast<Node*>(producer.get());
  // (An operator's output has version 0. A change without gradients keeps its grad_fn.)
  const bool is_as_made = node != nullptr && version_of(tensor) == 0;
  if (is_as_made && !node->ctx_.saved_data["residual"].toBool()) {
    producer_ = producer;
  } else {
    tensor_ = tensor;
    version_ = version_of(tensor);
  }
}

at::Tensor SavedTensor::unpack() const {
  if (producer_) {
    const at::NoGradGuard no_grad;
    return BatchNormAct::recompute(dynamic_cast<Node&>(*producer_).ctx_);
  }
  // Autograd leaves this check to those who hook into it.
  TORCH_CHECK(version_of(tensor_) == version_,
              "one of the variables needed for gradient computation has been modified by an "
              "inplace operation: a ",
              tensor_.scalar_type(), " of shape ", tensor_.sizes(), " is at version ",
              version_of(tensor_), "; expected version ", version_, " instead");
  return tensor_;
}

}  // namespace ampfuse
