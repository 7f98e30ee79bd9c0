// Reductions over the kLanes threads of a block, in the order that reduce.h fixes. All threads
// call, thread 0 receives the result, and every function may be called again without a barrier
// between.
#pragma once

#include <cuda_runtime.h>

#include "core/reduce.h"

namespace ampfuse {

// The threads of a block; the order of sums fixes their number.
constexpr int kBlockThreads = kLanes;

constexpr unsigned kWholeWarp = 0xffffffffu;

// The last halvings of sum_by_halving, within one warp; lane 0 receives the sum.
__device__ inline double warp_sum(double value) {
  for (int offset = kRowLanes / 2; offset > 0; offset /= 2) {
    value += __shfl_down_sync(kWholeWarp, value, offset);
  }
  return value;
}

__device__ inline double block_sum(double value) {
  __shared__ double shared[kLanes];
  const int lane = threadIdx.x;
  shared[lane] = value;  // no other thread reads what an earlier call left here
  __syncthreads();
  for (int offset = kLanes / 2; offset >= kRowLanes; offset /= 2) {
    if (lane < offset) shared[lane] += shared[lane + offset];
    __syncthreads();
  }
  return lane < kRowLanes ? warp_sum(shared[lane]) : 0.0;
}

// Lane 0 receives the largest.
__device__ inline uint32_t warp_max(uint32_t value) {
  for (int offset = kRowLanes / 2; offset > 0; offset /= 2) {
    const uint32_t other = __shfl_down_sync(kWholeWarp, value, offset);
    if (other > value) value = other;
  }
  return value;
}

__device__ inline uint32_t block_max(uint32_t value) {
  __shared__ uint32_t shared[kLanes / kRowLanes];
  value = warp_max(value);
  __syncthreads();
  if (threadIdx.x % kRowLanes == 0) shared[threadIdx.x / kRowLanes] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kLanes / kRowLanes; ++warp) {
      if (shared[warp] > value) value = shared[warp];
    }
  }
  return value;
}

// Hands thread 0's value to every thread.
template <class T>
__device__ T block_broadcast(T value) {
  __shared__ T shared;
  __syncthreads();
  if (threadIdx.x == 0) shared = value;
  __syncthreads();
  return shared;
}

}  // namespace ampfuse
