// What all ops have in common.
//
// An op is a function of the values x[list] of one element, written once for every backend: F is
// float on the device and in scalar code and a SIMD vector otherwise. It has
//   kName      what Python and error messages call it
//   kReads, kWrites  which lists are loaded and stored back. A list that a row lacks reads as zero
//              and is not stored.
//   kChecked   which of the lists it reads set the flag where they hold a non-finite value
//   kMeasured  the lists whose norms a measuring pass takes, of the values that the op leaves in x,
//              stored or not. again() gives the op that looks at the same values a second time. A
//              metered op has none: it looks once.
//   kGradientRows  whether rows without a gradient are left alone
//   kMetered   whether the elements are counted, see metered.h; such an op has marks()
//   kPlain     whether rows never have an encoded type: the op is called over lists of tensors
//   for_row()  the op for one row of a table
// Branches depend on the row alone, never on an element. `fma` is written out where it is meant and
// the compiler adds none, so every backend rounds alike.
#pragma once

#include "core/algorithms.h"
#include "core/hd.h"
#include "core/hyper.h"
#include "core/scalar.h"
#include "core/table.h"

namespace ampfuse {

// The defaults. `a` and `b` are the two numbers that a call may pass.
template <class Self>
struct RowOp {
  static constexpr unsigned kReads = 0, kWrites = 0, kChecked = 0, kMeasured = 0, kUnsigned = 0;
  static constexpr bool kGradientRows = false;
  static constexpr bool kMetered = false, kQuantizable = false, kPlain = false;

  HD static Self for_row(const TableView&, int64_t, float, float) { return {}; }
};

// An op of an optimizer's step works with its row's coefficients. In addition to RowOp's members it
// has
//   kStates    the names of its states, in the order of kState0, kState1, ...
//   Before     an op whose pass comes first, the first stage of the step: it measures norms that
//              the second needs, or leaves something in kScratch
//   kScratch   a list that is not a state: the caller passes memory in, and works on it between the
//              stages, as with matrix products. That may fail, so Before writes nothing else
//   kGradNorms whether the step needs the norm of each row's gradient
//   kUnsigned  which of its states are never negative: quantized, they need no sign
//   kQuantizable  whether its states may be quantized
//   kHypers    its hyper-parameters (hyper.h), in the order in which torch has them
//   kLastStateIf  an option of a parameter group: there is no last state if it is 0 or false
//   kFilledWith   the constructor's argument that fresh states are filled with
//   kUsesCount    whether the update needs the number of the row's step, other than the first one
//   prepare()  how the coefficients that only some optimizers have come from a row's
//              hyper-parameters: momentum, betas, bias corrections
template <class Self>
struct OptimizerOp : RowOp<Self> {
  static constexpr bool kGradientRows = true;
  using Before = void;
  static constexpr int kScratch = -1;
  static constexpr bool kGradNorms = false;
  static constexpr unsigned kGradient = bit(kGrad) | bit(kAccumulated);
  static constexpr const char *kLastStateIf = nullptr, *kFilledWith = nullptr;
  static constexpr bool kUsesCount = true;
  // What a step reads and writes besides gradient and states; leave() sets what is written.
  static constexpr unsigned kStepped = bit(kParam) | bit(kAverage);
  static constexpr unsigned kLeft = kStepped | bit(kModel) | bit(kUnscaled);

  RowCoef c;

  HD static Self for_row(const TableView& view, int64_t row, float, float) {
    Self op;
    op.c = view.coefs[row];
    return op;
  }
  HD static void prepare(RowStep&, RowCoef&) {}

  // x[kParam] is the new value.
  template <class F>
  HD void leave(F (&x)[kLists]) const {
    x[kModel] = x[kParam];
    x[kAverage] = fma(F(c.average_weight), x[kParam] - x[kAverage], x[kAverage]);
  }
};

struct NoOp : OptimizerOp<NoOp> {
  static constexpr const char* kName = "none";
};

// How many states and hyper-parameters an op names.
template <class Op, class = void>
constexpr int kStateCount = 0;
template <class Op>
constexpr int kStateCount<Op, decltype(void(Op::kStates))> =
    int(sizeof(Op::kStates) / sizeof(Op::kStates[0]));
template <class Op, class = void>
constexpr int kHyperCount = 0;
template <class Op>
constexpr int kHyperCount<Op, decltype(void(Op::kHypers))> =
    int(sizeof(Op::kHypers) / sizeof(Op::kHypers[0]));

// Whether Op is an optimizer's step, whose quantized states may be rounded stochastically. An op
// that names no states converts them, to nearest.
template <class Op>
constexpr bool kSteps = kStateCount<Op> > 0;

// Calls run(quantizer) if `list` of Op, which is of type `dtype`, is quantized. For an optimizer's
// states the compiler knows whether they have a sign.
template <class Op, class Run>
HD void with_quantizer_of(int list, DType dtype, const Run& run) {
  if constexpr (Op::kQuantizable) {
    if (!is_state(list) || !is_quantized(dtype)) return;
    with_quantizer(dtype, [&](auto quantizer) HD_LAMBDA {
      if constexpr (kSteps<Op>) {
        if (quantizer.kSign == bool(Op::kUnsigned & bit(list))) return;
      }
      run(quantizer);
    });
  }
}

// The gradient of this step: unscaled, clipped, with what earlier passes accumulated. After the
// step the stored gradient is unscaled and not clipped.
template <class F>
HD F step_gradient(F (&x)[kLists], const RowCoef& c) {
  x[kUnscaled] = F(c.inverse_scale) * x[kGrad];
  return fma(x[kGrad], F(c.grad_scale), x[kAccumulated] * F(c.accum_scale));
}

// Weight decay where torch does not set the form: in the gradient, or (decoupled) in the update u
// of p -= lr * u. Then each step rounds p once; 1 - lr * weight_decay, rounded, would be off in the
// same direction at every step.
template <class F>
HD F decayed_gradient(const F& g, const F& p, const RowCoef& c) {
  return c.flags & kDecoupled || c.weight_decay == 0 ? g : fma(F(c.weight_decay), p, g);
}
template <class F>
HD F decayed_update(const F& u, const F& p, const RowCoef& c) {
  return c.flags & kDecoupled && c.weight_decay != 0 ? fma(F(c.weight_decay), p, u) : u;
}

}  // namespace ampfuse
