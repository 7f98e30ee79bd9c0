// The instruction sets that kernels are compiled for, and the one that runs.
#pragma once

namespace ampfuse {

struct Scalar;  // every machine has it, and every other must give its bits
struct Avx2;    // with F16C and FMA
struct Avx512;  // F, BW, DQ, VL

enum class Isa { kScalar, kAvx2, kAvx512 };

// The widest that this CPU has, or what AMPFUSE_CPU_ISA forces.
Isa isa();

template <class T>
struct IsaTag {
  using type = T;
};

// Calls run(IsaTag) of the one that runs.
template <class Run>
void with_isa(const Run& run) {
#if defined(__x86_64__) && !defined(AMPFUSE_SCALAR_ONLY)
  if (isa() == Isa::kAvx512) return run(IsaTag<Avx512>());
  if (isa() == Isa::kAvx2) return run(IsaTag<Avx2>());
#endif
  run(IsaTag<Scalar>());
}

}  // namespace ampfuse
