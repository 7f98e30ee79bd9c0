// One read of every gradient: non-finite flag, sum of squares, first offending row. One block per
// chunk leaves a partial in the table; the last block to finish adds the partials up. See reduce.h
// for the order of the sums.
#pragma once

#include "../backend.h"
#include "apply.cuh"
#include "block_reduce.cuh"

namespace ampfuse {

// The gradient of one row's chunk, and where its unscaled values go.
struct GradientColumns {
  Column grad, accumulated, out;
  float inv_scale;
};

// Adds the squares of n elements, each times `rescale`, in the thread's virtual lanes. Returns the
// thread's share of the sum; `largest` receives the largest magnitude of the unscaled values. With
// kPlain there is nothing but the gradient to read.
template <bool kPlain>
__device__ float add_squares(const GradientColumns& columns, bool write, int n, float rescale,
                             uint32_t& largest) {
  // Tiles whose loads are in flight together. One 16-byte load per thread is too little to fill a
  // GPU's memory pipeline: an H200 needs about 23 KB in flight per multiprocessor.
  constexpr int kTilesInFlight = kPlain ? 4 : 2;
  float lane[kPack] = {};
  for (int start = threadIdx.x * kPack; start < n; start += kTilesInFlight * kTile) {
    Pack grad[kTilesInFlight], accumulated[kTilesInFlight];
#pragma unroll
    for (int tile = 0; tile < kTilesInFlight; ++tile) {
      const int i = start + tile * kTile;
      const int count = n - i < kPack ? n - i : kPack;  // zero or less past the end: loads nothing
      grad[tile] = load_pack(columns.grad, i, count);
      if (!kPlain) accumulated[tile] = load_pack(columns.accumulated, i, count);
    }
#pragma unroll
    for (int tile = 0; tile < kTilesInFlight; ++tile) {
      const int i = start + tile * kTile;
      const int count = n - i < kPack ? n - i : kPack;
      float value[kPack], pending[kPack] = {};
      widen(grad[tile], columns.grad.dtype, value);
      if (!kPlain) widen(accumulated[tile], columns.accumulated.dtype, pending);
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        value[k] = unscaled_gradient(value[k], pending[k], columns.inv_scale);
        const uint32_t magnitude = float_bits(value[k]) & 0x7fffffffu;
        if (magnitude > largest) largest = magnitude;
        const float square = value[k] * rescale;
        lane[k] = fma(square, square, lane[k]);
      }
      if (!kPlain && write) {
        store_pack(columns.out, i, count, narrow(value, columns.out.dtype));
      }
    }
  }
  return sum_pack(lane);
}

// The chunk's partial, in thread 0.
template <bool kPlain>
__device__ Partial inspect_chunk(const TableView& view, const Chunk& chunk, float inv_scale) {
  const int64_t first = chunk.index * kChunk;
  const int64_t rest = view.numel[chunk.row] - first;
  const int n = rest < kChunk ? int(rest) : int(kChunk);
  GradientColumns columns;
  columns.grad = Column(view, kGrad, chunk.row, first);
  if (!kPlain) columns.accumulated = Column(view, kAccumulated, chunk.row, first);
  if (!kPlain) columns.out = Column(view, kGradOut, chunk.row, first);
  columns.inv_scale = view.scaled[chunk.row] ? inv_scale : 1.0f;
  const bool write = columns.out.dtype != DType::kNone;

  uint32_t largest = 0;
  double sum = block_sum(add_squares<kPlain>(columns, write, n, 1.0f, largest));
  largest = block_broadcast(block_max(largest));
  int exponent = 0;
  if (needs_rescaling(largest)) {
    // A gradient that is rewritten in place is read once only: its rescaled sum comes from what was
    // written.
    if (write) columns = {columns.out, Column(), Column(), 1.0f};
    exponent = rescaling_exponent(largest);
    uint32_t unused = 0;
    sum = block_sum(add_squares<kPlain>(columns, false, n, float(power_of_two(-exponent)), unused));
  }
  return make_partial(sum, exponent, largest);
}

// Partials were written by other blocks: read them past the L1 cache.
__device__ inline double load_sum(const Partial& partial) { return __ldcg(&partial.sum_squares); }
__device__ inline uint32_t load_largest(const Partial& partial) { return __ldcg(&partial.largest); }

// The order of sum_partials<kLanes>, by a block. Thread 0 receives the sum.
__device__ inline double sum_partials_by_block(const Partial* partials, int64_t count) {
  double sum = 0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < count; i += kLanes) sum += load_sum(partials[i]);
  return block_sum(sum);
}

struct BadRow {
  int32_t row;    // -1: every gradient is finite
  uint32_t bits;  // of its largest element
};

// The first row with a non-finite gradient, in thread 0.
__device__ inline BadRow find_bad_row(const TableView& view) {
  uint32_t first = UINT32_MAX;  // chunk
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < view.chunk_count; i += kLanes) {
    if (load_largest(view.partials[i]) >= kInfinityBits && uint32_t(i) < first) first = uint32_t(i);
  }
  first = ~block_broadcast(block_max(~first));
  if (first == UINT32_MAX) return {-1, 0};
  const int32_t row = view.chunks[first].row;
  uint32_t bits = 0;
  for (int64_t i = first + threadIdx.x; i < view.first_chunk[row + 1]; i += kLanes) {
    const uint32_t largest = load_largest(view.partials[i]);
    if (largest > bits) bits = largest;
  }
  return {row, block_max(bits)};
}

// True in every thread of the one block that arrives last, when all others have written what they
// write. The ticket is zero again afterwards.
__device__ inline bool arrives_last(unsigned* ticket) {
  unsigned arrived = 0;
  if (threadIdx.x == 0) {
    __threadfence();
    arrived = atomicInc(ticket, gridDim.x - 1);
    __threadfence();
  }
  return block_broadcast(arrived) == gridDim.x - 1;
}

template <bool kPlain>
__global__ void __launch_bounds__(kLanes)
    inspect_kernel(TableView view, InspectArgs args, unsigned* ticket) {
  if (blockIdx.x < view.chunk_count) {  // a table without elements has one block and no chunk
    const Chunk chunk = view.chunks[blockIdx.x];
    Partial partial = {0.0, 0};
    if (view.has_gradient(chunk.row))
      partial = inspect_chunk<kPlain>(view, chunk, inverse_scale(args));
    if (threadIdx.x == 0) view.partials[blockIdx.x] = partial;
  }
  if (!arrives_last(ticket)) return;

  const double sum = sum_partials_by_block(view.partials, view.chunk_count);
  const BadRow bad = find_bad_row(view);
  if (threadIdx.x != 0) return;
  if (args.state != nullptr) record_inspection(*args.state, sum, bad.row, bad.bits);
  if (args.found_inf != nullptr && bad.row >= 0) *args.found_inf = 1;
  if (args.norm != nullptr) *args.norm = norm_of(sum);
}

// After inspect_kernel: the norm of each row, by a warp. The order of sum_partials<kRowLanes>.
__global__ void __launch_bounds__(kLanes) row_norms_kernel(TableView view, float* row_norms) {
  const int64_t row = (int64_t(blockIdx.x) * kLanes + threadIdx.x) / kRowLanes;
  if (row >= view.rows) return;
  const int lane = threadIdx.x % kRowLanes;
  double sum = 0;
  for (int64_t i = view.first_chunk[row] + lane; i < view.first_chunk[row + 1]; i += kRowLanes) {
    sum += view.partials[i].sum_squares;
  }
  sum = warp_sum(sum);
  if (lane == 0) row_norms[row] = norm_of(sum);
}

// `present`: lists that some row of the table has.
inline void inspect(const TableView& view, unsigned present, const InspectArgs& args,
                    unsigned* ticket, cudaStream_t stream) {
  const int64_t blocks = view.chunk_count > 0 ? view.chunk_count : 1;
  const bool plain = !(present & (bit(kAccumulated) | bit(kGradOut)));
  const auto kernel = plain ? inspect_kernel<true> : inspect_kernel<false>;
  launch(Kernel{"inspect", kernel}, blocks, kLanes, stream, view, args, ticket);
  if (args.row_norms == nullptr || view.rows == 0) return;
  constexpr int64_t kRows = kLanes / kRowLanes;  // per block
  launch(Kernel{"row_norms", row_norms_kernel}, (view.rows + kRows - 1) / kRows, kLanes, stream,
         view, args.row_norms);
}

}  // namespace ampfuse
