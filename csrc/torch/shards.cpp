// Rows that are local shards of parameters spread over processes: torch's DTensor. Autograd knows
// nothing of a shard, so gradients are carried between the two.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

// After Python's own header.
#include <structmember.h>

#include "param_table.h"

namespace py = pybind11;

namespace ampfuse {
namespace {

// A slot of Python's class DTensor. Read where it lies, as a step reads it of every parameter: a
// lookup by name takes ten times as long.
class Slot {
 public:
  explicit Slot(const char* name) {
    const py::object type = py::module_::import("torch.distributed.tensor").attr("DTensor");
    const py::object descriptor = type.attr(name);
    TORCH_CHECK(Py_IS_TYPE(descriptor.ptr(), &PyMemberDescr_Type), "torch's DTensor has no slot ",
                name, "; this ampfuse does not know how to step it");
    offset_ = reinterpret_cast<PyMemberDescrObject*>(descriptor.ptr())->d_member->offset;
  }
  py::handle of(py::handle dtensor) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(dtensor.ptr()) + offset_);
  }

 private:
  Py_ssize_t offset_;
};

py::handle local_of(py::handle dtensor) {
  static const Slot slot("_local_tensor");
  return slot.of(dtensor);
}

py::handle spec_of(py::handle dtensor) {
  static const Slot slot("_spec");
  return slot.of(dtensor);
}

py::object object_of(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

const at::Tensor& tensor_of(py::handle object) { return THPVariable_Unpack(object.ptr()); }

py::object helper(const char* name) {
  return py::module_::import("ampfuse.optim.shards").attr(name);
}

// The local shard of the gradient of a row's DTensor; undefined without one. One that is placed
// otherwise than its parameter is redistributed first, which is a collective.
at::Tensor taken_gradient(Row& row) {
  const at::Tensor& gradient = row.whole.mutable_grad();
  if (!gradient.defined()) return {};
  py::object found = object_of(gradient);
  // FSDP gives all gradients of a parameter one spec.
  if (!spec_of(found).is(row.gradient_spec)) {
    const py::object whole = object_of(row.whole);
    if (!spec_of(found).attr("placements").equal(spec_of(whole).attr("placements"))) {
      found = helper("redistributed")(found, whole);
      row.whole.mutable_grad() = tensor_of(found);
    }
    row.gradient_spec = py::reinterpret_borrow<py::object>(spec_of(found));
  }
  return tensor_of(local_of(found));
}

}  // namespace

// --- the table -----------------------------------------------------------------------------------

bool ParamTable::has_its_shards() const {
  return !sharded_ || std::all_of(rows_.begin(), rows_.end(), [](const Row& row) {
    return !row.whole.defined() || tensor_of(local_of(row.whole_object)).is_same(row.leaf());
  });
}

// Nothing while they are taken: the local shards are then what counts.
void ParamTable::take_shards() {
  if (!sharded_ || took_shards_) return;
  for (Row& row : rows_) {
    if (!row.whole.defined()) continue;
    at::Tensor local = taken_gradient(row);
    row.taken = local.unsafeGetTensorImpl();
    row.leaf().mutable_grad() = std::move(local);
  }
  took_shards_ = true;
}

void ParamTable::give_shards() {
  if (!took_shards_) return;
  for (Row& row : rows_) {
    if (!row.whole.defined()) continue;
    at::Tensor& local = row.leaf().mutable_grad();
    if (!local.defined()) {
      row.whole.mutable_grad().reset();
    } else if (local.unsafeGetTensorImpl() != row.taken) {
      const py::object placed = helper("placed_as")(row.whole_object, object_of(local));
      row.whole.mutable_grad() = tensor_of(placed);
    }
    local.reset();  // or it would outlive the DTensor's
  }
  took_shards_ = false;
}

void ParamTable::set_reduce(Reduce reduce, bool by_row) {
  reduce_ = std::move(reduce);
  reduces_rows_ = by_row;
}

void ParamTable::reduce(bool gradients, bool params) {
  if (!reduce_) return;
  std::vector<at::Tensor> norms, largest;
  if (gradients && known_.row_norms) norms.push_back(norms_[kGradNorm]);
  if (gradients && needs_row_norms()) largest.push_back(norms_[kGradLargest]);
  if (params) norms.push_back(norms_[kParamNorm]);
  reduce_(gradients, norms, largest);
}

}  // namespace ampfuse
