// Algorithms and hyper-parameters by the names that Python uses.
#pragma once

#include <map>
#include <string>

#include "core/backend.h"

namespace ampfuse {

// A ValueError for a name that does not exist.
Algorithm algorithm_of(const std::string& name);
RowHyper hyper_of(const std::map<std::string, double>& values);
// The column of `schedule` by its name.
const double*& schedule_column(Schedule& schedule, const std::string& name);

}  // namespace ampfuse
