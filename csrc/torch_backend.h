// From torch's devices, dtypes and streams to the core's. The only place that knows both.
#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/extension.h>

#include <string>

#include "backend.h"

namespace ampfuse {

// Throws a TypeError for a dtype the kernels do not store; its message begins with `what`, put
// together only then.
template <class... What>
DType dtype_of(const torch::Tensor& tensor, const What&... what) {
  switch (tensor.scalar_type()) {
    case torch::kFloat32:
      return DType::kFloat32;
    case torch::kFloat16:
      return DType::kFloat16;
    case torch::kBFloat16:
      return DType::kBFloat16;
    default:
      TORCH_CHECK_TYPE(
          false, what..., " is ", tensor.scalar_type(),
          "; ampfuse works on float32, float16 and bfloat16. Convert it, or leave it out.");
  }
}

inline void check_device(torch::Device device) {
  TORCH_CHECK(device.is_cpu() || device.is_cuda(),
              "ampfuse has kernels for cpu and cuda tensors, not for ", device);
}

// The backend, device guard and stream for one call on `device`. Construct it on the calling
// thread.
class DeviceScope {
 public:
  explicit DeviceScope(torch::Device device) : guard_(device) {
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
    stream_ = reinterpret_cast<void*>(
        c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle());
  }

  Backend& backend() const { return *backend_; }
  void* stream() const { return stream_; }

 private:
  c10::DeviceGuard guard_;
  Backend* backend_ = nullptr;
  void* stream_ = nullptr;
};

// Elements fill their storage without gaps or overlap, in whatever order: what kernels walk.
inline bool is_dense(const torch::Tensor& tensor) { return tensor.is_non_overlapping_and_dense(); }

// The data of a one-element float32 tensor that a kernel on `device` reads or writes; null if there
// is none.
inline float* float_pointer(const std::optional<torch::Tensor>& tensor, const char* what,
                            torch::Device device) {
  if (!tensor || !tensor->defined()) return nullptr;
  TORCH_CHECK_TYPE(tensor->scalar_type() == torch::kFloat32, what, " is ", tensor->scalar_type(),
                   "; it has to be a float32 tensor");
  TORCH_CHECK_VALUE(tensor->numel() >= 1, what, " is empty; it has to hold one element");
  TORCH_CHECK_VALUE(tensor->device() == device, what, " is on ", tensor->device(),
                    " and the tensors on ", device, "; it has to be where they are");
  return tensor->data_ptr<float>();
}

// Inference tensors have no version.
inline void bump_version(const torch::Tensor& tensor) {
  if (!tensor.defined()) return;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->version_counter().enabled()) impl->bump_version();
}

inline int64_t version_of(const torch::Tensor& tensor) {
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  return version.enabled() ? version.current_version() : 0;
}

}  // namespace ampfuse
