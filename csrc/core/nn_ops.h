// The passes of all fused layers: a layer is an include and a name here.
#pragma once

#include "core/nn_ops/activation.h"
#include "core/nn_ops/batch_norm.h"
#include "core/nn_ops/cross_entropy.h"
#include "core/nn_ops/norm.h"

namespace ampfuse {

struct NnOps : decltype(activation_ops() + batch_norm_ops() + cross_entropy_ops() + norm_ops()){};

}  // namespace ampfuse
