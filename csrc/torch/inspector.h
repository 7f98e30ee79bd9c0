// Inspects the gradients that the rows' lists point to: whether they are finite, and how large. If
// rows are shards, all ranks of the group find the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>

#include "param_table.h"

namespace ampfuse {

struct Inspection {
  bool record = false;          // add it to the step state
  bool same_pass = false;       // as the inspection before
  bool fresh = false;           // of the gradients of this pass alone
  float* kept_scale = nullptr;  // receives the scale
  Preparation preparation;
};

class Inspector {
 public:
  using Gather = std::function<at::Tensor(const at::Tensor&)>;
  // What is kept for each row.
  enum Column { kGradNorm, kGradLargest, kParamNorm, kKept };

  // Whether the norm is of all gradients that there are, and whether norms of rows are kept.
  bool knows_norm = false, knows_row_norms = false;

  explicit Inspector(ParamTable& table);

  // `counted_elsewhere`, bool [rows]: rows that another rank has too, and counts.
  void set_gather(Gather gather, const std::optional<at::Tensor>& counted_elsewhere);
  bool is_shared() const { return bool(gather_); }
  StepState* state() const { return static_cast<StepState*>(state_.data_ptr()); }
  const at::Tensor& state_bytes() const { return state_; }
  at::Tensor state_field(const std::string& name) const;
  // The algorithm or LARC needs the norm of each row.
  bool needs_row_norms() const;
  float* row_norms(Column column);

  // The core's inspect.
  void inspect(const at::Tensor& scale, const Inspection& inspection);
  // Merges what this rank found, or its norms of parameters, with all ranks; nothing without a
  // group.
  void share_row_norms(bool found, bool of_params);
  // Merges what LAMB measured: L2 norms [kMeasures, rows].
  void share_measures(float* norms);

 private:
  // `largest`: the column of `norms` with largest magnitudes, which are merged by max, if there is
  // one. The others, L2 norms, are added.
  void share(bool found, at::Tensor norms, std::optional<int64_t> largest);

  ParamTable& table_;
  at::Tensor state_;  // a StepState
  at::Tensor norms_;  // [kKept, rows]
  Gather gather_;
  at::Tensor counted_elsewhere_;
};

}  // namespace ampfuse
