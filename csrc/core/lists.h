// The lists of a table. A row is one tensor with everything that belongs to it: its gradient, its
// parameter, its moments. A list is one such role over all rows.
#pragma once

#include "core/hd.h"

namespace ampfuse {

// The roles. A list that a row lacks is null: it reads as zero and is not written.
enum List : int {
  kGrad,         // as autograd left it, perhaps scaled
  kAccumulated,  // FP32 (or the parameter's type), unscaled, from earlier backward passes
  kGradOut,      // where inspect writes unscaled gradients, if it writes them
  kUnscaled,     // where the update writes them: over the scaled ones
  kParam,        // what the optimizer steps: the FP32 master, or the parameter itself
  kModel,        // the half-precision model weight of a master
  kState0,       // the optimizer's states, in the order in which its op names them
  kState1,
  kState2,
  kAverage,  // the exponential moving average of kParam
  kLists,
  // Columns after the lists: the scales of each quantized state, one per block of the row.
  kScale0 = kLists,
  kColumns = kScale0 + 3
};

// Plain multi-tensor ops use the first three roles under these names.
constexpr List kSource = kGrad, kSource2 = kAccumulated, kTarget = kGradOut;
// LAMB's update, within a pass: inspect writes no gradient then.
constexpr List kUpdate = kGradOut;

constexpr int kMaxStates = kColumns - kScale0;

HD constexpr bool is_state(int list) { return list >= kState0 && list < kState0 + kMaxStates; }

HD constexpr unsigned bit(int list) { return 1u << list; }

constexpr unsigned kStates = bit(kState0) | bit(kState1) | bit(kState2);

// The most lists that a pass measures: LAMB's weights and updates.
constexpr int kMeasures = 2;

HD constexpr int count_lists(unsigned lists) {
  int count = 0;
  for (; lists != 0; lists &= lists - 1) ++count;
  return count;
}

// The first of the lists.
HD constexpr int first_list(unsigned lists) { return count_lists((lists & -lists) - 1); }

}  // namespace ampfuse
