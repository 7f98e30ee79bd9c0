// Passes that measure: they run an op as apply.cuh does and take the norms of what it leaves in
// some lists. One block per chunk leaves a partial for each list in the table. See reduce.h for the
// order of the sums.
#pragma once

#include "../backend.h"
#include "apply.cuh"
#include "block_reduce.cuh"

namespace ampfuse {

// A thread's share of each measured list, in the order of the lists.
template <class Op>
struct Sums {
  static constexpr int kCount = count_lists(Op::kMeasured);
  float sum[kCount];
  uint32_t largest[kCount];
};

// Tiles whose loads are in flight together. One 16-byte load per thread is too little to fill a
// GPU's memory pipeline: an H200 needs about 23 KB in flight per multiprocessor.
HD constexpr int tiles_in_flight(unsigned reads) {
  return count_lists(reads) == 1 ? 4 : count_lists(reads) <= 3 ? 2 : 1;
}

// Runs the op on n elements and adds the squares of what it measures, each times `rescale`, in the
// thread's virtual lanes.
template <class Op, unsigned kMissing>
__device__ Sums<Op> add_squares(const Op& op, const Column (&columns)[kLists], int n,
                                const float* rescale) {
  constexpr unsigned kReads = Op::kReads & ~kMissing, kWrites = Op::kWrites & ~kMissing;
  constexpr int kTiles = tiles_in_flight(kReads);
  constexpr int kCount = Sums<Op>::kCount;
  float lane[kCount][kPack] = {};
  Sums<Op> sums = {};
  for (int start = threadIdx.x * kPack; start < n; start += kTiles * kTile) {
    Pack packs[kTiles][kLists];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int i = start + tile * kTile;
      const int count = n - i < kPack ? n - i : kPack;  // zero or less past the end: loads nothing
      load_packs<kReads>(columns, i, count, packs[tile]);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int i = start + tile * kTile;
      const int count = n - i < kPack ? n - i : kPack;
      float values[kLists][kPack] = {};
      widen_packs<kReads>(columns, packs[tile], values);
      run(op, values);
#pragma unroll
      for (int list = 0; list < kLists; ++list) {
        if (!(Op::kMeasured & bit(list))) continue;
        const int m = measure_of(Op::kMeasured, list);
        include(values[list], sums.largest[m]);
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
          const float square = values[list][k] * rescale[m];
          lane[m][k] = fma(square, square, lane[m][k]);
        }
      }
      store_packs<kWrites>(columns, i, count, values);
    }
  }
#pragma unroll
  for (int m = 0; m < kCount; ++m) sums.sum[m] = sum_pack(lane[m]);
  return sums;
}

// Measures the block's chunk; its partials are in the table then.
template <class Op, unsigned kMissing>
__device__ void measure_chunk(const TableView& view, float a) {
  constexpr int kCount = Sums<Op>::kCount;
  const Chunk chunk = view.chunks[blockIdx.x];
  Partial* partials = view.partials + blockIdx.x;
  if (!view.has_gradient(chunk.row)) {
    for (int m = 0; m < kCount; ++m) {
      if (threadIdx.x == 0) partials[m * view.chunk_count] = {0.0, 0};
    }
    return;
  }
  const Op op = Op::for_row(view, chunk.row, a, 0);
  const int64_t first = chunk.index * kChunk;
  const int64_t rest = view.numel[chunk.row] - first;
  const int n = rest < kChunk ? int(rest) : int(kChunk);
  Column columns[kLists];
  find_columns<(Op::kReads | Op::kWrites) & ~kMissing>(view, chunk.row, first, columns);

  float rescale[kCount];
  for (int m = 0; m < kCount; ++m) rescale[m] = 1;
  const Sums<Op> sums = add_squares<Op, kMissing>(op, columns, n, rescale);
  uint32_t largest[kCount];
  bool again = false;
  for (int m = 0; m < kCount; ++m) {
    const double sum = block_sum(sums.sum[m]);
    largest[m] = block_broadcast(block_max(sums.largest[m]));
    if (threadIdx.x == 0) partials[m * view.chunk_count] = make_partial(sum, 0, largest[m]);
    if (!needs_rescaling(largest[m])) continue;
    rescale[m] = float(power_of_two(-rescaling_exponent(largest[m])));
    again = true;
  }
  if (!again) return;
  using Again = decltype(op.again());
  find_columns<Again::kReads & ~kMissing>(view, chunk.row, first, columns);
  const Sums<Again> rescaled = add_squares<Again, kMissing>(op.again(), columns, n, rescale);
  for (int m = 0; m < kCount; ++m) {
    const double sum = block_sum(rescaled.sum[m]);
    if (threadIdx.x == 0 && needs_rescaling(largest[m])) {
      partials[m * view.chunk_count] =
          make_partial(sum, rescaling_exponent(largest[m]), largest[m]);
    }
  }
}

// Blocks per multiprocessor to have registers for. LAMB's four lists spill with 80 registers, and
// two blocks of them have 57 KB of loads in flight.
HD constexpr int measuring_blocks(unsigned reads, unsigned missing) {
  return missing == 0 ? 1 : count_lists(reads & ~missing) > 3 ? 2 : 3;
}

template <class Op, unsigned kMissing>
__global__ void __launch_bounds__(kLanes, measuring_blocks(Op::kReads, kMissing))
    measure_kernel(TableView view, const StepState* state) {
  if (state != nullptr && state->skip != 0) return;
  measure_chunk<Op, kMissing>(view, 0);
}

// After a pass over `measures` lists: from partials to the norm and the largest magnitude of each
// row, [measures][rows], by a warp each. The order of sum_partials<kRowLanes>.
__global__ void __launch_bounds__(kLanes)
    add_rows_kernel(TableView view, int measures, float* norms, float* largest) {
  const int64_t i = (int64_t(blockIdx.x) * kLanes + threadIdx.x) / kRowLanes;
  if (i >= measures * view.rows) return;
  const int lane = threadIdx.x % kRowLanes;
  const int64_t row = i % view.rows;
  const Partial* partials = view.partials + i / view.rows * view.chunk_count;
  double sum = 0;
  uint32_t bits = 0;
  for (int64_t c = view.first_chunk[row] + lane; c < view.first_chunk[row + 1]; c += kRowLanes) {
    sum += partials[c].sum_squares;
    if (partials[c].largest > bits) bits = partials[c].largest;
  }
  sum = warp_sum(sum);
  bits = warp_max(bits);
  if (lane != 0) return;
  if (norms != nullptr) norms[i] = norm_of(sum);
  if (largest != nullptr) largest[i] = bits_float(bits);
}

inline void add_rows(const TableView& view, int measures, float* norms, float* largest,
                     cudaStream_t stream) {
  if (view.rows == 0 || (norms == nullptr && largest == nullptr)) return;
  constexpr int64_t kRows = kLanes / kRowLanes;  // per block
  launch(Kernel{"add_rows", add_rows_kernel}, (measures * view.rows + kRows - 1) / kRows, kLanes,
         stream, view, measures, norms, largest);
}

// `present`: lists that some row of the table has.
template <class Op>
void measure(const char* name, const TableView& view, unsigned present, const StepState* state,
             cudaStream_t stream) {
  if (view.chunk_count == 0) return;
  constexpr unsigned kRare = Op::kReads & kRareLists;
  const auto kernel = present & kRare ? measure_kernel<Op, 0> : measure_kernel<Op, kRare>;
  launch(Kernel{name, kernel}, view.chunk_count, kLanes, stream, view, state);
}

}  // namespace ampfuse
