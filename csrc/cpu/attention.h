// The elementwise parts of attention on the CPU, one kernel for each instruction set.
// attention_kernels.cpp defines what is declared here.
//
// Scores are q k^T in FP32, without the scale. Results that the next product reads are BF16.
#pragma once

#include <cstdint>

#include "core/hd.h"
#include "isa.h"

namespace ampfuse {

// A block of scores.
struct ScoreRows {
  int64_t rows, columns;
  int64_t padded;  // columns of the results; columns that do not count are zero
  int64_t stride;  // of all matrices here
  float scale;
  bool is_causal;
  int64_t diagonal;  // the column of row 0 where query and key are the same token

  // Rows are queries: the columns of a row that count end here.
  HD int64_t end(int64_t query) const {
    return is_causal ? bounded(diagonal + query + 1) : columns;
  }
  // Rows are keys: the columns of a row that count begin here.
  HD int64_t begin(int64_t key) const { return is_causal ? bounded(diagonal + key) : 0; }

 private:
  HD int64_t bounded(int64_t column) const {
    return column < 0 ? 0 : column < columns ? column : columns;
  }
};

template <class Isa>
struct AttentionKernel {
  // p = e^(scale score - max) of each row; `lse` is the logarithm of a row's sum of e^(scale
  // score), `inverse` one over its sum of p.
  static void softmax(const ScoreRows& rows, const float* scores, uint16_t* p, float* lse,
                      float* inverse);
  // The same of a block that is transposed, a query for each column, and its gradient
  // scale p (dp - delta).
  static void gradient(const ScoreRows& rows, const float* scores, const float* dp,
                       const float* lse, const float* delta, uint16_t* p, uint16_t* ds);
  // y = factor x of one row in BF16.
  static void narrow(const float* x, float factor, int64_t count, uint16_t* y);
  // The sum of x y of two rows in BF16.
  static float dot(const uint16_t* x, const uint16_t* y, int64_t count);
};

// The kernels of the instruction set that runs.
struct AttentionKernels {
  decltype(&AttentionKernel<Scalar>::softmax) softmax;
  decltype(&AttentionKernel<Scalar>::gradient) gradient;
  decltype(&AttentionKernel<Scalar>::narrow) narrow;
  decltype(&AttentionKernel<Scalar>::dot) dot;
};
AMPFUSE_API AttentionKernels attention_kernels();

}  // namespace ampfuse
