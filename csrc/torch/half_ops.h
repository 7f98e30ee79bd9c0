// Operations that torch computes slowly in half precision on the CPU, in FP32 and rounded instead.
#pragma once

namespace ampfuse {

// The switch, of half_conv.h too. It starts as the environment variable AMPFUSE_HALF_CONV says when
// this library is loaded: 0 off; 1 on (the default); "all" on, and even for half types for which
// this CPU has instructions (so that tests reach every kernel).
bool half_conv_enabled();
void set_half_conv_enabled(bool enabled);

}  // namespace ampfuse
