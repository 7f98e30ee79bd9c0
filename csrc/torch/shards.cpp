// Rows that are local shards of parameters spread over processes: torch's DTensor. Autograd knows
// nothing of a shard, so gradients are carried between the two.
#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

// After Python's own header.
#include <structmember.h>

#include "param_table.h"

namespace py = pybind11;

namespace ampfuse {
namespace {

py::handle dtensor_type() {
  static const py::handle type =
      py::object(py::module_::import("torch.distributed.tensor").attr("DTensor")).release();
  return type;
}

// A slot of Python's class DTensor. Read where it lies, as a step reads it of every parameter: a
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

// What stands in Python for a tensor, if something does; for a DTensor, as long as it lives.
// Counting references to it would take longer than all else that is done here.
py::handle lent_object_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
}

bool is_dtensor(py::handle object) {
  auto* const type = reinterpret_cast<PyTypeObject*>(dtensor_type().ptr());
  return object && PyObject_TypeCheck(object.ptr(), type);
}

const at::Tensor& tensor_of(py::handle object) { return THPVariable_Unpack(object.ptr()); }

py::object helper(const char* name) {
  return py::module_::import("ampfuse.optim.shards").attr(name);
}

// The gradient of a row's DTensor as Python has it; null without one. One that is placed otherwise
// than its parameter is redistributed first, which is a collective.
py::handle gradient_object(Row& row) {
  const at::Tensor& gradient = row.whole.mutable_grad();
  if (!gradient.defined()) return nullptr;
  const py::handle object = lent_object_of(gradient);
  TORCH_CHECK_TYPE(is_dtensor(object), "the gradient of ", row.name,
                   " is no DTensor, as the parameter is. Give it one in the parameter's places, by "
                   "DTensor.from_local or distribute_tensor.");
  // FSDP gives all gradients of a parameter one spec.
  if (const py::handle spec = spec_of(object); !spec.is(row.gradient_spec)) {
    static const py::str name =
        py::reinterpret_steal<py::str>(PyUnicode_InternFromString("placements"));
    const py::handle whole = row.whole_object;
    if (!spec.attr(name).equal(spec_of(whole).attr(name))) {
      const py::object placed = helper("redistributed")(object_of(gradient), whole);
      row.whole.mutable_grad() = tensor_of(placed);
    }
    row.gradient_spec = py::reinterpret_borrow<py::object>(spec_of(lent_object_of(gradient)));
  }
  return lent_object_of(gradient);
}

}  // namespace

// --- the table -----------------------------------------------------------------------------------

bool ParamTable::is_shard_of(py::handle dtensor, const at::Tensor& local) {
  return is_dtensor(dtensor) && tensor_of(local_of(dtensor)).is_same(local);
}

bool ParamTable::has_its_shards() const {
  return !sharded_ || std::all_of(rows_.begin(), rows_.end(), [](const Row& row) {
    return !row.whole.defined() || is_shard_of(row.whole_object, row.leaf());
  });
}

void ParamTable::lend_shards() {
  static const at::Tensor none;
  if (!sharded_) return;
  // Seven pointers in a row lead to what a gradient's shard is, most of them in cold memory: each
  // scan brings there what the next one begins with.
  const auto scan = [&](const auto& fetch) {
    for (const Row& row : rows_) {
      if (!row.whole.defined()) continue;
      const at::Tensor& gradient = row.whole.mutable_grad();
      if (gradient.defined()) fetch(gradient);
    }
  };
  scan([](const at::Tensor& gradient) {
    __builtin_prefetch(gradient.unsafeGetTensorImpl()->pyobj_slot());
  });
  scan([](const at::Tensor& gradient) {
    __builtin_prefetch(local_slot_of(lent_object_of(gradient)));
  });
  scan([](const at::Tensor& gradient) {
    const py::handle object = lent_object_of(gradient);
    if (is_dtensor(object)) __builtin_prefetch(&tensor_of(local_of(object)));
  });
  for (Row& row : rows_) {
    if (!row.whole.defined()) continue;
    const py::handle gradient = gradient_object(row);
    row.lent = gradient ? &tensor_of(local_of(gradient)) : &none;
  }
}

void ParamTable::set_leaf_gradient(Row& row, const at::Tensor& gradient) {
  if (!row.whole.defined()) {
    row.leaf().mutable_grad() = gradient;
    return;
  }
  const py::object placed = helper("placed_as")(row.whole_object, object_of(gradient));
  row.whole.mutable_grad() = tensor_of(placed);
  if (row.lent) row.lent = &tensor_of(local_of(placed));
}

void ParamTable::take_shards() {
  is_collected_ = false;
  if (!sharded_) return;
  for (Row& row : rows_) {
    if (!row.whole.defined()) continue;
    const py::handle gradient = gradient_object(row);
    at::Tensor& local = row.leaf().mutable_grad();
    if (gradient) local = tensor_of(local_of(gradient));
    row.taken = local.unsafeGetTensorImpl();
    row.lent = nullptr;
  }
}

void ParamTable::give_shards() {
  if (!sharded_) return;
  for (Row& row : rows_) {
    if (!row.whole.defined()) continue;
    at::Tensor& local = row.leaf().mutable_grad();
    if (!local.defined()) {
      row.whole.mutable_grad().reset();
    } else if (local.unsafeGetTensorImpl() != row.taken) {
      set_leaf_gradient(row, local);
    }
    local.reset();  // or it would outlive the DTensor's
  }
}

void ParamTable::set_gather(Gather gather, const std::optional<at::Tensor>& counted_elsewhere) {
  gather_ = std::move(gather);
  counted_elsewhere_ = counted_elsewhere.value_or(at::Tensor());
}

void ParamTable::share(bool found, at::Tensor norms, int64_t largest_column) {
  if (counted_elsewhere_.defined() && norms.defined()) norms.masked_fill_(counted_elsewhere_, 0);
  at::Tensor mine = state_;
  Findings findings;
  findings.stride = state_.numel();
  if (norms.defined()) {
    const at::Tensor bytes = norms.view(-1).view(at::kByte);
    // Each rank's part begins where a step state may.
    const int64_t odd = bytes.numel() % int64_t(alignof(StepState));
    mine = at::cat({state_, bytes, state_.slice(0, 0, odd)});
    findings.stride = mine.numel();
    findings.norms = norms.data_ptr<float>();
    findings.values = norms.numel();
    findings.first_largest = largest_column * rows();
    findings.end_largest = findings.first_largest + rows();
  }
  const at::Tensor everyone = gather_(mine);
  TORCH_CHECK_VALUE(everyone.numel() > 0 && everyone.numel() % findings.stride == 0,
                    "the ranks' parts have ", findings.stride, " bytes each, and together ",
                    everyone.numel());
  findings.everyone = reinterpret_cast<const char*>(
      pointer_to<uint8_t>(everyone, "what the ranks found", everyone.numel(), device_));
  findings.ranks = everyone.numel() / findings.stride;
  if (found) findings.state = state();
  const DeviceScope scope(device_);
  scope.backend().merge(findings, scope.stream());
}

void ParamTable::share_row_norms(bool found, bool of_params) {
  if (!gather_ || !(found || of_params)) return;
  if (found && counted_elsewhere_.defined()) {
    const at::Tensor counted = norms_[kGradNorm].masked_fill(counted_elsewhere_, 0);
    state_field("sum_squares").copy_(counted.to(at::kDouble).square_().sum());
  }
  const int64_t begin = found ? kGradNorm : kParamNorm;
  const int64_t end = of_params ? kNormColumns : kParamNorm;
  const bool by_row = needs_row_norms();
  share(found, by_row ? norms_.slice(0, begin, end) : at::Tensor(), kGradLargest - begin);
}

}  // namespace ampfuse
