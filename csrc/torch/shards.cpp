#include "shards.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <exception>

// After Python's own header.
#include <structmember.h>

namespace py = pybind11;

namespace ampfuse {
namespace {

py::handle dtensor_type() {
  static const py::handle type =
      py::object(py::module_::import("torch.distributed.tensor").attr("DTensor")).release();
  return type;
}

// A slot of Python's class DTensor, read in place because a step reads it for every parameter: a
// lookup by name takes ten times as long.
class Slot {
 public:
  explicit Slot(const char* name) {
    const py::object descriptor = dtensor_type().attr(name);
    TORCH_CHECK(Py_IS_TYPE(descriptor.ptr(), &PyMemberDescr_Type), "torch's DTensor has no slot ",
                name, "; this ampfuse does not know how to step it");
    offset_ = reinterpret_cast<PyMemberDescrObject*>(descriptor.ptr())->d_member->offset;
  }
  PyObject** at(py::handle dtensor) const {
    return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(dtensor.ptr()) + offset_);
  }

 private:
  Py_ssize_t offset_;
};

PyObject** local_slot_of(py::handle dtensor) {
  static const Slot slot("_local_tensor");
  return slot.at(dtensor);
}

py::handle local_of(py::handle dtensor) { return *local_slot_of(dtensor); }

py::handle spec_of(py::handle dtensor) {
  static const Slot slot("_spec");
  return *slot.at(dtensor);
}

py::object object_of(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

// The Python object of a tensor, if there is one; a DTensor has one as long as it lives. Counting
// references to it would take longer than everything else that is done here.
py::handle python_object_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
}

bool is_dtensor(py::handle object) {
  auto* const type = reinterpret_cast<PyTypeObject*>(dtensor_type().ptr());
  return object && PyObject_TypeCheck(object.ptr(), type);
}

const at::Tensor& tensor_of(py::handle object) { return THPVariable_Unpack(object.ptr()); }

py::object helper(const char* name) {
  return py::module_::import("ampfuse.optim.sharding").attr(name);
}

// The gradient of a row's DTensor as Python has it; null without one. If its placement differs from
// its parameter's, it is redistributed first, which is a collective.
py::handle gradient_object(Row& row) {
  const at::Tensor& gradient = row.shard.whole.mutable_grad();
  if (!gradient.defined()) return nullptr;
  const py::handle object = python_object_of(gradient);
  TORCH_CHECK_TYPE(is_dtensor(object) && local_of(object), "the gradient of ", row.name,
                   " is not a DTensor, but the parameter is. Make it one with the placements of "
                   "the parameter, by "
                   "DTensor.from_local or distribute_tensor.");
  // FSDP gives all gradients of a parameter one spec.
  if (const py::handle spec = spec_of(object); !spec.is(row.shard.gradient_spec)) {
    static const py::handle placements = PyUnicode_InternFromString("placements");
    const py::handle whole = row.shard.whole_object;
    if (!spec.attr(placements).equal(spec_of(whole).attr(placements))) {
      const py::object placed = helper("redistributed")(object_of(gradient), whole);
      row.shard.whole.mutable_grad() = tensor_of(placed);
    }
    row.shard.gradient_spec =
        py::reinterpret_borrow<py::object>(spec_of(python_object_of(gradient)));
  }
  return python_object_of(gradient);
}

}  // namespace

bool is_shard_of(py::handle dtensor, const at::Tensor& local) {
  return is_dtensor(dtensor) && local_of(dtensor) && tensor_of(local_of(dtensor)).is_same(local);
}

bool have_their_shards(const std::vector<Row>& rows) {
  return std::all_of(rows.begin(), rows.end(), [](const Row& row) {
    return !row.shard.whole.defined() || is_shard_of(row.shard.whole_object, row.leaf());
  });
}

void borrow_local_gradients(std::vector<Row>& rows) {
  static const at::Tensor none;
  // Seven pointers in a row lead to a gradient's shard, most of them in cold memory: each scan
  // fetches the memory that the next one begins with.
  const auto scan = [&](const auto& fetch) {
    for (const Row& row : rows) {
      if (!row.shard.whole.defined()) continue;
      const at::Tensor& gradient = row.shard.whole.mutable_grad();
      if (gradient.defined()) fetch(gradient);
    }
  };
  scan([](const at::Tensor& gradient) {
    __builtin_prefetch(gradient.unsafeGetTensorImpl()->pyobj_slot());
  });
  scan([](const at::Tensor& gradient) {
    __builtin_prefetch(local_slot_of(python_object_of(gradient)));
  });
  scan([](const at::Tensor& gradient) {
    const py::handle object = python_object_of(gradient);
    if (is_dtensor(object)) __builtin_prefetch(&tensor_of(local_of(object)));
  });
  for (Row& row : rows) {
    if (!row.shard.whole.defined()) continue;
    const py::handle gradient = gradient_object(row);
    row.shard.borrowed = gradient ? &tensor_of(local_of(gradient)) : &none;
  }
}

void Row::set_gradient(const at::Tensor& gradient) {
  if (!shard.whole.defined()) {
    leaf().mutable_grad() = gradient;
    return;
  }
  const py::object placed = helper("placed_as")(shard.whole_object, object_of(gradient));
  shard.whole.mutable_grad() = tensor_of(placed);
  if (shard.borrowed) shard.borrowed = &tensor_of(local_of(placed));
}

LocalGradients::LocalGradients(ParamTable& table) : table_(table) {
  ++table.changes;
  if (!table.has_shards) return;
  for (Row& row : table.rows()) {
    if (!row.shard.whole.defined()) continue;
    const py::handle gradient = gradient_object(row);
    at::Tensor& local = row.leaf().mutable_grad();
    local = gradient ? tensor_of(local_of(gradient)) : at::Tensor();
    row.shard.localized = local.unsafeGetTensorImpl();
    row.shard.borrowed = nullptr;
  }
}

LocalGradients::~LocalGradients() noexcept(false) {
  try {
    give_back();
  } catch (...) {
    if (std::uncaught_exceptions() == 0) throw;  // else the first one is the one to report
  }
}

void LocalGradients::give_back() {
  if (!table_.has_shards) return;
  for (Row& row : table_.rows()) {
    if (!row.shard.whole.defined()) continue;
    at::Tensor& local = row.leaf().mutable_grad();
    if (!local.defined()) {
      row.shard.whole.mutable_grad().reset();
    } else if (local.unsafeGetTensorImpl() != row.shard.localized) {
      row.set_gradient(local);
    }
    local.reset();  // or it would outlive the DTensor's
  }
}

}  // namespace ampfuse
