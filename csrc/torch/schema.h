// The core's description of its algorithms and storage types, by the names that Python uses.
#pragma once

#include <pybind11/pybind11.h>

#include <map>
#include <string>

#include "core/backend.h"

namespace ampfuse {

// The whole schema, for python/ampfuse/_schema.py.
pybind11::dict schema();

// These raise a ValueError for a name that does not exist.
Algorithm algorithm_of(const std::string& name);
const StorageInfo& storage_of(const std::string& name);
RowHyper hyper_of(Algorithm algorithm, const std::map<std::string, double>& values);
// A number of `on_device` by its name.
const double*& number_on_device(OnDevice& on_device, const std::string& name);

}  // namespace ampfuse
