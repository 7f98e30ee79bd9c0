// The kernels of the CPU backend: one for each op and instruction set, in a translation unit of its
// own. kernels.cpp defines what is declared here, for the ops that AMPFUSE_OPS lists, and is
// compiled once for each header of core/ops and instruction set.
#pragma once

#include "core/backend.h"
#include "isa.h"

namespace ampfuse {

// One pass over a table.
struct Pass {
  float a = 1, b = 1;         // arguments of the op, see Op::for_row
  bool* found_inf = nullptr;  // set where a checked list holds a non-finite value
  Meter meter;                // for an op that is metered
};

// Runs the op on chunks [begin, end). An op that measures leaves partials in the view.
template <class Isa, class Op>
struct Kernel {
  static void run(const TableView& view, const Pass& pass, int64_t begin, int64_t end);
};

}  // namespace ampfuse
