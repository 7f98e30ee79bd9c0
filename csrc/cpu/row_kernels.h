// The kernels of nn.h that walk along rows, for one instruction set: the lanes of a vector are
// neighbouring columns.
#pragma once

#include <cstring>

#include "channel_kernels.h"
#include "simd_scalar.h"
#include "vector.h"

namespace ampfuse {
namespace {

// The values of the lanes of a group, which are merged into its first lane, and then those of the
// row's groups, which are merged into the first group. Sum: how values start and how two merge.
template <class Sum>
struct RowLanes {
  static constexpr int kValues = Sum::kValues;
  alignas(64) float value[kValues][kRowWidth];

  template <class F>
  HD void load(int lane, F (&values)[kValues]) const {
    for (int k = 0; k < kValues; ++k) values[k] = load_floats<F>(value[k] + lane);
  }
  template <class F>
  HD void store(int lane, const F (&values)[kValues]) {
    for (int k = 0; k < kValues; ++k) store_floats(values[k], value[k] + lane);
  }

  // Halving, as merge_by_halving(). (This is most of the work of a short row: unrolled it stays in
  // registers.)
  template <class Isa, int kOffset = kRowWidth / 2>
  HD void merge_lanes() {
    if constexpr (kOffset > 0) {
      using F = std::conditional_t<(kOffset >= Isa::kWidth), Isa, Scalar>;
#pragma GCC unroll 8
      for (int lane = 0; lane < kOffset; lane += F::kWidth) merge_at<F>(lane, kOffset);
      merge_lanes<Isa, kOffset / 2>();
    }
  }

  // `count` of kRowGroups have values.
  HD void merge_groups(int count) {
    merge_by_halving<kRowGroups>(
        count, [&](int i, int other) HD_LAMBDA { merge_at<Scalar>(i, other - i); });
  }

 private:
  template <class F>
  HD void merge_at(int lane, int offset) {
    F values[kValues], others[kValues];
    load(lane, values);
    load(lane + offset, others);
    Sum::merge(values, others);
    store(lane, values);
  }
};

// Vectors whose values are in registers at a time.
constexpr int kVectorsAtOnce = 4;

// The values of a row of `columns`, to which sum.add(values, c, first, count) adds those of a
// vector.
template <class Isa, class Sum>
HD void sum_row(const Sum& sum, int64_t columns, float (&result)[Sum::kValues]) {
  constexpr int kStep = kVectorsAtOnce * Isa::kWidth;
  const int64_t spans = ceil_div(columns, Sum::kSpan);
  const int groups = int(spans < kRowGroups ? spans : kRowGroups);
  RowLanes<Sum> lanes, row_values;
  for (int group = 0; group < groups; ++group) {
    for (int64_t span = group; span < spans; span += kRowGroups) {
      const int64_t begin = span * Sum::kSpan;
      const int64_t end = begin + Sum::kSpan < columns ? begin + Sum::kSpan : columns;
      for (int lane = 0; lane < kRowWidth; lane += kStep) {
        Isa value[kVectorsAtOnce][Sum::kValues];
        for (int v = 0; v < kVectorsAtOnce; ++v) {
          if (span == group) {
            Sum::start(value[v]);
          } else {
            lanes.load(lane + v * Isa::kWidth, value[v]);
          }
        }
        const auto add = [&](auto whole, int64_t c, int count) HD_LAMBDA {
#pragma GCC unroll 4
          for (int v = 0; v < kVectorsAtOnce; ++v)
            sum.template add<whole>(value[v], c, v * Isa::kWidth, count);
        };
        int64_t c = begin + lane;
        for (; c + kStep <= end; c += kRowWidth) add(std::true_type(), c, kStep);
        if (c < end) add(std::false_type(), c, int(end - c));
        for (int v = 0; v < kVectorsAtOnce; ++v) lanes.store(lane + v * Isa::kWidth, value[v]);
      }
    }
    lanes.template merge_lanes<Isa>();
    Scalar value[Sum::kValues];
    lanes.load(0, value);
    row_values.store(group, value);
  }
  row_values.merge_groups(groups);
  for (int k = 0; k < Sum::kValues; ++k) result[k] = row_values.value[k][0];
}

// A bit for each column of vector `first` that exists.
template <bool kWhole, class F>
HD uint32_t column_bits(int first, int count) {
  if (kWhole) return 0xffffu;
  const int lanes = columns_in_vector(count, first, F::kWidth);
  return lanes > 0 ? (1u << lanes) - 1 : 0;
}

template <class F, bool kWhole>
HD F load_weight(const float* weights, int64_t c, int first, int count) {
  using Floats = typename F::template Lanes<DType::kFloat32>;
  if (weights == nullptr) return F(1.0f);
  return load_columns<Floats, F, kWhole>(reinterpret_cast<const char*>(weights), c, first, count);
}

// The sum of a row sum op.
template <class Op, bool kPlain, class Lanes>
struct RowSum {
  static constexpr int kValues = Op::kValues, kSpan = kSpanColumns;
  const char* row;
  const float* weights;

  template <class F>
  HD static void start(F (&value)[kValues]) {
    Op::start(value);
  }
  template <class F>
  HD static void merge(F (&value)[kValues], const F (&other)[kValues]) {
    Op::merge(value, other);
  }
  template <bool kWhole, class F>
  HD void add(F (&value)[kValues], int64_t c, int first, int count) const {
    const uint32_t bits = column_bits<kWhole, F>(first, count);
    F x = load_columns<Lanes, F, kWhole>(row, c, first, count);
    if constexpr (!kWhole) x = keep(bits, x) + keep(~bits, F(Op::kAbsent));
    F weight(1.0f);
    if constexpr (!kPlain) weight = load_weight<F, kWhole>(weights, c, first, count);
    Op::template add<kPlain>(value, x, weight, bits);
  }
};

// A stage of a row pass. (Nothing here is read through a reference: after every store to an image
// it would be read again.)
template <class Isa, class Op, unsigned kUsed, class Lanes, int kStage>
struct PassStage {
  static constexpr int kValues = Op::kSums, kSpan = kPassColumns;
  static constexpr unsigned kRead = Op::reads(kUsed, kStage), kWritten = Op::writes(kUsed, kStage);
  char* rows[kMaxImages];
  const float* weights;
  Isa coef[Op::kCoefs];

  HD PassStage(const NnArgs& args, int64_t row, const float* affine,
               const float (&coefs)[Op::kCoefs])
      : weights(affine) {
    for (int i = 0; i < kMaxImages; ++i) rows[i] = row_of(args, i, row);
    for (int k = 0; k < Op::kCoefs; ++k) coef[k] = Isa(coefs[k]);
  }
  template <class F>
  HD static void start(F (&value)[kValues]) {
    for (F& each : value) each = F(0.0f);
  }
  template <class F>
  HD static void merge(F (&value)[kValues], const F (&other)[kValues]) {
    for (int k = 0; k < kValues; ++k) value[k] = value[k] + other[k];
  }
  template <bool kWhole>
  HD void load(Isa (&x)[kMaxImages], int64_t c, int first, int count) const {
#pragma GCC unroll 4
    for (int i = 0; i < kMaxImages; ++i)
      if (kRead & bit(i)) x[i] = load_columns<Lanes, Isa, kWhole>(rows[i], c, first, count);
  }
  template <bool kWhole>
  HD void store(Isa (&x)[kMaxImages], int64_t c, int first, int count) const {
#pragma GCC unroll 4
    for (int i = 0; i < kMaxImages; ++i)
      if (kWritten & bit(i)) store_columns<Lanes, Isa, kWhole>(x[i], rows[i], c, first, count);
  }
  template <bool kWhole>
  HD void add(Isa (&value)[kValues], int64_t c, int first, int count) const {
    Isa x[kMaxImages] = {};
    load<kWhole>(x, c, first, count);
    if constexpr (kWritten != 0) {
      Op::template first<kUsed>(x);
      store<kWhole>(x, c, first, count);
#pragma GCC unroll 4
      for (int i = 0; i < kMaxImages; ++i)
        if (kWritten & bit(i)) x[i] = Isa(Lanes::widen(Lanes::narrow(x[i])));
    }
    const Isa weight = load_weight<Isa, kWhole>(weights, c, first, count);
    Op::template add<kStage, kUsed>(x, coef, weight, column_bits<kWhole, Isa>(first, count), value);
  }
  template <bool kWhole>
  HD void map(const float* biases, int64_t c, int count) const {
    Isa x[kMaxImages] = {};
    load<kWhole>(x, c, 0, count);
    Op::template apply<kUsed>(x, coef, load_weight<Isa, kWhole>(weights, c, 0, count),
                              load_weight<Isa, kWhole>(biases, c, 0, count));
    store<kWhole>(x, c, 0, count);
  }
};

// Stage kStage of a row and those that follow.
template <class Isa, class Op, unsigned kUsed, class Lanes, int kStage = 0>
HD void pass_row(const NnArgs& args, int64_t row, const float* affine, float (&coef)[Op::kCoefs]) {
  const PassStage<Isa, Op, kUsed, Lanes, kStage> stage(args, row, affine, coef);
  const int64_t columns = args.image.channels;
  if constexpr (kStage < Op::kStages) {
    float sums[Op::kSums];
    sum_row<Isa>(stage, columns, sums);
    Op::template finish_stage<kStage>(args, row, sums, coef);
    pass_row<Isa, Op, kUsed, Lanes, kStage + 1>(args, row, affine, coef);
  } else {
    const float* biases = affine + coef_stride(args.image);
    for_vectors<Isa>(columns, [&](int64_t c, int count, auto whole)
                                  HD_LAMBDA { stage.template map<whole>(biases, c, count); });
  }
}

// run(plain, lanes) of the instance of a row op that is compiled for the arguments.
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
  with_row_instance<Isa, Op>(args, [&](auto plain, auto stored) HD_LAMBDA {
    for (int64_t row = begin; row < end; ++row) {
      const RowSum<Op, plain, decltype(stored)> sum{row_of(args, Op::kInput, row),
                                                    args.vectors[Op::kWeight]};
      float value[Op::kValues];
      sum_row<Isa>(sum, args.image.channels, value);
      Op::finish(args, row, value);
    }
  });
}

template <class Isa, class Op>
void NnKernel<Isa, Op>::row_pass(NnArgs args, const float* affine, int64_t begin, int64_t end) {
  with_used_images<Op>(args, [&](auto used) HD_LAMBDA {
    with_lanes<Isa>(args.image.dtype, [&](auto stored) HD_LAMBDA {
      for (int64_t row = begin; row < end; ++row) {
        float coef[Op::kCoefs];
        Op::template begin<used>(args, row, coef);
        pass_row<Isa, Op, used, decltype(stored)>(args, row, affine, coef);
      }
    });
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
      for_vectors<Isa>(columns, [&](int64_t c, int count, auto whole) HD_LAMBDA {
        Isa weight(1.0f);
        if constexpr (!plain) weight = load_weight<Isa, whole>(weights, c, 0, count);
        const Isa y = Op::template apply<plain>(load_columns<Lanes, Isa, whole>(input, c, 0, count),
                                                all, weight, 0);
        store_columns<Lanes, Isa, whole>(y, output, c, 0, count);
      });
      const float weight = weights ? weights[target] : 1.0f;
      store_float(output, dtype, target, Op::template apply<plain>(x, coef, weight, 1));
    }
  });
}

}  // namespace ampfuse
