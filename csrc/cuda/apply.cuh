// The CUDA apply harness. A block takes a slice of a chunk; each thread takes packs of kPack
// neighbouring elements: first it loads all lists as they are stored, so that all loads are in
// flight together, then it widens them to float, runs the op of update.h on each element, narrows
// and stores.
//
// A list whose address is a multiple of 16 bytes moves in 16-byte accesses. An unaligned view, and
// the last pack of a tensor, moves element by element through the same conversion, so a value's
// result does not depend on where it sits.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "../update.h"
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
  __device__ char* at(int i) const {
    char* address = data + (dtype == DType::kFloat32 ? i * 4 : i * 2);
#if defined(__CUDA_ARCH__)
    // Pointers that come from a table could be anywhere, and generic accesses are slower.
    __builtin_assume(__isGlobal(address));
#endif
    return address;
  }

  // Packs are aligned for 16-byte accesses. Asked for each pack: to remember it costs a register.
  __device__ bool wide() const { return reinterpret_cast<uintptr_t>(data) % sizeof(uint4) == 0; }
};

// kPack elements as they are stored: FP32 fills the words, two half-precision values share one.
struct Pack {
  uint32_t word[kPack] = {};
};

// Elements [i, i + count) of the column, count <= kPack; the rest of the pack is zero.
__device__ inline Pack load_pack(const Column& column, int i, int count) {
  Pack pack;
  if (column.dtype == DType::kNone) return pack;
  const bool whole = column.wide() && count == kPack;
  if (column.dtype == DType::kFloat32) {
    const uint32_t* data = reinterpret_cast<const uint32_t*>(column.at(i));
    if (whole) {
      const uint4 low = reinterpret_cast<const uint4*>(data)[0],
                  high = reinterpret_cast<const uint4*>(data)[1];
      pack.word[0] = low.x, pack.word[1] = low.y, pack.word[2] = low.z, pack.word[3] = low.w;
      pack.word[4] = high.x, pack.word[5] = high.y, pack.word[6] = high.z, pack.word[7] = high.w;
    } else {
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        if (k < count) pack.word[k] = data[k];
      }
    }
  } else {
    const uint16_t* data = reinterpret_cast<const uint16_t*>(column.at(i));
    if (whole) {
      const uint4 all = *reinterpret_cast<const uint4*>(data);
      pack.word[0] = all.x, pack.word[1] = all.y, pack.word[2] = all.z, pack.word[3] = all.w;
    } else {
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        if (k < count) pack.word[k / 2] |= uint32_t(data[k]) << 16 * (k % 2);
      }
    }
  }
  return pack;
}

__device__ inline void store_pack(const Column& column, int i, int count, const Pack& pack) {
  if (column.dtype == DType::kNone) return;
  const bool whole = column.wide() && count == kPack;
  if (column.dtype == DType::kFloat32) {
    uint32_t* data = reinterpret_cast<uint32_t*>(column.at(i));
    if (whole) {
      reinterpret_cast<uint4*>(data)[0] =
          make_uint4(pack.word[0], pack.word[1], pack.word[2], pack.word[3]);
      reinterpret_cast<uint4*>(data)[1] =
          make_uint4(pack.word[4], pack.word[5], pack.word[6], pack.word[7]);
    } else {
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        if (k < count) data[k] = pack.word[k];
      }
    }
  } else {
    uint16_t* data = reinterpret_cast<uint16_t*>(column.at(i));
    if (whole) {
      *reinterpret_cast<uint4*>(data) =
          make_uint4(pack.word[0], pack.word[1], pack.word[2], pack.word[3]);
    } else {
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        if (k < count) data[k] = uint16_t(pack.word[k / 2] >> 16 * (k % 2));
      }
    }
  }
}

__device__ inline void widen(const Pack& pack, DType dtype, float (&value)[kPack]) {
  if (dtype == DType::kFloat32 || dtype == DType::kNone) {
#pragma unroll
    for (int k = 0; k < kPack; ++k) value[k] = bits_float(pack.word[k]);
  } else {
    const bool float16 = dtype == DType::kFloat16;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const uint16_t stored = uint16_t(pack.word[k / 2] >> 16 * (k % 2));
      value[k] = float16 ? float16_to_float(stored) : bfloat16_to_float(stored);
    }
  }
}

__device__ inline Pack narrow(const float (&value)[kPack], DType dtype) {
  Pack pack;
  if (dtype == DType::kFloat32) {
#pragma unroll
    for (int k = 0; k < kPack; ++k) pack.word[k] = float_bits(value[k]);
  } else {
    const bool float16 = dtype == DType::kFloat16;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const uint16_t stored = float16 ? float_to_float16(value[k]) : float_to_bfloat16(value[k]);
      pack.word[k / 2] |= uint32_t(stored) << 16 * (k % 2);
    }
  }
  return pack;
}

// One pack of every list of a mask.
template <unsigned kReads>
__device__ inline void load_packs(const Column (&columns)[kLists], int i, int count,
                                  Pack (&packs)[kLists]) {
#pragma unroll
  for (int list = 0; list < kLists; ++list) {
    if (kReads & bit(list)) packs[list] = load_pack(columns[list], i, count);
  }
}

template <unsigned kReads>
__device__ inline void widen_packs(const Column (&columns)[kLists], const Pack (&packs)[kLists],
                                   float (&values)[kLists][kPack]) {
#pragma unroll
  for (int list = 0; list < kLists; ++list) {
    if (kReads & bit(list)) widen(packs[list], columns[list].dtype, values[list]);
  }
}

template <class Op>
__device__ void run(const Op& op, float (&values)[kLists][kPack]) {
#pragma unroll
  for (int k = 0; k < kPack; ++k) {
    float x[kLists];
#pragma unroll
    for (int list = 0; list < kLists; ++list) x[list] = values[list][k];
    op(x);
#pragma unroll
    for (int list = 0; list < kLists; ++list) values[list][k] = x[list];
  }
}

template <unsigned kWrites>
__device__ inline void store_packs(const Column (&columns)[kLists], int i, int count,
                                   const float (&values)[kLists][kPack]) {
#pragma unroll
  for (int list = 0; list < kLists; ++list) {
    if (kWrites & bit(list)) {
      store_pack(columns[list], i, count, narrow(values[list], columns[list].dtype));
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
__device__ inline void include(const float (&value)[kPack], uint32_t& largest) {
#pragma unroll
  for (int k = 0; k < kPack; ++k) {
    const uint32_t magnitude = float_bits(value[k]) & 0x7fffffffu;
    if (magnitude > largest) largest = magnitude;
  }
}

// Blocks take slices rather than whole chunks: a model of 25 M parameters has 780 chunks, too few
// to fill a GPU evenly, and elementwise results do not depend on the cut.
constexpr int kSlices = 4;
constexpr int kSlice = kChunk / kSlices;
static_assert(kSlice % kTile == 0, "a slice is whole tiles");

// Runs Op on every element of every row; rows without a gradient are left alone if
// `gradients_only`. If `state` says skip, nothing happens. A non-finite value in a list that Op
// checks sets *found_inf. No row has a list of `kMissing`.
template <class Op, unsigned kMissing>
__global__ void __launch_bounds__(kLanes, kMissing != 0 ? 3 : 1)
    apply_kernel(TableView view, bool gradients_only, const StepState* state, float a, float b,
                 float* found_inf) {
  constexpr unsigned kReads = Op::kReads & ~kMissing, kWrites = Op::kWrites & ~kMissing;
  if (state != nullptr && state->skip != 0) return;
  // Backwards: inspect has just read the gradients forwards, and their end is still in the L2
  // cache.
  const int64_t slice = int64_t(gridDim.x) - 1 - blockIdx.x;
  const Chunk chunk = view.chunks[slice / kSlices];
  const int64_t first = chunk.index * kChunk + slice % kSlices * kSlice;
  const int64_t rest = view.numel[chunk.row] - first;
  if (rest <= 0 || (gradients_only && !view.has_gradient(chunk.row))) return;
  const int n = rest < kSlice ? int(rest) : kSlice;

  const Op op = Op::for_row(view, chunk.row, a, b);
  Column columns[kLists];
  find_columns<kReads | kWrites>(view, chunk.row, first, columns);

  uint32_t largest = 0;
  for (int i = threadIdx.x * kPack; i < n; i += kTile) {
    const int count = n - i < kPack ? n - i : kPack;
    Pack packs[kLists];
    load_packs<kReads>(columns, i, count, packs);
    float values[kLists][kPack] = {};
    widen_packs<kReads>(columns, packs, values);
#pragma unroll
    for (int list = 0; list < kLists; ++list) {
      if (Op::kChecked & bit(list)) include(values[list], largest);
    }
    run(op, values);
    store_packs<kWrites>(columns, i, count, values);
  }
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
    if (!(present & kRare & ~kBack))
      return run(std::integral_constant<unsigned, kRare & ~kBack>());
  }
  run(std::integral_constant<unsigned, 0>());
}

// `present`: lists that some row of the table has.
template <class Op>
void apply(const char* name, const TableView& view, unsigned present, bool gradients_only,
           const StepState* state, float a, float b, float* found_inf, cudaStream_t stream) {
  if (view.chunk_count == 0) return;
  with_missing<Op::kReads | Op::kWrites>(present, [&](auto missing) {
    launch(Kernel{name, apply_kernel<Op, missing>}, view.chunk_count * kSlices, kLanes, stream, view,
           gradients_only, state, a, b, found_inf);
  });
}

}  // namespace ampfuse
