// What the ops have in common.
//
// An op is a function of the values x[list] of one element, written once for every backend: F is
// float on the device and in scalar code and a SIMD vector otherwise. It says
//   kName      what Python and error messages call it
//   kReads, kWrites  which lists are loaded and stored back. A list that a row lacks reads as zero
//              and is not stored.
//   kChecked   which of the lists it reads set the flag where they hold a non-finite value
//   kMeasured  whose norms a measuring pass takes, of the values that the op leaves in x, stored or
//              not. Such an op says with again() how to look at the same values a second time, or,
//              if it is metered, never does.
//   kGradientRows  whether rows without a gradient are left alone
//   kMetered   whether the elements are counted, see metered.h; such an op has marks()
//   kPlain     whether rows are never of a compact type: it is called over lists of tensors
//   for_row()  the op for one row of a table
// Branches depend on the row alone, never on an element. `fma` is spelled where it is meant and the
// compiler adds none, so every backend rounds alike.
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
  static constexpr bool kMetered = false, kPackable = false, kPlain = false;

  HD static Self for_row(const TableView&, int64_t, float, float) { return {}; }
};

// An op of an optimizer's step works by its row's coefficients. Beside RowOp's it says
//   kStates    the names of its states, in the order of kState0, kState1, ...
//   Before     an op whose pass comes first, the first stage of the step: it measures norms that
//              the second needs, or leaves something in kScratch
//   kScratch   a list that is no state: whoever calls hands memory in, and works on it between the
//              stages, as with matrix products. That may fail, so Before writes nothing else
//   kGradNorms whether the step needs the norm of each row's gradient
//   kUnsigned  which of its states are never negative: 8-bit codes of them need no sign
//   kPackable  whether its states may be such codes
//   kHypers    its hyper-parameters (hyper.h), in the order in which torch has them
//   kLastStateIf  of a parameter group: there is no last state where this is 0 or false
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
  static constexpr bool kPackable = false;
  static constexpr const char *kLastStateIf = nullptr, *kFilledWith = nullptr;
  static constexpr bool kUsesCount = true;
  // What a step reads and writes beside gradient and states; leave() does the second.
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

// How many states an op names, and hyper-parameters.
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

// Whether Op is an optimizer's step, whose codes may be rounded at random. An op that names no
// states converts them, to nearest.
template <class Op>
constexpr bool kSteps = kStateCount<Op> > 0;

// Calls run(code) if `list` of Op, which is of type `dtype`, holds codes. Whether they have a sign
// is known of an optimizer's states.
template <class Op, class Run>
HD void with_code_of(int list, DType dtype, const Run& run) {
  if constexpr (Op::kPackable) {
    if (!is_state(list) || !is_code(dtype)) return;
    with_code(dtype, [&](auto code) HD_LAMBDA {
      if constexpr (kSteps<Op>) {
        if (code.kSign == bool(Op::kUnsigned & bit(list))) return;
      }
      run(code);
    });
  }
}

// The gradient of this step: unscaled, clipped, with what earlier passes accumulated. Whoever looks
// at it after the step finds it unscaled and not clipped.
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
