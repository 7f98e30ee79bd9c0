// The Python module: what was built, what runs, and what else the parts bind.
#include "bindings.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <sstream>
#include <vector>

#include "core/backend.h"
#include "half_ops.h"
#include "memory.h"
#include "nn/half_data.h"
#include "nn/recompute.h"
#include "schema.h"

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

std::vector<std::string> list_of_archs() {
  std::vector<std::string> archs;
  std::istringstream list(cuda_archs());
  for (std::string arch; list >> arch;) archs.push_back(arch);
  return archs;
}

}  // namespace
}  // namespace ampfuse

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace ampfuse;
  use_torch_threads();
  use_torch_allocator();

  m.doc() = R"(ampfuse's compiled core (csrc/torch). Python code reaches it as ``ampfuse._core.C``.

Lists of tensors: strided and dense, on one device, float32, float16 or bfloat16 in any mixture;
``ampfuse.ops`` has the public functions and says more. Nothing here waits for the device.)";
  m.def(
      "cuda_built", [] { return cuda_backend() != nullptr; },
      "Whether the CUDA kernels were built.");
  m.def(
      "cuda_versions",
      [] {
        const CudaVersions found = cuda_versions();
        return std::make_pair(found.runtime, found.driver);
      },
      "Of the CUDA runtime in them and of this machine's driver, as 13020 for 13.2; 0: none.");
  m.def("cuda_archs", list_of_archs, "The architectures they were built for.");
  m.def(
      "cpu_isa", [] { return std::string(cpu_isa()); },
      R"(The instruction set the CPU kernels run on: scalar, avx2, avx512, neon or neon_bf16.

``AMPFUSE_CPU_ISA`` forces one, in the environment before the first use.)");
  m.def("schema", schema,
        "Algorithms, their states and hyper-parameters, and storage types; see _schema.py.");
#if !defined(AMPFUSE_EMULATE_CUDA)
  m.def("half_ops", half_ops,
        "Whether kernels for half types on the CPU stand in for torch's; see ``cpu_half_ops``.");
  m.def("set_half_ops", set_half_ops, py::arg("on"), py::arg("every") = false,
        R"(Register them with torch, for the process, or take them back.

`every`: even for half types for which this CPU has instructions, so that tests reach every kernel.)");
  m.def("autocast_rules", autocast_rules, "Whether autocast has a GPU's rules on the CPU.");
  m.def("set_autocast_rules", set_autocast_rules, py::arg("on"),
        "Register them with torch, for the process, or take them back.");
#endif
  m.def("empty_laid_out_as", empty_laid_out_as, py::arg("like"), py::arg("dtype") = at::kFloat,
        R"(An uninitialized tensor laid out in memory as `like`, to live long.

On a CPU a large one is on huge pages, where the system has them.)");

  m.def(
      "set_half_data",
      [](decltype(HalfData::of) of, decltype(HalfData::widened) widened) {
        half_data() = {std::move(of), std::move(widened)};
      },
      py::arg("of"), py::arg("widened"),
      R"(How ``cross_entropy`` finds the half data of a float32 tensor, and makes such a gradient.

`of`: the half data, or None; `widened`: the float32 tensor that holds it.)");

  py::class_<SavedTensor>(m, "SavedTensor", py::module_local(), "What autograd keeps of a tensor.")
      .def(py::init<const at::Tensor&>(), py::arg("tensor"),
           "Of what batch_norm_act returned nothing is kept but how to make it again.")
      .def("unpack", &SavedTensor::unpack,
           "The tensor, or one with the same bits. RuntimeError: it was changed since.");

#if defined(AMPFUSE_EMULATE_CUDA)
  m.def("launch_count", emulation::launch_count, "Kernels launched so far; for tests.");
  m.def("copy_count", emulation::copy_count, "Copies queued so far; for tests.");
#endif

  bind_tensor_ops(m);
  bind_param_table(m);
}
