// One read of every gradient: non-finite flag, sum of squares, first offending row. The last block
// to finish adds the partials up.
#pragma once

#include "measure.cuh"

namespace ampfuse {

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

template <unsigned kMissing>
__global__ void __launch_bounds__(kLanes, kMissing != 0 ? 4 : 1)
    inspect_kernel(TableView view, InspectArgs args, unsigned* ticket) {
  if (blockIdx.x < view.chunk_count) {  // a table without elements has one block and no chunk
    measure_chunk<InspectOp<>, kMissing>(view, inverse_scale(args));
  }
  if (!arrives_last(ticket)) return;

  const double sum = sum_partials_by_block(view.partials, view.chunk_count);
  const BadRow bad = find_bad_row(view);
  if (threadIdx.x != 0) return;
  if (args.state != nullptr) {
    record_inspection(*args.state, sum, bad.row, bad.bits, args.same_pass);
  }
  if (args.found_inf != nullptr && bad.row >= 0) *args.found_inf = 1;
  if (args.norm != nullptr) *args.norm = norm_of(sum);
}

// `present`: lists that some row of the table has.
inline void inspect(const TableView& view, unsigned present, const InspectArgs& args,
                    unsigned* ticket, cudaStream_t stream) {
  const int64_t blocks = view.chunk_count > 0 ? view.chunk_count : 1;
  constexpr unsigned kRare = bit(kAccumulated) | bit(kGradOut);
  const auto kernel = present & kRare ? inspect_kernel<0> : inspect_kernel<kRare>;
  launch(Kernel{"inspect", kernel}, blocks, kLanes, stream, view, args, ticket);
  add_rows(view, 1, args.row_norms, args.row_largest, stream);
}

}  // namespace ampfuse
