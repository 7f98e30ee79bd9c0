// Hyper-parameters of one tensor row, and the coefficients for its elements.
//
// Every row has its own, so parameter groups cost no launch; rows of a group share the entry that
// holds them. `RowHyper` is what the user set, in double; `RowStep` turns it, once per step and
// row, into the floats that an op uses (advance.h). Host and device run the same functions, and
// powers of beta come from repeated squaring: library `pow` differs in the last place between them,
// and a resumed run must get the same correction from its step count alone.
#pragma once

#include <cstdint>

#include "core/hd.h"
#include "core/scalar.h"
#include "core/step_state.h"

namespace ampfuse {

enum HyperFlag : int32_t {
  kMaximize = 1,   // ascend: the gradient changes sign first
  kNesterov = 2,   // SGD, Muon
  kDecoupled = 4,  // weight decay acts on the parameter (AdamW), not through the gradient
  // Set on a row's first applied step: SGD's buffer starts as the gradient.
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

// Numbers that a step reads on the device, such as those of a captured graph, which change between
// its replays. Null if the row's own number is used.
struct OnDevice {
  const double* lr = nullptr;
  const double* weight_decay = nullptr;
  const double* momentum = nullptr;
  const double* beta1 = nullptr;
  const double* beta2 = nullptr;
};

struct RowHyper {
  double lr = 0, weight_decay = 0;
  double momentum = 0, dampening = 0;    // SGD; momentum of Muon
  double beta1 = 0, beta2 = 0, eps = 0;  // Adam, LAMB, NovoGrad; betas of Lion; eps of Adagrad
  double lr_decay = 0;                   // Adagrad
  double trust_coefficient = 0, trust_eps = 0;  // LARC
  double ema_decay = 1;                         // for kAverage
  double seed = 0;                              // for stochastic rounding: an integer below 2^32
  const float* lr_tensor = nullptr;             // device value that replaces lr
  OnDevice on_device;                           // replaces the numbers above, and lr_tensor
  int32_t flags = 0;
  int32_t algorithm = 0;  // an Algorithm's index
};

// A hyper-parameter of an algorithm, as its op lists it. This is its only description.
struct HyperInfo {
  const char* name;           // in ParamTable.set_hyper
  const char* key;            // in a parameter group; null: not there, a constant
  int index;                  // in the group's value, if that is a pair; or -1
  double initial;             // if a group does not have it
  double RowHyper::* number;  // what it sets; null for a flag
  int32_t flag;
  double off;  // the flag is set if the group's value differs from this
};

namespace hyper {

constexpr HyperInfo number(const char* name, double RowHyper::* number, double initial) {
  return {name, name, -1, initial, number, 0, 0};
}
constexpr HyperInfo flag(const char* name, HyperFlag flag, const char* key, bool initial = false) {
  return {name, key, -1, double(initial), nullptr, flag, 0};
}
// Set if the group's value is false.
constexpr HyperInfo unless(const char* name, HyperFlag flag, const char* key, bool initial = true) {
  return {name, key, -1, double(initial), nullptr, flag, 1};
}

constexpr HyperInfo always(const char* name, HyperFlag flag) {
  return {name, nullptr, -1, 1, nullptr, flag, 0};
}

constexpr HyperInfo lr(double initial) { return number("lr", &RowHyper::lr, initial); }
constexpr HyperInfo beta1(double initial) {
  return {"beta1", "betas", 0, initial, &RowHyper::beta1, 0, 0};
}
constexpr HyperInfo beta2(double initial) {
  return {"beta2", "betas", 1, initial, &RowHyper::beta2, 0, 0};
}
constexpr HyperInfo eps(double initial) { return number("eps", &RowHyper::eps, initial); }
constexpr HyperInfo weight_decay(double initial = 0) {
  return number("weight_decay", &RowHyper::weight_decay, initial);
}
constexpr HyperInfo maximize() { return flag("maximize", kMaximize, "maximize"); }
constexpr HyperInfo decoupled(bool initial = false) {
  return flag("decoupled", kDecoupled, "decoupled_weight_decay", initial);
}
constexpr HyperInfo uncorrected() { return unless("uncorrected", kUncorrected, "bias_correction"); }
constexpr HyperInfo unaveraged() { return unless("unaveraged", kUnaveraged, "grad_averaging"); }

// Hyper-parameters of all algorithms, from options of the optimizer and not from its groups.
constexpr HyperInfo kOfAll[] = {
    number("seed", &RowHyper::seed, 0),
    number("ema_decay", &RowHyper::ema_decay, 1),
    number("trust_coefficient", &RowHyper::trust_coefficient, 0),
    number("trust_eps", &RowHyper::trust_eps, 0),
    flag("layerwise", kLayerwise, "layerwise"),
    flag("clipped_ratio", kClippedRatio, "clipped_ratio"),
};

}  // namespace hyper

// Aligned so that device code moves it in accesses of 16 bytes. The first nine are for all
// optimizers; an op's prepare() sets the others that it uses.
struct alignas(16) RowCoef {
  float grad_scale = 0;  // clip / loss scale for a scaled row, clip otherwise; negative to maximize
  float inverse_scale = 1;  // 1 / loss scale for a scaled row, 1 otherwise
  float accum_scale = 0;    // clip, likewise signed: accumulators hold unscaled values
  float weight_decay = 0;   // L2: g += weight_decay * p
  float decay = 1;          // decoupled: p *= decay = 1 - lr * weight_decay
  float lr = 0;
  int32_t flags = 0;
  float average_weight = 0;  // the parameter's weight in its moving average
  uint32_t random_key = 0;   // of the row in this step; the last of the nine for all optimizers
  float momentum = 0, one_minus_dampening = 0;
  float beta1 = 0, one_minus_beta1 = 0, beta2 = 0, one_minus_beta2 = 0;
  float step_size = 0, eps = 0;
  float grad_weight = 0;  // the gradient's weight in the next exp_avg
  float correction = 1;   // bias correction
};

// What rows keep from step to step and what a step has measured of each: columns of floats, [rows].
struct RowColumns {
  float* steps = nullptr;               // applied steps
  float* norm_averages = nullptr;       // NovoGrad: the average of gradient norms, as a norm
  const float* grad_norms = nullptr;    // L2, of the unscaled gradient before clipping
  const float* grad_largest = nullptr;  // its largest magnitude
  const float* param_norms = nullptr;   // L2

  HD bool differ_by_row() const { return norm_averages != nullptr || param_norms != nullptr; }
};

HD RowHyper with_numbers_on_device(RowHyper hyper) {
  if (hyper.lr_tensor) hyper.lr = double(*hyper.lr_tensor);
  const OnDevice& on_device = hyper.on_device;
  if (on_device.lr) hyper.lr = *on_device.lr;
  if (on_device.weight_decay) hyper.weight_decay = *on_device.weight_decay;
  if (on_device.momentum) hyper.momentum = *on_device.momentum;
  if (on_device.beta1) hyper.beta1 = *on_device.beta1;
  if (on_device.beta2) hyper.beta2 = *on_device.beta2;
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

// LARC (You et al., arXiv:1708.03888): the factor of gradient and weight decay.
HD double layerwise_ratio(const RowHyper& hyper, double lr, double param_norm, double grad_norm) {
  const double ratio = hyper.trust_coefficient * param_norm /
                       (grad_norm + hyper.weight_decay * param_norm + hyper.trust_eps);
  if (!(hyper.flags & kClippedRatio)) return ratio;
  return ratio < lr ? ratio / lr : 1.0;
}

// One row's step in double, from which its coefficients come. An op's prepare() may change it.
struct RowStep {
  RowHyper hyper;  // the values of this step
  int64_t count;   // the row's applied steps, this one included
  double lr;       // after Adagrad's decay
  double weight_decay;
  double multiplier;  // for the unscaled gradient
  int32_t flags;
  const RowColumns* columns;
  int64_t row;

  HD double bias1() const { return is_corrected() ? 1 - power(hyper.beta1, count) : 1.0; }
  HD double sqrt_bias2() const {
    return is_corrected() ? square_root(1 - power(hyper.beta2, count)) : 1.0;
  }
  HD bool is_corrected() const { return !(hyper.flags & kUncorrected); }

  // The norm that NovoGrad's norm_type chooses.
  HD double grad_norm() const {
    return double((hyper.flags & kInfinityNorm ? columns->grad_largest : columns->grad_norms)[row]);
  }
  HD float* norm_average() const { return columns->norm_averages + row; }

  // LARC: the gradient is multiplied by the ratio of the norms.
  HD void scale_layerwise() {
    // The decay is scaled with the gradient, so it acts through it, whatever the optimizer does.
    const double param_norm = double(columns->param_norms[row]);
    const double grad_norm = multiplier * double(columns->grad_norms[row]);
    if (param_norm > 0 && grad_norm > 0) {
      const double ratio = layerwise_ratio(hyper, lr, param_norm, grad_norm);
      multiplier *= ratio;
      weight_decay *= ratio;
    } else {
      weight_decay = 0;  // such as a bias at its start: its gradient is not scaled
    }
    flags &= ~(kDecoupled | kLateDecay);
  }
};

// The step that `state` decided on. The row's count advances.
HD RowStep begin_row_step(const RowHyper& hyper, const StepState& state, const RowColumns& columns,
                          int64_t row) {
  RowStep step;
  step.hyper = with_numbers_on_device(hyper);
  step.count = int64_t(columns.steps[row]) + 1;
  columns.steps[row] = float(step.count);
  step.lr = step.hyper.lr / (1 + double(step.count - 1) * step.hyper.lr_decay);
  step.weight_decay = step.hyper.weight_decay;
  step.multiplier = double(state.clip_coef);
  step.flags = step.hyper.flags | (step.count == 1 ? kFirstStep : 0);
  step.columns = &columns;
  step.row = row;
  if (step.hyper.flags & kLayerwise && columns.param_norms) step.scale_layerwise();
  return step;
}

// The coefficients of all optimizers.
HD void finish_coef(RowCoef& coef, const RowStep& step, const StepState& state, bool scaled) {
  const double multiplier = step.hyper.flags & kMaximize ? -step.multiplier : step.multiplier;
  coef.grad_scale = float(scaled ? multiplier / double(state.loss_scale) : multiplier);
  if (scaled) coef.inverse_scale = float(1.0 / double(state.loss_scale));
  coef.accum_scale = float(multiplier);
  coef.weight_decay = float(step.weight_decay);
  coef.decay = float(1 - step.lr * step.weight_decay);
  coef.lr = float(step.lr);
  coef.flags = step.flags;
  coef.average_weight = float(1 - step.hyper.ema_decay);
}

}  // namespace ampfuse
