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

#include <cuda_runtime.h>

#include <type_traits>

#include "block_reduce.cuh"
#include "core/ops/op.h"
#include "core/round_to_storage.h"
#include "kernels.cuh"
#include "launch.cuh"
#include "pack.cuh"
#include "vector.cuh"

namespace ampfuse {

// The lists that may be of an encoded type. Few tables have such lists, and kernels without them,
// or without split masters, need fewer registers.
enum class Encoded { kNone, kStates, kAll };

// One list of a row, from some element on, as a thread sees it. An absent list has type kNone.
template <Encoded kLists>
struct ListColumn {
  static constexpr bool kEncoded = kLists != Encoded::kNone, kSplit = kLists == Encoded::kAll;
  char* data = nullptr;
  DType dtype = DType::kNone;

  ListColumn() = default;
  __device__ ListColumn(const TableView& view, int list, int64_t row, int64_t first) {
    data = static_cast<char*>(view.pointer(list, row));
    const DType type = view.type(list, row);  // without a branch: all loads are in flight together
    dtype = data != nullptr ? type : DType::kNone;
    data += first * element_size(dtype);
#if defined(__CUDA_ARCH__)
    // Makes one number of it: the compiler would keep both, and add them in each access.
    asm("" : "+l"(data));
#endif
  }

  // The address of element i of a list that exists and, with `quantized`, may be quantized. (Using
  // element_size() would cost registers for kNone. So would an address for each size that
  // load_pack() distinguishes.)
  __device__ char* at(int i, bool quantized = false) const {
    const int narrow = quantized && is_quantized(dtype) ? i : i * 2;
    return global_at(data, fills_word(dtype) ? i * 4 : narrow);
  }

  // Whether packs are aligned for wide accesses. Computed for each pack: keeping it costs a
  // register.
  __device__ bool wide() const { return reinterpret_cast<uintptr_t>(data) % sizeof(uint4) == 0; }
};

// The lists of a row from element `first` on. The members after `columns` are for encoded types.
template <class ListColumn>
struct RowSlice {
  using Column = ListColumn;
  Column columns[kLists];
  float* scales[kMaxStates];
  int64_t first;
  uint32_t random_key;

  RowSlice() = default;
  template <unsigned kUsed>
  __device__ RowSlice(std::integral_constant<unsigned, kUsed>, const TableView& view, int64_t row,
                      int64_t start) {
    // A split master is read and written with the model weight.
    constexpr unsigned kWith = Column::kSplit && kUsed & bit(kParam) ? bit(kModel) : 0;
#pragma unroll
    for (int list = 0; list < kLists; ++list) {
      if ((kUsed | kWith) & bit(list)) columns[list] = Column(view, list, row, start);
    }
    if constexpr (Column::kEncoded) {
#pragma unroll
      for (int s = 0; s < kMaxStates; ++s) {
        if (kUsed & bit(kState0 + s)) scales[s] = view.scale(kState0 + s, row, start);
      }
      first = view.origin[row] + start;
      random_key = view.coefs[row].random_key;
    }
  }
  __device__ DType operator()(int list) const {
    const DType type = columns[list].dtype;
    // (The same promise for other lists costs steps with quantized states and split masters 5 % on
    // an H200.)
    if (list == kParam && !Column::kSplit && !is_plain(type)) __builtin_unreachable();
    return type;
  }
  // The scale of a quantized state.
  __device__ float* scale_at(int list, int i) const {
    char* scale = reinterpret_cast<char*>(scales[list - kState0]);
    return reinterpret_cast<float*>(global_at(scale, i / kBlock * int(sizeof(float))));
  }
};

// Whether `list` may be encoded, and whether it may be quantized.
template <class Slice>
__device__ constexpr bool may_be_encoded(int list) {
  return list == kParam ? Slice::Column::kSplit : Slice::Column::kEncoded && is_state(list);
}
template <class Op, class Slice>
__device__ constexpr bool may_be_quantized(int list) {
  return may_be_encoded<Slice>(list) && Op::kQuantizable && is_state(list);
}

// See plain(). A list that cannot be encoded is not checked.
template <class Slice>
__device__ DType plain_of(int list, DType type) {
  if (may_be_encoded<Slice>(list)) return plain(type);
  if (!is_plain(type)) __builtin_unreachable();
  return type;
}

// What a thread loads before it goes on: a pack of each list, and the scales of quantized lists.
template <int kWidth>
struct Packs {
  Pack<kWidth> of[kLists];
  float scale[kMaxStates];
};

// Loads the packs of every list in kReads.
template <class Op, unsigned kReads, bool kWhole, int kWidth, class Slice>
__device__ inline void load_packs(const Slice& slice, int i, int count, Packs<kWidth>& packs) {
#pragma unroll
  for (int list = 0; list < kLists; ++list) {
    if (!(kReads & bit(list))) continue;
    const bool quantized = may_be_quantized<Op, Slice>(list);
    packs.of[list] = load_pack<kWhole, kWidth>(slice.columns[list], i, count, quantized);
    if (quantized && is_quantized(slice(list)) && count > 0)
      packs.scale[list - kState0] = *slice.scale_at(list, i);
  }
  if constexpr (Slice::Column::kSplit && (kReads & bit(kParam)) && !(kReads & bit(kModel))) {
    if (is_remainder(slice(kParam)))
      packs.of[kModel] = load_pack<kWhole, kWidth>(slice.columns[kModel], i, count);
  }
}

// Whether all are finite, and their sum too.
template <int kWidth>
__device__ inline bool all_finite(const Vector<float, kWidth>& x) {
  float sum = x.lane[0];
#pragma unroll
  for (int k = 1; k < kWidth; ++k) sum += x.lane[k];
  return (float_bits(sum) & kInfinityBits) != kInfinityBits;
}

// The masters of a pack. With BF16 weights both halves of a master are where its bits have them,
// less 0x8000; but a NaN and a weight that was set to zero (of which this makes a NaN) are left to
// join().
template <int kWidth>
__device__ inline Vector<float, kWidth> join_packs(DType type, const Pack<kWidth>& weight,
                                                   const Pack<kWidth>& remainder) {
  Vector<float, kWidth> x;
  if (type == DType::kRemainderBFloat16) {
    x = x.of([&](int k) {
      const uint32_t low = remainder.word[k / 2] ^ 0x80008000u;
      return bits_float(__byte_perm(low, weight.word[k / 2], k % 2 ? 0x7632u : 0x5410u) - 0x8000u);
    });
    if (all_finite(x)) return x;
  }
  with_split(type, [&](auto split) {
    Vector<float, kWidth> high;
    widen(weight, split.kWeight, high.lane);
    x = split.join(high, Vector<uint32_t, kWidth>::of([&](int k) {
                     return uint32_t(int16_t(remainder.template get<2>(k)));
                   }));
  });
  return x;
}

// The inverse.
template <int kWidth>
__device__ inline void split_packs(DType type, const Vector<float, kWidth>& x, Pack<kWidth>& weight,
                                   Pack<kWidth>& remainder) {
  if (type == DType::kRemainderBFloat16 && all_finite(x)) {
#pragma unroll
    for (int k = 0; k < kWidth; k += 2) {
      const uint32_t first = float_bits(x.lane[k]) + 0x8000u;
      const uint32_t second = float_bits(x.lane[k + 1]) + 0x8000u;
      weight.word[k / 2] = __byte_perm(first, second, 0x7632u);
      remainder.word[k / 2] = __byte_perm(first, second, 0x5410u) ^ 0x80008000u;
    }
    return;
  }
  with_split(type, [&](auto split) {
    const Vector<float, kWidth> limited = split.limit(x), high = split.high(limited);
    const auto bits = split.remainder(limited, high);
    weight = narrow(high.lane, split.kWeight);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) remainder.template put<2>(k, bits.lane[k]);
  });
}

template <class Op, unsigned kReads, int kWidth, class Slice>
__device__ inline void widen_packs(const Slice& slice, int count, const Packs<kWidth>& packs,
                                   Vector<float, kWidth> (&x)[kLists]) {
#pragma unroll
  for (int list = 0; list < kLists; ++list) {
    if (!(kReads & bit(list))) continue;
    const DType type = slice(list), stored = plain_of<Slice>(list, type);
    const Pack<kWidth>& pack = packs.of[list];
    if (is_plain(stored)) {
      widen(pack, stored, x[list].lane);
    } else if (list == kParam) {
      x[list] = join_packs(type, packs.of[kModel], pack);
    } else if (may_be_quantized<Op, Slice>(list) && count > 0) {
      const Vector<float, kWidth> scale(packs.scale[list - kState0]);
      with_quantizer_of<Op>(list, type, [&](auto quantizer) {
        Vector<float, kWidth> count;
        bytes_to_float<quantizer.kSign>(pack, count.lane);
        x[list] = quantizer.decode(count, scale);
      });
    }
  }
}

// Runs the op on the pack at element i. kSplits: whether the weights of split masters are needed
// before store_packs() makes them.
template <bool kSplits, class Op, int kWidth, class Slice>
__device__ void run(const Op& op, const Slice& slice, int i, Vector<float, kWidth> (&x)[kLists]) {
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

// The bits of the largest magnitude among the first `count`; of a NaN, if there is one.
template <int kWidth>
__device__ inline uint32_t largest_of(const Vector<float, kWidth>& x, int count) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float largest = 0 < count ? fabsf(x.lane[0]) : 0.0f;
#pragma unroll
  for (int k = 1; k < kWidth; ++k) {
    if (k < count) {
      const float magnitude = fabsf(x.lane[k]);
      asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(magnitude));
    }
  }
  return float_bits(largest);
#else
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const uint32_t magnitude = k < count ? magnitude_of(x.lane[k]) : 0;
    if (magnitude > largest) largest = magnitude;
  }
  return largest;
#endif
}

// The largest magnitudes of the blocks of quantized states, whose values a warp holds. All states
// are reduced together, so that their shuffles overlap.
template <class Op, unsigned kWrites, int kWidth, class Slice>
__device__ inline void share_largest(const Slice& slice, int count,
                                     const Vector<float, kWidth> (&x)[kLists],
                                     uint32_t (&largest)[kMaxStates]) {
  const auto for_quantized = [&](const auto& run) {
#pragma unroll
    for (int list = kState0; list < kState0 + kMaxStates; ++list) {
      if ((kWrites & bit(list)) && may_be_quantized<Op, Slice>(list) && is_quantized(slice(list)))
        run(list, largest[list - kState0]);
    }
  };
  for_quantized([&](int list, uint32_t& most) { most = largest_of(x[list], count); });
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  constexpr bool kAtOnce = kBlock / kWidth == kRowLanes;
  if (kAtOnce)
    for_quantized([&](int, uint32_t& most) { most = __reduce_max_sync(kWholeWarp, most); });
#else
  constexpr bool kAtOnce = false;
#endif
#pragma unroll
  for (int offset = kAtOnce ? 0 : kBlock / kWidth / 2; offset > 0; offset /= 2) {
    for_quantized([&](int, uint32_t& most) {
      const uint32_t other = __shfl_xor_sync(kWholeWarp, most, offset);
      if (other > most) most = other;
    });
  }
}

template <class Op, unsigned kWrites, bool kWhole, int kWidth, class Slice>
__device__ inline void store_packs(const Slice& slice, int i, int count,
                                   const Vector<float, kWidth> (&x)[kLists]) {
  uint32_t largest[kMaxStates];
  share_largest<Op, kWrites>(slice, count, x, largest);
  Pack<kWidth> weight, remainder;
  const bool split =
      Slice::Column::kSplit && (kWrites & bit(kParam)) && is_remainder(slice(kParam));
  if (split) split_packs(slice(kParam), x[kParam], weight, remainder);
#pragma unroll
  for (int list = 0; list < kLists; ++list) {
    if (!(kWrites & bit(list))) continue;
    const DType type = slice(list), stored = plain_of<Slice>(list, type);
    Pack<kWidth> pack;
    if (split && (list == kParam || list == kModel)) {
      pack = list == kParam ? remainder : weight;
    } else if (is_plain(stored)) {
      pack = narrow(x[list].lane, stored);
    } else if (may_be_quantized<Op, Slice>(list)) {
      with_quantizer_of<Op>(list, type, [&](auto quantizer) {
        const float scale = quantizer.scale(largest[list - kState0]);
        const Vector<float, kWidth> encoder(quantizer.encoder(scale));
        const Vector<float, kWidth> offset(quantizer.offset(kSteps<Op>));
        if (i % kBlock == 0 && count > 0) *slice.scale_at(list, i) = scale;
        pack = lower_bytes(quantizer.encode(x[list], encoder, offset).lane);
      });
    }
    store_pack<kWhole>(slice.columns[list], i, count, pack, may_be_quantized<Op, Slice>(list));
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

// Blocks take slices rather than whole chunks: a model of 25 M parameters has 780 chunks, too few
// to fill a GPU evenly, and elementwise results do not depend on the partition.
constexpr int kSlices = 4;
constexpr int kSlice = kChunk / kSlices;
static_assert(kSlice % kTile == 0, "a slice is whole tiles");

constexpr int kApplyPack = 4;                    // elements that a thread handles at once
constexpr int kApplyPacks = kPack / kApplyPack;  // packs of a thread in each tile

// The element at which a thread stops. The threads of a warp compute the scales of its blocks
// together, so with encoded types they stop together.
template <class Slice, int kWidth>
__device__ inline int last_start(int end) {
  return Slice::Column::kEncoded ? end + int(threadIdx.x % kRowLanes) * kWidth : end;
}

// Runs Op on elements [begin, end) of a row. kWhole: they are whole tiles of aligned lists, whose
// packs need no check of alignment and end. Others go a pack at a time, which keeps half of each
// kernel's code small; two blocks' loads of one pack are enough in flight.
template <class Op, unsigned kMissing, bool kWhole, class Slice>
__device__ inline void apply_tiles(const Op& op, const Slice& slice, int begin, int end,
                                   uint32_t& largest) {
  constexpr unsigned kReads = Op::kReads & ~kMissing, kWrites = Op::kWrites & ~kMissing;
  constexpr int kAtOnce = kWhole ? kApplyPacks : 1;
  const int last = last_start<Slice, kApplyPack>(end);
  for (int start = begin + threadIdx.x * kApplyPack; start < last;
       start += kAtOnce * kLanes * kApplyPack) {
    Packs<kApplyPack> packs[kAtOnce];
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p) {
      const int i = start + p * kLanes * kApplyPack;
      load_packs<Op, kReads, kWhole>(slice, i, part<kApplyPack, kWhole>(i, end), packs[p]);
    }
#pragma unroll
    for (int p = 0; p < kAtOnce; ++p) {
      const int i = start + p * kLanes * kApplyPack, count = part<kApplyPack, kWhole>(i, end);
      Vector<float, kApplyPack> x[kLists] = {};
      widen_packs<Op, kReads>(slice, count, packs[p], x);
#pragma unroll
      for (int list = 0; list < kLists; ++list) {
        if (Op::kChecked & bit(list)) include(x[list], largest);
      }
      run<false>(op, slice, i, x);
      store_packs<Op, kWrites, kWhole>(slice, i, count, x);
    }
  }
}

// Lists that few optimizers have. A kernel without them needs two thirds of the registers.
constexpr unsigned kRareLists = bit(kAccumulated) | bit(kState2) | bit(kUnscaled) | bit(kAverage);

// Calls run(slice) with a slice whose columns have their types as constants, so that the compiler
// leaves out the branches on them, if the row has common types: gradient and model weight of one
// half type, or FP32 without a model; states of one storage; masters that are split, where any are.
// Nothing happens otherwise. (Rows with rare lists are left out: they would need too many loops.)
template <class Op, unsigned kUsed, class Slice, class Run>
__device__ inline void with_known_types(const Slice& slice, const Run& run) {
  if constexpr (!Slice::Column::kEncoded || !kSteps<Op> || (kUsed & kRareLists) != 0) {
    run(slice);
  } else {
    const auto of = [&](DType half, DType param, DType state) {
      Slice known = slice;
      bool same = true;
      const auto is = [&](int list, DType type) {
        if (!(kUsed & bit(list))) return;
        known.columns[list].dtype = type;
        same = same && slice.columns[list].dtype == type;
      };
      is(kGrad, half == DType::kNone ? DType::kFloat32 : half);
      is(kModel, half);
      is(kParam, param);
#pragma unroll
      for (int list = kState0; list < kState0 + kMaxStates; ++list)
        is(list, Op::kUnsigned & bit(list) ? without_sign(state) : state);
      if (same) run(known);
      return same;
    };
    const auto with = [&](DType half, DType param) {
      if (of(half, param, DType::kRandomBFloat16)) return true;
      if (Op::kQuantizable && of(half, param, DType::kSigned8)) return true;
      return Slice::Column::kSplit && of(half, param, DType::kFloat32);
    };
    if constexpr (Slice::Column::kSplit) {
      with(DType::kBFloat16, DType::kRemainderBFloat16) ||
          with(DType::kFloat16, DType::kRemainderFloat16);
    } else {
      with(DType::kBFloat16, DType::kFloat32) || with(DType::kFloat16, DType::kFloat32) ||
          with(DType::kNone, DType::kFloat32);
    }
  }
}

// Blocks per multiprocessor to have registers for. Gradients over the root of second moments
// (`unsigned_states`) need more.
HD constexpr int updating_blocks(unsigned used, unsigned unsigned_states, Encoded encoded) {
  const int lists = count_lists(used);
  if (encoded != Encoded::kNone) {  // (With one state, three blocks spill on sm_80.)
    const bool adam = count_lists(used & kStates) > 1 && (used & kRareLists) == 0;
    return lists > 6 ? 1 : adam ? 3 : 2;
  }
  const bool quotient = (used & bit(kGrad)) != 0 && unsigned_states != 0;
  return lists > 6 ? 2 : lists + quotient > 4 ? 3 : 4;
}

// Runs Op on every element of every row, or of the rows with a gradient if Op asks for that. If
// `state` says skip, nothing happens. A non-finite value in a list that Op checks sets *found_inf.
// No row has a list of `kMissing`, and only lists in kEncoded are encoded.
template <class Op, unsigned kMissing, Encoded kEncoded>
__global__ void __launch_bounds__(kLanes, updating_blocks((Op::kReads | Op::kWrites) & ~kMissing,
                                                          Op::kUnsigned, kEncoded))
    apply_kernel(TableView view, const StepState* state, float a, float b, float* found_inf) {
  constexpr unsigned kUsed = (Op::kReads | Op::kWrites) & ~kMissing;
  const bool skip = state != nullptr && state->skip != 0;
  // Backwards: inspect has just read the gradients forwards, and their end is still in the L2
  // cache.
  const int64_t part = int64_t(gridDim.x) - 1 - blockIdx.x;
  const Chunk chunk = view.chunks[part / kSlices];
  const int64_t first = chunk.index * kChunk + part % kSlices * kSlice;
  const int64_t rest = view.numel[chunk.row] - first;
  const Op op = Op::for_row(view, chunk.row, a, b);
  const RowSlice<ListColumn<kEncoded>> slice(std::integral_constant<unsigned, kUsed>(), view,
                                             chunk.row, first);
  if (skip || rest <= 0 || (Op::kGradientRows && !view.is_stepped(chunk.row))) return;
  const int n = rest < kSlice ? int(rest) : kSlice;
  bool aligned = true;
#pragma unroll
  for (int list = 0; list < kLists; ++list) {
    if (kUsed & bit(list)) aligned = aligned && slice.columns[list].wide();
  }
  uint32_t largest = 0;
  int done = 0;
  if (aligned) {
    with_known_types<Op, kUsed>(slice, [&](const auto& known) {
      done = n - n % kTile;
      apply_tiles<Op, kMissing, true>(op, known, 0, done, largest);
    });
  }
  apply_tiles<Op, kMissing, false>(op, slice, done, n, largest);
  if (Op::kChecked && found_inf != nullptr && largest >= kInfinityBits)
    *found_inf = 1;  // all write the same
}

// Calls run(missing, encoded), two integral_constants. `missing`: lists that no row of the pass
// has, which are all rare ones among `kUsed`; all but the unscaled gradients, which FP32 training
// with a GradScaler has; or none. `encoded`: which lists may be of an encoded type.
template <class Op, unsigned kUsed, class Run>
void with_instance(const DevicePass& pass, const Run& run) {
  constexpr unsigned kRare = kUsed & kRareLists, kBack = kRare & bit(kUnscaled);
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
  if constexpr (kBack) {
    if (!(pass.present & kRare & ~kBack))
      return run(std::integral_constant<unsigned, kRare & ~kBack>(), plain);
  }
  run(none, plain);
}

template <class Op>
void apply(const DevicePass& pass) {
  if (pass.view.chunk_count == 0) return;
  with_instance<Op, Op::kReads | Op::kWrites>(pass, [&](auto missing, auto encoded) {
    launch(Kernel{Op::kName, apply_kernel<Op, missing, encoded>}, pass.view.chunk_count * kSlices,
           kLanes, pass.stream, pass.view, pass.state, pass.a, pass.b, pass.found_inf);
  });
}

}  // namespace ampfuse
