// The instruction sets that kernels are compiled for, and the one that runs.
#pragma once

#include "core/algorithms.h"

namespace ampfuse {

struct Scalar;    // every machine has it; of every number, the others give its bits
struct Avx2;      // with F16C and FMA
struct Avx512;    // F, BW, DQ, VL
struct Neon;      // every 64-bit ARM has it
struct NeonBf16;  // with instructions for BF16

// Those that this build has kernels for; CMake names them (AMPFUSE_CPU_ISAS).
using Isas = OpList<AMPFUSE_ISAS>;

// The index of the widest of them that this CPU has, or of the one that AMPFUSE_CPU_ISA forces.
int isa();

// Calls run(Type) for the instruction set in use.
template <class Run>
void with_isa(const Run& run) {
  visit(Isas(), isa(), run);
}

}  // namespace ampfuse
