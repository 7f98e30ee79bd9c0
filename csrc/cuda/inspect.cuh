// One read of every gradient: non-finite flag, sum of squares, first offending row, norms of rows.
// The last block to finish adds the partials up and, if the step follows at once, prepares it.
#pragma once

#include "measure.cuh"

namespace ampfuse {

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

// Decides the step, then advances the rows; by one block, whose barrier orders the one before the
// other. Each thread takes neighbouring rows, which mostly share their coefficients.
__device__ inline void prepare_by_block(const TableView& view, const Preparation& preparation) {
  if (threadIdx.x == 0) decide_step(*preparation.state, preparation.decision);
  __syncthreads();
  const int64_t share = (view.rows + blockDim.x - 1) / blockDim.x;
  const int64_t begin = threadIdx.x * share, end = begin + share;
  advance_rows(view, preparation, begin, end < view.rows ? end : view.rows);
}

template <unsigned kMissing>
__global__ void __launch_bounds__(kLanes, kMissing != 0 ? 4 : 2)
    inspect_kernel(TableView view, InspectArgs args, unsigned* tickets) {
  const RowNorms rows{args.row_norms, args.row_largest};
  if (rows.wanted()) finish_empty_rows(view, 1, rows);
  if (blockIdx.x < view.chunk_count) {  // a table without elements has one block and no chunk
    measure_chunk<InspectOp<>, kMissing>(view, inverse_scale(args), args.fresh);
    if (rows.wanted()) finish_row(view, 1, rows, tickets);
  }
  if (!arrives_last(tickets + view.rows, gridDim.x)) return;

  const double sum = sum_partials_by_block(view.partials, view.chunk_count);
  const BadRow bad = find_bad_row(view);
  if (threadIdx.x == 0) {
    if (args.state != nullptr) {
      record_inspection(*args.state, sum, bad.row, bad.bits, args.same_pass);
    }
    if (args.found_inf != nullptr && bad.row >= 0) *args.found_inf = 1;
    if (args.norm != nullptr) *args.norm = norm_of(sum);
  }
  if (args.preparation.state != nullptr) prepare_by_block(view, args.preparation);
}

// `present`: lists that some row of the table has.
inline void inspect(const TableView& view, unsigned present, const InspectArgs& args,
                    unsigned* tickets, cudaStream_t stream) {
  const int64_t blocks = view.chunk_count > 0 ? view.chunk_count : 1;
  constexpr unsigned kRare = bit(kAccumulated) | bit(kGradOut);
  const auto kernel = present & kRare ? inspect_kernel<0> : inspect_kernel<kRare>;
  launch(Kernel{"inspect", kernel}, blocks, kLanes, stream, view, args, tickets);
}

}  // namespace ampfuse
