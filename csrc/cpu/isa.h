// The instruction sets that kernels are compiled for, and the one that runs.
#pragma once

namespace ampfuse {

struct Scalar;    // every machine has it; of every number, the others give its bits
struct Avx2;      // with F16C and FMA
struct Avx512;    // F, BW, DQ, VL
struct Neon;      // every 64-bit ARM has it
struct NeonBf16;  // with instructions for BF16

enum class Isa { kScalar, kAvx2, kAvx512, kNeon, kNeonBf16 };

// Whether this build has its kernels. CMake defines these macros for the files that include this
// one and ask (AMPFUSE_CPU_ISAS).
constexpr bool is_compiled([[maybe_unused]] Isa isa) {
#if defined(AMPFUSE_HAS_AVX512)
  if (isa == Isa::kAvx512) return true;
#endif
#if defined(AMPFUSE_HAS_AVX2)
  if (isa == Isa::kAvx2) return true;
#endif
#if defined(AMPFUSE_HAS_NEON_BF16)
  if (isa == Isa::kNeonBf16) return true;
#endif
#if defined(AMPFUSE_HAS_NEON)
  if (isa == Isa::kNeon) return true;
#endif
#if defined(AMPFUSE_HAS_SCALAR)
  if (isa == Isa::kScalar) return true;
#endif
  return false;
}

// The widest compiled set that this CPU has, or the one that AMPFUSE_CPU_ISA forces.
Isa isa();

template <class T>
struct IsaTag {
  using type = T;
};

// Calls run(IsaTag) for the instruction set in use.
template <class Run>
void with_isa(const Run& run) {
  if constexpr (is_compiled(Isa::kAvx512)) {
    if (isa() == Isa::kAvx512) return run(IsaTag<Avx512>());
  }
  if constexpr (is_compiled(Isa::kAvx2)) {
    if (isa() == Isa::kAvx2) return run(IsaTag<Avx2>());
  }
  if constexpr (is_compiled(Isa::kNeonBf16)) {
    if (isa() == Isa::kNeonBf16) return run(IsaTag<NeonBf16>());
  }
  if constexpr (is_compiled(Isa::kNeon)) {
    if (isa() == Isa::kNeon) return run(IsaTag<Neon>());
  }
  if constexpr (is_compiled(Isa::kScalar)) run(IsaTag<Scalar>());
}

}  // namespace ampfuse
