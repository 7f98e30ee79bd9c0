// Operations that torch computes slowly in half precision on the CPU, in FP32 and rounded instead.
#pragma once

#include <torch/library.h>

namespace ampfuse {

// Whether the kernels of half_ops.cpp, half_conv.cpp and half_lstm.cpp stand in for torch's.
bool half_ops();

// Registers them with torch, for the process; or takes them back, and torch's dispatch tables are
// as before. `every`: even for half types for which this CPU has instructions (so that tests reach
// every kernel). One call at a time: Python's lock sees to it.
void set_half_ops(bool on, bool every = false);

// Adds the kernel of half_lstm.cpp.
void add_half_lstm(torch::Library& autocast);

}  // namespace ampfuse
