// The rows of one optimizer: each parameter with its half-precision model weight, gradients, FP32
// accumulators, states and step count. It decides which gradients a pass reads and hands the core a
// filled table; it computes nothing itself.
//
// Where gradients are, per row with a master (`model` is set):
//   - autograd fills model.grad. Between scale_loss and step it is *pending*: scaled by
//   `pending_scale`.
//   - `accumulated` holds earlier passes, FP32 and unscaled.
//   - once somebody reads a gradient of a master or of its model weight the table is
//   *materialized*: both .grad are
//     one FP32 unscaled tensor, until the step or the next backward.
// A row without a master has param.grad alone; during a backward pass its earlier gradient is
// stashed in `accumulated`.
#pragma once

#include <torch/extension.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend.h"

namespace ampfuse {

class ParamTable {
 public:
  // algorithm: "sgd", "adam" (covers AdamW), "adagrad", "novograd", "lamb" or "none", which keeps
  // gradients only.
  ParamTable(const std::string& algorithm, torch::Device device);

  // Appends a row. `model` is the half weight beside an FP32 `param`, or nothing; `model_version`
  // the version of it that the master has followed. Returns the row's index.
  int64_t add_row(torch::Tensor param, std::optional<torch::Tensor> model, std::string name,
                  int64_t model_version);
  int64_t rows() const { return int64_t(rows_.size()); }
  torch::Tensor param(int64_t row) const { return rows_.at(row).param; }
  std::optional<torch::Tensor> model(int64_t row) const;

  // States in the order of the core's kState0..2; FP32, laid out as the parameter. Nothing: the row
  // has none yet.
  void set_states(int64_t row,
                  const std::optional<std::vector<std::optional<torch::Tensor>>>& states);
  torch::Tensor steps();          // float32 [rows], device
  torch::Tensor norm_averages();  // float32 [rows], device: NovoGrad's second moments

  // Hyper-parameters of rows [begin, end) by the names of RowHyper and HyperFlag; others are off.
  // `schedule`: float64 columns by the names of Schedule, all of one length; may be empty.
  void set_hyper(int64_t begin, int64_t end, const std::optional<torch::Tensor>& lr_tensor,
                 const std::map<std::string, double>& values,
                 const std::map<std::string, torch::Tensor>& schedule);

  // The model weights are what the masters round to, now: their present versions count as ours.
  void accept_model_weights();
  // Masters take the elements that somebody edited in the model since our last write: seen by the
  // weight's version and memory, or, with `all`, looked for in every weight (an edit through
  // `.data` leaves no trace).
  void refresh_masters(bool all);
  void publish_masters();  // model weights = masters

  // scale_loss.
  void begin_backward();
  void end_backward(const torch::Tensor& scale, bool check);
  void mark_backward(const torch::Tensor& scale);
  void cancel_backward();
  void materialize();
  void zero_grad(bool set_to_none);

  // One step. collect() finds the gradients, checks them all and returns the rows that have one but
  // no state yet; nothing has changed then. `scale`: what gradients not pending are multiplied by
  // (a GradScaler's); with `unscales` the update leaves those in FP32 unscaled.
  std::vector<int64_t> collect(const std::optional<torch::Tensor>& scale, bool unscales);
  // Makes sum_squares that of the collected gradients, now rather than in the step.
  void measure();
  void update(const std::optional<torch::Tensor>& found_inf, double max_norm, bool inspect,
              bool skip_nonfinite);
  void
  finish_step();  // after an update, or another optimizer's own step: pending gradients are spent
  // A captured graph has stepped the rows: versions tell, and masters and model weights agree.
  void mark_stepped();
  // Three numbers a row: where its parameter and its model weight are, and whether autograd gives
  // it a gradient.
  std::vector<int64_t> fingerprint() const;

  // Decides without an update, for an optimizer that steps by itself; the verdict is in skip.
  void decide(const std::optional<torch::Tensor>& found_inf, double max_norm, bool inspect,
              bool skip_nonfinite);

  torch::Tensor state_field(const std::string& name) const;  // 0-dim device view into StepState
  const std::string& name(int64_t row) const { return rows_.at(row).name; }

 private:
  // Tells whether a gradient is still the tensor that we last saw. The weak reference keeps a freed
  // gradient's successor from looking like it.
  struct Identity {
    std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> impl;
    void remember(const torch::Tensor& grad);
    void forget() { impl.reset(); }
    bool is_same_tensor(const torch::Tensor& grad) const;
  };

  // ... and holds what it held.
  struct Contents : Identity {
    int64_t version = -1;
    void remember(const torch::Tensor& grad);
    bool is_unchanged(const torch::Tensor& grad) const;
  };

  struct Row {
    torch::Tensor param, model;
    torch::Tensor states[3];
    torch::Tensor accumulated;
    torch::Tensor copied_grad;  // the gradient in the parameter's layout, if it has another
    std::string name;
    int64_t model_version =
        0;  // with model_data: what the model weight was when the master last matched it
    const void* memory[5] = {};  // where param, states and leaf were: see follow_storage()
    const void* model_data = nullptr;
    bool has_states = false;
    bool has_grad = false;  // the current pass reads one
    bool is_contiguous = false;
    bool unscales = false;  // the update of this step unscales the gradient in place
    Identity pending, spent;
    Contents inspected;
    bool was_edited() const;  // by somebody else, since the master last matched it
    void match_model();
    void mark_stepped();
    const torch::Tensor& leaf() const { return model.defined() ? model : param; }
  };

  // What norms_ holds of each row.
  enum NormColumn { kGradNorm, kGradLargest, kParamNorm, kNormColumns };

  Table& table();
  void set(int list, int64_t row, const torch::Tensor& tensor);
  void follow_storage(int64_t row);
  void set_gradient(int64_t row, const torch::Tensor& grad, bool scaled,
                    const torch::Tensor& accumulated, const torch::Tensor& out);
  bool is_materialized(const Row& row) const { return row.model.defined() && materialized_; }
  const torch::Tensor& source(const Row& row) const;  // the row's gradient now
  const torch::Tensor& checked_gradient(Row& row, const torch::Tensor& grad) const;
  void prefetch_row(int64_t row) const;
  void prefetch_versions(int64_t row) const;
  void spend_gradients(bool stepped);
  bool is_measured() const;
  void inspect_collected(const Preparation& preparation);
  void inspect(const torch::Tensor& scale, bool record, const Preparation& preparation = {},
               bool same_pass = false, bool fresh = false);
  void map_masters(MapOp op, const std::vector<int64_t>& rows);
  bool needs_row_norms() const { return algorithm_ == Algorithm::kNovoGrad || layerwise_; }
  float* row_norms(NormColumn column);
  StepState* state() const;

  Algorithm algorithm_;
  torch::Device device_;
  std::vector<Row> rows_;
  std::unique_ptr<Table> table_;
  torch::Tensor steps_, norm_averages_, state_;
  torch::Tensor norms_;                             // [kNormColumns, rows]
  torch::Tensor pending_scale_;                     // of pending gradients
  std::map<const void*, torch::Tensor> schedules_;  // a captured graph may read any of them
  torch::Tensor collected_scale_;  // of the gradients that collect() found; undefined: 1
  bool unread_ = false;            // gradients may wait to be materialized
  bool materialized_ = false;
  bool norm_known_ = false, row_norms_known_ = false;
  // What collect() found beside the gradients.
  bool unchanged_ = false;       // they are those that were inspected last
  std::vector<int64_t> edited_;  // rows whose model weight somebody edited
  bool delayed_ = false;         // mark_backward() left gradients that nobody inspected
  bool began_early_ = false;     // the running pass includes them: begin_backward() inspected them
  bool all_inspected_ = true;    // the gradients that the running pass found, before it began
  bool edited_sums_ = false;     // somebody edited what earlier passes left beside a master
  bool layerwise_ = false;       // some row is stepped as in LARC
};

}  // namespace ampfuse
