// Passes that measure: they run an op as apply.cuh does and take the norms of what it leaves in
// some lists. One block per chunk writes a partial for each list to the table, and the last block
// of a row computes its norms from them. See core/reduce.h for the order of the sums.
#pragma once

#include "apply.cuh"
#include "block_reduce.cuh"
#include "core/backend.h"
#include "count.cuh"
#include "last_block.cuh"

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
  const int lists = count_lists(reads);
  return lists == 1 ? 4 : lists <= 3 ? 2 : 1;
}

// Runs the op on elements [begin, end) and adds the squares of what it measures, each times
// `rescale`, to the thread's `squares`, its virtual lanes (reduce.h). kWhole: they are whole tiles,
// kTiles at a time.
template <class Op, unsigned kMissing, bool kWhole, class Slice>
__device__ inline void add_tiles(const Op& op, const Slice& slice, int begin, int end,
                                 const float* rescale, float (&squares)[Sums<Op>::kCount][kPack],
                                 Sums<Op>& sums, Counter& counter) {
  constexpr unsigned kReads = Op::kReads & ~kMissing, kWrites = Op::kWrites & ~kMissing;
  constexpr int kInFlight = tiles_in_flight(kReads),
                kTiles = kWhole || kInFlight < 4 ? kInFlight : 2;
  const int last = loop_end<Slice, kPack>(end);
  for (int start = begin + threadIdx.x * kPack; start < last; start += kTiles * kTile) {
    ListPacks<kPack> packs[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int i = start + tile * kTile;
      load_packs<Op, kReads, kWhole>(slice, i, elements_in_pack<kPack>(i, end), packs[tile]);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int i = start + tile * kTile, count = elements_in_pack<kPack>(i, end);
      Vector<float, kPack> x[kLists] = {};
      widen_packs<Op, kReads>(slice, count, packs[tile], x);
      run_and_round<true>(op, slice, i, x);
      if constexpr (Op::kMetered) counter.count<Op>(slice, i, count, x);
#pragma unroll
      for (int list = 0; list < kLists; ++list) {
        if (!(Op::kMeasured & bit(list))) continue;
        const int m = measure_of(Op::kMeasured, list);
        include(x[list], sums.largest[m]);
#pragma unroll
        for (int k = 0; k < kPack; ++k) {
          const float square = x[list].lane[k] * rescale[m];
          squares[m][k] = fma(square, square, squares[m][k]);
        }
      }
      store_packs<Op, kWrites, kWhole>(slice, i, count, x);
    }
  }
}

// add_tiles() over n elements. A pass that reads one list and writes none would use a third of its
// instructions to check each pack's type, alignment and end, and is bound by them: whole tiles of
// an aligned list go through a loop for their type.
template <class Op, unsigned kMissing, class Slice>
__device__ inline Sums<Op> add_squares(const Op& op, const Slice& slice, int n,
                                       const float* rescale, Counter& counter) {
  constexpr unsigned kReads = Op::kReads & ~kMissing, kWrites = Op::kWrites & ~kMissing;
  constexpr int kCount = Sums<Op>::kCount;
  float squares[kCount][kPack] = {};
  Sums<Op> sums = {};
  int done = 0;
  if constexpr (count_lists(kReads) == 1 && kWrites == 0 && !Slice::Column::kEncoded) {
    constexpr int kList = first_list(kReads);
    const auto& column = slice.columns[kList];
    constexpr int kStride = tiles_in_flight(kReads) * kTile;
    const auto add_whole = [&](auto known) {
      RowSlice<decltype(known)> all;
      all.columns[kList].data = column.data;
      add_tiles<Op, kMissing, true>(op, all, 0, done, rescale, squares, sums, counter);
    };
    if (column.wide()) {
      done = n - n % kStride;
      with_storage(column.dtype,
                   [&](auto storage) { add_whole(KnownColumn<decltype(storage)::kType>()); });
    }
  }
  add_tiles<Op, kMissing, false>(op, slice, done, n, rescale, squares, sums, counter);
#pragma unroll
  for (int m = 0; m < kCount; ++m) sums.sum[m] = sum_pack(squares[m]);
  return sums;
}

// Measures the block's chunk; its partials are in the table then. Counts in `meter` if the op is
// metered.
template <class Op, unsigned kMissing, Encoded kEncoded = Encoded::kNone>
__device__ void measure_chunk(const TableView& view, float a, float b, const Meter& meter = {}) {
  constexpr int kCount = Sums<Op>::kCount;
  const Chunk chunk = view.chunks[blockIdx.x];
  Partial* partials = view.partials + blockIdx.x;
  if (!view.has_gradient(chunk.row)) {
    for (int m = 0; m < kCount; ++m) {
      if (threadIdx.x == 0) partials[m * view.chunk_count] = {0.0, 0};
    }
    return;
  }
  const Op op = Op::for_row(view, chunk.row, a, b);
  const int64_t first = chunk.index * kChunk;
  const int64_t rest = view.numel[chunk.row] - first;
  const int n = rest < kChunk ? int(rest) : int(kChunk);
  using Slice = RowSlice<ListColumn<kEncoded>>;
  constexpr unsigned kUsed = (Op::kReads | Op::kWrites) & ~kMissing;
  const Slice slice(std::integral_constant<unsigned, kUsed>(), view, chunk.row, first);

  float rescale[kCount];
  for (int m = 0; m < kCount; ++m) rescale[m] = 1;
  Counter counter;
  if constexpr (Op::kMetered) counter.begin(meter.changed_of(blockIdx.x));
  const Sums<Op> sums = add_squares<Op, kMissing>(op, slice, n, rescale, counter);
  if constexpr (Op::kMetered) counter.end(uint32_t(n), meter.counts_of(chunk.row));
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
  if constexpr (!Op::kMetered) {
    if (!again) return;
    using Again = decltype(op.again());
    constexpr unsigned kAgain = Again::kReads & ~kMissing;
    const Slice seen(std::integral_constant<unsigned, kAgain>(), view, chunk.row, first);
    const Sums<Again> rescaled =
        add_squares<Again, kMissing>(op.again(), seen, n, rescale, counter);
    for (int m = 0; m < kCount; ++m) {
      const double sum = block_sum(rescaled.sum[m]);
      if (threadIdx.x == 0 && needs_rescaling(largest[m])) {
        partials[m * view.chunk_count] =
            make_partial(sum, rescaling_exponent(largest[m]), largest[m]);
      }
    }
  }
}

// See Note [launch bounds].
HD constexpr int measuring_blocks(unsigned used, bool metered, Encoded encoded) {
  const int lists = count_lists(used);
  if (metered) return 1;
  if (encoded != Encoded::kNone) return lists == 1 ? 2 : 1;
  if (lists == 1) return 4;
  if (lists <= 3) return 3;
  return lists == 4 ? 2 : 1;  // LAMB's four: two blocks have 57 KB of loads in flight
}

// The outputs of a pass, norm and largest magnitude of each row: [measures][rows], either may be
// null.
struct RowNorms {
  float* norms = nullptr;
  float* largest = nullptr;

  HD bool wanted() const { return norms != nullptr || largest != nullptr; }
  HD void set(int64_t i, float norm, float magnitude) const {
    if (norms != nullptr) norms[i] = norm;
    if (largest != nullptr) largest[i] = magnitude;
  }
};

// A block for each chunk; one for a table without elements, whose rows have norms all the same.
inline int64_t measuring_grid(const TableView& view) {
  return view.chunk_count > 0 ? view.chunk_count : 1;
}

// Rows without elements have no block, so the first blocks write their norms, one row a thread.
__device__ inline void finish_empty_rows(const TableView& view, int measures, const RowNorms& out) {
  const int64_t threads = int64_t(gridDim.x) * kBlockThreads;
#pragma unroll 1
  for (int64_t row = int64_t(blockIdx.x) * kBlockThreads + threadIdx.x; row < view.rows;
       row += threads) {
    if (view.first_chunk[row] != view.first_chunk[row + 1]) continue;
    for (int m = 0; m < measures; ++m) out.set(m * view.rows + row, 0, 0);
  }
}

// The last block of a row finishes it: from its partials to its norms, a warp for each measure. The
// order of sum_partials<kRowLanes>. All threads call, after measure_chunk.
__device__ inline void finish_row(const TableView& view, int measures, const RowNorms& out,
                                  unsigned* tickets) {
  const int32_t row = view.chunks[blockIdx.x].row;
  const int64_t first = view.first_chunk[row], end = view.first_chunk[row + 1];
  if (end - first == 1) {
    __syncthreads();  // thread 0 has written the partials
  } else if (!arrives_last(tickets + row, unsigned(end - first))) {
    return;
  }
  const int m = threadIdx.x / kRowLanes, lane = threadIdx.x % kRowLanes;
  if (m >= measures) return;
  const Partial* partials = view.partials + m * view.chunk_count;
  double sum = 0;
  uint32_t bits = 0;
#pragma unroll 4
  for (int64_t c = first + lane; c < end; c += kRowLanes) {
    const Partial partial = load_partial(partials + c);
    sum += partial.sum_squares;
    if (partial.largest > bits) bits = partial.largest;
  }
  sum = warp_sum(sum);
  bits = warp_max(bits);
  if (lane == 0) out.set(m * view.rows + row, norm_of(sum), bits_float(bits));
}

template <class Op, unsigned kMissing, Encoded kEncoded>
__global__ void __launch_bounds__(kBlockThreads,
                                  measuring_blocks((Op::kReads | Op::kWrites) & ~kMissing,
                                                   Op::kMetered, kEncoded))
    measure_kernel(TableView view, RowNorms out, unsigned* tickets, const StepState* state,
                   Meter meter) {
  if (is_skipped(state)) return;
  constexpr int kCount = Sums<Op>::kCount;
  finish_empty_rows(view, kCount, out);
  if (blockIdx.x >= view.chunk_count) return;
  if (!view.is_in_pass(view.chunks[blockIdx.x].row)) return;
  measure_chunk<Op, kMissing, kEncoded>(view, 0, 0, meter);
  finish_row(view, kCount, out, tickets);
}

template <class Op>
void measure(const DevicePass& pass) {
  if (pass.view.rows == 0) return;
  // Two instances are enough: a metered step is rare, and so are encoded types that are measured.
  constexpr unsigned kUnscaledOnly = Op::kMetered ? bit(kUnscaled) : 0;
  with_instance<Op, (Op::kReads | Op::kWrites) & ~kUnscaledOnly>(
      pass, [&](auto missing, auto encoded) {
        constexpr auto kEncoded = encoded == Encoded::kNone ? Encoded::kNone : Encoded::kAll;
        launch(NamedKernel{Op::kName, measure_kernel<Op, missing, kEncoded>},
               measuring_grid(pass.view), kBlockThreads, pass.stream, pass.view,
               RowNorms{pass.norms, nullptr}, pass.tickets, pass.state, pass.meter);
      });
}

}  // namespace ampfuse
