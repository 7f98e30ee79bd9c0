// The CPU's kernels: an op over chunks, whether it measures or not.
//
// Included by one translation unit for each instruction set and header of ops.
#pragma once

#include "apply.h"
#include "measure.h"

namespace ampfuse {

template <class Isa, class Op>
void Kernel<Isa, Op>::run(const TableView& view, const Pass& pass, int64_t begin, int64_t end) {
  if constexpr (Op::kMeasured != 0) {
    for (int64_t i = begin; i < end; ++i) {
      if (!view.is_in_pass(view.chunks[i].row)) continue;
      for (int m = 0; m < count_lists(Op::kMeasured); ++m)
        view.partials[m * view.chunk_count + i] = {0.0, 0};
    }
  }
  for_walks<Op::kGradientRows>(view, begin, end, [&](int64_t c, const Walk& walk) {
    const int32_t row = view.chunks[c].row;
    const Op op = Op::for_row(view, row, pass.a, pass.b);
    if constexpr (Op::kMeasured != 0) {
      uint32_t* counts = Op::kMetered ? pass.meter.counts_of(row) : nullptr;
      uint8_t* changed = pass.meter.changed_of(c);
      measure_chunk<Isa>(op, walk, view.partials + c, view.chunk_count, counts, changed);
    } else if (apply_op<Isa>(op, walk)) {
      *pass.found_inf = true;
    }
  });
}

}  // namespace ampfuse
