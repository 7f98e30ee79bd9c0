// The CUDA backend: which kernel each call launches, one each and two for LAMB's update. So a step
// is two launches, inspect (or prepare, without an inspection) and update, whatever the table;
// LAMB's and LARC's are three.
#include <cuda_runtime.h>

#include "../backend.h"
#include "apply.cuh"
#include "device_table.cuh"
#include "inspect.cuh"
#include "launch.cuh"

namespace ampfuse {
namespace {

constexpr int kPrepareThreads = 1024;

__global__ void __launch_bounds__(kPrepareThreads)
    prepare_kernel(TableView view, Preparation preparation) {
  prepare_by_block(view, preparation);
}

__global__ void update_scale_kernel(LossScale rule, OverflowFlags flags, bool fixed) {
  update_loss_scale(rule, flags, fixed);
}

class CudaBackend : public Backend {
 public:
  void inspect(Table& table, const InspectArgs& args, void* stream) override {
    const TableUse use(table, cudaStream_t(stream));
    ampfuse::inspect(use.view(), use.present(), args, use.tickets(), cudaStream_t(stream));
  }

  void measure_params(Table& table, float* row_norms, void* stream) override {
    const TableUse use(table, cudaStream_t(stream));
    measure<ParamNormOp>("param_norms", use.view(), use.present(), row_norms, use.tickets(),
                         nullptr, cudaStream_t(stream));
  }

  void prepare(Table& table, const Preparation& preparation, void* stream) override {
    const TableUse use(table, cudaStream_t(stream));
    launch(Kernel{"prepare", prepare_kernel}, 1, kPrepareThreads, cudaStream_t(stream), use.view(),
           preparation);
  }

  void update(Table& table, Algorithm algorithm, const StepState* state, void* stream) override {
    const TableUse use(table, cudaStream_t(stream));
    const auto run = [&](auto op, const char* name) {
      apply<decltype(op)>(name, use.view(), use.present(), true, state, 0, 0, nullptr,
                          cudaStream_t(stream));
    };
    switch (algorithm) {
      case Algorithm::kNone:
        return;
      case Algorithm::kSgd:
        return run(SgdOp{}, "sgd");
      case Algorithm::kAdam:
        return run(AdamOp{}, "adam");
      case Algorithm::kAdagrad:
        return run(AdagradOp{}, "adagrad");
      case Algorithm::kNovoGrad:
        return run(NovoGradOp{}, "novograd");
      case Algorithm::kLamb:
        measure<LambMomentsOp<>>("lamb_moments", use.view(), use.present(), use.view().norms,
                                 use.tickets(), state, cudaStream_t(stream));
        return run(LambOp{}, "lamb");
      case Algorithm::kLambUpdate:
        return run(LambUpdateOp{}, "lamb_update");
      case Algorithm::kLayerwise:
        return run(LayerwiseOp{}, "layerwise");
    }
  }

  void map(Table& table, MapOp op, const MapArgs& args, void* stream) override {
    const TableUse use(table, cudaStream_t(stream));
    const auto run = [&](auto op, const char* name) {
      apply<decltype(op)>(name, use.view(), use.present(), false, nullptr, args.a, args.b,
                          args.found_inf, cudaStream_t(stream));
    };
    switch (op) {
      case MapOp::kScale:
        return run(ScaleOp{}, "scale");
      case MapOp::kAxpbyCheckBoth:
        return run(AxpbyOp<bit(kSource) | bit(kSource2)>{}, "axpby");
      case MapOp::kAxpbyCheckX:
        return run(AxpbyOp<bit(kSource)>{}, "axpby");
      case MapOp::kAxpbyCheckY:
        return run(AxpbyOp<bit(kSource2)>{}, "axpby");
      case MapOp::kRefresh:
        return run(RefreshOp{}, "refresh");
      case MapOp::kPublish:
        return run(PublishOp{}, "publish");
    }
  }

  void update_scale(const LossScale& rule, const OverflowFlags& flags, bool fixed,
                    void* stream) override {
    launch(Kernel{"update_scale", update_scale_kernel}, 1, 1, cudaStream_t(stream), rule, flags,
           fixed);
  }
};

}  // namespace

Backend* cuda_backend() {
  static CudaBackend backend;
  return &backend;
}

}  // namespace ampfuse
