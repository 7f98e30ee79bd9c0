// Operations that torch computes slowly in half precision on the CPU, in FP32 and rounded instead.
#pragma once

#include <torch/library.h>

namespace ampfuse {

// Whether the kernels of half_ops.cpp, half_conv.cpp and half_attention.cpp stand in for torch's.
bool half_ops();

// Registers them with torch, for the process; or takes them back, and torch's dispatch tables are
// as before. `every`: even for half types for which this CPU has instructions (so that tests reach
// every kernel). One call at a time: Python's lock sees to it.
void set_half_ops(bool on, bool every = false);

// Whether this CPU has instructions for BF16.
bool fast_bf16();

// Whether autocast has the rules of half_rules.cpp on the CPU; registers them, or takes them
// back.
bool autocast_rules();
void set_autocast_rules(bool on);

// Silences torch's note that a kernel is being replaced, and leaves its once-per-process state
// alone, so that other libraries still get theirs.
class Unwarned : c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}

 private:
  c10::WarningUtils::WarnAlways not_just_once_;
  c10::WarningUtils::WarningHandlerGuard handler_{this};
};

}  // namespace ampfuse
