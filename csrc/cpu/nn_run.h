// The kernels of nn.h for one instruction set, which is included after it.
//
// Lanes of a vector are neighbouring channels, so every channel's sums have the order of its rows
// whatever the width. Sums walk down a strip of channels with their accumulators in registers; maps
// walk along the rows.
#pragma once

#include <cstring>

#include "nn.h"

namespace ampfuse {
namespace {

HD int lanes_of(int count, int first, int width) {
  return count - first < width ? count - first : width;
}

// Vector `first` of a row's channels from c on, of which `count` exist. kWhole: the vector does.
template <class Lanes, class F, bool kWhole>
HD F load_at(const char* row, int64_t c, int first, int count) {
  const char* address = row + (c + first) * Lanes::kSize;
  if constexpr (kWhole) return Lanes::widen(Lanes::load(address));
  const int lanes = lanes_of(count, first, F::kWidth);
  return lanes > 0 ? F(Lanes::widen(Lanes::load_first(address, lanes))) : F(0.0f);
}

template <class Lanes, class F, bool kWhole>
HD void store_at(const F& x, char* row, int64_t c, int first, int count) {
  char* address = row + (c + first) * Lanes::kSize;
  if constexpr (kWhole) return Lanes::store(address, Lanes::narrow(x));
  const int lanes = lanes_of(count, first, F::kWidth);
  if (lanes > 0) Lanes::store_first(address, Lanes::narrow(x), lanes);
}

template <class F>
HD F load_floats(const float* values) {
  using Floats = typename F::template Lanes<DType::kFloat32>;
  return Floats::widen(Floats::load(values));
}

// The bits of a group from channel c on.
template <bool kWhole>
HD uint32_t load_bits(const uint8_t* mask, int64_t c, int count) {
  uint16_t bits = 0;
  std::memcpy(&bits, mask + c / 8, kWhole || count > 8 ? 2 : 1);
  return bits;
}

template <bool kWhole>
HD void store_bits(uint32_t bits, uint8_t* mask, int64_t c, int count) {
  const uint16_t stored = uint16_t(bits);
  std::memcpy(mask + c / 8, &stored, kWhole || count > 8 ? 2 : 1);
}

template <class Op, bool kWhole>
HD uint32_t mask_bits(const NnArgs& args, int64_t row, int64_t c, int count) {
  if (!(Op::kReads & kMask) || args.mask == nullptr) return 0xffffu;
  return load_bits<kWhole>(args.mask + row * args.image.mask_bytes(), c, count);
}

HD char* row_of(const NnArgs& args, int image, int64_t row) {
  return static_cast<char*>(args.images[image]) + row * args.image.row_bytes();
}

// x of the images in kLists that an op reads, and back to those that it writes.
template <unsigned kLists, class Lanes, bool kWhole, class F>
HD void load_images(const NnArgs& args, int64_t row, int64_t c, int first, int count,
                    F (&x)[kMaxImages]) {
#pragma GCC unroll 4
  for (int i = 0; i < kMaxImages; ++i)
    if (kLists & bit(i)) x[i] = load_at<Lanes, F, kWhole>(row_of(args, i, row), c, first, count);
}
template <unsigned kLists, class Lanes, bool kWhole, class F>
HD void store_images(const NnArgs& args, int64_t row, int64_t c, int first, int count,
                     const F (&x)[kMaxImages]) {
#pragma GCC unroll 4
  for (int i = 0; i < kMaxImages; ++i)
    if (kLists & bit(i)) store_at<Lanes, F, kWhole>(x[i], row_of(args, i, row), c, first, count);
}

// Rows ahead that sums fetch: a strip is a few lines of each row, and the hardware's prefetchers do
// not follow it from page to page.
constexpr int64_t kRowsAhead = 8;

template <unsigned kLists, int kBytes>
HD void fetch(const NnArgs& args, int64_t row, int64_t offset) {
#pragma GCC unroll 4
  for (int i = 0; i < kMaxImages; ++i) {
    if (!(kLists & bit(i))) continue;
#pragma GCC unroll 8
    for (int line = 0; line < kBytes; line += 64)
      __builtin_prefetch(row_of(args, i, row) + offset + line);
  }
}

// Of each channel of a span.
template <int kCoefs>
struct SpanSums {
  alignas(64) float coefs[kCoefs][kTaskChannels] = {};
  alignas(64) float first[kTaskChannels] = {}, second[kTaskChannels] = {};
};

// Adds rows [begin, end), a tile, to the sums of a strip: the channels from c on, which are those
// from i on of the task.
template <class Op, unsigned kLists, class F, DType kType, int kGroups, bool kWhole>
HD void add_tile(const NnArgs& args, int64_t begin, int64_t end, int64_t c, int count, int64_t i,
                 SpanSums<Op::kCoefs>& sums) {
  using Lanes = typename F::template Lanes<kType>;
  using Floats = typename F::template Lanes<DType::kFloat32>;
  constexpr int kEach = kGroup / F::kWidth;  // vectors of a group
  constexpr int kCount = kGroups * kEach;
  constexpr unsigned kRead = kLists & Op::kReads, kWritten = kLists & Op::kWrites;
  constexpr bool kOfRow = Op::kCoefsOfRow;
  F coef[kOfRow ? 1 : kCount][Op::kCoefs], first[kCount], second[kCount];
  for (int v = 0; v < kCount; ++v) {
    for (int k = 0; k < Op::kCoefs && !kOfRow; ++k)
      coef[v][k] = load_floats<F>(sums.coefs[k] + i + v * F::kWidth);
    first[v] = second[v] = F(0.0f);
  }
  for (int64_t row = begin; row < end; ++row) {
    if constexpr (kOfRow) {
      float of_row[Op::kCoefs];
      Op::template coefs<kLists>(args, row, c, of_row);
      for (int k = 0; k < Op::kCoefs; ++k) coef[0][k] = F(of_row[k]);
    }
    fetch<kRead, kGroups * kGroup* int(Lanes::kSize)>(args, row + kRowsAhead, c * Lanes::kSize);
#pragma GCC unroll 8
    for (int group = 0; group < kGroups; ++group) {
      const uint32_t bits = mask_bits<Op, kWhole>(args, row, c + group * kGroup, count);
#pragma GCC unroll 16
      for (int e = 0; e < kEach; ++e) {
        const int v = group * kEach + e;
        F x[kMaxImages] = {};
        load_images<kRead, Lanes, kWhole>(args, row, c, v * F::kWidth, count, x);
        Op::template add<kLists>(x, coef[kOfRow ? 0 : v], bits >> e * F::kWidth, first[v],
                                 second[v]);
        store_images<kWritten, Lanes, kWhole>(args, row, c, v * F::kWidth, count, x);
      }
    }
  }
  for (int v = 0; v < kCount; ++v) {
    float* const sum = sums.first + i + v * F::kWidth;
    float* const other = sums.second + i + v * F::kWidth;
    Floats::store(sum, Floats::narrow(load_floats<F>(sum) + first[v]));
    Floats::store(other, Floats::narrow(load_floats<F>(other) + second[v]));
  }
}

// Groups of a strip whose accumulators fit into the registers: 32 of 512 bits, 16 of 256.
template <class F>
constexpr int kStripGroups = F::kWidth == 16  ? 8
                             : F::kWidth == 8 ? 2
                                              : 1;

// run(groups, whole, c, count) over channels [begin, end), in strips as wide as registers allow.
template <int kGroups, class Run>
HD void for_strips(int64_t begin, int64_t end, const Run& run) {
  for (; begin + kGroups * kGroup <= end; begin += kGroups * kGroup)
    run(std::integral_constant<int, kGroups>(), std::true_type(), begin, kGroups * kGroup);
  if constexpr (kGroups > 1) {
    for_strips<kGroups / 2>(begin, end, run);
  } else if (begin < end) {
    run(std::integral_constant<int, 1>(), std::false_type(), begin, int(end - begin));
  }
}

// run(whole, row, c, count) for every group of channels of rows [begin, end).
template <class Run>
HD void for_groups(const ImageRows& image, int64_t begin, int64_t end, const Run& run) {
  for (int64_t row = begin; row < end; ++row) {
    int64_t c = 0;
    for (; c + kGroup <= image.channels; c += kGroup) run(std::true_type(), row, c, kGroup);
    if (c < image.channels) run(std::false_type(), row, c, int(image.channels - c));
  }
}

// run(lists, type): what the op is compiled for.
template <class Op, class Run>
HD void with_instance(const NnArgs& args, const Run& run) {
  with_lists<Op>(args, [&](auto lists) HD_LAMBDA {
    with_storage(args.image.dtype, [&](auto storage) HD_LAMBDA {
      run(lists, std::integral_constant<DType, decltype(storage)::kType>());
    });
  });
}

}  // namespace

template <class Isa, class Op>
void NnKernel<Isa, Op>::sum(NnArgs args, int64_t span, int64_t begin, int64_t end) {
  const ImageRows& image = args.image;
  const int64_t first = span * kSpanRows, last = first + image.rows_of(span);
  SpanSums<Op::kCoefs> sums;
  with_instance<Op>(args, [&](auto lists, auto type) HD_LAMBDA {
    for (int64_t c = begin; c < end && !Op::kCoefsOfRow; ++c) {
      float coef[Op::kCoefs];
      Op::template coefs<lists>(args, first, c, coef);
      for (int k = 0; k < Op::kCoefs; ++k) sums.coefs[k][c - begin] = coef[k];
    }
    // All strips of a tile before the next: what is read lies together.
    for (int64_t tile = first; tile < last; tile += kTileRows) {
      const int64_t tile_end = tile + kTileRows < last ? tile + kTileRows : last;
      for_strips<kStripGroups<Isa>>(begin, end,
                                    [&](auto groups, auto whole, int64_t c, int count) HD_LAMBDA {
                                      add_tile<Op, lists, Isa, type, groups, whole>(
                                          args, tile, tile_end, c, count, c - begin, sums);
                                    });
    }
  });
  for (int64_t c = begin; c < end; ++c) {
    const int64_t i = c - begin;
    float coef[Op::kCoefs];
    for (int k = 0; k < Op::kCoefs; ++k) coef[k] = sums.coefs[k][i];
    args.partials_of<typename Op::Partial>(c)[span] =
        Op::partial(coef, sums.first[i], sums.second[i]);
  }
}

template <class Isa, class Op>
void NnKernel<Isa, Op>::map(NnArgs args, const float* coefs, int64_t begin, int64_t end) {
  const int64_t stride = coef_stride(args.image);
  with_instance<Op>(args, [&](auto lists, auto type) HD_LAMBDA {
    using Lanes = typename Isa::template Lanes<type>;
    constexpr unsigned kRead = lists & Op::kReads, kWritten = lists & Op::kWrites;
    for_groups(args.image, begin, end,
               [&](auto whole, int64_t row, int64_t c, int count) HD_LAMBDA {
                 const uint32_t bits = mask_bits<Op, whole>(args, row, c, count);
                 uint32_t written = 0;
#pragma GCC unroll 16
                 for (int first = 0; first < kGroup; first += Isa::kWidth) {
                   Isa x[kMaxImages] = {}, coef[Op::kCoefs];
                   for (int k = 0; k < Op::kCoefs; ++k)
                     coef[k] = load_floats<Isa>(coefs + k * stride + c + first);
                   load_images<kRead, Lanes, whole>(args, row, c, first, count, x);
                   uint32_t some = bits >> first;
                   Op::template apply<lists>(x, coef, some);
                   written |= some << first;
                   store_images<kWritten, Lanes, whole>(args, row, c, first, count, x);
                 }
                 if constexpr (kWritten & kMask)
                   store_bits<whole>(written, args.mask + row * args.image.mask_bytes(), c, count);
               });
  });
}

}  // namespace ampfuse
