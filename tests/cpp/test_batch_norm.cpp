// Batch normalization at its seams: the CUDA backend must leave the bits that the CPU backend
// leaves. Every list is an allocation of its own, so that a sanitizer sees what is past its end.
#include "world.h"

using namespace ampfuse;

namespace {

struct Layer {
  ImageRows image;
  bool residual, relu, frozen;
  int branches;
};

// The lists of a layer in the memory of one backend, and what its four passes leave there.
class Norm {
 public:
  Norm(bool cuda, const Layer& layer) : cuda_(cuda), layer_(layer) {}

  std::vector<std::vector<char>> run() {
    const ImageRows& image = layer_.image;
    BatchNorm& backend = (cuda_ ? *cuda_backend() : cpu_backend()).batch_norm();
    const int64_t c = image.channels;
    void* const x = values(image.rows * c, image.dtype, 1);
    float* const mean = floats(c, 2);
    float* const invstd = floats(c, 3);
    float* const weight = floats(c, 4);
    if (!layer_.frozen) {
      MomentArgs args = {image, x, nullptr, {}};
      args.partials = static_cast<MomentSums*>(bytes(c * image.spans() * sizeof(MomentSums)));
      args.statistics = {mean, floats(c, 5), invstd, floats(c, 6), floats(c, 7), 0.1f, 1e-5f};
      backend.moments(args, nullptr);
    }
    ApplyArgs apply = {image, x, nullptr, nullptr, nullptr, mean, invstd, weight, nullptr};
    if (layer_.residual) apply.residual = values(image.rows * c, image.dtype, 8);
    if (layer_.relu) apply.mask = static_cast<uint8_t*>(bytes(image.rows * image.mask_bytes()));
    apply.y = values(image.rows * c, image.dtype, 9);
    apply.bias = floats(c, 10);
    backend.apply(apply, nullptr);

    ReduceArgs reduce = {};
    reduce.image = image;
    reduce.branches = layer_.branches;
    for (int b = 0; b < layer_.branches; ++b)
      reduce.dy[b] = values(image.rows * c, image.dtype, 11 + unsigned(b));
    reduce.mask = apply.mask;
    reduce.x = x;
    reduce.mean = mean;
    if (layer_.branches > 1 || layer_.residual) reduce.g = values(image.rows * c, image.dtype, 20);
    reduce.partials = static_cast<GradientSums*>(bytes(c * image.spans() * sizeof(GradientSums)));
    reduce.sum = floats(c, 21);
    reduce.centered = floats(c, 22);
    backend.reduce(reduce, nullptr);

    InputGradientArgs dx = {};
    dx.image = image;
    dx.dy = reduce.g ? reduce.g : reduce.dy[0];
    dx.mask = reduce.g ? nullptr : apply.mask;
    dx.x = x;
    dx.dx = values(image.rows * c, image.dtype, 23);
    dx.mean = mean;
    dx.invstd = invstd;
    dx.weight = weight;
    if (!layer_.frozen) dx.sum_dy = reduce.sum, dx.sum_centered = reduce.centered;
    dx.inverse_count = 1.0f / float(image.rows);
    backend.input_gradient(dx, nullptr);

    std::vector<std::vector<char>> found;
    for (Buffer& buffer : buffers_) found.push_back(buffer.read());
    return found;
  }

 private:
  void* bytes(size_t count) { return keep(std::vector<char>(count)); }
  float* floats(int64_t count, unsigned seed) {
    return static_cast<float*>(values(count, DType::kFloat32, seed));
  }
  void* values(int64_t count, DType dtype, unsigned seed) {
    Random random(seed);
    std::vector<char> contents(size_t(count * element_size(dtype)));
    for (int64_t i = 0; i < count; ++i)
      store_float(contents.data(), dtype, i, float(random.bits() % 2000) / 500.0f - 1.5f);
    return keep(std::move(contents));
  }
  void* keep(std::vector<char> contents) {
    buffers_.emplace_back(cuda_, std::move(contents));
    return buffers_.back().data();
  }

  bool cuda_;
  Layer layer_;
  std::vector<Buffer> buffers_;
};

}  // namespace

TEST(batch_norm) {
  int variant = 0;
  for (const DType dtype : {kF32, kF16, kBF16}) {
    for (const int64_t channels : {1, 7, 8, 9, 16, 40, 64, 65, 150}) {
      for (const int64_t rows : {1, 31, 32, 33, 70, kSpanRows - 1, kSpanRows + 1}) {
        ++variant;
        Layer layer = {{rows, channels, dtype},
                       variant % 2 == 0,
                       variant % 3 != 0,
                       variant % 5 == 0,
                       1 + variant % 7 % 4};
        const auto expected = Norm(false, layer).run(), found = Norm(true, layer).run();
        for (size_t list = 0; list < expected.size(); ++list)
          EXPECT(found[list] == expected[list], "list ", list, " of ", rows, " rows of ", channels,
                 " channels, variant ", variant);
      }
    }
  }
}
