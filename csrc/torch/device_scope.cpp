// Which backend works on a device.
#include <c10/core/impl/VirtualGuardImpl.h>

#include "torch_backend.h"

namespace ampfuse {

DeviceScope::DeviceScope(at::Device device) : guard_(device) {
  if (device.is_cpu()) {
#if defined(AMPFUSE_EMULATE_CUDA)
    backend_ = cuda_backend();  // tests: the CUDA kernels run on the host
#else
    backend_ = &cpu_backend();
#endif
    return;
  }
  check_device(device);
#if !defined(AMPFUSE_EMULATE_CUDA)
  backend_ = cuda_backend();
#endif
  TORCH_CHECK(backend_, "ampfuse was built without CUDA, but got tensors on ", device,
              ". Reinstall it where nvcc is found or can be installed: AMPFUSE_CUDA=ON pip "
              "install ampfuse");
  backend_->set_device(guard_.current_device().index());
  stream_ = reinterpret_cast<void*>(
      c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle());
}

}  // namespace ampfuse
