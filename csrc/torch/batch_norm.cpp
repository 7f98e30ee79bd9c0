// batch_norm_act and fork as operators of torch.
//
// The operator is a composition: torch traces, compiles and exports the passes it is made of, and
// autograd's formula stands here once for the CPU, CUDA and tracing.
#include "core/batch_norm.h"

#include <ATen/ATen.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "batch_norm.h"
#include "memory.h"
#include "torch_backend.h"

// A process may load the module a second time, with the emulated backend.
#if defined(AMPFUSE_EMULATE_CUDA)
#define AMPFUSE_NAMESPACE ampfuse_emulated
#define AMPFUSE_OP(name) "ampfuse_emulated::" name
#else
#define AMPFUSE_NAMESPACE ampfuse
#define AMPFUSE_OP(name) "ampfuse::" name
#endif

namespace ampfuse {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool given(const OptionalTensor& tensor) { return tensor && tensor->defined(); }
OptionalTensor optional(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// ---- the passes ----
//
// Each serves CPU, CUDA and meta tensors; of the latter it makes the results' shapes alone.

const at::MemoryFormat kChannelsLast = at::MemoryFormat::ChannelsLast;
// Of tensors whose memory is another's, or nobody's.
const c10::DispatchKeySet kWrappers({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                     c10::DispatchKey::FuncTorchBatched,
                                     c10::DispatchKey::FuncTorchGradWrapper});

Tensor empty_like_channel(const Tensor& x) {
  return at::empty_symint({x.sym_size(1)}, x.options().dtype(at::kFloat));
}

Tensor empty_mask(const Tensor& x) {
  return at::empty_symint({x.sym_size(0), x.sym_size(2), x.sym_size(3), (x.sym_size(1) + 7) / 8},
                          x.options().dtype(at::kByte));
}

Tensor nothing(const Tensor& x, at::ScalarType dtype) {
  return at::empty({0}, x.options().dtype(dtype));
}

void check_image(const Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() == 4 && x.is_contiguous(kChannelsLast),
                    "x has to be a dense tensor (N, C, H, W) in torch.channels_last; it has shape ",
                    x.sizes(), " and strides ", x.strides());
}

void check_like(const Tensor& tensor, const Tensor& x, const char* name) {
  TORCH_CHECK_VALUE(tensor.sizes() == x.sizes() && tensor.is_contiguous(kChannelsLast) &&
                        tensor.scalar_type() == x.scalar_type() && tensor.device() == x.device(),
                    name, " has to be like x, ", x.scalar_type(), " of shape ", x.sizes(),
                    " in torch.channels_last on ", x.device(), "; it is ", tensor.scalar_type(),
                    " of shape ", tensor.sizes(), " with strides ", tensor.strides(), " on ",
                    tensor.device());
}

float* channels_of(const OptionalTensor& tensor, const Tensor& x, const char* name) {
  float* data = float_pointer(tensor, name, x.device());
  if (data == nullptr) return nullptr;
  TORCH_CHECK_VALUE(tensor->numel() == x.size(1) && tensor->is_contiguous(), name,
                    " has to hold a contiguous value for each of ", x.size(1),
                    " channels; it has shape ", tensor->sizes());
  return data;
}

ImageRows image_of(const Tensor& x) {
  check_image(x);
  return {x.numel() / x.size(1), x.size(1), dtype_of(x, "x")};
}

template <class Sums>
Tensor empty_partials(const ImageRows& image, const Tensor& x) {
  return at::empty({image.channels * image.spans() * int64_t(sizeof(Sums))},
                   x.options().dtype(at::kByte));
}

const uint8_t* mask_of(const Tensor& mask, const ImageRows& image) {
  if (mask.numel() == 0) return nullptr;
  TORCH_CHECK_VALUE(mask.scalar_type() == at::kByte && mask.is_contiguous() &&
                        mask.numel() == image.rows * image.mask_bytes(),
                    "mask has to be what batch_norm_apply returned for x");
  return mask.data_ptr<uint8_t>();
}

void take_moments(const Tensor& x, Statistics statistics) {
  MomentArgs args = {image_of(x), x.const_data_ptr(), nullptr, statistics};
  const DeviceScope scope(x.device());
  const Tensor partials = empty_partials<MomentSums>(args.image, x);
  args.partials = static_cast<MomentSums*>(partials.data_ptr());
  scope.backend().batch_norm().moments(args, scope.stream());
}

std::tuple<Tensor, Tensor> moments_pass(const Tensor& x) {
  const Tensor mean = empty_like_channel(x), var = empty_like_channel(x);
  if (!x.is_meta())
    take_moments(x,
                 {mean.data_ptr<float>(), var.data_ptr<float>(), nullptr, nullptr, nullptr, 0, 0});
  return {mean, var};
}

std::tuple<Tensor, Tensor> statistics_pass(const Tensor& x, const OptionalTensor& running_mean,
                                           const OptionalTensor& running_var, double momentum,
                                           double eps) {
  const Tensor mean = empty_like_channel(x), invstd = empty_like_channel(x);
  if (!x.is_meta()) {
    take_moments(x, {mean.data_ptr<float>(), nullptr, invstd.data_ptr<float>(),
                     channels_of(running_mean, x, "running_mean"),
                     channels_of(running_var, x, "running_var"), float(momentum), float(eps)});
  }
  return {mean, invstd};
}

std::tuple<Tensor, Tensor> apply_pass(const Tensor& x, const OptionalTensor& residual,
                                      const Tensor& mean, const Tensor& invstd,
                                      const OptionalTensor& weight, const OptionalTensor& bias,
                                      bool relu) {
  const Tensor y = empty_laid_out_as(x, x.scalar_type());
  const Tensor mask = relu ? empty_mask(x) : nothing(x, at::kByte);
  if (x.is_meta()) return {y, mask};
  ApplyArgs args = {};
  args.image = image_of(x);
  if (given(residual)) check_like(*residual, x, "residual");
  args.x = x.const_data_ptr();
  args.residual = given(residual) ? residual->const_data_ptr() : nullptr;
  args.y = y.data_ptr();
  args.mask = relu ? mask.data_ptr<uint8_t>() : nullptr;
  args.mean = channels_of(mean, x, "mean");
  args.invstd = channels_of(invstd, x, "invstd");
  args.weight = channels_of(weight, x, "weight");
  args.bias = channels_of(bias, x, "bias");
  const DeviceScope scope(x.device());
  scope.backend().batch_norm().apply(args, scope.stream());
  return {y, mask};
}

// g: for the gradient under the mask, which is not kept if it has no elements; may be one of dy.
std::tuple<Tensor, Tensor> reduce_into_pass(at::TensorList dy, const Tensor& x, const Tensor& mean,
                                            const Tensor& mask, const Tensor& g) {
  const Tensor sum = empty_like_channel(x), centered = empty_like_channel(x);
  if (x.is_meta()) return {sum, centered};
  const bool keep = g.numel() > 0;
  ReduceArgs args = {};
  args.image = image_of(x);
  TORCH_CHECK_VALUE(
      !dy.empty() && dy.size() <= ReduceArgs::kMaxBranches && (keep || dy.size() == 1),
      "batch_norm_reduce takes 1 to ", ReduceArgs::kMaxBranches,
      " gradients, and keep=True for more than one; got ", dy.size());
  for (const Tensor& branch : dy) {
    check_like(branch, x, "dy");
    args.dy[args.branches++] = branch.const_data_ptr();
  }
  if (keep) check_like(g, x, "g");
  args.mask = mask_of(mask, args.image);
  args.x = x.const_data_ptr();
  args.mean = channels_of(mean, x, "mean");
  args.g = keep ? g.data_ptr() : nullptr;
  args.sum = sum.data_ptr<float>();
  args.centered = centered.data_ptr<float>();
  const DeviceScope scope(x.device());
  const Tensor partials = empty_partials<GradientSums>(args.image, x);
  args.partials = static_cast<GradientSums*>(partials.data_ptr());
  scope.backend().batch_norm().reduce(args, scope.stream());
  return {sum, centered};
}

std::tuple<Tensor, Tensor, Tensor> reduce_pass(at::TensorList dy, const Tensor& x,
                                               const Tensor& mean, const Tensor& mask, bool keep) {
  const Tensor g = keep ? empty_laid_out_as(x, x.scalar_type()) : nothing(x, x.scalar_type());
  return std::tuple_cat(reduce_into_pass(dy, x, mean, mask, g), std::tuple(g));
}

// dx may be dy.
void dx_into_pass(const Tensor& dy, const Tensor& mask, const Tensor& x, const Tensor& mean,
                  const Tensor& invstd, const OptionalTensor& weight, const OptionalTensor& sum_dy,
                  const OptionalTensor& sum_dy_centered, c10::SymInt count, const Tensor& dx) {
  if (x.is_meta()) return;
  InputGradientArgs args = {};
  args.image = image_of(x);
  check_like(dy, x, "dy");
  check_like(dx, x, "dx");
  args.dy = dy.const_data_ptr();
  args.mask = mask_of(mask, args.image);
  args.x = x.const_data_ptr();
  args.dx = dx.data_ptr();
  args.mean = channels_of(mean, x, "mean");
  args.invstd = channels_of(invstd, x, "invstd");
  args.weight = channels_of(weight, x, "weight");
  args.sum_dy = channels_of(sum_dy, x, "sum_dy");
  args.sum_centered = channels_of(sum_dy_centered, x, "sum_dy_centered");
  args.inverse_count = float(1.0 / double(count.expect_int()));
  const DeviceScope scope(x.device());
  scope.backend().batch_norm().input_gradient(args, scope.stream());
}

Tensor dx_pass(const Tensor& dy, const Tensor& mask, const Tensor& x, const Tensor& mean,
               const Tensor& invstd, const OptionalTensor& weight, const OptionalTensor& sum_dy,
               const OptionalTensor& sum_dy_centered, c10::SymInt count) {
  const Tensor dx = empty_laid_out_as(x, x.scalar_type());
  dx_into_pass(dy, mask, x, mean, invstd, weight, sum_dy, sum_dy_centered, std::move(count), dx);
  return dx;
}

// Calls a pass through the dispatcher, so that whatever traces sees it.
template <auto pass>
struct Call;

template <class Result, class... Args, Result (*pass)(Args...)>
struct Call<pass> {
  static Result of(const char* name, Args... args) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Result(Args...)>();
    return op.call(std::forward<Args>(args)...);
  }
};

// ---- the operator ----

// Autograd's nodes add up the gradients of all that used a tensor before its producer sees them:
// for the input of a residual block a sum that is written and read again. fork() defers that sum to
// the producer, which adds in registers.
struct Branches {
  static constexpr const char* kKey = "branches";
  static constexpr const char* kTask = "task";

  // A tensor may be forked in several places.
  static void leave(AutogradContext& producer, const std::vector<Tensor>& gradients) {
    std::vector<Tensor> all = take(producer);
    all.insert(all.end(), gradients.begin(), gradients.end());
    producer.saved_data[kKey] = std::move(all);
    producer.saved_data[kTask] = int64_t(torch::autograd::get_current_graph_task_id());
  }

  // Nothing that a backward pass has left that failed before it came here.
  static std::vector<Tensor> take(AutogradContext& producer) {
    const auto found = producer.saved_data.find(kKey);
    if (found == producer.saved_data.end()) return {};
    std::vector<Tensor> gradients = found->second.toTensorVector();
    const int64_t task = producer.saved_data[kTask].toInt();
    producer.saved_data.erase(kKey);
    producer.saved_data.erase(kTask);
    if (task != torch::autograd::get_current_graph_task_id()) return {};
    return gradients;
  }
};

Tensor sum_of(const std::vector<Tensor>& tensors) {
  Tensor sum = tensors[0];
  for (size_t i = 1; i < tensors.size(); ++i) sum = sum + tensors[i];
  return sum;
}

// The bits of a mask as a tensor like x.
Tensor unpacked(const Tensor& mask, const Tensor& x) {
  const Tensor bit = at::arange(8, mask.options());
  const Tensor bits = at::bitwise_and(at::bitwise_right_shift(mask.unsqueeze(-1), bit), 1);
  return bits.flatten(3).slice(3, 0, x.size(1)).permute({0, 3, 1, 2}).to(at::kBool);
}

struct BatchNormAct : torch::autograd::Function<BatchNormAct> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const OptionalTensor& residual,
                        const OptionalTensor& weight, const OptionalTensor& bias,
                        const OptionalTensor& running_mean, const OptionalTensor& running_var,
                        bool training, double momentum, double eps, bool relu) {
    // (needs_input_grad() counts the tensors that are there, not the arguments.)
    std::vector<bool> needs = {x.requires_grad()};
    for (const OptionalTensor* tensor : {&residual, &weight, &bias})
      needs.push_back(given(*tensor) && (*tensor)->requires_grad());
    Tensor mean, invstd;
    if (training) {
      std::tie(mean, invstd) = Call<statistics_pass>::of(AMPFUSE_OP("batch_norm_statistics"), x,
                                                         running_mean, running_var, momentum, eps);
    } else {
      // A later pass in training mode changes it, maybe before the backward pass.
      const bool any = std::any_of(needs.begin(), needs.end(), [](bool need) { return need; });
      mean = any ? running_mean->clone() : *running_mean;
      invstd = at::rsqrt(*running_var + eps);
    }
    auto [y, mask] = Call<apply_pass>::of(AMPFUSE_OP("batch_norm_apply"), x, residual, mean, invstd,
                                          weight, bias, relu);
    context->save_for_backward(
        {x, weight.value_or(Tensor()), mean, invstd, mask, bias.value_or(Tensor())});
    context->saved_data["training"] = training;
    context->saved_data["residual"] = given(residual);
    context->saved_data["relu"] = relu;
    context->saved_data["eps"] = eps;
    context->saved_data["needs"] = needs;
    context->set_materialize_grads(false);
    return y;
  }
  // Of forward()'s arguments.
  enum { kX, kResidual, kWeight, kBias, kArguments = 10 };

  static bool needs(AutogradContext* context, int argument) {
    return context->saved_data["needs"].toBoolList().get(argument);
  }

  static variable_list backward(AutogradContext* context, variable_list& gradients) {
    std::vector<Tensor> dy = Branches::take(*context);
    if (gradients[0].defined()) dy.insert(dy.begin(), std::move(gradients[0]));
    variable_list result(kArguments);
    if (dy.empty()) return result;
    if (at::GradMode::is_enabled()) {
      differentiable(context, sum_of(dy), result);
    } else {
      fused(context, std::move(dy), result);
    }
    return result;
  }

  // The output once more, from what is saved, in the same bits.
  static Tensor recompute(AutogradContext& context) {
    const variable_list saved = context.get_saved_variables();
    return std::get<0>(Call<apply_pass>::of(
        AMPFUSE_OP("batch_norm_apply"), saved[0], std::nullopt, saved[2], saved[3],
        optional(saved[1]), optional(saved[5]), context.saved_data["relu"].toBool()));
  }

 private:
  static void fused(AutogradContext* context, std::vector<Tensor> dy, variable_list& result) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &mean = saved[2], &invstd = saved[3];
    Tensor mask = saved[4];
    const bool training = context->saved_data["training"].toBool();
    for (Tensor& branch : dy) branch = branch.contiguous(kChannelsLast);
    while (dy.size() > size_t(ReduceArgs::kMaxBranches)) {
      dy[dy.size() - 2] = dy[dy.size() - 2] + dy.back();
      dy.pop_back();
    }
    const bool to_weight = needs(context, kWeight);
    const bool to_bias = needs(context, kBias);
    const bool keep = dy.size() > 1 || needs(context, kResidual);
    std::vector<Tensor> spare = only_ours(dy);
    const auto take = [&spare] {
      if (spare.empty()) return Tensor();
      const Tensor taken = std::move(spare.back());
      spare.pop_back();
      return taken;
    };
    Tensor sum, centered;
    if (training || to_weight || to_bias || keep) {
      Tensor g = keep ? take() : Tensor();
      if (g.defined()) {
        std::tie(sum, centered) =
            Call<reduce_into_pass>::of(AMPFUSE_OP("batch_norm_reduce_into"), dy, x, mean, mask, g);
      } else {
        std::tie(sum, centered, g) =
            Call<reduce_pass>::of(AMPFUSE_OP("batch_norm_reduce"), dy, x, mean, mask, keep);
      }
      if (keep) {
        dy = {std::move(g)};
        mask = nothing(x, at::kByte);
        if (spare.empty() && !needs(context, kResidual)) spare = only_ours(dy);
      }
    }
    if (needs(context, kResidual)) result[kResidual] = dy[0];
    if (to_weight) result[kWeight] = centered * invstd;
    if (to_bias) result[kBias] = sum;
    if (!needs(context, kX)) return;
    const auto frozen = [&](const Tensor& t) { return training ? optional(t) : std::nullopt; };
    const c10::SymInt count = x.sym_numel() / x.sym_size(1);
    if (const Tensor dx = take(); dx.defined()) {
      Call<dx_into_pass>::of(AMPFUSE_OP("batch_norm_dx_into"), dy[0], mask, x, mean, invstd,
                             optional(weight), frozen(sum), frozen(centered), count, dx);
      result[kX] = dx;
    } else {
      result[kX] = Call<dx_pass>::of(AMPFUSE_OP("batch_norm_dx"), dy[0], mask, x, mean, invstd,
                                     optional(weight), frozen(sum), frozen(centered), count);
    }
  }

  // Gradients that nobody else holds, in memory that nobody else sees. What is computed of them is
  // written over them: in lines that the cache has, and to pages that need not be asked for.
  static std::vector<Tensor> only_ours(const std::vector<Tensor>& gradients) {
    std::vector<Tensor> ours;
    // Whatever traces looks for new tensors.
    if (c10::impl::TorchDispatchModeTLS::any_modes_set()) return ours;
    for (const Tensor& tensor : gradients) {
      if (tensor.use_count() == 1 && !tensor.key_set().has_any(kWrappers) &&
          tensor.storage().use_count() == 1)
        ours.push_back(tensor);
    }
    return ours;
  }

  // The same by torch's operations, for a second derivative.
  static void differentiable(AutogradContext* context, Tensor g, variable_list& result) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &x = saved[0], &weight = saved[1], &mean = saved[2], &invstd = saved[3];
    const double eps = context->saved_data["eps"].toDouble();
    if (context->saved_data["relu"].toBool())
      g = at::where(unpacked(saved[4], x), g, at::zeros({}, g.options()));
    const Tensor var = at::reciprocal(invstd * invstd) - eps;
    auto [dx, dweight, dbias] = at::native_batch_norm_backward(
        g, x, optional(weight), mean, var, mean, invstd, context->saved_data["training"].toBool(),
        eps, {true, true, true});
    if (needs(context, kX)) result[kX] = dx;
    if (needs(context, kResidual)) result[kResidual] = g;
    if (needs(context, kWeight)) result[kWeight] = dweight;
    if (needs(context, kBias)) result[kBias] = dbias;
  }
};

using Node = torch::autograd::CppNode<BatchNormAct>;

// Whether the kernels take it: everything else is torch's.
bool has_kernels(const Tensor& x, const OptionalTensor& residual,
                 const std::vector<const OptionalTensor*>& per_channel, bool complete) {
  const at::ScalarType type = x.scalar_type();
  if (!complete || x.dim() != 4 ||
      (type != at::kFloat && type != at::kHalf && type != at::kBFloat16))
    return false;
  if (!(x.is_cpu() || x.is_cuda() || x.is_meta()) || x.sym_numel() == 0) return false;
  for (const OptionalTensor* tensor : per_channel) {
    if (given(*tensor) &&
        ((*tensor)->scalar_type() != at::kFloat || (*tensor)->device() != x.device() ||
         (*tensor)->dim() != 1 || (*tensor)->sym_size(0) != x.sym_size(1)))
      return false;
  }
  if (given(residual) && (residual->scalar_type() != type || residual->device() != x.device() ||
                          residual->sym_sizes() != x.sym_sizes()))
    return false;
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
                      bool relu) {
  if (has_kernels(x, residual, {&weight, &bias, &running_mean, &running_var},
                  training || (given(running_mean) && given(running_var)))) {
    const OptionalTensor added =
        given(residual) ? OptionalTensor(residual->contiguous(kChannelsLast)) : std::nullopt;
    return BatchNormAct::apply(x.contiguous(kChannelsLast), added, weight, bias, running_mean,
                               running_var, training, momentum, eps, relu);
  }
  Tensor y = at::batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps,
                            at::globalContext().userEnabledCuDNN());
  if (given(residual)) y = y + *residual;
  return relu ? at::relu(y) : y;
}

// ---- fork ----

struct Fork : torch::autograd::Function<Fork> {
  static variable_list forward(AutogradContext* context, const Tensor& x, int64_t n) {
    context->set_materialize_grads(false);
    variable_list outputs;
    for (int64_t i = 0; i < n; ++i) outputs.push_back(at::alias(x));
    return outputs;
  }

  static variable_list backward(AutogradContext*, const variable_list& gradients) {
    std::vector<Tensor> dy;
    for (const Tensor& gradient : gradients) {
      if (gradient.defined()) dy.push_back(gradient);
    }
    if (dy.empty()) return {Tensor(), Tensor()};
    if (dy.size() == 1) return {dy[0], Tensor()};
    AutogradContext* producer = producer_of_input();
    if (producer == nullptr) return {sum_of(dy), Tensor()};
    const Tensor first = dy[0];
    dy.erase(dy.begin());
    Branches::leave(*producer, dy);
    return {first, Tensor()};
  }

 private:
  // The batch_norm_act that made x, where nobody but it looks at x's gradient in this pass.
  static AutogradContext* producer_of_input() {
    if (at::GradMode::is_enabled()) return nullptr;
    const auto self = torch::autograd::get_current_node();
    const auto& edge = self->next_edge(0);
    auto* node = dynamic_cast<Node*>(&*edge.function);
    // (On another stream the branches' memory could be given away while it is read.)
    if (node == nullptr || node->stream() != self->stream() || !node->pre_hooks().empty() ||
        !node->tensor_pre_hooks().empty() || !node->retains_grad_hooks().empty())
      return nullptr;
    const auto* tasks = torch::autograd::get_current_graph_task_exec_info();
    if (tasks != nullptr) {
      const auto found = tasks->find(node);
      if (found != tasks->end() && found->second.captures_) return nullptr;
    }
    return &node->ctx_;
  }
};

std::vector<Tensor> fork(const Tensor& x, int64_t n) {
  TORCH_CHECK_VALUE(n >= 1, "fork makes n >= 1 aliases of a tensor; n is ", n);
  return Fork::apply(x, n);
}

#define AMPFUSE_LIBRARY(name, library) TORCH_LIBRARY(name, library)
#define AMPFUSE_KERNELS(name, key, library) TORCH_LIBRARY_IMPL(name, key, library)

AMPFUSE_LIBRARY(AMPFUSE_NAMESPACE, library) {
  library.def(
      "batch_norm_act(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, bool training, float momentum, "
      "float eps, bool relu) -> Tensor",
      batch_norm_act);
  library.def("fork(Tensor(a) x, int n) -> Tensor(a)[]", fork);
  library.def("batch_norm_moments(Tensor x) -> (Tensor, Tensor)");
  library.def(
      "batch_norm_statistics(Tensor x, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
      "float momentum, float eps) -> (Tensor, Tensor)");
  library.def(
      "batch_norm_apply(Tensor x, Tensor? residual, Tensor mean, Tensor invstd, Tensor? weight, "
      "Tensor? bias, bool relu) -> (Tensor, Tensor)");
  library.def(
      "batch_norm_reduce(Tensor[] dy, Tensor x, Tensor mean, Tensor mask, bool keep) -> (Tensor, "
      "Tensor, Tensor)");
  library.def(
      "batch_norm_dx(Tensor dy, Tensor mask, Tensor x, Tensor mean, Tensor invstd, Tensor? weight, "
      "Tensor? sum_dy, Tensor? sum_dy_centered, SymInt count=1) -> Tensor");
  library.def(
      "batch_norm_reduce_into(Tensor[] dy, Tensor x, Tensor mean, Tensor mask, Tensor(a!) g) -> "
      "(Tensor, Tensor)");
  library.def(
      "batch_norm_dx_into(Tensor dy, Tensor mask, Tensor x, Tensor mean, Tensor invstd, "
      "Tensor? weight, Tensor? sum_dy, Tensor? sum_dy_centered, SymInt count, Tensor(a!) dx) -> "
      "()");
}

void add_kernels(torch::Library& library) {
  library.impl("batch_norm_moments", moments_pass);
  library.impl("batch_norm_statistics", statistics_pass);
  library.impl("batch_norm_apply", apply_pass);
  library.impl("batch_norm_reduce", reduce_pass);
  library.impl("batch_norm_dx", dx_pass);
  library.impl("batch_norm_reduce_into", reduce_into_pass);
  library.impl("batch_norm_dx_into", dx_into_pass);
}
AMPFUSE_KERNELS(AMPFUSE_NAMESPACE, CPU, library) { add_kernels(library); }
AMPFUSE_KERNELS(AMPFUSE_NAMESPACE, CUDA, library) { add_kernels(library); }
AMPFUSE_KERNELS(AMPFUSE_NAMESPACE, Meta, library) { add_kernels(library); }

}  // namespace

SavedTensor::SavedTensor(const at::Tensor& tensor) {
  const auto& producer = tensor.grad_fn();
  auto* node = dynamic_cast<Node*>(producer.get());
  if (node != nullptr && !node->ctx_.saved_data["residual"].toBool()) {
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
