// What a metered step records for each row: how its weights moved and what its gradient was made
// of. The pass has the old and the new weight in registers, so it reads no more than any other
// step.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/hd.h"
#include "core/table.h"

namespace ampfuse {

// Exponents of the gradient are counted by fours, in bins that begin at 2^-126, 2^-122, ..., 2^-14
// (FP16's smallest normal number), ..., 2^122; the first bin counts all below. A sample is enough:
// the first 16 of every 1,024 elements of a chunk.
constexpr int kExponentBins = 64;

HD constexpr bool is_sampled(int64_t i) { return i % 1024 < 16; }
HD int exponent_bin(float gradient) {
  const uint32_t bin = ((float_bits(gradient) & 0x7fffffffu) + (3u << 23)) >> 25;
  return bin < kExponentBins ? int(bin) : kExponentBins - 1;  // inf and NaN are in the last
}

enum MeterCount : int {
  kElements,   // of a row that was stepped; all counts of another are zero
  kChanged,    // weights whose bits changed: in half precision where there is such a weight
  kStale,      // weights that moved in FP32 and whose bits in half precision stayed
  kZero,       // gradient elements, as the step found them
  kSubnormal,  // ... not zero, below the smallest normal number of their type
  kExponents,
  kMeterCounts = kExponents + kExponentBins
};

struct Meter {
  uint32_t* counts = nullptr;  // [rows][kMeterCounts], added to
  float* norms = nullptr;  // [2][rows]: of the update times kUpdateFactor, and of the new weights
  uint8_t* changed = nullptr;  // [chunk_count][kChunk / 8] a bit for each changed weight; or null

  HD uint32_t* counts_of(int64_t row) const { return counts + row * kMeterCounts; }
  HD uint8_t* changed_of(int64_t chunk) const {
    return changed ? changed + chunk * (kChunk / 8) : nullptr;
  }
};

// The squares of updates are added in FP32, and a pass that writes cannot read a second time as
// reduce.h does: this factor brings updates from 2^-93 to 2^33 into its range.
constexpr float kUpdateFactor = 1073741824.0f;  // 2^30

// The smallest normal number of a type.
HD float smallest_normal(DType dtype) {
  return bits_float(dtype == DType::kFloat16 ? (127u - 14) << 23 : 1u << 23);
}

}  // namespace ampfuse
