// Muon (Jordan et al., https://kellerjordan.github.io/posts/muon), with the momentum of
// torch.optim.Muon.
//
// Two stages, with matrix products between them that are not part of this table (see kScratch in
// op.h). The first stage computes the momentum and leaves the matrix to orthogonalize. The products
// overwrite it with their result, times the factor that the shape requires of the rate. The second
// stage computes the momentum again, stores it, and steps. So nothing has changed if the products
// fail.
#pragma once

#include "core/metered.h"

namespace ampfuse {

template <class Self>
struct MuonMaths : OptimizerOp<Self> {
  static constexpr const char* kStates[] = {"momentum_buffer"};
  static constexpr bool kUsesCount = false;
  static constexpr HyperInfo kHypers[] = {hyper::lr(1e-3), hyper::weight_decay(0.1),
                                          hyper::number("momentum", &RowHyper::momentum, 0.95),
                                          hyper::flag("nesterov", kNesterov, "nesterov", true)};
  static constexpr List kMomentumBuffer = kState0;
  static constexpr int kScratch = kState1;
  static constexpr bool kQuantizable = true;
  using OptimizerOp<Self>::c;

  HD static void prepare(RowStep& step, RowCoef& c) {
    c.grad_weight = float(1 - step.hyper.momentum);
  }

  // The momentum after this step. `g` is the gradient, `w` its weight.
  template <class F>
  HD F advanced(F (&x)[kLists], const F& g, const F& w) const {
    return fma(w, g - x[kMomentumBuffer], x[kMomentumBuffer]);
  }
};

struct MuonMomentumOp : MuonMaths<MuonMomentumOp> {
  static constexpr const char* kName = "muon_momentum";
  static constexpr unsigned kReads = kGradient | bit(kMomentumBuffer);
  static constexpr unsigned kWrites = bit(kScratch);

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    const F g = step_gradient(x, c), w(c.grad_weight);
    const F buffer = advanced(x, g, w);
    x[kScratch] = c.flags & kNesterov ? fma(w, g - buffer, buffer) : buffer;
  }
};

struct MuonOp : MuonMaths<MuonOp> {
  using Before = MuonMomentumOp;
  static constexpr const char* kName = "muon";
  static constexpr unsigned kReads = kGradient | kStepped | bit(kMomentumBuffer) | bit(kScratch);
  static constexpr unsigned kWrites = kLeft | bit(kMomentumBuffer);

  template <class F>
  HD void operator()(F (&x)[kLists]) const {
    const F g = step_gradient(x, c);
    x[kMomentumBuffer] = advanced(x, g, F(c.grad_weight));
    x[kParam] = fma(F(-c.lr), x[kScratch], x[kParam] * F(c.decay));
    leave(x);
  }
};

using muon_ops = OpList<MuonMomentumOp, MuonOp, Metered<MuonOp>>;

}  // namespace ampfuse
