// AVX-512 (F, BW, DQ, VL): sixteen floats, remainders by mask.
#include <immintrin.h>

#include "apply.h"

namespace ampfuse {
namespace {

struct Avx512 {
  static constexpr int kWidth = 16;
  __m512 value;

  Avx512() = default;
  HD Avx512(__m512 v) : value(v) {}
  HD explicit Avx512(float v) : value(_mm512_set1_ps(v)) {}

  HD static Avx512 load(const void* data, DType dtype, int64_t i) {
    switch (dtype) {
      case DType::kFloat32:
        return _mm512_loadu_ps(static_cast<const float*>(data) + i);
      case DType::kFloat16:
        return _mm512_cvtph_ps(_mm256_loadu_si256(halves(data, i)));
      case DType::kBFloat16:
        return from_bfloat16(_mm256_loadu_si256(halves(data, i)));
      default:
        return _mm512_setzero_ps();
    }
  }

  HD void store(void* data, DType dtype, int64_t i) const {
    switch (dtype) {
      case DType::kFloat32:
        return _mm512_storeu_ps(static_cast<float*>(data) + i, value);
      case DType::kFloat16:
        return _mm256_storeu_si256(halves(data, i), to_float16());
      case DType::kBFloat16:
        return _mm256_storeu_si256(halves(data, i), to_bfloat16());
      default:
        return;
    }
  }

  // Stores halves past the caches; aligned.
  HD void stream(void* data, DType dtype, int64_t i) const {
    _mm256_stream_si256(halves(data, i), dtype == DType::kFloat16 ? to_float16() : to_bfloat16());
  }

  HD static Avx512 load_partial(const void* data, DType dtype, int64_t i, int count) {
    const __mmask16 mask = first(count);
    switch (dtype) {
      case DType::kFloat32:
        return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(data) + i);
      case DType::kFloat16:
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, halves(data, i)));
      case DType::kBFloat16:
        return from_bfloat16(_mm256_maskz_loadu_epi16(mask, halves(data, i)));
      default:
        return _mm512_setzero_ps();
    }
  }

  HD void store_partial(void* data, DType dtype, int64_t i, int count) const {
    const __mmask16 mask = first(count);
    switch (dtype) {
      case DType::kFloat32:
        return _mm512_mask_storeu_ps(static_cast<float*>(data) + i, mask, value);
      case DType::kFloat16:
        return _mm256_mask_storeu_epi16(halves(data, i), mask, to_float16());
      case DType::kBFloat16:
        return _mm256_mask_storeu_epi16(halves(data, i), mask, to_bfloat16());
      default:
        return;
    }
  }

  HD __m256i to_float16() const {
    return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  HD __m256i to_bfloat16() const {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i top = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, top, _mm512_set1_epi32(0x40)));
  }

  HD static Avx512 from_bfloat16(__m256i stored) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(stored), 16));
  }

  struct Magnitude {
    __m512i bits = _mm512_setzero_si512();
    HD void include(Avx512 x) {
      const __m512i magnitude =
          _mm512_and_si512(_mm512_castps_si512(x.value), _mm512_set1_epi32(0x7fffffff));
      bits = _mm512_max_epu32(bits, magnitude);
    }
    HD uint32_t reduce() const { return _mm512_reduce_max_epu32(bits); }
  };

 private:
  HD static __mmask16 first(int count) { return __mmask16((1u << count) - 1); }
  HD static const __m256i* halves(const void* data, int64_t i) {
    return reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(data) + i);
  }
  HD static __m256i* halves(void* data, int64_t i) {
    return reinterpret_cast<__m256i*>(static_cast<uint16_t*>(data) + i);
  }
};

HD Avx512 operator+(Avx512 a, Avx512 b) { return _mm512_add_ps(a.value, b.value); }
HD Avx512 operator-(Avx512 a, Avx512 b) { return _mm512_sub_ps(a.value, b.value); }
HD Avx512 operator*(Avx512 a, Avx512 b) { return _mm512_mul_ps(a.value, b.value); }
HD Avx512 operator/(Avx512 a, Avx512 b) { return _mm512_div_ps(a.value, b.value); }
HD Avx512 fma(Avx512 a, Avx512 b, Avx512 c) { return _mm512_fmadd_ps(a.value, b.value, c.value); }
HD Avx512 sqrt(Avx512 a) { return _mm512_sqrt_ps(a.value); }
HD Avx512 max_nan(Avx512 a, Avx512 b) {
  // maxps returns its second operand when either is NaN, so only a NaN in a has to be put back.
  const __mmask16 nan = _mm512_cmp_ps_mask(a.value, a.value, _CMP_UNORD_Q);
  return _mm512_mask_mov_ps(_mm512_max_ps(a.value, b.value), nan, a.value);
}
HD Avx512 select_equal(Avx512 a, Avx512 b, Avx512 then, Avx512 otherwise) {
  return _mm512_mask_mov_ps(otherwise.value, _mm512_cmp_ps_mask(a.value, b.value, _CMP_EQ_OQ),
                            then.value);
}
HD Avx512 round_to(DType dtype, Avx512 a) {
  if (dtype == DType::kFloat16) return _mm512_cvtph_ps(a.to_float16());
  if (dtype == DType::kBFloat16) return Avx512::from_bfloat16(a.to_bfloat16());
  return a;
}

}  // namespace

const CpuKernels kAvx512Kernels = make_kernels<Avx512>("avx512");

}  // namespace ampfuse
