// Walks along the chunks of a table, and along the elements of a chunk with fetches ahead.
//
// A chunk is handed out in steps of kStep elements, a whole number of vectors, as
//   take(i, count, whole, fetch)
//     i      the first element of the step, in the chunk
//     count  how many elements it has: kStep, but for the last step of a chunk
//     whole  true_type if that is kStep, else false_type
//     fetch  to be called as fetch(v) before element i + v is loaded, for each vector of the step,
//            in order: it fetches what a later step loads. Does nothing if the step is not whole
// Steps come in the order of elements, on the calling thread. take must be inlined.
#pragma once

#include <type_traits>

#include "chunk_lists.h"

namespace ampfuse {
namespace {

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
// kAhead further, in this chunk or the next. kHere: in this chunk, known when compiling; a
// quantized list's may then lie past the chunk, which does no harm. The hardware's prefetchers stop
// at the end of each page of 4 KB, of which an Adam step walks five at a time, and do not know
// where the next tensor is: 15 % of a large step from memory, 40 % of one over small tensors
// (AVX-512 server).
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

// Calls take, as described above, for all elements of the chunk.
template <int kStep, class Distance, class Types, class Take>
HD void for_steps(const Walk& walk, const Types& types, unsigned fetched, const Take& take) {
  const int64_t n = walk.lists.length;
  // In elements of two bytes, the narrowest that are not quantized.
  constexpr int64_t kMostAhead = Distance::kAhead / 2;
  int64_t i = 0;
  for (; i + kMostAhead + kStep <= n; i += kStep)
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

}  // namespace
}  // namespace ampfuse
