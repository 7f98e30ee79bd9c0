#include "masters.h"

#include <algorithm>

#include "core/ops.h"
#include "torch_backend.h"

namespace ampfuse {

bool Masters::exist() const {
  const std::vector<Row>& rows = table_.rows();
  return std::any_of(rows.begin(), rows.end(), [](const Row& row) { return row.model.defined(); });
}

void Masters::accept_model_weights() {
  for (Row& row : table_.rows()) row.match_model();
}

void Masters::map(MapOp op, const std::vector<int64_t>& chosen) {
  if (chosen.empty()) return;
  std::vector<Row>& rows = table_.rows();
  std::vector<int64_t> numel;
  for (int64_t i : chosen) numel.push_back(rows[i].numel);
  Table table(std::move(numel));
  for (size_t i = 0; i < chosen.size(); ++i) {
    const Row& row = rows[chosen[i]];
    table_.follow_layout(chosen[i]);
    TORCH_CHECK(
        is_laid_out_as(row.model, row.param) && row.model.device() == table_.device &&
            row.param.device() == table_.device && row.param.numel() == row.numel &&
            is_dense(row.param),
        row.name,
        " was moved or laid out anew after the optimizer was built; build the optimizer, or call "
        "amp.initialize, after that");
    table.set(kParam, int64_t(i), memory_of(row.param, row.name), dtype_of(row.param, row.name));
    table.set(kModel, int64_t(i), memory_of(row.model, row.name), dtype_of(row.model, row.name));
  }
  const DeviceScope scope(table_.device);
  scope.backend().map(table, op, {}, scope.stream());
  for (int64_t i : chosen) {
    Row& row = rows[i];
    bump_version(op == MapOp::of<PublishOp>() ? row.model : row.param);
    row.match_model();
  }
}

void Masters::refresh(bool all) {
  const std::vector<Row>& rows = table_.rows();
  std::vector<int64_t> edited;
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    if (all ? row.model.defined() && !row.is_split : row.was_edited()) edited.push_back(i);
  }
  refresh(edited);
}

void Masters::refresh(const std::vector<int64_t>& rows) { map(MapOp::of<RefreshOp>(), rows); }

void Masters::publish() {
  const std::vector<Row>& rows = table_.rows();
  std::vector<int64_t> mastered;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].model.defined() && !rows[i].is_split) mastered.push_back(i);
  }
  map(MapOp::of<PublishOp>(), mastered);
}

}  // namespace ampfuse
