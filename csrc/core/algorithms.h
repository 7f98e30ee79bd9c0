// The ops that a call can name. An optimizer is one line here and one in ops.h; both backends, the
// Python module and the tests run over these lists.
#pragma once

#include <vector>

#include "core/dtype.h"
#include "core/hd.h"
#include "core/hyper.h"
#include "core/lists.h"

namespace ampfuse {

template <class... Ops>
struct OpList {};

// The optimizers, and what steps like one.
// clang-format off
using Algorithms = OpList<
    struct NoOp,         // gradients alone: another optimizer steps
    struct SgdOp,
    struct AdamOp,       // AdamW too
    struct AdagradOp,
    struct NovoGradOp,
    struct LambOp,
    struct LionOp,
    struct MuonOp,       // with matrix products between its stages
    struct LambUpdateOp,  // LAMB in two calls
    struct LayerwiseOp    // LARC in front of another's step
>;
// clang-format on

// Plain maps over lists of tensors. kCheck: the mask of the lists that are checked, x is 1 and y 2.
template <unsigned kCheck>
struct AxpbyOp;
template <int kFrom, int kTo>
struct CopyOp;
using PublishOp = CopyOp<kParam, kModel>;   // model weights from masters
using JoinOp = CopyOp<kParam, kTarget>;     // values from split masters
using SplitOp = CopyOp<kSource, kParam>;    // ... and back
using DecodeOp = CopyOp<kState0, kTarget>;  // FP32 values from a quantized state
using EncodeOp = CopyOp<kSource, kState0>;  // ... and back
using MapOps = OpList<struct ScaleOp, AxpbyOp<1>, AxpbyOp<2>, AxpbyOp<3>, struct RefreshOp,
                      PublishOp, JoinOp, SplitOp, DecodeOp, EncodeOp>;

// One op of a list, chosen when running: Algorithm::of<AdamOp>().
template <class List>
class Choice;

template <class... Ops>
class Choice<OpList<Ops...>> {
 public:
  static constexpr int kCount = sizeof...(Ops);

  constexpr Choice() = default;  // the first
  HD constexpr explicit Choice(int index) : index_(index) {}

  template <class Op>
  HD static constexpr Choice of() {
    return Choice(index_of<Op, Ops...>());
  }
  HD constexpr int index() const { return index_; }
  HD constexpr bool operator==(Choice other) const { return index_ == other.index_; }
  HD constexpr bool operator!=(Choice other) const { return index_ != other.index_; }

 private:
  template <class Op, class First, class... Rest>
  HD static constexpr int index_of() {
    if constexpr (__is_same(Op, First)) {
      return 0;
    } else {
      return 1 + index_of<Op, Rest...>();
    }
  }

  int index_ = 0;
};

// Passes a type on without a value of it.
template <class T>
struct Type {
  using type = T;
};

// `run` may be a host function.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class... Ops, class Run>
HD void visit(Choice<OpList<Ops...>> choice, const Run& run) {
  int index = 0;
  ((choice.index() == index++ ? run(Type<Ops>()) : void()), ...);
}

using Algorithm = Choice<Algorithms>;
using MapOp = Choice<MapOps>;

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
  bool follows_norms;  // depends on norms of gradients or weights, row by row
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
