#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings.h"
#include "tensor_ops.h"

namespace py = pybind11;

namespace ampfuse {

void bind_tensor_ops(py::module_& m) {
  m.def("scale", scale, py::arg("src"), py::arg("dst"), py::arg("scale"),
        py::arg("found_inf") = py::none(),
        "dst = src * scale, one rounding. Sets found_inf where src is not finite.");
  m.def("axpby", axpby, py::arg("x"), py::arg("y"), py::arg("out"), py::arg("a"), py::arg("b"),
        py::arg("found_inf") = py::none(), py::arg("check") = -1,
        "out = a * x + b * y. Sets found_inf where x (0), y (1) or either (-1) is not finite.");
  m.def("unscale", unscale, py::arg("grads"), py::arg("out"), py::arg("inv_scale"),
        py::arg("found_inf") = py::none(),
        "out = grads * inv_scale; out may be grads. Sets found_inf where a result is not finite.");
  m.def("l2norm", l2norm, py::arg("tensors"), py::arg("per_tensor") = false,
        py::arg("inv_scale") = py::none(), py::arg("found_inf") = py::none(),
        R"((norm over all, norm of each or an empty tensor), float32, of tensors * inv_scale.

Sets found_inf where one of these values is not finite.)");
  m.def("join_master", join_master, py::arg("model"), py::arg("remainder"), py::arg("out"),
        "out (float32) = the split master of the weight `model` with its `remainder`, int16.");
  m.def("split_master", split_master, py::arg("master"), py::arg("model"), py::arg("remainder"),
        "Splits `master` (float32) into `model`, rounded, and `remainder`, all laid out alike.");
  m.def("decode_state", decode_state, py::arg("algorithm"), py::arg("state"), py::arg("storage"),
        py::arg("lists"), py::arg("out"),
        "out (float32) = the state, by its place, from quantized values and scales of `storage`.");
  m.def("encode_state", encode_state, py::arg("algorithm"), py::arg("state"), py::arg("value"),
        py::arg("storage"), py::arg("lists"),
        "Quantizes `value` (float32), the state by its place, into the lists of `storage`.");
  m.def(
      "step", step, py::arg("algorithm"), py::arg("grads"), py::arg("params"), py::arg("models"),
      py::arg("states"), py::arg("updates"), py::arg("steps"), py::arg("norm_averages"),
      py::arg("lr_tensor"), py::arg("values"), py::arg("loss_scale"), py::arg("found_inf"),
      R"(One step of an algorithm of `ParamTable` on lists of tensors, states of any type included.

`models` (may be empty) receive the parameters, rounded. `states` are lists in the kernel's order.
`steps` (float32, one for each tensor) counts the steps before this one and is advanced, but for
tensors without elements. `norm_averages` (likewise) is NovoGrad's second moment. `lr_tensor`
(float32, one element or one for each tensor) replaces ``values["lr"]``; for `values` see
`ParamTable.set_hyper`. Gradients are divided by `loss_scale`. Where `found_inf` (float32) is set,
nothing happens.

"lamb_update" advances LAMB's moments and writes the update u into `updates` (which may be `grads`);
``"sgd"`` on u with the rate of each tensor is then its second half. "layerwise" writes the gradient
that LARC makes of each tensor's norms there.)");
  m.def(
      "update_scale", update_scale, py::arg("scale"), py::arg("growth_tracker"),
      py::arg("hysteresis_tracker"), py::arg("found_infs"), py::arg("growth_factor"),
      py::arg("backoff_factor"), py::arg("growth_interval"), py::arg("min_scale"),
      py::arg("max_scale"), py::arg("hysteresis"), py::arg("shared") = std::vector<at::Tensor>(),
      py::arg("dynamic") = true,
      R"(Applies the loss-scale rule to the OR of found_infs, and sets the shared flags if it is 1.

`scale` and the flags are float32, the trackers int32, each one element. An overflow resets
`growth_tracker` and, when it is the `hysteresis`-th, multiplies the scale by `backoff_factor`;
`growth_interval` clean calls in a row multiply it by `growth_factor`, within the limits. With
``dynamic=False`` the scale stays.)");
}

}  // namespace ampfuse
