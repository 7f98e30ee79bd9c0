// The lists of one chunk of a table, and their types, known when compiling where nearly all rows
// have them.
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

// --- the types of lists --------------------------------------------------------------------------

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

}  // namespace
}  // namespace ampfuse
