// The kernels of row ops: sums along each row, and maps with a row's coefficients.
//
// In sums a group of threads holds the lanes of nn_op.h, a pack each, and takes spans of one row; a
// block has the groups of a row, or of several where they are short.
#pragma once

#include "core/nn_ops/nn_op.h"
#include "launch.cuh"
#include "pack.cuh"

namespace ampfuse {

constexpr int kGroupThreads = kRowWidth / kPack;
static_assert(kRowGroups * kGroupThreads == kLanes, "a block has the groups of a row");

// A row of the matrix, from some pack on.
template <DType kType>
struct RowPacks {
  static constexpr DType dtype = kType;
  static constexpr bool kCompact = false;
  char* data;
  bool aligned;

  __device__ RowPacks(void* base, const ImageRows& image, int64_t row, int64_t c, bool whole)
      : data(static_cast<char*>(base) + (row * image.channels + c) * element_size(kType)),
        aligned(whole) {}
  __device__ char* at(int i) const { return global_at(data, i * int(element_size(kType))); }
  __device__ bool wide() const { return aligned; }
};

// The pack of a row's columns from c on, of which `count` exist.
template <DType kType>
__device__ inline void load_columns(const NnArgs& args, int image, int64_t row, int64_t c,
                                    int count, bool aligned, float (&x)[kPack]) {
  const RowPacks<kType> packs(args.images[image], args.image, row, c, aligned);
  widen(load_pack<false, kPack>(packs, 0, count), kType, x);
}

template <class Op, bool kPlain, DType kType>
__global__ void __launch_bounds__(kLanes, 2) row_sum_kernel(NnArgs args, int groups, bool aligned) {
  const int64_t columns = args.image.channels, spans = ceil_div(columns, kSpanColumns);
  const int place = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
  const int group = place % groups;
  const int64_t row = blockIdx.x * int64_t(kRowGroups / groups) + place / groups;
  const bool exists = row < args.image.rows;
  const float* weights = args.vectors[Op::kWeight];

  float value[kPack][Op::kValues];
#pragma unroll
  for (int k = 0; k < kPack; ++k) Op::start(value[k]);
  for (int64_t span = group; exists && span < spans; span += groups) {
    const int64_t begin = span * kSpanColumns + thread * kPack;
#pragma unroll 4
    for (int64_t c = begin; c < begin + kSpanColumns; c += kRowWidth) {
      const int count = columns - c < kPack ? int(columns - c) : kPack;
      if (count <= 0) continue;
      float x[kPack];
      load_columns<kType>(args, Op::kInput, row, c, count, aligned, x);
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        if (k >= count) continue;
        const float weight = kPlain || weights == nullptr ? 1.0f : weights[c + k];
        Op::template add<kPlain>(value[k], x[k], weight, 1u);
      }
    }
  }

  for (int offset = kGroupThreads / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      float other[Op::kValues];
#pragma unroll
      for (int i = 0; i < Op::kValues; ++i)
        other[i] = __shfl_down_sync(kWholeWarp, value[k][i], offset);
      if (thread < offset) Op::merge(value[k], other);
    }
  }
  __shared__ float of_groups[kRowGroups][Op::kValues];
  if (thread == 0) {
#pragma unroll
    for (int offset = kPack / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int k = 0; k < offset; ++k) Op::merge(value[k], value[k + offset]);
    }
#pragma unroll
    for (int i = 0; i < Op::kValues; ++i) of_groups[place][i] = value[0][i];
  }
  __syncthreads();
  if (thread != 0 || group != 0 || !exists) return;
  int count = spans < kRowGroups ? int(spans) : kRowGroups;
  for (int offset = kRowGroups / 2; offset > 0; offset /= 2) {
    for (int i = 0; i < offset && i + offset < count; ++i)
      Op::merge(of_groups[place + i], of_groups[place + i + offset]);
    count = count < offset ? count : offset;
  }
  Op::finish(args, row, of_groups[place]);
}

constexpr int kPacksEach = 4;  // of a thread

// How the threads of a block lie: `width` packs wide, a power of two.
struct RowGrid {
  int width = 1;
  int64_t strips, blocks;

  explicit RowGrid(const ImageRows& image) {
    const int64_t packs = ceil_div(image.channels, kPack);
    while (width < packs && width < kLanes) width *= 2;
    strips = ceil_div(packs, width * kPacksEach);
    blocks = strips * ceil_div(image.rows, kLanes / width);
  }
};

// Backwards over the rows: what the sum read last is still in the L2 cache.
template <class Op, bool kPlain, DType kType>
__global__ void __launch_bounds__(kLanes) row_map_kernel(NnArgs args, RowGrid grid, bool aligned) {
  const int64_t columns = args.image.channels, block = grid.blocks - 1 - blockIdx.x;
  const int64_t row = block / grid.strips * (kLanes / grid.width) + threadIdx.x / grid.width;
  if (row >= args.image.rows) return;
  const float* weights = args.vectors[Op::kWeight];
  const bool counts = Op::counts(args, row);
  const int64_t target = args.targets[row];
  float coef[Op::kCoefs] = {};
  if (counts) Op::coefs(args, row, coef);
  const int64_t begin =
      (block % grid.strips * kPacksEach * grid.width + threadIdx.x % grid.width) * kPack;
#pragma unroll
  for (int i = 0; i < kPacksEach; ++i) {
    const int64_t c = begin + int64_t(i) * grid.width * kPack;
    const int count = columns - c < kPack ? int(columns - c) : kPack;
    if (count <= 0) continue;
    float x[kPack];
    load_columns<kType>(args, Op::kInput, row, c, count, aligned, x);
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const float weight = kPlain || weights == nullptr || k >= count ? 1.0f : weights[c + k];
      const float y = Op::template apply<kPlain>(x[k], coef, weight, uint32_t(c + k == target));
      x[k] = counts ? y : 0.0f;
    }
    store_pack<false>(RowPacks<kType>(args.images[Op::kOutput], args.image, row, c, aligned), 0,
                      count, narrow(x, kType));
  }
}

template <class Op, bool kPlain, DType kType>
void start_rows(const NnArgs& args, bool aligned, cudaStream_t stream) {
  const ImageRows& image = args.image;
  if constexpr (Op::kKind == PassKind::kRowSum) {
    int groups = 1;
    while (groups < kRowGroups && groups * int64_t(kSpanColumns) < image.channels) groups *= 2;
    launch(Kernel{Op::kName, row_sum_kernel<Op, kPlain, kType>},
           ceil_div(image.rows, kRowGroups / groups), kLanes, stream, args, groups, aligned);
  } else {
    const RowGrid grid(image);
    launch(Kernel{Op::kName, row_map_kernel<Op, kPlain, kType>}, grid.blocks, kLanes, stream, args,
           grid, aligned);
  }
}

}  // namespace ampfuse
