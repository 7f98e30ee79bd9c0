// Several blocks leave partial results, and the block that arrives last continues with all of them,
// which saves a launch. Which block that is changes from run to run, but only the time depends on
// it.
#pragma once

#include <cuda_runtime.h>

#include "block_reduce.cuh"

namespace ampfuse {

// True in every thread of the last of `blocks` blocks to call, when all others have written what
// they wrote before. Counts in the ticket, which is zero again afterwards.
__device__ inline bool arrives_last(unsigned* ticket, unsigned blocks) {
  __syncthreads();  // the fence covers what any thread of the block wrote
  unsigned arrived = 0;
  if (threadIdx.x == 0) {
    __threadfence();
    arrived = atomicInc(ticket, blocks - 1);
    if (arrived == blocks - 1) __threadfence();
  }
  return block_broadcast(arrived) == blocks - 1;
}

// Other blocks have written it: read past the L1 cache.
__device__ inline Partial load_partial(const Partial* partial) {
  static_assert(sizeof(Partial) == sizeof(uint4));
  const uint4 words = __ldcg(reinterpret_cast<const uint4*>(partial));
  Partial loaded;
  memcpy(&loaded, &words, sizeof loaded);
  return loaded;
}

}  // namespace ampfuse
