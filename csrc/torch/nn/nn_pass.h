// From torch's tensors to the passes of fused layers (core/nn_ops/nn_op.h): checks of a pass's
// arguments, memory for its results, and the call, to the backend or through the dispatcher.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/nn_ops.h"
#include "torch/memory.h"
#include "torch/torch_backend.h"

// A process may load the module a second time, with the emulated backend.
#if defined(AMPFUSE_EMULATE_CUDA)
#define AMPFUSE_NAMESPACE ampfuse_emulated
inline constexpr char kOperators[] = "ampfuse_emulated::";
#else
#define AMPFUSE_NAMESPACE ampfuse
inline constexpr char kOperators[] = "ampfuse::";
#endif
// (TORCH_LIBRARY itself does not expand the name.)
#define AMPFUSE_LIBRARY(name, library) TORCH_LIBRARY(name, library)
#define AMPFUSE_LIBRARY_FRAGMENT(name, library) TORCH_LIBRARY_FRAGMENT(name, library)

namespace ampfuse {

using OptionalTensor = std::optional<at::Tensor>;

inline bool is_given(const OptionalTensor& tensor) { return tensor && tensor->defined(); }
inline OptionalTensor optional(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}
inline OptionalTensor contiguous(const OptionalTensor& tensor,
                                 at::MemoryFormat format = at::MemoryFormat::Contiguous) {
  return is_given(tensor) ? OptionalTensor(tensor->contiguous(format)) : std::nullopt;
}
// The type in which torch's operations compute what the kernels do not: at least FP32.
inline at::ScalarType compute_type(const at::Tensor& x) {
  return at::isReducedFloatingType(x.scalar_type()) ? at::kFloat : x.scalar_type();
}

// For tensors whose memory belongs to another tensor, or that have none.
const c10::DispatchKeySet kWrappers({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                     c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched,
                                     c10::DispatchKey::FuncTorchGradWrapper});

constexpr at::MemoryFormat kChannelsLast = at::MemoryFormat::ChannelsLast;

// Whether a gradient has no other owner and its memory no other tensor, as torch's AccumulateGrad
// asks before it takes a gradient over. Results are then written over it: in lines that the cache
// has, and in pages that need not be allocated.
inline bool may_overwrite_gradient(const at::Tensor& gradient) {
  // (Tracers expect new tensors.)
  return !c10::impl::TorchDispatchModeTLS::any_modes_set() && gradient.use_count() == 1 &&
         !gradient.key_set().has_any(kWrappers) && gradient.storage().use_count() == 1;
}

// Whether the kernels take tensors like x at all.
inline bool is_supported(const at::Tensor& x) {
  const at::ScalarType type = x.scalar_type();
  return (type == at::kFloat || type == at::kHalf || type == at::kBFloat16) &&
         (x.is_cpu() || x.is_cuda() || x.is_meta()) && x.sym_numel() != 0;
}
inline bool match_in_type_and_shape(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device() &&
         a.sym_sizes() == b.sym_sizes();
}
// As is_supported(), for weights of the columns of x: FP32 or of the type of x.
inline bool fits_as_affine(const OptionalTensor& tensor, const at::Tensor& x,
                           at::IntArrayRef shape) {
  return !is_given(tensor) ||
         ((tensor->scalar_type() == at::kFloat || tensor->scalar_type() == x.scalar_type()) &&
          tensor->device() == x.device() && tensor->sizes() == shape && tensor->is_contiguous());
}

inline at::Tensor empty_placeholder(const at::Tensor& x, at::ScalarType dtype) {
  return at::empty({0}, x.options().dtype(dtype));
}
inline at::Tensor empty_floats(const at::Tensor& x, const c10::SymInt& count) {
  return at::empty_symint({count}, x.options().dtype(at::kFloat));
}
inline at::Tensor empty_vector(const at::Tensor& x) { return empty_floats(x, x.sym_size(1)); }
inline at::Tensor empty_mask(const at::Tensor& x) {
  return at::empty_symint({x.sym_size(0), x.sym_size(2), x.sym_size(3), (x.sym_size(1) + 7) / 8},
                          x.options().dtype(at::kByte));
}

// The arguments of an op on a matrix; a channel of an image is a column.
class PassArgs {
 public:
  explicit PassArgs(const at::Tensor& images)
      : PassArgs(images, images.dim() == 4 ? images.size(1) : 1, kChannelsLast) {}
  PassArgs(const at::Tensor& x, int64_t columns,
           at::MemoryFormat format = at::MemoryFormat::Contiguous)
      : x_(x), format_(format) {
    TORCH_CHECK_VALUE(x.is_contiguous(format),
                      format == kChannelsLast
                          ? "x must be a dense tensor (N, C, H, W) in torch.channels_last"
                          : "x must be contiguous",
                      "; it has shape ", x.sizes(), " and strides ", x.strides());
    TORCH_CHECK_VALUE(columns > 0, "x has no columns to work on; its shape is ", x.sizes());
    TORCH_CHECK_VALUE(x.numel() % columns == 0, "x of shape ", x.sizes(), " has no rows of ",
                      columns, " columns");
    args_.image = {x.numel() / columns, columns, dtype_of(x, "x")};
  }

  PassArgs& image(int place, const at::Tensor& tensor, const char* name) {
    TORCH_CHECK_VALUE(
        tensor.sizes() == x_.sizes() && tensor.is_contiguous(format_) &&
            tensor.scalar_type() == x_.scalar_type() && tensor.device() == x_.device(),
        name, " must match x, ", x_.scalar_type(), " of shape ", x_.sizes(), " in ", format_,
        " memory on ", x_.device(), "; it is ", tensor.scalar_type(), " of shape ", tensor.sizes(),
        " with strides ", tensor.strides(), " on ", tensor.device());
    args_.images[place] = checked_memory(tensor.const_data_ptr(), tensor, name);
    return *this;
  }
  PassArgs& image(int place, const OptionalTensor& tensor, const char* name) {
    return is_given(tensor) ? image(place, *tensor, name) : *this;
  }

  // A value for each column; nothing if there is no tensor.
  PassArgs& vector(int place, const OptionalTensor& tensor, const char* name) {
    if (is_given(tensor)) args_.vectors[place] = floats(*tensor, name, args_.image.channels);
    return *this;
  }
  // `each` values for each row.
  PassArgs& row_vector(int place, const at::Tensor& tensor, const char* name, int64_t each = 1) {
    args_.vectors[place] = floats(tensor, name, each * args_.image.rows);
    return *this;
  }
  // One value; nothing if there is no tensor.
  PassArgs& scalar(int place, const OptionalTensor& tensor, const char* name) {
    if (is_given(tensor)) args_.vectors[place] = floats(*tensor, name, 1);
    return *this;
  }
  // The class of each row. Rows of class `ignored` do not count.
  PassArgs& targets(const at::Tensor& tensor, int64_t ignored) {
    args_.targets = pointer_to<int64_t>(tensor, "target", args_.image.rows, x_.device());
    args_.ignored = ignored;
    return *this;
  }

  // The count of batches; nothing if there is no tensor.
  PassArgs& batches(const OptionalTensor& count) {
    if (is_given(count))
      args_.batches = pointer_to<int64_t>(*count, "num_batches_tracked", 1, x_.device());
    return *this;
  }

  // Weight and bias of one type; either may be absent, or have no elements.
  PassArgs& affine(const OptionalTensor& weight, const OptionalTensor& bias) {
    args_.affine.weight = of_columns(weight, "weight");
    args_.affine.bias = of_columns(bias, "bias");
    TORCH_CHECK_TYPE(args_.affine.weight == nullptr || args_.affine.bias == nullptr ||
                         weight->scalar_type() == bias->scalar_type(),
                     "weight is ", weight->scalar_type(), " and bias ", bias->scalar_type(),
                     "; they must be of one type");
    return *this;
  }

  PassArgs& number(int place, double value) {
    args_.numbers[place] = float(value);
    return *this;
  }

  // None if it has no elements.
  PassArgs& mask(const at::Tensor& mask) {
    if (mask.numel() == 0) return *this;
    TORCH_CHECK_VALUE(mask.scalar_type() == at::kByte && mask.is_contiguous() &&
                          mask.device() == x_.device() &&
                          mask.numel() == args_.image.rows * args_.image.mask_bytes(),
                      "mask must be what the forward pass returned for x");
    args_.mask = mask.data_ptr<uint8_t>();
    return *this;
  }

  template <class Op>
  void run() {
    const DeviceScope scope(x_.device());
    at::Tensor partials;
    if constexpr (Op::kKind == PassKind::kChannelSum) {
      const int64_t count = args_.image.channels * args_.image.spans();
      partials =
          at::empty({count * int64_t(sizeof(typename Op::Partial))}, x_.options().dtype(at::kByte));
      args_.partials = partials.data_ptr();
    }
    scope.backend().run(NnOp::of<Op>(), args_, scope.stream());
  }

 private:
  float* floats(const at::Tensor& tensor, const char* name, int64_t count) const {
    return pointer_to<float>(tensor, name, count, x_.device());
  }

  void* of_columns(const OptionalTensor& tensor, const char* name) {
    if (!is_given(tensor) || tensor->numel() == 0) return nullptr;
    TORCH_CHECK_VALUE(tensor->is_contiguous() && tensor->numel() == args_.image.channels &&
                          tensor->device() == x_.device(),
                      name, " must hold a contiguous value for each of ", args_.image.channels,
                      " columns on ", x_.device(), ", got shape ", tensor->sizes(), " on ",
                      tensor->device());
    args_.affine.dtype = dtype_of(*tensor, name);
    return checked_memory(tensor->const_data_ptr(), *tensor, name);
  }

  const at::Tensor& x_;
  at::MemoryFormat format_;
  NnArgs args_;
};

// For create_graph: the gradients of compute(inputs), which is made of torch's operations, that
// torch differentiates once more; undefined where an input wants none.
template <class Compute>
torch::autograd::variable_list differentiable_gradients(const std::vector<OptionalTensor>& inputs,
                                                        const at::Tensor& dy,
                                                        const Compute& compute) {
  std::vector<OptionalTensor> views = inputs;
  torch::autograd::variable_list wanted;
  // Differentiates with respect to views of the inputs. torch.autograd.grad stops at a view. At the
  // inputs it would go on through their history, which contains the node that runs now.
  for (OptionalTensor& view : views) {
    if (!is_given(view) || !view->requires_grad()) continue;
    view = view->view_as(*view);
    wanted.push_back(*view);
  }
  const auto found = torch::autograd::grad({compute(views)}, wanted, {dy}, true, true);
  torch::autograd::variable_list result(inputs.size());
  auto next = found.begin();
  for (size_t i = 0; i < inputs.size(); ++i)
    if (is_given(inputs[i]) && inputs[i]->requires_grad()) result[i] = *next++;
  return result;
}

// Calls the operator that define<pass>() made, through the dispatcher, so that whatever traces sees
// it.
template <auto pass>
struct Call;

template <class Result, class... Args, Result (*pass)(Args...)>
struct Call<pass> {
  static inline std::string_view name;

  static Result of(Args... args) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow((kOperators + std::string(name)).c_str(), "")
                               .typed<Result(Args...)>();
    return op.call(std::forward<Args>(args)...);
  }
};

// Makes an operator whose kernels are the function `pass`, the same for all devices.
template <auto pass>
void define(torch::Library& library, const char* schema) {
  library.def(schema);
  Call<pass>::name = std::string_view(schema).substr(0, std::string_view(schema).find('('));
  for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::Meta})
    library.impl(std::string(Call<pass>::name).c_str(), key, pass);
}

}  // namespace ampfuse
