// The CUDA apply harness. A block takes a slice of a chunk, a tile at a time; each thread takes two
// packs of kApplyPack neighbouring elements of a tile, one from each half: first it loads all lists
// as they are stored, so that all loads are in flight together, then, a pack at a time, it widens
// them to float, runs the op, narrows and stores.
//
// A pack is 16 bytes of FP32, so an access of a warp covers whole sectors of the L2 cache, one
// after the other: two accesses that share sectors would write each of them twice.
//
// A list whose address is a multiple of 16 bytes moves in accesses of whole packs. An unaligned
// view, and the last pack of a tensor, moves element by element through the same conversion, so a
// value's result does not depend on where it sits.
#pragma once

#include "core/round_to_storage.h"
#include "launch.cuh"
#include "list_packs.cuh"

namespace ampfuse {

// Runs the op on the pack at element i, and rounds to encoded types. kSplits: whether the weights
// of split masters are needed before store_packs() makes them.
template <bool kSplits, class Op, int kWidth, class Slice>
__device__ void run_and_round(const Op& op, const Slice& slice, int i,
                              Vector<float, kWidth> (&x)[kLists]) {
  op(x);
  if constexpr (Slice::Column::kEncoded) {
    using Bits = Vector<uint32_t, kWidth>;
    const auto types = [&](int list) {
      const DType type = slice(list);
      return !kSplits && list == kParam && is_remainder(type) ? DType::kFloat32 : type;
    };
    round_to_storage<Op::kWrites>(x, types, slice.random_key, slice.first + i,
                                  Bits::of([](int k) { return uint32_t(k); }));
  }
}

// Raises `largest` to the largest magnitude of a pack.
template <int kWidth>
__device__ inline void include(const Vector<float, kWidth>& value, uint32_t& largest) {
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const uint32_t magnitude = magnitude_of(value.lane[k]);
    if (magnitude > largest) largest = magnitude;
  }
}

// Blocks take slices of a chunk, 2^log of them: a model of 25 M parameters has 780 chunks, too few
// to fill a GPU evenly, and elementwise results do not depend on the partition. Where encoded types
// make instructions the limit, large tables have fewer slices, since each block begins with some
// 200 instructions a thread.
inline int log_slices(int64_t chunks, Encoded encoded) {
  constexpr int kLog = 2;
  constexpr int64_t kManyBlocks = 1 << 14;
  static_assert((kChunk >> kLog) % kTile == 0, "a slice is whole tiles");
  int log = kLog;
  while (encoded != Encoded::kNone && log > 0 && (chunks << (log - 1)) >= kManyBlocks) --log;
  return log;
}

constexpr int kApplyPack = 4;                    // elements that a thread handles at once
constexpr int kApplyPacks = kPack / kApplyPack;  // packs of a thread in each tile

// Where a thread's loop ends. With encoded types the lanes of a warp compute scales together, so
// all go on while the first lane is before `end`; packs past it have no elements.
template <class Slice, int kWidth>
__device__ inline int loop_end(int end) {
  return Slice::Column::kEncoded ? end + int(threadIdx.x % kRowLanes) * kWidth : end;
}

// Runs Op on elements [begin, end) of a row. kWhole: they are whole tiles of aligned lists, whose
// packs need no check of alignment and end. Others go a pack at a time, which keeps half of each
// kernel's code small; two blocks' loads of one pack are enough in flight.
template <class Op, unsigned kMissing, bool kWhole, class Slice>
__device__ inline void apply_tiles(const Op& op, const Slice& slice, int begin, int end,
                                   uint32_t& largest) {
  constexpr unsigned kReads = Op::kReads & ~kMissing, kWrites = Op::kWrites & ~kMissing;
  constexpr int kInFlight = kWhole ? kApplyPacks : 1;
  const int last = loop_end<Slice, kApplyPack>(end);
  for (int start = begin + threadIdx.x * kApplyPack; start < last;
       start += kInFlight * kBlockThreads * kApplyPack) {
    ListPacks<kApplyPack> packs[kInFlight];
#pragma unroll
    for (int p = 0; p < kInFlight; ++p) {
      const int i = start + p * kBlockThreads * kApplyPack;
      load_packs<Op, kReads, kWhole>(slice, i, elements_in_pack<kApplyPack, kWhole>(i, end),
                                     packs[p]);
    }
#pragma unroll
    for (int p = 0; p < kInFlight; ++p) {
      const int i = start + p * kBlockThreads * kApplyPack,
                count = elements_in_pack<kApplyPack, kWhole>(i, end);
      Vector<float, kApplyPack> x[kLists] = {};
      widen_packs<Op, kReads>(slice, count, packs[p], x);
#pragma unroll
      for (int list = 0; list < kLists; ++list) {
        if (Op::kChecked & bit(list)) include(x[list], largest);
      }
      run_and_round<false>(op, slice, i, x);
      store_packs<Op, kWrites, kWhole>(slice, i, count, x);
    }
  }
}

// Lists that few optimizers have. A kernel without them needs two thirds of the registers.
constexpr unsigned kRareLists = bit(kAccumulated) | bit(kState2) | bit(kUnscaled) | bit(kAverage);

// Calls run(slice) with a slice whose columns have their types as constants, so that the compiler
// leaves out the branches on them, if the row has common types: gradient and model weight of one
// half type, or FP32 without a model; states of one storage; masters that are split, where any are.
// Returns false otherwise. Where no type is encoded, or lists are rare, run(slice) is called with
// types that are not constants: their branches cost less than the code of further loops.
template <class Op, unsigned kUsed, class Slice, class Run>
__device__ inline bool with_known_types(const Slice& slice, const Run& run) {
  if constexpr (!Slice::Column::kEncoded || !kSteps<Op> || (kUsed & kRareLists) != 0) {
    run(slice);
    return true;
  } else {
    const auto try_types = [&](DType half, DType param, DType state) {
      Slice known = slice;
      bool same = true;
      const auto assume = [&](int list, DType type) {
        if (!(kUsed & bit(list))) return;
        known.columns[list].dtype = type;
        same = same && slice.columns[list].dtype == type;
      };
      assume(kGrad, half == DType::kNone ? DType::kFloat32 : half);
      assume(kModel, half);
      assume(kParam, param);
#pragma unroll
      for (int list = kState0; list < kState0 + kMaxStates; ++list)
        assume(list, Op::kUnsigned & bit(list) ? without_sign(state) : state);
      if (same) run(known);
      return same;
    };
    const auto try_states = [&](DType half, DType param) {
      if (try_types(half, param, DType::kRandomBFloat16)) return true;
      if (Op::kQuantizable && try_types(half, param, DType::kSigned8)) return true;
      return Slice::Column::kSplit && try_types(half, param, DType::kFloat32);
    };
    if constexpr (Slice::Column::kSplit) {
      return try_states(DType::kBFloat16, DType::kRemainderBFloat16) ||
             try_states(DType::kFloat16, DType::kRemainderFloat16);
    } else {
      return try_states(DType::kBFloat16, DType::kFloat32) ||
             try_states(DType::kFloat16, DType::kFloat32) ||
             try_states(DType::kNone, DType::kFloat32);
    }
  }
}

// See Note [launch bounds].
HD constexpr int updating_blocks(unsigned used, unsigned unsigned_states, Encoded encoded) {
  const int lists = count_lists(used);
  if (encoded != Encoded::kNone) {
    if (lists > 6) return 1;
    // (With one state, three blocks spill on sm_80.)
    const bool adam = count_lists(used & kStates) > 1 && (used & kRareLists) == 0;
    return adam ? 3 : 2;
  }
  if (lists > 6) return 2;
  // A gradient over the root of a second moment needs as many registers as a list more.
  const bool divides = (used & bit(kGrad)) != 0 && unsigned_states != 0;
  return (divides ? lists + 1 : lists) > 4 ? 3 : 4;
}

// Runs Op on every element of every row, or of the rows with a gradient if Op asks for that. A
// chunk has 2^log slices, see log_slices(). If `state` says skip, nothing happens. A non-finite
// value in a list that Op checks sets *found_inf. No row has a list of `kMissing`, and only lists
// in kEncoded are encoded.
template <class Op, unsigned kMissing, Encoded kEncoded>
__global__ void __launch_bounds__(kBlockThreads,
                                  updating_blocks((Op::kReads | Op::kWrites) & ~kMissing,
                                                  Op::kUnsigned, kEncoded))
    apply_kernel(TableView view, int log, const StepState* state, float a, float b,
                 float* found_inf) {
  constexpr unsigned kUsed = (Op::kReads | Op::kWrites) & ~kMissing;
  const bool skip = is_skipped(state);
  // Backwards: inspect has just read the gradients forwards, and their end is still in the L2
  // cache.
  const int64_t part = int64_t(gridDim.x) - 1 - blockIdx.x;
  const Chunk chunk = view.chunks[part >> log];
  const int length = int(kChunk) >> log;
  const int64_t first = chunk.index * kChunk + (int(part) & ((1 << log) - 1)) * length;
  const int64_t rest = view.numel[chunk.row] - first;
  const Op op = Op::for_row(view, chunk.row, a, b);
  const RowSlice<ListColumn<kEncoded>> slice(std::integral_constant<unsigned, kUsed>(), view,
                                             chunk.row, first);
  if (skip || rest <= 0 || (Op::kGradientRows && !view.is_stepped(chunk.row))) return;
  const int n = rest < length ? int(rest) : length;
  bool aligned = true;
#pragma unroll
  for (int list = 0; list < kLists; ++list) {
    if (kUsed & bit(list)) aligned = aligned && slice.columns[list].wide();
  }
  uint32_t largest = 0;
  const int tiles = n - n % kTile;
  const bool done = aligned && with_known_types<Op, kUsed>(slice, [&](const auto& known) {
                      apply_tiles<Op, kMissing, true>(op, known, 0, tiles, largest);
                    });
  apply_tiles<Op, kMissing, false>(op, slice, done ? tiles : 0, n, largest);
  if (Op::kChecked && found_inf != nullptr && largest >= kInfinityBits)
    *found_inf = 1;  // all write the same
}

// Calls run(missing, encoded), two integral_constants. `missing`: lists that no row of the pass
// has, which are all rare ones among `kUsed`; all of them but kUnscaled, which FP32 training with a
// GradScaler has; or none. `encoded`: which lists may be of an encoded type.
template <class Op, unsigned kUsed, class Run>
void with_instance(const DevicePass& pass, const Run& run) {
  constexpr unsigned kRare = kUsed & kRareLists, kUnscaledOnly = kRare & bit(kUnscaled);
  const std::integral_constant<unsigned, kRare> all;
  const std::integral_constant<unsigned, 0> none;
  const std::integral_constant<Encoded, Encoded::kNone> plain;
  const bool rare = pass.present & kRare;
  if constexpr (!Op::kPlain && (kUsed & (bit(kParam) | kStates)) != 0) {
    if (pass.encoded & kUsed) {
      const std::integral_constant<Encoded, Encoded::kAll> any;
      if (rare) return run(none, any);
      if constexpr ((kUsed & kStates) != 0) {
        if (!(pass.encoded & bit(kParam)))
          return run(all, std::integral_constant<Encoded, Encoded::kStates>());
      }
      return run(all, any);
    }
  }
  if (!rare) return run(all, plain);
  if constexpr (kUnscaledOnly) {
    if (!(pass.present & kRare & ~kUnscaledOnly))
      return run(std::integral_constant<unsigned, kRare & ~kUnscaledOnly>(), plain);
  }
  run(none, plain);
}

template <class Op>
void apply(const DevicePass& pass) {
  if (pass.view.chunk_count == 0) return;
  with_instance<Op, Op::kReads | Op::kWrites>(pass, [&](auto missing, auto encoded) {
    const int log = log_slices(pass.view.chunk_count, encoded);
    launch(NamedKernel{Op::kName, apply_kernel<Op, missing, encoded>}, pass.view.chunk_count << log,
           kBlockThreads, pass.stream, pass.view, log, pass.state, pass.a, pass.b, pass.found_inf);
  });
}

}  // namespace ampfuse
