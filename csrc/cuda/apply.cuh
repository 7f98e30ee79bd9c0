// The CUDA apply harness. A block takes a slice of a chunk, a tile at a time; each thread takes two
// groups of kGroup neighbouring elements of a tile, one from each half: first it loads all lists as
// they are stored, so that all loads are in flight together, then it widens them to float, runs the
// op on each element, narrows and stores.
//
// A group is 16 bytes of FP32, so an access of a warp covers whole sectors of the L2 cache, one
// after the other: two accesses that share sectors would write each of them twice.
//
// A list whose address is a multiple of 16 bytes moves in accesses of whole groups. An unaligned
// view, and the last group of a tensor, moves element by element through the same conversion, so a
// value's result does not depend on where it sits.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "core/ops/op.h"
#include "kernels.cuh"
#include "launch.cuh"
#include "pack.cuh"

namespace ampfuse {

// One list of a row, from some element on, as a thread sees it. An absent list has type kNone.
struct Column {
  char* data = nullptr;
  DType dtype = DType::kNone;

  Column() = default;
  __device__ Column(const TableView& view, int list, int64_t row, int64_t first) {
    data = static_cast<char*>(view.pointer(list, row));
    if (data == nullptr) return;
    dtype = view.type(list, row);
    data += first * element_size(dtype);
  }

  // The address of element i, of a list that is there. (Not by element_size(): what it gives for
  // kNone costs registers.)
  __device__ char* at(int i) const { return global_at(data, fills_word(dtype) ? i * 4 : i * 2); }

  // Packs are aligned for wide accesses. Asked for each pack: to remember it costs a register.
  __device__ bool wide() const { return reinterpret_cast<uintptr_t>(data) % sizeof(uint4) == 0; }
};

// One pack of every list of a mask.
template <unsigned kReads, bool kWhole, int kWidth, class Column>
__device__ inline void load_packs(const Column (&columns)[kLists], int i, int count,
                                  Pack<kWidth> (&packs)[kLists]) {
#pragma unroll
  for (int list = 0; list < kLists; ++list) {
    if (kReads & bit(list)) packs[list] = load_pack<kWhole, kWidth>(columns[list], i, count);
  }
}

template <unsigned kReads, int kWidth, class Column>
__device__ inline void widen_packs(const Column (&columns)[kLists],
                                   const Pack<kWidth> (&packs)[kLists],
                                   float (&values)[kLists][kWidth]) {
#pragma unroll
  for (int list = 0; list < kLists; ++list) {
    if (kReads & bit(list)) widen(packs[list], columns[list].dtype, values[list]);
  }
}

template <class Op, int kWidth>
__device__ void run(const Op& op, float (&values)[kLists][kWidth]) {
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    float x[kLists];
#pragma unroll
    for (int list = 0; list < kLists; ++list) x[list] = values[list][k];
    op(x);
#pragma unroll
    for (int list = 0; list < kLists; ++list) values[list][k] = x[list];
  }
}

template <unsigned kWrites, bool kWhole, int kWidth, class Column>
__device__ inline void store_packs(const Column (&columns)[kLists], int i, int count,
                                   const float (&values)[kLists][kWidth]) {
#pragma unroll
  for (int list = 0; list < kLists; ++list) {
    if (kWrites & bit(list)) {
      store_pack<kWhole>(columns[list], i, count, narrow(values[list], columns[list].dtype));
    }
  }
}

template <unsigned kUsed>
__device__ inline void find_columns(const TableView& view, int64_t row, int64_t first,
                                    Column (&columns)[kLists]) {
#pragma unroll
  for (int list = 0; list < kLists; ++list) {
    if (kUsed & bit(list)) columns[list] = Column(view, list, row, first);
  }
}

// The largest magnitude of a pack, if it is more than `largest`.
template <int kWidth>
__device__ inline void include(const float (&value)[kWidth], uint32_t& largest) {
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const uint32_t magnitude = float_bits(value[k]) & 0x7fffffffu;
    if (magnitude > largest) largest = magnitude;
  }
}

// Blocks take slices rather than whole chunks: a model of 25 M parameters has 780 chunks, too few
// to fill a GPU evenly, and elementwise results do not depend on the cut.
constexpr int kSlices = 4;
constexpr int kSlice = kChunk / kSlices;
static_assert(kSlice % kTile == 0, "a slice is whole tiles");

constexpr int kGroup = 4;
constexpr int kGroups = kPack / kGroup;  // of a thread, in each tile

// Runs Op on elements [begin, end) of a row. kWhole: they are whole tiles of aligned lists, which
// need not ask each group for its alignment and end.
template <class Op, unsigned kMissing, bool kWhole>
__device__ inline void apply_tiles(const Op& op, const Column (&columns)[kLists], int begin,
                                   int end, uint32_t& largest) {
  constexpr unsigned kReads = Op::kReads & ~kMissing, kWrites = Op::kWrites & ~kMissing;
  for (int start = begin + threadIdx.x * kGroup; start < end; start += kTile) {
    Pack<kGroup> packs[kGroups][kLists];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int i = start + group * kLanes * kGroup;
      load_packs<kReads, kWhole>(columns, i, part<kGroup>(i, end), packs[group]);
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int i = start + group * kLanes * kGroup;
      float values[kLists][kGroup] = {};
      widen_packs<kReads>(columns, packs[group], values);
#pragma unroll
      for (int list = 0; list < kLists; ++list) {
        if (Op::kChecked & bit(list)) include(values[list], largest);
      }
      run(op, values);
      store_packs<kWrites, kWhole>(columns, i, part<kGroup>(i, end), values);
    }
  }
}

// Blocks per multiprocessor to have registers for.
HD constexpr int updating_blocks(unsigned reads) {
  const int lists = count_lists(reads);
  return lists <= 3 ? 4 : lists == 4 ? 3 : 2;
}

// Runs Op on every element of every row, of those with a gradient if it asks for that. If `state`
// says skip, nothing happens. A non-finite value in a list that Op checks sets *found_inf. No row
// has a list of `kMissing`.
template <class Op, unsigned kMissing>
__global__ void __launch_bounds__(kLanes, updating_blocks(Op::kReads & ~kMissing))
    apply_kernel(TableView view, const StepState* state, float a, float b, float* found_inf) {
  constexpr unsigned kReads = Op::kReads & ~kMissing, kWrites = Op::kWrites & ~kMissing;
  if (state != nullptr && state->skip != 0) return;
  // Backwards: inspect has just read the gradients forwards, and their end is still in the L2
  // cache.
  const int64_t slice = int64_t(gridDim.x) - 1 - blockIdx.x;
  const Chunk chunk = view.chunks[slice / kSlices];
  const int64_t first = chunk.index * kChunk + slice % kSlices * kSlice;
  const int64_t rest = view.numel[chunk.row] - first;
  if (rest <= 0 || (Op::kGradientRows && !view.has_gradient(chunk.row))) return;
  const int n = rest < kSlice ? int(rest) : kSlice;

  const Op op = Op::for_row(view, chunk.row, a, b);
  Column columns[kLists];
  find_columns<kReads | kWrites>(view, chunk.row, first, columns);

  bool aligned = true;
#pragma unroll
  for (int list = 0; list < kLists; ++list) {
    if ((kReads | kWrites) & bit(list)) aligned = aligned && columns[list].wide();
  }
  const int whole = aligned ? n - n % kTile : 0;
  uint32_t largest = 0;
  apply_tiles<Op, kMissing, true>(op, columns, 0, whole, largest);
  apply_tiles<Op, kMissing, false>(op, columns, whole, n, largest);
  if (Op::kChecked && found_inf != nullptr && largest >= kInfinityBits)
    *found_inf = 1;  // all write the same
}

// Lists that few optimizers have. A kernel without them needs two thirds of the registers.
constexpr unsigned kRareLists = bit(kAccumulated) | bit(kState2) | bit(kUnscaled);

// Calls run(missing), an integral_constant of lists that no row of a table with the lists of
// `present` has: all rare ones among `kUsed`; all but the unscaled gradients, which FP32 training
// with a GradScaler has; or none.
template <unsigned kUsed, class Run>
void with_missing(unsigned present, const Run& run) {
  constexpr unsigned kRare = kUsed & kRareLists, kBack = kRare & bit(kUnscaled);
  if (!(present & kRare)) return run(std::integral_constant<unsigned, kRare>());
  if constexpr (kBack) {
    if (!(present & kRare & ~kBack)) return run(std::integral_constant<unsigned, kRare & ~kBack>());
  }
  run(std::integral_constant<unsigned, 0>());
}

template <class Op>
void apply(const DevicePass& pass) {
  if (pass.view.chunk_count == 0) return;
  with_missing<Op::kReads | Op::kWrites>(pass.present, [&](auto missing) {
    launch(Kernel{Op::kName, apply_kernel<Op, missing>}, pass.view.chunk_count * kSlices, kLanes,
           pass.stream, pass.view, pass.state, pass.a, pass.b, pass.found_inf);
  });
}

}  // namespace ampfuse
