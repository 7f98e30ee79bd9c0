#include "objects.h"

namespace py = pybind11;

namespace ampfuse {
namespace {

// visit(object) for each item of a list or tuple, or value of a dict, until it returns false.
template <class Visit>
bool for_items(PyObject* container, const Visit& visit) {
  if (PyDict_Check(container)) {
    PyObject* value = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(container, &position, nullptr, &value);) {
      if (!visit(value)) return false;
    }
    return true;
  }
  if (!PyList_Check(container) && !PyTuple_Check(container)) return visit(container);
  PyObject** const items = PySequence_Fast_ITEMS(container);
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(container);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!visit(items[i])) return false;
  }
  return true;
}

template <class Visit>
bool for_params(const py::handle& groups, const Visit& visit) {
  static PyObject* const key = PyUnicode_InternFromString("params");
  return for_items(groups.ptr(), [&](PyObject* group) {
    const auto params = py::reinterpret_steal<py::object>(PyObject_GetItem(group, key));
    if (!params) throw py::error_already_set();
    return for_items(params.ptr(), visit);
  });
}

template <class Visit>
bool for_states(const py::handle& states, const Visit& visit) {
  return for_items(states.ptr(), [&](PyObject* state) { return for_items(state, visit); });
}

// No two contents of any dicts have the same number (PEP 509; gone in 3.14, PEP 699).
#if PY_VERSION_HEX < 0x030e0000 && !defined(Py_GIL_DISABLED)
uint64_t version_of_dict(const PyObject* dict) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  return reinterpret_cast<const PyDictObject*>(dict)->ma_version_tag;
#pragma GCC diagnostic pop
}
#else
uint64_t version_of_dict(const PyObject*) { return 0; }
#endif

// Checked in the running interpreter: a change without a new version would be missed.
bool counts_versions() {
  py::dict probe;
  uint64_t version = version_of_dict(probe.ptr());
  const auto changed = [&] {
    const uint64_t before = version;
    version = version_of_dict(probe.ptr());
    return version != before;
  };
  probe["key"] = py::none();
  bool counts = changed();
  probe["key"] = py::list();
  counts &= changed();
  probe.attr("pop")("key");
  counts &= changed();
  probe.attr("update")(py::dict(py::arg("key") = 1));
  counts &= changed();
  probe.clear();
  return counts & changed();
}

}  // namespace

DictVersions::DictVersions(const py::handle& dicts) {
  static const bool counts = counts_versions();
  if (!counts || !PyDict_Check(dicts.ptr())) return;
  versions_.push_back({dicts.ptr(), version_of_dict(dicts.ptr())});
  const bool known = for_items(dicts.ptr(), [&](PyObject* inner) {
    if (!PyDict_Check(inner)) return false;
    versions_.push_back({inner, version_of_dict(inner)});
    return true;
  });
  if (!known) versions_.clear();
}

bool DictVersions::hold(const py::handle& dicts) const {
  if (versions_.empty() || versions_.front().dict != dicts.ptr()) return false;
  // As long as the outer dict is what it was, the inner ones are alive.
  for (const Version& known : versions_) {
    if (version_of_dict(known.dict) != known.version) return false;
  }
  return true;
}

namespace {

// A visitor that tells whether it is shown the objects of `known` in turn, and at the end, all.
struct Compared {
  const std::vector<py::object>& known;
  mutable size_t seen = 0;
  bool operator()(PyObject* object) const {
    return seen < known.size() && known[seen++].ptr() == object;
  }
};

struct Collector {
  std::vector<py::object>& found;
  bool operator()(PyObject* object) const {
    found.push_back(py::reinterpret_borrow<py::object>(object));
    return true;
  }
};

}  // namespace

void Containers::remember_params(const py::handle& groups) {
  params_.clear();
  for_params(groups, Collector{params_});
}

void Containers::remember_states(const py::handle& states) {
  states_.clear();
  for_states(states, Collector{states_});
  versions_ = DictVersions(states);
}

bool Containers::have_params(const py::handle& groups) const {
  const Compared compared{params_};
  return for_params(groups, compared) && compared.seen == params_.size();
}

bool Containers::have_states(const py::handle& states) {
  if (versions_.hold(states)) return true;
  const Compared compared{states_};
  if (!for_states(states, compared) || compared.seen != states_.size()) return false;
  versions_ = DictVersions(states);  // the same objects, assigned again; or Python does not count
  return true;
}

}  // namespace ampfuse
