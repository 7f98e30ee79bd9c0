// The kernels of nn.h that walk along rows, for one instruction set: the lanes of a vector are
// neighbouring columns.
#pragma once

#include <cstring>

#include "nn_run.h"
#include "simd_scalar.h"
#include "vector.h"

namespace ampfuse {
namespace {

// The values of the lanes of a group, and then of the row's groups, of which each is merged into
// the first one.
template <class Op>
struct RowLanes {
  alignas(64) float value[Op::kValues][kRowWidth];

  template <class F>
  HD void load(int lane, F (&values)[Op::kValues]) const {
    for (int k = 0; k < Op::kValues; ++k) values[k] = load_floats<F>(value[k] + lane);
  }
  template <class F>
  HD void store(int lane, const F (&values)[Op::kValues]) {
    using Floats = typename F::template Lanes<DType::kFloat32>;
    for (int k = 0; k < Op::kValues; ++k) Floats::store(value[k] + lane, Floats::narrow(values[k]));
  }

  // Halving from `width` lanes, of which `count` have values, as sum_by_halving().
  template <class Isa>
  HD void merge(int width, int count) {
    for (int offset = width / 2; offset > 0; offset /= 2) {
      int lane = 0;
      for (; lane + Isa::kWidth <= offset && lane + offset + Isa::kWidth <= count;
           lane += Isa::kWidth)
        merge_at<Isa>(lane, offset);
      for (; lane < offset && lane + offset < count; ++lane) merge_at<Scalar>(lane, offset);
      count = count < offset ? count : offset;
    }
  }

 private:
  template <class F>
  HD void merge_at(int lane, int offset) {
    F values[Op::kValues], others[Op::kValues];
    load(lane, values);
    load(lane + offset, others);
    Op::merge(values, others);
    store(lane, values);
  }
};

// Vectors of which the values are in registers at a time.
constexpr int kRowVectors = 4;

// x of columns [c, c + count) of vector `first`, `absent` past them; and a bit for each.
template <class Lanes, class F, bool kWhole>
HD F load_columns(const char* row, int64_t c, int first, int count, float absent, uint32_t& bits) {
  const F x = load_at<Lanes, F, kWhole>(row, c, first, count);
  bits = 0xffffu;
  if constexpr (kWhole) return x;
  const int lanes = lanes_of(count, first, F::kWidth);
  bits = lanes > 0 ? (1u << lanes) - 1 : 0;
  return keep(bits, x) + keep(~bits, F(absent));
}

template <class F, bool kWhole>
HD F weight_of(const float* weights, int64_t c, int first, int count) {
  using Floats = typename F::template Lanes<DType::kFloat32>;
  if (weights == nullptr) return F(1.0f);
  return load_at<Floats, F, kWhole>(reinterpret_cast<const char*>(weights), c, first, count);
}

// Adds columns [begin, end), at most a span, to their lanes.
template <class Isa, class Op, bool kPlain, class Lanes>
HD void add_columns(const char* row, const float* weights, int64_t begin, int64_t end,
                    RowLanes<Op>& lanes) {
  constexpr int kStrip = kRowVectors * Isa::kWidth;
  for (int lane = 0; lane < kRowWidth && begin + lane < end; lane += kStrip) {
    Isa value[kRowVectors][Op::kValues];
    for (int v = 0; v < kRowVectors; ++v) lanes.load(lane + v * Isa::kWidth, value[v]);
    const auto add = [&](auto whole, int64_t c, int count) HD_LAMBDA {
#pragma GCC unroll 4
      for (int v = 0; v < kRowVectors; ++v) {
        const int first = v * Isa::kWidth;
        uint32_t bits;
        const Isa x = load_columns<Lanes, Isa, whole>(row, c, first, count, Op::kAbsent, bits);
        Isa weight(1.0f);
        if constexpr (!kPlain) weight = weight_of<Isa, whole>(weights, c, first, count);
        Op::template add<kPlain>(value[v], x, weight, bits);
      }
    };
    int64_t c = begin + lane;
    for (; c + kStrip <= end; c += kRowWidth) add(std::true_type(), c, kStrip);
    if (c < end) add(std::false_type(), c, int(end - c));
    for (int v = 0; v < kRowVectors; ++v) lanes.store(lane + v * Isa::kWidth, value[v]);
  }
}

// run(plain, lanes): what a row op is compiled for.
template <class Isa, class Op, class Run>
HD void with_row_instance(const NnArgs& args, const Run& run) {
  with_lanes<Isa>(args.image.dtype, [&](auto lanes) HD_LAMBDA {
    if (Op::is_plain(args)) {
      run(std::true_type(), lanes);
    } else {
      run(std::false_type(), lanes);
    }
  });
}

}  // namespace

template <class Isa, class Op>
void NnKernel<Isa, Op>::row_sum(NnArgs args, int64_t begin, int64_t end) {
  const int64_t columns = args.image.channels, spans = ceil_div(columns, kSpanColumns);
  const int groups = int(spans < kRowGroups ? spans : kRowGroups);
  RowLanes<Op> lanes, row_values;
  with_row_instance<Isa, Op>(args, [&](auto plain, auto stored) HD_LAMBDA {
    for (int64_t row = begin; row < end; ++row) {
      const char* data = row_of(args, Op::kInput, row);
      for (int group = 0; group < groups; ++group) {
        Isa empty[Op::kValues];
        Op::start(empty);
        for (int lane = 0; lane < kRowWidth; lane += Isa::kWidth) lanes.store(lane, empty);
        for (int64_t span = group; span < spans; span += kRowGroups) {
          const int64_t first = span * kSpanColumns, last = first + kSpanColumns;
          add_columns<Isa, Op, plain, decltype(stored)>(data, args.vectors[Op::kWeight], first,
                                                        last < columns ? last : columns, lanes);
        }
        lanes.template merge<Isa>(kRowWidth, kRowWidth);
        Scalar value[Op::kValues];
        lanes.load(0, value);
        row_values.store(group, value);
      }
      row_values.template merge<Scalar>(kRowGroups, groups);
      float value[Op::kValues];
      for (int k = 0; k < Op::kValues; ++k) value[k] = row_values.value[k][0];
      Op::finish(args, row, value);
    }
  });
}

template <class Isa, class Op>
void NnKernel<Isa, Op>::row_map(NnArgs args, int64_t begin, int64_t end) {
  const int64_t columns = args.image.channels;
  const DType dtype = args.image.dtype;
  const float* weights = args.vectors[Op::kWeight];
  with_row_instance<Isa, Op>(args, [&](auto plain, auto stored) HD_LAMBDA {
    using Lanes = decltype(stored);
    for (int64_t row = begin; row < end; ++row) {
      const char* input = row_of(args, Op::kInput, row);
      char* output = row_of(args, Op::kOutput, row);
      if (!Op::counts(args, row)) {
        std::memset(output, 0, size_t(args.image.row_bytes()));
        continue;
      }
      float coef[Op::kCoefs];
      Op::coefs(args, row, coef);
      Isa all[Op::kCoefs];
      for (int k = 0; k < Op::kCoefs; ++k) all[k] = Isa(coef[k]);
      const int64_t target = args.targets[row];
      const float x = load_float(input, dtype, target);  // the output may be the input
      const auto map = [&](auto whole, int64_t c, int count) HD_LAMBDA {
        Isa weight(1.0f);
        if constexpr (!plain) weight = weight_of<Isa, whole>(weights, c, 0, count);
        const Isa y = Op::template apply<plain>(load_at<Lanes, Isa, whole>(input, c, 0, count), all,
                                                weight, 0);
        store_at<Lanes, Isa, whole>(y, output, c, 0, count);
      };
      int64_t c = 0;
      for (; c + Isa::kWidth <= columns; c += Isa::kWidth) map(std::true_type(), c, Isa::kWidth);
      if (c < columns) map(std::false_type(), c, int(columns - c));
      const float weight = weights ? weights[target] : 1.0f;
      store_float(output, dtype, target, Op::template apply<plain>(x, coef, weight, 1));
    }
  });
}

}  // namespace ampfuse
