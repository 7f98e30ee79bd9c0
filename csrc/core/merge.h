// Merges what several processes found in their shards of the same parameters.
#pragma once

#include <cstdint>

#include "core/reduce.h"
#include "core/step_state.h"

namespace ampfuse {

struct RankResults {
  // Each rank's step state and then its norms, in the order of ranks and `stride` bytes apart.
  const char* everyone = nullptr;
  int64_t ranks = 0, stride = 0;
  StepState* state = nullptr;  // receives what inspections gathered; null: only norms
  // [values]: L2 norms; those in [first_largest, end_largest) are largest magnitudes.
  float* norms = nullptr;
  int64_t values = 0, first_largest = 0, end_largest = 0;

  HD const StepState& state_of(int64_t rank) const {
    return *reinterpret_cast<const StepState*>(everyone + rank * stride);
  }
  HD float norm(int64_t rank, int64_t i) const {
    return reinterpret_cast<const float*>(&state_of(rank) + 1)[i];
  }
};

HD void merge_states(const RankResults& found) {
  StepState merged = *found.state;
  merged.sum_squares = merged.found_inf = merged.pass_found_inf = 0;
  merged.bad_row = -1;
  merged.bad_bits = 0;
  for (int64_t rank = 0; rank < found.ranks; ++rank) {
    const StepState& other = found.state_of(rank);
    merged.sum_squares += other.sum_squares;
    if (other.found_inf != 0) merged.found_inf = 1;
    if (other.pass_found_inf != 0) merged.pass_found_inf = 1;
    if (other.bad_row < 0) continue;
    const bool is_earlier = merged.bad_row < 0 || other.bad_row < merged.bad_row;
    const bool is_larger = other.bad_row == merged.bad_row && other.bad_bits > merged.bad_bits;
    if (!is_earlier && !is_larger) continue;
    merged.bad_row = other.bad_row;
    merged.bad_bits = other.bad_bits;
  }
  *found.state = merged;
}

HD void merge_norm(const RankResults& found, int64_t i) {
  double squares = 0;
  float largest = 0;
  for (int64_t rank = 0; rank < found.ranks; ++rank) {
    const float norm = found.norm(rank, i);
    squares += double(norm) * double(norm);
    if (float_bits(norm) > float_bits(largest)) largest = norm;  // by bits NaN is the largest
  }
  const bool is_largest = i >= found.first_largest && i < found.end_largest;
  found.norms[i] = is_largest ? largest : norm_of(squares);
}

}  // namespace ampfuse
