// The CUDA backend: the kernel that each call launches. A step is two launches, inspect (or
// prepare, without an inspection) and update. The first stage of LAMB and Muon is one more, as are
// LARC's norms of parameters and the update of each further algorithm of a table.
#include <cuda_runtime.h>

#include <type_traits>

#include "core/backend.h"
#include "core/nn_ops.h"
#include "core/ops.h"
#include "device_table.cuh"
#include "kernels.cuh"
#include "launch.cuh"
#include "nn.cuh"

// What the build compiles for; tests compile this file by itself.
#ifndef AMPFUSE_CUDA_ARCHS
#define AMPFUSE_CUDA_ARCHS ""
#endif

namespace ampfuse {
namespace {

__global__ void update_scale_kernel(LossScale rule, OverflowFlags flags, bool fixed) {
  update_loss_scale(rule, flags, fixed);
}

constexpr int kMergeThreads = 256;

__global__ void merge_kernel(RankResults found) {
  const int64_t i = int64_t(blockIdx.x) * kMergeThreads + threadIdx.x;
  if (i == 0 && found.state != nullptr) merge_states(found);
  if (i < found.values) merge_norm(found, i);
}

class CudaBackend : public Backend {
 public:
  void set_device(int index) override { CUDA_CHECK(cudaSetDevice(index)); }

  void inspect(Table& table, const InspectArgs& args, void* stream) override {
    const TableUse use(table, cudaStream_t(stream));
    ampfuse::inspect(use.pass(), args);
  }

  void measure_params(Table& table, float* row_norms, void* stream) override {
    const TableUse use(table, cudaStream_t(stream));
    DevicePass pass = use.pass();
    pass.norms = row_norms;
    DeviceKernel<ParamNormOp>::run(pass);
  }

  void prepare(Table& table, const Preparation& preparation, void* stream) override {
    const TableUse use(table, cudaStream_t(stream));
    ampfuse::prepare(use.pass(), preparation);
  }

  void merge(const RankResults& found, void* stream) override {
    const int64_t blocks = found.values / kMergeThreads + 1;
    launch(NamedKernel{"merge", merge_kernel}, blocks, kMergeThreads, cudaStream_t(stream), found);
  }

  float* first_stage(Table& table, Algorithm algorithm, const StepState* state,
                     void* stream) override {
    const TableUse use(table, cudaStream_t(stream));
    DevicePass pass = use.pass();
    pass.state = state;
    float* norms = nullptr;
    visit(algorithm, [&](auto type) {
      using Before = typename decltype(type)::type::Before;
      if constexpr (!std::is_void_v<Before>) {
        if constexpr (Before::kMeasured != 0) norms = pass.norms = pass.view.norms;
        DeviceKernel<Before>::run(pass);
      }
    });
    return norms;
  }

  void update(Table& table, Algorithm algorithm, const StepState* state, const Meter* meter,
              void* stream) override {
    const TableUse use(table, cudaStream_t(stream));
    DevicePass pass = use.pass();
    pass.state = state;
    pass.norms = pass.view.norms;
    visit(algorithm, [&](auto type) {
      using Op = typename decltype(type)::type;
      if constexpr (Op::kWrites & bit(kParam)) {
        if (meter != nullptr) {
          pass.meter = *meter;
          pass.norms = meter->norms;
          return DeviceKernel<Metered<Op>>::run(pass);
        }
      }
      if constexpr (Op::kWrites != 0) DeviceKernel<Op>::run(pass);
    });
  }

  void map(Table& table, MapOp op, const MapArgs& args, void* stream) override {
    const TableUse use(table, cudaStream_t(stream));
    DevicePass pass = use.pass();
    pass.a = args.a;
    pass.b = args.b;
    pass.found_inf = args.found_inf;
    visit(op, [&](auto type) { DeviceKernel<typename decltype(type)::type>::run(pass); });
  }

  void update_scale(const LossScale& rule, const OverflowFlags& flags, bool fixed,
                    void* stream) override {
    launch(NamedKernel{"update_scale", update_scale_kernel}, 1, 1, cudaStream_t(stream), rule,
           flags, fixed);
  }

  void run(NnOp op, const NnArgs& args, void* stream) override {
    visit(op, [&](auto type) {
      NnDeviceKernel<typename decltype(type)::type>::run(args, cudaStream_t(stream));
    });
  }
};

}  // namespace

const char* cuda_archs() { return AMPFUSE_CUDA_ARCHS; }

CudaVersions cuda_versions() {
  CudaVersions found;
  found.runtime = CUDART_VERSION;
  if (cudaDriverGetVersion(&found.driver) != cudaSuccess) found.driver = 0;
  return found;
}

Backend* cuda_backend() {
  static CudaBackend backend;
  return &backend;
}

}  // namespace ampfuse
