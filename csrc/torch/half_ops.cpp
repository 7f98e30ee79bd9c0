// Operations that torch computes slowly in half precision on the CPU, in FP32 and rounded instead.
//
// torch has no fast kernel for the backward pass of an FP16 convolution: it falls back to oneDNN's
// reference, 170 times slower than FP32. On a CPU without instructions for a half type,
// convolutions and matrix products of that type go through scalar loops too, up to 350 times
// slower.
//
// Once set_half_ops has registered them, the kernels below replace torch's on the CPU. They widen
// half arguments to FP32, call torch's own kernel, and round the result once, as tensor cores do.
// The CPU dispatch key lies below autograd and autocast, so both work as before, and CUDA tensors
// never come here. All types that are not slow go to torch's kernel unchanged, BF16 convolutions by
// way of half_conv.h and BF16 attention by way of half_attention.h. An operation belongs here if it
// makes a whole step of benchmarks/nets.py 3 % faster.

#include "half_ops.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/addmv_cpu_dispatch.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include <optional>
#include <tuple>

#include "half_attention.h"
#include "half_conv.h"

namespace ampfuse {
namespace {

// ---- which half types this CPU computes fast ----

bool torch_says(const char* question) {
  auto op = c10::Dispatcher::singleton().findSchema({question, ""});
  return op && op->typed<bool()>().call();
}

}  // namespace

bool fast_bf16() {
  static const bool fast = [] {
    if (!torch_says("mkldnn::_is_mkldnn_bf16_supported")) return false;
#if defined(__x86_64__)
    // With AVX-512 but without its BF16 instructions, oneDNN emulates them: 4 to 5 times slower
    // than FP32.
    if (__builtin_cpu_supports("avx512f") && !__builtin_cpu_supports("avx512bf16")) return false;
#endif
    return true;
  }();
  return fast;
}

namespace {

bool fast_fp16() {
  static const bool fast = torch_says("mkldnn::_is_mkldnn_fp16_supported");
  return fast;
}

// The rules: is torch's own kernel slow for this dtype?
bool products_slow(at::ScalarType type) {
  return (type == at::kHalf && !fast_fp16()) || (type == at::kBFloat16 && !fast_bf16());
}
bool convolution_backward_slow(at::ScalarType type) {
  return type == at::kHalf || products_slow(type);
}
bool any_half_slow(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

// ---- the stand-in, made from torch's own kernel ----

// Finds the dtype that all tensors among the arguments share. A mixture is left to torch.
struct SharedType {
  std::optional<at::ScalarType> type;
  bool mixed = false;

  void see(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    mixed |= type && *type != tensor.scalar_type();
    type = tensor.scalar_type();
  }
  void see(const std::optional<at::Tensor>& tensor) {
    if (tensor) see(*tensor);
  }
  template <typename Other>
  void see(const Other&) {}
};

// Keeps strides, so channels_last stays channels_last; an undefined tensor stays undefined.
at::Tensor cast(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.defined() ? tensor.to(type) : tensor;
}

at::Tensor widen(const at::Tensor& tensor) { return cast(tensor, at::kFloat); }
std::optional<at::Tensor> widen(const std::optional<at::Tensor>& tensor) {
  if (!tensor) return std::nullopt;
  return widen(*tensor);
}
template <typename Other>
const Other& widen(const Other& argument) {
  return argument;
}

template <typename... Tensors>
std::tuple<Tensors...> cast(const std::tuple<Tensors...>& tensors, at::ScalarType type) {
  return std::apply([&](const auto&... t) { return std::make_tuple(cast(t, type)...); }, tensors);
}

// A kernel with the signature of `original`, for the dispatcher.
template <auto original, bool slow(at::ScalarType)>
struct InFloat;

template <typename Result, typename... Args, Result (*original)(Args...), bool slow(at::ScalarType)>
struct InFloat<original, slow> {
  static Result call(Args... args) {
    SharedType shared;
    (shared.see(args), ...);
    if (!shared.type || shared.mixed || !slow(*shared.type)) return original(args...);
    // In a backward pass inside an autocast region, the casts would turn what torch's kernel calls
    // to half again.
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return cast(original(widen(args)...), *shared.type);
  }
};

// The registrations. A kernel is a type here, not an object with a pointer: a thread that computes
// while torch's table changes finds one kernel or the other.
struct Kernels {
  const bool every;
  torch::Library cpu = MAKE_TORCH_LIBRARY_IMPL(aten, CPU);

  explicit Kernels(bool every_type) : every(every_type) {
    // Convolutions (all come to _convolution) have one kernel for all backends and none for the
    // CPU: these replace nothing.
    add<small_convolution_backward, convolution_backward_slow>("convolution_backward");
    add<small_convolution, products_slow>("_convolution");

    Unwarned these_replace_kernels;
    cpu.impl("_scaled_dot_product_flash_attention_for_cpu", TORCH_FN(tiled_attention));
    cpu.impl("_scaled_dot_product_flash_attention_for_cpu_backward",
             TORCH_FN(tiled_attention_backward));
    if (fast_fp16() && fast_bf16() && !every) return;
    add<at::cpu::mm, products_slow>("mm");
    add<at::cpu::addmm, products_slow>("addmm");
    add<at::cpu::addmv, products_slow>("addmv");
    add<at::cpu::bmm, products_slow>("bmm");
    add<at::cpu::baddbmm, products_slow>("baddbmm");
  }

 private:
  template <auto original, bool slow(at::ScalarType)>
  void add(const char* name) {
    if (every) {
      cpu.impl(name, TORCH_FN((InFloat<original, any_half_slow>::call)));
    } else {
      cpu.impl(name, TORCH_FN((InFloat<original, slow>::call)));
    }
  }
};

Kernels* registered = nullptr;  // left alone at exit, when torch may be gone

}  // namespace

bool half_ops() { return registered; }

void set_half_ops(bool on, bool every) {
  if (registered ? on && registered->every == every : !on) return;
  delete registered;  // and with it its registrations
  registered = on ? new Kernels(every) : nullptr;
}

}  // namespace ampfuse
