#include "memory.h"

#include <ATen/ops/empty_like.h>

#include "torch_backend.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace ampfuse {
namespace {

// Less memory than this would mostly be the rims around the huge pages inside.
constexpr size_t kLarge = size_t(4) << 20;

// For memory that is not touched yet. A kernel without huge pages, or one that always gives them,
// ignores it.
void ask_for_huge_pages(void* data, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  static const auto page = uintptr_t(sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace

at::Tensor empty_laid_out_as(const at::Tensor& like, at::ScalarType dtype) {
  const auto options = like.options().dtype(dtype).requires_grad(false);
  at::Tensor tensor = at::empty_like(like, options, at::MemoryFormat::Preserve);
  const bool is_fake = tensor.key_set().has(c10::DispatchKey::Python);  // it has no memory
  if (tensor.is_cpu() && !is_fake && tensor.nbytes() >= kLarge)
    ask_for_huge_pages(tensor.data_ptr(), tensor.nbytes());
  return tensor;
}

void lay_out_as(const at::Tensor& like, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device() != like.device() || tensor.sizes() != like.sizes() ||
      !is_dense(like) || is_laid_out_as(tensor, like))
    return;
  tensor.set_data(empty_laid_out_as(like, tensor.scalar_type()).copy_(tensor.detach()));
}

}  // namespace ampfuse
