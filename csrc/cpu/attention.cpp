#include "attention.h"

namespace ampfuse {

AttentionKernels attention_kernels() {
  AttentionKernels kernels;
  with_isa([&](auto isa) {
    using Kernel = AttentionKernel<typename decltype(isa)::type>;
    kernels = {&Kernel::softmax, &Kernel::gradient, &Kernel::narrow, &Kernel::dot};
  });
  return kernels;
}

}  // namespace ampfuse
