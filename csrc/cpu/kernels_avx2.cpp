// AVX2 with F16C and FMA: eight floats.
#include <immintrin.h>

#include "apply.h"

namespace ampfuse {
namespace {

struct Avx2 {
  static constexpr int kWidth = 8;
  __m256 value;

  Avx2() = default;
  HD Avx2(__m256 v) : value(v) {}
  HD explicit Avx2(float v) : value(_mm256_set1_ps(v)) {}

  HD static Avx2 load(const void* data, DType dtype, int64_t i) {
    switch (dtype) {
      case DType::kFloat32:
        return _mm256_loadu_ps(static_cast<const float*>(data) + i);
      case DType::kFloat16:
        return _mm256_cvtph_ps(load_halves(data, i));
      case DType::kBFloat16:
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(data, i)), 16));
      default:
        return _mm256_setzero_ps();
    }
  }

  HD void store(void* data, DType dtype, int64_t i) const {
    switch (dtype) {
      case DType::kFloat32:
        return _mm256_storeu_ps(static_cast<float*>(data) + i, value);
      case DType::kFloat16:
        return store_halves(data, i, to_float16());
      case DType::kBFloat16:
        return store_halves(data, i, to_bfloat16());
      default:
        return;
    }
  }

  // Stores halves past the caches; aligned.
  HD void stream(void* data, DType dtype, int64_t i) const {
    _mm_stream_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(data) + i),
                     dtype == DType::kFloat16 ? to_float16() : to_bfloat16());
  }

  // The remainder goes through a buffer, so that nothing past the tensor is touched.
  HD static Avx2 load_partial(const void* data, DType dtype, int64_t i, int count) {
    if (dtype == DType::kNone) return _mm256_setzero_ps();
    alignas(32) char buffer[32] = {};
    const int64_t size = element_size(dtype);
    __builtin_memcpy(buffer, static_cast<const char*>(data) + i * size, count * size);
    return load(buffer, dtype, 0);
  }

  HD void store_partial(void* data, DType dtype, int64_t i, int count) const {
    if (dtype == DType::kNone) return;
    alignas(32) char buffer[32];
    const int64_t size = element_size(dtype);
    store(buffer, dtype, 0);
    __builtin_memcpy(static_cast<char*>(data) + i * size, buffer, count * size);
  }

  HD __m128i to_float16() const {
    return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  HD __m128i to_bfloat16() const {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i result = _mm256_blendv_epi8(rounded, quiet, nan);
    return _mm256_castsi256_si128(
        _mm256_permute4x64_epi64(_mm256_packus_epi32(result, result), _MM_SHUFFLE(3, 1, 2, 0)));
  }

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

 private:
  HD static __m128i load_halves(const void* data, int64_t i) {
    return _mm_loadu_si128(
        reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(data) + i));
  }
  HD static void store_halves(void* data, int64_t i, __m128i halves) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(data) + i), halves);
  }
};

HD Avx2 operator+(Avx2 a, Avx2 b) { return _mm256_add_ps(a.value, b.value); }
HD Avx2 operator-(Avx2 a, Avx2 b) { return _mm256_sub_ps(a.value, b.value); }
HD Avx2 operator*(Avx2 a, Avx2 b) { return _mm256_mul_ps(a.value, b.value); }
HD Avx2 operator/(Avx2 a, Avx2 b) { return _mm256_div_ps(a.value, b.value); }
HD Avx2 fma(Avx2 a, Avx2 b, Avx2 c) { return _mm256_fmadd_ps(a.value, b.value, c.value); }
HD Avx2 sqrt(Avx2 a) { return _mm256_sqrt_ps(a.value); }
HD Avx2 max_nan(Avx2 a, Avx2 b) {
  // maxps returns its second operand when either is NaN, so only a NaN in a has to be put back.
  return _mm256_blendv_ps(_mm256_max_ps(a.value, b.value), a.value,
                          _mm256_cmp_ps(a.value, a.value, _CMP_UNORD_Q));
}
HD Avx2 select_equal(Avx2 a, Avx2 b, Avx2 then, Avx2 otherwise) {
  return _mm256_blendv_ps(otherwise.value, then.value, _mm256_cmp_ps(a.value, b.value, _CMP_EQ_OQ));
}
HD Avx2 round_to(DType dtype, Avx2 a) {
  if (dtype == DType::kFloat16) return _mm256_cvtph_ps(a.to_float16());
  if (dtype == DType::kBFloat16) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a.to_bfloat16()), 16));
  }
  return a;
}

}  // namespace

const CpuKernels kAvx2Kernels = make_kernels<Avx2>("avx2");

}  // namespace ampfuse
