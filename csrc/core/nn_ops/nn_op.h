// What all passes of fused layers have in common: each reads and writes images in channels-last
// memory, matrices of `rows` (batch x height x width) by `channels`.
//
// An op is a function of the values x[image] at one element of the matrix, and of a channel's
// coefficients; F is float on the device and in scalar code and a SIMD vector otherwise, whose
// lanes are neighbouring channels. It has
//   kName      what error messages call it
//   kReads, kWrites  which of NnArgs' images are loaded and stored back, and whether the mask is
//   kOptional  which of them may be absent: the op is compiled with them and without. A mask that
//              is read is not one of these: if it is absent, all its bits are set
//   kCoefs     how many coefficients of a channel it takes
//   coefs()    computes them; in a sum, those of the span that begins with `row`. kCoefsOfRow: they
//              are the same for all channels of a row, and others for each row
// A map (ChannelMap) computes values:
//   apply(x, coef, bits)
// A sum (ChannelSum) adds two sums over the rows of each channel:
//   add(x, coef, bits, first, second)
//   Partial, partial()  what is kept of the sums of a span
//   finish()   makes results of a channel's partials, parts[span]; sum(value) adds value(span) over
//              its spans
// Others walk along each row, a matrix of `rows` by `channels` in one piece (see below).
//
// Sums down the channels follow reduce.h: one order for every backend, thread count and vector
// width. A tile of kTileRows is added in FP32, row after row; the tiles of a span, one after
// another, in FP32; spans by kRowLanes strided lanes and halving, in double.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/algorithms.h"
#include "core/dtype.h"
#include "core/hd.h"
#include "core/lists.h"
#include "core/reduce.h"
#include "core/scalar.h"

namespace ampfuse {

enum class PassKind { kChannelMap, kChannelSum, kRowSum, kRowMap, kRowPass };

constexpr int kTileRows = 32;
constexpr int kSpanTiles = 16;
constexpr int kSpanRows = kTileRows * kSpanTiles;

HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Sums along a row have one order, too. Column i of a span belongs to lane i % kRowWidth, which
// adds its columns one after another. A row's spans are distributed to kRowGroups groups, each of
// which keeps its lanes from span to span. Lanes are merged by halving, then groups.
//
// A row sum has
//   kValues    how many values a lane holds: start(value), add<kPlain>(value, x, weight, bits) with
//              the column's weight, kAbsent being x past the last column; merge(value, other)
//   finish()   makes results of a row's values
// and a row map, from image kInput to kOutput,
//   coefs()    of a row
//   apply<kPlain>(x, coef, weight, hit)   hit: a bit where the column is the row's target
// Both have is_plain(args), whether weights are not used; kWeight, the vector of weights, which may
// be absent (1); and counts(): a row that does not count gets zeros.
//
// A row pass makes sums over a row, kSums at a time in each of kStages, and then maps the row,
// which is in registers or a cache by then:
//   reads(), writes()  the images of a stage, or of the map, which is the last
//   begin()    coefs of a row; finish_stage() makes more of them of a stage's sums
//   first()    values that the first stage writes, and others read
//   add()      to the sums, with the column's weight; apply(x, coef, weight, bias)
// Its spans are short, for a thread's part of one to fit into registers.
constexpr int kRowWidth = 128;
constexpr int kSpanColumns = 32 * kRowWidth;
constexpr int kPassColumns = 8 * kRowWidth;
constexpr int kRowGroups = 16;

struct ImageRows {
  int64_t rows = 0, channels = 0;
  DType dtype = DType::kNone;

  HD int64_t spans() const { return ceil_div(rows, kSpanRows); }
  HD int64_t rows_of(int64_t span) const {
    const int64_t rest = rows - span * kSpanRows;
    return rest < kSpanRows ? rest : kSpanRows;
  }
  // The size of a row's mask: a bit for each channel, in whole bytes.
  HD int64_t mask_bytes() const { return ceil_div(channels, 8); }
  HD int64_t row_bytes() const { return channels * element_size(dtype); }
};

constexpr int kMaxImages = 5, kMaxVectors = 8;
constexpr unsigned kMask = bit(kMaxImages);
// With the images that an instance uses: they are FP16 or BF16, whose digits need no more than
// 2^-16 of a value.
constexpr unsigned kHalfImages = bit(kMaxImages + 1);
HD constexpr unsigned half_images(DType dtype) {
  return element_size(dtype) == 2 ? kHalfImages : 0;
}

// All arguments of a pass; an op names their indices. Absent ones are null.
struct NnArgs {
  ImageRows image;
  void* images[kMaxImages] = {};
  uint8_t* mask = nullptr;           // [rows][mask_bytes]
  float* vectors[kMaxVectors] = {};  // [channels] each, or [rows]
  float numbers[2] = {};
  // Weight and bias of columns: read as 1 and 0 if they are absent.
  struct Affine {
    void *weight = nullptr, *bias = nullptr;
    DType dtype = DType::kNone;
  } affine;
  int64_t* batches = nullptr;        // of a sum over a batch: counts it
  void* partials = nullptr;          // of a sum: a Partial for each channel and span
  const int64_t* targets = nullptr;  // [rows], a column each
  int64_t ignored = 0;               // the target of a row that does not count

  HD bool has(unsigned list) const {
    if (list == kMask) return mask != nullptr;
    for (int i = 0; i < kMaxImages; ++i) {
      if (list == bit(i)) return images[i] != nullptr;
    }
    return false;
  }
};

using NnOp = Choice<struct NnOps>;  // in nn_ops.h

struct NnPass {
  static constexpr unsigned kOptional = 0;
  static constexpr unsigned kTogether = 0;  // the optional images that come together
  static constexpr bool kCoefsOfRow = false;
  static constexpr unsigned kPerRowVectors = 0;  // the vectors with a value for each row
};
struct ChannelMap : NnPass {
  static constexpr PassKind kKind = PassKind::kChannelMap;
};
struct ChannelSum : NnPass {
  static constexpr PassKind kKind = PassKind::kChannelSum;
};

// Calls run(used), an integral_constant: the images that an op reads and writes, without optional
// ones that `args` lacks. `run` may be a host function.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class Op, unsigned kUsed = Op::kReads | Op::kWrites, unsigned kOpen = Op::kOptional,
          class Run>
HD void with_used_images(const NnArgs& args, const Run& run) {
  if constexpr (kOpen == 0) {
    run(std::integral_constant<unsigned, kUsed>());
  } else {
    constexpr unsigned kOne = kOpen & (~kOpen + 1);
    constexpr unsigned kNow = Op::kTogether & kOne ? Op::kTogether : kOne;
    if (args.has(kOne)) {
      with_used_images<Op, kUsed, kOpen & ~kNow>(args, run);
    } else {
      with_used_images<Op, kUsed & ~kNow, kOpen & ~kNow>(args, run);
    }
  }
}

}  // namespace ampfuse
