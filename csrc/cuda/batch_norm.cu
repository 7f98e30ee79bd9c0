// Batch normalization on CUDA: two launches for the sums of a pass, a third to apply them.
//
// A thread holds a pack of kPack neighbouring channels, so that a row's packs are read in whole
// lines, and goes down the rows with the channels' coefficients in registers. In sums it takes one
// tile; the tiles of a span are the threads of one block.
#include <type_traits>

#include "batch_norm.cuh"
#include "block_reduce.cuh"
#include "launch.cuh"
#include "pack.cuh"

namespace ampfuse {
namespace {

// A row of the matrix, from some pack on.
template <DType kType>
struct RowPacks {
  static constexpr DType dtype = kType;
  static constexpr bool kCompact = false;
  char* data;
  bool aligned;

  __device__ RowPacks(const void* base, const ImageRows& image, int64_t row, int64_t c, bool whole)
      : data(static_cast<char*>(const_cast<void*>(base)) +
             (row * image.channels + c) * element_size(kType)),
        aligned(whole) {}
  __device__ char* at(int i) const { return global_at(data, i * int(element_size(kType))); }
  __device__ bool wide() const { return aligned; }
};

// What all kernels know of where a thread is: its channels [c, c + count).
struct Place {
  int64_t c;
  int count;

  __device__ Place(const ImageRows& image, int64_t pack) : c(pack * kPack) {
    const int64_t rest = image.channels - c;
    count = rest < kPack ? int(rest) : kPack;
  }
};

template <DType kType>
__device__ inline void load(const void* base, const ImageRows& image, bool aligned, int64_t row,
                            const Place& place, float (&value)[kPack]) {
  const RowPacks<kType> packs(base, image, row, place.c, aligned);
  widen(load_pack<false, kPack>(packs, 0, place.count), kType, value);
}

template <DType kType>
__device__ inline void store(void* base, const ImageRows& image, bool aligned, int64_t row,
                             const Place& place, const float (&value)[kPack]) {
  const RowPacks<kType> packs(base, image, row, place.c, aligned);
  store_pack<false>(packs, 0, place.count, narrow(value, kType));
}

// Rows begin at a multiple of 16 bytes, so that packs do.
bool aligned(const ImageRows& image, std::initializer_list<const void*> lists) {
  bool all = image.channels % kPack == 0;
  for (const void* list : lists) all = all && reinterpret_cast<uintptr_t>(list) % 16 == 0;
  return all;
}

// ---- sums ----

constexpr int kSumPacks = 8;  // of a block: a line of halves
constexpr int kSumChannels = kSumPacks * kPack;
constexpr int kSumThreads = kSumPacks * kSpanTiles;
static_assert(kSumThreads >= kSumChannels, "a thread for each channel adds the tiles");

// Adds the two sums of every tile, and calls write(channel, first, second) for each channel of the
// block.
template <class Write>
__device__ inline void add_tiles(const ImageRows& image, int64_t first_channel,
                                 const float (&first)[kPack], const float (&second)[kPack],
                                 const Write& write) {
  __shared__ float sums[2][kSpanTiles][kSumChannels];
  const int tile = threadIdx.x / kSumPacks, pack = threadIdx.x % kSumPacks;
#pragma unroll
  for (int k = 0; k < kPack; ++k) {
    sums[0][tile][pack * kPack + k] = first[k];
    sums[1][tile][pack * kPack + k] = second[k];
  }
  __syncthreads();
  const int i = threadIdx.x;
  if (i >= kSumChannels || first_channel + i >= image.channels) return;
  float total[2] = {0, 0};
  for (int t = 0; t < kSpanTiles; ++t) {
    total[0] += sums[0][t][i];
    total[1] += sums[1][t][i];
  }
  write(first_channel + i, total[0], total[1]);
}

// Where a thread of the sums' kernels is.
struct SumPlace {
  int64_t span, first_channel, begin, end;  // channel of the block, rows of the thread

  __device__ explicit SumPlace(const ImageRows& image) {
    const int64_t columns = ceil_div(image.channels, kSumChannels);
    span = blockIdx.x / columns;
    first_channel = blockIdx.x % columns * kSumChannels;
    begin = span * kSpanRows + threadIdx.x / kSumPacks * kTileRows;
    end = begin + kTileRows < image.rows ? begin + kTileRows : image.rows;
  }
  __device__ int64_t pack() const { return first_channel / kPack + threadIdx.x % kSumPacks; }
};

int64_t sum_blocks(const ImageRows& image) {
  return image.spans() * ceil_div(image.channels, kSumChannels);
}

template <DType kType>
__global__ void __launch_bounds__(kSumThreads) moments_kernel(MomentArgs args, bool aligned) {
  const ImageRows& image = args.image;
  const SumPlace here(image);
  const Place place(image, here.pack());
  float sum[kPack] = {}, square[kPack] = {};
  if (place.count > 0) {
    float shift[kPack];
    load<kType>(args.x, image, aligned, here.span * kSpanRows, place, shift);
#pragma unroll
    for (int k = 0; k < kPack; ++k) shift[k] = first_finite(shift[k]);
#pragma unroll 4
    for (int64_t row = here.begin; row < here.end; ++row) {
      float x[kPack];
      load<kType>(args.x, image, aligned, row, place, x);
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        const float d = x[k] - shift[k];
        sum[k] += d;
        square[k] = fma(d, d, square[k]);
      }
    }
  }
  add_tiles(image, here.first_channel, sum, square, [&](int64_t c, float total, float squares) {
    const int64_t first = here.span * kSpanRows * image.channels + c;
    const float shift = first_finite(load_float(args.x, kType, first));
    args.partials[c * image.spans() + here.span] = {shift, total, squares};
  });
}

// (Four blocks: left to itself, the compiler spills to make room for more.)
template <DType kType>
__global__ void __launch_bounds__(kSumThreads, 4) reduce_kernel(ReduceArgs args, bool aligned) {
  const ImageRows& image = args.image;
  const SumPlace here(image);
  const Place place(image, here.pack());
  float sum[kPack] = {}, centered[kPack] = {};
  if (place.count > 0) {
    float mean[kPack];
#pragma unroll
    for (int k = 0; k < kPack; ++k) mean[k] = k < place.count ? args.mean[place.c + k] : 0;
#pragma unroll 4
    for (int64_t row = here.begin; row < here.end; ++row) {
      float g[kPack], x[kPack];
      load<kType>(args.dy[0], image, aligned, row, place, g);
      load<kType>(args.x, image, aligned, row, place, x);
      const uint32_t bits =
          args.mask ? args.mask[row * image.mask_bytes() + place.c / kPack] : 0xffu;
#pragma unroll 1
      for (int b = 1; b < args.branches; ++b) {
        float other[kPack];
        load<kType>(args.dy[b], image, aligned, row, place, other);
#pragma unroll
        for (int k = 0; k < kPack; ++k) g[k] += other[k];
      }
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        g[k] = keep(bits >> k, args.branches > 1 ? round_to(kType, g[k]) : g[k]);
        sum[k] += g[k];
        centered[k] = fma(g[k], x[k] - mean[k], centered[k]);
      }
      if (args.g) store<kType>(args.g, image, aligned, row, place, g);
    }
  }
  add_tiles(image, here.first_channel, sum, centered, [&](int64_t c, float total, float products) {
    args.partials[c * image.spans() + here.span] = {total, products};
  });
}

// A warp adds a channel's spans.
constexpr int kFinishChannels = kLanes / kRowLanes;

template <class Value>
__device__ inline double sum_spans(int64_t spans, const Value& value) {
  double sum = 0;
  for (int64_t span = threadIdx.x % kRowLanes; span < spans; span += kRowLanes) sum += value(span);
  return warp_sum(sum);
}

__global__ void finish_moments_kernel(MomentArgs args) {
  const ImageRows& image = args.image;
  const int64_t c = blockIdx.x * int64_t(kFinishChannels) + threadIdx.x / kRowLanes;
  const int64_t spans = c < image.channels ? image.spans() : 0;
  const MomentSums* parts = args.partials + c * image.spans();
  const double sum = sum_spans(spans, [&](int64_t i) { return sum_of(image, parts[i], i); });
  __shared__ double means[kFinishChannels];
  if (threadIdx.x % kRowLanes == 0) means[threadIdx.x / kRowLanes] = sum / double(image.rows);
  __syncthreads();
  const double mean = means[threadIdx.x / kRowLanes];
  const double deviations =
      sum_spans(spans, [&](int64_t i) { return deviation_of(image, parts[i], i, mean); });
  if (threadIdx.x % kRowLanes == 0 && c < image.channels)
    write_statistics(args.statistics, c, mean, deviations, image.rows);
}

__global__ void finish_reduce_kernel(ReduceArgs args) {
  const int64_t c = blockIdx.x * int64_t(kFinishChannels) + threadIdx.x / kRowLanes;
  const int64_t spans = c < args.image.channels ? args.image.spans() : 0;
  const GradientSums* parts = args.partials + c * args.image.spans();
  const double sum = sum_spans(spans, [&](int64_t i) { return double(parts[i].sum); });
  const double centered = sum_spans(spans, [&](int64_t i) { return double(parts[i].centered); });
  if (threadIdx.x % kRowLanes == 0 && c < args.image.channels) {
    args.sum[c] = float(sum);
    args.centered[c] = float(centered);
  }
}

// ---- elementwise ----

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

// call(row, place) for the rows of a thread. Backwards: sums have just been taken forwards, and the
// end of what they read is still in the L2 cache.
template <class Coefs, class Call>
__device__ inline void for_rows(const ImageRows& image, const Grid& grid, const Coefs& coefs,
                                const Call& call) {
  const int64_t block = grid.blocks - 1 - blockIdx.x;
  const Place place(image, block % grid.columns * grid.width + threadIdx.x % grid.width);
  if (place.count <= 0) return;
  const int height = kLanes / grid.width;
  int64_t row = block / grid.columns * height * kRowsEach + threadIdx.x / grid.width;
  const auto of = coefs(place);
#pragma unroll 4
  for (int i = 0; i < kRowsEach; ++i, row += height) {
    if (row < image.rows) call(row, place, of);
  }
}

struct ApplyCoefs {
  float mean[kPack], scale[kPack], bias[kPack];
};

template <DType kType, bool kResidual, bool kRelu>
__global__ void __launch_bounds__(kLanes) apply_kernel(ApplyArgs args, Grid grid, bool aligned) {
  const ImageRows& image = args.image;
  const auto coefs = [&](const Place& place) {
    ApplyCoefs of;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const bool there = k < place.count;
      of.mean[k] = there ? args.mean[place.c + k] : 0;
      of.scale[k] = there ? scale_of(args.weight, args.invstd, place.c + k) : 0;
      of.bias[k] = there ? bias_of(args.bias, place.c + k) : 0;
    }
    return of;
  };
  for_rows(image, grid, coefs, [&](int64_t row, const Place& place, const ApplyCoefs& of) {
    float y[kPack], residual[kPack];
    load<kType>(args.x, image, aligned, row, place, y);
    if (kResidual) load<kType>(args.residual, image, aligned, row, place, residual);
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      y[k] = normalize(y[k], of.mean[k], of.scale[k], of.bias[k]);
      if (kResidual) y[k] += residual[k];
      if (kRelu) {
        const uint32_t above = above_zero(y[k]);
        y[k] = keep(above, y[k]);
        if (k < place.count) bits |= above << k;
      }
    }
    store<kType>(args.y, image, aligned, row, place, y);
    if (kRelu) args.mask[row * image.mask_bytes() + place.c / kPack] = uint8_t(bits);
  });
}

struct GradientCoefs {
  float mean[kPack], scale[kPack], mean_dy[kPack], slope[kPack];
};

template <DType kType, bool kFrozen>
__global__ void __launch_bounds__(kLanes)
    input_gradient_kernel(InputGradientArgs args, Grid grid, bool aligned) {
  const ImageRows& image = args.image;
  const auto coefs = [&](const Place& place) {
    GradientCoefs of;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const bool there = k < place.count;
      of.mean[k] = there ? args.mean[place.c + k] : 0;
      of.scale[k] = there ? scale_of(args.weight, args.invstd, place.c + k) : 0;
      of.mean_dy[k] = there && !kFrozen ? mean_dy_of(args, place.c + k) : 0;
      of.slope[k] = there && !kFrozen ? slope_of(args, place.c + k) : 0;
    }
    return of;
  };
  for_rows(image, grid, coefs, [&](int64_t row, const Place& place, const GradientCoefs& of) {
    float dx[kPack], x[kPack];
    load<kType>(args.dy, image, aligned, row, place, dx);
    if (!kFrozen) load<kType>(args.x, image, aligned, row, place, x);
    const uint32_t bits = args.mask ? args.mask[row * image.mask_bytes() + place.c / kPack] : 0xffu;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const float g = keep(bits >> k, dx[k]);
      dx[k] = kFrozen
                  ? g * of.scale[k]
                  : input_gradient_of(g, x[k], of.mean[k], of.scale[k], of.mean_dy[k], of.slope[k]);
    }
    store<kType>(args.dx, image, aligned, row, place, dx);
  });
}

// call(true_type or false_type).
template <class Call>
void with_bool(bool value, const Call& call) {
  value ? call(std::true_type()) : call(std::false_type());
}

class CudaBatchNorm : public BatchNorm {
 public:
  void moments(const MomentArgs& args, void* stream) override {
    with_storage(args.image.dtype, [&](auto storage) {
      launch(Kernel{"batch_norm_moments", moments_kernel<decltype(storage)::kType>},
             sum_blocks(args.image), kSumThreads, cudaStream_t(stream), args,
             aligned(args.image, {args.x}));
    });
    launch(Kernel{"batch_norm_finish_moments", finish_moments_kernel},
           ceil_div(args.image.channels, kFinishChannels), kLanes, cudaStream_t(stream), args);
  }

  void apply(const ApplyArgs& args, void* stream) override {
    const Grid grid(args.image);
    const bool wide = aligned(args.image, {args.x, args.residual, args.y});
    with_storage(args.image.dtype, [&](auto storage) {
      with_bool(args.residual != nullptr, [&](auto residual) {
        with_bool(args.mask != nullptr, [&](auto relu) {
          launch(Kernel{"batch_norm_apply",
                        apply_kernel<decltype(storage)::kType, decltype(residual)::value,
                                     decltype(relu)::value>},
                 grid.blocks, kLanes, cudaStream_t(stream), args, grid, wide);
        });
      });
    });
  }

  void reduce(const ReduceArgs& args, void* stream) override {
    bool wide = aligned(args.image, {args.x, args.g});
    for (int b = 0; b < args.branches; ++b) wide = wide && aligned(args.image, {args.dy[b]});
    with_storage(args.image.dtype, [&](auto storage) {
      launch(Kernel{"batch_norm_reduce", reduce_kernel<decltype(storage)::kType>},
             sum_blocks(args.image), kSumThreads, cudaStream_t(stream), args, wide);
    });
    launch(Kernel{"batch_norm_finish_reduce", finish_reduce_kernel},
           ceil_div(args.image.channels, kFinishChannels), kLanes, cudaStream_t(stream), args);
  }

  void input_gradient(const InputGradientArgs& args, void* stream) override {
    const Grid grid(args.image);
    const bool wide = aligned(args.image, {args.x, args.dy, args.dx});
    with_storage(args.image.dtype, [&](auto storage) {
      with_bool(args.sum_dy == nullptr, [&](auto frozen) {
        launch(Kernel{"batch_norm_dx",
                      input_gradient_kernel<decltype(storage)::kType, decltype(frozen)::value>},
               grid.blocks, kLanes, cudaStream_t(stream), args, grid, wide);
      });
    });
  }
};

}  // namespace

BatchNorm& cuda_batch_norm() {
  static CudaBatchNorm batch_norm;
  return batch_norm;
}

}  // namespace ampfuse
