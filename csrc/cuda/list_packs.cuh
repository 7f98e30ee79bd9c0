// The lists of a row as a thread sees them: packs are loaded as they are stored, widened to float,
// and narrowed again. Here split masters are joined and quantized states decoded.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "block_reduce.cuh"
#include "core/ops/op.h"
#include "kernels.cuh"
#include "pack.cuh"
#include "vector.cuh"

namespace ampfuse {

// The lists that may be of an encoded type. Few tables have such lists, and kernels without them,
// or without split masters, need fewer registers.
enum class Encoded { kNone, kStates, kAll };

// One list of a row, from some element on, as a thread sees it. An absent list has type kNone.
template <Encoded kMayBe>
struct ListColumn {
  static constexpr bool kEncoded = kMayBe != Encoded::kNone, kSplit = kMayBe == Encoded::kAll;
  char* data = nullptr;
  DType dtype = DType::kNone;

  ListColumn() = default;
  __device__ ListColumn(const TableView& view, int list, int64_t row, int64_t first) {
    data = static_cast<char*>(view.pointer(list, row));
    const DType type = view.type(list, row);  // without a branch: all loads are in flight together
    dtype = data != nullptr ? type : DType::kNone;
    data += first * element_size(dtype);
#if defined(__CUDA_ARCH__)
    // Hides from the compiler that this is a sum: it would keep both registers, and add them in
    // each access.
    asm("" : "+l"(data));
#endif
  }

  // The address of element i of a list that exists and, with `quantized`, may be quantized. (Using
  // element_size() would cost registers for kNone. So would an address for each size that
  // load_pack() distinguishes.)
  __device__ char* at(int i, bool quantized = false) const {
    const int narrow = quantized && is_quantized(dtype) ? i : i * 2;
    return global_at(data, fills_word(dtype) ? i * 4 : narrow);
  }

  // Whether packs are aligned for wide accesses. Computed for each pack: keeping it costs a
  // register.
  __device__ bool wide() const { return reinterpret_cast<uintptr_t>(data) % sizeof(uint4) == 0; }
};

// The lists of a row from element `first` on. The members after `columns` are for encoded types.
template <class ColumnType>
struct RowSlice {
  using Column = ColumnType;
  Column columns[kLists];
  float* scales[kMaxStates];
  int64_t first;
  uint32_t random_key;

  RowSlice() = default;
  template <unsigned kUsed>
  __device__ RowSlice(std::integral_constant<unsigned, kUsed>, const TableView& view, int64_t row,
                      int64_t start) {
    // A split master is read and written with the model weight.
    constexpr unsigned kWith = Column::kSplit && kUsed & bit(kParam) ? bit(kModel) : 0;
#pragma unroll
    for (int list = 0; list < kLists; ++list) {
      if ((kUsed | kWith) & bit(list)) columns[list] = Column(view, list, row, start);
    }
    if constexpr (Column::kEncoded) {
#pragma unroll
      for (int s = 0; s < kMaxStates; ++s) {
        if (kUsed & bit(kState0 + s)) scales[s] = view.scale(kState0 + s, row, start);
      }
      first = view.origin[row] + start;
      random_key = view.coefs[row].random_key;
    }
  }
  __device__ DType operator()(int list) const {
    const DType type = columns[list].dtype;
    // (The same promise for other lists costs steps with quantized states and split masters 5 % on
    // an H200.)
    if (list == kParam && !Column::kSplit && !is_plain(type)) __builtin_unreachable();
    return type;
  }
  // Of the scales of a quantized state, that of the block of element i.
  __device__ static float* scale_at(float* of_state, int i) {
    char* first = reinterpret_cast<char*>(of_state);
    const unsigned block = unsigned(i) / kScaleBlock;
    return reinterpret_cast<float*>(global_at(first, int(block * sizeof(float))));
  }
};

// Whether `list` may be encoded, and whether it may be quantized.
template <class Slice>
__device__ constexpr bool may_be_encoded(int list) {
  return list == kParam ? Slice::Column::kSplit : Slice::Column::kEncoded && is_state(list);
}
template <class Op, class Slice>
__device__ constexpr bool may_be_quantized(int list) {
  return may_be_encoded<Slice>(list) && Op::kQuantizable && is_state(list);
}

// See plain(). A list that cannot be encoded is not checked.
template <class Slice>
__device__ DType plain_of(int list, DType type) {
  if (may_be_encoded<Slice>(list)) return plain(type);
  if (!is_plain(type)) __builtin_unreachable();
  return type;
}

// What a thread loads before it goes on: a pack of each list, and the scales of quantized lists.
template <int kWidth>
struct ListPacks {
  Pack<kWidth> of[kLists];
  float scale[kMaxStates];
};

// Loads the packs of every list in kReads.
template <class Op, unsigned kReads, bool kWhole, int kWidth, class Slice>
__device__ inline void load_packs(const Slice& slice, int i, int count, ListPacks<kWidth>& packs) {
#pragma unroll
  for (int list = 0; list < kLists; ++list) {
    if (!(kReads & bit(list))) continue;
    const bool quantized = may_be_quantized<Op, Slice>(list);
    packs.of[list] = load_pack<kWhole, kWidth>(slice.columns[list], i, count, quantized);
    if (quantized && is_quantized(slice(list)) && count > 0)
      packs.scale[list - kState0] = *Slice::scale_at(slice.scales[list - kState0], i);
  }
  if constexpr (Slice::Column::kSplit && (kReads & bit(kParam)) && !(kReads & bit(kModel))) {
    if (is_remainder(slice(kParam)))
      packs.of[kModel] = load_pack<kWhole, kWidth>(slice.columns[kModel], i, count);
  }
}

// Whether all are finite, and their sum too.
template <int kWidth>
__device__ inline bool all_finite(const Vector<float, kWidth>& x) {
  float sum = x.lane[0];
#pragma unroll
  for (int k = 1; k < kWidth; ++k) sum += x.lane[k];
  return (float_bits(sum) & kInfinityBits) != kInfinityBits;
}

// The masters of a pack. A BF16 weight and its remainder are the upper and the lower half of the
// master's bits plus 0x8000, the remainder with its sign bit flipped. So joining them is a byte
// permutation and a subtraction. A NaN and a weight that was set to zero (of which this makes a
// NaN) are left to join().
template <int kWidth>
__device__ inline Vector<float, kWidth> join_packs(DType type, const Pack<kWidth>& weight,
                                                   const Pack<kWidth>& remainder) {
  Vector<float, kWidth> x;
  if (type == DType::kRemainderBFloat16) {
    x = x.of([&](int k) {
      const uint32_t low = remainder.word[k / 2] ^ 0x80008000u;
      return bits_float(__byte_perm(low, weight.word[k / 2], k % 2 ? 0x7632u : 0x5410u) - 0x8000u);
    });
    if (all_finite(x)) return x;
  }
  with_split(type, [&](auto split) {
    Vector<float, kWidth> high;
    widen(weight, split.kWeight, high.lane);
    x = split.join(high, Vector<uint32_t, kWidth>::of([&](int k) {
                     return uint32_t(int16_t(remainder.template get<2>(k)));
                   }));
  });
  return x;
}

// The inverse.
template <int kWidth>
__device__ inline void split_packs(DType type, const Vector<float, kWidth>& x, Pack<kWidth>& weight,
                                   Pack<kWidth>& remainder) {
  if (type == DType::kRemainderBFloat16 && all_finite(x)) {
#pragma unroll
    for (int k = 0; k < kWidth; k += 2) {
      const uint32_t first = float_bits(x.lane[k]) + 0x8000u;
      const uint32_t second = float_bits(x.lane[k + 1]) + 0x8000u;
      weight.word[k / 2] = __byte_perm(first, second, 0x7632u);
      remainder.word[k / 2] = __byte_perm(first, second, 0x5410u) ^ 0x80008000u;
    }
    return;
  }
  with_split(type, [&](auto split) {
    const Vector<float, kWidth> limited = split.limit(x), high = split.high(limited);
    const auto bits = split.remainder(limited, high);
    weight = narrow(high.lane, split.kWeight);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) remainder.template put<2>(k, bits.lane[k]);
  });
}

// Quantizer::root() of the bytes of a pack.
template <class Quantizer, int kWidth>
__device__ inline Vector<float, kWidth> roots_of(Quantizer quantizer, const Pack<kWidth>& pack) {
  static_assert(kWidth % 4 == 0);
  using F = Vector<float, kWidth>;
  if constexpr (quantizer.kSign) {
    return quantizer.root(F::of([&](int k) {
      return byte_above_2_23(pack.word[k / 4] ^ 0x80808080u, k % 4) - 0x800080p0f;
    }));
  } else {  // the difference is exact, so it need not be made before the product
    constexpr float kOne = Quantizer::kRootOfOne;
    return F::of([&](int k) {
      return fma(byte_above_2_23(pack.word[k / 4], k % 4), kOne, -0x800000p0f * kOne);
    });
  }
}

template <class Op, unsigned kReads, int kWidth, class Slice>
__device__ inline void widen_packs(const Slice& slice, int count, const ListPacks<kWidth>& packs,
                                   Vector<float, kWidth> (&x)[kLists]) {
#pragma unroll
  for (int list = 0; list < kLists; ++list) {
    if (!(kReads & bit(list))) continue;
    const DType type = slice(list), stored = plain_of<Slice>(list, type);
    const Pack<kWidth>& pack = packs.of[list];
    if (is_plain(stored)) {
      widen(pack, stored, x[list].lane);
    } else if (list == kParam) {
      x[list] = join_packs(type, packs.of[kModel], pack);
    } else if (may_be_quantized<Op, Slice>(list) && count > 0) {
      const Vector<float, kWidth> scale(packs.scale[list - kState0]);
      with_quantizer_of<Op>(list, type, [&](auto quantizer) {
        x[list] = quantizer.decode(roots_of(quantizer, pack), scale);
      });
    }
  }
}

// The bits of the largest magnitude among the first `count`; of a NaN, if there is one.
template <int kWidth>
__device__ inline uint32_t largest_of(const Vector<float, kWidth>& x, int count) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float largest = 0 < count ? fabsf(x.lane[0]) : 0.0f;
#pragma unroll
  for (int k = 1; k < kWidth; ++k) {
    if (k < count) {
      const float magnitude = fabsf(x.lane[k]);
      asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(magnitude));
    }
  }
  return float_bits(largest);
#else
  uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const uint32_t magnitude = k < count ? magnitude_of(x.lane[k]) : 0;
    if (magnitude > largest) largest = magnitude;
  }
  return largest;
#endif
}

// Calls run(list) for the quantized states that are written.
template <class Op, unsigned kWrites, class Slice, class Run>
__device__ inline void for_quantized(const Slice& slice, const Run& run) {
#pragma unroll
  for (int list = kState0; list < kState0 + kMaxStates; ++list) {
    if ((kWrites & bit(list)) && may_be_quantized<Op, Slice>(list) && is_quantized(slice(list)))
      run(list);
  }
}

// The largest magnitudes of the blocks of quantized states, whose values a warp holds. All states
// are reduced together, so that their shuffles overlap.
template <class Op, unsigned kWrites, int kWidth, class Slice>
__device__ inline void share_largest(const Slice& slice, int count,
                                     const Vector<float, kWidth> (&x)[kLists],
                                     uint32_t (&largest)[kMaxStates]) {
  const auto for_each = [&](const auto& run) {
    for_quantized<Op, kWrites>(slice, [&](int list) { run(list, largest[list - kState0]); });
  };
  for_each([&](int list, uint32_t& most) { most = largest_of(x[list], count); });
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  constexpr bool kByWarp = kScaleBlock / kWidth == kRowLanes;
  if (kByWarp) for_each([&](int, uint32_t& most) { most = __reduce_max_sync(kWholeWarp, most); });
#else
  constexpr bool kByWarp = false;
#endif
#pragma unroll
  for (int offset = kByWarp ? 0 : kScaleBlock / kWidth / 2; offset > 0; offset /= 2) {
    for_each([&](int, uint32_t& most) {
      const uint32_t other = __shfl_xor_sync(kWholeWarp, most, offset);
      if (other > most) most = other;
    });
  }
}

// The scale that a lane computes: that of one state, for the quantization block that it and its
// neighbours hold.
struct ScaleOfLane {
  bool exists = false;  // a constant where the types of the lists are
  bool has_sign = false;
  uint32_t largest = float_bits(1.0f);  // the block's, as the bits of a float
  float* scales = nullptr;              // of all blocks of the state
};

// The scale, and the factor that encodes the block's values. Far from over- and underflow the
// division by a constant is exact this way.
__device__ inline void make_scale(const ScaleOfLane& own, float& scale, float& encoder) {
  using Signed = Quantizer<true>;
  using Unsigned = Quantizer<false>;
  constexpr uint32_t kLeast = (127u - 100) << 23, kSpan = 200u << 23;  // 2^-100 to 2^100
  if (own.largest - kLeast < kSpan) {
    const float divisor = own.has_sign ? Signed::kLargest : Unsigned::kLargest;
    const float inverse = own.has_sign ? 1 / Signed::kLargest : 1 / Unsigned::kLargest;
    const float value = bits_float(own.largest), near = value * inverse;
    scale = fma(fma(-divisor, near, value), inverse, near);
    encoder = reciprocal_of_normal(scale);
  } else {
    const DType type = own.has_sign ? DType::kSigned8 : DType::kUnsigned8;
    with_quantizer(type, [&](auto quantizer) {
      scale = quantizer.scale(own.largest);
      encoder = quantizer.encoder(scale);
    });
  }
}

// The scale that lane `lane` of a quantization block computes: that of state `lane % kChoices`, if
// there is one.
template <class Op, unsigned kWrites, int kChoices, class Slice>
__device__ inline ScaleOfLane scale_of_lane(const Slice& slice, int lane,
                                            const uint32_t (&largest)[kMaxStates]) {
  ScaleOfLane own;
  for_quantized<Op, kWrites>(slice, [&](int list) {
    const int state = list - kState0;
    const bool has_sign =
        kSteps<Op> ? !(Op::kUnsigned & bit(list)) : slice(list) == DType::kSigned8;
    const uint32_t most = largest[state];
    float* const scales = slice.scales[state];
    // (Values, member by member: a choice between places would put these into memory.)
    const bool chosen = lane % kChoices == state;
    own.exists = own.exists || chosen;
    own.has_sign = chosen ? has_sign : own.has_sign;
    own.largest = chosen ? most : own.largest;
    own.scales = chosen ? scales : own.scales;
  });
  return own;
}

// Stores the scales of a pack's blocks, and hands out the factors that encode their values. Each
// lane computes those of one state, which takes many instructions, and gives them to the others.
// All lanes of a warp call, as of share_largest().
template <class Op, unsigned kWrites, int kWidth, class Slice>
__device__ inline void store_scales(const Slice& slice, int i, int count,
                                    const Vector<float, kWidth> (&x)[kLists],
                                    float (&encoder)[kMaxStates]) {
  constexpr unsigned kOf = kWrites & kStates;
  constexpr int kChoices = kOf & bit(kState0 + 2) ? 4 : kOf & bit(kState0 + 1) ? 2 : 1;
  constexpr int kSharers = kScaleBlock / kWidth;  // the lanes of a block
  const int lane = threadIdx.x % kSharers;
  uint32_t largest[kMaxStates] = {};
  share_largest<Op, kWrites>(slice, count, x, largest);
  const ScaleOfLane own = scale_of_lane<Op, kWrites, kChoices>(slice, lane, largest);
  float scale, own_encoder;
  make_scale(own, scale, own_encoder);
  const int from_first_lane = count + lane * kWidth;  // elements from the block's first lane on
  if (own.exists && lane < kChoices && from_first_lane > 0) *Slice::scale_at(own.scales, i) = scale;
  for_quantized<Op, kWrites>(slice, [&](int list) {
    const int state = list - kState0;
    const int chooser = threadIdx.x % kRowLanes - lane + state;
    encoder[state] = kChoices == 1 ? own_encoder : __shfl_sync(kWholeWarp, own_encoder, chooser);
  });
}

template <class Op, unsigned kWrites, bool kWhole, int kWidth, class Slice>
__device__ inline void store_packs(const Slice& slice, int i, int count,
                                   const Vector<float, kWidth> (&x)[kLists]) {
  float encoder[kMaxStates] = {};
  bool quantized = false;
  for_quantized<Op, kWrites>(slice, [&](int) { quantized = true; });
  if (quantized) store_scales<Op, kWrites>(slice, i, count, x, encoder);
  Pack<kWidth> weight, remainder;
  const bool split =
      Slice::Column::kSplit && (kWrites & bit(kParam)) && is_remainder(slice(kParam));
  if (split) split_packs(slice(kParam), x[kParam], weight, remainder);
#pragma unroll
  for (int list = 0; list < kLists; ++list) {
    if (!(kWrites & bit(list))) continue;
    const DType type = slice(list), stored = plain_of<Slice>(list, type);
    Pack<kWidth> pack;
    if (split && (list == kParam || list == kModel)) {
      pack = list == kParam ? remainder : weight;
    } else if (is_plain(stored)) {
      pack = narrow(x[list].lane, stored);
    } else if (may_be_quantized<Op, Slice>(list)) {
      with_quantizer_of<Op>(list, type, [&](auto quantizer) {
        const Vector<float, kWidth> factor(encoder[list - kState0]);
        const Vector<float, kWidth> offset(quantizer.offset(kSteps<Op>));
        pack = lower_bytes(quantizer.encode(x[list], factor, offset).lane);
      });
    }
    store_pack<kWhole>(slice.columns[list], i, count, pack, may_be_quantized<Op, Slice>(list));
  }
}

}  // namespace ampfuse
