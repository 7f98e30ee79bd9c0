// From torch's tensors to the passes of fused layers (core/nn_ops/nn_op.h): checks of what a pass
// is given, memory for what it makes, and the call, of the backend or through the dispatcher.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <utility>

#include "core/nn_ops.h"
#include "torch/memory.h"
#include "torch/torch_backend.h"

// A process may load the module a second time, with the emulated backend.
#if defined(AMPFUSE_EMULATE_CUDA)
#define AMPFUSE_NAMESPACE ampfuse_emulated
#define AMPFUSE_OP(name) "ampfuse_emulated::" name
#else
#define AMPFUSE_NAMESPACE ampfuse
#define AMPFUSE_OP(name) "ampfuse::" name
#endif
// (TORCH_LIBRARY itself does not expand the name.)
#define AMPFUSE_LIBRARY(name, library) TORCH_LIBRARY(name, library)
#define AMPFUSE_LIBRARY_FRAGMENT(name, library) TORCH_LIBRARY_FRAGMENT(name, library)
#define AMPFUSE_KERNELS(name, key, library) TORCH_LIBRARY_IMPL(name, key, library)

namespace ampfuse {

using OptionalTensor = std::optional<at::Tensor>;

inline bool given(const OptionalTensor& tensor) { return tensor && tensor->defined(); }
inline OptionalTensor optional(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// Of tensors whose memory is another's, or nobody's.
const c10::DispatchKeySet kWrappers({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                     c10::DispatchKey::FuncTorchBatched,
                                     c10::DispatchKey::FuncTorchGradWrapper});

constexpr at::MemoryFormat kChannelsLast = at::MemoryFormat::ChannelsLast;

inline at::Tensor nothing(const at::Tensor& x, at::ScalarType dtype) {
  return at::empty({0}, x.options().dtype(dtype));
}
inline at::Tensor empty_vector(const at::Tensor& x) {
  return at::empty_symint({x.sym_size(1)}, x.options().dtype(at::kFloat));
}
inline at::Tensor empty_mask(const at::Tensor& x) {
  return at::empty_symint({x.sym_size(0), x.sym_size(2), x.sym_size(3), (x.sym_size(1) + 7) / 8},
                          x.options().dtype(at::kByte));
}

// The arguments of an op on images like x.
class PassArgs {
 public:
  explicit PassArgs(const at::Tensor& x) : x_(x) {
    TORCH_CHECK_VALUE(
        x.dim() == 4 && x.is_contiguous(kChannelsLast),
        "x has to be a dense tensor (N, C, H, W) in torch.channels_last; it has shape ", x.sizes(),
        " and strides ", x.strides());
    args_.image = {x.numel() / x.size(1), x.size(1), dtype_of(x, "x")};
  }

  PassArgs& image(int place, const at::Tensor& tensor, const char* name) {
    TORCH_CHECK_VALUE(
        tensor.sizes() == x_.sizes() && tensor.is_contiguous(kChannelsLast) &&
            tensor.scalar_type() == x_.scalar_type() && tensor.device() == x_.device(),
        name, " has to be like x, ", x_.scalar_type(), " of shape ", x_.sizes(),
        " in torch.channels_last on ", x_.device(), "; it is ", tensor.scalar_type(), " of shape ",
        tensor.sizes(), " with strides ", tensor.strides(), " on ", tensor.device());
    args_.images[place] = const_cast<void*>(tensor.const_data_ptr());
    return *this;
  }

  // A value for each channel; nothing if there is no tensor.
  PassArgs& vector(int place, const OptionalTensor& tensor, const char* name) {
    float* data = float_pointer(tensor, name, x_.device());
    TORCH_CHECK_VALUE(data == nullptr || (tensor->numel() == x_.size(1) && tensor->is_contiguous()),
                      name, " has to hold a contiguous value for each of ", x_.size(1),
                      " channels; it has shape ", tensor ? tensor->sizes() : at::IntArrayRef());
    args_.vectors[place] = data;
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
                          mask.numel() == args_.image.rows * args_.image.mask_bytes(),
                      "mask has to be what the forward pass returned for x");
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
    scope.backend().run(nn_op<Op>(), args_, scope.stream());
  }

 private:
  const at::Tensor& x_;
  NnArgs args_;
};

// Calls an operator, made of the function `pass`, through the dispatcher, so that whatever traces
// sees it.
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

}  // namespace ampfuse
