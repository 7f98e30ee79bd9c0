// All ops of optimizers and lists.
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
