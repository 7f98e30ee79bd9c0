// The kernels of nn.h for channels, for one instruction set.
//
// Lanes of a vector are neighbouring channels, so every channel's sums have the order of its rows
// whatever the width. All kernels walk along whole rows, because contiguous memory is read fastest;
// the sums of a tile are in a cache.
#pragma once

#include <cstring>

#include "nn.h"

namespace ampfuse {
namespace {

// How many of `count` columns a vector that begins with column `first` has: zero or less past them.
HD int columns_in_vector(int count, int first, int width) {
  return count - first < width ? count - first : width;
}

// Vector `first` of a row's channels from c on, of which `count` exist. kWhole: the vector does.
template <class Lanes, class F, bool kWhole>
HD F load_columns(const char* row, int64_t c, int first, int count) {
  const char* address = row + (c + first) * Lanes::kSize;
  if constexpr (kWhole) return Lanes::widen(Lanes::load(address));
  const int lanes = columns_in_vector(count, first, F::kWidth);
  return lanes > 0 ? F(Lanes::widen(Lanes::load_first(address, lanes))) : F(0.0f);
}

template <class Lanes, class F, bool kWhole>
HD void store_columns(const F& x, char* row, int64_t c, int first, int count) {
  char* address = row + (c + first) * Lanes::kSize;
  if constexpr (kWhole) return Lanes::store(address, Lanes::narrow(x));
  const int lanes = columns_in_vector(count, first, F::kWidth);
  if (lanes > 0) Lanes::store_first(address, Lanes::narrow(x), lanes);
}

// run(first) for each vector of a group, unrolled if there are vectors: sixteen copies of an
// exponential would be most of the compile time of the scalar kernels.
template <class F, class Run>
HD void for_group_vectors(const Run& run) {
  if constexpr (F::kWidth > 1) {
#pragma GCC unroll 4
    for (int first = 0; first < kMaskChannels; first += F::kWidth) run(first);
  } else {
#pragma GCC unroll 1
    for (int first = 0; first < kMaskChannels; ++first) run(first);
  }
}

template <class F>
HD F load_floats(const float* values) {
  using Floats = typename F::template Lanes<DType::kFloat32>;
  return Floats::widen(Floats::load(values));
}
template <class F>
HD void store_floats(const F& x, float* values) {
  using Floats = typename F::template Lanes<DType::kFloat32>;
  Floats::store(values, Floats::narrow(x));
}

// The bits of a group from channel c on.
template <bool kWhole>
HD uint32_t load_mask(const uint8_t* mask, int64_t c, int count) {
  uint16_t bits = 0;
  std::memcpy(&bits, mask + c / 8, kWhole || count > 8 ? 2 : 1);
  return bits;
}

template <bool kWhole>
HD void store_mask(uint32_t bits, uint8_t* mask, int64_t c, int count) {
  const uint16_t stored = uint16_t(bits);
  std::memcpy(mask + c / 8, &stored, kWhole || count > 8 ? 2 : 1);
}

template <class Op, bool kWhole>
HD uint32_t mask_bits(const NnArgs& args, int64_t row, int64_t c, int count) {
  if (!(Op::kReads & kMask) || args.mask == nullptr) return 0xffffu;
  return load_mask<kWhole>(args.mask + row * args.image.mask_bytes(), c, count);
}

HD char* row_of(const NnArgs& args, int image, int64_t row) {
  return static_cast<char*>(args.images[image]) + row * args.image.row_bytes();
}

// Loads x from the images in kUsed that an op reads, and stores it to those that it writes.
template <unsigned kUsed, class Lanes, bool kWhole, class F>
HD void load_images(const NnArgs& args, int64_t row, int64_t c, int first, int count,
                    F (&x)[kMaxImages]) {
#pragma GCC unroll 4
  for (int i = 0; i < kMaxImages; ++i)
    if (kUsed & bit(i))
      x[i] = load_columns<Lanes, F, kWhole>(row_of(args, i, row), c, first, count);
}
template <unsigned kUsed, class Lanes, bool kWhole, class F>
HD void store_images(const NnArgs& args, int64_t row, int64_t c, int first, int count,
                     const F (&x)[kMaxImages]) {
#pragma GCC unroll 4
  for (int i = 0; i < kMaxImages; ++i)
    if (kUsed & bit(i))
      store_columns<Lanes, F, kWhole>(x[i], row_of(args, i, row), c, first, count);
}

// run(whole, row, c, count) for every group of channels of rows [begin, end).
template <class Run>
HD void for_groups(const ImageRows& image, int64_t begin, int64_t end, const Run& run) {
  for (int64_t row = begin; row < end; ++row) {
    int64_t c = 0;
    for (; c + kMaskChannels <= image.channels; c += kMaskChannels)
      run(std::true_type(), row, c, kMaskChannels);
    if (c < image.channels) run(std::false_type(), row, c, int(image.channels - c));
  }
}

// run(used, type) of the instance that is compiled for the arguments.
template <class Op, class Run>
HD void with_instance(const NnArgs& args, const Run& run) {
  with_used_images<Op>(args, [&](auto used) HD_LAMBDA {
    with_storage(args.image.dtype, [&](auto storage) HD_LAMBDA {
      constexpr DType kType = decltype(storage)::kType;
      run(std::integral_constant<unsigned, used | half_images(kType)>(),
          std::integral_constant<DType, kType>());
    });
  });
}

// Adds a row to the sums of its tile: a row's first sums, then its second ones.
template <class Op, unsigned kUsed, class F, DType kType>
HD void add_row(const NnArgs& args, int64_t row, const float* coefs, float* sums) {
  using Lanes = typename F::template Lanes<kType>;
  constexpr unsigned kRead = kUsed & Op::kReads, kWritten = kUsed & Op::kWrites;
  const int64_t stride = coef_stride(args.image);
  F coef[Op::kCoefs];
  if constexpr (Op::kCoefsOfRow) {
    float of_row[Op::kCoefs];
    Op::template coefs<kUsed>(args, row, 0, of_row);
    for (int k = 0; k < Op::kCoefs; ++k) coef[k] = F(of_row[k]);
  }
  for_groups(args.image, row, row + 1, [&](auto whole, int64_t, int64_t c, int count) HD_LAMBDA {
    const uint32_t bits = mask_bits<Op, whole>(args, row, c, count);
    for_group_vectors<F>([&](int v) HD_LAMBDA {
      float *const first = sums + c + v, *const second = first + stride;
      F x[kMaxImages] = {}, first_sum = load_floats<F>(first), second_sum = load_floats<F>(second);
      for (int k = 0; k < Op::kCoefs && !Op::kCoefsOfRow; ++k)
        coef[k] = load_floats<F>(coefs + k * stride + c + v);
      load_images<kRead, Lanes, whole>(args, row, c, v, count, x);
      Op::template add<kUsed>(x, coef, bits >> v, first_sum, second_sum);
      store_images<kWritten, Lanes, whole>(args, row, c, v, count, x);
      store_floats(first_sum, first);
      store_floats(second_sum, second);
    });
  });
}

}  // namespace

template <class Isa, class Op>
void NnKernel<Isa, Op>::sum(NnArgs args, const float* coefs, int64_t begin, int64_t end,
                            float* tile_sums, float* sums) {
  const int64_t count = 2 * coef_stride(args.image);
  with_instance<Op>(args, [&](auto used, auto type) HD_LAMBDA {
    for (int64_t tile = begin; tile < end; tile += kTileRows) {
      const int64_t tile_end = tile + kTileRows < end ? tile + kTileRows : end;
      float* const to = tile == begin ? sums : tile_sums;
      std::memset(to, 0, size_t(count) * sizeof(float));
      for (int64_t row = tile; row < tile_end; ++row)
        add_row<Op, used, Isa, type>(args, row, coefs, to);
      for (int64_t i = 0; i < count && to != sums; i += Isa::kWidth)
        store_floats(load_floats<Isa>(sums + i) + load_floats<Isa>(to + i), sums + i);
    }
  });
}

template <class Isa, class Op>
void NnKernel<Isa, Op>::map(NnArgs args, const float* coefs, int64_t begin, int64_t end) {
  const int64_t stride = coef_stride(args.image);
  with_instance<Op>(args, [&](auto used, auto type) HD_LAMBDA {
    using Lanes = typename Isa::template Lanes<type>;
    constexpr unsigned kRead = used & Op::kReads, kWritten = used & Op::kWrites;
    for_groups(args.image, begin, end,
               [&](auto whole, int64_t row, int64_t c, int count) HD_LAMBDA {
                 const uint32_t bits = mask_bits<Op, whole>(args, row, c, count);
                 uint32_t written = 0;
                 for_group_vectors<Isa>([&](int first) HD_LAMBDA {
                   Isa x[kMaxImages] = {}, coef[Op::kCoefs];
                   for (int k = 0; k < Op::kCoefs; ++k)
                     coef[k] = load_floats<Isa>(coefs + k * stride + c + first);
                   load_images<kRead, Lanes, whole>(args, row, c, first, count, x);
                   uint32_t bits_of_vector = bits >> first;
                   Op::template apply<used>(x, coef, bits_of_vector);
                   written |= bits_of_vector << first;
                   store_images<kWritten, Lanes, whole>(args, row, c, first, count, x);
                 });
                 if constexpr (kWritten & kMask)
                   store_mask<whole>(written, args.mask + row * args.image.mask_bytes(), c, count);
               });
  });
}

}  // namespace ampfuse
