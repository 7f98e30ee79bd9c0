// Packs: neighbouring elements of a list as one thread moves them, in one access where they are
// aligned and all there.
#pragma once

#include <cuda_runtime.h>

#include "core/dtype.h"

namespace ampfuse {

// An address in a tensor. Pointers that come from a table could be anywhere, and generic accesses
// are slower.
__device__ inline char* global_at(char* data, int offset) {
  char* address = data + offset;
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(address));
#endif
  return address;
}

// An aligned list whose type is known when compiling.
template <DType kType>
struct KnownColumn {
  static constexpr DType dtype = kType;
  char* data = nullptr;

  __device__ char* at(int i) const { return global_at(data, i * int(element_size(kType))); }
  __device__ bool wide() const { return true; }
};

// kWidth elements as they are stored: FP32 fills the words, two half-precision values share one.
template <int kWidth>
struct Pack {
  uint32_t word[kWidth] = {};
};

// How many of kWidth elements from i on are before the end: zero or less past it.
template <int kWidth>
__device__ inline int part(int i, int end) {
  return end - i < kWidth ? end - i : kWidth;
}

template <int kWords>
__device__ inline void load_words(const void* address, uint32_t* word) {
  if (kWords == 2) {
    const uint2 all = *static_cast<const uint2*>(address);
    word[0] = all.x, word[1] = all.y;
  }
#pragma unroll
  for (int w = 0; w + 4 <= kWords; w += 4) {
    const uint4 all = static_cast<const uint4*>(address)[w / 4];
    word[w] = all.x, word[w + 1] = all.y, word[w + 2] = all.z, word[w + 3] = all.w;
  }
}

template <int kWords>
__device__ inline void store_words(void* address, const uint32_t* word) {
  if (kWords == 2) *static_cast<uint2*>(address) = make_uint2(word[0], word[1]);
#pragma unroll
  for (int w = 0; w + 4 <= kWords; w += 4) {
    static_cast<uint4*>(address)[w / 4] =
        make_uint4(word[w], word[w + 1], word[w + 2], word[w + 3]);
  }
}

// Elements [i, i + count) of the column, count <= kWidth; the rest of the pack is zero. kWhole: the
// column is aligned and count is kWidth.
template <bool kWhole, int kWidth, class Column>
__device__ inline Pack<kWidth> load_pack(const Column& column, int i, int count) {
  Pack<kWidth> pack;
  if (column.dtype == DType::kNone) return pack;
  const bool whole = kWhole || (column.wide() && count == kWidth);
  if (fills_word(column.dtype)) {
    if (whole) {
      load_words<kWidth>(column.at(i), pack.word);
    } else {
      const uint32_t* data = reinterpret_cast<const uint32_t*>(column.at(i));
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (k < count) pack.word[k] = data[k];
      }
    }
  } else {
    if (whole) {
      load_words<kWidth / 2>(column.at(i), pack.word);
    } else {
      const uint16_t* data = reinterpret_cast<const uint16_t*>(column.at(i));
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (k < count) pack.word[k / 2] |= uint32_t(data[k]) << 16 * (k % 2);
      }
    }
  }
  return pack;
}

template <bool kWhole, int kWidth, class Column>
__device__ inline void store_pack(const Column& column, int i, int count,
                                  const Pack<kWidth>& pack) {
  if (column.dtype == DType::kNone) return;
  const bool whole = kWhole || (column.wide() && count == kWidth);
  if (fills_word(column.dtype)) {
    if (whole) {
      store_words<kWidth>(column.at(i), pack.word);
    } else {
      uint32_t* data = reinterpret_cast<uint32_t*>(column.at(i));
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (k < count) data[k] = pack.word[k];
      }
    }
  } else {
    if (whole) {
      store_words<kWidth / 2>(column.at(i), pack.word);
    } else {
      uint16_t* data = reinterpret_cast<uint16_t*>(column.at(i));
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (k < count) data[k] = uint16_t(pack.word[k / 2] >> 16 * (k % 2));
      }
    }
  }
}

// Element k of a pack is in word k / (elements a word).
template <class Storage>
constexpr int kPerWord = int(sizeof(uint32_t) / sizeof(typename Storage::Stored));
template <class Storage>
constexpr int kBits = 8 * int(sizeof(typename Storage::Stored));

// Leaves the values of an absent list as they are: zero.
template <int kWidth>
__device__ inline void widen(const Pack<kWidth>& pack, DType dtype, float (&value)[kWidth]) {
  with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const uint32_t word = pack.word[k / kPerWord<S>];
      value[k] = S::widen(typename S::Stored(word >> kBits<S> * (k % kPerWord<S>)));
    }
  });
}

template <int kWidth>
__device__ inline Pack<kWidth> narrow(const float (&value)[kWidth], DType dtype) {
  Pack<kWidth> pack;
  with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      pack.word[k / kPerWord<S>] |= uint32_t(S::narrow(value[k])) << kBits<S> * (k % kPerWord<S>);
    }
  });
  return pack;
}

}  // namespace ampfuse
