#include "attention.h"

namespace ampfuse {

AttentionKernels attention_kernels() {
  AttentionKernels kernels;
  with_isa([&](auto isa) { kernels = attention_kernels_of<typename decltype(isa)::type>(); });
  return kernels;
}

}  // namespace ampfuse
