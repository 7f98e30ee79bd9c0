// Standard floating-point mode for a scope: round to nearest, subnormals kept. Threads inherit
// different modes (torch.set_flush_denormal changes only the caller's), and results must not depend
// on the thread that runs a chunk.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#include <cfenv>
#endif

namespace ampfuse {

class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatMode() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  // All of its bits: fesetenv() keeps some.
  FloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    set(0);
  }
  ~FloatMode() { set(saved_); }
#else
  FloatMode() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatMode() { std::fesetenv(&saved_); }
#endif
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__x86_64__)
  uint32_t saved_;
#elif defined(__aarch64__)
  static void set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }

  uint64_t saved_;
#else
  std::fenv_t saved_;
#endif
};

}  // namespace ampfuse
