// The passes of all fused layers: a layer is an include and a name here.
#pragma once

#include "core/nn_ops/activation.h"
#include "core/nn_ops/batch_norm.h"
#include "core/nn_ops/cross_entropy.h"
#include "core/nn_ops/norm.h"

namespace ampfuse {

using NnOps =
    decltype(OpList<>() + activation_ops() + batch_norm_ops() + cross_entropy_ops() + norm_ops());

template <class Op>
NnOp nn_op() {
  return {Choice<NnOps>::of<Op>().index()};
}

// run(Type) of the op.
template <class Run>
void visit(NnOp op, const Run& run) {
  visit(Choice<NnOps>(op.index), run);
}

}  // namespace ampfuse
