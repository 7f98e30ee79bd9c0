// Packs: neighbouring elements of a list as one thread moves them, in one access if they are
// aligned and complete.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

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
  static constexpr bool kEncoded = false, kSplit = false;
  char* data = nullptr;

  __device__ char* at(int i) const { return global_at(data, i * int(element_size(kType))); }
  __device__ bool wide() const { return true; }
};

// kWidth elements as they are stored: FP32 fills the words, and two half-precision or four
// quantized values share one.
template <int kWidth>
struct Pack {
  uint32_t word[kWidth] = {};

  // The bits of an element of kSize bytes.
  template <int kSize>
  static constexpr uint32_t kOnes = ~0u >> (32 - 8 * kSize);

  // Element k of those of kSize bytes.
  template <int kSize>
  __device__ uint32_t get(int k) const {
    constexpr int kPerWord = 4 / kSize;
    const uint32_t bits = word[k / kPerWord] >> 8 * kSize * (k % kPerWord);
    return bits & kOnes<kSize>;
  }
  // Sets element k, which must be zero before.
  template <int kSize>
  __device__ void put(int k, uint32_t bits) {
    constexpr int kPerWord = 4 / kSize;
    word[k / kPerWord] |= (bits & kOnes<kSize>) << 8 * kSize * (k % kPerWord);
  }
};

// How many of kWidth elements from i on are before the end: zero or less past it. kWhole: all are.
template <int kWidth, bool kWhole = false>
__device__ inline int elements_in_pack(int i, int end) {
  return kWhole || end - i >= kWidth ? kWidth : end - i;
}

template <int kWords>
__device__ inline void load_words(const void* address, uint32_t* word) {
  if (kWords == 1) word[0] = *static_cast<const uint32_t*>(address);
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
  if (kWords == 1) *static_cast<uint32_t*>(address) = word[0];
  if (kWords == 2) *static_cast<uint2*>(address) = make_uint2(word[0], word[1]);
#pragma unroll
  for (int w = 0; w + 4 <= kWords; w += 4) {
    static_cast<uint4*>(address)[w / 4] =
        make_uint4(word[w], word[w + 1], word[w + 2], word[w + 3]);
  }
}

// The integer of kSize bytes.
template <int kSize>
struct Element;
template <>
struct Element<4> {
  using type = uint32_t;
};
template <>
struct Element<2> {
  using type = uint16_t;
};
template <>
struct Element<1> {
  using type = uint8_t;
};

// Calls run(size), an integral_constant: the element size of a column that exists. `quantized`, a
// constant of the caller: whether the column may be quantized.
template <class Column, class Run>
__device__ inline void with_size(const Column& column, bool quantized, const Run& run) {
  if (fills_word(column.dtype)) {
    run(std::integral_constant<int, 4>());
  } else if (quantized && is_quantized(column.dtype)) {
    run(std::integral_constant<int, 1>());
  } else {
    run(std::integral_constant<int, 2>());
  }
}

template <class Column>
__device__ inline char* address(const Column& column, bool quantized, int i) {
  if constexpr (Column::kEncoded) {
    return column.at(i, quantized);
  } else {
    return column.at(i);
  }
}

// Elements [i, i + count) of the column, count <= kWidth; the rest of the pack is zero. kWhole: the
// column is aligned and count is kWidth.
template <bool kWhole, int kWidth, class Column>
__device__ inline Pack<kWidth> load_pack(const Column& column, int i, int count,
                                         bool quantized = false) {
  Pack<kWidth> pack;
  if (column.dtype == DType::kNone) return pack;
  const bool whole = kWhole || (column.wide() && count == kWidth);
  with_size(column, quantized, [&](auto size) {
    constexpr int kSize = decltype(size)::value;
    if (whole) {
      load_words<kWidth * kSize / 4>(address(column, quantized, i), pack.word);
    } else {
      const auto* data =
          reinterpret_cast<const typename Element<kSize>::type*>(address(column, quantized, i));
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (k < count) pack.template put<kSize>(k, data[k]);
      }
    }
  });
  return pack;
}

template <bool kWhole, int kWidth, class Column>
__device__ inline void store_pack(const Column& column, int i, int count, const Pack<kWidth>& pack,
                                  bool quantized = false) {
  if (column.dtype == DType::kNone) return;
  const bool whole = kWhole || (column.wide() && count == kWidth);
  with_size(column, quantized, [&](auto size) {
    constexpr int kSize = decltype(size)::value;
    if (whole) {
      store_words<kWidth * kSize / 4>(address(column, quantized, i), pack.word);
    } else {
      auto* data = reinterpret_cast<typename Element<kSize>::type*>(address(column, quantized, i));
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (k < count) data[k] = typename Element<kSize>::type(pack.template get<kSize>(k));
      }
    }
  });
}

// The values of an absent list stay zero.
template <int kWidth>
__device__ inline void widen(const Pack<kWidth>& pack, DType dtype, float (&value)[kWidth]) {
  with_storage(dtype, [&](auto storage) {
    using Stored = typename decltype(storage)::Stored;
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      value[k] = storage.widen(Stored(pack.template get<sizeof(Stored)>(k)));
  });
}

// Byte k of the word plus 2^23, as a float: its bits are the lower ones of that. (Converting
// integers has a quarter of the rate.)
__device__ inline float byte_above_2_23(uint32_t word, int k) {
  return bits_float(__byte_perm(word, 0x4b000000u, 0x7440u | k));
}

// The lower bytes of `bits`.
template <int kWidth>
__device__ inline Pack<kWidth> lower_bytes(const uint32_t (&bits)[kWidth]) {
  static_assert(kWidth % 4 == 0);
  Pack<kWidth> pack;
#pragma unroll
  for (int k = 0; k < kWidth; k += 4) {
    pack.word[k / 4] = __byte_perm(__byte_perm(bits[k], bits[k + 1], 0x0040u),
                                   __byte_perm(bits[k + 2], bits[k + 3], 0x0040u), 0x5410u);
  }
  return pack;
}

// Two values that are not NaN, as float_to_bfloat16() rounds them, the first in the lower half.
__device__ inline uint32_t numbers_to_bfloat16(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#else
  const auto rounded = [](float value) {
    const uint32_t bits = float_bits(value);
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  };
  return rounded(low) | rounded(high) << 16;
#endif
}

// A pack of BF16 is checked for NaN once, where float_to_bfloat16() checks each value: that is a
// third of the instructions of a pass that does little else.
template <DType kType, int kWidth>
__device__ inline Pack<kWidth> narrow(const float (&value)[kWidth]) {
  using Type = Storage<kType>;
  bool numbers = kType == DType::kBFloat16;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) numbers = numbers & (value[k] == value[k]);
  Pack<kWidth> pack;
  if (numbers) {
#pragma unroll
    for (int k = 0; k < kWidth; k += 2)
      pack.word[k / 2] = numbers_to_bfloat16(value[k], value[k + 1]);
    return pack;
  }
#pragma unroll
  for (int k = 0; k < kWidth; ++k)
    pack.template put<sizeof(typename Type::Stored)>(k, Type::narrow(value[k]));
  return pack;
}

// The same for a type that is known when running.
template <int kWidth>
__device__ inline Pack<kWidth> narrow(const float (&value)[kWidth], DType dtype) {
  Pack<kWidth> pack;
  with_storage(dtype, [&](auto storage) { pack = narrow<decltype(storage)::kType>(value); });
  return pack;
}

}  // namespace ampfuse
