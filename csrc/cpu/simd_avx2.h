// The AVX2 value, with F16C and FMA: eight floats.
#pragma once

#include <immintrin.h>

#include "core/dtype.h"
#include "vector.h"

namespace ampfuse {

struct Avx2 {
  static constexpr int kWidth = 8;
  __m256 value;

  // Eight integers.
  struct Bits {
    __m256i value;

    HD Bits(__m256i v) : value(v) {}
    HD explicit Bits(uint32_t v) : value(_mm256_set1_epi32(int(v))) {}
  };
  HD static Bits count_up() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }

  Avx2() = default;
  HD Avx2(__m256 v) : value(v) {}
  HD explicit Avx2(float v) : value(_mm256_set1_ps(v)) {}

  struct Halves : FirstByBuffer<Halves> {
    static constexpr int64_t kSize = 2;
    HD static __m128i load(const void* data) {
      return _mm_loadu_si128(static_cast<const __m128i*>(data));
    }
    HD static void store(void* data, __m128i halves) {
      _mm_storeu_si128(static_cast<__m128i*>(data), halves);
    }
    HD static void stream(void* data, __m128i halves) {
      _mm_stream_si128(static_cast<__m128i*>(data), halves);
    }
    HD static uint32_t differ(__m128i a, __m128i b) {
      const __m128i equal = _mm_packs_epi16(_mm_cmpeq_epi16(a, b), _mm_setzero_si128());
      return ~uint32_t(_mm_movemask_epi8(equal)) & 0xffu;
    }
  };

  // Four vectors of integers from 0 to 255, as bytes.
  HD static void store_bytes(void* data, const Bits (&x)[4]) {
    // Packing works within each 128 bits: dword 4 l + k has the bytes of x[k] there.
    const __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(x[0].value, x[1].value),
                                              _mm256_packus_epi32(x[2].value, x[3].value));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(static_cast<__m256i*>(data), _mm256_permutevar8x32_epi32(bytes, order));
  }

  template <DType kType>
  struct Lanes;

  // Integers that are stored as smaller ones.
  template <class Stored>
  struct Part;

  struct Magnitude {
    __m256i bits = _mm256_setzero_si256();
    HD void include(Avx2 x) {
      const __m256i magnitude =
          _mm256_and_si256(_mm256_castps_si256(x.value), _mm256_set1_epi32(0x7fffffff));
      bits = _mm256_max_epu32(bits, magnitude);
    }
    HD uint32_t reduce() const {
      alignas(32) uint32_t lane[8];
      _mm256_store_si256(reinterpret_cast<__m256i*>(lane), bits);
      uint32_t largest = 0;
      for (uint32_t value : lane) largest = value > largest ? value : largest;
      return largest;
    }
  };
};

template <>
struct Avx2::Lanes<DType::kFloat32> : FirstByBuffer<Lanes<DType::kFloat32>> {
  static constexpr int64_t kSize = 4;
  HD static __m256 load(const void* data) {
    return _mm256_loadu_ps(static_cast<const float*>(data));
  }
  HD static void store(void* data, __m256 floats) {
    _mm256_storeu_ps(static_cast<float*>(data), floats);
  }
  HD static void stream(void* data, __m256 floats) {
    _mm256_stream_ps(static_cast<float*>(data), floats);
  }
  HD static Avx2 widen(__m256 floats) { return floats; }
  HD static __m256 narrow(Avx2 x) { return x.value; }
  HD static uint32_t differ(__m256 a, __m256 b) {
    const __m256i equal = _mm256_cmpeq_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b));
    return ~uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(equal))) & 0xffu;
  }
};

template <>
struct Avx2::Lanes<DType::kFloat16> : Halves {
  HD static Avx2 widen(__m128i halves) { return _mm256_cvtph_ps(halves); }
  HD static __m128i narrow(Avx2 x) {
    return _mm256_cvtps_ph(x.value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
};

template <>
struct Avx2::Lanes<DType::kBFloat16> : Halves {
  HD static Avx2 widen(__m128i halves) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  HD static __m128i narrow(Avx2 x) {
    const __m256i bits = _mm256_castps_si256(x.value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.value, x.value, _CMP_UNORD_Q));
    const __m256i result = _mm256_blendv_epi8(rounded, quiet, nan);
    return _mm256_castsi256_si128(
        _mm256_permute4x64_epi64(_mm256_packus_epi32(result, result), _MM_SHUFFLE(3, 1, 2, 0)));
  }
};

template <>
struct Avx2::Part<int16_t> : FirstByBuffer<Part<int16_t>> {
  static constexpr int64_t kSize = 2;
  HD static Bits load(const void* data) {
    return _mm256_cvtepi16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(data)));
  }
  HD static void store(void* data, Bits bits) {
    const __m256i low = _mm256_and_si256(bits.value, _mm256_set1_epi32(0xffff));
    const __m256i packed =
        _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), _MM_SHUFFLE(3, 1, 2, 0));
    _mm_storeu_si128(static_cast<__m128i*>(data), _mm256_castsi256_si128(packed));
  }
};

template <class Stored>
struct Avx2::Part : FirstByBuffer<Part<Stored>> {
  static_assert(sizeof(Stored) == 1);
  static constexpr int64_t kSize = 1;
  HD static Bits load(const void* data) {
    const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(data));
    return Stored(-1) < 0 ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
  }
  HD static void store(void* data, Bits bits) {
    const __m256i low = _mm256_and_si256(bits.value, _mm256_set1_epi32(0xff));
    const __m256i words =
        _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), _MM_SHUFFLE(3, 1, 2, 0));
    const __m128i halves = _mm256_castsi256_si128(words);
    _mm_storel_epi64(static_cast<__m128i*>(data), _mm_packus_epi16(halves, halves));
  }
};

HD Avx2::Bits operator+(Avx2::Bits a, Avx2::Bits b) { return _mm256_add_epi32(a.value, b.value); }
HD Avx2::Bits operator-(Avx2::Bits a, Avx2::Bits b) { return _mm256_sub_epi32(a.value, b.value); }
HD Avx2::Bits operator*(Avx2::Bits a, Avx2::Bits b) { return _mm256_mullo_epi32(a.value, b.value); }
HD Avx2::Bits operator&(Avx2::Bits a, Avx2::Bits b) { return _mm256_and_si256(a.value, b.value); }
HD Avx2::Bits operator|(Avx2::Bits a, Avx2::Bits b) { return _mm256_or_si256(a.value, b.value); }
HD Avx2::Bits operator^(Avx2::Bits a, Avx2::Bits b) { return _mm256_xor_si256(a.value, b.value); }
template <int kCount>
HD Avx2::Bits shift_left(Avx2::Bits a) {
  return _mm256_slli_epi32(a.value, kCount);
}
template <int kCount>
HD Avx2::Bits shift_right(Avx2::Bits a) {
  return _mm256_srli_epi32(a.value, kCount);
}
HD Avx2::Bits select_less(Avx2::Bits a, Avx2::Bits b, Avx2::Bits then, Avx2::Bits otherwise) {
  return _mm256_blendv_epi8(otherwise.value, then.value, _mm256_cmpgt_epi32(b.value, a.value));
}
HD Avx2::Bits max_signed(Avx2::Bits a, Avx2::Bits b) { return _mm256_max_epi32(a.value, b.value); }
HD Avx2::Bits blend(Avx2::Bits mask, Avx2::Bits a, Avx2::Bits b) { return b ^ ((a ^ b) & mask); }
HD Avx2 to_float(Avx2, Avx2::Bits a) { return _mm256_cvtepi32_ps(a.value); }
HD Avx2::Bits bits_of(Avx2 a) { return _mm256_castps_si256(a.value); }
HD Avx2 from_bits(Avx2, Avx2::Bits bits) { return _mm256_castsi256_ps(bits.value); }

HD Avx2 operator+(Avx2 a, Avx2 b) { return _mm256_add_ps(a.value, b.value); }
HD Avx2 operator-(Avx2 a, Avx2 b) { return _mm256_sub_ps(a.value, b.value); }
HD Avx2 operator*(Avx2 a, Avx2 b) { return _mm256_mul_ps(a.value, b.value); }
HD Avx2 operator/(Avx2 a, Avx2 b) { return _mm256_div_ps(a.value, b.value); }
HD Avx2 fma(Avx2 a, Avx2 b, Avx2 c) { return _mm256_fmadd_ps(a.value, b.value, c.value); }
HD Avx2 sqrt(Avx2 a) { return _mm256_sqrt_ps(a.value); }
HD Avx2 max_nan(Avx2 a, Avx2 b) {
  // maxps returns its second operand when either is NaN, so only a NaN in a must be put back.
  return _mm256_blendv_ps(_mm256_max_ps(a.value, b.value), a.value,
                          _mm256_cmp_ps(a.value, a.value, _CMP_UNORD_Q));
}
HD Avx2 min_number(Avx2 a, Avx2 b) { return _mm256_min_ps(a.value, b.value); }
HD Avx2 saturate(Avx2 a) {
  return _mm256_min_ps(_mm256_max_ps(a.value, _mm256_setzero_ps()), _mm256_set1_ps(1));
}
HD Avx2 select_equal(Avx2 a, Avx2 b, Avx2 then, Avx2 otherwise) {
  return _mm256_blendv_ps(otherwise.value, then.value, _mm256_cmp_ps(a.value, b.value, _CMP_EQ_OQ));
}

HD uint32_t above_zero(Avx2 a) {
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.value, _mm256_setzero_ps(), _CMP_NLE_UQ)));
}
HD uint32_t below(Avx2 a, float bound) {
  const __m256i magnitude =
      _mm256_and_si256(_mm256_castps_si256(a.value), _mm256_set1_epi32(0x7fffffff));
  const __m256i less = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(float_bits(bound))), magnitude);
  return uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(less)));
}
HD Avx2 keep(uint32_t bits, Avx2 a) {
  const __m256i one = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i all = _mm256_and_si256(_mm256_set1_epi32(int(bits)), one);
  return _mm256_and_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(all, one)), a.value);
}

}  // namespace ampfuse
