// What the machine can do at best, for limits.py: plain loops that the compiler vectorises, one
// thread each.
#include <cstdint>

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

}  // extern "C"
