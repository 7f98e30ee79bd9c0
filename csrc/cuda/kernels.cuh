// The launches of the CUDA backend for an op. Each header of core/ops has its own translation unit,
// in which ops.cu defines the function declared here.
#pragma once

#include <cuda_runtime.h>

#include "core/backend.h"

namespace ampfuse {

// One pass over a table.
struct DevicePass {
  TableView view;
  unsigned present, encoded;  // lists that some row of it has, or has in an encoded type
  unsigned* tickets;          // see DeviceColumns
  cudaStream_t stream;
  const StepState* state = nullptr;  // nothing happens if its skip is set
  float a = 1, b = 1;                // arguments of the op, see Op::for_row()
  float* found_inf = nullptr;        // set where a checked list holds a non-finite value
  float* norms = nullptr;            // [measures][rows], of an op that measures
  Meter meter = {};                  // for an op that is metered
};

template <class Op>
struct DeviceKernel {
  static void run(const DevicePass& pass);
};

// inspect.cu.
void inspect(const DevicePass& pass, const InspectArgs& args);
void prepare(const DevicePass& pass, const Preparation& preparation);

}  // namespace ampfuse
