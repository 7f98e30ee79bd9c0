// The ops that a call can name, by their index in a list. ops.h has the lists: both backends, the
// Python module and the tests run over them.
#pragma once

#include <tuple>
#include <type_traits>
#include <vector>

#include "core/dtype.h"
#include "core/hd.h"
#include "core/hyper.h"
#include "core/lists.h"

namespace ampfuse {

template <class... Ops>
struct OpList {
  static constexpr int kCount = sizeof...(Ops);

  template <class Op>
  HD static constexpr int index_of() {
    int index = 0, found = kCount;
    ((std::is_same_v<Op, Ops> ? void(found = index++) : void(index++)), ...);
    return found;
  }
};

template <class... Ops, class... More>
OpList<Ops..., More...> operator+(OpList<Ops...>, OpList<More...>);

// One op of a list, chosen when running: Algorithm::of<AdamOp>().
template <class List>
class Choice {
 public:
  constexpr Choice() = default;  // the first
  HD constexpr explicit Choice(int index) : index_(index) {}

  template <class Op>
  HD static constexpr Choice of() {
    static_assert(List::template index_of<Op>() < List::kCount, "the op is not in the list");
    return Choice(List::template index_of<Op>());
  }
  HD constexpr int index() const { return index_; }
  HD constexpr bool operator==(Choice other) const { return index_ == other.index_; }
  HD constexpr bool operator!=(Choice other) const { return index_ != other.index_; }

 private:
  int index_ = 0;
};

// Passes a type on without a value of it.
template <class T>
struct Type {
  using type = T;
};

// What make(Type) gives for each of a list: if these are addresses of kernels, the compiler emits
// those.
template <class... Ops, class Make>
constexpr auto each_of(OpList<Ops...>, const Make& make) {
  return std::make_tuple(make(Type<Ops>())...);
}

// `run` may be a host function.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class... Ops, class Run>
HD void visit(OpList<Ops...>, int chosen, const Run& run) {
  int index = 0;
  ((chosen == index++ ? run(Type<Ops>()) : void()), ...);
}
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class List, class Run>
HD void visit(Choice<List> choice, const Run& run) {
  visit(List(), choice.index(), run);
}

using Algorithm = Choice<struct Algorithms>;
using MapOp = Choice<struct MapOps>;

// What callers must know about an algorithm, from its op.
struct AlgorithmInfo {
  Algorithm algorithm;
  const char* name;
  std::vector<const char*> states;  // in the order of kState0, kState1, ...
  unsigned unsigned_states;         // lists of those that are never negative
  bool quantizable;                 // its states may be quantized, with scales
  bool grad_norms;                  // the step needs the norm of each row's gradient
  std::vector<HyperInfo> hypers;
  const char* last_state_if;  // see op.h
  const char* filled_with;
  bool uses_count;
  bool follows_norms;  // a row's step depends on its norms, or on its whole matrix (Muon)
  int scratch;         // see kScratch in op.h; -1: none
};

AMPFUSE_API const std::vector<AlgorithmInfo>& algorithms();  // by index
inline const AlgorithmInfo& info(Algorithm algorithm) { return algorithms()[algorithm.index()]; }

// How a row's states are stored: what a user chooses.
struct StorageInfo {
  const char* name;
  DType signed_type, unsigned_type;  // a list's type; the second if it is never negative
  int bits;                          // per element
  bool rounds_at_random;
  // For a quantized type: its list has the state's name with this suffix, and comes with float32
  // scales, one for each `block` elements as they lie in memory. Else null and 0.
  const char* suffix;
  int block;
  int64_t min_elements;  // smaller parameters keep float32 states

  DType type(bool is_unsigned) const { return is_unsigned ? unsigned_type : signed_type; }
};

AMPFUSE_API const std::vector<StorageInfo>& storages();  // the first is the default

}  // namespace ampfuse
