// The rows of one optimizer: each parameter with its half-precision model weight, gradients, FP32
// accumulators, states and step count. It decides which gradients a pass reads and hands the core a
// filled table; it computes nothing itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/backend.h"
#include "gradient_phase.h"
#include "objects.h"
#include "row.h"

namespace ampfuse {

// What each public function does, bind_param_table.cpp says: that is its documentation in Python.
class ParamTable {
 public:
  ParamTable(const std::string& algorithm, at::Device device);

  // Rows. Containers are those of an optimizer: its groups, and its states.
  int64_t add_row(at::Tensor param, std::optional<at::Tensor> model, std::string name,
                  int64_t model_version, bool at_random, std::optional<at::Tensor> whole,
                  int64_t origin);
  int64_t rows() const { return int64_t(rows_.size()); }
  void remember_params(pybind11::handle groups) { containers_.remember_params(groups); }
  void remember_states(pybind11::handle states) { containers_.remember_states(states); }
  bool has_states(pybind11::handle states) { return containers_.have_states(states); }
  bool has_params(pybind11::handle groups) const {
    return containers_.have_params(groups) && has_its_shards();
  }
  using Gather = std::function<at::Tensor(const at::Tensor&)>;
  void set_gather(Gather gather, const std::optional<at::Tensor>& counted_elsewhere);
  at::Tensor param(int64_t row) const { return rows_.at(row).param; }
  std::optional<at::Tensor> model(int64_t row) const;
  bool has_models() const { return has_models_; }
  const std::string& name(int64_t row) const { return rows_.at(row).name; }
  using States = std::vector<std::vector<at::Tensor>>;  // of each the lists of its storage type
  void set_states(int64_t row, const std::optional<States>& states, const std::string& storage,
                  const std::optional<at::Tensor>& average);
  at::Tensor steps();
  at::Tensor norm_averages();
  void set_hyper(int64_t begin, int64_t end, const std::optional<at::Tensor>& lr_tensor,
                 const std::map<std::string, double>& values,
                 const std::map<std::string, at::Tensor>& schedule);
  std::vector<int64_t> fingerprint() const;

  // Around every call that may put other gradients in place, so what collect() found is outdated.
  // Those of DTensors go to the local shards, which such a call reads and writes, and back; nothing
  // else may look at them in between (shards.cpp).
  void take_shards();
  void give_shards();

  // Masters and model weights (masters.cpp).
  void accept_model_weights();
  void refresh_masters(bool all);
  void publish_masters();

  // Gradients between two steps (gradients.cpp; see gradient_phase.h).
  void begin_backward();
  bool end_backward(const at::Tensor& scale, bool check);
  void mark_backward(const at::Tensor& scale);
  std::optional<at::Tensor> accumulated(int64_t row, bool make);
  void cancel_backward();
  void materialize();
  void zero_grad(bool set_to_none);

  // One step.
  std::optional<std::vector<int64_t>> collect(const std::optional<at::Tensor>& scale, bool unscales,
                                              bool unscales_half, pybind11::handle groups,
                                              pybind11::handle states);
  void measure();
  void update(const std::optional<at::Tensor>& found_inf, double max_norm, bool inspect,
              bool skip_nonfinite, const std::optional<std::vector<at::Tensor>>& meter);
  void decide(const std::optional<at::Tensor>& found_inf, double max_norm, bool inspect,
              bool skip_nonfinite);
  // Counts, zeros, int32 [rows, kMeterCounts]; norms, zeros, float32 [2, rows]; and, if asked for,
  // bits of changed weights, uint8 [chunks, kChunk / 8], which mean something in rows that are
  // stepped. See core/meter.h.
  std::vector<at::Tensor> new_meter(bool changed);
  void finish_step();
  void mark_stepped();
  at::Tensor state_field(const std::string& name) const;

 private:
  struct Inspection {
    bool record = false;       // the step state hears of it
    bool same_pass = false;    // as the inspection before
    bool fresh = false;        // of the gradients of this pass alone
    bool keeps_scale = false;  // in pending_scale_
    Preparation preparation;
  };

  // What norms_ holds of each row.
  enum NormColumn { kGradNorm, kGradLargest, kParamNorm, kNormColumns };

  bool has_its_shards() const;  // every DTensor the local shard that its row works on
  static bool is_shard_of(pybind11::handle dtensor, const at::Tensor& local);
  void lend_shards();
  static void set_leaf_gradient(Row& row, const at::Tensor& gradient);
  Table& table();
  DType type_in(int list, int64_t row, const at::Tensor& tensor) const;
  void set(int list, int64_t row, const at::Tensor& tensor);
  void follow_storage(int64_t row);
  void set_gradient(int64_t row, const at::Tensor& grad, bool scaled, const at::Tensor& accumulated,
                    const at::Tensor& out);
  bool is_materialized(const Row& row) const {
    return row.model.defined() && phase_.is_materialized();
  }
  const at::Tensor& source(const Row& row) const;  // the row's gradient now
  const at::Tensor& checked_gradient(Row& row, const at::Tensor& grad) const;
  void spend_gradients(bool stepped);
  bool is_measured() const;
  void check_collected() const;
  Meter meter_of(const std::vector<at::Tensor>& buffers);
  void inspect_collected(const Preparation& preparation);
  void inspect(const at::Tensor& scale, const Inspection& inspection);
  void map_masters(MapOp op, const std::vector<int64_t>& rows);
  bool needs_row_norms() const { return info(algorithm_).grad_norms || layerwise_; }
  // Makes of norms [columns, rows], and of the step state if `found`, what they are on all ranks.
  void share(bool found, at::Tensor norms, int64_t largest_column);
  void share_row_norms(bool found, bool of_params);
  float* row_norms(NormColumn column);
  StepState* state() const;

  Algorithm algorithm_;
  at::Device device_;
  Containers containers_;
  std::vector<Row> rows_;
  std::unique_ptr<Table> table_;
  at::Tensor steps_, norm_averages_, state_;
  at::Tensor norms_;                             // [kNormColumns, rows]
  at::Tensor pending_scale_;                     // of pending gradients
  std::map<const void*, at::Tensor> schedules_;  // a captured graph may read any of them
  at::Tensor collected_scale_;  // of the gradients that collect() found; undefined: 1
  GradientPhase phase_;
  // What inspections know.
  struct {
    bool norm = false;         // of all gradients there are
    bool row_norms = false;    // in norms_
    bool before_pass = true;   // every gradient that the running pass found
    bool edited_sums = false;  // somebody edited what earlier passes left beside a master
  } known_;
  // What collect() found beside the gradients. Of those the table has addresses alone, so whatever
  // may replace one ends it.
  bool is_collected_ = false;
  bool unchanged_ = false;       // they are those that were inspected last
  std::vector<int64_t> edited_;  // rows whose model weight somebody edited
  bool layerwise_ = false;       // some row is stepped as in LARC
  bool sharded_ = false;         // some row is a shard
  bool has_models_ = false;
  Gather gather_;
  at::Tensor counted_elsewhere_;
};

}  // namespace ampfuse
