// What the machine can do at best, for limits.py: plain loops that the compiler vectorises, one
// thread each.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kLine = 16;  // floats of a cache line
constexpr int64_t kAhead =
    512;  // floats to prefetch ahead: over the end of a page, where hardware stops

}  // namespace

extern "C" {

// Updates `count` floats in place, as `streams` arrays that are walked side by side.
void update_in_place(float* data, int64_t count, int64_t streams) {
  const int64_t length = count / streams / kLine * kLine;
  for (int64_t i = 0; i < length; i += kLine) {
    for (int64_t stream = 0; stream < streams; ++stream) {
      float* line = data + stream * length + i;
      __builtin_prefetch(line + kAhead);
      for (int64_t j = 0; j < kLine; ++j) line[j] += 1.0f;
    }
  }
}

// Reads `count` floats.
uint32_t read(const uint32_t* data, int64_t count) {
  uint32_t lane[4 * kLine] = {};
  for (int64_t i = 0; i + 4 * kLine <= count; i += 4 * kLine) {
    for (int64_t j = 0; j < 4; ++j) __builtin_prefetch(data + i + j * kLine + kAhead);
    for (int64_t j = 0; j < 4 * kLine; ++j) lane[j] ^= data[i + j];
  }
  uint32_t result = 0;
  for (uint32_t value : lane) result ^= value;
  return result;
}

// AdamW with BF16 gradient and weight on `count` elements that stay in the L1 cache, `repeats`
// times.
void adamw_arithmetic(float* param, float* exp_avg, float* exp_avg_sq, const uint16_t* grad,
                      uint16_t* model, int64_t count, int64_t repeats) {
  for (int64_t repeat = 0; repeat < repeats; ++repeat) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = uint32_t(grad[i]) << 16;
      float g;
      std::memcpy(&g, &bits, sizeof g);
      g *= 1e-3f;
      const float m = exp_avg[i] + 0.1f * (g - exp_avg[i]);
      const float v = 0.999f * exp_avg_sq[i] + 0.001f * g * g;
      const float p = 0.9999f * param[i] - 1e-3f * m / (std::sqrt(v) + 1e-8f);
      uint32_t rounded;
      std::memcpy(&rounded, &p, sizeof p);
      model[i] = uint16_t((rounded + 0x7fff + ((rounded >> 16) & 1)) >> 16);
      exp_avg[i] = m;
      exp_avg_sq[i] = v;
      param[i] = p;
    }
  }
}

}  // extern "C"
