// How chunks of a table are walked: their lists, the types that are known when compiling, what is
// fetched ahead, and vectors of F. Everything is in an anonymous namespace: code compiled for one
// instruction set must not be merged with another's.
#pragma once

#include <type_traits>

#include "core/ops/op.h"
#include "core/round_to_storage.h"
#include "vector.h"

namespace ampfuse {
namespace {

HD char* address(const TableView& view, int list, const Chunk& chunk) {
  char* base = static_cast<char*>(view.pointer(list, chunk.row));
  const int64_t offset = chunk.index * kChunk * element_size(view.type(list, chunk.row));
  return base ? base + offset : nullptr;
}

constexpr int kCacheLine = 64;
constexpr int kLine = kCacheLine / 2;  // elements: a line of halves

// A table of this many chunks (16 M elements) is larger than caches.
constexpr int64_t kLargeTable = 512;

// The lists of one chunk. An absent list has type kNone: it loads as zero and does not store.
struct ChunkLists {
  char* data[kLists];
  DType dtype[kLists];
  float* scales[kMaxStates];  // of the first block, for quantized states
  int64_t first, length;      // the chunk's elements, in the row
  int64_t random_first;       // ... in what the row is a shard of, and the row's key: random bits
  uint32_t random_key;
  // Model weights are written and, with whole masters, never read. In a large table they would be
  // gone from the caches before the next forward pass anyway, so they are stored past the caches:
  // stored normally, each line would be fetched first (7 % of a large Adam step).
  bool streams_model;

  HD ChunkLists(const TableView& view, const Chunk& chunk) : first(chunk.index * kChunk) {
    for (int list = 0; list < kLists; ++list) {
      data[list] = address(view, list, chunk);
      dtype[list] = data[list] ? view.type(list, chunk.row) : DType::kNone;
    }
    for (int s = 0; s < kMaxStates; ++s) scales[s] = view.scale(kState0 + s, chunk.row, first);
    random_first = view.origin[chunk.row] + first;
    random_key = view.coefs[chunk.row].random_key;
    const int64_t rest = view.numel[chunk.row] - first;
    length = rest < kChunk ? rest : kChunk;
    streams_model = view.chunk_count >= kLargeTable && length == kChunk &&
                    element_size(dtype[kModel]) == 2 && !is_remainder(dtype[kParam]) &&
                    reinterpret_cast<uintptr_t>(data[kModel]) % kCacheLine == 0;
  }
};

// Stands for all quantized types: their sizes are the same.
constexpr DType kAnyQuantized = DType::kSigned8;

// The storage type of each list. Any mixture goes through stage.h.
struct AnyTypes {
  static constexpr bool kKnown = false, kByVectors = false;
  const DType* dtype;
  HD DType operator()(int list) const { return dtype[list]; }
};

// The mixtures that nearly all rows have are known when compiling, so that their loops are free of
// branches: gradients and model weights in kHalf with masters of kMaster and states, or, with
// kFloat32, no half at all; gradients that are written back unscaled or are not. The states in
// kQuantized are of any quantized type, the others of kState.
template <DType kHalf, DType kMaster = DType::kFloat32, DType kState = DType::kFloat32,
          unsigned kQuantized = 0, DType kBack = DType::kNone>
struct MasterTypes {
  using Widened = MasterTypes<kHalf, kMaster, DType::kFloat32, 0, kBack>;
  static constexpr bool kKnown = true, kByVectors = kQuantized == 0;
  static constexpr unsigned kQuantizedStates = kQuantized;
  HD constexpr DType operator()(int list) const {
    switch (list) {
      case kGrad:
        return kHalf;
      case kModel:
        return kHalf == DType::kFloat32 ? DType::kNone : kHalf;
      case kParam:
        return kMaster;
      case kState0:
      case kState1:
        return kQuantized & bit(list) ? kAnyQuantized : kState;
      case kUnscaled:
        return kBack;
      default:
        return DType::kNone;
    }
  }
};

// Whether the lists of `used` have these types; if so, calls run(types).
template <class Types, class Run>
HD bool with_master_types(const ChunkLists& lists, unsigned used, const Run& run) {
  const Types types;
  bool known = true;
  for (int list = 0; list < kLists; ++list) {
    const DType type = is_quantized(lists.dtype[list]) ? kAnyQuantized : lists.dtype[list];
    known &= !(used & bit(list)) || type == types(list);
  }
  if (known) run(types);
  return known;
}

// Calls run(types) with the types that the lists of a pass over Op have, known where possible.
template <class Op, class Run>
HD void with_types(const ChunkLists& lists, const Run& run) {
  constexpr unsigned kUsed = Op::kReads | Op::kWrites;
  // Through blocks alone (stage.h) these steps take 1.3 to 1.7 times as long.
  constexpr bool kMayBeEncoded = (kUsed & bit(kParam)) && (kUsed & bit(kModel));
  bool known = false;
  const auto try_types = [&](auto types) HD_LAMBDA {
    if (!known) known = with_master_types<decltype(types)>(lists, kUsed, run);
  };
  with_storage(plain(lists.dtype[kGrad]), [&](auto storage) HD_LAMBDA {
    constexpr DType kType = decltype(storage)::kType, kWhole = DType::kFloat32;
    try_types(MasterTypes<kType>());
    if constexpr (kType == kWhole && (kUsed & bit(kUnscaled)))
      try_types(MasterTypes<kType, kWhole, kWhole, 0, kType>());
    if constexpr (kMayBeEncoded && kType == DType::kBFloat16) {
      constexpr DType kSplit = DType::kRemainderBFloat16;
      try_types(MasterTypes<kType, kSplit>());
      if constexpr (Op::kQuantizable) {
        constexpr DType kRandom = DType::kRandomBFloat16;
        constexpr unsigned kQuantized = Op::kReads & Op::kWrites & kStates & ~bit(kState2);
        try_types(MasterTypes<kType, kWhole, kWhole, kQuantized>());
        try_types(MasterTypes<kType, kSplit, kWhole, kQuantized>());
        try_types(MasterTypes<kType, kWhole, kRandom>());
        try_types(MasterTypes<kType, kSplit, kRandom>());
      }
    }
  });
  if (!known) run(AnyTypes{lists.dtype});
}

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

// When element v of a step of kStep starts a cache line in a list of `fetched`, fetches the line
// kAhead further, in this chunk (kHere: always) or the next. The hardware's prefetchers stop at the
// end of each page of 4 KB, of which an Adam step walks five at a time, and do not know where the
// next tensor is: 15 % of a large step from memory, 40 % of one over small tensors (AVX-512
// server).
template <bool kHere, class Distance, int kStep, class Types>
HD void prefetch(const Walk& walk, const Types& types, unsigned fetched, int64_t step, int v) {
  const int64_t i = step + v;
  constexpr int64_t kAhead = Distance::kAhead;
  const int64_t n = walk.lists.length;
  UNROLL_LISTS
  for (int list = 0; list < kLists; ++list) {
    if (!(fetched & bit(list)) || types(list) == DType::kNone) continue;
    const int64_t size = element_size(types(list));
    // Where steps are whole lines, that is known when compiling.
    const bool starts =
        kStep * size % kCacheLine == 0 ? v * size % kCacheLine == 0 : i * size % kCacheLine == 0;
    if (!starts) continue;
    const int64_t ahead = kAhead / size;
    const int64_t element = i + (kHere || ahead < n ? ahead : n);
    const bool here = kHere || element < n;
    // An address, not a pointer: it may lie outside of the tensor, and a fetch does not fault.
    const auto base = reinterpret_cast<uintptr_t>((here ? walk.lists : walk.next).data[list]);
    const auto offset = uintptr_t((here ? element : element - n) * size);
    __builtin_prefetch(reinterpret_cast<const void*>(base + offset), 0, Distance::kLocality);
  }
}

// Fetches kLine elements of a whole chunk from element i on into L2.
template <unsigned kFetched, class Types>
HD void fetch_line(const ChunkLists& chunk, const Types& types, int64_t i) {
  UNROLL_LISTS
  for (int list = 0; list < kLists; ++list) {
    if (!(kFetched & bit(list)) || types(list) == DType::kNone) continue;
    const int64_t size = element_size(types(list));
    const auto address = reinterpret_cast<uintptr_t>(chunk.data[list]) + uintptr_t(i * size);
    for (int64_t line = 0; line < kLine * size; line += kCacheLine)
      __builtin_prefetch(reinterpret_cast<const void*>(address + uintptr_t(line)), 0, 2);
  }
}

// take(i, count, whole, fetch) for all elements of the chunk, kStep at a time (whole vectors of F);
// `whole` is true_type where count is. It calls fetch(v) before it loads element v of the step.
template <class F, int kStep, class Distance, class Types, class Take>
HD void for_steps(const Walk& walk, const Types& types, unsigned fetched, const Take& take) {
  const int64_t n = walk.lists.length;
  int64_t i = 0;
  for (; i + Distance::kAhead / 2 + kStep <= n; i += kStep)
    take(i, kStep, std::true_type(),
         [&](int v) HD_LAMBDA { prefetch<true, Distance, kStep>(walk, types, fetched, i, v); });
  for (; i + kStep <= n; i += kStep)
    take(i, kStep, std::true_type(),
         [&](int v) HD_LAMBDA { prefetch<false, Distance, kStep>(walk, types, fetched, i, v); });
  if (i < n) take(i, int(n - i), std::false_type(), [](int) HD_LAMBDA {});
}

// call(c, walk) for the chunks [begin, end): all, or those of rows that have a gradient.
template <bool kGradientRows, class Call>
HD void for_walks(const TableView& view, int64_t begin, int64_t end, const Call& call) {
  const auto walked_from = [&](int64_t c) {
    while (c < end && kGradientRows && !view.is_stepped(view.chunks[c].row)) ++c;
    return c;
  };
  int64_t c = walked_from(begin);
  if (c == end) return;
  ChunkLists lists(view, view.chunks[c]);
  while (c < end) {
    const int64_t after = walked_from(c + 1);
    const ChunkLists next(view, view.chunks[after < end ? after : c]);
    call(c, Walk{lists, next});
    lists = next;
    c = after;
  }
}

// Elements that are integers.
template <class F, class Stored, bool kWhole>
HD BitsOf<F> load_integers(const char* data, int64_t i, int count) {
  using Part = typename F::template Part<Stored>;
  const char* address = data + i * int64_t(sizeof(Stored));
  return kWhole ? Part::load(address) : Part::load_first(address, count);
}

template <class F, class Stored, bool kWhole>
HD void store_integers(const BitsOf<F>& bits, char* data, int64_t i, int count) {
  using Part = typename F::template Part<Stored>;
  char* address = data + i * int64_t(sizeof(Stored));
  if (kWhole) {
    Part::store(address, bits);
  } else {
    Part::store_first(address, bits, count);
  }
}

template <class F, bool kWhole>
HD F load_plain(const char* data, DType type, int64_t i, int count) {
  return kWhole ? load_vector<F>(data, type, i) : load_first<F>(data, type, i, count);
}

template <class F, bool kWhole, class Types>
HD F load(const ChunkLists& lists, const Types& types, int list, int64_t i, int count) {
  const DType type = types(list);
  char* data = lists.data[list];
  F x(0.0f);
  if (list == kParam && is_remainder(type)) {
    const F high = load_plain<F, kWhole>(lists.data[kModel], types(kModel), i, count);
    with_split(type, [&](auto split) HD_LAMBDA {
      x = split.join(high, load_integers<F, int16_t, kWhole>(data, i, count));
    });
  } else {
    x = load_plain<F, kWhole>(data, plain(type), i, count);
  }
  return x;
}

// Stores a value that is rounded to storage; `weight`: its model weight.
template <class F, bool kWhole, class Types>
HD void store(const F& x, const F& weight, const ChunkLists& lists, const Types& types, int list,
              int64_t i, int count) {
  const DType type = types(list);
  char* data = lists.data[list];
  if (list == kParam && is_remainder(type)) {
    with_split(type, [&](auto split) HD_LAMBDA {
      store_integers<F, int16_t, kWhole>(split.remainder(x, weight), data, i, count);
    });
  } else if (list == kModel && types(kParam) == DType::kRemainderBFloat16) {
    // It has no digits to round.
    store_integers<F, int16_t, kWhole>(shift_right<16>(bits_of(x)), data, i, count);
  } else if (kWhole) {
    store_vector(x, data, plain(type), i);
  } else {
    store_first(x, data, plain(type), i, count);
  }
}

// Runs the op on `count` elements from i on, a vector of them if kWhole, and stores the lists of
// kStored. x ends as what the op left.
template <class F, bool kWhole, unsigned kStored, class Op, class Types>
HD void run_vector(const Op& op, const ChunkLists& lists, const Types& types, int64_t i, int count,
                   F (&x)[kLists]) {
  UNROLL_LISTS
  for (int list = 0; list < kLists; ++list) {
    x[list] = Op::kReads & bit(list) ? load<F, kWhole>(lists, types, list, i, count) : F(0.0f);
  }
  op(x);
  round_to_storage<Op::kWrites>(x, types, lists.random_key, lists.random_first + i, F::count_up());
  UNROLL_LISTS
  for (int list = 0; list < kLists; ++list) {
    if (kStored & bit(list)) store<F, kWhole>(x[list], x[kModel], lists, types, list, i, count);
  }
}

}  // namespace
}  // namespace ampfuse
