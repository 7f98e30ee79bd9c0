#include "isa.h"

#include <cstdlib>
#include <string>
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include "core/backend.h"
#include "core/check.h"

namespace ampfuse {
namespace {

struct Candidate {
  const char* name;
  Isa isa;
  const char* needs;
};
// The widest first.
constexpr Candidate kCandidates[] = {
    {"avx512", Isa::kAvx512, "AVX-512 F, BW, DQ and VL"},
    {"avx2", Isa::kAvx2, "AVX2, FMA and F16C"},
    {"neon_bf16", Isa::kNeonBf16, "ARM's instructions for BF16"},
    {"neon", Isa::kNeon, "64-bit ARM"},
    {"scalar", Isa::kScalar, "nothing"},
};

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
  constexpr unsigned long kHasBf16 = 1ul << 14;  // HWCAP2_BF16, which old headers lack
  if (isa == Isa::kNeonBf16) return getauxval(AT_HWCAP2) & kHasBf16;
  if (isa == Isa::kNeon) return true;
#endif
  return isa == Isa::kScalar;
}

Isa choose_isa() {
  const char* variable = std::getenv("AMPFUSE_CPU_ISA");
  const std::string forced = variable ? variable : "";
  bool is_known = forced.empty();
  for (const Candidate& choice : kCandidates) {
    if (forced != choice.name) continue;
    is_known = true;
    AMPFUSE_CHECK(has(choice.isa), "AMPFUSE_CPU_ISA=", forced, " needs ", choice.needs,
                  ", which this CPU lacks");
  }
  AMPFUSE_CHECK(is_known, "AMPFUSE_CPU_ISA is '", forced,
                "'; set it to scalar, avx2, avx512, neon or neon_bf16, or unset it");
  for (const auto& [name, isa, _] : kCandidates) {
    if ((forced.empty() || forced == name) && is_compiled(isa) && has(isa)) return isa;
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
  const Candidate* choice = kCandidates;
  while (choice->isa != isa()) ++choice;
  return choice->name;
}

}  // namespace ampfuse
