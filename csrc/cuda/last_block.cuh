// Several blocks leave partial results, and the one that arrives last goes on with all of them:
// what would be a launch of its own otherwise. Which block that is changes from run to run, and
// nothing but time depends on it.
#pragma once

#include <cuda_runtime.h>

#include "block_reduce.cuh"

namespace ampfuse {

// True in every thread of the last of `blocks` blocks to call, when all others have written what
// they wrote before. Counts in the ticket, which is zero again afterwards.
__device__ inline bool arrives_last(unsigned* ticket, unsigned blocks) {
  __syncthreads();  // the fence is for what any thread of the block wrote
  unsigned arrived = 0;
  if (threadIdx.x == 0) {
    __threadfence();
    arrived = atomicInc(ticket, blocks - 1);
    if (arrived == blocks - 1) __threadfence();
  }
  return block_broadcast(arrived) == blocks - 1;
}

// Partials were written by other blocks: read them past the L1 cache.
__device__ inline double load_sum(const Partial& partial) { return __ldcg(&partial.sum_squares); }
__device__ inline uint32_t load_largest(const Partial& partial) { return __ldcg(&partial.largest); }

}  // namespace ampfuse
