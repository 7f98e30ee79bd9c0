// The kernels of one header of core/nn_ops: one launch for each pass, and two for a sum over very
// many rows.
//
// A thread holds a pack of kPack neighbouring channels, so that a row's packs are read in whole
// lines, and goes down the rows with the channels' coefficients in registers. In sums it takes one
// tile; the tiles of a span are the threads of one block.
#include AMPFUSE_OPS_HEADER

#include <type_traits>

#include "last_block.cuh"
#include "launch.cuh"
#include "nn.cuh"
#include "pack.cuh"
#include "rows.cuh"
#include "tickets.cuh"
#include "vector.cuh"

namespace ampfuse {
namespace {

// A thread's channels of a row: [c, c + count).
template <int kWidth>
struct ChannelRange {
  int64_t c;
  int count;

  __device__ ChannelRange(const ImageRows& image, int64_t pack) : c(pack * kWidth) {
    const int64_t rest = image.channels - c;
    count = rest < kWidth ? int(rest) : kWidth;
  }
};

// Rows begin at a multiple of 16 bytes, so that packs do.
bool aligned(const NnArgs& args, unsigned used) {
  bool all = args.image.channels % kPack == 0;
  for (int i = 0; i < kMaxImages; ++i)
    all = all && (!(used & bit(i)) || reinterpret_cast<uintptr_t>(args.images[i]) % 16 == 0);
  return all;
}

// The coefficients of a pack, kStep channels at a time: more of them run in parallel, fewer take
// fewer registers.
template <class Op, unsigned kUsed, int kWidth, int kStep>
struct Coefs {
  Vector<float, kStep> value[kWidth / kStep][Op::kCoefs] = {};

  __device__ Coefs(const NnArgs& args, int64_t row, const ChannelRange<kWidth>& range) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      float of_channel[Op::kCoefs] = {};
      if (k < range.count) Op::template coefs<kUsed>(args, row, range.c + k, of_channel);
#pragma unroll
      for (int i = 0; i < Op::kCoefs; ++i) value[k / kStep][i].lane[k % kStep] = of_channel[i];
    }
  }
};

template <DType kType, int kWidth>
__device__ inline ImagePacks<kType> columns_of(const NnArgs& args, int image, int64_t row,
                                               const ChannelRange<kWidth>& range) {
  return ImagePacks<kType>(args.images[image], row * args.image.channels + range.c, false);
}

// Packs of the images in kImages. kAligned: the result of aligned(); a test of each pack would keep
// the loads of a row waiting for those of the row before.
template <unsigned kImages, DType kType, bool kAligned, int kWidth>
__device__ inline void load_images(const NnArgs& args, int64_t row,
                                   const ChannelRange<kWidth>& range,
                                   Vector<float, kWidth> (&x)[kMaxImages]) {
#pragma unroll
  for (int i = 0; i < kMaxImages; ++i) {
    if (!(kImages & bit(i))) continue;
    const auto columns = columns_of<kType>(args, i, row, range);
    widen(load_pack<kAligned, kWidth>(columns, 0, range.count), kType, x[i].lane);
  }
}
template <unsigned kImages, DType kType, bool kAligned, int kWidth>
__device__ inline void store_images(const NnArgs& args, int64_t row,
                                    const ChannelRange<kWidth>& range,
                                    const Vector<float, kWidth> (&x)[kMaxImages]) {
#pragma unroll
  for (int i = 0; i < kMaxImages; ++i) {
    if (!(kImages & bit(i))) continue;
    const auto columns = columns_of<kType>(args, i, row, range);
    store_pack<kAligned>(columns, 0, range.count, narrow<kType>(x[i].lane));
  }
}

// Loads a pack of each image that the op reads, calls run(step, x, bits) for kStep channels at a
// time, bits being those of the mask, and stores what the op writes.
template <class Op, unsigned kUsed, DType kType, bool kAligned, int kStep, int kWidth, class Run>
__device__ inline void for_pack(const NnArgs& args, int64_t row, const ChannelRange<kWidth>& range,
                                const Run& run) {
  constexpr unsigned kRead = kUsed & Op::kReads, kWritten = kUsed & Op::kWrites;
  Vector<float, kWidth> x[kMaxImages] = {};
  load_images<kRead, kType, kAligned>(args, row, range, x);
  const int64_t mask_byte = row * args.image.mask_bytes() + range.c / kPack;
  uint32_t bits = (kRead & kMask) && args.mask ? args.mask[mask_byte] : 0xffu;
  if (kWidth < kPack) bits >>= range.c % kPack;
  uint32_t written = 0;
#pragma unroll
  for (int k = 0; k < kWidth; k += kStep) {
    Vector<float, kStep> each[kMaxImages];
#pragma unroll
    for (int i = 0; i < kMaxImages; ++i)
      each[i] = each[i].of([&](int lane) { return x[i].lane[k + lane]; });
    uint32_t some = bits >> k;
    run(k / kStep, each, some);
    written |= (some & ((1u << kStep) - 1)) << k;
#pragma unroll
    for (int i = 0; i < kMaxImages; ++i) {
#pragma unroll
      for (int lane = 0; lane < kStep; ++lane) x[i].lane[k + lane] = each[i].lane[lane];
    }
  }
  store_images<kWritten, kType, kAligned>(args, row, range, x);
  if constexpr (kWritten & kMask) {
    static_assert(kWidth == kPack, "a byte of the mask is of one thread");
    args.mask[mask_byte] = uint8_t(kAligned ? written : written & ((1u << range.count) - 1));
  }
}

// ---- sums ----

constexpr int kSumPacks = 8;  // neighbouring packs of a block: if whole, a line of halves
constexpr int kSumThreads = kSumPacks * kSpanTiles;
static_assert(kSumThreads >= kSumPacks * kPack, "a thread for each channel adds the tiles");

// A matrix with fewer blocks than this, about as many as a large GPU has multiprocessors, is
// divided further: sums into narrow packs, which read slower where there are enough blocks, and
// maps into fewer rows.
constexpr int64_t kFewBlocks = 160;
constexpr int kNarrow = 2;

// See Note [launch bounds]. (On its own, the compiler gives a pass that computes much so many
// registers that two blocks fewer run at a time.)
template <class Op, DType kType, bool kAligned, int kWidth>
constexpr int sum_blocks() {
  if (kWidth < kPack) return 8;
  if (!kAligned) return 3;
  return kType == DType::kFloat32 || (Op::kReads & kMask) ? 4 : 6;
}

// The partials of channel c: [spans][words of a Partial][channels], so that threads of neighbouring
// channels access whole lines.
template <class Partial>
struct ChannelPartials {
  static constexpr int kWords = sizeof(Partial) / sizeof(float);
  float* first;
  int64_t channels;

  __device__ ChannelPartials(const NnArgs& args, int64_t c)
      : first(static_cast<float*>(args.partials) + c), channels(args.image.channels) {}
  __device__ float* word(int64_t span, int i) const {
    return first + (span * kWords + i) * channels;
  }
  __device__ void store(int64_t span, const Partial& partial) const {
    float words[kWords];
    memcpy(words, &partial, sizeof words);
#pragma unroll
    for (int i = 0; i < kWords; ++i) *word(span, i) = words[i];
  }
  // (Other blocks have written it: read past the L1 cache.)
  __device__ Partial operator[](int64_t span) const {
    float words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __ldcg(word(span, i));
    Partial partial;
    memcpy(&partial, words, sizeof words);
    return partial;
  }
};

// Of values in registers: as a loop over the halvings, they would be in memory.
template <int kCount, int kSize>
__device__ inline double sum_by_halving(double (&value)[kSize]) {
  if constexpr (kCount == 1) {
    return value[0];
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) value[i] += value[i + kCount / 2];
    return sum_by_halving<kCount / 2>(value);
  }
}

// The sum of kHeight values of each channel by halving, for all of its threads.
template <int kHeight, int kChannels>
__device__ inline double sum_threads(double value) {
  __shared__ double values[kHeight][kChannels];
  const int channel = threadIdx.x % kChannels;
  __syncthreads();  // an earlier sum has been read
  values[threadIdx.x / kChannels][channel] = value;
  __syncthreads();
  double sum[kHeight];
#pragma unroll
  for (int i = 0; i < kHeight; ++i) sum[i] = values[i][channel];
  return sum_by_halving<kHeight>(sum);
}

// Adds a channel's spans in the order of sum_strided<kRowLanes>, see Op::finish(). A channel has
// kHeight threads of a block of kThreads, and each of them has kEach of the lanes.
template <int kThreads, int kChannels>
struct SpanSum {
  static constexpr int kHeight = kThreads / kChannels, kEach = kRowLanes / kHeight;
  const ImageRows& image;
  bool exists;  // the channel

  // All threads of the block call, and all receive the sum.
  template <class Value>
  __device__ double operator()(const Value& value) const {
    const int first = threadIdx.x / kChannels;
    const int64_t whole = exists ? image.rows / kSpanRows : 0;
    double sum[kEach] = {};
    // (The compiler then leaves out what a shorter span needs, a division.)
    const auto value_of_whole = [&](int64_t span) {
#if defined(__CUDA_ARCH__)
      __builtin_assume(image.rows_of(span) == kSpanRows);
#endif
      return value(span);
    };
#pragma unroll kEach < 8 ? 8 / kEach : 1
    for (int64_t span = first; span < whole; span += kRowLanes) {
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (span + i * kHeight < whole) sum[i] += value_of_whole(span + i * kHeight);
    }
    const int lane = int(whole % kRowLanes);
    if (exists && whole < image.spans() && lane % kHeight == first) {
      const double last = value(whole);
#pragma unroll
      for (int i = 0; i < kEach; ++i) sum[i] = lane / kHeight == i ? sum[i] + last : sum[i];
    }
    return sum_threads<kHeight, kChannels>(sum_by_halving<kEach>(sum));
  }
  __device__ bool writes() const { return exists && threadIdx.x < kChannels; }
};

// Makes the results of kChannels channels of their partials. All threads of the block call.
template <class Op, int kThreads, int kChannels>
__device__ inline void finish_channels(const NnArgs& args, int64_t first_channel) {
  const int64_t c = first_channel + threadIdx.x % kChannels;
  Op::finish(args, c, ChannelPartials<typename Op::Partial>(args, c),
             SpanSum<kThreads, kChannels>{args.image, c < args.image.channels});
}

// Adds the sums of a span's tiles, one after another, and stores what is kept of them. `first` and
// `second`: a thread's part of its tile.
template <class Op, unsigned kUsed, int kWidth, int kStep, int kSteps>
__device__ inline void store_span_partial(const NnArgs& args, int64_t span, int64_t first_channel,
                                          const Vector<float, kStep> (&first)[kSteps],
                                          const Vector<float, kStep> (&second)[kSteps]) {
  constexpr int kChannels = kSumPacks * kWidth;
  const int tile = threadIdx.x / kSumPacks, pack = threadIdx.x % kSumPacks;
  __shared__ float sums[2][kSpanTiles][kChannels];
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    sums[0][tile][pack * kWidth + k] = first[k / kStep].lane[k % kStep];
    sums[1][tile][pack * kWidth + k] = second[k / kStep].lane[k % kStep];
  }
  __syncthreads();
  const int i = threadIdx.x;
  const int64_t c = first_channel + i;
  if (i < kChannels && c < args.image.channels) {
    float total[2] = {0, 0};
    for (int t = 0; t < kSpanTiles; ++t) {
      total[0] += sums[0][t][i];
      total[1] += sums[1][t][i];
    }
    float coef[Op::kCoefs];
    Op::template coefs<kUsed>(args, span * kSpanRows, c, coef);
    ChannelPartials<typename Op::Partial>(args, c).store(span,
                                                         Op::partial(coef, total[0], total[1]));
  }
}

// The last block of some channels finishes them, which saves a launch. If there are more spans than
// this, a launch of many blocks takes less time than one block for all spans of its channels.
constexpr int64_t kLastBlockSpans = 128;

// tickets: of arrives_last(), one for the blocks of the same channels.
template <class Op, unsigned kUsed, DType kType, bool kAligned, int kWidth>
__global__ void __launch_bounds__(kSumThreads, (sum_blocks<Op, kType, kAligned, kWidth>()))
    sum_kernel(NnArgs args, unsigned* tickets) {
  assume_type<kType>(args);
  constexpr int kStep = kWidth == kPack ? 1 : kWidth, kSteps = kWidth / kStep;
  using F = Vector<float, kStep>;
  constexpr int kChannels = kSumPacks * kWidth;
  const ImageRows& image = args.image;
  const int64_t columns = ceil_div(image.channels, kChannels);
  const int64_t span = blockIdx.x / columns, first_row = span * kSpanRows;
  const int64_t first_channel = blockIdx.x % columns * kChannels;
  const int tile = threadIdx.x / kSumPacks, pack = threadIdx.x % kSumPacks;
  const ChannelRange<kWidth> range(image, first_channel / kWidth + pack);

  __shared__ float of_rows[Op::kCoefsOfRow ? kSpanRows : 1][Op::kCoefs];
  if constexpr (Op::kCoefsOfRow) {  // loaded together, before the rows
    for (int i = threadIdx.x; i < image.rows_of(span); i += kSumThreads)
      Op::template coefs<kUsed>(args, first_row + i, 0, of_rows[i]);
    __syncthreads();
  }
  F first[kSteps] = {}, second[kSteps] = {};
  if (range.count > 0) {
    const int64_t begin = first_row + tile * kTileRows;
    const int64_t end = begin + kTileRows < image.rows ? begin + kTileRows : image.rows;
    const Coefs<Op, kUsed, kWidth, kStep> coefs(args, first_row, range);
#pragma unroll kWidth == kPack ? 4 : 8
    for (int64_t row = begin; row < end; ++row) {
      F of_row[Op::kCoefs];
#pragma unroll
      for (int i = 0; i < Op::kCoefs; ++i)
        of_row[i] = F(Op::kCoefsOfRow ? of_rows[row - first_row][i] : 0.0f);
      for_pack<Op, kUsed, kType, kAligned, kStep>(
          args, row, range, [&](int step, F(&x)[kMaxImages], uint32_t bits) {
            if constexpr (Op::kCoefsOfRow) {
              Op::template add<kUsed>(x, of_row, bits, first[step], second[step]);
            } else {
              Op::template add<kUsed>(x, coefs.value[step], bits, first[step], second[step]);
            }
          });
    }
  }

  store_span_partial<Op, kUsed, kWidth>(args, span, first_channel, first, second);
  if (image.spans() > kLastBlockSpans) return;
  if (image.spans() == 1) {
    __syncthreads();
  } else if (!arrives_last(tickets + blockIdx.x % columns, unsigned(image.spans()))) {
    return;
  }
  finish_channels<Op, kSumThreads, kChannels>(args, first_channel);
}

constexpr int kFinishChannels = kBlockThreads / kRowLanes;

template <class Op>
__global__ void __launch_bounds__(kBlockThreads) finish_kernel(NnArgs args) {
  finish_channels<Op, kBlockThreads, kFinishChannels>(args, blockIdx.x * int64_t(kFinishChannels));
}

// ---- maps ----

constexpr int kRowsAtOnce = 4;  // rows of a thread in flight together

// The layout of a block's threads: `width` packs wide, a power of two, and each has `rows` rows.
struct MapGrid {
  int width = 1, rows = 2 * kRowsAtOnce;
  int64_t columns, blocks;

  explicit MapGrid(const ImageRows& image) {
    const int64_t packs = ceil_div(image.channels, kPack);
    while (width < packs && width < 32) width *= 2;
    columns = ceil_div(packs, width);
    const auto count = [&] { return columns * ceil_div(image.rows, kBlockThreads / width * rows); };
    if (count() < kFewBlocks) rows = kRowsAtOnce;
    blocks = count();
  }
};

// Goes backwards over the rows: sums have just gone forwards, and the end of what they read is
// still in the L2 cache.
template <class Op, unsigned kUsed, DType kType, bool kAligned>
__global__ void __launch_bounds__(kBlockThreads) map_kernel(NnArgs args, MapGrid grid) {
  const ImageRows& image = args.image;
  const int64_t block = grid.blocks - 1 - blockIdx.x;
  const ChannelRange<kPack> range(image,
                                  block % grid.columns * grid.width + threadIdx.x % grid.width);
  if (range.count <= 0) return;
  const int height = kBlockThreads / grid.width;
  int64_t row = block / grid.columns * height * grid.rows + threadIdx.x / grid.width;
  const Coefs<Op, kUsed, kPack, kPack> coefs(args, 0, range);
#pragma unroll 1
  for (int done = 0; done < grid.rows; done += kRowsAtOnce) {
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i, row += height) {
      if (row >= image.rows) continue;
      for_pack<Op, kUsed, kType, kAligned, kPack>(
          args, row, range, [&](int step, Vector<float, kPack>(&x)[kMaxImages], uint32_t& bits) {
            Op::template apply<kUsed>(x, coefs.value[step], bits);
          });
    }
  }
}

template <class Op, unsigned kUsed, DType kType, bool kAligned>
void launch_channels(const NnArgs& args, cudaStream_t stream) {
  const ImageRows& image = args.image;
  if constexpr (Op::kKind == PassKind::kChannelSum) {
    constexpr int kFine = kAligned ? kNarrow : kPack;
    const int64_t spans = image.spans();
    const auto columns = [&](int width) { return ceil_div(image.channels, kSumPacks * width); };
    const bool few = spans * columns(kPack) < kFewBlocks;
    const int64_t count = columns(few ? kFine : kPack);
    const bool last_finishes = spans > 0 && spans <= kLastBlockSpans;
    unsigned* const tickets = last_finishes && spans > 1 ? take_tickets(count, stream) : nullptr;
    launch(NamedKernel{Op::kName, few ? sum_kernel<Op, kUsed, kType, kAligned, kFine>
                                      : sum_kernel<Op, kUsed, kType, kAligned, kPack>},
           spans * count, kSumThreads, stream, args, tickets);
    if (!last_finishes) {
      launch(NamedKernel{Op::kName, finish_kernel<Op>}, ceil_div(image.channels, kFinishChannels),
             kBlockThreads, stream, args);
    }
  } else {
    const MapGrid grid(image);
    launch(NamedKernel{Op::kName, map_kernel<Op, kUsed, kType, kAligned>}, grid.blocks,
           kBlockThreads, stream, args, grid);
  }
}

}  // namespace

template <class Op>
void NnDeviceKernel<Op>::run(const NnArgs& args, cudaStream_t stream) {
  with_used_images<Op>(args, [&](auto used) {
    with_storage(args.image.dtype, [&](auto storage) {
      constexpr DType kType = decltype(storage)::kType;
      constexpr unsigned kUsed = used | half_images(kType);
      const bool whole = aligned(args, kUsed);
      if constexpr (Op::kKind != PassKind::kChannelSum && Op::kKind != PassKind::kChannelMap) {
        // (Their ops have no cheaper form for half types.)
        launch_rows<Op, used, kType>(args, whole, stream);
      } else if (whole) {
        launch_channels<Op, kUsed, kType, true>(args, stream);
      } else {
        launch_channels<Op, kUsed, kType, false>(args, stream);
      }
    });
  });
}

[[gnu::used]] static const auto compiled = each_of(
    AMPFUSE_OPS(), [](auto op) { return &NnDeviceKernel<typename decltype(op)::type>::run; });

}  // namespace ampfuse
