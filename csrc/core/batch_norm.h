// Batch normalization of images in channels-last memory, with the residual addition and the ReLU
// that follow it in convolutional nets: a matrix of `rows` (batch x height x width) by `channels`.
//
//   forward    mean, var = over the rows of x
//              y = relu((x - mean) * weight / sqrt(var + eps) + bias + residual)
//   backward   g = the sum of the gradients dy of all that used y, where y > 0: the residual's
//              gradient
//              dx = weight / sqrt(var + eps) * (g - mean(g) - x_hat * mean(g * x_hat))
//
// (Ioffe & Szegedy 2015. Fused like this by cuDNN, MXNet's BatchNormAddRelu and apex's groupbn.)
//
// Bytes moved per element of half precision, the floor of each pass: moments 2; apply 4, 6 with a
// residual, and 1 bit of mask instead of the output that autograd would keep for the ReLU; reduce
// 4, and for a residual or several dy 2 more of each, as g is then written for the next pass; dx 6.
// Layers that fit into a cache take the second read of x and dy from there.
//
// Sums are those of reduce.h's idea: one order for every backend, thread count and vector width. A
// tile of kTileRows is added in FP32, row after row; the tiles of a span, one after another, in
// FP32; spans by kRowLanes strided lanes and halving, in double. Values are taken from a shift, the
// span's first row, so that nothing cancels where the mean is large against the deviation: since
// the shift is one of the n values, at most the digits of n are lost (Chan, Golub & LeVeque 1983).
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/hd.h"
#include "core/reduce.h"
#include "core/scalar.h"

namespace ampfuse {

constexpr int kTileRows = 32;
constexpr int kSpanTiles = 16;
constexpr int kSpanRows = kTileRows * kSpanTiles;

HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct ImageRows {
  int64_t rows = 0, channels = 0;
  DType dtype = DType::kNone;

  HD int64_t spans() const { return ceil_div(rows, kSpanRows); }
  // Of a mask: a bit for each channel, a row's in whole bytes.
  HD int64_t mask_bytes() const { return ceil_div(channels, 8); }
  HD int64_t row_bytes() const { return channels * element_size(dtype); }
};

// What one span adds to a channel: of x - shift and its square.
struct MomentSums {
  float shift, sum, squares;
};
// ... of g and g * (x - mean).
struct GradientSums {
  float sum, centered;
};

// The running statistics and what later passes need of the variance; null pointers are left out.
struct Statistics {
  float* mean;    // [channels]
  float* var;     // biased
  float* invstd;  // 1 / sqrt(var + eps)
  float* running_mean;
  float* running_var;  // unbiased
  float momentum, eps;
};

struct MomentArgs {
  ImageRows image;
  const void* x;
  MomentSums* partials;  // [channels][spans]
  Statistics statistics;
};

struct ApplyArgs {
  ImageRows image;
  const void* x;
  const void* residual;  // may be null
  void* y;
  uint8_t* mask;  // [rows][mask_bytes]; null: no ReLU
  const float *mean, *invstd;
  const float *weight, *bias;  // may be null
};

struct ReduceArgs {
  static constexpr int kMaxBranches = 8;
  ImageRows image;
  const void* dy[kMaxBranches];
  int branches;
  const uint8_t* mask;  // null: no ReLU
  const void* x;
  const float* mean;
  void* g;                 // rounded to the dtype; null where it is dy under the mask
  GradientSums* partials;  // [channels][spans]
  float *sum, *centered;   // [channels]
};

struct InputGradientArgs {
  ImageRows image;
  const void* dy;
  const uint8_t* mask;  // null: dy is g
  const void* x;
  void* dx;
  const float *mean, *invstd;
  const float* weight;  // may be null
  // Over all values; null where statistics are frozen, dx = weight * invstd * g.
  const float *sum_dy, *sum_centered;
  float inverse_count;
};

HD float first_finite(float value) { return value - value == 0.0f ? value : 0.0f; }

// ---- elementwise, for floats and SIMD values alike ----

template <class F>
HD F normalize(F x, F mean, F scale, F bias) {
  return fma(x - mean, scale, bias);
}

template <class F>
HD F input_gradient_of(F g, F x, F mean, F scale, F mean_dy, F slope) {
  return fma(mean - x, slope, g - mean_dy) * scale;
}

// ---- per channel ----

HD float scale_of(const float* weight, const float* invstd, int64_t c) {
  return weight ? weight[c] * invstd[c] : invstd[c];
}

HD float bias_of(const float* bias, int64_t c) { return bias ? bias[c] : 0.0f; }

HD float mean_dy_of(const InputGradientArgs& args, int64_t c) {
  return args.sum_dy[c] * args.inverse_count;
}

HD float slope_of(const InputGradientArgs& args, int64_t c) {
  return args.sum_centered[c] * args.inverse_count * (args.invstd[c] * args.invstd[c]);
}

// The rows of a span.
HD double rows_of(const ImageRows& image, int64_t span) {
  const int64_t rest = image.rows - span * kSpanRows;
  return double(rest < kSpanRows ? rest : kSpanRows);
}

HD double sum_of(const ImageRows& image, const MomentSums& part, int64_t span) {
  return rows_of(image, span) * double(part.shift) + double(part.sum);
}

// Squared deviations of one span's values from the mean over all.
HD double deviation_of(const ImageRows& image, const MomentSums& part, int64_t span, double mean) {
  const double rows = rows_of(image, span);
  const double within = double(part.squares) - double(part.sum) * double(part.sum) / rows;
  const double apart = double(part.shift) + double(part.sum) / rows - mean;
  return within + rows * (apart * apart);
}

HD void write_statistics(const Statistics& s, int64_t c, double mean, double deviations,
                         int64_t rows) {
  const double var = deviations / double(rows);
  s.mean[c] = float(mean);
  if (s.var) s.var[c] = float(var);
  if (s.invstd) s.invstd[c] = float(1.0 / square_root(var + double(s.eps)));
  if (s.running_mean) {
    const float unbiased = float(deviations / double(rows - 1));
    s.running_mean[c] = (1.0f - s.momentum) * s.running_mean[c] + s.momentum * float(mean);
    s.running_var[c] = (1.0f - s.momentum) * s.running_var[c] + s.momentum * unbiased;
  }
}

// What a backend does; all pointers are the device's, and nothing waits for it.
class BatchNorm {
 public:
  virtual ~BatchNorm() = default;
  virtual void moments(const MomentArgs& args, void* stream) = 0;
  virtual void apply(const ApplyArgs& args, void* stream) = 0;
  virtual void reduce(const ReduceArgs& args, void* stream) = 0;
  virtual void input_gradient(const InputGradientArgs& args, void* stream) = 0;
};

}  // namespace ampfuse
