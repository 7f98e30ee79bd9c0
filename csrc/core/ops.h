// All ops of optimizers and lists. An optimizer is an include and a name here.
#pragma once

#include "core/algorithms.h"
#include "core/ops/adagrad.h"
#include "core/ops/adam.h"
#include "core/ops/arithmetic.h"
#include "core/ops/inspect.h"
#include "core/ops/lamb.h"
#include "core/ops/layerwise.h"
#include "core/ops/lion.h"
#include "core/ops/masters.h"
#include "core/ops/muon.h"
#include "core/ops/novograd.h"
#include "core/ops/op.h"
#include "core/ops/param_norm.h"
#include "core/ops/sgd.h"

namespace ampfuse {

// The optimizers, and what steps like one.
// clang-format off
struct Algorithms : OpList<
    NoOp,         // gradients alone: another optimizer steps
    SgdOp,
    AdamOp,       // AdamW too
    AdagradOp,
    NovoGradOp,
    LambOp,
    LionOp,
    MuonOp,       // with matrix products between its stages
    LambUpdateOp,  // LAMB in two calls
    LayerwiseOp    // LARC in front of another's step
> {};
// clang-format on

// Plain maps over lists of tensors.
struct MapOps : decltype(arithmetic_ops() + masters_ops()){};

}  // namespace ampfuse
