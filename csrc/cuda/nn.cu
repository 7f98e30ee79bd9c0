// The kernels of one header of core/nn_ops: a launch for a map, and for a sum over channels two.
//
// A thread holds a pack of kPack neighbouring channels, so that a row's packs are read in whole
// lines, and goes down the rows with the channels' coefficients in registers. In sums it takes one
// tile; the tiles of a span are the threads of one block.
#include AMPFUSE_OPS_HEADER

#include <tuple>
#include <type_traits>

#include "block_reduce.cuh"
#include "launch.cuh"
#include "nn.cuh"
#include "pack.cuh"
#include "rows.cuh"

namespace ampfuse {
namespace {

// Where a thread is in a row: its channels [c, c + count).
struct Place {
  int64_t c;
  int count;

  __device__ Place(const ImageRows& image, int64_t pack) : c(pack * kPack) {
    const int64_t rest = image.channels - c;
    count = rest < kPack ? int(rest) : kPack;
  }
};

// Rows begin at a multiple of 16 bytes, so that packs do.
bool aligned(const NnArgs& args, unsigned lists) {
  bool all = args.image.channels % kPack == 0;
  for (int i = 0; i < kMaxImages; ++i)
    all = all && (!(lists & bit(i)) || reinterpret_cast<uintptr_t>(args.images[i]) % 16 == 0);
  return all;
}

template <class Op, unsigned kLists>
struct Coefs {
  float value[kPack][Op::kCoefs] = {};

  __device__ Coefs(const NnArgs& args, int64_t row, const Place& place) {
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      if (k < place.count) Op::template coefs<kLists>(args, row, place.c + k, value[k]);
    }
  }
};

// Loads a pack of each image that the op reads, calls run(k, x, bits) for each of its values, bits
// being the rest of the mask from there on, and stores what the op writes. kAligned: as aligned()
// says; a test of each pack would keep the loads of a row behind those of the row before.
template <class Op, unsigned kLists, DType kType, bool kAligned, class Run>
__device__ inline void for_pack(const NnArgs& args, int64_t row, const Place& place,
                                const Run& run) {
  constexpr unsigned kRead = kLists & Op::kReads, kWritten = kLists & Op::kWrites;
  float x[kMaxImages][kPack] = {};
#pragma unroll
  for (int i = 0; i < kMaxImages; ++i) {
    if (!(kRead & bit(i))) continue;
    const RowPacks<kType> packs(args.images[i], row * args.image.channels + place.c, false);
    widen(load_pack<kAligned, kPack>(packs, 0, place.count), kType, x[i]);
  }
  const int64_t mask_byte = row * args.image.mask_bytes() + place.c / kPack;
  const uint32_t bits = (kRead & kMask) && args.mask ? args.mask[mask_byte] : 0xffu;
  uint32_t written = 0;
#pragma unroll
  for (int k = 0; k < kPack; ++k) {
    float each[kMaxImages] = {};
#pragma unroll
    for (int i = 0; i < kMaxImages; ++i)
      if (kRead & bit(i)) each[i] = x[i][k];
    uint32_t some = bits >> k;
    run(k, each, some);
    if (kAligned || k < place.count) written |= some << k;
#pragma unroll
    for (int i = 0; i < kMaxImages; ++i)
      if (kWritten & bit(i)) x[i][k] = each[i];
  }
#pragma unroll
  for (int i = 0; i < kMaxImages; ++i) {
    if (!(kWritten & bit(i))) continue;
    const RowPacks<kType> packs(args.images[i], row * args.image.channels + place.c, false);
    store_pack<kAligned>(packs, 0, place.count, narrow<kType>(x[i]));
  }
  if (kWritten & kMask) args.mask[mask_byte] = uint8_t(written);
}

// ---- sums ----

constexpr int kSumPacks = 8;  // of a block: a line of halves
constexpr int kSumChannels = kSumPacks * kPack;
constexpr int kSumThreads = kSumPacks * kSpanTiles;
static_assert(kSumThreads >= kSumChannels, "a thread for each channel adds the tiles");

// (Four blocks: left to itself, the compiler spills to make room for more.)
template <class Op, unsigned kLists, DType kType, bool kAligned>
__global__ void __launch_bounds__(kSumThreads, 4) sum_kernel(NnArgs args) {
  assume_type<kType>(args);
  const ImageRows& image = args.image;
  const int64_t columns = ceil_div(image.channels, kSumChannels);
  const int64_t span = blockIdx.x / columns, first_row = span * kSpanRows;
  const int64_t first_channel = blockIdx.x % columns * kSumChannels;
  const int tile = threadIdx.x / kSumPacks, pack = threadIdx.x % kSumPacks;
  const Place place(image, first_channel / kPack + pack);

  float first[kPack] = {}, second[kPack] = {};
  if (place.count > 0) {
    const int64_t begin = first_row + tile * kTileRows;
    const int64_t end = begin + kTileRows < image.rows ? begin + kTileRows : image.rows;
    const Coefs<Op, kLists> coefs(args, first_row, place);
#pragma unroll 4
    for (int64_t row = begin; row < end; ++row) {
      float of_row[Op::kCoefs] = {};
      if constexpr (Op::kCoefsOfRow) Op::template coefs<kLists>(args, row, place.c, of_row);
      for_pack<Op, kLists, kType, kAligned>(
          args, row, place, [&](int k, float (&x)[kMaxImages], uint32_t bits) {
            if constexpr (Op::kCoefsOfRow) {
              Op::template add<kLists>(x, of_row, bits, first[k], second[k]);
            } else {
              Op::template add<kLists>(x, coefs.value[k], bits, first[k], second[k]);
            }
          });
    }
  }

  __shared__ float sums[2][kSpanTiles][kSumChannels];
#pragma unroll
  for (int k = 0; k < kPack; ++k) {
    sums[0][tile][pack * kPack + k] = first[k];
    sums[1][tile][pack * kPack + k] = second[k];
  }
  __syncthreads();
  const int i = threadIdx.x;
  const int64_t c = first_channel + i;
  if (i >= kSumChannels || c >= image.channels) return;
  float total[2] = {0, 0};
  for (int t = 0; t < kSpanTiles; ++t) {
    total[0] += sums[0][t][i];
    total[1] += sums[1][t][i];
  }
  float coef[Op::kCoefs];
  Op::template coefs<kLists>(args, first_row, c, coef);
  args.partials_of<typename Op::Partial>(c)[span] = Op::partial(coef, total[0], total[1]);
}

// A warp adds a channel's spans, see Op::finish().
constexpr int kFinishChannels = kLanes / kRowLanes;

struct SpanSum {
  const ImageRows& image;
  bool exists;  // the channel

  // As warp_sum(); every lane receives it.
  template <class Value>
  __device__ double operator()(const Value& value) const {
    const int64_t whole = exists ? image.rows / kSpanRows : 0, lane = threadIdx.x % kRowLanes;
    double sum = 0;
    // (Told that a span is whole, the compiler leaves out what a shorter one takes, a division.)
#pragma unroll 8
    for (int64_t span = lane; span < whole; span += kRowLanes) {
#if defined(__CUDA_ARCH__)
      __builtin_assume(image.rows_of(span) == kSpanRows);
#endif
      sum += value(span);
    }
    if (exists && whole < image.spans() && whole % kRowLanes == lane) sum += value(whole);
    for (int offset = kRowLanes / 2; offset > 0; offset /= 2)
      sum += __shfl_xor_sync(kWholeWarp, sum, offset);
    return sum;
  }
  __device__ bool writes() const { return exists && threadIdx.x % kRowLanes == 0; }
};

template <class Op>
__global__ void finish_kernel(NnArgs args) {
  const int64_t c = blockIdx.x * int64_t(kFinishChannels) + threadIdx.x / kRowLanes;
  Op::finish(args, c, SpanSum{args.image, c < args.image.channels});
}

// ---- maps ----

constexpr int kRowsEach = 8;  // of a thread

// How the threads of a block lie: `width` packs wide, a power of two.
struct Grid {
  int width;
  int64_t columns, blocks;

  explicit Grid(const ImageRows& image) : width(1) {
    const int64_t packs = ceil_div(image.channels, kPack);
    while (width < packs && width < 32) width *= 2;
    columns = ceil_div(packs, width);
    blocks = columns * ceil_div(image.rows, kLanes / width * kRowsEach);
  }
};

// Backwards over the rows: sums have just been taken forwards, and the end of what they read is
// still in the L2 cache.
template <class Op, unsigned kLists, DType kType, bool kAligned>
__global__ void __launch_bounds__(kLanes) map_kernel(NnArgs args, Grid grid) {
  const ImageRows& image = args.image;
  const int64_t block = grid.blocks - 1 - blockIdx.x;
  const Place place(image, block % grid.columns * grid.width + threadIdx.x % grid.width);
  if (place.count <= 0) return;
  const int height = kLanes / grid.width;
  int64_t row = block / grid.columns * height * kRowsEach + threadIdx.x / grid.width;
  const Coefs<Op, kLists> coefs(args, 0, place);
#pragma unroll 4
  for (int i = 0; i < kRowsEach; ++i, row += height) {
    if (row >= image.rows) continue;
    for_pack<Op, kLists, kType, kAligned>(args, row, place,
                                          [&](int k, float (&x)[kMaxImages], uint32_t& bits) {
                                            Op::template apply<kLists>(x, coefs.value[k], bits);
                                          });
  }
}

template <class Op, unsigned kLists, DType kType, bool kAligned>
void start(const NnArgs& args, cudaStream_t stream) {
  const ImageRows& image = args.image;
  if constexpr (Op::kKind == PassKind::kChannelSum) {
    const int64_t blocks = image.spans() * ceil_div(image.channels, kSumChannels);
    launch(Kernel{Op::kName, sum_kernel<Op, kLists, kType, kAligned>}, blocks, kSumThreads, stream,
           args);
    launch(Kernel{Op::kName, finish_kernel<Op>}, ceil_div(image.channels, kFinishChannels), kLanes,
           stream, args);
  } else {
    const Grid grid(image);
    launch(Kernel{Op::kName, map_kernel<Op, kLists, kType, kAligned>}, grid.blocks, kLanes, stream,
           args, grid);
  }
}

}  // namespace

template <class Op>
void NnDeviceKernel<Op>::run(const NnArgs& args, cudaStream_t stream) {
  with_lists<Op>(args, [&](auto lists) {
    with_storage(args.image.dtype, [&](auto storage) {
      constexpr unsigned kLists = decltype(lists)::value;
      constexpr DType kType = decltype(storage)::kType;
      if constexpr (Op::kKind != PassKind::kChannelSum && Op::kKind != PassKind::kChannelMap) {
        start_rows<Op, kLists, kType>(args, aligned(args, kLists), stream);
      } else if (aligned(args, kLists)) {
        start<Op, kLists, kType, true>(args, stream);
      } else {
        start<Op, kLists, kType, false>(args, stream);
      }
    });
  });
}

// Makes the compiler emit them.
template <class... Ops>
static auto kernels_of(OpList<Ops...>) {
  return std::make_tuple(&NnDeviceKernel<Ops>::run...);
}
[[gnu::used]] static const auto compiled = kernels_of(AMPFUSE_OPS());

}  // namespace ampfuse
