// An LSTM under FP16 autocast on the CPU, which torch itself cannot run.
//
// CPU autocast casts oneDNN's recurrent layer to its type, and oneDNN has none in FP16: an FP32
// LSTM raises "could not create a primitive descriptor". The kernel below stands in for the whole
// operation under autocast. In FP16 it computes in FP32, which is what CPU autocast does with a
// GRU; the result is FP32 then. In any other type the operation goes on as it came.

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include <tuple>
#include <vector>

#include "half_ops.h"

namespace ampfuse {
namespace {

using Result = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

std::vector<at::Tensor> widen(at::TensorList tensors) {
  std::vector<at::Tensor> wide;
  for (const at::Tensor& tensor : tensors) wide.push_back(tensor.to(at::kFloat));
  return wide;
}

Result lstm(c10::DispatchKeySet keys, const at::Tensor& input, at::TensorList hx,
            at::TensorList params, bool has_biases, int64_t num_layers, double dropout, bool train,
            bool bidirectional, bool batch_first) {
  if (at::autocast::get_autocast_dtype(at::kCPU) != at::kHalf) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("aten::lstm", "input")
                               .typed<Result(const at::Tensor&, at::TensorList, at::TensorList,
                                             bool, int64_t, double, bool, bool, bool)>();
    // Past this kernel only: autocast stays on for the operations inside.
    const c10::DispatchKeySet after(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::AutocastCPU);
    return op.redispatch(keys & after, input, hx, params, has_biases, num_layers, dropout, train,
                         bidirectional, batch_first);
  }
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
  return at::lstm(input.to(at::kFloat), widen(hx), widen(params), has_biases, num_layers, dropout,
                  train, bidirectional, batch_first);
}

}  // namespace

void add_half_lstm(torch::Library& autocast) { autocast.impl("lstm.input", TORCH_FN(lstm)); }

}  // namespace ampfuse
