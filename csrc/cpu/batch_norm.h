// The CPU's kernels of batch normalization: what one thread does with a part of the matrix.
#pragma once

#include "core/batch_norm.h"
#include "isa.h"

namespace ampfuse {

// [begin, end) are rows, or at most kTaskChannels channels.
constexpr int kTaskChannels = 512;

// scale = weight * invstd, bias and slope (see core/batch_norm.h), of every channel.
struct ChannelCoefs {
  const float *mean, *scale, *bias, *mean_dy, *slope;
};

// Arguments are values: what a reference leads to is read again after every store to an image,
// which could have changed it.
template <class Isa>
struct BatchNormKernels {
  static void moments(MomentArgs args, int64_t span, int64_t begin, int64_t end);
  static void reduce(ReduceArgs args, int64_t span, int64_t begin, int64_t end);
  static void apply(ApplyArgs args, ChannelCoefs coefs, int64_t begin, int64_t end);
  static void input_gradient(InputGradientArgs args, ChannelCoefs coefs, int64_t begin,
                             int64_t end);
};

BatchNorm& cpu_batch_norm();

}  // namespace ampfuse
