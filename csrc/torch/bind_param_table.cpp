#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings.h"
#include "param_table.h"

namespace py = pybind11;

namespace ampfuse {
namespace {

// A call that writes gradients, between taking those of DTensors and giving them back.
template <class Result, class... Args>
auto on_shards(Result (ParamTable::*method)(Args...)) {
  struct Taken {
    ParamTable& table;
    ~Taken() noexcept(false) { table.give_shards(); }
  };
  return [method](ParamTable& table, Args... args) {
    table.take_shards();
    const Taken taken{table};
    return (table.*method)(args...);
  };
}

void set_gather(ParamTable& table, const py::function& gather,
                std::optional<at::Tensor> counted_elsewhere) {
  table.set_gather(gather.cast<ParamTable::Gather>(), counted_elsewhere);
}

py::bytes fingerprint(const ParamTable& table) {
  const std::vector<int64_t> found = table.fingerprint();
  return py::bytes(reinterpret_cast<const char*>(found.data()), found.size() * sizeof(int64_t));
}

void bind_rows(py::class_<ParamTable>& table) {
  table
      .def(py::init<const std::string&, at::Device>(), py::arg("algorithm"), py::arg("device"),
           R"(`algorithm`: one of `schema`, such as "adam" (also AdamW), or "none".

With "none" the table keeps gradients only, for an optimizer that steps by itself.)")
      .def("add_row", &ParamTable::add_row, py::arg("param"), py::arg("model"), py::arg("name"),
           py::arg("model_version") = 0, py::arg("at_random") = false,
           py::arg("whole") = py::none(), py::arg("origin") = 0,
           R"(Appends a row and returns its index.

`model` is the half weight beside the FP32 master `param`, or beside the remainder of a split one,
int16; `model_version` the version of it that the master has followed; `at_random`: a BF16 parameter
is rounded stochastically; `whole`: the DTensor whose local tensor `model` is, or without it
`param`, from its element `origin` on. RuntimeError or TypeError, naming the row, for tensors that
the kernels cannot walk.)")
      .def("remember_params", &ParamTable::remember_params, py::arg("groups"),
           "Rows are what an optimizer's ``param_groups`` hold, now.")
      .def("has_params", &ParamTable::has_params, py::arg("groups"),
           "Whether they hold the same still, and each DTensor its local tensor.")
      .def("remember_states", &ParamTable::remember_states, py::arg("states"),
           "`set_states` was called with what an optimizer's ``state`` holds; `collect` compares.")
      .def("has_states", &ParamTable::has_states, py::arg("states"), "Whether it holds the same.")
      .def("set_gather", set_gather, py::arg("gather"), py::arg("counted_elsewhere"),
           R"(Have steps be decided with other ranks: `gather` returns what all call it with.

It is called with bytes, uint8 on the device, after each inspection that counts, and before an
update that needs norms of rows. `counted_elsewhere`, bool [rows]: rows that another rank has alike,
and adds the norms of.)")
      .def("__len__", &ParamTable::rows)
      .def("param", &ParamTable::param, py::arg("row"), "What the row's step works on.")
      .def("model", &ParamTable::model, py::arg("row"), "The half weight beside a master.")
      .def("has_models", &ParamTable::has_models, "Whether some row has one.")
      .def("name", &ParamTable::name, py::arg("row"), "What messages call it.")
      .def("set_states", &ParamTable::set_states, py::arg("row"), py::arg("states"),
           py::arg("storage") = "fp32", py::arg("average") = py::none(),
           R"(The row's states in the kernel's order, at most three, in a storage type of `schema`.

Of each the tensors of that type: elements laid out as the parameter and, where the type has blocks,
their float32 scales. None: the row has no states yet, and `collect` says so when it has a gradient.
`average` (float32): the moving average of the parameter.)")
      .def("steps", &ParamTable::steps,
           "The step counts: float32, shape (rows,), on the device; rows' counts are views of it.")
      .def("norm_averages", &ParamTable::norm_averages,
           "NovoGrad's averages of gradient norms: float32, shape (rows,), on the device.")
      .def(
          "set_hyper", &ParamTable::set_hyper, py::arg("begin"), py::arg("end"),
          py::arg("lr_tensor"), py::arg("values"),
          py::arg("schedule") = std::map<std::string, at::Tensor>(),
          R"(Hyper-parameters of rows begin..end, by the names of `schema`; others are zero and off.

`lr_tensor` (float32, device) replaces lr. `schedule` (float64 vectors of one length on the device)
replaces both: element ``schedule_step`` of the step's state holds for the next step that is
applied, the last one after its end. ValueError: another name, unequal lengths.)")
      .def("accept_model_weights", &ParamTable::accept_model_weights,
           "The model weights are what the masters round to, now.")
      .def("refresh_masters", &ParamTable::refresh_masters, py::arg("all") = false,
           R"(Masters take the elements that somebody edited in the model since our last write.

An edit is seen by the weight's version and memory; `all` looks for it in every weight.)")
      .def("publish_masters", &ParamTable::publish_masters, "Model weights = masters, rounded.");
}

void bind_gradients(py::class_<ParamTable>& table) {
  table
      .def("begin_backward", on_shards(&ParamTable::begin_backward),
           "Put earlier gradients away, so that a backward pass brings new ones only.")
      .def("end_backward", on_shards(&ParamTable::end_backward), py::arg("scale"), py::arg("check"),
           R"(Take in a pass whose gradients carry `scale`; with `check`, inspect it.

Returns whether it left a gradient, or the delayed one before it did.)")
      .def("mark_backward", on_shards(&ParamTable::mark_backward), py::arg("scale"),
           "Take in a pass, but leave its gradients scaled.")
      .def(
          "accumulated", &ParamTable::accumulated, py::arg("row"), py::arg("make") = false,
          R"(In a backward pass: what earlier ones left, float32 and unscaled, to be edited in place.

Who edits it says by ``found_inf`` whether it is finite. None where they left nothing; zeros then
with `make`.)")
      .def("cancel_backward", on_shards(&ParamTable::cancel_backward),
           "Drop what a failed pass left.")
      .def("materialize", on_shards(&ParamTable::materialize),
           "Put FP32 unscaled gradients into the masters' ``.grad``.")
      .def("zero_grad", on_shards(&ParamTable::zero_grad), py::arg("set_to_none"),
           "Drop all gradients, or fill them with zeros.");
}

void bind_step(py::class_<ParamTable>& table) {
  table
      .def("collect", &ParamTable::collect, py::arg("scale"), py::arg("unscales"),
           py::arg("unscales_half") = false, py::arg("groups") = py::none(),
           py::arg("states") = py::none(),
           R"(Find and check the gradients of a step; the rows that have one but no state yet.

None where `groups` or `states`, if given, are not what `remember_params` and `remember_states` saw.
`scale` is what gradients outside scale_loss carry; with `unscales` the update writes those in FP32
back without it, with `unscales_half` the others too. Nothing has changed when this raises.)")
      .def("measure", &ParamTable::measure,
           "Inspect the collected gradients, unless that was done already.")
      .def("new_meter", &ParamTable::new_meter, py::arg("changed"),
           "Buffers for `update` to meter into; `changed`: with bits of the changed weights.")
      .def("update", &ParamTable::update, py::kw_only(), py::arg("found_inf"), py::arg("max_norm"),
           py::arg("inspect"), py::arg("skip_nonfinite"), py::arg("meter") = py::none(),
           "The step over what `collect` found: decide, and unless that says skip, update.")
      .def("decide", &ParamTable::decide, py::kw_only(), py::arg("found_inf"), py::arg("max_norm"),
           py::arg("inspect"), py::arg("skip_nonfinite"),
           "Decide without an update, for an optimizer that steps by itself.")
      .def("finish_step", &ParamTable::finish_step, "The gradients are spent.")
      .def("mark_stepped", &ParamTable::mark_stepped,
           R"(A captured graph has stepped the rows.

The versions of their tensors move, and masters and model weights count as agreeing.)")
      .def("fingerprint", fingerprint,
           R"(Three int64 a row, to be compared with earlier ones.

The addresses of parameter and model weight (0 for none), and whether the weight, or else the
parameter, requires a gradient.)")
      .def("state_field", &ParamTable::state_field, py::arg("name"),
           "A 0-dim view of a field of the step's state on the device; ValueError: no such field.");
}

}  // namespace

void bind_param_table(py::module_& m) {
  // Local to the module: the tests load it twice, once with the emulated CUDA backend.
  py::class_<ParamTable> table(m, "ParamTable", py::module_local(),
                               R"(The rows of one optimizer; see param_table.h.

A row is a parameter with its half model weight, if it is a master, its gradients, states and step
count. The table finds and checks gradients and runs the fused step over all rows.)");
  bind_rows(table);
  bind_gradients(table);
  bind_step(table);
}

}  // namespace ampfuse
