// What the machine can do at best, for limits.py: a plain loop that the compiler vectorises, for
// one thread.
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

}  // extern "C"
