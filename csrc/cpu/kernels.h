// The table of kernels that each instruction set provides. Every kernel works on chunks [begin,
// end).
#pragma once

#include "../backend.h"

namespace ampfuse {

// What a measuring pass reads, over the rows that have a gradient.
enum class Measurement { kGradients, kParams, kLamb };

struct CpuKernels {
  const char* isa;
  // Leaves partials in the view.
  void (*measure)(const TableView& view, Measurement measurement, float inv_scale, bool fresh,
                  int64_t begin, int64_t end);
  void (*update)(const TableView& view, Algorithm algorithm, int64_t begin, int64_t end);
  // Sets *found_inf where a checked list holds a non-finite value.
  void (*map)(const TableView& view, MapOp op, float a, float b, int64_t begin, int64_t end,
              bool* found_inf);
};

extern const CpuKernels kScalarKernels;
#if defined(__x86_64__)
extern const CpuKernels kAvx2Kernels;
extern const CpuKernels kAvx512Kernels;
#endif

}  // namespace ampfuse
