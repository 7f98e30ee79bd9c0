// HD marks what runs on host and device alike; HD_LAMBDA, behind its parameters, a lambda within.
//
// On the host it is always inlined: each CPU instruction set has a translation unit of its own, and
// an out-of-line copy made in one of them could be the one that the linker keeps for all.
#pragma once

#if defined(__CUDACC__)
#define HD __host__ __device__ __forceinline__
#define HD_LAMBDA
#else
#define HD inline __attribute__((always_inline))
#define HD_LAMBDA __attribute__((always_inline))
#endif
