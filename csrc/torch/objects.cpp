#include "objects.h"

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
bool for_nested_items(PyObject* containers, const Visit& visit) {
  return for_items(containers, [&](PyObject* inner) { return for_items(inner, visit); });
}

}  // namespace

pybind11::list flattened(const pybind11::handle& containers) {
  pybind11::list found;
  for_nested_items(containers.ptr(), [&](PyObject* object) {
    found.append(pybind11::handle(object));
    return true;
  });
  return found;
}

namespace {

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

// Asked of the interpreter that runs, not believed: a change that no version tells would be lost.
bool counts_versions() {
  pybind11::dict probe;
  uint64_t version = version_of_dict(probe.ptr());
  const auto changed = [&] {
    const uint64_t before = version;
    version = version_of_dict(probe.ptr());
    return version != before;
  };
  probe["key"] = pybind11::none();
  bool counts = changed();
  probe["key"] = pybind11::list();
  counts &= changed();
  probe.attr("pop")("key");
  counts &= changed();
  probe.attr("update")(pybind11::dict(pybind11::arg("key") = 1));
  counts &= changed();
  probe.clear();
  return counts & changed();
}

}  // namespace

DictVersions::DictVersions(const pybind11::handle& dicts) {
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

bool DictVersions::hold(const pybind11::handle& dicts) const {
  if (versions_.empty() || versions_.front().dict != dicts.ptr()) return false;
  // As long as the outer dict is what it was, the inner ones are alive.
  for (const Version& known : versions_) {
    if (version_of_dict(known.dict) != known.version) return false;
  }
  return true;
}

bool holds(const pybind11::handle& containers, const pybind11::list& known) {
  PyObject** const items = PySequence_Fast_ITEMS(known.ptr());
  const Py_ssize_t count = PyList_GET_SIZE(known.ptr());
  Py_ssize_t i = 0;
  const bool same = for_nested_items(
      containers.ptr(), [&](PyObject* object) { return i < count && items[i++] == object; });
  return same && i == count;
}

}  // namespace ampfuse
