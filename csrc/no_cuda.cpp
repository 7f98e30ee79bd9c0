// Stands in for the CUDA backend where it was not built.
#include "backend.h"

#if !defined(AMPFUSE_WITH_CUDA)

namespace ampfuse {

Backend* cuda_backend() { return nullptr; }
void set_device_allocator(Allocate) {}

}  // namespace ampfuse

#endif
