// The CUDA backend: which kernel each call launches. Every call is at most three launches, whatever
// the table.
#include <cuda_runtime.h>

#include "../backend.h"
#include "apply.cuh"
#include "device_table.cuh"
#include "inspect.cuh"
#include "launch.cuh"

namespace ampfuse {
namespace {

// One block, so that its barrier orders the decision before the rows that depend on it.
constexpr int kPrepareThreads = 1024;

__global__ void __launch_bounds__(kPrepareThreads)
    prepare_kernel(TableView view, StepState* state, StepDecision decision, RowColumns columns) {
  if (threadIdx.x == 0) decide_step(*state, decision);
  __syncthreads();
  for (int64_t row = threadIdx.x; row < view.rows; row += kPrepareThreads) {
    if (!view.has_gradient(row)) continue;
    view.coefs[row] = advance_row(view.hyper[row], *state, view.scaled[row], columns, row);
  }
}

__global__ void update_scale_kernel(LossScale rule, OverflowFlags flags, bool fixed) {
  update_loss_scale(rule, flags, fixed);
}

class CudaBackend : public Backend {
 public:
  void inspect(Table& table, const InspectArgs& args, void* stream) override {
    const TableUse use(table, cudaStream_t(stream));
    ampfuse::inspect(use.view(), use.present(), args, use.ticket(), cudaStream_t(stream));
  }

  void measure_params(Table& table, float* row_norms, void* stream) override {
    const TableUse use(table, cudaStream_t(stream));
    measure<ParamNormOp>("param_norms", use.view(), use.present(), nullptr, cudaStream_t(stream));
    add_rows(use.view(), 1, row_norms, nullptr, cudaStream_t(stream));
  }

  void prepare(Table& table, StepState* state, const StepDecision& decision,
               const RowColumns& columns, void* stream) override {
    const TableUse use(table, cudaStream_t(stream));
    launch(Kernel{"prepare", prepare_kernel}, 1, kPrepareThreads, cudaStream_t(stream), use.view(),
           state, decision, columns);
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
        measure<LambMomentsOp<>>("lamb_moments", use.view(), use.present(), state,
                                 cudaStream_t(stream));
        add_rows(use.view(), kMeasures, use.view().norms, nullptr, cudaStream_t(stream));
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
