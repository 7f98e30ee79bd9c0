// Operations that torch computes slowly in half precision on the CPU, computed in FP32 and rounded instead.
#pragma once

namespace ampfuse {

// The switch. It starts on, or as the environment variable AMPFUSE_HALF_CONV says when this library
// is loaded: 0 off, 1 on, "all" on even for half types for which this CPU has instructions (for tests).
bool half_conv_enabled();
void set_half_conv_enabled(bool enabled);

}  // namespace ampfuse
