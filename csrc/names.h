// Algorithms and hyper-parameters by the names that Python uses.
#pragma once

#include <map>
#include <string>

#include "backend.h"

namespace ampfuse {

// A ValueError for a name that does not exist.
Algorithm algorithm_of(const std::string& name);
RowHyper hyper_of(const std::map<std::string, double>& values);

}  // namespace ampfuse
