// The lists of one chunk of a table.
//
// Everything in this header and in those that include it is in an anonymous namespace: code that is
// compiled for one instruction set must not be merged with another's.
#pragma once

#include <cstdint>

#include "core/table.h"

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

}  // namespace
}  // namespace ampfuse
