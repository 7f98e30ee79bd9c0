// The CPU's apply harness: walks chunks in vectors of F, and sends the remainder through the same
// functions with partial loads and stores, so a value's result does not depend on where in the
// tensor it sits.
//
// Included by one translation unit per instruction set, after its SIMD value F. Everything is in an
// anonymous namespace: code compiled for one instruction set must not be merged with another's.
#pragma once

#include <type_traits>

#include "../update.h"
#include "kernels.h"

namespace ampfuse {
namespace {

HD char* address(const TableView& view, int list, const Chunk& chunk) {
  char* base = static_cast<char*>(view.pointer(list, chunk.row));
  const int64_t offset = chunk.index * kChunk * element_size(view.type(list, chunk.row));
  return base ? base + offset : nullptr;
}

constexpr int kCacheLine = 64;
constexpr int kStrip = kCacheLine / 2;  // elements: a line of halves

// A table of so many chunks (16 M elements) is more than caches hold.
constexpr int64_t kLargeTable = 512;

// The lists of one chunk. An absent list has type kNone: it loads as zero and does not store.
struct ChunkLists {
  char* data[kLists];
  DType dtype[kLists];
  int64_t length;
  // Model weights are written and never read. In a large table, where they would be gone from the
  // caches before the next forward pass anyway, they are stored past them: stored normally, each
  // line would be fetched first (7 % of a large Adam step).
  bool streams_model;

  HD ChunkLists(const TableView& view, const Chunk& chunk) {
    for (int list = 0; list < kLists; ++list) {
      data[list] = address(view, list, chunk);
      dtype[list] = data[list] ? view.type(list, chunk.row) : DType::kNone;
    }
    const int64_t rest = view.numel[chunk.row] - chunk.index * kChunk;
    length = rest < kChunk ? rest : kChunk;
    streams_model = view.chunk_count >= kLargeTable && length == kChunk &&
                    element_size(dtype[kModel]) == 2 &&
                    reinterpret_cast<uintptr_t>(data[kModel]) % kCacheLine == 0;
  }
};

// --- types ---------------------------------------------------------------------------------------

// The storage type of each list. Any mixture works by looking types up for every vector.
struct AnyTypes {
  static constexpr bool kKnown = false;
  const DType* dtype;
  HD DType operator()(int list) const { return dtype[list]; }
};

// The mixtures that nearly all rows have are known when compiling, so that their loops are free of
// branches: gradients and model weights in kHalf beside FP32 masters and moments, or, with
// kFloat32, no half at all, and gradients that are written back unscaled or are not.
template <DType kHalf, DType kBack = DType::kNone>
struct MasterTypes {
  static constexpr bool kKnown = true;
  HD constexpr DType operator()(int list) const {
    switch (list) {
      case kGrad:
        return kHalf;
      case kModel:
        return kHalf == DType::kFloat32 ? DType::kNone : kHalf;
      case kParam:
      case kState0:
      case kState1:
        return DType::kFloat32;
      case kUnscaled:
        return kBack;
      default:
        return DType::kNone;
    }
  }
};

// Calls run(types) with Types if all `used` lists agree with it, else with AnyTypes.
template <class Types, class Run>
HD void with_master_types(const ChunkLists& lists, unsigned used, const Run& run) {
  const Types types;
  bool known = true;
  for (int list = 0; list < kLists; ++list)
    known &= !(used & bit(list)) || lists.dtype[list] == types(list);
  if (known) return run(types);
  run(AnyTypes{lists.dtype});
}

// `kUsed`: the lists that the pass touches.
template <unsigned kUsed, class Run>
HD void with_types(const ChunkLists& lists, const Run& run) {
  constexpr DType kF32 = DType::kFloat32;
  switch (lists.dtype[kGrad]) {
    case DType::kFloat32:
      if constexpr (kUsed & bit(kUnscaled)) {
        if (lists.dtype[kUnscaled] == kF32)
          return with_master_types<MasterTypes<kF32, kF32>>(lists, kUsed, run);
      }
      return with_master_types<MasterTypes<kF32>>(lists, kUsed, run);
    case DType::kFloat16:
      return with_master_types<MasterTypes<DType::kFloat16>>(lists, kUsed, run);
    case DType::kBFloat16:
      return with_master_types<MasterTypes<DType::kBFloat16>>(lists, kUsed, run);
    default:
      return run(AnyTypes{lists.dtype});
  }
}

// --- loops ---------------------------------------------------------------------------------------

// A chunk and the one that is walked after it.
struct Walk {
  const ChunkLists& lists;
  const ChunkLists& next;
};

// How far ahead a pass over `kReads` fetches each list, in bytes, and how near to the core. Several
// lists share the lines that may be on their way to the L1 cache, so they are fetched late; a
// single one goes to L2 first.
template <unsigned kReads>
struct Prefetch {
  static constexpr unsigned kUsual =
      kReads & ~(bit(kAccumulated) | bit(kGradOut) | bit(kState2));  // what nearly all rows have
  static constexpr bool kSingle = count_lists(kUsual) == 1;
  static constexpr int64_t kAhead = kSingle ? 4096 : 2048;
  static constexpr int kLocality = kSingle ? 2 : 3;
};

// Unscaled gradients are stored where the gradients were read: those lines are fetched already.
constexpr unsigned kRewritten = bit(kUnscaled);

// When element i starts a cache line in a list of `fetched`, fetches the line kAhead further, in
// this chunk (kHere: surely) or the next. The hardware's prefetchers stop at the end of each page
// of 4 KB, of which an Adam step walks five side by side, and do not know where the next tensor is:
// 15 % of a large step from memory, 40 % of one over small tensors (AVX-512 server).
template <bool kHere, class Distance, class Types>
HD void prefetch(const Walk& walk, const Types& types, unsigned fetched, int64_t i) {
  constexpr int64_t kAhead = Distance::kAhead;
  const int64_t n = walk.lists.length;
#pragma GCC unroll 9
  for (int list = 0; list < kLists; ++list) {
    if (!(fetched & bit(list)) || types(list) == DType::kNone) continue;
    const int64_t size = element_size(types(list));
    if (i * size % kCacheLine != 0) continue;
    const int64_t ahead = kAhead / size;
    const int64_t element = i + (kHere || ahead < n ? ahead : n);
    const bool here = kHere || element < n;
    // An address, not a pointer: it may lie outside of the tensor, and a fetch does not fault.
    const auto base = reinterpret_cast<uintptr_t>((here ? walk.lists : walk.next).data[list]);
    const auto offset = uintptr_t((here ? element : element - n) * size);
    __builtin_prefetch(reinterpret_cast<const void*>(base + offset), 0, Distance::kLocality);
  }
}

// Fetches the strip of a whole chunk at element i into L2.
template <unsigned kFetched, class Types>
HD void fetch_strip(const ChunkLists& chunk, const Types& types, int64_t i) {
#pragma GCC unroll 9
  for (int list = 0; list < kLists; ++list) {
    if (!(kFetched & bit(list)) || types(list) == DType::kNone) continue;
    const int64_t size = element_size(types(list));
    const auto address = reinterpret_cast<uintptr_t>(chunk.data[list]) + uintptr_t(i * size);
    for (int64_t line = 0; line < kStrip * size; line += kCacheLine)
      __builtin_prefetch(reinterpret_cast<const void*>(address + uintptr_t(line)), 0, 2);
  }
}

// take(i, count, whole) for all elements of the chunk, kStep at a time (whole vectors of F);
// `whole` is true_type where count is.
template <class F, int kStep, class Distance, class Types, class Take>
HD void for_steps(const Walk& walk, const Types& types, unsigned fetched, const Take& take) {
  const int64_t n = walk.lists.length;
  int64_t i = 0;
  for (; i + Distance::kAhead / 2 + kStep <= n; i += kStep) {
#pragma GCC unroll 4
    for (int v = 0; v < kStep; v += F::kWidth)
      prefetch<true, Distance>(walk, types, fetched, i + v);
    take(i, kStep, std::true_type());
  }
  for (; i + kStep <= n; i += kStep) {
#pragma GCC unroll 4
    for (int v = 0; v < kStep; v += F::kWidth)
      prefetch<false, Distance>(walk, types, fetched, i + v);
    take(i, kStep, std::true_type());
  }
  if (i < n) take(i, int(n - i), std::false_type());
}

// call(c, walk) for the chunks [begin, end).
template <class Call>
HD void for_walks(const TableView& view, int64_t begin, int64_t end, const Call& call) {
  if (begin == end) return;
  ChunkLists lists(view, view.chunks[begin]);
  for (int64_t c = begin; c < end; ++c) {
    const ChunkLists next(view, view.chunks[c + 1 < end ? c + 1 : c]);
    call(c, Walk{lists, next});
    lists = next;
  }
}

template <class F, bool kWhole, class Types>
HD F load(const ChunkLists& lists, const Types& types, int list, int64_t i, int count) {
  return kWhole ? F::load(lists.data[list], types(list), i)
                : F::load_partial(lists.data[list], types(list), i, count);
}

template <class F, bool kWhole, class Types>
HD void store(const F& x, const ChunkLists& lists, const Types& types, int list, int64_t i,
              int count) {
  if (kWhole) {
    x.store(lists.data[list], types(list), i);
  } else {
    x.store_partial(lists.data[list], types(list), i, count);
  }
}

// Runs the op on `count` elements from i on, a vector of them if kWhole, and stores the lists of
// kStored. x ends as what the op left.
template <class F, bool kWhole, unsigned kStored, class Op, class Types>
HD void run_vector(const Op& op, const ChunkLists& lists, const Types& types, int64_t i, int count,
                   F (&x)[kLists]) {
#pragma GCC unroll 9
  for (int list = 0; list < kLists; ++list) {
    x[list] = Op::kReads & bit(list) ? load<F, kWhole>(lists, types, list, i, count) : F(0.0f);
  }
  op(x);
#pragma GCC unroll 9
  for (int list = 0; list < kLists; ++list) {
    if (kStored & bit(list)) store<F, kWhole>(x[list], lists, types, list, i, count);
  }
}

// Applies an op to one chunk; true if a checked list holds a non-finite value.
template <class F, class Op, class Types>
HD bool apply_chunk(const Op& op, const Walk& walk, const Types& types) {
  const ChunkLists lists = walk.lists;
  typename F::Magnitude largest;
  for_steps<F, F::kWidth, Prefetch<Op::kReads>>(
      walk, types, (Op::kReads | Op::kWrites) & ~kRewritten,
      [&](int64_t i, int count, auto whole) __attribute__((always_inline)) {
        F x[kLists];
        run_vector<F, decltype(whole)::value, Op::kWrites>(op, lists, types, i, count, x);
#pragma GCC unroll 9
        for (int list = 0; list < kLists; ++list) {
          if (Op::kChecked & bit(list)) largest.include(x[list]);
        }
      });
  return Op::kChecked && largest.reduce() >= kInfinityBits;
}

// Applies an op to one chunk whose model weights are streamed: by whole cache lines, because two
// halves of one, stored at different times, are two writes to memory (1 % of a large Adam step).
template <class F, class Op, class Types>
HD void apply_streaming(const Op& op, const Walk& walk, const Types& types) {
  static_assert(Op::kChecked == 0 && kChunk % kStrip == 0 && kStrip % F::kWidth == 0);
  constexpr int kVectors = kStrip / F::kWidth;
  constexpr unsigned kStored = Op::kWrites & ~bit(kModel);
  const ChunkLists lists = walk.lists;
  for_steps<F, kStrip, Prefetch<Op::kReads>>(
      walk, types, (Op::kReads | kStored) & ~kRewritten,
      [&](int64_t i, int, auto) __attribute__((always_inline)) {
        F model[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          F x[kLists];
          run_vector<F, true, kStored>(op, lists, types, i + v * F::kWidth, F::kWidth, x);
          model[v] = x[kModel];
        }
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
          model[v].stream(lists.data[kModel], types(kModel), i + v * F::kWidth);
      });
}

template <class F, class Op>
void apply_chunks(const TableView& view, float a, float b, int64_t begin, int64_t end,
                  bool* found_inf) {
  for_walks(view, begin, end, [&](int64_t c, const Walk& walk) {
    const Op op = Op::for_row(view, view.chunks[c].row, a, b);
    with_types<Op::kReads | Op::kWrites>(walk.lists, [&](const auto& types) {
      if constexpr (Op::kWrites & bit(kModel)) {
        if (walk.lists.streams_model) return apply_streaming<F>(op, walk, types);
      }
      if (apply_chunk<F>(op, walk, types)) *found_inf = true;
    });
  });
}

// --- norms ---------------------------------------------------------------------------------------

// The chunk's part of each measured norm, in the order of the lists: the virtual lanes of one tile
// (see reduce.h), those that the chunk has elements for, and the largest magnitude.
template <class Op>
struct Sums {
  static constexpr int kCount = count_lists(Op::kMeasured);
  alignas(kCacheLine) float lane[kCount][kTile];
  uint32_t largest[kCount];
};

// Runs the op on one vector; add(m, x) takes what it leaves in each measured list.
template <class F, bool kWhole, class Op, class Types, class Add>
HD void measure_vector(const Op& op, const ChunkLists& lists, const Types& types, int64_t i,
                       int count, const Add& add) {
  F x[kLists];
  run_vector<F, kWhole, Op::kWrites>(op, lists, types, i, count, x);
#pragma GCC unroll 9
  for (int list = 0; list < kLists; ++list) {
    if (Op::kMeasured & bit(list)) add(measure_of(Op::kMeasured, list), x[list]);
  }
}

// Adds squares tile after tile, the lanes in memory.
template <class F, class Op, class Types>
HD void add_by_tiles(const Op& op, const Walk& walk, const Types& types, const float* rescale,
                     Sums<Op>& sums) {
  constexpr int kCount = Sums<Op>::kCount;
  const ChunkLists lists = walk.lists;
  typename F::Magnitude largest[kCount];
  // The last pack, and the last vector, may reach past the last element.
  const int64_t reached = lists.length + kPack + F::kWidth;
  for (int m = 0; m < kCount; ++m) {
    for (int64_t i = 0; i < kTile && i < reached; ++i) sums.lane[m][i] = 0;
  }
  for_steps<F, F::kWidth, Prefetch<Op::kReads>>(
      walk, types, Op::kReads | Op::kWrites,
      [&](int64_t i, int count, auto whole) __attribute__((always_inline)) {
        measure_vector<F, decltype(whole)::value>(
            op, lists, types, i, count, [&](int m, const F& x) __attribute__((always_inline)) {
              largest[m].include(x);
              float* sum = sums.lane[m] + i % kTile;
              const F square = x * F(rescale[m]);
              fma(square, square, F::load(sum, DType::kFloat32, 0)).store(sum, DType::kFloat32, 0);
            });
      });
  for (int m = 0; m < kCount; ++m) sums.largest[m] = largest[m].reduce();
}

// Adds squares lane after lane: strips of a cache line of halves through all tiles, with their sums
// in registers. A pass that reads one list and writes none then runs at the bandwidth of reading:
// many pages are open side by side, and each line is fetched when the chunk before is at its place
// (a fifth of inspect from memory, AVX-512 server; a pass that writes loses by it). For a whole
// chunk before a whole one.
template <class F, class Op, class Types>
HD void add_by_strips(const Op& op, const Walk& walk, const Types& types, const float* rescale,
                      Sums<Op>& sums) {
  static_assert(Sums<Op>::kCount == 1 && kTile % kStrip == 0 && kStrip % F::kWidth == 0);
  constexpr int kVectors = kStrip / F::kWidth;
  const ChunkLists lists = walk.lists;
  const F factor(rescale[0]);
  typename F::Magnitude largest;
  for (int64_t lane = 0; lane < kTile; lane += kStrip) {
    F sum[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[v] = F(0.0f);
    for (int64_t i = lane; i < kChunk; i += kTile) {
      fetch_strip<Op::kReads>(walk.next, types, i);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        measure_vector<F, true>(op, lists, types, i + v * F::kWidth, F::kWidth,
                                [&](int, const F& x) __attribute__((always_inline)) {
                                  largest.include(x);
                                  const F square = x * factor;
                                  sum[v] = fma(square, square, sum[v]);
                                });
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      sum[v].store(sums.lane[0] + lane + v * F::kWidth, DType::kFloat32, 0);
  }
  sums.largest[0] = largest.reduce();
}

// Applies an op to one chunk and adds the squares of what it measures, each times `rescale`.
template <class F, class Op>
void add_squares(const Op& op, const Walk& walk, const float* rescale, Sums<Op>& sums) {
  const bool whole = walk.lists.length == kChunk && walk.next.length == kChunk;
  with_types<Op::kReads | Op::kWrites>(walk.lists, [&](const auto& types) {
    if constexpr (Prefetch<Op::kReads>::kSingle && std::decay_t<decltype(types)>::kKnown) {
      if (whole) return add_by_strips<F>(op, walk, types, rescale, sums);
    }
    add_by_tiles<F>(op, walk, types, rescale, sums);
  });
}

// The chunk's partials, `stride` apart.
template <class F, class Op>
HD void measure_chunk(const Op& op, const Walk& walk, Partial* partials, int64_t stride) {
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
  add_squares<F>(op, walk, rescale, sums);
  for (int m = 0; m < kCount; ++m) {
    partials[m * stride] = make_partial(total(sums.lane[m]), 0, sums.largest[m]);
    if (!needs_rescaling(sums.largest[m])) continue;
    rescale[m] = float(power_of_two(-rescaling_exponent(sums.largest[m])));
    again = true;
  }
  if (!again) return;
  const auto measuring = op.again();
  Sums<std::decay_t<decltype(measuring)>> rescaled;
  add_squares<F>(measuring, walk, rescale, rescaled);
  for (int m = 0; m < kCount; ++m) {
    const uint32_t largest = sums.largest[m];
    if (!needs_rescaling(largest)) continue;
    partials[m * stride] =
        make_partial(total(rescaled.lane[m]), rescaling_exponent(largest), largest);
  }
}

template <class F, class Op>
void measure_with(const TableView& view, float a, float b, int64_t begin, int64_t end) {
  for_walks(view, begin, end, [&](int64_t c, const Walk& walk) {
    const int32_t row = view.chunks[c].row;
    Partial* partials = view.partials + c;
    if (view.has_gradient(row)) {
      measure_chunk<F>(Op::for_row(view, row, a, b), walk, partials, view.chunk_count);
    } else {
      for (int m = 0; m < Sums<Op>::kCount; ++m) partials[m * view.chunk_count] = {0.0, 0};
    }
  });
}

template <class F>
void measure_chunks(const TableView& view, Measurement measurement, float inv_scale, bool fresh,
                    int64_t begin, int64_t end) {
  switch (measurement) {
    case Measurement::kGradients:
      return measure_with<F, InspectOp<>>(view, inv_scale, fresh, begin, end);
    case Measurement::kParams:
      return measure_with<F, ParamNormOp>(view, 0, 0, begin, end);
    case Measurement::kLamb:
      return measure_with<F, LambMomentsOp<>>(view, 0, 0, begin, end);
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
    const auto run = [&](auto op) {
      apply_chunks<F, decltype(op)>(view, 0, 0, begin, stop, nullptr);
    };
    switch (algorithm) {
      case Algorithm::kNone:
        break;
      case Algorithm::kSgd:
        run(SgdOp{});
        break;
      case Algorithm::kAdam:
        run(AdamOp{});
        break;
      case Algorithm::kAdagrad:
        run(AdagradOp{});
        break;
      case Algorithm::kNovoGrad:
        run(NovoGradOp{});
        break;
      case Algorithm::kLamb:
        run(LambOp{});
        break;
      case Algorithm::kLambUpdate:
        run(LambUpdateOp{});
        break;
      case Algorithm::kLayerwise:
        run(LayerwiseOp{});
        break;
    }
    begin = stop;
  }
}

template <class F>
void map_chunks(const TableView& view, MapOp op, float a, float b, int64_t begin, int64_t end,
                bool* found_inf) {
  switch (op) {
    case MapOp::kScale:
      return apply_chunks<F, ScaleOp>(view, a, b, begin, end, found_inf);
    case MapOp::kAxpbyCheckBoth:
      return apply_chunks<F, AxpbyOp<bit(kSource) | bit(kSource2)>>(view, a, b, begin, end,
                                                                    found_inf);
    case MapOp::kAxpbyCheckX:
      return apply_chunks<F, AxpbyOp<bit(kSource)>>(view, a, b, begin, end, found_inf);
    case MapOp::kAxpbyCheckY:
      return apply_chunks<F, AxpbyOp<bit(kSource2)>>(view, a, b, begin, end, found_inf);
    case MapOp::kRefresh:
      return apply_chunks<F, RefreshOp>(view, a, b, begin, end, found_inf);
    case MapOp::kPublish:
      return apply_chunks<F, PublishOp>(view, a, b, begin, end, found_inf);
  }
}

template <class F>
constexpr CpuKernels make_kernels(const char* isa) {
  return {isa, measure_chunks<F>, update_chunks<F>, map_chunks<F>};
}

}  // namespace
}  // namespace ampfuse
