// The kernels of attention.h for one instruction set.
#pragma once

#include "attention.h"
#include "core/exponent.h"
#include "row_kernels.h"

namespace ampfuse {
namespace {

constexpr DType kFloats = DType::kFloat32, kHalf = DType::kBFloat16;

// A value for each of 16 lanes of a row: lane l takes the columns l, l + 16 and so on, whatever the
// width of a vector.
template <class F>
struct RowOf16 {
  static constexpr int kVectors = 16 / F::kWidth;
  F value[kVectors];

  HD explicit RowOf16(float start) {
    for (F& x : value) x = F(start);
  }
  HD F& at(int64_t column) { return value[column / F::kWidth % kVectors]; }
  // run(lane) for each, in order.
  template <class Run>
  HD void each(const Run& run) const {
    alignas(64) float lanes[16];
    for (int v = 0; v < kVectors; ++v) store_vector(value[v], lanes, kFloats, v * F::kWidth);
    for (float lane : lanes) run(lane);
  }
  HD float sum() const {
    float total = 0;
    each([&](float lane) HD_LAMBDA { total += lane; });
    return total;
  }
};

HD void clear(uint16_t* data, int64_t begin, int64_t end) {
  for (int64_t c = begin; c < end; ++c) data[c] = 0;
}

}  // namespace

template <class F>
void AttentionKernel<F>::softmax(const ScoreRows& block, const float* scores, uint16_t* p,
                                 float* lse, float* inverse) {
  const F scale(block.scale);
  for (int64_t row = 0; row < block.rows; ++row, scores += block.stride, p += block.stride) {
    const int64_t end = block.end(row);
    RowOf16<F> highest(-__builtin_inff());
    for_vectors<F>(end, [&](int64_t c, int count, auto whole) HD_LAMBDA {
      const uint32_t bits = column_bits<whole, F>(0, count);
      F x = load_vector<F, whole>(scores, kFloats, c, count) * scale;
      if constexpr (!whole) x = keep(bits, x) + keep(~bits, F(-__builtin_inff()));
      highest.at(c) = max_nan(highest.at(c), x);
    });
    float max = -__builtin_inff();
    highest.each([&](float lane) HD_LAMBDA { max = max_nan(max, lane); });
    RowOf16<F> sums(0);
    for_vectors<F>(end, [&](int64_t c, int count, auto whole) HD_LAMBDA {
      const F x = load_vector<F, whole>(scores, kFloats, c, count);
      const F power = exponential(fma(x, scale, F(-max)));
      store_vector<whole>(power, p, kHalf, c, count);
      sums.at(c) = sums.at(c) + keep(column_bits<whole, F>(0, count), power);
    });
    const float sum = sums.sum();
    clear(p, end, block.padded);
    inverse[row] = 1.0f / sum;
    lse[row] = float(double(max) + logarithm(double(sum)));
  }
}

template <class F>
void AttentionKernel<F>::gradient(const ScoreRows& block, const float* scores, const float* dp,
                                  const float* lse, const float* delta, uint16_t* p, uint16_t* ds) {
  const F scale(block.scale);
  for (int64_t row = 0; row < block.rows; ++row) {
    for_vectors<F>(block.columns, [&](int64_t c, int count, auto whole) HD_LAMBDA {
      const auto at = [&](const float* data)
                          HD_LAMBDA { return load_vector<F, whole>(data, kFloats, c, count); };
      const F power = exponential(at(scores) * scale - at(lse));
      store_vector<whole>(power, p, kHalf, c, count);
      store_vector<whole>(power * (at(dp) - at(delta)) * scale, ds, kHalf, c, count);
    });
    uint16_t* const written[] = {p, ds};
    for (uint16_t* const data : written) {
      clear(data, 0, block.begin(row));
      clear(data, block.columns, block.padded);
    }
    scores += block.stride, dp += block.stride, p += block.stride, ds += block.stride;
  }
}

template <class F>
void AttentionKernel<F>::narrow(const float* x, float factor, int64_t count, uint16_t* y) {
  for_vectors<F>(count, [&](int64_t c, int lanes, auto whole) HD_LAMBDA {
    store_vector<whole>(load_vector<F, whole>(x, kFloats, c, lanes) * F(factor), y, kHalf, c,
                        lanes);
  });
}

template <class F>
float AttentionKernel<F>::dot(const uint16_t* x, const uint16_t* y, int64_t count) {
  RowOf16<F> sums(0);
  for_vectors<F>(count, [&](int64_t c, int lanes, auto whole) HD_LAMBDA {
    const F product =
        load_vector<F, whole>(x, kHalf, c, lanes) * load_vector<F, whole>(y, kHalf, c, lanes);
    sums.at(c) = sums.at(c) + keep(column_bits<whole, F>(0, lanes), product);
  });
  return sums.sum();
}

}  // namespace ampfuse
