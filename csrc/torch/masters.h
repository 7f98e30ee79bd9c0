// FP32 masters and their half-precision model weights.
#pragma once

#include <vector>

#include "param_table.h"

namespace ampfuse {

class Masters {
 public:
  explicit Masters(ParamTable& table) : table_(table) {}
  bool exist() const;
  void accept_model_weights();
  void refresh(bool all);
  void refresh(const std::vector<int64_t>& rows);
  void publish();

 private:
  void map(MapOp op, const std::vector<int64_t>& rows);

  ParamTable& table_;
};

}  // namespace ampfuse
