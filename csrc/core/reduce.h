// Norms: sums of squares and largest magnitudes, in one order for every backend, thread count and
// vector width.
//
// A chunk is `kChunk` elements of one tensor. It is read in tiles of `kTile`; element i of a tile
// belongs to virtual lane i, which adds its squares in FP32, tile after tile. The `kPack`
// neighbouring lanes that one CUDA thread holds are added pairwise in FP32, the `kLanes` results in
// double by halving. The chunk's partial goes into a table; partials of a table are added by
// `kLanes` strided lanes and the same halving.
//
// The norm must not overflow for finite gradients (a BF16 gradient of 1e20 squares to more than
// FP32 holds), so a chunk whose largest element is out of the safe range is read a second time,
// scaled by a power of two: the idea of BLAS nrm2's ranges, decided per chunk and from its data
// alone.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/dtype.h"
#include "core/hd.h"
#include "core/scalar.h"

namespace ampfuse {

constexpr int kPack = 8;     // 16 bytes of half: what one CUDA thread reads at once
constexpr int kLanes = 256;  // threads of a CUDA block
constexpr int kTile = kPack * kLanes;
constexpr int64_t kChunk = 16 * kTile;

// Read by device code in one access.
struct alignas(16) Partial {
  double sum_squares;
  uint32_t largest;  // magnitude bits of the largest element; above kInfinityBits if one is NaN
};

// Largest magnitudes for which plain FP32 squares neither overflow nor lose their leading digits.
constexpr uint32_t kSafeLargest = (127u + 50) << 23;
constexpr uint32_t kSafeSmallest = (127u - 40) << 23;

HD bool needs_rescaling(uint32_t largest) {
  return largest != 0 && largest < kInfinityBits &&
         (largest >= kSafeLargest || largest < kSafeSmallest);
}

// Exponent k such that elements times 2^-k have safe squares.
HD int rescaling_exponent(uint32_t largest) {
  const int exponent = int(largest >> 23) - 127;
  return exponent > 100 ? 100 : exponent < -100 ? -100 : exponent;
}

// 2^exponent, a normal number.
HD double power_of_two(int exponent) {
  const uint64_t bits = uint64_t(exponent + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}

// The sum of one pack's lanes.
HD float sum_pack(const float* lane) {
  return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}

// The chunk's partial from the sum over lanes (of elements times 2^-exponent) and the largest
// magnitude.
HD Partial make_partial(double sum, int exponent, uint32_t largest) {
  Partial partial;
  partial.largest = largest;
  if (largest > kInfinityBits) {
    partial.largest = kNanBits;
    partial.sum_squares = double(bits_float(kNanBits));
  } else if (largest == kInfinityBits) {
    partial.sum_squares = double(bits_float(kInfinityBits));
  } else {
    partial.sum_squares = exponent == 0 ? sum : sum * power_of_two(2 * exponent);
  }
  return partial;
}

// Halving over the first `count` of `kWidth` values: merge(i, j) merges value j into value i, and
// all end in the first. On CUDA a block or a warp does the same with one thread a value
// (block_reduce.cuh).
template <int kWidth, class Merge>
HD void merge_by_halving(int count, const Merge& merge) {
  for (int offset = kWidth / 2; offset > 0; offset /= 2) {
    for (int i = 0; i < offset && i + offset < count; ++i) merge(i, i + offset);
    count = count < offset ? count : offset;
  }
}

// The sum of values, which it overwrites.
template <int kWidth>
HD double sum_by_halving(double* value, int count) {
  merge_by_halving<kWidth>(count, [&](int i, int other) HD_LAMBDA { value[i] += value[other]; });
  return count > 0 ? value[0] : 0.0;
}

// A table's partials are added by `kWidth` strided lanes, then by halving: kLanes over all of them,
// kRowLanes over one row's, where a warp does it.
constexpr int kRowLanes = 32;

// value(i) summed over i below `count`, in that way.
template <int kWidth, class Value>
HD double sum_strided(int64_t count, const Value& value) {
  double sum[kWidth];
  const int lanes = count < kWidth ? int(count) : kWidth;
  for (int lane = 0; lane < lanes; ++lane) {
    sum[lane] = value(lane);
    for (int64_t i = lane + kWidth; i < count; i += kWidth) sum[lane] += value(i);
  }
  return sum_by_halving<kWidth>(sum, lanes);
}

template <int kWidth>
HD double sum_partials(const Partial* partials, int64_t count) {
  return sum_strided<kWidth>(count, [&](int64_t i) HD_LAMBDA { return partials[i].sum_squares; });
}

HD uint32_t largest_partial(const Partial* partials, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (partials[i].largest > largest) largest = partials[i].largest;
  }
  return largest;
}

// A finite sum has a finite norm, even if FP32 would overflow; inf and NaN stay what they are.
HD float norm_of(double sum_squares) {
  const double norm = square_root(sum_squares);
  const double largest = 3.4028234663852886e38;
  return norm > largest && norm < bits_float(kInfinityBits) ? float(largest) : float(norm);
}

}  // namespace ampfuse
