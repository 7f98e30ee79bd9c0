// Storage types. Arithmetic is FP32 everywhere; a value is widened when it is loaded and rounded
// once, to nearest even, when it is stored. A plain type, which needs nothing but the value, is a
// Storage here and a Lanes of each SIMD value; with_storage() is the only place that tells plain
// types apart. The other types are encoded: quantized.h has them.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/hd.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

namespace ampfuse {

enum class DType : uint8_t {
  kNone = 0,
  kFloat32,
  kFloat16,
  kBFloat16,
  // The encoded types. For kParam: the remainder of an FP32 master beyond its half-precision
  // weight.
  kRemainderFloat16,
  kRemainderBFloat16,
  // BF16 with stochastic rounding.
  kRandomBFloat16,
  // For a state: quantized values with a scale for each block of elements.
  kSigned8,
  kUnsigned8,
};

HD constexpr bool is_plain(DType dtype) { return dtype <= DType::kBFloat16; }
HD constexpr bool is_remainder(DType dtype) {
  return dtype == DType::kRemainderFloat16 || dtype == DType::kRemainderBFloat16;
}
HD constexpr bool is_quantized(DType dtype) { return dtype >= DType::kSigned8; }
// The type of a storage for states that are never negative, from its type for the others.
HD constexpr DType without_sign(DType dtype) {
  return is_quantized(dtype) ? DType(uint8_t(dtype) + 1) : dtype;
}

// The plain type whose bits a list of the type holds, if there is one.
HD constexpr DType plain(DType dtype) {
  return dtype == DType::kRandomBFloat16 ? DType::kBFloat16 : dtype;
}

HD uint32_t float_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

HD float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

// The bits of infinity; larger magnitudes are NaN. kNanBits: the NaN that results have, because
// which one an operation makes differs between processors.
constexpr uint32_t kInfinityBits = 0x7f800000u, kNanBits = 0x7fc00000u;

HD float bfloat16_to_float(uint16_t stored) { return bits_float(uint32_t(stored) << 16); }

// Integer rounding, but where an instruction gives the same bits: ARM's BFCVTN, and NVIDIA's
// cvt.rn.bf16x2 of numbers. x86's VCVTNEPS2BF16 flushes subnormals.
HD uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > kInfinityBits) return uint16_t((bits >> 16) | 0x0040u);  // stay a NaN
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

HD float float16_to_float(uint16_t stored) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(stored));
#else
  const uint32_t sign = uint32_t(stored & 0x8000u) << 16;
  const uint32_t magnitude = stored & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_float(sign | kInfinityBits | (magnitude & 0x3ffu) << 13);
  if (magnitude < 0x0400u) {  // subnormal: a multiple of 2^-24
    const float value = float(magnitude) * 5.9604644775390625e-8f;
    return bits_float(sign | float_bits(value));
  }
  return bits_float(sign | ((magnitude << 13) + (112u << 23)));
#endif
}

HD uint16_t float_to_float16(float value) {
#if defined(__CUDA_ARCH__)
  return __half_as_ushort(__float2half_rn(value));
#else
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > kInfinityBits) return uint16_t(sign | 0x7e00u);  // NaN
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);   // 65520 and above round to inf
  if (magnitude < 0x38800000u) {
    // Below 2^-14 halves are multiples of 2^-24, the spacing of floats in [0.5, 1): adding 0.5
    // rounds.
    return uint16_t(sign | (float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u));
  }
  magnitude += 0xfffu + ((magnitude >> 13) & 1u);
  return uint16_t(sign | ((magnitude - (112u << 23)) >> 13));
#endif
}

// How a value of each type is stored, and its way to float and back.
template <DType>
struct Storage;

template <>
struct Storage<DType::kFloat32> {
  static constexpr DType kType = DType::kFloat32;
  using Stored = uint32_t;  // bits, as of the other types
  HD static float widen(Stored stored) { return bits_float(stored); }
  HD static Stored narrow(float value) { return float_bits(value); }
};

template <>
struct Storage<DType::kFloat16> {
  static constexpr DType kType = DType::kFloat16;
  using Stored = uint16_t;
  HD static float widen(Stored stored) { return float16_to_float(stored); }
  HD static Stored narrow(float value) { return float_to_float16(value); }
};

template <>
struct Storage<DType::kBFloat16> {
  static constexpr DType kType = DType::kBFloat16;
  using Stored = uint16_t;
  HD static float widen(Stored stored) { return bfloat16_to_float(stored); }
  HD static Stored narrow(float value) { return float_to_bfloat16(value); }
};

// Calls run(Storage) for a plain type, and nothing for kNone. `run` may be a host function.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class Run>
HD constexpr void with_storage(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::kNone:
      return;
    case DType::kFloat32:
      return run(Storage<DType::kFloat32>());
    case DType::kFloat16:
      return run(Storage<DType::kFloat16>());
    case DType::kBFloat16:
      return run(Storage<DType::kBFloat16>());
    default:
      __builtin_unreachable();
  }
}

// In bytes; 0 for kNone.
HD constexpr int64_t element_size(DType dtype) {
  return dtype == DType::kNone ? 0 : dtype == DType::kFloat32 ? 4 : is_quantized(dtype) ? 1 : 2;
}

HD constexpr bool fills_word(DType dtype) { return dtype == DType::kFloat32; }

// The bits of element i, at any address on the host. On a device the address is aligned for its
// type, and copying bytes would not do: nvcc 13.0 turns the lower byte of a half into the integer
// next to the half's value.
template <class Stored>
HD Stored load_bits(const void* data, int64_t i) {
#if defined(__CUDA_ARCH__)
  return static_cast<const Stored*>(data)[i];
#else
  Stored bits;
  std::memcpy(&bits, static_cast<const char*>(data) + i * int64_t(sizeof bits), sizeof bits);
  return bits;
#endif
}
template <class Stored>
HD void store_bits(void* data, int64_t i, Stored bits) {
#if defined(__CUDA_ARCH__)
  static_cast<Stored*>(data)[i] = bits;
#else
  std::memcpy(static_cast<char*>(data) + i * int64_t(sizeof bits), &bits, sizeof bits);
#endif
}

HD float load_float(const void* data, DType dtype, int64_t i) {
  float value = 0;
  with_storage(dtype, [&](auto storage) HD_LAMBDA {
    value = storage.widen(load_bits<typename decltype(storage)::Stored>(data, i));
  });
  return value;
}

HD void store_float(void* data, DType dtype, int64_t i, float value) {
  with_storage(dtype, [&](auto storage) HD_LAMBDA { store_bits(data, i, storage.narrow(value)); });
}

}  // namespace ampfuse
