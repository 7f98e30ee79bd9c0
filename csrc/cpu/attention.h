// The elementwise parts of attention on the CPU, one kernel for each instruction set.
// attention_<isa>.cpp defines what is declared here.
//
// Scores are q k^T in FP32, without the scale. Results that the next product reads are BF16.
#pragma once

#include <cstdint>

#include "core/hd.h"
#include "isa.h"

namespace ampfuse {

// A block of scores. In a row, the columns [begin(row), end(row)) count.
struct ScoreRows {
  int64_t rows, columns;
  int64_t padded;  // columns of the results; columns that do not count are zero
  int64_t stride;  // of all matrices here
  float scale;
  // The first column (kFrom) or the last one (kUpTo) of row 0; each row starts or ends one later.
  enum class Causal { kNo, kUpTo, kFrom } causal;
  int64_t diagonal;

  HD int64_t begin(int64_t row) const {
    return causal == Causal::kFrom ? bounded(diagonal + row) : 0;
  }
  HD int64_t end(int64_t row) const {
    return causal == Causal::kUpTo ? bounded(diagonal + row + 1) : columns;
  }

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

template <class Isa>
constexpr AttentionKernels attention_kernels_of() {
  using Kernel = AttentionKernel<Isa>;
  return {&Kernel::softmax, &Kernel::gradient, &Kernel::narrow, &Kernel::dot};
}

}  // namespace ampfuse
