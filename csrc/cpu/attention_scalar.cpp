// The kernels of attention.h, for plain C++.
#include "attention_kernels.h"
#include "simd_scalar.h"

namespace ampfuse {
template struct AttentionKernel<Scalar>;
}  // namespace ampfuse
