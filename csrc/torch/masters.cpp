// FP32 masters and the half-precision model weights beside them.
#include "core/ops/masters.h"

#include "param_table.h"
#include "torch_backend.h"

namespace ampfuse {

void ParamTable::accept_model_weights() {
  for (Row& row : rows_) row.match_model();
}

void ParamTable::map_masters(MapOp op, const std::vector<int64_t>& rows) {
  if (rows.empty()) return;
  std::vector<int64_t> numel;
  for (int64_t i : rows) numel.push_back(rows_[i].numel);
  Table table(std::move(numel));
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows_[rows[i]];
    TORCH_CHECK(
        is_laid_out_as(row.model, row.param) && row.model.device() == device_ &&
            row.param.device() == device_ && row.param.numel() == row.numel && is_dense(row.param),
        row.name,
        " was moved or laid out anew after the optimizer was built; build the optimizer, or call "
        "amp.initialize, after that");
    table.set(kParam, int64_t(i), row.param.data_ptr(), dtype_of(row.param, row.name));
    table.set(kModel, int64_t(i), row.model.data_ptr(), dtype_of(row.model, row.name));
  }
  const DeviceScope scope(device_);
  scope.backend().map(table, op, {}, scope.stream());
  for (int64_t i : rows) {
    Row& row = rows_[i];
    bump_version(op == MapOp::of<PublishOp>() ? row.model : row.param);
    row.match_model();
  }
}

void ParamTable::refresh_masters(bool all) {
  std::vector<int64_t> edited;
  for (int64_t i = 0; i < rows(); ++i) {
    const Row& row = rows_[i];
    if (all ? row.model.defined() && !row.is_split : row.was_edited()) edited.push_back(i);
  }
  map_masters(MapOp::of<RefreshOp>(), edited);
}

void ParamTable::publish_masters() {
  std::vector<int64_t> mastered;
  for (int64_t i = 0; i < rows(); ++i) {
    if (rows_[i].model.defined() && !rows_[i].is_split) mastered.push_back(i);
  }
  map_masters(MapOp::of<PublishOp>(), mastered);
}

}  // namespace ampfuse
