// Standard floating-point mode for a scope: round to nearest, subnormals kept. Threads inherit
// different modes (torch.set_flush_denormal touches only the caller's), and results must not depend
// on who runs a chunk.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace ampfuse {

class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatMode() { _mm_setcsr(uint32_t(saved_)); }
#elif defined(__aarch64__)
  FloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t(0)));
  }
  ~FloatMode() { asm volatile("msr fpcr, %0" : : "r"(uint64_t(saved_))); }
#else
  FloatMode() {}
#endif
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  [[maybe_unused]] uint64_t saved_ = 0;
};

}  // namespace ampfuse
