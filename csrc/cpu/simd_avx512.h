// The AVX-512 value (F, BW, DQ, VL): sixteen floats, remainders by mask.
#pragma once

#include <immintrin.h>

#include "core/dtype.h"

namespace ampfuse {

struct Avx512 {
  static constexpr int kWidth = 16;
  __m512 value;

  // Sixteen integers.
  struct Bits {
    __m512i value;

    HD Bits(__m512i v) : value(v) {}
    HD explicit Bits(uint32_t v) : value(_mm512_set1_epi32(int(v))) {}
  };
  HD static Bits count_up() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }

  Avx512() = default;
  HD Avx512(__m512 v) : value(v) {}
  HD explicit Avx512(float v) : value(_mm512_set1_ps(v)) {}

  HD static __mmask16 first(int count) { return __mmask16((1u << count) - 1); }

  struct Halves {
    static constexpr int64_t kSize = 2;
    HD static __m256i load(const void* data) {
      return _mm256_loadu_si256(static_cast<const __m256i*>(data));
    }
    HD static void store(void* data, __m256i halves) {
      _mm256_storeu_si256(static_cast<__m256i*>(data), halves);
    }
    HD static void stream(void* data, __m256i halves) {
      _mm256_stream_si256(static_cast<__m256i*>(data), halves);
    }
    HD static __m256i load_first(const void* data, int count) {
      return _mm256_maskz_loadu_epi16(first(count), data);
    }
    HD static void store_first(void* data, __m256i halves, int count) {
      _mm256_mask_storeu_epi16(data, first(count), halves);
    }
    HD static uint32_t differ(__m256i a, __m256i b) { return _mm256_cmpneq_epi16_mask(a, b); }
  };

  // Four vectors of integers from 0 to 255, as bytes.
  HD static void store_bytes(void* data, const Bits (&x)[4]) {
    // Packing works within each 128 bits: dword 4 l + k has the bytes of x[k] there.
    const __m512i bytes = _mm512_packus_epi16(_mm512_packus_epi32(x[0].value, x[1].value),
                                              _mm512_packus_epi32(x[2].value, x[3].value));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(data, _mm512_permutexvar_epi32(order, bytes));
  }

  template <DType kType>
  struct Lanes;

  // Integers that are stored as smaller ones.
  template <class Stored>
  struct Part;

  struct Magnitude {
    __m512i bits = _mm512_setzero_si512();
    HD void include(Avx512 x) {
      const __m512i magnitude =
          _mm512_and_si512(_mm512_castps_si512(x.value), _mm512_set1_epi32(0x7fffffff));
      bits = _mm512_max_epu32(bits, magnitude);
    }
    HD uint32_t reduce() const { return _mm512_reduce_max_epu32(bits); }
  };
};

template <>
struct Avx512::Lanes<DType::kFloat32> {
  static constexpr int64_t kSize = 4;
  HD static __m512 load(const void* data) { return _mm512_loadu_ps(data); }
  HD static void store(void* data, __m512 floats) { _mm512_storeu_ps(data, floats); }
  HD static void stream(void* data, __m512 floats) {
    _mm512_stream_ps(static_cast<float*>(data), floats);
  }
  HD static __m512 load_first(const void* data, int count) {
    return _mm512_maskz_loadu_ps(first(count), data);
  }
  HD static void store_first(void* data, __m512 floats, int count) {
    _mm512_mask_storeu_ps(data, first(count), floats);
  }
  HD static Avx512 widen(__m512 floats) { return floats; }
  HD static __m512 narrow(Avx512 x) { return x.value; }
  HD static uint32_t differ(__m512 a, __m512 b) {
    return _mm512_cmpneq_epi32_mask(_mm512_castps_si512(a), _mm512_castps_si512(b));
  }
};

template <>
struct Avx512::Lanes<DType::kFloat16> : Halves {
  HD static Avx512 widen(__m256i halves) { return _mm512_cvtph_ps(halves); }
  HD static __m256i narrow(Avx512 x) {
    return _mm512_cvtps_ph(x.value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
};

template <>
struct Avx512::Lanes<DType::kBFloat16> : Halves {
  HD static Avx512 widen(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  HD static __m256i narrow(Avx512 x) {
    const __m512i bits = _mm512_castps_si512(x.value);
    const __m512i top = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(x.value, x.value, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, top, _mm512_set1_epi32(0x40)));
  }
};

template <>
struct Avx512::Part<int16_t> {
  HD static Bits load(const void* data) {
    return _mm512_cvtepi16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(data)));
  }
  HD static void store(void* data, Bits bits) {
    _mm256_storeu_si256(static_cast<__m256i*>(data), _mm512_cvtepi32_epi16(bits.value));
  }
  HD static Bits load_first(const void* data, int count) {
    return _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(first(count), data));
  }
  HD static void store_first(void* data, Bits bits, int count) {
    _mm256_mask_storeu_epi16(data, first(count), _mm512_cvtepi32_epi16(bits.value));
  }
};

template <class Stored>
struct Avx512::Part {
  static_assert(sizeof(Stored) == 1);
  HD static Bits load(const void* data) {
    return widen(_mm_loadu_si128(static_cast<const __m128i*>(data)));
  }
  HD static void store(void* data, Bits bits) {
    _mm_storeu_si128(static_cast<__m128i*>(data), _mm512_cvtepi32_epi8(bits.value));
  }
  HD static Bits load_first(const void* data, int count) {
    return widen(_mm_maskz_loadu_epi8(first(count), data));
  }
  HD static void store_first(void* data, Bits bits, int count) {
    _mm_mask_storeu_epi8(data, first(count), _mm512_cvtepi32_epi8(bits.value));
  }

 private:
  HD static Bits widen(__m128i bytes) {
    return Stored(-1) < 0 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
  }
};

HD Avx512::Bits operator+(Avx512::Bits a, Avx512::Bits b) {
  return _mm512_add_epi32(a.value, b.value);
}
HD Avx512::Bits operator-(Avx512::Bits a, Avx512::Bits b) {
  return _mm512_sub_epi32(a.value, b.value);
}
HD Avx512::Bits operator*(Avx512::Bits a, Avx512::Bits b) {
  return _mm512_mullo_epi32(a.value, b.value);
}
HD Avx512::Bits operator&(Avx512::Bits a, Avx512::Bits b) {
  return _mm512_and_si512(a.value, b.value);
}
HD Avx512::Bits operator|(Avx512::Bits a, Avx512::Bits b) {
  return _mm512_or_si512(a.value, b.value);
}
HD Avx512::Bits operator^(Avx512::Bits a, Avx512::Bits b) {
  return _mm512_xor_si512(a.value, b.value);
}
template <int kCount>
HD Avx512::Bits shift_left(Avx512::Bits a) {
  return _mm512_slli_epi32(a.value, kCount);
}
template <int kCount>
HD Avx512::Bits shift_right(Avx512::Bits a) {
  return _mm512_srli_epi32(a.value, kCount);
}
HD Avx512::Bits select_less(Avx512::Bits a, Avx512::Bits b, Avx512::Bits then,
                            Avx512::Bits otherwise) {
  return _mm512_mask_mov_epi32(otherwise.value, _mm512_cmplt_epi32_mask(a.value, b.value),
                               then.value);
}
HD Avx512::Bits max_signed(Avx512::Bits a, Avx512::Bits b) {
  return _mm512_max_epi32(a.value, b.value);
}
HD Avx512::Bits blend(Avx512::Bits mask, Avx512::Bits a, Avx512::Bits b) {
  return _mm512_ternarylogic_epi32(mask.value, a.value, b.value, 0xca);
}
HD Avx512 to_float(Avx512, Avx512::Bits a) { return _mm512_cvtepi32_ps(a.value); }
HD Avx512::Bits bits_of(Avx512 a) { return _mm512_castps_si512(a.value); }
HD Avx512 from_bits(Avx512, Avx512::Bits bits) { return _mm512_castsi512_ps(bits.value); }

HD Avx512 operator+(Avx512 a, Avx512 b) { return _mm512_add_ps(a.value, b.value); }
HD Avx512 operator-(Avx512 a, Avx512 b) { return _mm512_sub_ps(a.value, b.value); }
HD Avx512 operator*(Avx512 a, Avx512 b) { return _mm512_mul_ps(a.value, b.value); }
HD Avx512 operator/(Avx512 a, Avx512 b) { return _mm512_div_ps(a.value, b.value); }
HD Avx512 fma(Avx512 a, Avx512 b, Avx512 c) { return _mm512_fmadd_ps(a.value, b.value, c.value); }
HD Avx512 sqrt(Avx512 a) { return _mm512_sqrt_ps(a.value); }
HD Avx512 max_nan(Avx512 a, Avx512 b) {
  // maxps returns its second operand when either is NaN, so only a NaN in a must be put back.
  const __mmask16 nan = _mm512_cmp_ps_mask(a.value, a.value, _CMP_UNORD_Q);
  return _mm512_mask_mov_ps(_mm512_max_ps(a.value, b.value), nan, a.value);
}
HD Avx512 min_number(Avx512 a, Avx512 b) { return _mm512_min_ps(a.value, b.value); }
HD Avx512 saturate(Avx512 a) {
  return _mm512_min_ps(_mm512_max_ps(a.value, _mm512_setzero_ps()), _mm512_set1_ps(1));
}
HD Avx512 select_equal(Avx512 a, Avx512 b, Avx512 then, Avx512 otherwise) {
  return _mm512_mask_mov_ps(otherwise.value, _mm512_cmp_ps_mask(a.value, b.value, _CMP_EQ_OQ),
                            then.value);
}

HD uint32_t above_zero(Avx512 a) {
  return _mm512_cmp_ps_mask(a.value, _mm512_setzero_ps(), _CMP_NLE_UQ);
}
HD uint32_t below(Avx512 a, float bound) {
  const __m512i magnitude =
      _mm512_and_si512(_mm512_castps_si512(a.value), _mm512_set1_epi32(0x7fffffff));
  return _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(int(float_bits(bound))));
}
HD Avx512 keep(uint32_t bits, Avx512 a) { return _mm512_maskz_mov_ps(__mmask16(bits), a.value); }

}  // namespace ampfuse
