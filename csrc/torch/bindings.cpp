// The Python module. No maths: names, arguments and docstrings; the types are those of _C.pyi.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <sstream>
#include <vector>

#include "core/algorithms.h"
#include "core/backend.h"
#include "half_ops.h"
#include "memory.h"
#include "nn/recompute.h"
#include "objects.h"
#include "param_table.h"
#include "tensor_ops.h"

#if defined(AMPFUSE_EMULATE_CUDA)
#include <cuda_runtime.h>
#endif

namespace py = pybind11;

namespace ampfuse {
namespace {

// The CPU kernels run on torch's own threads, so torch.set_num_threads holds for them too.
void use_torch_threads() {
  set_parallel_for(
      [](int64_t count, const std::function<void(int64_t, int64_t)>& body) {
        at::parallel_for(0, count, 1, body);
      },
      [] { return at::in_parallel_region() ? 1 : at::get_num_threads(); });
}

// Device memory comes from torch's caching allocator, on the current device and stream.
void use_torch_allocator() {
  set_device_allocator([](size_t bytes) {
#if defined(AMPFUSE_EMULATE_CUDA)
    const at::Device device(at::kCPU);
#else
    const at::Device device(at::kCUDA);
#endif
    const auto options = at::TensorOptions().dtype(at::kByte).device(device);
    at::Tensor memory = at::empty({int64_t(bytes)}, options);
    void* data = memory.data_ptr();
    return std::shared_ptr<void>(data, [memory](void*) {});
  });
}

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

std::map<std::string, std::vector<std::string>> algorithm_states() {
  std::map<std::string, std::vector<std::string>> states;
  for (const AlgorithmInfo& info : algorithms())
    states[info.name] = {info.states.begin(), info.states.end()};
  return states;
}

std::vector<std::string> packable_algorithms() {
  std::vector<std::string> names;
  for (const AlgorithmInfo& info : algorithms()) {
    if (info.packable) names.push_back(info.name);
  }
  return names;
}

std::vector<std::string> cuda_archs() {
  std::vector<std::string> archs;
  std::istringstream list(AMPFUSE_CUDA_ARCHS);
  for (std::string arch; list >> arch;) archs.push_back(arch);
  return archs;
}

}  // namespace
}  // namespace ampfuse

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace ampfuse;
  use_torch_threads();
  use_torch_allocator();

  m.doc() = "ampfuse's compiled core.";
  m.def(
      "cuda_built", [] { return cuda_backend() != nullptr; },
      "Whether the CUDA kernels were built.");
  m.def("cuda_archs", cuda_archs, "The architectures they were built for.");
  m.def(
      "cpu_isa", [] { return std::string(cpu_isa()); },
      "The instruction set the CPU kernels run on.");
  m.def(
      "torch_version", [] { return std::string(AMPFUSE_TORCH_VERSION); },
      "The torch this was built for.");
#if !defined(AMPFUSE_EMULATE_CUDA)
  m.def("half_ops", half_ops, "Whether kernels for half types on the CPU stand in for torch's.");
  m.def("set_half_ops", set_half_ops, py::arg("on"), py::arg("every") = false,
        "Registers them with torch or takes them back; every: for fast half types too.");
#endif

  m.def("scale", scale, py::arg("src"), py::arg("dst"), py::arg("scale"),
        py::arg("found_inf") = py::none(),
        "dst = src * scale, one rounding. Sets found_inf where src is not finite.");
  m.def("axpby", axpby, py::arg("x"), py::arg("y"), py::arg("out"), py::arg("a"), py::arg("b"),
        py::arg("found_inf") = py::none(), py::arg("check") = -1,
        "out = a * x + b * y. Sets found_inf where x (0), y (1) or either (-1) is not finite.");
  m.def("copy", copy, py::arg("src"), py::arg("dst"), "dst = src, cast.");
  m.def("unscale", unscale, py::arg("grads"), py::arg("out"), py::arg("inv_scale"),
        py::arg("found_inf") = py::none(),
        "out = grads * inv_scale; out may be grads. Sets found_inf where a result is not finite.");
  m.def("l2norm", l2norm, py::arg("tensors"), py::arg("per_tensor") = false,
        py::arg("inv_scale") = py::none(), py::arg("found_inf") = py::none(),
        "(norm over all, norm of each or an empty tensor), float32, of tensors * inv_scale.");
  m.def("algorithms", algorithm_states,
        "{name of an algorithm: names of its states, in the order of ParamTable.set_states}.");
  m.def("packable_algorithms", packable_algorithms, "Those whose states may be codes of 8 bits.");
  m.def("join_master", join_master, py::arg("model"), py::arg("rest"), py::arg("out"),
        "out (float32) = the split master whose weight is model and whose rest is rest (int16).");
  m.def("split_master", split_master, py::arg("master"), py::arg("model"), py::arg("rest"),
        "The other way: model is written too.");
  m.def("decode_state", decode_state, py::arg("algorithm"), py::arg("state"), py::arg("codes"),
        py::arg("scales"), py::arg("out"),
        "out (float32) = the state, by its place, that uint8 codes with float32 scales hold.");
  m.def("encode_state", encode_state, py::arg("algorithm"), py::arg("state"), py::arg("value"),
        py::arg("codes"), py::arg("scales"), "The other way.");
  m.attr("block") = int(kBlock);
  m.def("step", step, py::arg("algorithm"), py::arg("grads"), py::arg("params"), py::arg("models"),
        py::arg("states"), py::arg("updates"), py::arg("steps"), py::arg("norm_averages"),
        py::arg("lr_tensor"), py::arg("values"), py::arg("loss_scale"), py::arg("found_inf"),
        "One step of an algorithm on lists of tensors.");
  m.def("layerwise", layerwise, py::arg("grads"), py::arg("params"), py::arg("lr"),
        py::arg("lr_tensor"), py::arg("weight_decay"), py::arg("trust_coefficient"), py::arg("eps"),
        py::arg("clip"),
        "grads = ratio * (grads + weight_decay * params), with LARC's ratio of each tensor.");
  m.def(
      "update_scale", update_scale, py::arg("scale"), py::arg("growth_tracker"),
      py::arg("hysteresis_tracker"), py::arg("found_infs"), py::arg("growth_factor"),
      py::arg("backoff_factor"), py::arg("growth_interval"), py::arg("min_scale"),
      py::arg("max_scale"), py::arg("hysteresis"), py::arg("shared") = std::vector<at::Tensor>(),
      py::arg("dynamic") = true,
      "Applies the loss-scale rule to the OR of found_infs, and sets the shared flags if it is 1.");

  py::class_<SavedTensor>(m, "SavedTensor", py::module_local(), "See nn/recompute.h.")
      .def(py::init<const at::Tensor&>(), py::arg("tensor"))
      .def("unpack", &SavedTensor::unpack);

#if defined(AMPFUSE_EMULATE_CUDA)
  m.def("launch_count", emulation::launch_count, "Kernels launched so far; for tests.");
  m.def("copy_count", emulation::copy_count, "Copies queued so far; for tests.");
#endif

  m.def("empty_laid_out_as", empty_laid_out_as, py::arg("like"), py::arg("dtype") = at::kFloat,
        "An uninitialized tensor laid out in memory as `like`, to live long.");
  m.def("flattened", flattened, py::arg("containers"), "The objects that containers hold.");
  m.def("holds", holds, py::arg("containers"), py::arg("known"),
        "Whether containers hold the very objects of known, in that order.");

  // Local to the module: the tests load it twice, once with the emulated CUDA backend.
  py::class_<DictVersions>(m, "DictVersions", py::module_local(),
                           "Versions of a dict of dicts; see objects.h.")
      .def(py::init<py::handle>(), py::arg("dicts"))
      .def("hold", &DictVersions::hold, py::arg("dicts"));

  py::class_<ParamTable>(m, "ParamTable", py::module_local(),
                         "The rows of one optimizer; see param_table.h.")
      .def(py::init<const std::string&, at::Device>(), py::arg("algorithm"), py::arg("device"))
      .def("add_row", &ParamTable::add_row, py::arg("param"), py::arg("model"), py::arg("name"),
           py::arg("model_version") = 0, py::arg("at_random") = false,
           py::arg("whole") = py::none(), py::arg("origin") = 0)
      .def("has_its_shards", &ParamTable::has_its_shards)
      .def(
          "set_gather",
          [](ParamTable& table, const py::function& gather, std::optional<at::Tensor> elsewhere) {
            table.set_gather(gather.cast<ParamTable::Gather>(), elsewhere);
          },
          py::arg("gather"), py::arg("counted_elsewhere"))
      .def("__len__", &ParamTable::rows)
      .def("param", &ParamTable::param, py::arg("row"))
      .def("model", &ParamTable::model, py::arg("row"))
      .def("has_models", &ParamTable::has_models)
      .def("name", &ParamTable::name, py::arg("row"))
      .def("set_states", &ParamTable::set_states, py::arg("row"), py::arg("states"),
           py::arg("scales") = py::tuple(), py::arg("average") = py::none())
      .def("steps", &ParamTable::steps)
      .def("norm_averages", &ParamTable::norm_averages)
      .def("set_hyper", &ParamTable::set_hyper, py::arg("begin"), py::arg("end"),
           py::arg("lr_tensor"), py::arg("values"),
           py::arg("schedule") = std::map<std::string, at::Tensor>())
      .def("accept_model_weights", &ParamTable::accept_model_weights)
      .def("refresh_masters", &ParamTable::refresh_masters, py::arg("all") = false)
      .def("publish_masters", &ParamTable::publish_masters)
      .def("begin_backward", on_shards(&ParamTable::begin_backward))
      .def("end_backward", on_shards(&ParamTable::end_backward), py::arg("scale"), py::arg("check"))
      .def("mark_backward", on_shards(&ParamTable::mark_backward), py::arg("scale"))
      .def("accumulated", &ParamTable::accumulated, py::arg("row"), py::arg("make") = false)
      .def("cancel_backward", on_shards(&ParamTable::cancel_backward))
      .def("materialize", on_shards(&ParamTable::materialize))
      .def("zero_grad", on_shards(&ParamTable::zero_grad), py::arg("set_to_none"))
      .def("collect", &ParamTable::collect, py::arg("scale"), py::arg("unscales"),
           py::arg("unscales_half") = false)
      .def("measure", &ParamTable::measure)
      .def("update", &ParamTable::update, py::kw_only(), py::arg("found_inf"), py::arg("max_norm"),
           py::arg("inspect"), py::arg("skip_nonfinite"), py::arg("meter") = py::none())
      .def("new_meter", &ParamTable::new_meter, py::arg("changed"))
      .def("decide", &ParamTable::decide, py::kw_only(), py::arg("found_inf"), py::arg("max_norm"),
           py::arg("inspect"), py::arg("skip_nonfinite"))
      .def("finish_step", &ParamTable::finish_step)
      .def("mark_stepped", &ParamTable::mark_stepped)
      .def("fingerprint",
           [](const ParamTable& table) {
             const std::vector<int64_t> found = table.fingerprint();
             return py::bytes(reinterpret_cast<const char*>(found.data()),
                              found.size() * sizeof(int64_t));
           })
      .def("state_field", &ParamTable::state_field, py::arg("name"));
}
