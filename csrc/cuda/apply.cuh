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
  __device__ char* at(int i) const { return at(data, fills_word(dtype) ? i * 4 : i * 2); }

  __device__ static char* at(char* data, int offset) {
    char* address = data + offset;
#if defined(__CUDA_ARCH__)
    // Pointers that come from a table could be anywhere, and generic accesses are slower.
    __builtin_assume(__isGlobal(address));
#endif
    return address;
  }

  // Packs are aligned for wide accesses. Asked for each pack: to remember it costs a register.
  __device__ bool wide() const { return reinterpret_cast<uintptr_t>(data) % sizeof(uint4) == 0; }
};

// An aligned list whose type is known when compiling.
template <DType kType>
struct KnownColumn {
  static constexpr DType dtype = kType;
  char* data = nullptr;

  __device__ char* at(int i) const { return Column::at(data, i * int(element_size(kType))); }
  __device__ bool wide() const { return true; }
};

// kWidth elements as they are stored: FP32 fills the words, two half-precision values share one.
template <int kWidth>
struct Pack {
  uint32_t word[kWidth] = {};
};

// How many of kWidth elements from i on are before the end: zero or less past it.
template <int kWidth>
__device__ inline int part(int i, int end) {
  return end - i < kWidth ? end - i : kWidth;
}

template <int kWords>
__device__ inline void load_words(const void* address, uint32_t* word) {
  if (kWords == 2) {
    const uint2 all = *static_cast<const uint2*>(address);
    word[0] = all.x, word[1] = all.y;
  }
#pragma unroll
  for (int w = 0; w + 4 <= kWords; w += 4) {
    const uint4 all = static_cast<const uint4*>(address)[w / 4];
    word[w] = all.x, word[w + 1] = all.y, word[w + 2] = all.z, word[w + 3] = all.w;
  }
}

template <int kWords>
__device__ inline void store_words(void* address, const uint32_t* word) {
  if (kWords == 2) *static_cast<uint2*>(address) = make_uint2(word[0], word[1]);
#pragma unroll
  for (int w = 0; w + 4 <= kWords; w += 4) {
    static_cast<uint4*>(address)[w / 4] =
        make_uint4(word[w], word[w + 1], word[w + 2], word[w + 3]);
  }
}

// Elements [i, i + count) of the column, count <= kWidth; the rest of the pack is zero. kWhole: the
// column is aligned and count is kWidth.
template <bool kWhole, int kWidth, class Column>
__device__ inline Pack<kWidth> load_pack(const Column& column, int i, int count) {
  Pack<kWidth> pack;
  if (column.dtype == DType::kNone) return pack;
  const bool whole = kWhole || (column.wide() && count == kWidth);
  if (fills_word(column.dtype)) {
    if (whole) {
      load_words<kWidth>(column.at(i), pack.word);
    } else {
      const uint32_t* data = reinterpret_cast<const uint32_t*>(column.at(i));
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (k < count) pack.word[k] = data[k];
      }
    }
  } else {
    if (whole) {
      load_words<kWidth / 2>(column.at(i), pack.word);
    } else {
      const uint16_t* data = reinterpret_cast<const uint16_t*>(column.at(i));
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (k < count) pack.word[k / 2] |= uint32_t(data[k]) << 16 * (k % 2);
      }
    }
  }
  return pack;
}

template <bool kWhole, int kWidth, class Column>
__device__ inline void store_pack(const Column& column, int i, int count,
                                  const Pack<kWidth>& pack) {
  if (column.dtype == DType::kNone) return;
  const bool whole = kWhole || (column.wide() && count == kWidth);
  if (fills_word(column.dtype)) {
    if (whole) {
      store_words<kWidth>(column.at(i), pack.word);
    } else {
      uint32_t* data = reinterpret_cast<uint32_t*>(column.at(i));
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (k < count) data[k] = pack.word[k];
      }
    }
  } else {
    if (whole) {
      store_words<kWidth / 2>(column.at(i), pack.word);
    } else {
      uint16_t* data = reinterpret_cast<uint16_t*>(column.at(i));
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (k < count) data[k] = uint16_t(pack.word[k / 2] >> 16 * (k % 2));
      }
    }
  }
}

// Element k of a pack is in word k / (elements a word).
template <class Storage>
constexpr int kPerWord = int(sizeof(uint32_t) / sizeof(typename Storage::Stored));
template <class Storage>
constexpr int kBits = 8 * int(sizeof(typename Storage::Stored));

// Leaves the values of an absent list as they are: zero.
template <int kWidth>
__device__ inline void widen(const Pack<kWidth>& pack, DType dtype, float (&value)[kWidth]) {
  with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const uint32_t word = pack.word[k / kPerWord<S>];
      value[k] = S::widen(typename S::Stored(word >> kBits<S> * (k % kPerWord<S>)));
    }
  });
}

template <int kWidth>
__device__ inline Pack<kWidth> narrow(const float (&value)[kWidth], DType dtype) {
  Pack<kWidth> pack;
  with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      pack.word[k / kPerWord<S>] |= uint32_t(S::narrow(value[k])) << kBits<S> * (k % kPerWord<S>);
    }
  });
  return pack;
}

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
