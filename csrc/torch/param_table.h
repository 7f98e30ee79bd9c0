// The rows of one optimizer: each parameter with its half-precision model weight, gradient, FP32
// accumulator, states and step count. It hands the core a filled table and computes nothing itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/backend.h"
#include "objects.h"
#include "row.h"

namespace ampfuse {

// bind_param_table.cpp documents its functions and those of the classes that work on it: these
// docstrings are their documentation in Python.
class ParamTable {
 public:
  const Algorithm algorithm;  // for rows without one of their own
  const at::Device device;
  bool has_shards = false;  // some row is the local shard of a DTensor
  // Counts the changes that may put other tensors into rows: the core keeps only addresses of what
  // a step found.
  int64_t changes = 0;

  ParamTable(const std::string& algorithm, at::Device device);

  int64_t add_row(at::Tensor param, std::optional<at::Tensor> model, std::string name,
                  int64_t model_version, bool at_random, std::optional<at::Tensor> whole,
                  int64_t origin, const std::optional<std::string>& algorithm);
  using States = std::vector<std::vector<at::Tensor>>;  // for each state the lists of its storage
  void set_states(int64_t row, const std::optional<States>& states, const std::string& storage,
                  const std::optional<at::Tensor>& average);
  void set_hyper(int64_t begin, int64_t end, const std::optional<at::Tensor>& lr_tensor,
                 const std::map<std::string, double>& values,
                 const std::map<std::string, at::Tensor>& on_device);
  // The memory that the stages of the next step pass on, see kScratch in core/ops/op.h.
  void set_scratch(const std::vector<std::pair<int64_t, at::Tensor>>& scratch);
  at::Tensor steps();
  at::Tensor norm_averages();
  // Containers are an optimizer's ``param_groups`` and ``state``; None: not checked.
  void remember(pybind11::handle groups, pybind11::handle states);
  bool matches(pybind11::handle groups, pybind11::handle states);

  std::vector<Row>& rows() { return rows_; }
  const std::vector<Algorithm>& algorithms() const { return algorithms_; }  // that rows have
  bool is_layerwise() const { return layerwise_rows_ > 0; }  // some row is stepped as in LARC
  // The step of some row needs the norm of its gradient.
  bool needs_grad_norms() const;
  // The row whose model weight, parameter or master `param` is; null if there is none.
  Row* row_of(const at::Tensor& param);
  int64_t row_count() const { return int64_t(rows_.size()); }
  Table& core();
  // The core's gradient lists of a row; `out` receives the sum.
  void set_gradient(int64_t row, const at::Tensor& grad, bool scaled, const at::Tensor& accumulated,
                    const at::Tensor& out);
  void set_unscaled(int64_t row, const at::Tensor& grad) { set(kUnscaled, row, grad); }
  void follow_storage(int64_t row);
  // Lays the tensors of a whole parameter out like it, after model.to(memory_format=...) moved it.
  void follow_layout(int64_t row);

 private:
  DType type_in(int list, int64_t row, const at::Tensor& tensor) const;
  void set(int list, int64_t row, const at::Tensor& tensor);
  void set_lists(int64_t row);  // all but those of gradients

  Containers containers_;
  std::vector<Row> rows_;
  std::unordered_map<const c10::TensorImpl*, size_t> row_of_;
  std::vector<Algorithm> algorithms_;
  std::unique_ptr<Table> core_;
  int64_t layerwise_rows_ = 0;
  at::Tensor steps_, norm_averages_;
};

}  // namespace ampfuse
