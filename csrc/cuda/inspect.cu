// One read of every gradient: non-finite flag, sum of squares, first offending row, norms of rows.
// The last block to finish adds the partials up and, if the step follows at once, prepares it.
#include "core/advance.h"
#include "core/ops/inspect.h"
#include "measure.cuh"

namespace ampfuse {
namespace {

struct InspectResult {
  double sum;     // of squares
  int32_t row;    // the first with a non-finite gradient; -1: every one is finite
  uint32_t bits;  // of its largest element
};

// Partials whose loads are in flight together in a thread of the one block that sweeps them.
constexpr int kInFlight = 16;

// The sum over all chunks, in every thread; the order of sum_partials<kLanes>.
__device__ inline double sweep_sums(const TableView& view) {
  double sum = 0;
  for (int64_t start = threadIdx.x; start < view.chunk_count; start += kInFlight * kBlockThreads) {
    double part[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int64_t i = start + k * kBlockThreads;
      part[k] = i < view.chunk_count ? __ldcg(&view.partials[i].sum_squares) : 0.0;
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) sum += part[k];
  }
  return block_broadcast(block_sum(sum));
}

// The result of the partials of all chunks, in thread 0.
__device__ inline InspectResult sweep_partials(const TableView& view) {
  const double sum = sweep_sums(view);
  if (sum - sum == 0) return {sum, -1, 0};  // squares of FP32 do not overflow FP64: all are finite
  uint32_t first = UINT32_MAX;              // non-finite chunk
  for (int64_t i = threadIdx.x; i < view.chunk_count; i += kBlockThreads) {
    const uint32_t largest = load_partial(view.partials + i).largest;
    if (largest >= kInfinityBits && uint32_t(i) < first) first = uint32_t(i);
  }
  first = ~block_broadcast(block_max(~first));
  const int32_t row = view.chunks[first].row;
  uint32_t bits = 0;
  for (int64_t i = first + threadIdx.x; i < view.first_chunk[row + 1]; i += kBlockThreads) {
    const uint32_t largest = load_partial(view.partials + i).largest;
    if (largest > bits) bits = largest;
  }
  return {sum, row, block_max(bits)};
}

// Decides the step, then advances the rows. One block does both, and its barrier orders them.
__device__ inline void prepare_by_block(const TableView& view, const Preparation& preparation) {
  if (threadIdx.x == 0) decide_step(*preparation.state, preparation.decision);
  __syncthreads();
  advance_rows(view, preparation, threadIdx.x, blockDim.x);
}

// Run by the last block. Not inlined: every block would need its registers, and a third fewer of
// them would be in flight.
__device__ __attribute__((noinline)) void finish_inspection(const TableView& view,
                                                            const InspectArgs& args) {
  const InspectResult found = sweep_partials(view);
  if (threadIdx.x == 0) report_inspection(args, found.sum, found.row, found.bits);
  if (args.preparation.state != nullptr) prepare_by_block(view, args.preparation);
}

template <unsigned kMissing>
__global__ void __launch_bounds__(kBlockThreads, kMissing != 0 ? 4 : 2)
    inspect_kernel(const GRID_CONSTANT TableView view, const GRID_CONSTANT InspectArgs args,
                   unsigned* tickets) {
  const RowNorms rows{args.row_norms, args.row_largest};
  if (rows.wanted()) finish_empty_rows(view, 1, rows);
  if (blockIdx.x < view.chunk_count) {
    measure_chunk<InspectOp<>, kMissing>(view, inverse_scale(args), args.fresh);
    if (rows.wanted()) finish_row(view, 1, rows, tickets);
  }
  if (arrives_last(tickets + view.rows, gridDim.x)) finish_inspection(view, args);
}

constexpr int kPrepareThreads = 1024;

__global__ void __launch_bounds__(kPrepareThreads)
    prepare_kernel(TableView view, Preparation preparation) {
  prepare_by_block(view, preparation);
}

}  // namespace

void inspect(const DevicePass& pass, const InspectArgs& args) {
  constexpr unsigned kRare = bit(kAccumulated) | bit(kGradOut);
  const auto kernel = pass.present & kRare ? inspect_kernel<0> : inspect_kernel<kRare>;
  launch(NamedKernel{"inspect", kernel}, measuring_grid(pass.view), kBlockThreads, pass.stream,
         pass.view, args, pass.tickets);
}

void prepare(const DevicePass& pass, const Preparation& preparation) {
  launch(NamedKernel{"prepare", prepare_kernel}, 1, kPrepareThreads, pass.stream, pass.view,
         preparation);
}

}  // namespace ampfuse
