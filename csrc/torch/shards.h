// Rows that are local shards of parameters spread over processes: torch's DTensor. Autograd does
// not see a shard, so gradients are carried between the two. `table.has_shards` saves the loops.
#pragma once

#include "param_table.h"

namespace ampfuse {

bool is_shard_of(pybind11::handle dtensor, const at::Tensor& local);
// Every DTensor has the local shard that its row works on.
bool have_their_shards(const std::vector<Row>& rows);
// For a step: rows read the local tensors of their DTensors' gradients, without owning them.
void borrow_local_gradients(std::vector<Row>& rows);

// Around every call that may put other gradients in place: those of DTensors go to the local
// shards, which such a call reads and writes, and back. Nothing else may look at them in between.
class LocalGradients {
 public:
  explicit LocalGradients(ParamTable& table);
  ~LocalGradients() noexcept(false);

 private:
  void give_back();

  ParamTable& table_;
};

}  // namespace ampfuse
