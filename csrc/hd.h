// HD marks what runs on host and device alike.
//
// On the host it is always inlined: each CPU instruction set has a translation unit of its own, and
// an out-of-line copy made in one of them could be the one that the linker keeps for all.
#pragma once

#if defined(__CUDACC__)
#define HD __host__ __device__ __forceinline__
#else
#define HD inline __attribute__((always_inline))
#endif
