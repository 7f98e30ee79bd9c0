// The instruction sets that kernels are compiled for, and the one that runs.
#pragma once

namespace ampfuse {

struct Scalar;  // every machine has it, and every other must give its bits
struct Avx2;    // with F16C and FMA
struct Avx512;  // F, BW, DQ, VL

enum class Isa { kScalar, kAvx2, kAvx512 };

// Whether this build has its kernels. AMPFUSE_ONLY_ISA names the one of a build for one machine,
// which is quick to compile.
#if !defined(AMPFUSE_ONLY_ISA) && !defined(__x86_64__)
#define AMPFUSE_ONLY_ISA kScalar
#endif
#if defined(AMPFUSE_ONLY_ISA)
constexpr bool is_compiled(Isa isa) { return isa == Isa::AMPFUSE_ONLY_ISA; }
#else
constexpr bool is_compiled(Isa) { return true; }
#endif

// The widest compiled one that this CPU has, or what AMPFUSE_CPU_ISA forces.
Isa isa();

template <class T>
struct IsaTag {
  using type = T;
};

// Calls run(IsaTag) of the one that runs.
template <class Run>
void with_isa(const Run& run) {
  if constexpr (is_compiled(Isa::kAvx512)) {
    if (isa() == Isa::kAvx512) return run(IsaTag<Avx512>());
  }
  if constexpr (is_compiled(Isa::kAvx2)) {
    if (isa() == Isa::kAvx2) return run(IsaTag<Avx2>());
  }
  if constexpr (is_compiled(Isa::kScalar)) run(IsaTag<Scalar>());
}

}  // namespace ampfuse
