// Stands in for the CUDA backend where it is not built.
#include "core/backend.h"

namespace ampfuse {

Backend* cuda_backend() { return nullptr; }
const char* cuda_archs() { return ""; }
CudaVersions cuda_versions() { return {}; }
void set_device_allocator(Allocate) {}

}  // namespace ampfuse
