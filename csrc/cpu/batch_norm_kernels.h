// The kernels of batch_norm.h for one instruction set, which has been included before.
//
// Lanes of a vector are neighbouring channels, so every channel's sums have the order of its rows
// whatever the width. Sums walk down a strip of channels with their accumulators in registers; the
// other passes walk along the rows.
#pragma once

#include <cstring>
#include <type_traits>

#include "batch_norm.h"

namespace ampfuse {
namespace {

constexpr int kGroup = 16;  // channels of which masks are handled at a time

// Vectors of F that hold kGroups groups, of which the first `count` channels exist. kWhole: all do.
template <class F, int kGroups>
constexpr int kVectors = kGroups * kGroup / F::kWidth;

HD int lanes_of(int count, int first, int width) {
  return count - first < width ? count - first : width;
}

template <class Lanes, class F, bool kWhole>
HD F load_at(const char* data, int64_t c, int first, int count) {
  const char* address = data + (c + first) * Lanes::kSize;
  if constexpr (kWhole) return Lanes::widen(Lanes::load(address));
  const int lanes = lanes_of(count, first, F::kWidth);
  return lanes > 0 ? F(Lanes::widen(Lanes::load_first(address, lanes))) : F(0.0f);
}

template <class Lanes, class F, bool kWhole>
HD void store_at(const F& x, char* data, int64_t c, int first, int count) {
  char* address = data + (c + first) * Lanes::kSize;
  if constexpr (kWhole) return Lanes::store(address, Lanes::narrow(x));
  const int lanes = lanes_of(count, first, F::kWidth);
  if (lanes > 0) Lanes::store_first(address, Lanes::narrow(x), lanes);
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

HD const char* row_of(const void* data, const ImageRows& image, int64_t row) {
  return static_cast<const char*>(data) + row * image.row_bytes();
}
HD char* row_of(void* data, const ImageRows& image, int64_t row) {
  return static_cast<char*>(data) + row * image.row_bytes();
}

// Rows ahead that sums fetch: a strip is a few lines of each row, and the hardware's prefetchers do
// not follow it from page to page.
constexpr int64_t kRowsAhead = 8;

template <int kBytes>
HD void fetch(const char* address) {
#pragma GCC unroll 8
  for (int line = 0; line < kBytes; line += 64) __builtin_prefetch(address + line);
}

template <class F, bool kWhole>
HD F coef(const float* values, int64_t c, int first, int count) {
  return load_at<typename F::template Lanes<DType::kFloat32>, F, kWhole>(
      reinterpret_cast<const char*>(values), c, first, count);
}

// The two sums of each channel of a span, in FP32.
struct SpanSums {
  alignas(64) float first[kTaskChannels] = {}, second[kTaskChannels] = {};
};

// Adds rows [begin, end), a tile, to a strip's sums: add(row, first, second) with the accumulators
// of each vector.
template <class F, int kGroups, class Add>
HD void add_rows(int64_t begin, int64_t end, float* sums, float* more, const Add& add) {
  using Floats = typename F::template Lanes<DType::kFloat32>;
  constexpr int kCount = kVectors<F, kGroups>;
  F first[kCount], second[kCount];
  for (int v = 0; v < kCount; ++v) first[v] = second[v] = F(0.0f);
  for (int64_t row = begin; row < end; ++row) add(row, first, second);
  for (int v = 0; v < kCount; ++v) {
    float* const sum = sums + v * F::kWidth;
    float* const other = more + v * F::kWidth;
    Floats::store(sum, Floats::narrow(Floats::widen(Floats::load(sum)) + first[v]));
    Floats::store(other, Floats::narrow(Floats::widen(Floats::load(other)) + second[v]));
  }
}

template <class F, DType kType, int kGroups, bool kWhole>
HD void add_moments(const MomentArgs& args, int64_t begin, int64_t end, int64_t c, int count,
                    const float* shift, float* sums, float* squares) {
  using Lanes = typename F::template Lanes<kType>;
  constexpr int kCount = kVectors<F, kGroups>;
  const int64_t row_bytes = args.image.row_bytes();
  F shifts[kCount];
  for (int v = 0; v < kCount; ++v) shifts[v] = coef<F, true>(shift, 0, v * F::kWidth, 0);
  add_rows<F, kGroups>(
      begin, end, sums, squares, [&](int64_t row, F(&sum)[kCount], F(&square)[kCount]) HD_LAMBDA {
        const char* x = row_of(args.x, args.image, row);
        fetch<kGroups * kGroup * Lanes::kSize>(x + kRowsAhead * row_bytes + c * Lanes::kSize);
#pragma GCC unroll 16
        for (int v = 0; v < kCount; ++v) {
          const F d = load_at<Lanes, F, kWhole>(x, c, v * F::kWidth, count) - shifts[v];
          sum[v] = sum[v] + d;
          square[v] = fma(d, d, square[v]);
        }
      });
}

// kBranches: how many dy there are, if known. kKeep: g is written.
template <class F, DType kType, int kGroups, bool kWhole, int kBranches, bool kKeep>
HD void add_gradients(const ReduceArgs& args, int64_t begin, int64_t end, int64_t c, int count,
                      float* sums, float* centered) {
  using Lanes = typename F::template Lanes<kType>;
  constexpr int kCount = kVectors<F, kGroups>;
  constexpr int kEach = kGroup / F::kWidth;  // vectors of a group
  const int64_t mask_bytes = args.image.mask_bytes(), row_bytes = args.image.row_bytes();
  F mean[kCount];
  for (int v = 0; v < kCount; ++v) mean[v] = coef<F, kWhole>(args.mean, c, v * F::kWidth, count);
  add_rows<F, kGroups>(
      begin, end, sums, centered, [&](int64_t row, F(&sum)[kCount], F(&product)[kCount]) HD_LAMBDA {
        const char* x = row_of(args.x, args.image, row);
        const char* dy = row_of(args.dy[0], args.image, row);
        constexpr int kBytes = kGroups * kGroup * Lanes::kSize;
        fetch<kBytes>(x + kRowsAhead * row_bytes + c * Lanes::kSize);
        fetch<kBytes>(dy + kRowsAhead * row_bytes + c * Lanes::kSize);
#pragma GCC unroll 8
        for (int group = 0; group < kGroups; ++group) {
          const uint32_t bits =
              args.mask ? load_bits<kWhole>(args.mask + row * mask_bytes, c + group * kGroup, count)
                        : 0xffffu;
#pragma GCC unroll 16
          for (int e = 0; e < kEach; ++e) {
            const int v = group * kEach + e, first = v * F::kWidth;
            F g = load_at<Lanes, F, kWhole>(dy, c, first, count);
            if constexpr (kBranches != 1) {
              for (int b = 1; b < (kBranches ? kBranches : args.branches); ++b)
                g = g +
                    load_at<Lanes, F, kWhole>(row_of(args.dy[b], args.image, row), c, first, count);
              g = Lanes::widen(Lanes::narrow(g));
            }
            g = keep(bits >> e * F::kWidth, g);
            if constexpr (kKeep)
              store_at<Lanes, F, kWhole>(g, row_of(args.g, args.image, row), c, first, count);
            sum[v] = sum[v] + g;
            product[v] =
                fma(g, load_at<Lanes, F, kWhole>(x, c, first, count) - mean[v], product[v]);
          }
        }
      });
}

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

// Groups of a strip whose accumulators fit into the registers: 32 of 512 bits, 16 of 256.
template <class F>
constexpr int kStripGroups = F::kWidth == 16  ? 8
                             : F::kWidth == 8 ? 2
                                              : 1;

// add(groups, whole, first row, last row, c, count) for the tiles of a span, and in each for the
// strips of channels [begin, end): what is read lies together.
template <class F, int kGroups = kStripGroups<F>, class Add>
HD void for_tiles(const ImageRows& image, int64_t span, int64_t begin, int64_t end,
                  const Add& add) {
  const int64_t first = span * kSpanRows;
  const int64_t last = first + kSpanRows < image.rows ? first + kSpanRows : image.rows;
  for (int64_t tile = first; tile < last; tile += kTileRows) {
    const int64_t tile_end = tile + kTileRows < last ? tile + kTileRows : last;
    for_strips<kStripGroups<F>>(begin, end,
                                [&](auto groups, auto whole, int64_t c, int count)
                                    HD_LAMBDA { add(groups, whole, tile, tile_end, c, count); });
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

}  // namespace

template <class Isa>
void BatchNormKernels<Isa>::moments(MomentArgs args, int64_t span, int64_t begin, int64_t end) {
  float shift[kTaskChannels] = {};
  SpanSums sums;
  for (int64_t c = begin; c < end; ++c) {
    const void* row = row_of(args.x, args.image, span * kSpanRows);
    shift[c - begin] = first_finite(load_float(row, args.image.dtype, c));
  }
  with_storage(args.image.dtype, [&](auto storage) HD_LAMBDA {
    for_tiles<Isa>(
        args.image, span, begin, end,
        [&](auto groups, auto whole, int64_t first, int64_t last, int64_t c, int count) HD_LAMBDA {
          const int64_t i = c - begin;
          add_moments<Isa, decltype(storage)::kType, groups, whole>(
              args, first, last, c, count, shift + i, sums.first + i, sums.second + i);
        });
  });
  for (int64_t c = begin; c < end; ++c) {
    const int64_t i = c - begin;
    args.partials[c * args.image.spans() + span] = {shift[i], sums.first[i], sums.second[i]};
  }
}

template <class Isa>
void BatchNormKernels<Isa>::reduce(ReduceArgs args, int64_t span, int64_t begin, int64_t end) {
  SpanSums sums;
  const auto run = [&](auto branches, auto keep) HD_LAMBDA {
    constexpr int kGroups = keep && Isa::kWidth == 16 ? 4 : kStripGroups<Isa>;
    with_storage(args.image.dtype, [&](auto storage) HD_LAMBDA {
      for_tiles<Isa, kGroups>(
          args.image, span, begin, end,
          [&](auto groups, auto whole, int64_t first, int64_t last, int64_t c, int count)
              HD_LAMBDA {
                const int64_t i = c - begin;
                add_gradients<Isa, decltype(storage)::kType, groups, whole, branches, keep>(
                    args, first, last, c, count, sums.first + i, sums.second + i);
              });
    });
  };
  if (args.g == nullptr) {
    run(std::integral_constant<int, 1>(), std::false_type());
  } else if (args.branches == 1) {
    run(std::integral_constant<int, 1>(), std::true_type());
  } else if (args.branches == 2) {
    run(std::integral_constant<int, 2>(), std::true_type());
  } else {
    run(std::integral_constant<int, 0>(), std::true_type());
  }
  for (int64_t c = begin; c < end; ++c) {
    const int64_t i = c - begin;
    args.partials[c * args.image.spans() + span] = {sums.first[i], sums.second[i]};
  }
}

template <class Isa>
void BatchNormKernels<Isa>::apply(ApplyArgs args, ChannelCoefs coefs, int64_t begin, int64_t end) {
  with_storage(args.image.dtype, [&](auto storage) HD_LAMBDA {
    using Lanes = typename Isa::template Lanes<decltype(storage)::kType>;
    const ImageRows& image = args.image;
    const auto run = [&](auto add, auto relu) HD_LAMBDA {
      for_groups(image, begin, end, [&](auto whole, int64_t row, int64_t c, int count) HD_LAMBDA {
        constexpr bool kWhole = decltype(whole)::value;
        uint32_t bits = 0;
#pragma GCC unroll 16
        for (int first = 0; first < kGroup; first += Isa::kWidth) {
          Isa y =
              normalize(load_at<Lanes, Isa, kWhole>(row_of(args.x, image, row), c, first, count),
                        coef<Isa, kWhole>(coefs.mean, c, first, count),
                        coef<Isa, kWhole>(coefs.scale, c, first, count),
                        coef<Isa, kWhole>(coefs.bias, c, first, count));
          if constexpr (add)
            y = y + load_at<Lanes, Isa, kWhole>(row_of(args.residual, image, row), c, first, count);
          if constexpr (relu) {
            const uint32_t above = above_zero(y);
            y = keep(above, y);
            bits |= above << first;
          }
          store_at<Lanes, Isa, kWhole>(y, row_of(args.y, image, row), c, first, count);
        }
        if constexpr (relu)
          store_bits<kWhole>(bits, args.mask + row * image.mask_bytes(), c, count);
      });
    };
    if (args.residual) {
      args.mask ? run(std::true_type(), std::true_type())
                : run(std::true_type(), std::false_type());
    } else {
      args.mask ? run(std::false_type(), std::true_type())
                : run(std::false_type(), std::false_type());
    }
  });
}

template <class Isa>
void BatchNormKernels<Isa>::input_gradient(InputGradientArgs args, ChannelCoefs coefs,
                                           int64_t begin, int64_t end) {
  with_storage(args.image.dtype, [&](auto storage) HD_LAMBDA {
    using Lanes = typename Isa::template Lanes<decltype(storage)::kType>;
    const ImageRows& image = args.image;
    const auto run = [&](auto frozen) HD_LAMBDA {
      for_groups(image, begin, end, [&](auto whole, int64_t row, int64_t c, int count) HD_LAMBDA {
        constexpr bool kWhole = decltype(whole)::value;
        const uint32_t bits =
            args.mask ? load_bits<kWhole>(args.mask + row * image.mask_bytes(), c, count) : 0xffffu;
#pragma GCC unroll 16
        for (int first = 0; first < kGroup; first += Isa::kWidth) {
          const Isa g = keep(bits >> first, load_at<Lanes, Isa, kWhole>(row_of(args.dy, image, row),
                                                                        c, first, count));
          const Isa scale = coef<Isa, kWhole>(coefs.scale, c, first, count);
          Isa dx = g * scale;
          if constexpr (!frozen)
            dx = input_gradient_of(
                g, load_at<Lanes, Isa, kWhole>(row_of(args.x, image, row), c, first, count),
                coef<Isa, kWhole>(coefs.mean, c, first, count), scale,
                coef<Isa, kWhole>(coefs.mean_dy, c, first, count),
                coef<Isa, kWhole>(coefs.slope, c, first, count));
          store_at<Lanes, Isa, kWhole>(dx, row_of(args.dx, image, row), c, first, count);
        }
      });
    };
    args.sum_dy ? run(std::false_type()) : run(std::true_type());
  });
}

}  // namespace ampfuse
