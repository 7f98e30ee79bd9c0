// A convolution of channels-last images is a product of two matrices: the patch of x under each
// output pixel, (batch x height x width) rows by (kernel x channels), and the weight. oneDNN's
// convolution first reorders the weight, and later its gradient back; over few rows that takes as
// long as the product and longer. The product is used where it was measured to be faster. Both add
// in FP32 and round once.
//
// The gradient of x is such a product for kernels of 1 x 1 without padding. Patches of larger ones
// may overlap, and several values would be rounded before they are added: torch computes it.
//
// (In FP32 torch's convolution is faster.)

#include "half_conv.h"

#include <ATen/ops/_convolution_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/convolution_backward_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/sum_cpu_dispatch.h>

#include <algorithm>

namespace ampfuse {
namespace {

using at::Tensor;
using Sizes = c10::SymIntArrayRef;

const at::MemoryFormat kChannelsLast = at::MemoryFormat::ChannelsLast;

// The most rows over which the product is faster: with a 1x1 kernel, whose rows are x itself; with
// others as many as there are filters, but no fewer or more than these.
constexpr int64_t kPointwiseRows = 2048;
constexpr int64_t kLeastRows = 256, kMostRows = 512;
constexpr int64_t kMaxKernel = 9;  // rows take that many times the memory of x

// One of the two dimensions of an image.
struct Side {
  int64_t size, kernel, stride, padding, dilation;

  Side(int i, const Tensor& x, const Tensor& weight, Sizes strides, Sizes paddings, Sizes dilations)
      : size(x.size(2 + i)),
        kernel(weight.size(2 + i)),
        stride(at(strides, i)),
        padding(at(paddings, i)),
        dilation(at(dilations, i)) {}

  bool is_valid() const {
    return stride > 0 && padding >= 0 && dilation > 0 && size + 2 * padding >= extent();
  }
  int64_t out() const { return (size + 2 * padding - extent()) / stride + 1; }
  bool is_pointwise() const { return kernel == 1 && padding == 0; }

 private:
  int64_t extent() const { return dilation * (kernel - 1) + 1; }
  static int64_t at(Sizes values, int i) { return values[values.size() == 1 ? 0 : i].expect_int(); }
};

class Product {
 public:
  // None if torch's convolution is the only way.
  static std::optional<Product> of(const Tensor& x, const Tensor& weight, Sizes stride,
                                   Sizes padding, Sizes dilation, bool transposed,
                                   const c10::SymInt& groups) {
    if (x.scalar_type() != at::kBFloat16 || weight.scalar_type() != at::kBFloat16 || x.dim() != 4 ||
        weight.dim() != 4 || x.numel() == 0 || weight.numel() == 0 || transposed || groups != 1 ||
        x.size(1) != weight.size(1) || !x.is_contiguous(kChannelsLast))
      return std::nullopt;
    const Side h(0, x, weight, stride, padding, dilation);
    const Side w(1, x, weight, stride, padding, dilation);
    if (!h.is_valid() || !w.is_valid() || h.kernel * w.kernel > kMaxKernel) return std::nullopt;
    return Product(x, weight, h, w);
  }

  bool forward_is_faster() const {
    return rows() <= few_rows() && weight_.is_contiguous(kChannelsLast);
  }
  bool input_gradient_is_faster() const { return rows() <= few_rows() && is_pointwise(); }
  bool weight_gradient_is_faster() const {
    return rows() <= (is_pointwise() ? few_rows() : 2 * few_rows());
  }

  bool is_bias(const std::optional<Tensor>& bias) const {
    return !bias || !bias->defined() ||
           (bias->scalar_type() == at::kBFloat16 && bias->sizes() == weight_.sizes().slice(0, 1));
  }
  bool is_output(const Tensor& y) const {
    return y.scalar_type() == at::kBFloat16 && y.sizes() == output_shape();
  }

  // A row for each output pixel of y, or of its gradient.
  Tensor rows_of(const Tensor& y) const { return as_matrix(y, rows()); }

  Tensor forward(const std::optional<Tensor>& bias) const {
    const Tensor weight = weights().t();
    const Tensor product = bias && bias->defined() ? at::cpu::addmm(*bias, matrix(), weight)
                                                   : at::cpu::mm(matrix(), weight);
    return as_image(product, output_shape());
  }

  // Gradients from g, the rows of y's.
  Tensor input_gradient(const Tensor& g) const {
    const Tensor product = at::cpu::mm(g, weights());
    if (h_.stride * w_.stride == 1) return as_image(product, x_.sizes());
    Tensor dx = at::zeros_like(x_, x_.options(), format());
    Tensor part = seen(dx);
    part.copy_(product.view(part.sizes()));
    return dx;
  }
  Tensor weight_gradient(const Tensor& g) const {
    return as_image(at::cpu::mm(g.t(), matrix()), weight_.sizes());
  }

 private:
  Product(const Tensor& x, const Tensor& weight, Side h, Side w)
      : x_(x), weight_(weight), h_(h), w_(w) {}

  // The strides of the results, as torch has them.
  at::MemoryFormat format() const {
    return x_.suggest_memory_format() == kChannelsLast ||
                   weight_.suggest_memory_format() == kChannelsLast
               ? kChannelsLast
               : at::MemoryFormat::Contiguous;
  }
  bool is_pointwise() const { return h_.is_pointwise() && w_.is_pointwise(); }
  int64_t few_rows() const {
    return is_pointwise() ? kPointwiseRows : std::clamp(weight_.size(0), kLeastRows, kMostRows);
  }
  int64_t rows() const { return x_.size(0) * h_.out() * w_.out(); }
  std::array<int64_t, 4> output_shape() const {
    return {x_.size(0), weight_.size(0), h_.out(), w_.out()};
  }

  static Tensor as_matrix(const Tensor& image, int64_t rows) {
    return image.permute({0, 2, 3, 1}).reshape({rows, -1});
  }
  Tensor as_image(const Tensor& matrix, at::IntArrayRef shape) const {
    const Tensor image = matrix.view({shape[0], shape[2], shape[3], shape[1]});
    return image.permute({0, 3, 1, 2}).contiguous(format());
  }

  // [filters][kernel x channels]
  Tensor weights() const { return as_matrix(weight_, weight_.size(0)); }

  // [rows][kernel x channels]
  Tensor matrix() const {
    const bool pads = h_.padding + w_.padding > 0;
    const Tensor padded =
        pads ? at::constant_pad_nd(x_, {w_.padding, w_.padding, h_.padding, h_.padding}) : x_;
    return seen(padded).reshape({rows(), -1});
  }

  // [N][out][out][kernel][kernel][channels], of an image with its padding.
  Tensor seen(const Tensor& image) const {
    const at::IntArrayRef step = image.strides();
    return image.as_strided({x_.size(0), h_.out(), w_.out(), h_.kernel, w_.kernel, x_.size(1)},
                            {step[0], step[2] * h_.stride, step[3] * w_.stride,
                             step[2] * h_.dilation, step[3] * w_.dilation, step[1]});
  }

  Tensor x_, weight_;
  Side h_, w_;
};

}  // namespace

Tensor small_convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                         Sizes stride, Sizes padding, Sizes dilation, bool transposed,
                         Sizes output_padding, c10::SymInt groups, bool benchmark,
                         bool deterministic, bool cudnn_enabled, bool allow_tf32) {
  const auto product = Product::of(x, weight, stride, padding, dilation, transposed, groups);
  if (product && product->is_bias(bias) && product->forward_is_faster())
    return product->forward(bias);
  return at::compositeexplicitautograd::_convolution_symint(
      x, weight, bias, stride, padding, dilation, transposed, output_padding, std::move(groups),
      benchmark, deterministic, cudnn_enabled, allow_tf32);
}

std::tuple<Tensor, Tensor, Tensor> small_convolution_backward(
    const Tensor& dy, const Tensor& x, const Tensor& weight, at::OptionalSymIntArrayRef bias_sizes,
    Sizes stride, Sizes padding, Sizes dilation, bool transposed, Sizes output_padding,
    c10::SymInt groups, std::array<bool, 3> output_mask) {
  auto [to_x, to_weight, to_bias] = output_mask;
  Tensor dx, dweight, dbias;
  const auto product = Product::of(x, weight, stride, padding, dilation, transposed, groups);
  const bool fits = product && product->is_output(dy);
  const bool input_here = fits && to_x && product->input_gradient_is_faster();
  const bool weight_here = fits && to_weight && product->weight_gradient_is_faster();
  if (input_here || weight_here) {
    const Tensor g = product->rows_of(dy);  // a copy where dy is not channels-last
    if (input_here) {
      dx = product->input_gradient(g);
      to_x = false;
    }
    if (weight_here) {
      dweight = product->weight_gradient(g);
      if (to_bias) dbias = at::cpu::sum(g, {0});
      to_weight = to_bias = false;
    }
  }
  if (to_x || to_weight || to_bias) {
    auto torchs = at::compositeexplicitautograd::convolution_backward_symint(
        dy, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding,
        std::move(groups), {to_x, to_weight, to_bias});
    if (to_x) dx = std::get<0>(torchs);
    if (to_weight) dweight = std::get<1>(torchs);
    if (to_bias) dbias = std::get<2>(torchs);
  }
  return {dx, dweight, dbias};
}

}  // namespace ampfuse
