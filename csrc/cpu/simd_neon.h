// The NEON value: eight floats, in two registers. Files that are compiled for CPUs which round to
// BF16 by an instruction call it NeonBf16: two types of one name would be one to the linker.
#pragma once

#include <arm_neon.h>

#include "core/dtype.h"
#include "isa.h"  // before the name changes
#include "vector.h"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define Neon NeonBf16
#endif

namespace ampfuse {

struct Neon {
  static constexpr int kWidth = 8;
  float32x4_t low, high;

  // Eight integers.
  struct Bits {
    uint32x4_t low, high;

    HD Bits(uint32x4_t l, uint32x4_t h) : low(l), high(h) {}
    HD explicit Bits(uint32_t v) : low(vdupq_n_u32(v)), high(low) {}
  };
  HD static Bits count_up() { return Bits(uint32x4_t{0, 1, 2, 3}, uint32x4_t{4, 5, 6, 7}); }

  Neon() = default;
  HD Neon(float32x4_t l, float32x4_t h) : low(l), high(h) {}
  HD explicit Neon(float v) : low(vdupq_n_f32(v)), high(low) {}

  // The lower halves of eight integers.
  HD static uint16x8_t lower(Bits x) {
    return vuzp1q_u16(vreinterpretq_u16_u32(x.low), vreinterpretq_u16_u32(x.high));
  }
  // A bit for each of eight lanes, all of whose bits are equal.
  HD static uint32_t mask(uint16x8_t lanes) {
    return vaddvq_u16(vandq_u16(lanes, uint16x8_t{1, 2, 4, 8, 16, 32, 64, 128}));
  }

  struct Halves : FirstByBuffer<Halves> {
    static constexpr int64_t kSize = 2;
    HD static uint16x8_t load(const void* data) {
      return vreinterpretq_u16_u8(vld1q_u8(static_cast<const uint8_t*>(data)));
    }
    HD static void store(void* data, uint16x8_t halves) {
      vst1q_u8(static_cast<uint8_t*>(data), vreinterpretq_u8_u16(halves));
    }
    HD static void stream(void* data, uint16x8_t halves) { store(data, halves); }
    HD static uint32_t differ(uint16x8_t a, uint16x8_t b) {
      return mask(vmvnq_u16(vceqq_u16(a, b)));
    }
  };

  // Four vectors of integers from 0 to 255, as bytes.
  HD static void store_bytes(void* data, const Bits (&x)[4]) {
    for (int k = 0; k < 4; k += 2) {
      const uint8x16_t first = vreinterpretq_u8_u16(lower(x[k]));
      const uint8x16_t second = vreinterpretq_u8_u16(lower(x[k + 1]));
      vst1q_u8(static_cast<uint8_t*>(data) + k * kWidth, vuzp1q_u8(first, second));
    }
  }

  template <DType kType>
  struct Lanes;

  // Integers that are stored as smaller ones.
  template <class Stored>
  struct Part;

  struct Magnitude {
    Bits bits = Bits(0u);
    HD void include(const Neon& x);
    HD uint32_t reduce() const { return vmaxvq_u32(vmaxq_u32(bits.low, bits.high)); }
  };
};

HD Neon::Bits operator+(Neon::Bits a, Neon::Bits b) {
  return {vaddq_u32(a.low, b.low), vaddq_u32(a.high, b.high)};
}
HD Neon::Bits operator-(Neon::Bits a, Neon::Bits b) {
  return {vsubq_u32(a.low, b.low), vsubq_u32(a.high, b.high)};
}
HD Neon::Bits operator*(Neon::Bits a, Neon::Bits b) {
  return {vmulq_u32(a.low, b.low), vmulq_u32(a.high, b.high)};
}
HD Neon::Bits operator&(Neon::Bits a, Neon::Bits b) {
  return {vandq_u32(a.low, b.low), vandq_u32(a.high, b.high)};
}
HD Neon::Bits operator|(Neon::Bits a, Neon::Bits b) {
  return {vorrq_u32(a.low, b.low), vorrq_u32(a.high, b.high)};
}
HD Neon::Bits operator^(Neon::Bits a, Neon::Bits b) {
  return {veorq_u32(a.low, b.low), veorq_u32(a.high, b.high)};
}
template <int kCount>
HD Neon::Bits shift_left(Neon::Bits a) {
  return {vshlq_n_u32(a.low, kCount), vshlq_n_u32(a.high, kCount)};
}
template <int kCount>
HD Neon::Bits shift_right(Neon::Bits a) {
  return {vshrq_n_u32(a.low, kCount), vshrq_n_u32(a.high, kCount)};
}
HD Neon::Bits blend(Neon::Bits mask, Neon::Bits a, Neon::Bits b) {
  return {vbslq_u32(mask.low, a.low, b.low), vbslq_u32(mask.high, a.high, b.high)};
}
HD int32x4_t as_signed(uint32x4_t a) { return vreinterpretq_s32_u32(a); }
HD Neon::Bits select_less(Neon::Bits a, Neon::Bits b, Neon::Bits then, Neon::Bits otherwise) {
  const Neon::Bits less(vcltq_s32(as_signed(a.low), as_signed(b.low)),
                        vcltq_s32(as_signed(a.high), as_signed(b.high)));
  return blend(less, then, otherwise);
}
HD Neon::Bits max_signed(Neon::Bits a, Neon::Bits b) {
  return {vreinterpretq_u32_s32(vmaxq_s32(as_signed(a.low), as_signed(b.low))),
          vreinterpretq_u32_s32(vmaxq_s32(as_signed(a.high), as_signed(b.high)))};
}
HD Neon to_float(Neon, Neon::Bits a) {
  return {vcvtq_f32_s32(as_signed(a.low)), vcvtq_f32_s32(as_signed(a.high))};
}
HD Neon::Bits bits_of(Neon a) {
  return {vreinterpretq_u32_f32(a.low), vreinterpretq_u32_f32(a.high)};
}
HD Neon from_bits(Neon, Neon::Bits bits) {
  return {vreinterpretq_f32_u32(bits.low), vreinterpretq_f32_u32(bits.high)};
}

HD Neon operator+(Neon a, Neon b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
HD Neon operator-(Neon a, Neon b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
HD Neon operator*(Neon a, Neon b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
HD Neon operator/(Neon a, Neon b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
HD Neon fma(Neon a, Neon b, Neon c) {
  return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
HD Neon sqrt(Neon a) { return {vsqrtq_f32(a.low), vsqrtq_f32(a.high)}; }

// Masks of eight lanes.
HD Neon::Bits equal(Neon a, Neon b) { return {vceqq_f32(a.low, b.low), vceqq_f32(a.high, b.high)}; }
HD Neon::Bits greater(Neon a, Neon b) {
  return {vcgtq_f32(a.low, b.low), vcgtq_f32(a.high, b.high)};
}
HD Neon select(Neon::Bits mask, Neon a, Neon b) {
  return from_bits(a, blend(mask, bits_of(a), bits_of(b)));
}

// Comparisons, because the instructions for a minimum and a maximum order zeros by their sign and
// have their own rules for NaN.
HD Neon max_nan(Neon a, Neon b) { return select(equal(a, a), select(greater(a, b), a, b), a); }
HD Neon min_number(Neon a, Neon b) { return select(greater(b, a), a, b); }
HD Neon saturate(Neon a) {
  const Neon zero(0.0f), one(1.0f);
  return select(greater(a, zero), select(greater(one, a), a, one), zero);
}
HD Neon select_equal(Neon a, Neon b, Neon then, Neon otherwise) {
  return select(equal(a, b), then, otherwise);
}

HD uint32_t above_zero(Neon a) {
  const Neon::Bits others(vclezq_f32(a.low), vclezq_f32(a.high));
  return Neon::mask(vmvnq_u16(Neon::lower(others)));
}
HD uint32_t below(Neon a, float bound) {
  const Neon::Bits magnitude = bits_of(a) & Neon::Bits(0x7fffffffu), limit(float_bits(bound));
  return Neon::mask(
      Neon::lower({vcltq_u32(magnitude.low, limit.low), vcltq_u32(magnitude.high, limit.high)}));
}
HD Neon keep(uint32_t bits, Neon a) {
  const uint32x4_t all = vdupq_n_u32(bits);
  const Neon::Bits kept(vtstq_u32(all, uint32x4_t{1, 2, 4, 8}),
                        vtstq_u32(all, uint32x4_t{16, 32, 64, 128}));
  return from_bits(a, bits_of(a) & kept);
}

HD void Neon::Magnitude::include(const Neon& x) {
  const Bits magnitude = bits_of(x) & Bits(0x7fffffffu);
  bits = Bits(vmaxq_u32(bits.low, magnitude.low), vmaxq_u32(bits.high, magnitude.high));
}

template <>
struct Neon::Lanes<DType::kFloat32> : FirstByBuffer<Lanes<DType::kFloat32>> {
  static constexpr int64_t kSize = 4;
  HD static Neon load(const void* data) {
    const auto* bytes = static_cast<const uint8_t*>(data);
    return {vreinterpretq_f32_u8(vld1q_u8(bytes)), vreinterpretq_f32_u8(vld1q_u8(bytes + 16))};
  }
  HD static void store(void* data, Neon floats) {
    auto* bytes = static_cast<uint8_t*>(data);
    vst1q_u8(bytes, vreinterpretq_u8_f32(floats.low));
    vst1q_u8(bytes + 16, vreinterpretq_u8_f32(floats.high));
  }
  HD static void stream(void* data, Neon floats) { store(data, floats); }
  HD static Neon widen(Neon floats) { return floats; }
  HD static Neon narrow(Neon x) { return x; }
  HD static uint32_t differ(Neon a, Neon b) {
    const Bits x = bits_of(a), y = bits_of(b);
    return mask(vmvnq_u16(lower({vceqq_u32(x.low, y.low), vceqq_u32(x.high, y.high)})));
  }
};

template <>
struct Neon::Lanes<DType::kFloat16> : Halves {
  HD static Neon widen(uint16x8_t halves) {
    const float16x8_t floats = vreinterpretq_f16_u16(halves);
    return {vcvt_f32_f16(vget_low_f16(floats)), vcvt_high_f32_f16(floats)};
  }
  HD static uint16x8_t narrow(Neon x) {
    return vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.low), x.high));
  }
};

template <>
struct Neon::Lanes<DType::kBFloat16> : Halves {
  HD static Neon widen(uint16x8_t halves) {
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16)),
            vreinterpretq_f32_u32(vshll_high_n_u16(halves, 16))};
  }
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  HD static uint16x8_t narrow(Neon x) {
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(x.low), x.high));
  }
#else
  HD static uint16x8_t narrow(Neon x) {
    const Bits bits = bits_of(x), top = shift_right<16>(bits);
    const Bits rounded = bits + ((top & Bits(1u)) + Bits(0x7fffu));
    const Bits result = blend(equal(x, x), rounded, bits | Bits(0x400000u));
    return vuzp2q_u16(vreinterpretq_u16_u32(result.low), vreinterpretq_u16_u32(result.high));
  }
#endif
};

template <>
struct Neon::Part<int16_t> : FirstByBuffer<Part<int16_t>> {
  static constexpr int64_t kSize = 2;
  HD static Bits load(const void* data) {
    const int16x8_t halves = vreinterpretq_s16_u16(Halves::load(data));
    return {vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(halves))),
            vreinterpretq_u32_s32(vmovl_high_s16(halves))};
  }
  HD static void store(void* data, Bits bits) { Halves::store(data, lower(bits)); }
};

template <class Stored>
struct Neon::Part : FirstByBuffer<Part<Stored>> {
  static_assert(sizeof(Stored) == 1);
  static constexpr int64_t kSize = 1;
  HD static Bits load(const void* data) {
    const uint8x8_t bytes = vld1_u8(static_cast<const uint8_t*>(data));
    if constexpr (Stored(-1) < 0) {
      const int16x8_t halves = vmovl_s8(vreinterpret_s8_u8(bytes));
      return {vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(halves))),
              vreinterpretq_u32_s32(vmovl_high_s16(halves))};
    } else {
      const uint16x8_t halves = vmovl_u8(bytes);
      return {vmovl_u16(vget_low_u16(halves)), vmovl_high_u16(halves)};
    }
  }
  HD static void store(void* data, Bits bits) {
    vst1_u8(static_cast<uint8_t*>(data), vmovn_u16(lower(bits)));
  }
};

}  // namespace ampfuse
