// The CPU's apply harness: walks chunks in vectors of F, and sends the remainder through the same functions
// with partial loads and stores, so a value's result does not depend on where in the tensor it sits.
//
// Included by one translation unit per instruction set, after its SIMD value F. Everything is in an anonymous
// namespace: code compiled for one instruction set must not be merged with another's.
#pragma once

#include "../update.h"
#include "kernels.h"

namespace ampfuse {
namespace {

HD char* address(const TableView& view, int list, const Chunk& chunk) {
  char* base = static_cast<char*>(view.pointer(list, chunk.row));
  const int64_t offset = chunk.index * kChunk * element_size(view.type(list, chunk.row));
  return base ? base + offset : nullptr;
}

HD int64_t length(const TableView& view, const Chunk& chunk) {
  const int64_t rest = view.numel[chunk.row] - chunk.index * kChunk;
  return rest < kChunk ? rest : kChunk;
}

// The lists of one chunk. An absent list has type kNone: it loads as zero and does not store.
struct ChunkLists {
  char* data[kLists];
  DType dtype[kLists];

  HD ChunkLists(const TableView& view, const Chunk& chunk) {
    for (int list = 0; list < kLists; ++list) {
      data[list] = address(view, list, chunk);
      dtype[list] = data[list] ? view.type(list, chunk.row) : DType::kNone;
    }
  }
};

// One step of the loop: `count` of F::kWidth elements from i on.
template <class F, bool kWhole, class Op>
HD void apply_vector(const Op& op, const ChunkLists& lists, int64_t i, int count, typename F::Magnitude& largest) {
  F x[kLists];
#pragma GCC unroll 8
  for (int list = 0; list < kLists; ++list) {
    if (Op::kReads & bit(list)) {
      x[list] = kWhole ? F::load(lists.data[list], lists.dtype[list], i)
                       : F::load_partial(lists.data[list], lists.dtype[list], i, count);
    } else {
      x[list] = F(0.0f);
    }
    if (Op::kChecked & bit(list)) largest.include(x[list]);
  }
  op(x);
#pragma GCC unroll 8
  for (int list = 0; list < kLists; ++list) {
    if (!(Op::kWrites & bit(list))) continue;
    if (kWhole) {
      x[list].store(lists.data[list], lists.dtype[list], i);
    } else {
      x[list].store_partial(lists.data[list], lists.dtype[list], i, count);
    }
  }
}

template <class F, class Op>
void apply_chunks(const TableView& view, float a, float b, int64_t begin, int64_t end, bool* found_inf) {
  typename F::Magnitude largest;
  for (int64_t c = begin; c < end; ++c) {
    const Chunk chunk = view.chunks[c];
    const Op op = Op::for_row(view, chunk.row, a, b);
    const ChunkLists lists(view, chunk);
    const int64_t n = length(view, chunk);
    int64_t i = 0;
    for (; i + F::kWidth <= n; i += F::kWidth) apply_vector<F, true>(op, lists, i, F::kWidth, largest);
    if (i < n) apply_vector<F, false>(op, lists, i, int(n - i), largest);
  }
  if (Op::kChecked && largest.reduce() >= kInfinityBits) *found_inf = true;
}

// Adds the squares of one chunk into the virtual lanes of a tile; see reduce.h.
template <class F, bool kWrite>
HD uint32_t add_squares(const ChunkLists& lists, int64_t n, float inv_scale, float rescale, float* lane) {
  typename F::Magnitude largest;
  const auto take = [&](int64_t i, int count, bool whole) {
    const F grad = whole ? F::load(lists.data[kGrad], lists.dtype[kGrad], i)
                         : F::load_partial(lists.data[kGrad], lists.dtype[kGrad], i, count);
    const F accumulated = whole ? F::load(lists.data[kAccumulated], lists.dtype[kAccumulated], i)
                                : F::load_partial(lists.data[kAccumulated], lists.dtype[kAccumulated], i, count);
    const F value = unscaled_gradient(grad, accumulated, inv_scale);
    largest.include(value);
    float* sum = lane + i % kTile;
    const F square = value * F(rescale);
    fma(square, square, F::load(sum, DType::kFloat32, 0)).store(sum, DType::kFloat32, 0);
    if (kWrite) {
      if (whole) {
        value.store(lists.data[kGradOut], lists.dtype[kGradOut], i);
      } else {
        value.store_partial(lists.data[kGradOut], lists.dtype[kGradOut], i, count);
      }
    }
  };
  int64_t i = 0;
  for (; i + F::kWidth <= n; i += F::kWidth) take(i, F::kWidth, true);
  if (i < n) take(i, int(n - i), false);
  return largest.reduce();
}

template <class F>
HD Partial inspect_chunk(const ChunkLists& lists, int64_t n, float inv_scale) {
  alignas(64) float lane[kTile];
  const int packs = n >= kTile ? kLanes : int((n + kPack - 1) / kPack);
  const auto clear = [&] {  // a vector may reach past the last pack
    const int used = packs * kPack + F::kWidth < kTile ? packs * kPack + F::kWidth : kTile;
    for (int i = 0; i < used; ++i) lane[i] = 0;
  };
  clear();
  // A gradient that is rewritten in place is read once only: its rescaled sum comes from what was written.
  uint32_t largest;
  int exponent = 0;
  if (lists.dtype[kGradOut] != DType::kNone) {
    largest = add_squares<F, true>(lists, n, inv_scale, 1.0f, lane);
  } else {
    largest = add_squares<F, false>(lists, n, inv_scale, 1.0f, lane);
  }
  if (needs_rescaling(largest)) {
    exponent = rescaling_exponent(largest);
    clear();
    ChunkLists again = lists;
    if (lists.dtype[kGradOut] != DType::kNone) {
      again.data[kGrad] = lists.data[kGradOut];
      again.dtype[kGrad] = lists.dtype[kGradOut];
      again.dtype[kAccumulated] = DType::kNone;
      inv_scale = 1;
    }
    add_squares<F, false>(again, n, inv_scale, float(power_of_two(-exponent)), lane);
  }
  double sum[kLanes];
  for (int pack = 0; pack < packs; ++pack) sum[pack] = double(sum_pack(lane + pack * kPack));
  return make_partial(sum_by_halving<kLanes>(sum, packs), exponent, largest);
}

template <class F>
void inspect_chunks(const TableView& view, float inv_scale, int64_t begin, int64_t end) {
  for (int64_t c = begin; c < end; ++c) {
    const Chunk chunk = view.chunks[c];
    if (!view.has_gradient(chunk.row)) {
      view.partials[c] = {0.0, 0};
      continue;
    }
    view.partials[c] = inspect_chunk<F>(ChunkLists(view, chunk), length(view, chunk),
                                        view.scaled[chunk.row] ? inv_scale : 1.0f);
  }
}

template <class F>
void update_chunks(const TableView& view, Algorithm algorithm, int64_t begin, int64_t end) {
  while (begin < end) {  // runs of rows that have a gradient
    if (!view.has_gradient(view.chunks[begin].row)) {
      ++begin;
      continue;
    }
    int64_t stop = begin + 1;
    while (stop < end && view.has_gradient(view.chunks[stop].row)) ++stop;
    if (algorithm == Algorithm::kSgd) apply_chunks<F, SgdOp>(view, 0, 0, begin, stop, nullptr);
    if (algorithm == Algorithm::kAdam) apply_chunks<F, AdamOp>(view, 0, 0, begin, stop, nullptr);
    begin = stop;
  }
}

template <class F>
void map_chunks(const TableView& view, MapOp op, float a, float b, int64_t begin, int64_t end, bool* found_inf) {
  switch (op) {
    case MapOp::kScale: return apply_chunks<F, ScaleOp>(view, a, b, begin, end, found_inf);
    case MapOp::kAxpbyCheckBoth:
      return apply_chunks<F, AxpbyOp<bit(kSource) | bit(kSource2)>>(view, a, b, begin, end, found_inf);
    case MapOp::kAxpbyCheckX: return apply_chunks<F, AxpbyOp<bit(kSource)>>(view, a, b, begin, end, found_inf);
    case MapOp::kAxpbyCheckY: return apply_chunks<F, AxpbyOp<bit(kSource2)>>(view, a, b, begin, end, found_inf);
    case MapOp::kRefresh: return apply_chunks<F, RefreshOp>(view, a, b, begin, end, found_inf);
    case MapOp::kPublish: return apply_chunks<F, PublishOp>(view, a, b, begin, end, found_inf);
  }
}

template <class F>
constexpr CpuKernels make_kernels(const char* isa) {
  return {isa, inspect_chunks<F>, update_chunks<F>, map_chunks<F>};
}

}  // namespace
}  // namespace ampfuse
