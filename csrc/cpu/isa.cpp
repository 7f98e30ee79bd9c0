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

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
#endif
#if defined(__aarch64__)
bool has_neon() { return true; }
bool has_neon_bf16() { return getauxval(AT_HWCAP2) & 1ul << 14; }  // HWCAP2_BF16, new in headers
#else
bool has_neon() { return false; }
bool has_neon_bf16() { return false; }
#endif

struct Candidate {
  const char* name;
  int index;         // in Isas; past its end, if it is not compiled
  bool (*is_had)();  // by this CPU
  const char* needs;
};
// The widest first.
constexpr Candidate kCandidates[] = {
    {"avx512", Isas::index_of<Avx512>(), has_avx512, "AVX-512 F, BW, DQ and VL"},
    {"avx2", Isas::index_of<Avx2>(), has_avx2, "AVX2, FMA and F16C"},
    {"neon_bf16", Isas::index_of<NeonBf16>(), has_neon_bf16, "ARM's instructions for BF16"},
    {"neon", Isas::index_of<Neon>(), has_neon, "64-bit ARM"},
    {"scalar", Isas::index_of<Scalar>(), [] { return true; }, "nothing"},
};

const Candidate& choose_isa() {
  const char* variable = std::getenv("AMPFUSE_CPU_ISA");
  const std::string forced = variable ? variable : "";
  bool is_known = forced.empty();
  for (const Candidate& choice : kCandidates) {
    if (forced != choice.name) continue;
    is_known = true;
    AMPFUSE_CHECK(choice.is_had(), "AMPFUSE_CPU_ISA=", forced, " needs ", choice.needs,
                  ", which this CPU lacks");
  }
  AMPFUSE_CHECK(is_known, "AMPFUSE_CPU_ISA is '", forced,
                "'; set it to scalar, avx2, avx512, neon or neon_bf16, or unset it");
  for (const Candidate& choice : kCandidates) {
    const bool is_allowed = forced.empty() || forced == choice.name;
    if (is_allowed && choice.index < Isas::kCount && choice.is_had()) return choice;
  }
  throw std::runtime_error(
      "this ampfuse was compiled for one instruction set, which the CPU lacks or AMPFUSE_CPU_ISA "
      "does not name; compile it with AMPFUSE_CPU_ISAS=all");
}

const Candidate& chosen() {
  static const Candidate& choice = choose_isa();
  return choice;
}

}  // namespace

int isa() { return chosen().index; }

const char* cpu_isa() { return chosen().name; }

}  // namespace ampfuse
