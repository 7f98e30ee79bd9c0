#include "names.h"

#include <c10/util/Exception.h>

namespace ampfuse {

Algorithm algorithm_of(const std::string& name) {
  std::string names;
  for (const AlgorithmInfo& info : algorithms()) {
    if (name == info.name) return info.algorithm;
    if (info.algorithm != Algorithm::of<NoOp>())
      names += std::string(names.empty() ? "" : ", ") + info.name;
  }
  TORCH_CHECK_VALUE(false, "algorithm is '", name, "'; it is ", names, " or none");
}

RowHyper hyper_of(const std::map<std::string, double>& values) {
  static const std::map<std::string, double RowHyper::*> numbers = {
      {"lr", &RowHyper::lr},
      {"weight_decay", &RowHyper::weight_decay},
      {"momentum", &RowHyper::momentum},
      {"dampening", &RowHyper::dampening},
      {"beta1", &RowHyper::beta1},
      {"beta2", &RowHyper::beta2},
      {"eps", &RowHyper::eps},
      {"lr_decay", &RowHyper::lr_decay},
      {"trust_coefficient", &RowHyper::trust_coefficient},
      {"trust_eps", &RowHyper::trust_eps},
      {"ema_decay", &RowHyper::ema_decay},
      {"seed", &RowHyper::seed},
  };
  static const std::map<std::string, HyperFlag> flags = {
      {"maximize", kMaximize},       {"nesterov", kNesterov},          {"decoupled", kDecoupled},
      {"uncorrected", kUncorrected}, {"unaveraged", kUnaveraged},      {"late_decay", kLateDecay},
      {"trust_all", kTrustAll},      {"infinity_norm", kInfinityNorm}, {"init_zero", kInitZero},
      {"layerwise", kLayerwise},     {"clipped_ratio", kClippedRatio},
  };
  RowHyper hyper{};
  for (const auto& [name, value] : values) {
    if (const auto number = numbers.find(name); number != numbers.end()) {
      hyper.*number->second = value;
    } else {
      const auto flag = flags.find(name);
      TORCH_CHECK_VALUE(flag != flags.end(), "there is no hyper-parameter '", name, "'");
      if (value != 0) hyper.flags |= flag->second;
    }
  }
  return hyper;
}

const double*& schedule_column(Schedule& schedule, const std::string& name) {
  static const std::map<std::string, const double* Schedule::*> columns = {
      {"lr", &Schedule::lr},
      {"weight_decay", &Schedule::weight_decay},
      {"momentum", &Schedule::momentum},
      {"beta1", &Schedule::beta1},
      {"beta2", &Schedule::beta2},
  };
  const auto column = columns.find(name);
  TORCH_CHECK_VALUE(column != columns.end(), "a schedule has no column '", name, "'");
  return schedule.*column->second;
}

}  // namespace ampfuse
