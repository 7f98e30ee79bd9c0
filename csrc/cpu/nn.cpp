// Fused layers on the CPU: what is shared out to threads, and what is added of their parts.
#include "nn.h"

#include <algorithm>
#include <vector>

#include "core/nn_ops.h"
#include "float_mode.h"
#include "threads.h"

namespace ampfuse {
namespace {

template <class Op, class Call>
void with_kernel(const Call& call) {
  with_isa([&](auto isa) { call(NnKernel<typename decltype(isa)::type, Op>()); });
}

int64_t elements(const ImageRows& image) { return image.rows * image.channels; }

// Backwards over the rows: sums have just been taken forwards, and the end of what they read is
// still in the caches.
template <class Op>
void map(const NnArgs& args) {
  const ImageRows& image = args.image;
  const int64_t stride = coef_stride(image);
  std::vector<float> coefs(Op::kCoefs * stride);
  with_lists<Op>(args, [&](auto lists) {
    const FloatMode standard;
    for (int64_t c = 0; c < image.channels; ++c) {
      float coef[Op::kCoefs];
      Op::template coefs<lists>(args, 0, c, coef);
      for (int k = 0; k < Op::kCoefs; ++k) coefs[k * stride + c] = coef[k];
    }
  });
  share_out(elements(image), [&](int64_t piece, int64_t pieces) {
    const int64_t from_end = pieces - 1 - piece;
    const int64_t begin = image.rows * from_end / pieces;
    const int64_t end = image.rows * (from_end + 1) / pieces;
    with_kernel<Op>([&](auto kernel) { kernel.map(args, coefs.data(), begin, end); });
  });
}

// A channel's partials, see Op::finish().
struct SpanSum {
  int64_t spans;
  template <class Value>
  double operator()(const Value& value) const {
    return sum_strided<kRowLanes>(spans, value);
  }
  bool writes() const { return true; }
};

template <class Op>
void sum(const NnArgs& args) {
  const ImageRows& image = args.image;
  // Few spans are cut finer, for every thread to have a task.
  const int64_t width = image.spans() < 16 ? 128 : kTaskChannels;
  const int64_t strips = ceil_div(image.channels, width);
  const int64_t tasks = image.spans() * strips;
  share_out(elements(image), [&](int64_t piece, int64_t pieces) {
    with_kernel<Op>([&](auto kernel) {
      for (int64_t task = tasks * piece / pieces; task < tasks * (piece + 1) / pieces; ++task) {
        const int64_t begin = task % strips * width;
        kernel.sum(args, task / strips, begin, std::min(begin + width, image.channels));
      }
    });
  });
  // A channel's divisions and root take as long as so many elements.
  constexpr int64_t kElements = 64;
  share_out(image.channels * (kElements + image.spans()), [&](int64_t piece, int64_t pieces) {
    const int64_t end = image.channels * (piece + 1) / pieces;
    for (int64_t c = image.channels * piece / pieces; c < end; ++c)
      Op::finish(args, c, SpanSum{image.spans()});
  });
}

// Weights and biases of all columns in FP32.
std::vector<float> affine_of(const NnArgs& args) {
  const int64_t stride = coef_stride(args.image);
  std::vector<float> values(2 * stride);
  const auto& [weight, bias, dtype] = args.affine;
  for (int64_t c = 0; c < args.image.channels; ++c) {
    values[c] = weight ? load_float(weight, dtype, c) : 1.0f;
    values[stride + c] = bias ? load_float(bias, dtype, c) : 0.0f;
  }
  return values;
}

template <class Op>
void along_rows(const NnArgs& args) {
  const ImageRows& image = args.image;
  std::vector<float> affine;
  if constexpr (Op::kKind == PassKind::kRowPass) affine = affine_of(args);
  share_out(elements(image), [&](int64_t piece, int64_t pieces) {
    const int64_t begin = image.rows * piece / pieces, end = image.rows * (piece + 1) / pieces;
    with_kernel<Op>([&](auto kernel) {
      if constexpr (Op::kKind == PassKind::kRowSum) {
        kernel.row_sum(args, begin, end);
      } else if constexpr (Op::kKind == PassKind::kRowPass) {
        kernel.row_pass(args, affine.data(), begin, end);
      } else {
        kernel.row_map(args, begin, end);
      }
    });
  });
}

}  // namespace

void run_nn(NnOp op, const NnArgs& args) {
  visit(op, [&](auto type) {
    using Op = typename decltype(type)::type;
    if constexpr (Op::kKind == PassKind::kChannelSum) {
      sum<Op>(args);
    } else if constexpr (Op::kKind == PassKind::kChannelMap) {
      map<Op>(args);
    } else {
      along_rows<Op>(args);
    }
  });
}

}  // namespace ampfuse
