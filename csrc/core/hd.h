// HD marks a function that runs on host and device; HD_LAMBDA, after its parameters, a lambda in
// it.
//
// On the host it is always inlined: each CPU instruction set has a translation unit of its own, and
// an out-of-line copy made in one of them could be the one that the linker keeps for all.
// UNROLL_LISTS stands before a loop over the lists of a table. AMPFUSE_API marks the functions of
// the core, which is a library of its own (cmake/core.map.in), that a binding calls.
#pragma once

#define AMPFUSE_API __attribute__((visibility("default")))

#if defined(__CUDACC__)
#define HD __host__ __device__ __forceinline__
#define HD_LAMBDA
#define UNROLL_LISTS _Pragma("unroll")
#else
#define HD inline __attribute__((always_inline))
#define HD_LAMBDA __attribute__((always_inline))
#define UNROLL_LISTS _Pragma("GCC unroll 10")
#endif
