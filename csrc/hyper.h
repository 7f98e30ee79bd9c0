// Hyper-parameters of one tensor row, and the coefficients that its elements meet.
//
// Every row has its own, so parameter groups cost no launch; rows of a group share the entry that
// holds them. `RowHyper` is what the user set, in double; `advance_row` turns it, once per step and
// row, into the floats that update.h uses. Host and device run the same function, and powers of
// beta come from repeated squaring: library `pow` differs in the last place between them, and a
// resumed run must get the same correction from its step count alone.
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
  // Set by advance_row on a row's first applied step: SGD's buffer starts as the gradient.
  kFirstStep = 8,
  kUncorrected = 16,     // moments are used without bias correction
  kUnaveraged = 32,      // LAMB, NovoGrad: the gradient enters exp_avg whole, not times 1 - beta1
  kLateDecay = 64,       // SGD: weight decay is added after the momentum
  kTrustAll = 128,       // LAMB: a trust ratio also for rows without weight decay (NVLAMB)
  kInfinityNorm = 256,   // NovoGrad: the norm of a gradient is its largest element
  kInitZero = 512,       // NovoGrad: the average of norms starts at zero, not at the first norm
  kLayerwise = 1024,     // LARC: the gradient is scaled by the ratio of the norms
  kClippedRatio = 2048,  // LARC: ... so that lr times ratio is at most lr
};

// Hyper-parameters that change from step to step, known in advance: device columns of `steps`
// values each, null where a value is constant.
struct Schedule {
  const double* lr = nullptr;
  const double* weight_decay = nullptr;
  const double* momentum = nullptr;
  const double* beta1 = nullptr;
  const double* beta2 = nullptr;
  int64_t steps = 0;
};

struct RowHyper {
  double lr = 0, weight_decay = 0;
  double momentum = 0, dampening = 0;           // SGD
  double beta1 = 0, beta2 = 0, eps = 0;         // Adam, AdamW, LAMB, NovoGrad; eps of Adagrad
  double lr_decay = 0;                          // Adagrad
  double trust_coefficient = 0, trust_eps = 0;  // LARC
  const float* lr_tensor = nullptr;             // device value that replaces lr
  Schedule schedule;                            // replaces both
  int32_t flags = 0;
};

// Aligned so that device code moves it in accesses of 16 bytes.
struct alignas(16) RowCoef {
  float grad_scale = 0;  // clip / loss scale for a scaled row, clip otherwise; negative to maximize
  float inverse_scale = 1;  // 1 / loss scale for a scaled row, 1 otherwise
  float accum_scale = 0;    // clip, likewise signed: accumulators hold unscaled values
  float weight_decay = 0;   // L2: g += weight_decay * p
  float decay = 1;          // decoupled: p *= decay = 1 - lr * weight_decay
  float lr = 0;
  float momentum = 0, one_minus_dampening = 0;
  float one_minus_beta1 = 0, beta2 = 0, one_minus_beta2 = 0;
  // Adam's p -= lr / bias1 * m / (sqrt(v) / sqrt(bias2) + eps), with fraction and eps multiplied by
  // sqrt(bias2): the same value with a division and a rounding less per element.
  float step_size = 0;  // lr * sqrt(bias2) / bias1, where bias = 1 - beta^t
  float eps = 0;        // eps * sqrt(bias2)
  int32_t flags = 0;
  // LAMB, NovoGrad.
  float beta1 = 0, grad_weight = 0;  // of exp_avg and of the gradient in the next one
  // sqrt(bias2) / bias1; NovoGrad: 1 / bias1, and over the norm where that acts on the moment
  float correction = 1;
};

// What rows keep from step to step and what a step knows of each: columns of floats, [rows].
struct RowColumns {
  float* steps = nullptr;               // applied steps
  float* norm_averages = nullptr;       // NovoGrad: the average of gradient norms, as a norm
  const float* grad_norms = nullptr;    // L2, of the unscaled gradient before clipping
  const float* grad_largest = nullptr;  // its largest magnitude
  const float* param_norms = nullptr;   // L2

  HD bool differ_by_row() const { return norm_averages != nullptr || param_norms != nullptr; }
};

// What the row's hyper-parameters are in step `step` of its schedule, from 0. After its end they
// stay what they were last.
HD RowHyper at_step(RowHyper hyper, int64_t step) {
  if (hyper.lr_tensor) hyper.lr = double(*hyper.lr_tensor);
  const Schedule& schedule = hyper.schedule;
  if (schedule.steps == 0) return hyper;
  const int64_t i = step < schedule.steps ? step : schedule.steps - 1;
  if (schedule.lr) hyper.lr = schedule.lr[i];
  if (schedule.weight_decay) hyper.weight_decay = schedule.weight_decay[i];
  if (schedule.momentum) hyper.momentum = schedule.momentum[i];
  if (schedule.beta1) hyper.beta1 = schedule.beta1[i];
  if (schedule.beta2) hyper.beta2 = schedule.beta2[i];
  return hyper;
}

HD double power(double base, int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result *= base;
    base *= base;
  }
  return result;
}

// NovoGrad (Ginsburg et al., arXiv:1905.11286) keeps one second moment per tensor: the average of
// its gradients' norms. It is stored as a norm, because a squared one overflows FP32. Returns what
// divides the gradient.
HD double average_norm(const RowHyper& hyper, double norm, int64_t count, float* average) {
  const bool starts = count == 1 && !(hyper.flags & kInitZero);
  const double old = starts ? norm : double(*average);
  const double sum = hyper.flags & kInfinityNorm
                         ? hyper.beta2 * old + (1 - hyper.beta2) * norm
                         : square_root(hyper.beta2 * old * old + (1 - hyper.beta2) * norm * norm);
  *average = float(sum);
  // An average that started at the first norm is not biased towards zero.
  const bool corrected = hyper.flags & kInitZero && !(hyper.flags & kUncorrected);
  return (corrected ? sum / square_root(1 - power(hyper.beta2, count)) : sum) + hyper.eps;
}

// LARC (You et al., arXiv:1708.03888): what multiplies gradient and weight decay.
HD double layerwise_ratio(const RowHyper& hyper, double lr, double param_norm, double grad_norm) {
  const double ratio = hyper.trust_coefficient * param_norm /
                       (grad_norm + hyper.weight_decay * param_norm + hyper.trust_eps);
  if (!(hyper.flags & kClippedRatio)) return ratio;
  return ratio < lr ? ratio / lr : 1.0;
}

// Advances the row's columns for the step that `state` decided on and returns its coefficients.
HD RowCoef advance_row(const RowHyper& row_hyper, const StepState& state, bool scaled,
                       const RowColumns& columns, int64_t row) {
  RowCoef coef;
  const RowHyper hyper = at_step(row_hyper, state.schedule_step - 1);
  const int64_t count = int64_t(columns.steps[row]) + 1;
  columns.steps[row] = float(count);
  const double lr = hyper.lr / (1 + double(count - 1) * hyper.lr_decay);
  const double clip = double(state.clip_coef);
  double multiplier = clip;  // of the unscaled gradient
  double weight_decay = hyper.weight_decay;
  coef.flags = hyper.flags | (count == 1 ? kFirstStep : 0);
  if (hyper.flags & kLayerwise && columns.param_norms) {
    // The decay is scaled with the gradient, so it acts through it, whatever the optimizer does.
    const double param_norm = double(columns.param_norms[row]);
    const double grad_norm = clip * double(columns.grad_norms[row]);
    if (param_norm > 0 && grad_norm > 0) {
      const double ratio = layerwise_ratio(hyper, lr, param_norm, grad_norm);
      multiplier *= ratio;
      weight_decay *= ratio;
    } else {
      weight_decay = 0;  // such as a bias at its start: its gradient as it is
    }
    coef.flags &= ~(kDecoupled | kLateDecay);
  }
  const bool corrected = !(hyper.flags & kUncorrected);
  const double bias1 = corrected ? 1 - power(hyper.beta1, count) : 1.0;
  const double sqrt_bias2 = corrected ? square_root(1 - power(hyper.beta2, count)) : 1.0;
  coef.correction = float(sqrt_bias2 / bias1);
  coef.step_size = float(lr * sqrt_bias2 / bias1);
  coef.eps = float(hyper.eps * sqrt_bias2);
  if (columns.norm_averages) {
    const float* norms = hyper.flags & kInfinityNorm ? columns.grad_largest : columns.grad_norms;
    const double divisor =
        average_norm(hyper, multiplier * double(norms[row]), count, &columns.norm_averages[row]);
    // With decoupled decay the moment holds whole gradients and is divided as it is used.
    const bool late = coef.flags & kDecoupled;
    coef.correction = float(1 / (late ? bias1 * divisor : bias1));
    if (!late) multiplier /= divisor;
  }
  const double signed_multiplier = hyper.flags & kMaximize ? -multiplier : multiplier;
  coef.grad_scale =
      float(scaled ? signed_multiplier / double(state.loss_scale) : signed_multiplier);
  if (scaled) coef.inverse_scale = float(1.0 / double(state.loss_scale));
  coef.accum_scale = float(signed_multiplier);
  coef.weight_decay = float(weight_decay);
  coef.decay = float(1 - lr * weight_decay);
  coef.lr = float(lr);
  coef.momentum = float(hyper.momentum);
  coef.one_minus_dampening = float(1 - hyper.dampening);
  coef.beta1 = float(hyper.beta1);
  coef.one_minus_beta1 = float(1 - hyper.beta1);
  coef.beta2 = float(hyper.beta2);
  coef.one_minus_beta2 = float(1 - hyper.beta2);
  coef.grad_weight = hyper.flags & kUnaveraged ? 1.0f : coef.one_minus_beta1;
  return coef;
}

}  // namespace ampfuse
