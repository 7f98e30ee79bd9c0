// The CPU's kernels of fused layers: one for each op and instruction set, in a translation unit of
// its own. nn_kernels.cpp defines what is declared here, for the ops that AMPFUSE_OPS lists, and is
// compiled once for each header of core/nn_ops and instruction set.
#pragma once

#include "core/nn_ops/nn_op.h"
#include "isa.h"

namespace ampfuse {

constexpr int kMaskChannels = 16;  // channels whose mask bits are handled at a time: a group

// The coefficients of all channels, coef k of channel c at k * coef_stride() + c; zero past them.
HD constexpr int64_t coef_stride(const ImageRows& image) {
  return ceil_div(image.channels, kMaskChannels) * kMaskChannels;
}

// The work of one thread on a part of the matrix.
template <class Isa, class Op>
struct NnKernel {
  // (`args` is passed by value: through a reference it would be read again after every store to an
  // image, which could have changed it.)
  static void map(NnArgs args, const float* coefs, int64_t begin, int64_t end);  // rows
  // Whole tiles of a span, whose first sums go to sums[c], the second to sums[coef_stride() + c];
  // tile_sums is as large.
  static void sum(NnArgs args, const float* coefs, int64_t begin, int64_t end, float* tile_sums,
                  float* sums);
  // In row_kernels.h.
  static void row_sum(NnArgs args, int64_t begin, int64_t end);
  static void row_map(NnArgs args, int64_t begin, int64_t end);
  // affine: the weights of all columns, and from coef_stride() on the biases.
  static void row_pass(NnArgs args, const float* affine, int64_t begin, int64_t end);
};

void run_nn(NnOp op, const NnArgs& args);

}  // namespace ampfuse
