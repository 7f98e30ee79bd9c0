#include "isa.h"

#include <cstdlib>
#include <string>

#include "core/backend.h"
#include "core/check.h"

namespace ampfuse {
namespace {

bool runs_avx2() {
#if defined(__x86_64__) && !defined(AMPFUSE_SCALAR_ONLY)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool runs_avx512() {
#if defined(__x86_64__) && !defined(AMPFUSE_SCALAR_ONLY)
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

Isa choose_isa() {
  const char* forced = std::getenv("AMPFUSE_CPU_ISA");
  const std::string isa = forced ? forced : "";
  AMPFUSE_CHECK(isa.empty() || isa == "scalar" || isa == "avx2" || isa == "avx512",
                "AMPFUSE_CPU_ISA is '", isa, "'; set it to scalar, avx2 or avx512, or unset it");
  if (isa == "scalar") return Isa::kScalar;
  AMPFUSE_CHECK(isa != "avx2" || runs_avx2(),
                "AMPFUSE_CPU_ISA=avx2, but this CPU lacks AVX2, FMA or F16C");
  AMPFUSE_CHECK(isa != "avx512" || runs_avx512(),
                "AMPFUSE_CPU_ISA=avx512, but this CPU lacks AVX-512 F, BW, DQ or VL");
  if (runs_avx512() && isa != "avx2") return Isa::kAvx512;
  return runs_avx2() ? Isa::kAvx2 : Isa::kScalar;
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose_isa();
  return chosen;
}

const char* cpu_isa() {
  return isa() == Isa::kAvx512 ? "avx512" : isa() == Isa::kAvx2 ? "avx2" : "scalar";
}

}  // namespace ampfuse
