// Batch normalization on the CPU: what is shared out to threads, and what is added of their parts.
#include "batch_norm.h"

#include <algorithm>
#include <array>
#include <vector>

#include "float_mode.h"
#include "threads.h"

namespace ampfuse {
namespace {

template <class Call>
void with_kernels(const Call& call) {
  with_isa([&](auto isa) { call(BatchNormKernels<typename decltype(isa)::type>()); });
}

int64_t elements(const ImageRows& image) { return image.rows * image.channels; }

// call(kernels, span, begin, end) for every span and some channels of it.
template <class Call>
void for_spans(const ImageRows& image, const Call& call) {
  // Few spans are cut finer, for every thread to have a task.
  const int64_t width = image.spans() < 16 ? 128 : kTaskChannels;
  const int64_t strips = ceil_div(image.channels, width);
  const int64_t tasks = image.spans() * strips;
  share_out(elements(image), [&](int64_t piece, int64_t pieces) {
    with_kernels([&](auto kernels) {
      for (int64_t task = tasks * piece / pieces; task < tasks * (piece + 1) / pieces; ++task) {
        const int64_t begin = task % strips * width;
        const int64_t end = std::min(begin + width, image.channels);
        call(kernels, task / strips, begin, end);
      }
    });
  });
}

// call(kernels, begin, end) over the rows. Backwards: sums have just been taken forwards, and the
// end of what they read is still in the caches.
template <class Call>
void for_rows(const ImageRows& image, const Call& call) {
  share_out(elements(image), [&](int64_t piece, int64_t pieces) {
    const int64_t from_end = pieces - 1 - piece;
    const int64_t begin = image.rows * from_end / pieces;
    const int64_t end = image.rows * (from_end + 1) / pieces;
    with_kernels([&](auto kernels) { call(kernels, begin, end); });
  });
}

// call(c) for every channel, whose divisions and root take as long as so many elements.
template <class Call>
void for_channels(const ImageRows& image, const Call& call) {
  constexpr int64_t kElements = 64;
  share_out(image.channels * (kElements + image.spans()), [&](int64_t piece, int64_t pieces) {
    const int64_t end = image.channels * (piece + 1) / pieces;
    for (int64_t c = image.channels * piece / pieces; c < end; ++c) call(c);
  });
}

// kCount values of every channel, from of(c, values).
template <size_t kCount>
class PerChannel {
 public:
  template <class Of>
  PerChannel(int64_t channels, const Of& of) : channels_(channels), values_(kCount * channels) {
    const FloatMode standard;
    for (int64_t c = 0; c < channels; ++c) {
      std::array<float, kCount> value;
      of(c, value);
      for (size_t i = 0; i < kCount; ++i) values_[i * channels + c] = value[i];
    }
  }
  const float* operator[](int i) const { return values_.data() + i * channels_; }

 private:
  int64_t channels_;
  std::vector<float> values_;
};

class CpuBatchNorm : public BatchNorm {
 public:
  void moments(const MomentArgs& args, void*) override {
    for_spans(args.image, [&](auto kernels, int64_t span, int64_t begin, int64_t end) {
      kernels.moments(args, span, begin, end);
    });
    const ImageRows& image = args.image;
    const int64_t spans = image.spans();
    for_channels(image, [&](int64_t c) {
      const MomentSums* parts = args.partials + c * spans;
      const double mean =
          sum_strided<kRowLanes>(spans, [&](int64_t i) { return sum_of(image, parts[i], i); }) /
          double(image.rows);
      const double deviations = sum_strided<kRowLanes>(
          spans, [&](int64_t i) { return deviation_of(image, parts[i], i, mean); });
      write_statistics(args.statistics, c, mean, deviations, image.rows);
    });
  }

  void apply(const ApplyArgs& args, void*) override {
    const PerChannel<2> values(args.image.channels, [&](int64_t c, auto& value) {
      value = {scale_of(args.weight, args.invstd, c), bias_of(args.bias, c)};
    });
    const ChannelCoefs coefs = {args.mean, values[0], values[1], nullptr, nullptr};
    for_rows(args.image, [&](auto kernels, int64_t begin, int64_t end) {
      kernels.apply(args, coefs, begin, end);
    });
  }

  void reduce(const ReduceArgs& args, void*) override {
    for_spans(args.image, [&](auto kernels, int64_t span, int64_t begin, int64_t end) {
      kernels.reduce(args, span, begin, end);
    });
    const int64_t spans = args.image.spans();
    for_channels(args.image, [&](int64_t c) {
      const GradientSums* parts = args.partials + c * spans;
      args.sum[c] =
          float(sum_strided<kRowLanes>(spans, [&](int64_t i) { return double(parts[i].sum); }));
      args.centered[c] = float(
          sum_strided<kRowLanes>(spans, [&](int64_t i) { return double(parts[i].centered); }));
    });
  }

  void input_gradient(const InputGradientArgs& args, void*) override {
    const bool frozen = args.sum_dy == nullptr;
    const PerChannel<3> values(args.image.channels, [&](int64_t c, auto& value) {
      value = {scale_of(args.weight, args.invstd, c), frozen ? 0 : mean_dy_of(args, c),
               frozen ? 0 : slope_of(args, c)};
    });
    const ChannelCoefs coefs = {args.mean, values[0], nullptr, values[1], values[2]};
    for_rows(args.image, [&](auto kernels, int64_t begin, int64_t end) {
      kernels.input_gradient(args, coefs, begin, end);
    });
  }
};

}  // namespace

BatchNorm& cpu_batch_norm() {
  static CpuBatchNorm batch_norm;
  return batch_norm;
}

}  // namespace ampfuse
