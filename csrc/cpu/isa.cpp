#include "isa.h"

#include <cstdlib>
#include <string>
#include <utility>

#include "core/backend.h"
#include "core/check.h"

namespace ampfuse {
namespace {

// Whether this CPU has it.
bool has(Isa isa) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (isa == Isa::kAvx2) return avx2;
  if (isa == Isa::kAvx512)
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#elif defined(__aarch64__)
  if (isa == Isa::kNeon) return true;
#endif
  return isa == Isa::kScalar;
}

Isa choose_isa() {
  const char* forced = std::getenv("AMPFUSE_CPU_ISA");
  const std::string isa = forced ? forced : "";
  AMPFUSE_CHECK(isa.empty() || isa == "scalar" || isa == "avx2" || isa == "avx512" || isa == "neon",
                "AMPFUSE_CPU_ISA is '", isa,
                "'; set it to scalar, avx2, avx512 or neon, or unset it");
  AMPFUSE_CHECK(isa != "avx2" || has(Isa::kAvx2),
                "AMPFUSE_CPU_ISA=avx2, but this CPU lacks AVX2, FMA or F16C");
  AMPFUSE_CHECK(isa != "avx512" || has(Isa::kAvx512),
                "AMPFUSE_CPU_ISA=avx512, but this CPU lacks AVX-512 F, BW, DQ or VL");
  AMPFUSE_CHECK(isa != "neon" || has(Isa::kNeon), "AMPFUSE_CPU_ISA=neon, but this CPU is no ARM");
  for (const auto& [name, each] :
       {std::pair("avx512", Isa::kAvx512), std::pair("avx2", Isa::kAvx2),
        std::pair("neon", Isa::kNeon), std::pair("scalar", Isa::kScalar)}) {
    if ((isa.empty() || isa == name) && is_compiled(each) && has(each)) return each;
  }
  throw std::runtime_error(
      "this ampfuse was compiled for one instruction set, which the CPU lacks or AMPFUSE_CPU_ISA "
      "does not name; compile it with AMPFUSE_CPU_ISAS=all");
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose_isa();
  return chosen;
}

const char* cpu_isa() {
  switch (isa()) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kNeon:
      return "neon";
    default:
      return "scalar";
  }
}

}  // namespace ampfuse
