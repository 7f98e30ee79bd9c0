// The operations of a backend on a table. The CPU and CUDA backends are built alike: each has one
// apply harness that walks the chunks, and the ops of core/ops. All pointers are the device's; no
// call waits for the device.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "core/algorithms.h"
#include "core/merge.h"
#include "core/meter.h"
#include "core/nn_ops/nn_op.h"
#include "core/step_state.h"
#include "core/table.h"

namespace ampfuse {

// The preparation of an update, after an inspection: the step is decided in `state`, then the
// columns of the rows that have a gradient are advanced and their coefficients computed.
struct Preparation {
  StepState* state = nullptr;  // null: none in inspect(), and an error in prepare()
  StepDecision decision;
  RowColumns columns;
};

struct InspectArgs {
  const float* scale = nullptr;   // gradients of scaled rows are divided by it; 1 if absent
  bool scale_is_inverse = false;  // ... or multiplied, if it is 1 / scale already
  StepState* state = nullptr;     // receives flag, sum of squares, first offending row; or null
  float* kept_scale = nullptr;    // receives *scale: it may change before the gradients are used
  bool same_pass = false;         // see record_inspection()
  bool fresh = false;             // check only the gradients of this pass, see InspectOp
  float* found_inf = nullptr;  // set to 1, never cleared, if a gradient is non-finite; may be null
  float* norm = nullptr;       // L2 norm over all rows; may be null
  float* row_norms = nullptr;  // [rows] L2 norm of each; may be null
  float* row_largest = nullptr;  // [rows] largest magnitude of each; may be null
  Preparation preparation;       // done last, with what was found
};

// The factor by which inspect multiplies the gradients of scaled rows.
HD float inverse_scale(const InspectArgs& args) {
  if (args.scale == nullptr) return 1.0f;
  return args.scale_is_inverse ? *args.scale : float(1.0 / double(*args.scale));
}

HD void keep_scale(const InspectArgs& args) {
  if (args.kept_scale != nullptr) *args.kept_scale = *args.scale;
}

// Hands out what an inspection found, but norms of rows. `bad_row`: see record_inspection().
HD void report_inspection(const InspectArgs& args, double sum_squares, int32_t bad_row,
                          uint32_t bad_bits) {
  if (args.state) record_inspection(*args.state, sum_squares, bad_row, bad_bits, args.same_pass);
  keep_scale(args);
  if (args.found_inf && bad_row >= 0) *args.found_inf = 1;
  if (args.norm) *args.norm = norm_of(sum_squares);
}

struct MapArgs {
  float a = 1, b = 1;
  // Set to 1, never cleared, by a non-finite value in a checked list; may be null.
  float* found_inf = nullptr;
};

// Device flags. They travel in a kernel's arguments, of which every CUDA version takes 4 KB.
struct OverflowFlags {
  static constexpr int kMax = 128;
  float* found_inf[kMax];
  float* shared[kMax];
  int found_infs = 0, shareds = 0;
};

HD void update_loss_scale(const LossScale& rule, const OverflowFlags& flags, bool fixed) {
  bool any = false;
  for (int i = 0; i < flags.found_infs; ++i) any = any || *flags.found_inf[i] != 0;
  for (int i = 0; i < flags.shareds && any; ++i) *flags.shared[i] = 1;
  if (!fixed) update_loss_scale(rule, any);
}

// A pass that takes a `const StepState* state` returns at once, on the device, if the state says
// skip. Null: no step was decided, and the pass runs.
class Backend {
 public:
  virtual ~Backend() = default;

  // The device that the calls of this thread work on from now on. The core's runtime need not
  // follow the caller's.
  virtual void set_device(int) {}

  // Reads every gradient once. v = kGrad * (scaled ? 1 / scale : 1) + kAccumulated; v goes to
  // kGradOut where a row has one, and into the sum of squares.
  virtual void inspect(Table& table, const InspectArgs& args, void* stream) = 0;

  // The L2 norm of each row's kParam; 0 for rows without a gradient.
  virtual void measure_params(Table& table, float* row_norms, void* stream) = 0;

  // The preparation alone, if the inspection was earlier or there is none.
  virtual void prepare(Table& table, const Preparation& preparation, void* stream) = 0;

  // For an algorithm with two stages: the pass of the first. Returns the norms that it measures, L2
  // norms [kMeasures][rows] on the device; null if it measures none, and on a CPU if it is skipped.
  virtual float* first_stage(Table& table, Algorithm algorithm, const StepState* state,
                             void* stream) = 0;

  // If the rows are shards: merges what each rank found. Called between an inspection and its
  // preparation, and after the calls that measure norms.
  virtual void merge(const RankResults& found, void* stream) = 0;

  // The update itself, after first_stage(). `meter`: filled by a metered step of an algorithm that
  // steps parameters; or null.
  virtual void update(Table& table, Algorithm algorithm, const StepState* state, const Meter* meter,
                      void* stream) = 0;

  virtual void map(Table& table, MapOp op, const MapArgs& args, void* stream) = 0;

  // Applies the rule to the OR of `flags.found_inf` and sets every `flags.shared` if that is 1.
  // With `fixed` (a static scale) the scale stays.
  virtual void update_scale(const LossScale& rule, const OverflowFlags& flags, bool fixed,
                            void* stream) = 0;

  // A pass of a fused layer.
  virtual void run(NnOp op, const NnArgs& args, void* stream) = 0;
};

AMPFUSE_API Backend& cpu_backend();
AMPFUSE_API Backend* cuda_backend();   // nullptr where CUDA was not built
AMPFUSE_API const char* cuda_archs();  // "compute_75 sm_75 sm_80": what it was built for

// The runtime's version and the newest that this machine's driver supports: 13020 for CUDA 13.2; 0:
// none.
struct CudaVersions {
  int runtime = 0, driver = 0;
};
AMPFUSE_API CudaVersions cuda_versions();  // initializes nothing

// What runs, or what AMPFUSE_CPU_ISA forces: "scalar", "avx2", "avx512", "neon" or "neon_bf16".
AMPFUSE_API const char* cpu_isa();

// How the CPU backend runs its tasks: body(begin, end) over [0, count). The binding passes torch's
// pool; the default runs them one after another.
using ParallelFor =
    std::function<void(int64_t count, const std::function<void(int64_t, int64_t)>& body)>;
AMPFUSE_API void set_parallel_for(ParallelFor parallel_for, int (*thread_count)());

// Where the CUDA backend gets memory on the current device. The binding passes torch's caching
// allocator.
using Allocate = std::shared_ptr<void> (*)(size_t bytes);
AMPFUSE_API void set_device_allocator(Allocate allocate);

}  // namespace ampfuse
