// Hyper-parameters of one tensor row, and the coefficients that its elements meet.
//
// Every row carries its own copy, so parameter groups cost no launch. `RowHyper` is what the user
// set, in double; `advance_row` turns it, once per step and row, into the floats that update.h
// uses. Host and device run the same function, and powers of beta come from repeated squaring:
// library `pow` differs in the last place between them, and a resumed run must get the same
// correction from its step count alone.
#pragma once

#include <cstdint>

#include "hd.h"
#include "scalar.h"
#include "step_state.h"

namespace ampfuse {

enum HyperFlag : int32_t {
  kMaximize = 1,   // ascend: the gradient changes sign first
  kNesterov = 2,   // SGD
  kDecoupled = 4,  // AdamW: weight decay acts on the parameter, not through the gradient
  kFirstStep =
      8,  // set by advance_row on a row's first applied step: SGD's buffer starts as the gradient
};

struct RowHyper {
  double lr = 0, weight_decay = 0;
  double momentum = 0, dampening = 0;    // SGD
  double beta1 = 0, beta2 = 0, eps = 0;  // Adam, AdamW
  const float* lr_tensor = nullptr;      // device value that replaces lr
  int32_t flags = 0;
};

struct RowCoef {
  float grad_scale = 0;  // clip / loss scale for a scaled row, clip otherwise; negative to maximize
  float accum_scale = 0;   // clip, likewise signed: accumulators hold unscaled values
  float weight_decay = 0;  // L2: g += weight_decay * p
  float decay = 1;         // decoupled: p *= decay = 1 - lr * weight_decay
  float lr = 0;
  float momentum = 0, one_minus_dampening = 0;
  float one_minus_beta1 = 0, beta2 = 0, one_minus_beta2 = 0;
  // Adam's p -= lr / bias1 * m / (sqrt(v) / sqrt(bias2) + eps), with fraction and eps multiplied by
  // sqrt(bias2): the same value with a division and a rounding less per element.
  float step_size = 0;  // lr * sqrt(bias2) / bias1, where bias = 1 - beta^t
  float eps = 0;        // eps * sqrt(bias2)
  int32_t flags = 0;
};

HD double power(double base, int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result *= base;
    base *= base;
  }
  return result;
}

// Advances the row's step count for the step that `state` decided on and returns its coefficients.
// A skipped step leaves the count alone; its coefficients are never used.
HD RowCoef advance_row(const RowHyper& hyper, const StepState& state, bool scaled, float* step) {
  RowCoef coef;
  if (state.skip != 0) return coef;
  const int64_t count = int64_t(*step) + 1;
  *step = float(count);
  const double lr = hyper.lr_tensor ? double(*hyper.lr_tensor) : hyper.lr;
  const double sign = hyper.flags & kMaximize ? -1.0 : 1.0;
  const double clip = double(state.clip_coef);
  coef.grad_scale = float(sign * (scaled ? clip / double(state.loss_scale) : clip));
  coef.accum_scale = float(sign * clip);
  coef.weight_decay = float(hyper.weight_decay);
  coef.decay = float(1 - lr * hyper.weight_decay);
  coef.lr = float(lr);
  coef.momentum = float(hyper.momentum);
  coef.one_minus_dampening = float(1 - hyper.dampening);
  coef.one_minus_beta1 = float(1 - hyper.beta1);
  coef.beta2 = float(hyper.beta2);
  coef.one_minus_beta2 = float(1 - hyper.beta2);
  const double sqrt_bias2 = square_root(1 - power(hyper.beta2, count));
  coef.step_size = float(lr * sqrt_bias2 / (1 - power(hyper.beta1, count)));
  coef.eps = float(hyper.eps * sqrt_bias2);
  coef.flags = hyper.flags | (count == 1 ? kFirstStep : 0);
  return coef;
}

}  // namespace ampfuse
