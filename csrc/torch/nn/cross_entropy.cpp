// cross_entropy as an operator of torch: the losses of rows of logits, each class a column.
#include <ATen/ATen.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "half_data.h"
#include "nn_pass.h"

namespace ampfuse {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Tensor of_rows(const Tensor& logits, int64_t each) {
  return at::empty_symint({logits.sym_size(0) * each}, logits.options().dtype(at::kFloat));
}

// The arguments of both passes for a matrix.
PassArgs args_of(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                 const Tensor& weight_sum, int64_t ignore_index, double label_smoothing) {
  TORCH_CHECK_VALUE(logits.dim() == 2 && logits.is_contiguous(),
                    "logits must be a contiguous matrix, got shape ", logits.sizes(),
                    " and strides ", logits.strides());
  PassArgs args(logits, logits.size(1));
  args.image(CrossEntropy::kLogits, logits, "logits")
      .targets(target, ignore_index)
      .vector(CrossEntropy::kWeight, weight, "weight")
      .scalar(CrossEntropy::kWeightSum, weight_sum, "weight_sum")
      .number(CrossEntropy::kSmoothing, label_smoothing);
  return args;
}

// The sum of the classes' weights, if it is needed.
Tensor sum_of(const OptionalTensor& weight, double label_smoothing) {
  return is_given(weight) && label_smoothing != 0 ? weight->sum() : Tensor();
}

void check_targets(const Tensor& target, int64_t rows, int64_t classes, int64_t ignore_index) {
  const auto* const targets = pointer_to<int64_t>(target, "target", rows, at::kCPU);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t t = targets[row];
    TORCH_CHECK_INDEX(t == ignore_index || (t >= 0 && t < classes), "target ", t,
                      " is out of range for ", classes, " classes and is not ignore_index, ",
                      ignore_index);
  }
}

std::tuple<Tensor, Tensor> loss_pass(const Tensor& logits, const Tensor& target,
                                     const OptionalTensor& weight, int64_t ignore_index,
                                     double label_smoothing) {
  using Op = CrossEntropyLoss;
  const Tensor losses = of_rows(logits, 1), lse = of_rows(logits, 2);
  if (logits.is_meta()) return {losses, lse};
  const Tensor sum = sum_of(weight, label_smoothing);
  PassArgs args = args_of(logits, target, weight, sum, ignore_index, label_smoothing);
  if (logits.is_cpu()) check_targets(target, logits.size(0), logits.size(1), ignore_index);
  args.row_vector(Op::kLoss, losses, "losses").row_vector(Op::kLse, lse, "lse", 2);
  args.run<Op>();
  return {losses, lse};
}

// `out` may be the logits.
void gradient_into_pass(const Tensor& gradient, const Tensor& logits, const Tensor& target,
                        const OptionalTensor& weight, const Tensor& lse, int64_t ignore_index,
                        double label_smoothing, const Tensor& out) {
  using Op = CrossEntropyGradient;
  if (logits.is_meta()) return;
  const Tensor sum = sum_of(weight, label_smoothing);
  PassArgs args = args_of(logits, target, weight, sum, ignore_index, label_smoothing);
  args.row_vector(Op::kRowGradient, gradient, "the losses' gradient")
      .row_vector(Op::kLse, lse, "lse", 2)
      .image(Op::kGradient, out, "the logits' gradient");
  args.run<Op>();
}

Tensor gradient_pass(const Tensor& gradient, const Tensor& logits, const Tensor& target,
                     const OptionalTensor& weight, const Tensor& lse, int64_t ignore_index,
                     double label_smoothing) {
  const Tensor out = empty_laid_out_as(logits, logits.scalar_type());
  gradient_into_pass(gradient, logits, target, weight, lse, ignore_index, label_smoothing, out);
  return out;
}

struct CrossEntropyFunction : torch::autograd::Function<CrossEntropyFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& input, const Tensor& target,
                        const OptionalTensor& weight, int64_t ignore_index,
                        double label_smoothing) {
    const OptionalTensor half = half_data_of(input);
    const Tensor logits = half.value_or(input);
    context->saved_data["is_half_data"] = half.has_value();
    auto [losses, lse] = Call<loss_pass>::of(logits, target, weight, ignore_index, label_smoothing);
    context->save_for_backward({logits, target, weight.value_or(Tensor()), lse});
    context->saved_data["ignore_index"] = ignore_index;
    context->saved_data["label_smoothing"] = label_smoothing;
    return losses;
  }

  // What forward() saves.
  enum { kSavedLogits, kSavedTarget, kSavedWeight, kSavedLse };

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &logits = saved[kSavedLogits], &target = saved[kSavedTarget];
    const Tensor& lse = saved[kSavedLse];
    const OptionalTensor weight = optional(saved[kSavedWeight]);
    const int64_t ignore_index = context->saved_data["ignore_index"].toInt();
    const double smoothing = context->saved_data["label_smoothing"].toDouble();
    const bool is_half_data = context->saved_data["is_half_data"].toBool();
    const Tensor gradient = gradients[0].contiguous();
    variable_list result(5);
    Tensor& found = result[0];
    // (Whatever traces takes our operators.)
    const bool is_wrapped =
        gradient.key_set().has_any(kWrappers) && !c10::impl::TorchDispatchModeTLS::any_modes_set();
    if (at::GradMode::is_enabled() || is_wrapped) {
      found = by_torch(logits, is_half_data, target, weight, ignore_index, smoothing, gradient);
      return result;
    }
    if (may_overwrite_saved(logits)) {
      found = logits.detach();
      gradient_into_pass(gradient, logits, target, weight, lse, ignore_index, smoothing, found);
    } else {
      found =
          Call<gradient_pass>::of(gradient, logits, target, weight, lse, ignore_index, smoothing);
    }
    if (is_half_data) found = half_data().widened(found);
    return result;
  }

 private:
  // The gradient by torch's operations, which torch differentiates once more (create_graph) and
  // which take gradients in batches.
  static Tensor by_torch(const Tensor& logits, bool is_half_data, const Tensor& target,
                         const OptionalTensor& weight, int64_t ignore_index, double smoothing,
                         const Tensor& gradient) {
    const bool creates_graph = at::GradMode::is_enabled();
    const at::AutoGradMode records(true);
    const Tensor input = is_half_data ? with_history(logits.to(at::kFloat)) : logits;
    const Tensor losses = at::cross_entropy_loss(input.to(at::kFloat), target, weight,
                                                 at::Reduction::None, ignore_index, smoothing);
    return torch::autograd::grad({losses}, {input}, {gradient}, true, creates_graph)[0];
  }

  // `data` of the logits, as what they were computed by: it was saved without a history.
  static Tensor with_history(const Tensor& data) {
    return torch::autograd::make_variable(data, torch::autograd::get_current_node()->next_edge(0));
  }

  // Whether the saved tensor has no other user, now or in another backward pass, so that its memory
  // can be reused for the gradient. A view's whole tensor may belong to the view alone.
  static bool may_overwrite_saved(const Tensor& saved) {
    // (Whatever traces looks for new tensors.)
    if (c10::impl::TorchDispatchModeTLS::any_modes_set() ||
        torch::autograd::get_current_graph_task_keep_graph() || saved.key_set().has_any(kWrappers))
      return false;
    constexpr size_t kHere = 2;  // the context, and `saved`
    if (holders(saved) != kHere) return false;
    const size_t storages = saved.storage().use_count();
    return storages == 1 || (storages == 2 && saved.is_view() && holders(saved._base()) == 1);
  }

  // A tensor that Python has seen and forgotten keeps its Python object, which keeps it.
  static size_t holders(const at::TensorBase& tensor) {
    const bool forgotten = tensor.unsafeGetTensorImpl()->pyobj_slot()->has_unique_reference();
    return tensor.use_count() - size_t(forgotten);
  }
};

Tensor cross_entropy(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                     int64_t ignore_index, double label_smoothing) {
  return CrossEntropyFunction::apply(logits, target, weight, ignore_index, label_smoothing);
}

AMPFUSE_LIBRARY_FRAGMENT(AMPFUSE_NAMESPACE, library) {
  library.def(
      "cross_entropy(Tensor logits, Tensor target, Tensor? weight, int ignore_index, "
      "float label_smoothing) -> Tensor",
      cross_entropy);
  define<loss_pass>(
      library,
      "cross_entropy_loss(Tensor logits, Tensor target, Tensor? weight, int ignore_index, "
      "float label_smoothing) -> (Tensor, Tensor)");
  define<gradient_pass>(
      library,
      "cross_entropy_gradient(Tensor gradient, Tensor logits, Tensor target, Tensor? weight, "
      "Tensor lse, int ignore_index, float label_smoothing) -> Tensor");
}

}  // namespace
}  // namespace ampfuse
