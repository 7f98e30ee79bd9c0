// The kernels of row ops: sums along each row, maps with a row's coefficients, and passes, which do
// both and hold what they have read in registers between.
//
// In sums a group of threads holds the lanes of nn_op.h, a pack each, and takes spans of one row. A
// block has the groups of one row, or of several short ones.
#pragma once

#include "block_reduce.cuh"
#include "core/nn_ops/nn_op.h"
#include "launch.cuh"
#include "pack.cuh"
#include "vector.cuh"

namespace ampfuse {

constexpr int kGroupThreads = kRowWidth / kPack;
static_assert(kRowGroups * kGroupThreads == kBlockThreads, "a block has the groups of a row");

// Where a thread is in its block: `groups` groups of kGroupThreads have a row.
struct RowPlace {
  int groups, group, thread;  // of the row; of the group
  int64_t row;

  __device__ explicit RowPlace(int groups_of_row) : groups(groups_of_row) {
    const int of_block = threadIdx.x / kGroupThreads;
    group = of_block % groups;
    thread = threadIdx.x % kGroupThreads;
    row = blockIdx.x * int64_t(kRowGroups / groups) + of_block / groups;
  }
  // Among the groups of the block, the first one of the row.
  __device__ int first_group() const { return threadIdx.x / kGroupThreads - group; }
};

// The kernel instance knows the type.
template <DType kType>
__device__ inline void assume_type([[maybe_unused]] const NnArgs& args) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(args.image.dtype == kType);
#endif
}

// The matrix from element `first` on, where a pack begins.
template <DType kType>
struct ImagePacks {
  static constexpr DType dtype = kType;
  static constexpr bool kEncoded = false, kSplit = false;
  char* data;
  bool aligned;

  __device__ ImagePacks(void* base, int64_t first, bool whole)
      : data(static_cast<char*>(base) + first * element_size(kType)), aligned(whole) {}
  __device__ char* at(int i) const { return global_at(data, i * int(element_size(kType))); }
  __device__ bool wide() const { return aligned; }
};

// How many of a pack's columns from c on exist. kAligned: all of them, if any.
template <bool kAligned>
__device__ inline int count_columns(int64_t columns, int64_t c) {
  return kAligned || columns - c > kPack ? kPack : int(columns - c);
}

template <DType kType, bool kAligned>
__device__ inline void load_columns(const NnArgs& args, int image, int64_t row, int64_t c,
                                    int count, float (&x)[kPack]) {
  const ImagePacks<kType> packs(args.images[image], row * args.image.channels + c, false);
  widen(load_pack<kAligned, kPack>(packs, 0, count), kType, x);
}

// Merges the values of a group's threads by halving, into the first thread's first lane.
template <class Op>
__device__ inline void merge_group(Vector<float, kPack> (&value)[Op::kValues], int thread,
                                   float (&merged)[Op::kValues]) {
  for (int offset = kGroupThreads / 2; offset > 0; offset /= 2) {
    Vector<float, kPack> other[Op::kValues];
#pragma unroll
    for (int i = 0; i < Op::kValues; ++i)
      other[i] = other[i].of(
          [&](int k) { return __shfl_down_sync(kWholeWarp, value[i].lane[k], offset); });
    if (thread < offset) Op::merge(value, other);
  }
  if (thread != 0) return;
  float lanes[kPack][Op::kValues];
#pragma unroll
  for (int i = 0; i < Op::kValues; ++i)
#pragma unroll
    for (int k = 0; k < kPack; ++k) lanes[k][i] = value[i].lane[k];
#pragma unroll
  for (int offset = kPack / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int k = 0; k < offset; ++k) Op::merge(lanes[k], lanes[k + offset]);
  }
#pragma unroll
  for (int i = 0; i < Op::kValues; ++i) merged[i] = lanes[0][i];
}

template <class Op, bool kPlain, DType kType, bool kAligned>
__global__ void __launch_bounds__(kBlockThreads, 2) row_sum_kernel(NnArgs args, int groups) {
  const int64_t columns = args.image.channels, spans = ceil_div(columns, kSpanColumns);
  const RowPlace place(groups);
  const bool exists = place.row < args.image.rows;
  const float* weights = args.vectors[Op::kWeight];

  using F = Vector<float, kPack>;
  F value[Op::kValues];
  Op::start(value);
  for (int64_t span = place.group; exists && span < spans; span += groups) {
    const int64_t begin = span * kSpanColumns + place.thread * kPack;
    const int64_t end = begin + kSpanColumns < columns ? begin + kSpanColumns : columns;
#pragma unroll 4
    for (int64_t c = begin; c < end; c += kRowWidth) {
      const int count = count_columns<kAligned>(columns, c);
      F x, weight(1.0f);
      load_columns<kType, kAligned>(args, Op::kInput, place.row, c, count, x.lane);
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        if (k >= count) x.lane[k] = Op::kAbsent;
        if (!kPlain && weights != nullptr && k < count) weight.lane[k] = weights[c + k];
      }
      Op::template add<kPlain>(value, x, weight, (1u << count) - 1);
    }
  }

  __shared__ float of_groups[kRowGroups][Op::kValues];
  float (*const of_row)[Op::kValues] = of_groups + place.first_group();
  merge_group<Op>(value, place.thread, of_row[place.group]);
  __syncthreads();
  if (place.thread != 0 || place.group != 0 || !exists) return;
  merge_by_halving<kRowGroups>(spans < kRowGroups ? int(spans) : kRowGroups,
                               [&](int i, int other) { Op::merge(of_row[i], of_row[other]); });
  Op::finish(args, place.row, of_row[0]);
}

constexpr int kPacksEach = 8;  // packs of a thread

// The layout of a block's threads: 2^log packs wide.
struct RowMapGrid {
  int log = 0;
  int64_t column_blocks, blocks;

  explicit RowMapGrid(const ImageRows& image) {
    const int64_t packs = ceil_div(image.channels, kPack);
    while (1 << log < packs && 1 << log < kBlockThreads) ++log;
    column_blocks = ceil_div(packs, kPacksEach << log);
    blocks = column_blocks * ceil_div(image.rows, kBlockThreads >> log);
  }
};

// Goes backwards over the rows: what the sum read last is still in the L2 cache.
template <class Op, bool kPlain, DType kType, bool kAligned>
__global__ void __launch_bounds__(kBlockThreads) row_map_kernel(NnArgs args, RowMapGrid grid) {
  const int64_t columns = args.image.channels;
  const unsigned block = gridDim.x - 1 - blockIdx.x, column_blocks = unsigned(grid.column_blocks);
  const int64_t row =
      int64_t(block / column_blocks) * (kBlockThreads >> grid.log) + (threadIdx.x >> grid.log);
  if (row >= args.image.rows) return;
  const float* weights = args.vectors[Op::kWeight];
  const bool counts = Op::counts(args, row);
  const int64_t target = args.targets[row];
  float coef[Op::kCoefs] = {};
  if (counts) Op::coefs(args, row, coef);
  const int64_t first = int64_t(block % column_blocks * kPacksEach) << grid.log;
#pragma unroll kAligned ? kPacksEach : 1
  for (int i = 0; i < kPacksEach; ++i) {
    const int64_t c = (first + (i << grid.log) + (threadIdx.x & ((1 << grid.log) - 1))) * kPack;
    if (c >= columns) continue;
    const int count = count_columns<kAligned>(columns, c);
    float x[kPack] = {};
    if (counts) {
      load_columns<kType, kAligned>(args, Op::kInput, row, c, count, x);
      const auto map = [&](int k, float logit, uint32_t hit) {
        const float weight = kPlain || weights == nullptr || k >= count ? 1.0f : weights[c + k];
        return Op::template apply<kPlain>(logit, coef, weight, hit);
      };
      // All columns of a pack are computed as if none were the target: asking in each costs a
      // select. The target is computed once more, from its logit, and replaces its column.
      const int hit = uint64_t(target - c) < kPack ? int(target - c) : kPack;
      // (An index that varies would move the pack to local memory.)
      const auto with_target = [&](const auto& run) {
#pragma unroll
        for (int k = 0; k < kPack; ++k)
          if (k == hit) run(x[k]);
      };
      float of_target = 0.0f;
      if (hit < kPack) {
        with_target([&](float& logit) { of_target = logit; });
        of_target = map(hit, of_target, 1u);
      }
#pragma unroll
      for (int k = 0; k < kPack; ++k) x[k] = map(k, x[k], 0u);
      if (hit < kPack) with_target([&](float& y) { y = of_target; });
    }
    store_pack<kAligned>(ImagePacks<kType>(args.images[Op::kOutput], row * columns + c, false), 0,
                         count, narrow<kType>(x));
  }
}

// ---- passes ----

constexpr int kPassPacks = kPassColumns / kRowWidth;  // packs of a thread in a span
// In rows that are held, the packs of a thread: of those compiled, the fewest that a row needs.
using HeldPacks = std::integer_sequence<int, 1, 3, kPassPacks>;

// The weights or biases of a pack of columns. kType: their type, loaded 16 bytes at a time; kNone:
// they are of type `dtype` and are loaded one after the other.
template <DType kType>
__device__ inline void load_affine(const void* data, DType dtype, int64_t c, int count,
                                   float absent, float (&values)[kPack]) {
#pragma unroll
  for (int k = 0; k < kPack; ++k) values[k] = absent;
  if (data == nullptr) return;
  if constexpr (kType != DType::kNone) {
    char* first = static_cast<char*>(const_cast<void*>(data)) + c * element_size(kType);
    widen(load_pack<true, kPack>(KnownColumn<kType>{first}, 0, count), kType, values);
  } else {
#pragma unroll
    for (int k = 0; k < kPack; ++k)
      if (k < count) values[k] = load_float(data, dtype, c + k);
  }
}

// The sums over a row, for all of its threads. In a group, halves of threads are added first, then
// halves of a pack. A thread gives half of its values away at each step and adds the others, of
// which one is left in the end.
template <int kSums>
__device__ inline void sum_over_row(const RowPlace& place, int64_t columns,
                                    const float (&value)[kPack][kSums], float (&sums)[kSums]) {
  static_assert(kGroupThreads == 2 * kPack, "the last two threads add the same value");
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    float kept[kPack];
#pragma unroll
    for (int k = 0; k < kPack; ++k) kept[k] = value[k][i];
#pragma unroll
    for (int half = kPack / 2; half > 0; half /= 2) {
      const bool upper = place.thread & 2 * half;
#pragma unroll
      for (int k = 0; k < half; ++k) {
        const float given = upper ? kept[k] : kept[k + half];
        kept[k] = (upper ? kept[k + half] : kept[k]) + __shfl_xor_sync(kWholeWarp, given, 2 * half);
      }
    }
    sums[i] = kept[0] + __shfl_xor_sync(kWholeWarp, kept[0], 1);
#pragma unroll
    for (int half = kPack / 2; half > 0; half /= 2)
      sums[i] += __shfl_xor_sync(kWholeWarp, sums[i], 2 * half);
  }
  if (place.groups == 1) return;
  __shared__ float of_groups[kRowGroups][kSums];
  float (*const of_row)[kSums] = of_groups + place.first_group();
  __syncthreads();  // the sums of an earlier stage have been read
  if (place.thread == 0) {
    for (int i = 0; i < kSums; ++i) of_row[place.group][i] = sums[i];
  }
  __syncthreads();
  if (place.thread == 0 && place.group == 0) {
    const int64_t spans = ceil_div(columns, kPassColumns);
    merge_by_halving<kRowGroups>(spans < kRowGroups ? int(spans) : kRowGroups,
                                 [&](int i, int other) {
                                   for (int k = 0; k < kSums; ++k) of_row[i][k] += of_row[other][k];
                                 });
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = of_row[0][i];
}

// One thread's part of a pass over a row. kHeld: rows are held in registers, kHeld packs a thread,
// with weights and biases of type kAffine. Their packs are aligned and whole, and each group has
// one span at most: all of it is loaded once, before any of it is used. 0: rows are not held.
template <class Op, unsigned kUsed, DType kType, DType kAffine, int kHeld>
struct RowPass {
  using Column = std::conditional_t<kHeld, int, int64_t>;
  const NnArgs& args;
  RowPlace place;
  bool aligned, exists;
  Column own, rest;  // the thread's first column, and how many the row has from there on
  float coef[Op::kCoefs] = {};
  Pack<kPack> held[kMaxImages][kHeld ? kHeld : 1] = {};

  __device__ RowPass(const NnArgs& arguments, int groups, bool whole)
      : args(arguments), place(groups), aligned(whole), exists(place.row < args.image.rows) {
    own = Column(place.group) * kPassColumns + place.thread * kPack;
    rest = exists ? Column(args.image.channels) - own : 0;
  }

  // run(slot, c, count) for each pack, c columns after the first.
  template <class Run>
  __device__ void for_packs(const Run& run) const {
    for (Column span = 0; span < rest; span += Column(place.groups) * kPassColumns) {
#pragma unroll kHeld ? kHeld : 1
      for (int i = 0; i < (kHeld ? kHeld : kPassPacks); ++i) {
        const Column c = span + i * kRowWidth;
        if (c < rest) run(kHeld ? i : 0, c, kHeld || rest - c > kPack ? kPack : int(rest - c));
      }
      if (kHeld) break;
    }
  }

  __device__ ImagePacks<kType> packs(int image, Column c) const {
    return {args.images[image], place.row * args.image.channels + own + c, aligned};
  }
  __device__ Pack<kPack> load(int image, Column c, int count) const {
    return load_pack<kHeld != 0, kPack>(packs(image, c), 0, count);
  }

  // Into registers, where they stay.
  template <unsigned kImages>
  __device__ void hold() {
    for_packs([&](int slot, Column c, int count) {
#pragma unroll
      for (int i = 0; i < kMaxImages; ++i)
        if (kImages & bit(i)) held[i][slot] = load(i, c, count);
    });
  }

  template <unsigned kImages, unsigned kKnown>
  __device__ void widen_images(int slot, Column c, int count, float (&x)[kMaxImages][kPack]) {
#pragma unroll
    for (int i = 0; i < kMaxImages; ++i)
      if (kImages & bit(i))
        widen(kHeld && (kKnown & bit(i)) ? held[i][slot] : load(i, c, count), kType, x[i]);
  }
  // run(k, each) for the values at each column.
  template <class Run>
  __device__ static void for_columns(float (&x)[kMaxImages][kPack], const Run& run) {
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      float each[kMaxImages];
#pragma unroll
      for (int i = 0; i < kMaxImages; ++i) each[i] = x[i][k];
      run(k, each);
#pragma unroll
      for (int i = 0; i < kMaxImages; ++i) x[i][k] = each[i];
    }
  }
  // Stores images; x ends as it would be read again.
  template <unsigned kImages>
  __device__ void store_images(int slot, Column c, int count, float (&x)[kMaxImages][kPack]) {
#pragma unroll
    for (int i = 0; i < kMaxImages; ++i) {
      if (!(kImages & bit(i))) continue;
      const Pack<kPack> pack = narrow<kType>(x[i]);
      store_pack<kHeld != 0>(packs(i, c), 0, count, pack);
      widen(pack, kType, x[i]);
      if (kHeld) held[i][slot] = pack;
    }
  }

  // The sums of stage kStage; kKnown: the images that are held.
  template <int kStage, unsigned kKnown>
  __device__ void sum() {
    constexpr unsigned kWritten = Op::writes(kUsed, kStage);
    float value[kPack][Op::kSums] = {};
    for_packs([&](int slot, Column c, int count) {
      float x[kMaxImages][kPack] = {}, weight[kPack];
      widen_images<Op::reads(kUsed, kStage), kKnown>(slot, c, count, x);
      if constexpr (kWritten != 0) {
        for_columns(x, [](int, float (&each)[kMaxImages]) { Op::template first<kUsed>(each); });
        store_images<kWritten>(slot, c, count, x);
      }
      load_affine<kAffine>(args.affine.weight, args.affine.dtype, own + c, count, 1.0f, weight);
      for_columns(x, [&](int k, float (&each)[kMaxImages]) {
        if (k < count) Op::template add<kStage, kUsed>(each, coef, weight[k], 1u, value[k]);
      });
    });
    float sums[Op::kSums];
    sum_over_row(place, args.image.channels, value, sums);
    if (exists) Op::template finish_stage<kStage>(args, place.row, sums, coef);
  }

  template <unsigned kKnown>
  __device__ void map() {
    for_packs([&](int slot, Column c, int count) {
      float x[kMaxImages][kPack] = {}, weight[kPack], bias[kPack];
      widen_images<Op::reads(kUsed, Op::kStages), kKnown>(slot, c, count, x);
      load_affine<kAffine>(args.affine.weight, args.affine.dtype, own + c, count, 1.0f, weight);
      load_affine<kAffine>(args.affine.bias, args.affine.dtype, own + c, count, 0.0f, bias);
      for_columns(x, [&](int k, float (&each)[kMaxImages]) {
        Op::template apply<kUsed>(each, coef, weight[k], bias[k]);
      });
      store_images<Op::writes(kUsed, Op::kStages)>(slot, c, count, x);
    });
  }

  // Stage kStage, those that follow, and the map; kKnown: the images that are held already.
  template <int kStage = 0, unsigned kKnown = 0>
  __device__ void run() {
    constexpr unsigned kRead = Op::reads(kUsed, kStage);
    // (Three images of FP16 take two registers more than there are.)
    constexpr bool kFits = kType != DType::kFloat16 || count_lists(kRead) < 3;
    constexpr unsigned kNow = kFits ? kRead : kKnown;
    if (kHeld) hold<(kNow & ~kKnown)>();
    // (Here, not before hold(): the coefficients' loads overlap with the row's.)
    if (kStage == 0 && exists) Op::template begin<kUsed>(args, place.row, coef);
    if constexpr (kStage < Op::kStages) {
      sum<kStage, kNow>();
      run<kStage + 1, (kNow | Op::writes(kUsed, kStage))>();
    } else {
      map<kNow>();
    }
  }
};

// See Note [launch bounds]: enough to keep sufficient loads in flight.
template <class Op, unsigned kUsed, int kHeld>
constexpr int kPassBlocks = (count_lists(Op::reads(kUsed, 0)) == 1 ? 3 : 2) + (kHeld == 1);

template <class Op, unsigned kUsed, DType kType, DType kAffine, int kHeld>
__global__ void __launch_bounds__(kBlockThreads, (kPassBlocks<Op, kUsed, kHeld>))
    row_pass_kernel(NnArgs args, int groups, bool aligned) {
  assume_type<kType>(args);
  RowPass<Op, kUsed, kType, kAffine, kHeld> pass(args, groups, aligned);
  pass.run();
}

// ---- launches ----

// The groups of a row whose spans have `span_columns` columns: a power of two.
inline int groups_of(const ImageRows& image, int span_columns) {
  int groups = 1;
  while (groups < kRowGroups && groups * int64_t(span_columns) < image.channels) groups *= 2;
  return groups;
}

template <class Op, bool kPlain, DType kType, bool kAligned>
void launch_row_sum_or_map(const NnArgs& args, cudaStream_t stream) {
  const ImageRows& image = args.image;
  if constexpr (Op::kKind == PassKind::kRowSum) {
    const int groups = groups_of(image, kSpanColumns);
    launch(NamedKernel{Op::kName, row_sum_kernel<Op, kPlain, kType, kAligned>},
           ceil_div(image.rows, kRowGroups / groups), kBlockThreads, stream, args, groups);
  } else {
    const RowMapGrid grid(image);
    launch(NamedKernel{Op::kName, row_map_kernel<Op, kPlain, kType, kAligned>}, grid.blocks,
           kBlockThreads, stream, args, grid);
  }
}

// run(constant) of the least of the values that is not below `wanted`.
template <int kFirst, int... kMore, class Run>
void with_least(std::integer_sequence<int, kFirst, kMore...>, int64_t wanted, const Run& run) {
  if constexpr (sizeof...(kMore) > 0) {
    if (kFirst < wanted) return with_least(std::integer_sequence<int, kMore...>(), wanted, run);
  }
  run(std::integral_constant<int, kFirst>());
}

template <class Op, unsigned kUsed, DType kType>
void launch_rows(const NnArgs& args, bool aligned, cudaStream_t stream) {
  if constexpr (Op::kKind != PassKind::kRowPass) {
    const auto launch_aligned = [&](auto plain) {
      constexpr bool kPlain = decltype(plain)::value;
      aligned ? launch_row_sum_or_map<Op, kPlain, kType, true>(args, stream)
              : launch_row_sum_or_map<Op, kPlain, kType, false>(args, stream);
    };
    Op::is_plain(args) ? launch_aligned(std::true_type()) : launch_aligned(std::false_type());
  } else {
    const ImageRows& image = args.image;
    const int groups = groups_of(image, kPassColumns);
    const auto launch_pass = [&](auto affine, auto held) {
      constexpr int kHeld = decltype(held)::value;
      launch(
          NamedKernel{Op::kName, row_pass_kernel<Op, kUsed, kType, decltype(affine)::value, kHeld>},
          ceil_div(image.rows, kRowGroups / groups), kBlockThreads, stream, args, groups, aligned);
    };
    const auto launch_held = [&](auto affine) {
      const int64_t columns = image.channels < kPassColumns ? image.channels : kPassColumns;
      with_least(HeldPacks(), ceil_div(columns, kRowWidth),
                 [&](auto packs) { launch_pass(affine, packs); });
    };
    // FP32 would not fit into the registers.
    const auto whole = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
    if constexpr (element_size(kType) == 2) {
      if (aligned && whole(args.affine.weight) && whole(args.affine.bias) &&
          image.channels <= kRowGroups * kPassColumns) {
        return args.affine.dtype == kType
                   ? launch_held(std::integral_constant<DType, kType>())
                   : launch_held(std::integral_constant<DType, DType::kFloat32>());
      }
    }
    launch_pass(std::integral_constant<DType, DType::kNone>(), std::integral_constant<int, 0>());
  }
}

}  // namespace ampfuse
