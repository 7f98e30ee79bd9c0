// What a metered pass counts in a block's chunk. See core/meter.h.
#pragma once

#include <cuda_runtime.h>

#include "apply.cuh"
#include "core/metered.h"

namespace ampfuse {

// All threads call begin() and end(). In between each has its own counts, except those of the few
// elements whose exponents are counted. The counts are integers, so the order in which blocks and
// threads add them does not matter.
class Counter {
 public:
  // `changed`: where the bits of the chunk's changed weights go, or null.
  __device__ void begin(uint8_t* changed) {
    counts_ = shared();
    changed_ = changed;
    for (int i = threadIdx.x; i < kMeterCounts; i += kBlockThreads) counts_[i] = 0;
    __syncthreads();
  }

  // Counts `number` elements from i on, as Op, which is metered, left them. Zeroes those past the
  // last, which would be measured too.
  template <class Op, class Slice>
  __device__ void count(const Slice& slice, int i, int number, Vector<float, kPack> (&x)[kLists]) {
    const DType model = slice(kModel), param = slice(kParam);
    const DType half = plain(model != DType::kNone ? model : param);
    const DType split = Slice::Column::kSplit ? param : DType::kNone;
    const unsigned there = number > 0 ? (1u << number) - 1 : 0;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      if (k >= number) {
        x[kUpdate].lane[k] = x[kParam].lane[k] = 0;
      } else if (is_sampled(i)) {
        atomicAdd(counts_ + kExponents + exponent_bin(x[kGrad].lane[k]), 1u);
      }
    }
    const Marks marks = Op::marks(x, half, split, slice(kGrad)).within(there);
    if (changed_ != nullptr && number > 0) changed_[i / 8] = uint8_t(marks.changed);
    changed_count_ += unsigned(__popc(marks.changed));
    moved_ += unsigned(__popc(marks.moved));
    zero_ += unsigned(__popc(marks.zero));
    tiny_ += unsigned(__popc(marks.tiny));
  }

  // Adds the block's counts of `number` elements to the row's.
  __device__ void end(uint32_t number, uint32_t* counts) const {
    if (changed_count_ != 0) atomicAdd(counts_ + kChanged, changed_count_);
    if (moved_ != changed_count_) atomicAdd(counts_ + kStale, moved_ - changed_count_);
    if (zero_ != 0) atomicAdd(counts_ + kZero, zero_);
    if (tiny_ != zero_) atomicAdd(counts_ + kSubnormal, tiny_ - zero_);
    __syncthreads();
    for (int i = threadIdx.x; i < kMeterCounts; i += kBlockThreads) {
      const uint32_t count = i == kElements ? number : counts_[i];
      if (count != 0) atomicAdd(counts + i, count);
    }
  }

 private:
  __device__ static unsigned* shared() {
    __shared__ unsigned counts[kMeterCounts];
    return counts;
  }

  unsigned changed_count_ = 0, moved_ = 0, zero_ = 0, tiny_ = 0;
  unsigned* counts_ = nullptr;
  uint8_t* changed_ = nullptr;
};

}  // namespace ampfuse
