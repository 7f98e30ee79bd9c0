// The work between an inspection and the update: the rows' columns advance, and their coefficients
// are computed.
#pragma once

#include "core/backend.h"
#include "core/ops.h"

namespace ampfuse {

HD RowCoef advance_row(const RowHyper& hyper, const StepState& state, bool scaled,
                       const RowColumns& columns, int64_t row) {
  RowCoef coef;
  RowStep step = begin_row_step(hyper, state, columns, row);
  visit(Algorithm(hyper.algorithm),
        [&](auto op) HD_LAMBDA { decltype(op)::type::prepare(step, coef); });
  finish_coef(coef, step, state, scaled);
  return coef;
}

// Advances every `stride`-th row from `begin` on, if it has a gradient. A skipped step leaves the
// columns alone, and its coefficients are never used.
HD void advance_rows(const TableView& view, const Preparation& preparation, int64_t begin,
                     int64_t stride) {
  const StepState& state = *preparation.state;
  if (state.skip != 0) return;
  const RowColumns& columns = preparation.columns;
  const bool differ = columns.differ_by_row();
  // The inputs and the result of the last row that was computed.
  int32_t last_entry = -1;
  uint8_t last_scaled = 0;
  float last_steps = 0, advanced = 0;
  RowCoef coef;
  for (int64_t row = begin; row < view.rows; row += stride) {
    const int32_t entry = view.hyper_of[row];
    const uint8_t scaled = view.scaled[row];
    const float steps = columns.steps[row];
    if (!view.has_gradient(row)) continue;
    // Rows mostly share everything, so the powers are known already.
    if (differ || entry != last_entry || scaled != last_scaled || steps != last_steps) {
      coef = advance_row(view.hyper[entry], state, scaled, columns, row);
      advanced = columns.steps[row];
    } else {
      columns.steps[row] = advanced;
    }
    coef.random_key = row_key(uint32_t(view.hyper[entry].seed), row, advanced);
    view.coefs[row] = coef;
    last_entry = entry;
    last_scaled = scaled;
    last_steps = steps;
  }
}

}  // namespace ampfuse
