// Memory for tensors that live long: half weights, masters, moments, accumulators.
#pragma once

#include <ATen/core/Tensor.h>

namespace ampfuse {

// An uninitialized tensor with the memory layout of `like`, so that a row of the core walks both
// together (contiguous, if `like` has gaps or overlaps).
// On the CPU a large one lies on huge pages if Linux grants them: a step walks five arrays at a
// time, and on pages of 4 KB it waits for address translations and restarts the hardware's
// prefetchers at each page's end (10 % of a large AdamW step on an AVX-512 server).
at::Tensor empty_laid_out_as(const at::Tensor& like, at::ScalarType dtype = at::kFloat);

// Gives `tensor` the layout of `like`, which has its shape: the same tensor with the same values,
// in other memory. Nothing happens if it has that layout, or another shape or device.
void lay_out_as(const at::Tensor& like, const at::Tensor& tensor);

}  // namespace ampfuse
