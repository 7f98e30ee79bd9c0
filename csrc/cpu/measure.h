// Applies an op to chunks and takes the norms of what it leaves in some lists. See core/reduce.h
// for the order of the sums.
#pragma once

#include <cstring>

#include "chunk_lists.h"
#include "count.h"
#include "kernels.h"
#include "stage.h"

namespace ampfuse {
namespace {

constexpr DType kSumType = DType::kFloat32;

// The chunk's part of each measured norm, in the order of the lists: the virtual lanes of one tile
// (see reduce.h), those that the chunk has elements for, and the largest magnitude.
template <class Op>
struct Sums {
  static constexpr int kCount = count_lists(Op::kMeasured);
  alignas(kCacheLine) float lane[kCount][kTile];
  uint32_t largest[kCount];
};

// A metered pass stores model weights past the caches, too, but a vector at a time: it is rare.
template <class Op>
constexpr unsigned kStreamed = Op::kMetered ? bit(kModel) : 0;

// Takes one vector as the op left it: counts it if the op is metered, and calls add(m, x) for each
// measured list.
template <class Op, bool kWhole, class F, class Types, class Add>
HD void measure_vector(const ChunkLists& lists, const Types& types, int64_t i, int count,
                       F (&x)[kLists], Counts* counts, const Add& add) {
  if constexpr (Op::kMetered) {
    if constexpr (Types::kKnown) {
      if (lists.streams_model) {
        stream_vector(x[kModel], lists.data[kModel], types(kModel), i);
      } else {
        store_list<F, kWhole>(x[kModel], x[kModel], lists, types, kModel, i, count);
      }
    }
    count_vector<F, kWhole, Op>(types, i, count, x, *counts);
  }
  UNROLL_LISTS
  for (int list = 0; list < kLists; ++list) {
    if (Op::kMeasured & bit(list)) add(measure_of(Op::kMeasured, list), x[list]);
  }
}

// Adds squares tile after tile, the lanes in memory.
template <class F, class Op, class Types>
HD void add_by_tiles(const Op& op, const Walk& walk, const Types& types, const float* rescale,
                     Sums<Op>& sums, Counts* counts) {
  constexpr int kCount = Sums<Op>::kCount;
  const ChunkLists lists = walk.lists;
  Counts mine;  // a copy that no store to a list can change
  if constexpr (Op::kMetered) mine.bits = counts->bits;
  typename F::Magnitude largest[kCount];
  // The last pack, and the last vector, may reach past the last element.
  const int64_t end = lists.length + kPack + F::kWidth;
  const size_t reached = sizeof(float) * size_t(end < kTile ? end : kTile);
  for (int m = 0; m < kCount; ++m) std::memset(sums.lane[m], 0, reached);
  constexpr unsigned kUnfetched = Op::kMetered ? kRewritten | bit(kModel) : 0;
  constexpr unsigned kFetched = (Op::kReads | Op::kWrites) & ~kUnfetched;
  const auto add_at = [&](int64_t i) HD_LAMBDA {
    return [&sums, &largest, rescale, i](int m, const F& x) HD_LAMBDA {
      float* sum = sums.lane[m] + i % kTile;
      F square = x;
      if constexpr (!Op::kMetered) {  // the sums of a metered op are never rescaled
        largest[m].include(x);
        square = x * F(rescale[m]);
      }
      store_vector(fma(square, square, load_vector<F>(sum, kSumType, 0)), sum, kSumType, 0);
    };
  };
  const auto measure = [&](int64_t i, int n, auto whole, F(&x)[kLists]) HD_LAMBDA {
    measure_vector<Op, decltype(whole)::value>(lists, types, i, n, x, &mine, add_at(i));
  };
  run_steps<F, Op::kWrites & ~kStreamed<Op>>(op, walk, types, kFetched, measure);
  for (int m = 0; m < kCount; ++m) sums.largest[m] = largest[m].reduce();
  if constexpr (Op::kMetered) *counts = mine;
}

// Adds squares line after line: kLine neighbouring lanes through all tiles, with their sums in
// registers. A pass that reads one list and writes none then runs at the bandwidth of reading: many
// pages are open at a time, and each line is fetched while the chunk before is at the same element
// (a fifth of inspect from memory, AVX-512 server; a pass that writes is slower this way). Needs a
// whole chunk followed by a whole one.
template <class F, class Op, class Types>
HD void add_by_lines(const Op& op, const Walk& walk, const Types& types, const float* rescale,
                     Sums<Op>& sums) {
  static_assert(Sums<Op>::kCount == 1 && kTile % kLine == 0 && kLine % F::kWidth == 0);
  constexpr int kVectors = kLine / F::kWidth;
  const ChunkLists lists = walk.lists;
  const F factor(rescale[0]);
  typename F::Magnitude largest;
  for (int64_t lane = 0; lane < kTile; lane += kLine) {
    F sum[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[v] = F(0.0f);
    for (int64_t i = lane; i < kChunk; i += kTile) {
      fetch_line<Op::kReads>(walk.next, types, i);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const int64_t first = i + v * F::kWidth;
        F x[kLists];
        run_vector<F, true, Op::kWrites>(op, lists, types, first, F::kWidth, x);
        measure_vector<Op, true>(lists, types, first, F::kWidth, x, nullptr,
                                 [&](int, const F& value) HD_LAMBDA {
                                   largest.include(value);
                                   const F square = value * factor;
                                   sum[v] = fma(square, square, sum[v]);
                                 });
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      store_vector(sum[v], sums.lane[0] + lane + v * F::kWidth, kSumType, 0);
  }
  sums.largest[0] = largest.reduce();
}

// Applies an op to one chunk and adds the squares of what it measures, each times `rescale`.
template <class F, class Op>
void add_squares(const Op& op, const Walk& walk, const float* rescale, Sums<Op>& sums,
                 Counts* counts = nullptr) {
  const bool whole = walk.lists.length == kChunk && walk.next.length == kChunk;
  with_types<Op>(walk.lists, [&](const auto& types) {
    if constexpr (Prefetch<Op::kReads>::kSingle && std::decay_t<decltype(types)>::kKnown) {
      if (whole) return add_by_lines<F>(op, walk, types, rescale, sums);
    }
    add_by_tiles<F>(op, walk, types, rescale, sums, counts);
  });
}

// Computes the chunk's partials, `stride` apart; for a metered op also the row's `counts` and
// `changed`.
template <class F, class Op>
HD void measure_chunk(const Op& op, const Walk& walk, Partial* partials, int64_t stride,
                      uint32_t* counts, uint8_t* changed) {
  constexpr int kCount = Sums<Op>::kCount;
  const int64_t n = walk.lists.length;
  const int packs = n >= kTile ? kLanes : int((n + kPack - 1) / kPack);
  const auto total = [&](const float* lane) {
    double sum[kLanes];
    for (int pack = 0; pack < packs; ++pack) sum[pack] = double(sum_pack(lane + pack * kPack));
    return sum_by_halving<kLanes>(sum, packs);
  };
  Sums<Op> sums;
  float rescale[kCount];
  bool again = false;
  for (int m = 0; m < kCount; ++m) rescale[m] = 1;
  if constexpr (Op::kMetered) {
    Counts counted;
    counted.bits = changed;
    add_squares<F>(op, walk, rescale, sums, &counted);
    counted.add_to(counts, uint32_t(n));
  } else {
    add_squares<F>(op, walk, rescale, sums);
  }
  for (int m = 0; m < kCount; ++m) {
    partials[m * stride] = make_partial(total(sums.lane[m]), 0, sums.largest[m]);
    if (!needs_rescaling(sums.largest[m])) continue;
    rescale[m] = float(power_of_two(-rescaling_exponent(sums.largest[m])));
    again = true;
  }
  if constexpr (!Op::kMetered) {
    if (!again) return;
    const auto measuring = op.again();
    Sums<std::decay_t<decltype(measuring)>> rescaled;
    // Rare, so by blocks, whatever the types.
    add_by_tiles<F>(measuring, walk, AnyTypes{walk.lists.dtype}, rescale, rescaled, nullptr);
    for (int m = 0; m < kCount; ++m) {
      const uint32_t largest = sums.largest[m];
      if (!needs_rescaling(largest)) continue;
      partials[m * stride] =
          make_partial(total(rescaled.lane[m]), rescaling_exponent(largest), largest);
    }
  }
}

}  // namespace
}  // namespace ampfuse
