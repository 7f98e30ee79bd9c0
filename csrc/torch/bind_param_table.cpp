#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings.h"
#include "gradient_ledger.h"
#include "inspector.h"
#include "masters.h"
#include "param_table.h"
#include "step_plan.h"

namespace py = pybind11;

namespace ampfuse {
namespace {

// Python's ParamTable: the rows, and the classes that work on them.
struct Bound : ParamTable {
  using ParamTable::ParamTable;
  Masters masters{*this};
  Inspector inspector{*this};
  GradientLedger gradients{*this, inspector};
  StepPlan plan{*this, inspector, gradients};
};

using Class = py::class_<Bound>;

py::bytes fingerprint(Bound& table) {
  std::vector<int64_t> found;
  found.reserve(3 * table.rows().size());
  for (const Row& row : table.rows()) {
    found.push_back(reinterpret_cast<int64_t>(row.param.data_ptr()));
    found.push_back(row.model.defined() ? reinterpret_cast<int64_t>(row.model.data_ptr()) : 0);
    found.push_back(row.leaf().requires_grad());
  }
  return py::bytes(reinterpret_cast<const char*>(found.data()), found.size() * sizeof(int64_t));
}

void set_gather(Inspector& inspector, const py::function& gather,
                std::optional<at::Tensor> counted_elsewhere) {
  inspector.set_gather(gather.cast<Inspector::Gather>(), counted_elsewhere);
}

std::optional<at::Tensor> model(Bound& table, int64_t index) {
  const at::Tensor& model = table.rows().at(index).model;
  return model.defined() ? std::optional(model) : std::nullopt;
}

void bind_table(Class& table) {
  table
      .def(py::init<const std::string&, at::Device>(), py::arg("algorithm"), py::arg("device"),
           R"(`algorithm`: one of `schema`, such as "adam" (also AdamW), or "none".

With "none" the table keeps gradients only, for an optimizer that steps by itself.)")
      .def("add_row", &Bound::add_row, py::arg("param"), py::arg("model"), py::arg("name"),
           py::arg("model_version") = 0, py::arg("at_random") = false,
           py::arg("whole") = py::none(), py::arg("origin") = 0, py::arg("algorithm") = py::none(),
           R"(Appends a row and returns its index.

`model` is the half weight of the FP32 master `param`, or of the remainder of a split one, int16;
`model_version` the version of it that the master has followed; `at_random`: a BF16 parameter
is rounded stochastically; `whole`: the DTensor whose local tensor `model` is, or without it
`param`, from its element `origin` on; `algorithm`: the row's, if not the table's. RuntimeError or
TypeError, naming the row, for tensors that the kernels cannot walk.)")
      .def(
          "remember", &Bound::remember, py::arg("groups") = py::none(),
          py::arg("states") = py::none(),
          R"(Rows are what an optimizer's ``param_groups`` hold, now; and `set_states` was called with
what its ``state`` holds.)")
      .def("matches", &Bound::matches, py::arg("groups") = py::none(),
           py::arg("states") = py::none(),
           "Whether they still hold the same, and each DTensor its local tensor.")
      .def("__len__", [](Bound& table) { return table.rows().size(); })
      .def(
          "param", [](Bound& table, int64_t row) { return table.rows().at(row).param; },
          py::arg("row"), "What the row's step works on.")
      .def("model", model, py::arg("row"), "The half weight of a master.")
      .def(
          "name", [](Bound& table, int64_t row) { return table.rows().at(row).name; },
          py::arg("row"), "What messages call it.")
      .def("set_states", &Bound::set_states, py::arg("row"), py::arg("states"),
           py::arg("storage") = "fp32", py::arg("average") = py::none(),
           R"(The row's states in the kernel's order, at most three, in a storage type of `schema`.

Each has the tensors of that type: elements laid out as the parameter and, if the type has blocks,
their float32 scales. None: the row has no states yet, and `collect` reports it once it has a
gradient.
`average` (float32): the moving average of the parameter.)")
      .def("steps", &Bound::steps,
           "The step counts: float32, shape (rows,), on the device; rows' counts are views of it.")
      .def("norm_averages", &Bound::norm_averages,
           "NovoGrad's averages of gradient norms: float32, shape (rows,), on the device.")
      .def(
          "set_hyper", &Bound::set_hyper, py::arg("begin"), py::arg("end"), py::arg("lr_tensor"),
          py::arg("values"), py::arg("on_device") = std::map<std::string, at::Tensor>(),
          R"(Hyper-parameters of rows begin..end, by the names of `schema`; others are zero and off.

`lr_tensor` (float32) replaces lr. `on_device` (float64, one element each) replaces numbers of
`values`, and `lr_tensor`: a step reads what it holds when it runs. ValueError: another name.)")
      .def("set_scratch", &Bound::set_scratch, py::arg("scratch"),
           R"(Memory of rows that the stages of a step pass on, in the parameter's layout.

It has any floating type; the caller keeps it alive. ValueError: the algorithm has none.)")
      .def("fingerprint", fingerprint,
           R"(Three int64 a row, to be compared with earlier ones.

The addresses of parameter and model weight (0 for none), and whether the weight, or else the
parameter, requires a gradient.)")
      .def_readonly("masters", &Bound::masters, "FP32 masters and their half weights.")
      .def_readonly("inspector", &Bound::inspector, "What inspections found.")
      .def_readonly("gradients", &Bound::gradients, "Gradients between two steps.")
      .def_readonly("plan", &Bound::plan, "One step.");
}

void bind_masters(py::module_& m) {
  py::class_<Masters>(m, "Masters", py::module_local(), "A table's masters; see masters.h.")
      .def("exist", &Masters::exist, "Whether some row has one.")
      .def("accept_model_weights", &Masters::accept_model_weights,
           "The model weights are what the masters round to, now.")
      .def("refresh", py::overload_cast<bool>(&Masters::refresh), py::arg("all") = false,
           R"(Masters take the elements that were edited in the model since our last write.

An edit is detected by the weight's version and memory; `all` looks for it in every weight.)")
      .def("publish", &Masters::publish, "Model weights = masters, rounded.");
}

void bind_inspector(py::module_& m) {
  py::class_<Inspector>(m, "Inspector", py::module_local(),
                        "What a table's inspections found of its gradients; see inspector.h.")
      .def("state_field", &Inspector::state_field, py::arg("name"),
           "A 0-dim view of a field of the step's state on the device; ValueError: no such field.")
      .def("set_gather", set_gather, py::arg("gather"), py::arg("counted_elsewhere"),
           R"(Decide steps together with other ranks: `gather` returns what all call it with.

It is called with bytes, uint8 on the device, after each inspection that counts, and before an
update that needs norms of rows. `counted_elsewhere`, bool [rows]: rows that another rank has alike,
and adds the norms of.)");
}

void bind_gradients(py::module_& m) {
  py::class_<GradientLedger>(m, "GradientLedger", py::module_local(),
                             "The passes between two steps of a table; see gradient_ledger.h.")
      .def("check", &GradientLedger::check,
           "RuntimeError or TypeError, naming the row, for a gradient that no kernel can read.")
      .def("begin_backward", &GradientLedger::begin_backward,
           "Put earlier gradients away, so that a backward pass brings new ones only.")
      .def("end_backward", &GradientLedger::end_backward, py::arg("scale"), py::arg("check"),
           py::arg("delay") = false,
           R"(Take in a pass whose gradients carry `scale`; with `check`, inspect it.

With `delay` the next pass reports its overflow too. Returns whether it left a gradient, or the
delayed one before it did.)")
      .def_property_readonly("is_delayed", &GradientLedger::is_delayed,
                             "Whether the next pass reports the overflow of the last one.")
      .def(
          "accumulated", &GradientLedger::accumulated, py::arg("row"), py::arg("make") = false,
          R"(In a backward pass: what earlier ones left, float32 and unscaled, to be edited in place.

Code that edits it reports by ``found_inf`` whether it is finite. None if they left nothing, or zeros
with `make`.)")
      .def("has_gradient_from_outside", &GradientLedger::has_gradient_from_outside,
           "Whether a gradient came from outside a pass, as from a backward() of the user's.")
      .def("cancel_backward", &GradientLedger::cancel_backward, "Drop what a failed pass left.")
      .def("materialize", &GradientLedger::materialize, py::arg("all") = false,
           R"(Put FP32 unscaled gradients into the ``.grad`` of masters and their weights.

Only those that carry a scale, or `all`.)")
      .def("before_read", &GradientLedger::before_read, py::arg("param"),
           "The ``.grad`` of a master or of its weight is about to be read.")
      .def("assign", &GradientLedger::assign, py::arg("param"), py::arg("value"),
           R"(``param.grad = value``, of a master or of its weight: what the step uses, unscaled.

RuntimeError: of another shape or on another device than the parameter.)")
      .def("zero_grad", &GradientLedger::zero_grad, py::arg("set_to_none"),
           "Drop all gradients, or fill them with zeros.");
}

void bind_plan(py::module_& m) {
  py::class_<StepPlan>(m, "StepPlan", py::module_local(), "A table's step; see step_plan.h.")
      .def("collect", &StepPlan::collect, py::arg("scale"), py::arg("write_back"),
           py::arg("write_back_half") = false, py::arg("groups") = py::none(),
           py::arg("states") = py::none(),
           R"(Find and check the gradients of a step; the rows that have one but no state yet.

None where `groups` or `states`, if given, are not what the table remembers.
`scale` is what gradients outside scale_loss carry; with `write_back` the update writes those in FP32
back without it, with `write_back_half` the others too. No value has changed when this raises.)")
      .def("measure", &StepPlan::measure,
           "Inspect the collected gradients, unless that was done already.")
      .def("new_meter", &StepPlan::new_meter, py::arg("changed"),
           "Buffers for `update` to meter into; `changed`: with bits of the changed weights.")
      .def(
          "update",
          [](StepPlan& plan, const std::optional<at::Tensor>& found_inf, double max_norm,
             bool inspect, bool skip_nonfinite, double skip_spikes,
             const std::optional<std::vector<at::Tensor>>& meter,
             const std::optional<StepPlan::Between>& between) {
            return plan.update({found_inf, max_norm, inspect, skip_nonfinite, skip_spikes}, meter,
                               between);
          },
          py::kw_only(), py::arg("found_inf"), py::arg("max_norm"), py::arg("inspect"),
          py::arg("skip_nonfinite"), py::arg("skip_spikes") = 0.0, py::arg("meter") = py::none(),
          py::arg("between") = py::none(),
          R"(The step over what `collect` found: decide, and unless that says skip, update.

`between` is called with the rows whose steps have two stages, between these, and works on their
scratch memory: nothing has changed if it raises. What it returns is called for the end, after other
rows are updated. Neither is called where the CPU skips; True then.)")
      .def(
          "decide",
          [](StepPlan& plan, const std::optional<at::Tensor>& found_inf, double max_norm,
             bool inspect, bool skip_nonfinite, double skip_spikes) {
            plan.decide({found_inf, max_norm, inspect, skip_nonfinite, skip_spikes});
          },
          py::kw_only(), py::arg("found_inf"), py::arg("max_norm"), py::arg("inspect"),
          py::arg("skip_nonfinite"), py::arg("skip_spikes") = 0.0,
          "Decide without an update, for an optimizer that steps by itself.")
      .def_readonly("knew_norm", &StepPlan::knew_norm,
                    "Whether the last decision knew the norm of its gradients.")
      .def("finish_step", &StepPlan::finish_step, "The gradients are consumed.")
      .def("mark_stepped", &StepPlan::mark_stepped,
           R"(A captured graph has stepped the rows.

The versions of their tensors move, and masters and model weights count as agreeing.)");
}

}  // namespace

void bind_param_table(py::module_& m) {
  // Local to the module: the tests load it twice, once with the emulated CUDA backend.
  bind_masters(m);
  bind_inspector(m);
  bind_gradients(m);
  bind_plan(m);
  Class table(m, "ParamTable", py::module_local(),
              R"(The rows of one optimizer; see param_table.h.

A row is a parameter with its half model weight, if it is a master, its gradients, states and step
count.)");
  bind_table(table);
}

}  // namespace ampfuse
