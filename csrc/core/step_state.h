// The state of one optimizer's step and of one loss scaler. Both live on the device; the host reads
// none of it unless a user asks. The functions here run in one thread, on the host or the device.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/exponent.h"
#include "core/hd.h"
#include "core/reduce.h"
#include "core/scalar.h"

namespace ampfuse {

// Why a step is skipped, in StepState::skip.
constexpr float kNonfinite = 1, kSpike = 2;

// What an optimizer's steps have been so far. All doubles: checkpoints hold it as one tensor.
struct StepHistory {
  double steps = 0;                       // decided, with the skipped ones
  double nonfinite = 0, spikes = 0;       // skipped, by reason
  double in_a_row = 0;                    // skipped since the last applied one
  double last_skipped = 0;                // the latest skipped step, counted from 1; 0: none
  double last_reason = 0;                 // ... its skip
  double last_spike = 0;                  // the latest spike's gradient norm
  double norms = 0;                       // applied steps in the two below
  double log_mean = 0, log_variance = 0;  // of the logarithms of gradient norms

  // How the mean and variance weigh the latest norm: alike until there are `kWarmup`, then each
  // weighs 0.99 of the one after it. No spike is found before.
  static constexpr double kWarmup = 100, kLeastWeight = 0.01;
  // Norms that hardly vary would make spikes of ordinary ones.
  static constexpr double kLeastDeviation = 0.1;

  HD bool is_spike(double log_norm, double deviations) const {
    const double deviation = square_root(log_variance);
    return norms >= kWarmup &&
           log_norm >
               log_mean + deviations * (deviation > kLeastDeviation ? deviation : kLeastDeviation);
  }
  // West's update (CACM 22, 1979) with an exponential weight.
  HD void add_norm(double log_norm) {
    norms += 1;
    const double weight = norms < kWarmup ? 1 / norms : kLeastWeight;
    const double difference = log_norm - log_mean;
    log_mean += weight * difference;
    log_variance = (1 - weight) * (log_variance + weight * difference * difference);
  }
};

struct StepState {
  // Gathered by inspect since the last step.
  double sum_squares = 0;    // of the unscaled gradients, from the last inspection
  float found_inf = 0;       // 1 if any gradient inspected since the last step held inf or NaN
  float pass_found_inf = 0;  // ... in the last backward pass: what the loss scale reacts to
  int32_t bad_row = -1;      // the first such row
  uint32_t bad_bits = 0;     // magnitude bits of its largest element
  // Decided for the current step; kept so that it can be read afterwards.
  float skip = 0;       // kNonfinite or kSpike: update returns at once and nothing changes
  float grad_norm = 0;  // L2 norm of the unscaled gradients before clipping; NaN if not known
  float clip_coef = 1;
  float loss_scale = 1;  // that the gradients carry
  // The latest step with a non-finite gradient, applied or not.
  int32_t last_bad_row = -1;
  uint32_t last_bad_bits = 0;
  StepHistory history;
};

// Whether the step is skipped. Null: none was decided, so none is.
HD bool is_skipped(const StepState* state) { return state != nullptr && state->skip != 0; }

// Adds one inspection. `sum_squares` is of all rows; `bad_row` is -1 when every gradient was
// finite. `same_pass`: it belongs to the pass of the inspection before it.
HD void record_inspection(StepState& state, double sum_squares, int32_t bad_row, uint32_t bad_bits,
                          bool same_pass) {
  // The non-finite value that set the flag earlier is still there, even if only newer gradients
  // were measured.
  const double infinity = bits_float(kInfinityBits);
  state.sum_squares = state.found_inf != 0 && sum_squares < infinity ? infinity : sum_squares;
  if (!same_pass) state.pass_found_inf = 0;
  if (bad_row < 0) return;
  state.pass_found_inf = 1;
  if (state.found_inf == 0 || state.bad_row < 0) {
    state.bad_row = bad_row;
    state.bad_bits = bad_bits;
  }
  state.found_inf = 1;
}

struct StepDecision {
  const float* loss_scale = nullptr;  // device value, 1 if absent
  const float* found_inf = nullptr;   // from another source, such as torch.amp.GradScaler
  double max_norm = 0;                // clip to this norm; 0: no clipping
  // Skip a step whose log norm lies more than so many deviations above the mean; 0: never.
  double skip_spikes = 0;
  bool norm_known = false;      // sum_squares belongs to the gradients of this step
  bool skip_nonfinite = false;  // false: non-finite gradients propagate, as in torch
};

// Decides the step: skip or not, gradient norm, clip coefficient (torch.nn.utils.clip_grad_norm_'s
// max_norm / (norm + 1e-6), at most 1). Clears found_inf and the first bad row.
HD void decide_step(StepState& state, const StepDecision& decision) {
  state.loss_scale = decision.loss_scale ? *decision.loss_scale : 1.0f;
  const bool bad = state.found_inf != 0 || (decision.found_inf && *decision.found_inf != 0);
  state.skip = bad && decision.skip_nonfinite ? kNonfinite : 0;
  StepHistory& history = state.history;
  state.clip_coef = 1;
  state.grad_norm = bits_float(kNanBits);
  if (decision.norm_known) {
    const double norm = square_root(state.sum_squares);
    if (!bad) state.grad_norm = norm_of(state.sum_squares);
    if (decision.max_norm > 0) {
      const double coef = decision.max_norm / (norm + 1e-6);
      state.clip_coef = coef >= 1 ? 1.0f : float(coef);  // a NaN norm gives a NaN coefficient
    }
    if (decision.skip_spikes > 0 && !bad && norm > 0) {
      const double log_norm = logarithm(norm);
      if (history.is_spike(log_norm, decision.skip_spikes)) {
        state.skip = kSpike;
      } else {
        history.add_norm(log_norm);
      }
    }
  }
  if (bad) {
    state.last_bad_row = state.bad_row;
    state.last_bad_bits = state.bad_bits;
  }
  history.steps += 1;
  history.in_a_row = state.skip != 0 ? history.in_a_row + 1 : 0;
  if (state.skip != 0) {
    history.last_skipped = history.steps;
    history.last_reason = double(state.skip);
  }
  if (state.skip == kNonfinite) history.nonfinite += 1;
  if (state.skip == kSpike) {
    history.spikes += 1;
    history.last_spike = double(state.grad_norm);
  }
  state.found_inf = 0;
  state.bad_row = -1;
  state.bad_bits = 0;
}

// The loss scale and its rule. Tensors of the scaler's own, so that its state is what torch's is.
struct LossScale {
  float* scale = nullptr;
  int32_t* growth_tracker = nullptr;      // clean passes since the last change
  int32_t* hysteresis_tracker = nullptr;  // overflows still tolerated
  double growth_factor = 2, backoff_factor = 0.5;
  int32_t growth_interval = 2000;
  double min_scale = 0, max_scale = 3.4028234663852886e38;
  int32_t hysteresis = 1;
};

// Growth after `growth_interval` clean passes, backoff at the `hysteresis`-th overflow (Megatron's
// and DeepSpeed's rule; 1 is torch's and apex's). The scale stays within [min_scale, max_scale].
HD void update_loss_scale(const LossScale& rule, bool overflow) {
  if (overflow) {
    *rule.growth_tracker = 0;
    if (--*rule.hysteresis_tracker > 0) return;
    const double scale = double(*rule.scale) * rule.backoff_factor;
    *rule.scale = float(scale > rule.min_scale ? scale : rule.min_scale);
    return;
  }
  if (++*rule.growth_tracker < rule.growth_interval) return;
  *rule.growth_tracker = 0;
  *rule.hysteresis_tracker = rule.hysteresis;
  const double scale = double(*rule.scale) * rule.growth_factor;
  *rule.scale = float(scale < rule.max_scale ? scale : rule.max_scale);
}

}  // namespace ampfuse
