// The Python module in parts, each compiled by itself. No maths: names, arguments and docstrings,
// from which buildtools/stub.py makes _C.pyi.
#pragma once

#include <pybind11/pybind11.h>

namespace ampfuse {

void bind_tensor_ops(pybind11::module_& m);
void bind_param_table(pybind11::module_& m);

}  // namespace ampfuse
