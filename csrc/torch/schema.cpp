#include "schema.h"

#include <c10/util/Exception.h>
#include <pybind11/stl.h>

#include <iterator>

#include "core/meter.h"

namespace py = pybind11;

namespace ampfuse {
namespace {

const std::map<std::string, const double* OnDevice::*>& numbers_on_device() {
  static const std::map<std::string, const double* OnDevice::*> numbers = {
      {"lr", &OnDevice::lr},
      {"weight_decay", &OnDevice::weight_decay},
      {"momentum", &OnDevice::momentum},
      {"beta1", &OnDevice::beta1},
      {"beta2", &OnDevice::beta2},
  };
  return numbers;
}

template <class Info>
std::string names_of(const std::vector<Info>& infos) {
  std::string names;
  for (const Info& info : infos) names += (names.empty() ? "" : ", ") + std::string(info.name);
  return names;
}

py::dict described(const HyperInfo& hyper) {
  py::dict found;
  found["name"] = hyper.name;
  found["key"] = hyper.key;
  found["index"] = hyper.index < 0 ? py::object(py::none()) : py::int_(hyper.index);
  found["initial"] = hyper.initial;
  found["is_flag"] = hyper.number == nullptr;
  found["off"] = hyper.off;
  return found;
}

py::dict described(const AlgorithmInfo& info) {
  py::list hypers, is_unsigned, storages_;
  for (const HyperInfo& hyper : info.hypers) hypers.append(described(hyper));
  for (size_t i = 0; i < info.states.size(); ++i)
    is_unsigned.append(bool(info.unsigned_states & bit(kState0 + int(i))));
  for (const StorageInfo& storage : storages()) {
    if (info.quantizable || storage.block == 0) storages_.append(storage.name);
  }
  py::dict found;
  found["states"] = info.states;
  found["unsigned"] = is_unsigned;
  found["storages"] = storages_;
  found["hypers"] = hypers;
  found["last_state_if"] = info.last_state_if;
  found["filled_with"] = info.filled_with;
  found["uses_count"] = info.uses_count;
  found["grad_norms"] = info.grad_norms;
  found["follows_norms"] = info.follows_norms;
  found["has_scratch"] = info.scratch >= 0;
  return found;
}

py::dict described(const StorageInfo& info) {
  py::dict found;
  found["bits"] = info.bits;
  found["rounds_at_random"] = info.rounds_at_random;
  found["suffix"] = info.suffix;
  found["block"] = info.block;
  found["min_elements"] = info.min_elements;
  return found;
}

// The counts of a metered step for each row before the exponents, in the order of `MeterCount`.
constexpr const char* kMeterCountNames[] = {"elements", "changed", "stale", "zero", "subnormal"};
static_assert(std::size(kMeterCountNames) == kExponents);

}  // namespace

py::dict schema() {
  py::dict algorithms_, storages_;
  for (const AlgorithmInfo& info : algorithms()) algorithms_[info.name] = described(info);
  for (const StorageInfo& info : storages()) storages_[info.name] = described(info);
  py::list numbers;
  for (const auto& number : numbers_on_device()) numbers.append(number.first);
  py::list counts;
  for (const char* name : kMeterCountNames) counts.append(name);
  py::dict found;
  found["algorithms"] = algorithms_;
  found["storages"] = storages_;
  found["read_on_device"] = numbers;
  found["meter_counts"] = counts;
  found["update_factor"] = kUpdateFactor;
  return found;
}

Algorithm algorithm_of(const std::string& name) {
  for (const AlgorithmInfo& info : algorithms()) {
    if (name == info.name) return info.algorithm;
  }
  TORCH_CHECK_VALUE(false, "algorithm is '", name, "'; it is one of ", names_of(algorithms()));
}

const StorageInfo& storage_of(const std::string& name) {
  for (const StorageInfo& info : storages()) {
    if (name == info.name) return info;
  }
  TORCH_CHECK_VALUE(false, "a storage type is '", name, "'; it is one of ", names_of(storages()));
}

RowHyper hyper_of(Algorithm algorithm, const std::map<std::string, double>& values) {
  const std::vector<HyperInfo>& own = info(algorithm).hypers;
  const auto find = [&](const std::string& name) -> const HyperInfo* {
    for (const HyperInfo& hyper : own) {
      if (name == hyper.name) return &hyper;
    }
    for (const HyperInfo& hyper : hyper::kOfAll) {
      if (name == hyper.name) return &hyper;
    }
    return nullptr;
  };
  RowHyper hyper{};
  hyper.algorithm = algorithm.index();
  for (const auto& [name, value] : values) {
    const HyperInfo* const found = find(name);
    TORCH_CHECK_VALUE(found, info(algorithm).name, " has no hyper-parameter '", name, "'");
    if (found->number) {
      hyper.*found->number = value;
    } else if (value != 0) {
      hyper.flags |= found->flag;
    }
  }
  return hyper;
}

const double*& number_on_device(OnDevice& on_device, const std::string& name) {
  const auto number = numbers_on_device().find(name);
  TORCH_CHECK_VALUE(number != numbers_on_device().end(), "'", name, "' is not read on the device");
  return on_device.*number->second;
}

}  // namespace ampfuse
