// Memory for tensors that live long: half weights, masters, moments, accumulators.
#pragma once

#include <ATen/core/Tensor.h>

namespace ampfuse {

// An uninitialized tensor laid out in memory as `like`, for a row of the core to walk both together
// (contiguous, where `like` has gaps or overlaps).
// On the CPU a large one lies on huge pages where Linux grants them: a step walks five arrays side
// by side, and on pages of 4 KB it waits for address translations and restarts the hardware's
// prefetchers at each page's end (10 % of a large AdamW step on an AVX-512 server).
at::Tensor empty_laid_out_as(const at::Tensor& like, at::ScalarType dtype = at::kFloat);

// `tensor` keeps its values and gets the layout of `like`, which has its shape: the same tensor in
// other memory. Nothing happens where it has that, or another shape or device.
void lay_out_as(const at::Tensor& like, const at::Tensor& tensor);

}  // namespace ampfuse
