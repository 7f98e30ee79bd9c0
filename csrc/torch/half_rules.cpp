// Autocast's rules for the CPU as torch has them for GPUs.
//
// torch's own for the CPU lack most of what runs in FP32 on a GPU (softmax, norms, powers, sums),
// leave recurrent layers in mixed types and allow binary_cross_entropy. The lists are torch's:
// its header has those from which it makes the rules for GPUs.

#include <ATen/autocast_mode.h>

#include "half_ops.h"

namespace ampfuse {
namespace {

// oneDNN has no LSTM in FP16 ("could not create a primitive descriptor"): it is computed in FP32.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm(const at::Tensor& input, at::TensorList hx,
                                                    at::TensorList params, bool has_biases,
                                                    int64_t num_layers, double dropout, bool train,
                                                    bool bidirectional, bool batch_first) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
  const at::ScalarType type = at::autocast::get_autocast_dtype(at::kCPU);
  const auto cast = [](at::ScalarType to, const auto& from) {
    return at::autocast::cached_cast(to, from, at::kCPU);
  };
  const at::ScalarType within = type == at::kHalf ? at::kFloat : type;
  const auto [output, h, c] =
      at::lstm(cast(within, input), cast(within, hx), cast(within, params), has_biases, num_layers,
               dropout, train, bidirectional, batch_first);
  return {cast(type, output), cast(type, h), cast(type, c)};
}

// Raises what torch raises on a GPU.
at::Tensor binary_cross_entropy(const at::Tensor& input, const at::Tensor& target,
                                const std::optional<at::Tensor>& weight, int64_t reduction) {
  const c10::DispatchKeySet on_gpu(c10::DispatchKey::AutocastCUDA);
  return at::_ops::binary_cross_entropy::redispatch(on_gpu, input, target, weight, reduction);
}

torch::Library* rules = nullptr;  // left alone at exit, when torch may be gone

}  // namespace

bool autocast_rules() { return rules; }

void set_autocast_rules(bool on) {
  if (on == autocast_rules()) return;
  delete rules;  // and with it its registrations
  rules = nullptr;
  if (!on) return;
  rules = new MAKE_TORCH_LIBRARY_IMPL(aten, AutocastCPU);
  torch::Library& m = *rules;  // so torch's macros call it, and types by their names alone
  using namespace at;
  Unwarned some_replace_rules;
// torch's macros call m.impl(name, pointer). This makes it m.impl(name, TORCH_FN(pointer)), so that
// the kernel is a type, and no object that dies with the library (see half_ops.cpp).
#define impl(name, ...) impl(name, TORCH_FN((__VA_ARGS__)))
#define AMPFUSE_HALF(...) KERNEL_CPU(__VA_ARGS__, lower_precision_fp)
#define AMPFUSE_FLOAT(...) KERNEL_CPU(__VA_ARGS__, fp32)
#define AMPFUSE_FLOAT_RESULT(...) KERNEL_CPU(__VA_ARGS__, fp32_set_opt_dtype)
#define AMPFUSE_WIDEST(...) KERNEL_CPU(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(AMPFUSE_HALF)
  AT_FORALL_FP32(AMPFUSE_FLOAT)
  AT_FORALL_FP32_SET_OPT_DTYPE(AMPFUSE_FLOAT_RESULT)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_CPU)
  AT_FORALL_PROMOTE(AMPFUSE_WIDEST)
  m.impl("binary_cross_entropy", binary_cross_entropy);
  // On a GPU the rule is cuDNN's.
  m.impl("lstm.input", lstm);
  AMPFUSE_HALF(lstm, data)
  AMPFUSE_HALF(gru, input)
  AMPFUSE_HALF(gru, data)
  AMPFUSE_HALF(rnn_tanh, input)
  AMPFUSE_HALF(rnn_tanh, data)
  AMPFUSE_HALF(rnn_relu, input)
  AMPFUSE_HALF(rnn_relu, data)
#undef impl
}

}  // namespace ampfuse
