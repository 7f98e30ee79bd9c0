// Batch normalization, with the residual addition and the ReLU that follow it in convolutional
// networks.
//
//   forward    mean, var = over the rows of x
//              y = relu((x - mean) * weight / sqrt(var + eps) + bias + residual)
//   backward   g = dy where y > 0: the residual's gradient
//              dx = weight / sqrt(var + eps) * (g - mean(g) - x_hat * mean(g * x_hat))
//
// (Ioffe & Szegedy 2015. Fused like this by cuDNN, MXNet's BatchNormAddRelu and apex's groupbn.)
//
// Least bytes moved per element of half precision in each pass: moments 2; apply 4, 6 with a
// residual, and 1 bit of mask instead of the output that autograd would keep for the ReLU; reduce
// 4, and for a residual 2 more, as g is then written for the next pass; dx 6. Layers that fit into
// a cache take the second read of x and dy from there.
#pragma once

#include "core/nn_ops/nn_op.h"

namespace ampfuse {

HD float first_finite(float value) { return value - value == 0.0f ? value : 0.0f; }

// weight / sqrt(var + eps).
HD float scale_of(const float* weight, const float* invstd, int64_t c) {
  return weight ? weight[c] * invstd[c] : invstd[c];
}

// Mean and variance of each channel, and what follows from them.
//
// Values are taken from a shift, the span's first row, so that nothing cancels where the mean is
// large against the deviation: since the shift is one of the n values, at most the digits of n are
// lost (Chan, Golub & LeVeque 1983).
struct BatchNormMoments : ChannelSum {
  static constexpr const char* kName = "batch_norm_moments";
  enum Image { kX };
  enum Vector {
    kMean,
    kVar,          // biased; may be absent, as the following
    kInvstd,       // 1 / sqrt(var + eps)
    kRunningMean,  // both or none
    kRunningVar    // unbiased
  };
  enum Number { kMomentum, kEps };
  static constexpr unsigned kReads = bit(kX), kWrites = 0;
  static constexpr int kCoefs = 1;

  struct Partial {
    float shift, sum, squares;  // of x - shift
  };

  template <unsigned kUsed>
  HD static void coefs(const NnArgs& args, int64_t row, int64_t c, float (&coef)[kCoefs]) {
    const int64_t first = row * args.image.channels + c;
    coef[0] = first_finite(load_float(args.images[kX], args.image.dtype, first));
  }

  template <unsigned kUsed, class F>
  HD static void add(F (&x)[kMaxImages], const F (&coef)[kCoefs], uint32_t, F& sum, F& squares) {
    const F d = x[kX] - coef[0];
    sum = sum + d;
    squares = fma(d, d, squares);
  }

  HD static Partial partial(const float (&coef)[kCoefs], float sum, float squares) {
    return {coef[0], sum, squares};
  }

  template <class Parts, class Sum>
  HD static void finish(const NnArgs& args, int64_t c, const Parts& parts, const Sum& sum) {
    const ImageRows& image = args.image;
    const double mean =
        sum([&](int64_t i) HD_LAMBDA {
          return double(image.rows_of(i)) * double(parts[i].shift) + double(parts[i].sum);
        }) /
        double(image.rows);
    const double deviations = sum([&](int64_t i) HD_LAMBDA {
      return deviations_of(parts[i], double(image.rows_of(i)), mean);
    });
    if (sum.writes()) write(args, c, mean, deviations);
  }

 private:
  // Squared deviations of one span's values from the mean over all.
  HD static double deviations_of(const Partial& part, double rows, double mean) {
    // A whole span's rows are a power of two: the same number without a division.
    const auto per_row = [&](double sum) HD_LAMBDA {
      return rows == kSpanRows ? sum * (1.0 / kSpanRows) : sum / rows;
    };
    const double within = double(part.squares) - per_row(double(part.sum) * double(part.sum));
    const double apart = double(part.shift) + per_row(double(part.sum)) - mean;
    return within + rows * (apart * apart);
  }

  HD static void write(const NnArgs& args, int64_t c, double mean, double deviations) {
    const double rows = double(args.image.rows);
    const double var = deviations / rows;
    const float momentum = args.numbers[kMomentum];
    args.vectors[kMean][c] = float(mean);
    if (args.vectors[kVar]) args.vectors[kVar][c] = float(var);
    if (args.vectors[kInvstd])
      args.vectors[kInvstd][c] = float(1.0 / square_root(var + double(args.numbers[kEps])));
    if (args.batches && c == 0) ++*args.batches;
    if (args.vectors[kRunningMean]) {
      move(args.vectors[kRunningMean][c], float(mean), momentum);
      move(args.vectors[kRunningVar][c], float(deviations / (rows - 1)), momentum);
    }
  }

  HD static void move(float& running, float value, float momentum) {
    running = (1.0f - momentum) * running + momentum * value;
  }
};

// y, and a bit for each value that the ReLU lets pass; without a mask there is no ReLU.
struct BatchNormApply : ChannelMap {
  static constexpr const char* kName = "batch_norm_apply";
  enum Image { kX, kResidual, kY };
  enum Vector { kMean, kInvstd, kWeight, kBias };  // the last two may be absent
  static constexpr unsigned kReads = bit(kX) | bit(kResidual), kWrites = bit(kY) | kMask;
  static constexpr unsigned kOptional = bit(kResidual) | kMask;
  static constexpr int kCoefs = 3;

  template <unsigned kUsed>
  HD static void coefs(const NnArgs& args, int64_t, int64_t c, float (&coef)[kCoefs]) {
    coef[0] = args.vectors[kMean][c];
    coef[1] = scale_of(args.vectors[kWeight], args.vectors[kInvstd], c);
    coef[2] = args.vectors[kBias] ? args.vectors[kBias][c] : 0.0f;
  }

  template <unsigned kUsed, class F>
  HD static void apply(F (&x)[kMaxImages], const F (&coef)[kCoefs], uint32_t& bits) {
    F y = fma(x[kX] - coef[0], coef[1], coef[2]);
    if constexpr (kUsed & bit(kResidual)) y = y + x[kResidual];
    if constexpr (kUsed & kMask) {
      bits = above_zero(y);
      y = keep(bits, y);
    }
    x[kY] = y;
  }
};

// The sums over g and over g * (x - mean), and the weight's gradient; g itself, where it is wanted.
struct BatchNormReduce : ChannelSum {
  static constexpr const char* kName = "batch_norm_reduce";
  enum Image { kX, kDy, kG };
  enum Vector { kMean, kInvstd, kSum, kCentered, kDweight };
  static constexpr unsigned kReads = bit(kX) | bit(kDy) | kMask, kWrites = bit(kG);
  static constexpr unsigned kOptional = bit(kG);
  static constexpr int kCoefs = 1;

  struct Partial {
    float sum, centered;
  };

  template <unsigned kUsed>
  HD static void coefs(const NnArgs& args, int64_t, int64_t c, float (&coef)[kCoefs]) {
    coef[0] = args.vectors[kMean][c];
  }

  template <unsigned kUsed, class F>
  HD static void add(F (&x)[kMaxImages], const F (&coef)[kCoefs], uint32_t bits, F& sum,
                     F& centered) {
    const F g = keep(bits, x[kDy]);
    sum = sum + g;
    centered = fma(g, x[kX] - coef[0], centered);
    if constexpr (kUsed & bit(kG)) x[kG] = g;
  }

  HD static Partial partial(const float (&)[kCoefs], float sum, float centered) {
    return {sum, centered};
  }

  template <class Parts, class Sum>
  HD static void finish(const NnArgs& args, int64_t c, const Parts& parts, const Sum& sum) {
    const double total = sum([&](int64_t i) HD_LAMBDA { return double(parts[i].sum); });
    const double centered = sum([&](int64_t i) HD_LAMBDA { return double(parts[i].centered); });
    if (!sum.writes()) return;
    args.vectors[kSum][c] = float(total);
    args.vectors[kCentered][c] = float(centered);
    args.vectors[kDweight][c] = float(centered) * args.vectors[kInvstd][c];
  }
};

// dx from dy under the mask; x is absent where the statistics are frozen, dx = weight * invstd * g.
struct BatchNormDx : ChannelMap {
  static constexpr const char* kName = "batch_norm_dx";
  enum Image { kX, kDy, kDx };
  enum Vector { kMean, kInvstd, kWeight, kSum, kCentered };  // the weight may be absent
  enum Number { kInverseCount };
  static constexpr unsigned kReads = bit(kX) | bit(kDy) | kMask, kWrites = bit(kDx);
  static constexpr unsigned kOptional = bit(kX);
  static constexpr int kCoefs = 4;

  template <unsigned kUsed>
  HD static void coefs(const NnArgs& args, int64_t, int64_t c, float (&coef)[kCoefs]) {
    coef[0] = scale_of(args.vectors[kWeight], args.vectors[kInvstd], c);
    if constexpr (kUsed & bit(kX)) {
      const float invstd = args.vectors[kInvstd][c], inverse_count = args.numbers[kInverseCount];
      coef[1] = args.vectors[kMean][c];
      coef[2] = args.vectors[kSum][c] * inverse_count;
      coef[3] = args.vectors[kCentered][c] * inverse_count * (invstd * invstd);
    } else {
      coef[1] = coef[2] = coef[3] = 0.0f;
    }
  }

  template <unsigned kUsed, class F>
  HD static void apply(F (&x)[kMaxImages], const F (&coef)[kCoefs], uint32_t& bits) {
    const F g = keep(bits, x[kDy]);
    if constexpr (kUsed & bit(kX)) {
      x[kDx] = fma(coef[1] - x[kX], coef[3], g - coef[2]) * coef[0];
    } else {
      x[kDx] = g * coef[0];
    }
  }
};

using batch_norm_ops = OpList<BatchNormMoments, BatchNormApply, BatchNormReduce, BatchNormDx>;

}  // namespace ampfuse
