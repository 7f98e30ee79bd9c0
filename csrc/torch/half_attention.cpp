// Attention by the algorithm of FlashAttention-2 (Dao 2023): the scores of one block at a time, in
// FP32. The backward pass computes them again from the saved logarithms of the sums. torch's kernel
// multiplies blocks of 32 to 64 queries by calls of oneDNN's matrix product, and starting a call
// takes about as long as its arithmetic. Here a block is a tile of oneDNN's small kernels
// ("brgemm"). They read their second factor in a packed order, which is made once for each head.
//
// One thread handles each head of each sequence. The backward pass walks along the keys with
// transposed scores, so the gradients of keys and values are products of rows.

#include "half_attention.h"

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_cpu_dispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_cpu_dispatch.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "cpu/attention.h"
#include "half_ops.h"

namespace ampfuse {
namespace {

using at::Tensor;
using Bits = uint16_t;  // of a BF16 value

constexpr int64_t kTile = 64;       // columns of a tile, and rows of a block
constexpr int64_t kBlock = 256;     // columns of a block of the backward pass
constexpr int64_t kMaxWidth = 256;  // of a head
constexpr Bits kZeros[kTile] = {};

int64_t even(int64_t count) { return count + count % 2; }
int64_t tiles(int64_t count) { return (count + kTile - 1) / kTile; }

template <class T>
std::unique_ptr<T[]> buffer(int64_t count) {
  return std::unique_ptr<T[]>(new T[count]);
}

// Where a head begins in a tensor of (batch, heads, ...).
int64_t offset_of(const Tensor& tensor, int64_t head) {
  const int64_t heads = tensor.size(1);
  return head / heads * tensor.stride(0) + head % heads * tensor.stride(1);
}

// The tokens of one head, one per row.
struct Rows {
  Bits* data;
  int64_t stride, count, width;

  Rows(const Tensor& tensor, int64_t head)
      : data(reinterpret_cast<Bits*>(tensor.data_ptr<at::BFloat16>()) + offset_of(tensor, head)),
        stride(tensor.stride(2)),
        count(tensor.size(2)),
        width(tensor.size(3)) {}
  Bits* row(int64_t i) const { return data + i * stride; }
};

// The second factor of products: tiles of 64 columns. In a tile, elements of two neighbouring rows
// alternate.
class Packed {
 public:
  Packed(int64_t rows, int64_t columns)
      : tile_size_(even(rows) * kTile), data_(buffer<Bits>(tile_size_ * tiles(columns))) {}

  // Packs the first `count` rows of a matrix.
  void rows_of(const Bits* from, int64_t stride, int64_t count, int64_t columns) {
    for (int64_t first = 0; first < columns; first += kTile) {
      const int64_t width = std::min(kTile, columns - first);
      for (int64_t row = 0; row < count; row += 2) {
        Bits* const to = tile(first) + row * kTile;
        const Bits* const even_row = from + row * stride + first;
        const Bits* const odd_row = row + 1 < count ? even_row + stride : kZeros;
        for (int64_t c = 0; c < width; ++c) to[2 * c] = even_row[c], to[2 * c + 1] = odd_row[c];
      }
    }
  }

  // Packs the transpose of `rows`, which have an even width.
  void transpose_of(const Rows& rows) {
    for (int64_t i = 0; i < rows.count; ++i) {
      Bits* const to = tile(i) + i % kTile * 2;
      const Bits* const from = rows.row(i);
      for (int64_t c = 0; c < rows.width; c += 2) {
        to[c * kTile] = from[c];
        to[c * kTile + 1] = from[c + 1];
      }
    }
  }

  // c = a b, or c += a b. b is rows [first_row, first_row + k) and columns [first, first + n) of
  // this matrix; k is even, first_row and first are multiples of kTile.
  void product(int64_t m, int64_t n, int64_t k, const Bits* a, int64_t a_stride, float* c,
               int64_t c_stride, bool add, int64_t first = 0, int64_t first_row = 0) const {
    for (int64_t j = 0; j < n; j += kTile)
      at::native::cpublas::brgemm(
          m, std::min(kTile, n - j), k, a_stride, kTile, c_stride, add,
          reinterpret_cast<const at::BFloat16*>(a),
          reinterpret_cast<const at::BFloat16*>(tile(first + j) + first_row * kTile), c + j);
  }

 private:
  Bits* tile(int64_t column) const { return data_.get() + column / kTile * tile_size_; }

  int64_t tile_size_;
  std::unique_ptr<Bits[]> data_;
};

float scale_of(const Tensor& query, const std::optional<double>& scale) {
  return float(scale.value_or(1.0 / std::sqrt(double(query.size(3)))));
}

struct Problem {
  AttentionKernels kernels = attention_kernels();
  float scale;
  bool is_causal;
};

// One head of a sequence: what goes in, and what comes out of the forward pass.
struct Head {
  Rows q, k, v, out;
  float* lse;  // of each query, the logarithm of its sum
  int64_t lse_stride;
};

Head head_of(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
             const Tensor& lse, int64_t head) {
  return {Rows(q, head),
          Rows(k, head),
          Rows(v, head),
          Rows(out, head),
          lse.data_ptr<float>() + offset_of(lse, head),
          lse.stride(2)};
}

struct HeadGradients {
  Rows out;      // given
  Rows q, k, v;  // to be computed
};

void forward_of(const Problem& problem, const Head& head) {
  const auto& [q, k, v, out, lse, lse_stride] = head;
  Packed keys(k.width, k.count), values(v.count, v.width);
  keys.transpose_of(k);
  values.rows_of(v.data, v.stride, v.count, v.width);
  const int64_t stride = even(k.count);
  const auto scores = buffer<float>(kTile * std::max(stride, v.width));
  const auto p = buffer<Bits>(kTile * stride);
  for (int64_t first = 0; first < q.count; first += kTile) {
    const int64_t rows = std::min(kTile, q.count - first);
    const int64_t columns = problem.is_causal ? std::min(k.count, first + rows) : k.count;
    const int64_t padded = even(columns);
    const ScoreRows block{rows, columns, padded, stride, problem.scale, problem.is_causal, first};
    keys.product(rows, columns, q.width, q.row(first), q.stride, scores.get(), stride, false);
    float sums[kTile], inverse[kTile];
    problem.kernels.softmax(block, scores.get(), p.get(), sums, inverse);
    values.product(rows, v.width, padded, p.get(), stride, scores.get(), v.width, false);
    for (int64_t row = 0; row < rows; ++row) {
      problem.kernels.narrow(scores.get() + row * v.width, inverse[row], v.width,
                             out.row(first + row));
      lse[(first + row) * lse_stride] = sums[row];
    }
  }
}

void backward_of(const Problem& problem, const Head& head, const HeadGradients& gradients) {
  const auto& [q, k, v, out, lse, lse_stride] = head;
  const auto& [grad, dq, dk, dv] = gradients;
  const int64_t queries = q.count, width = q.width;
  Packed qs(queries, width), qs_transposed(width, queries);
  Packed grads(queries, width), grads_transposed(width, queries);
  qs.rows_of(q.data, q.stride, queries, width);
  qs_transposed.transpose_of(q);
  grads.rows_of(grad.data, grad.stride, queries, width);
  grads_transposed.transpose_of(grad);
  const auto sums = buffer<float>(queries), delta = buffer<float>(queries);
  for (int64_t i = 0; i < queries; ++i) {
    sums[i] = lse[i * lse_stride];
    delta[i] = problem.kernels.dot(grad.row(i), out.row(i), width);
  }
  // The gradient of the queries is accumulated transposed.
  const auto dq_transposed = buffer<float>(width * queries);
  std::fill_n(dq_transposed.get(), width * queries, 0.0f);
  const auto scores = buffer<float>(kTile * kBlock), dp = buffer<float>(kTile * kBlock);
  const auto p = buffer<Bits>(kTile * kBlock), ds = buffer<Bits>(kTile * kBlock);
  const auto keys = buffer<Bits>(width * kTile);
  Packed ds_packed(kTile, kBlock);
  const auto dks = buffer<float>(kTile * width), dvs = buffer<float>(kTile * width);
  for (int64_t first = 0; first < k.count; first += kTile) {
    const int64_t rows = std::min(kTile, k.count - first);
    for (int64_t c = 0; c < width; ++c)
      for (int64_t row = 0; row < even(rows); ++row)
        keys[c * kTile + row] = row < rows ? k.row(first + row)[c] : Bits(0);
    const int64_t begin = problem.is_causal ? first : 0;
    for (int64_t column = begin; column < queries; column += kBlock) {
      const int64_t columns = std::min(kBlock, queries - column), padded = even(columns);
      const ScoreRows block{rows,          columns,           padded,        kBlock,
                            problem.scale, problem.is_causal, first - column};
      const bool add = column > begin;
      qs_transposed.product(rows, columns, width, k.row(first), k.stride, scores.get(), kBlock,
                            false, column);
      grads_transposed.product(rows, columns, width, v.row(first), v.stride, dp.get(), kBlock,
                               false, column);
      problem.kernels.gradient(block, scores.get(), dp.get(), &sums[column], &delta[column],
                               p.get(), ds.get());
      grads.product(rows, width, padded, p.get(), kBlock, dvs.get(), width, add, 0, column);
      qs.product(rows, width, padded, ds.get(), kBlock, dks.get(), width, add, 0, column);
      ds_packed.rows_of(ds.get(), kBlock, rows, columns);
      ds_packed.product(width, columns, even(rows), keys.get(), kTile, &dq_transposed[column],
                        queries, true);
    }
    for (int64_t row = 0; row < rows; ++row) {
      if (begin >= queries) {  // no query sees this key
        std::fill_n(dk.row(first + row), width, Bits(0));
        std::fill_n(dv.row(first + row), width, Bits(0));
        continue;
      }
      problem.kernels.narrow(&dks[row * width], 1.0f, width, dk.row(first + row));
      problem.kernels.narrow(&dvs[row * width], 1.0f, width, dv.row(first + row));
    }
  }
  const auto halves = buffer<Bits>(width * queries);
  problem.kernels.narrow(dq_transposed.get(), 1.0f, width * queries, halves.get());
  for (int64_t i = 0; i < queries; ++i)
    for (int64_t c = 0; c < width; ++c) dq.row(i)[c] = halves[c * queries + i];
}

// Whether oneDNN has small kernels for BF16 on this CPU. torch has no function that tells.
bool has_tiles() {
  static const bool has = [] {
    const Bits a[4] = {}, b[2 * kTile] = {};
    float c[2 * kTile];
    try {
      at::native::cpublas::brgemm(2, kTile, 2, 2, kTile, kTile, false,
                                  reinterpret_cast<const at::BFloat16*>(a),
                                  reinterpret_cast<const at::BFloat16*>(b), c);
      at::native::cpublas::brgemm_release();
    } catch (const c10::Error&) {
      return false;
    }
    return true;
  }();
  return has;
}

// Whether this file handles the case; torch's kernel handles all others.
bool is_ours(const Tensor& q, const Tensor& k, const Tensor& v, double dropout_p,
             const std::optional<Tensor>& mask) {
  const auto is_half = [](const Tensor& x) {
    return x.scalar_type() == at::kBFloat16 && x.dim() == 4 && x.numel() > 0;
  };
  if (!is_half(q) || !is_half(k) || !is_half(v) || dropout_p != 0.0 || (mask && mask->defined()))
    return false;
  const int64_t heads = q.size(0) * q.size(1), width = q.size(3);
  return k.sizes() == v.sizes() && q.size(0) == k.size(0) && q.size(1) == k.size(1) &&
         width == k.size(3) && width % 2 == 0 && width <= kMaxWidth &&
         heads >= at::get_num_threads() && at::globalContext().userEnabledMkldnn() && fast_bf16() &&
         has_tiles();
}

Tensor in_rows(const Tensor& x) { return x.stride(3) == 1 ? x : x.contiguous(); }

// An empty tensor of shape (batch, heads, tokens, width) in the memory order (batch, tokens, heads,
// width), as torch's gradients have it.
Tensor by_tokens(const Tensor& like) {
  return at::empty({like.size(0), like.size(2), like.size(1), like.size(3)}, like.options())
      .transpose(1, 2);
}

// Calls run(head) for each head of each sequence.
template <class Run>
void for_heads(const Tensor& q, const Run& run) {
  at::parallel_for(0, q.size(0) * q.size(1), 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) run(head);
    at::native::cpublas::brgemm_release();
  });
}

}  // namespace

std::tuple<Tensor, Tensor> tiled_attention(const Tensor& query, const Tensor& key,
                                           const Tensor& value, double dropout_p, bool is_causal,
                                           const std::optional<Tensor>& mask,
                                           std::optional<double> scale) {
  if (!is_ours(query, key, value, dropout_p, mask))
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p,
                                                                is_causal, mask, scale);
  const Tensor q = in_rows(query), k = in_rows(key), v = in_rows(value);
  const Tensor result = at::empty_like(query), out = in_rows(result);
  const Tensor lse =
      at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat)).transpose(1, 2);
  const Problem problem{.scale = scale_of(q, scale), .is_causal = is_causal};
  for_heads(q, [&](int64_t head) { forward_of(problem, head_of(q, k, v, out, lse, head)); });
  if (!out.is_same(result)) result.copy_(out);
  return {result, lse};
}

std::tuple<Tensor, Tensor, Tensor> tiled_attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& logsumexp, double dropout_p, bool is_causal,
    const std::optional<Tensor>& mask, std::optional<double> scale) {
  if (!is_ours(query, key, value, dropout_p, mask) || grad.scalar_type() != at::kBFloat16)
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, logsumexp, dropout_p, is_causal, mask, scale);
  const Tensor q = in_rows(query), k = in_rows(key), v = in_rows(value), y = in_rows(out),
               dy = in_rows(grad);
  const Tensor dq = by_tokens(q), dk = by_tokens(k), dv = by_tokens(v);
  const Problem problem{.scale = scale_of(q, scale), .is_causal = is_causal};
  for_heads(q, [&](int64_t head) {
    backward_of(problem, head_of(q, k, v, y, logsumexp, head),
                {Rows(dy, head), Rows(dq, head), Rows(dk, head), Rows(dv, head)});
  });
  return {dq, dk, dv};
}

}  // namespace ampfuse
