// The operations of the NEON value against those of the plain C++ one, whose bits it must have.
#if defined(__aarch64__)

#include <cmath>
#include <random>
#include <vector>

#include "core/quantized.h"
#include "cpu/float_mode.h"
#include "cpu/simd_neon.h"
#include "cpu/simd_scalar.h"
#include "harness.h"

namespace ampfuse {
namespace {

constexpr int kWidth = Neon::kWidth;
constexpr DType kFloats = DType::kFloat32;

// Special values of the formats, values between two of theirs, and then random bits.
std::vector<float> values() {
  std::vector<float> found;
  for (const uint32_t bits :
       {0u,          1u,          0x007fffffu, 0x00800000u, 0x33000000u, 0x33000001u,
        0x387fffffu, 0x38800000u, 0x3effffffu, 0x3f7fffffu, 0x3f800000u, 0x3f801000u,
        0x3f803000u, 0x3f808000u, 0x3f818000u, 0x477fe000u, 0x477fefffu, 0x477ff000u,
        0x4b400001u, 0x7f7fffffu, 0x7f800000u, 0x7f800001u, 0x7fc00000u, 0x7fffffffu}) {
    found.push_back(bits_float(bits));
    found.push_back(bits_float(bits | 0x80000000u));
  }
  std::mt19937 random(7);
  for (int i = 0; i < 2000; ++i) found.push_back(bits_float(random()));
  return found;
}

// run(a, b, c) for vectors of them and for each element: floats, which may differ in the kind of a
// NaN, or a bit for each element.
template <class Run>
void compare(const char* what, const Run& run) {
  static const std::vector<float> all = values();
  const FloatMode mode;
  const int count = int(all.size());
  for (int first = 0; first < count; ++first) {
    float x[3][kWidth], y[kWidth];
    for (int i = 0; i < kWidth; ++i) {
      x[0][i] = all[size_t(first)];
      x[1][i] = all[size_t((first * 7 + i * 41) % count)];
      x[2][i] = all[size_t((first + i * 5) % 60)];
    }
    const auto load = [&](int k) { return load_vector<Neon>(x[k], kFloats, 0); };
    const auto found = run(load(0), load(1), load(2));
    if constexpr (std::is_same_v<decltype(found), const Neon>) store_vector(found, y, kFloats, 0);
    for (int i = 0; i < kWidth; ++i) {
      const auto wanted = run(Scalar(x[0][i]), Scalar(x[1][i]), Scalar(x[2][i]));
      bool same;
      if constexpr (std::is_same_v<decltype(found), const Neon>) {
        same = float_bits(y[i]) == float_bits(wanted.value) ||
               (std::isnan(y[i]) && std::isnan(wanted.value));
      } else {
        same = (found >> i & 1) == (wanted & 1);
      }
      EXPECT(same, what, " of ", x[0][i], " ", x[1][i], " ", x[2][i], ", lane ", i);
    }
  }
}

#define COMPARE(expression)                                                         \
  compare(#expression, [](auto a, [[maybe_unused]] auto b, [[maybe_unused]] auto c) \
                           HD_LAMBDA { return expression; })

TEST(neon_arithmetic) {
  COMPARE(a + b);
  COMPARE(a - b);
  COMPARE(a * b);
  COMPARE(a / b);
  COMPARE(fma(a, b, c));
  COMPARE(sqrt(a));
  COMPARE(max_nan(a, b));
  COMPARE(min_number(a, b));
  COMPARE(saturate(a));
  COMPARE(select_equal(a, b, c, a));
  COMPARE(select_equal(a, a, b, c));
  COMPARE(above_zero(a));
  COMPARE(below(a, 6.1e-5f));
  COMPARE(keep(0xffu, a));
  COMPARE(keep(0u, a));
}

TEST(neon_integers) {
  using ampfuse::bits_of;
  COMPARE(from_bits(a, bits_of(a) + bits_of(b)));
  COMPARE(from_bits(a, bits_of(a) - bits_of(b)));
  COMPARE(from_bits(a, bits_of(a) * bits_of(b)));
  COMPARE(from_bits(a, (bits_of(a) & bits_of(b)) | (bits_of(c) ^ bits_of(b))));
  COMPARE(from_bits(a, shift_left<23>(bits_of(a)) + shift_right<16>(bits_of(b))));
  COMPARE(from_bits(a, max_signed(bits_of(a), bits_of(b))));
  COMPARE(from_bits(a, blend(bits_of(c), bits_of(a), bits_of(b))));
  COMPARE(from_bits(a, select_less(bits_of(a), bits_of(b), bits_of(c), bits_of(a))));
  COMPARE(to_float(a, shift_right<9>(bits_of(b)) - bits_of(decltype(a)(1e-38f))));
}

TEST(neon_storage) {
  for (const DType type : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    compare("round_to", [&](auto a, auto, auto) HD_LAMBDA { return round_to(type, a); });
    compare("differ_as", [&](auto a, auto b, auto) HD_LAMBDA { return differ_as(type, a, b); });
  }
  for (uint32_t first = 0; first < 0x10000u; first += kWidth) {
    for (const DType type : {DType::kFloat16, DType::kBFloat16}) {
      uint16_t halves[kWidth];
      float floats[kWidth];
      for (uint32_t i = 0; i < kWidth; ++i) halves[i] = uint16_t(first + i);
      store_vector(load_vector<Neon>(halves, type, 0), floats, kFloats, 0);
      for (int i = 0; i < kWidth; ++i) {
        const float wanted = load_float(halves, type, i);
        EXPECT(float_bits(floats[i]) == float_bits(wanted) ||
                   (std::isnan(floats[i]) && std::isnan(wanted)),
               halves[i]);
      }
    }
  }
}

TEST(neon_parts) {
  // Fewer elements than a vector has, and integers that are stored as smaller ones.
  for (int count = 0; count <= kWidth; ++count) {
    int16_t halves[kWidth + 1], copies[kWidth + 1] = {};
    int8_t bytes[kWidth + 1], others[kWidth + 1] = {};
    for (int i = 0; i <= kWidth; ++i) {
      halves[i] = int16_t(-4000 * i + 7);
      bytes[i] = int8_t(-31 * i + 9);
    }
    using Halves = Neon::Part<int16_t>;
    using Bytes = Neon::Part<int8_t>;
    Halves::store_first(copies, Halves::load_first(halves, count), count);
    Bytes::store_first(others, Bytes::load_first(bytes, count), count);
    for (int i = 0; i <= kWidth; ++i) {
      EXPECT(copies[i] == (i < count ? halves[i] : 0), i);
      EXPECT(others[i] == (i < count ? bytes[i] : 0), i);
    }
  }
  uint8_t bytes[4 * kWidth], copies[4 * kWidth];
  for (int i = 0; i < 4 * kWidth; ++i) bytes[i] = uint8_t(250 - 8 * i);
  using Bytes = Neon::Part<uint8_t>;
  Neon::store_bytes(copies, {Bytes::load(bytes), Bytes::load(bytes + kWidth),
                             Bytes::load(bytes + 2 * kWidth), Bytes::load(bytes + 3 * kWidth)});
  EXPECT(std::memcmp(bytes, copies, sizeof bytes) == 0);
  float floats[kWidth];
  store_vector(to_float(Neon(0.0f), Bytes::load(bytes)), floats, kFloats, 0);
  for (int i = 0; i < kWidth; ++i) EXPECT(floats[i] == float(bytes[i]), i);
}

TEST(neon_lanes) {
  for (uint32_t bits = 0; bits < 256; ++bits) {
    float x[kWidth];
    store_vector(keep(bits, Neon(-1.0f)), x, kFloats, 0);
    for (int i = 0; i < kWidth; ++i) EXPECT(x[i] == (bits >> i & 1 ? -1.0f : 0.0f), bits);
    const Neon vector = load_vector<Neon>(x, kFloats, 0);
    EXPECT(differ_as(kFloats, vector, Neon(0.0f)) == bits, bits);
    EXPECT(below(vector, 0.5f) == (bits ^ 0xffu), bits);
    EXPECT(above_zero(Neon(0.0f) - vector) == bits, bits);
  }
}

TEST(neon_largest_magnitude) {
  Neon::Magnitude largest;
  for (int i = 0; i < kWidth; ++i) {
    float x[kWidth] = {};
    x[i] = float(-1 - i);
    largest.include(load_vector<Neon>(x, kFloats, 0));
    EXPECT(largest.reduce() == float_bits(float(1 + i)), i);
  }
}

// Flushing of subnormals to zero is a mode of a thread's, which kernels must not see.
TEST(neon_float_mode) {
  uint64_t before, within, after;
  asm volatile("mrs %0, fpcr" : "=r"(before));
  asm volatile("msr fpcr, %0" : : "r"(uint64_t(1) << 24 | uint64_t(1) << 25));  // FZ and DN
  {
    const FloatMode mode;
    asm volatile("mrs %0, fpcr" : "=r"(within));
  }
  asm volatile("mrs %0, fpcr" : "=r"(after));
  asm volatile("msr fpcr, %0" : : "r"(before));
  EXPECT(within == 0);
  EXPECT(after == (uint64_t(3) << 24));
}

}  // namespace
}  // namespace ampfuse

#endif
