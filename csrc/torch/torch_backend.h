// From torch's dtypes, devices and streams to the core's, and checks of tensors for kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <optional>
#include <string>

#include "core/backend.h"

namespace ampfuse {

// Throws a TypeError for a dtype that the kernels do not store. Its message begins with `what`,
// which is formatted only then.
template <class... What>
DType dtype_of(const at::Tensor& tensor, const What&... what) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    default:
      TORCH_CHECK_TYPE(
          false, what..., " is ", tensor.scalar_type(),
          "; ampfuse works on float32, float16 and bfloat16. Convert it, or leave it out.");
  }
}

// The torch type whose tensors hold elements of a storage type.
inline at::ScalarType scalar_type_of(DType dtype) {
  switch (plain(dtype)) {
    case DType::kFloat32:
      return at::kFloat;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kRemainderFloat16:
    case DType::kRemainderBFloat16:
      return at::kShort;
    default:
      return at::kByte;
  }
}

inline void check_device(at::Device device) {
  TORCH_CHECK(device.is_cpu() || device.is_cuda(),
              "ampfuse has kernels for cpu and cuda tensors, not for ", device);
}

// The backend, device guard and stream for one call on `device`. Construct it on the calling
// thread.
class DeviceScope {
 public:
  explicit DeviceScope(at::Device device);
  Backend& backend() const { return *backend_; }
  void* stream() const { return stream_; }

 private:
  c10::DeviceGuard guard_;
  Backend* backend_ = nullptr;
  void* stream_ = nullptr;
};

// Whether elements fill their storage without gaps or overlap, in any order, as kernels need.
inline bool is_dense(const at::Tensor& tensor) { return tensor.is_non_overlapping_and_dense(); }

// Where a tensor's storage is, for the price of two cache lines; data_ptr() takes four.
inline const void* base_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->data_ptr().get();
}

// `data`, a tensor's memory. Throws an error that begins with `what` if its storage was freed.
template <class... What>
void* checked_memory(const void* data, const at::Tensor& tensor, const What&... what) {
  TORCH_CHECK(tensor.numel() == 0 || base_of(tensor), what...,
              " or what belongs to it has lost its memory");
  return const_cast<void*>(data);
}
template <class... What>
void* memory_of(const at::Tensor& tensor, const What&... what) {
  return checked_memory(tensor.data_ptr(), tensor, what...);
}

// The memory of a caller's tensor, for a kernel on `device` that reads or writes `count` elements.
// (Rows of a table and the images of a fused layer have checks of their own.)
template <class T>
T* pointer_to(const at::Tensor& tensor, const char* what, int64_t count, at::Device device) {
  constexpr at::ScalarType dtype = c10::CppTypeToScalarType<T>::value;
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, what, " is ", tensor.scalar_type(),
                   "; it must be a ", dtype, " tensor");
  TORCH_CHECK_VALUE(tensor.numel() >= count, what, " has ", tensor.numel(), " elements; it needs ",
                    count);
  TORCH_CHECK_VALUE(tensor.device() == device, what, " is on ", tensor.device(),
                    " and the tensors are on ", device, "; move it there");
  TORCH_CHECK_VALUE(count <= 1 || tensor.is_contiguous(), what,
                    " has gaps in memory; it must be contiguous");
  return tensor.data_ptr<T>();
}

// The memory of one float32; null if there is no tensor.
inline float* float_pointer(const std::optional<at::Tensor>& tensor, const char* what,
                            at::Device device) {
  return tensor && tensor->defined() ? pointer_to<float>(*tensor, what, 1, device) : nullptr;
}

// Whether one loop can walk both.
inline bool is_laid_out_as(const at::Tensor& tensor, const at::Tensor& other) {
  if (tensor.sizes() != other.sizes()) return false;
  for (int64_t i = 0; i < tensor.dim(); ++i) {  // a stride over one element says nothing
    if (tensor.size(i) > 1 && tensor.stride(i) != other.stride(i)) return false;
  }
  return true;
}

// Inference tensors have no version.
inline void bump_version(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->version_counter().enabled()) impl->bump_version();
}

inline int64_t version_of(const at::Tensor& tensor) {
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  return version.enabled() ? version.current_version() : 0;
}

}  // namespace ampfuse
