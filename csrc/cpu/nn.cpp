// Fused layers on the CPU: the distribution to threads, and the sums over their parts.
#include "nn.h"

#include <algorithm>
#include <memory>
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

int64_t element_count(const ImageRows& image) { return image.rows * image.channels; }

// A value for each channel of a group, aligned: a vector that crosses a cache line is slow.
struct alignas(64) Group {
  float value[kMaskChannels];
};
int64_t groups_of(const ImageRows& image) { return coef_stride(image) / kMaskChannels; }

// Calls body(begin, end) for the pieces of [0, count) on the threads, see share_out().
template <class Body>
void for_pieces(int64_t cost, int64_t count, const Body& body) {
  share_out(cost, [&](int64_t piece, int64_t pieces) {
    body(count * piece / pieces, count * (piece + 1) / pieces);
  });
}

// The coefficients of all channels; for a sum, those of the span that begins with `row`.
template <class Op>
void fill_coefs(const NnArgs& args, int64_t row, float* coefs) {
  const int64_t stride = coef_stride(args.image);
  with_used_images<Op>(args, [&](auto used) {
    for (int64_t c = 0; c < args.image.channels; ++c) {
      float coef[Op::kCoefs];
      Op::template coefs<used>(args, row, c, coef);
      for (int k = 0; k < Op::kCoefs; ++k) coefs[k * stride + c] = coef[k];
    }
  });
}

// Goes backwards over the rows: sums have just gone forwards, and the end of what they read is
// still in the caches.
template <class Op>
void run_map(const NnArgs& args) {
  const ImageRows& image = args.image;
  std::vector<Group> groups(Op::kCoefs * groups_of(image));
  float* const coefs = groups.data()->value;
  {
    const FloatMode standard;
    fill_coefs<Op>(args, 0, coefs);
  }
  for_pieces(element_count(image), image.rows, [&](int64_t begin, int64_t end) {
    with_kernel<Op>(
        [&](auto kernel) { kernel.map(args, coefs, image.rows - end, image.rows - begin); });
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

// A sum over the rows of each channel, in three phases that each thread has a share of.
template <class Op>
class ChannelSums {
 public:
  explicit ChannelSums(const NnArgs& args)
      : args_(args),
        image_(args.image),
        spans_(image_.spans()),
        groups_(groups_of(image_)),
        // If there are few spans, they are divided into tiles, so that every thread has a part.
        height_(spans_ < 16 ? kTileRows : kSpanRows),
        parts_(ceil_div(image_.rows, height_)),
        coefs_(Op::kCoefsOfRow ? 1 : spans_ * kCoefs * groups_),
        sums_(new Group[parts_ * 2 * groups_]) {}

  void run() {
    if constexpr (!Op::kCoefsOfRow) {
      for_pieces(spans_ * image_.channels, spans_,
                 [&](int64_t begin, int64_t end) { fill_span_coefs(begin, end); });
    }
    for_pieces(element_count(image_), parts_,
               [&](int64_t begin, int64_t end) { sum_parts(begin, end); });
    // A channel's divisions and root take as long as this many elements.
    constexpr int64_t kElements = 64;
    for_pieces(image_.channels * (kElements + parts_), groups_, [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) finish_group(group);
    });
  }

 private:
  static constexpr int kCoefs = Op::kCoefs;

  // Those of a span; not used where the op has coefficients of rows.
  Group* coefs_of(int64_t span) {
    return coefs_.data() + (Op::kCoefsOfRow ? 0 : span * kCoefs * groups_);
  }
  // The first sums of all groups, and then the second ones.
  Group* sums_of(int64_t part) { return sums_.get() + part * 2 * groups_; }
  int64_t parts_of_span() const { return kSpanRows / height_; }

  void fill_span_coefs(int64_t begin, int64_t end) {
    for (int64_t span = begin; span < end; ++span)
      fill_coefs<Op>(args_, span * kSpanRows, coefs_of(span)->value);
  }

  void sum_parts(int64_t begin, int64_t end) {
    std::vector<Group> tile(2 * groups_);
    with_kernel<Op>([&](auto kernel) {
      for (int64_t part = begin; part < end; ++part)
        kernel.sum(args_, coefs_of(part / parts_of_span())->value, part * height_,
                   std::min((part + 1) * height_, image_.rows), tile.data()->value,
                   sums_of(part)->value);
    });
  }

  // The partials of a group's channels, and their results.
  void finish_group(int64_t group) {
    auto* const partials = static_cast<typename Op::Partial*>(args_.partials);  // [channels][spans]
    const int64_t begin = group * kMaskChannels,
                  end = std::min(begin + kMaskChannels, image_.channels);
    for (int64_t span = 0; span < spans_; ++span) {
      Group first = {}, second = {};
      const int64_t last = std::min((span + 1) * parts_of_span(), parts_);
      for (int64_t part = span * parts_of_span(); part < last; ++part) {
        const Group* const sum = sums_of(part) + group;
        for (int i = 0; i < kMaskChannels; ++i) first.value[i] += sum[0].value[i];
        for (int i = 0; i < kMaskChannels; ++i) second.value[i] += sum[groups_].value[i];
      }
      for (int64_t c = begin; c < end; ++c) {
        float coef[kCoefs] = {};
        for (int k = 0; k < kCoefs && !Op::kCoefsOfRow; ++k)
          coef[k] = coefs_of(span)[k * groups_ + group].value[c - begin];
        partials[c * spans_ + span] =
            Op::partial(coef, first.value[c - begin], second.value[c - begin]);
      }
    }
    for (int64_t c = begin; c < end; ++c)
      Op::finish(args_, c, partials + c * spans_, SpanSum{spans_});
  }

  const NnArgs& args_;
  const ImageRows& image_;
  const int64_t spans_, groups_, height_, parts_;  // `height_`: the rows of a part
  std::vector<Group> coefs_;
  const std::unique_ptr<Group[]> sums_;
};

// Weights and biases of all columns in FP32. (No FloatMode: widening rounds nothing.)
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
  for_pieces(element_count(image), image.rows, [&](int64_t begin, int64_t end) {
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
      ChannelSums<Op>(args).run();
    } else if constexpr (Op::kKind == PassKind::kChannelMap) {
      run_map<Op>(args);
    } else {
      along_rows<Op>(args);
    }
  });
}

}  // namespace ampfuse
