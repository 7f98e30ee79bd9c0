// Batch normalization on CUDA.
#pragma once

#include "core/batch_norm.h"

namespace ampfuse {

BatchNorm& cuda_batch_norm();

}  // namespace ampfuse
