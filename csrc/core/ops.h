// All ops, and the way from a choice that was made when running to the op's type.
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
#include "core/ops/novograd.h"
#include "core/ops/op.h"
#include "core/ops/param_norm.h"
#include "core/ops/sgd.h"

namespace ampfuse {

// Hands on a type without a value of it.
template <class T>
struct Type {
  using type = T;
};

// `run` may be the host's alone.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class... Ops, class Run>
HD void visit(Choice<OpList<Ops...>> choice, const Run& run) {
  int index = 0;
  ((choice.index() == index++ ? run(Type<Ops>()) : void()), ...);
}

}  // namespace ampfuse
