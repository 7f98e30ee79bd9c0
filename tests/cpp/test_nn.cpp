// Fused layers at their seams: for every op of NnOps, the CUDA backend must leave the bits that the
// CPU backend leaves. Every list is an allocation of its own, so that a sanitizer sees what is past
// its end.
#include <algorithm>

#include "core/nn_ops.h"
#include "world.h"

using namespace ampfuse;

namespace {

// What `Op` takes of one backend's memory, without the optional lists in `absent`.
template <class Op>
class Call {
 public:
  static constexpr bool kAlongRows =
      Op::kKind != PassKind::kChannelSum && Op::kKind != PassKind::kChannelMap;

  Call(bool cuda, ImageRows image, unsigned absent) : cuda_(cuda) {
    args_.image = image;
    const unsigned lists = (Op::kReads | Op::kWrites) & ~absent;
    for (int i = 0; i < kMaxImages; ++i)
      if (lists & bit(i)) args_.images[i] = values(image.rows * image.channels, image.dtype);
    if (lists & kMask) args_.mask = static_cast<uint8_t*>(bytes(image.rows * image.mask_bytes()));
    for (int i = 0; i < kMaxVectors; ++i) {
      const bool of_rows = Op::kPerRowVectors & bit(i);
      const int64_t count = of_rows ? 2 * image.rows : image.channels;
      args_.vectors[i] = static_cast<float*>(values(count, DType::kFloat32));
    }
    args_.targets = targets();
    // In turn: without, as the image, FP32.
    const DType types[] = {DType::kNone, image.dtype, DType::kFloat32};
    args_.affine.dtype = types[(image.rows + image.channels) % 3];
    if (args_.affine.dtype != DType::kNone) {
      args_.affine.weight = values(image.channels, args_.affine.dtype);
      args_.affine.bias = values(image.channels, args_.affine.dtype);
    }
    const bool may_lack_means = std::is_same_v<Op, RmsNorm> || std::is_same_v<Op, NormBackward> ||
                                std::is_same_v<Op, NormWeights>;
    if (may_lack_means && image.channels % 5 == 0) args_.vectors[Norm::kMean] = nullptr;
    args_.numbers[0] = 0.1f, args_.numbers[1] = 0.01f;
    if (kAlongRows && image.rows % 2 == 0) args_.numbers[0] = 0.0f;
    if constexpr (Op::kKind == PassKind::kChannelSum)
      args_.partials =
          bytes(image.channels * image.spans() * int64_t(sizeof(typename Op::Partial)));
  }

  std::vector<std::vector<char>> run() {
    (cuda_ ? *cuda_backend() : cpu_backend()).run(nn_op<Op>(), args_, nullptr);
    std::vector<std::vector<char>> found;
    for (size_t i = 0; i < buffers_.size(); ++i) {
      std::vector<char> contents = buffers_[i].read();
      with_storage(types_[i], [&](auto storage) { unify_nans(contents, storage); });
      found.push_back(std::move(contents));
    }
    return found;
  }

 private:
  void* bytes(int64_t count) {
    std::vector<char> contents(size_t(count), 0);
    for (char& byte : contents) byte = char(random_.bits());
    return keep(std::move(contents));
  }
  void* values(int64_t count, DType dtype) {
    std::vector<char> contents(size_t(count * element_size(dtype)));
    for (int64_t i = 0; i < count; ++i)
      store_float(contents.data(), dtype, i, float(random_.bits() % 2000) / 500.0f - 1.5f);
    return keep(std::move(contents), dtype);
  }
  // CPUs and GPUs write different ones.
  template <class Storage>
  static void unify_nans(std::vector<char>& contents, Storage) {
    typename Storage::Stored bits;
    for (size_t at = 0; at + sizeof bits <= contents.size(); at += sizeof bits) {
      std::memcpy(&bits, contents.data() + at, sizeof bits);
      if (std::isnan(Storage::widen(bits))) std::memset(contents.data() + at, -1, sizeof bits);
    }
  }
  // Of rows; every fifth one is ignored, and some columns are none.
  const int64_t* targets() {
    std::vector<char> contents(size_t(args_.image.rows) * sizeof(int64_t));
    args_.ignored = -100;
    for (int64_t row = 0; row < args_.image.rows; ++row) {
      const int64_t any = int64_t(random_.bits()) % (args_.image.channels + 1);
      const int64_t target = row % 5 == 4 ? args_.ignored : any;
      std::memcpy(contents.data() + row * int64_t(sizeof target), &target, sizeof target);
    }
    return static_cast<const int64_t*>(keep(std::move(contents)));
  }
  void* keep(std::vector<char> contents, DType dtype = DType::kNone) {
    types_.push_back(dtype);
    buffers_.emplace_back(cuda_, std::move(contents));
    return buffers_.back().data();
  }

  bool cuda_;
  NnArgs args_;
  Random random_{1};
  std::vector<Buffer> buffers_;
  std::vector<DType> types_;  // of the values in each
};

}  // namespace

template <class Op>
void compare(const ImageRows& image, unsigned absent) {
  const auto expected = Call<Op>(false, image, absent).run();
  const auto found = Call<Op>(true, image, absent).run();
  for (size_t list = 0; list < expected.size(); ++list) {
    const auto& e = expected[list];
    const size_t at =
        size_t(std::mismatch(e.begin(), e.end(), found[list].begin()).first - e.begin());
    EXPECT(at == e.size(), Op::kName, ": list ", list, " of ", image.rows, " rows of ",
           image.channels, " channels of type ", int(image.dtype), " without ", absent, ": byte ",
           at, " of ", e.size(), " is ", int(found[list][at]), " and not ", int(e[at]));
  }
}

TEST(nn_ops) {
  int variant = 0;
  for (int op = 0; op < NnOps::kCount; ++op) {
    visit(NnOp{op}, [&](auto type) {
      using Op = typename decltype(type)::type;
      for (const DType dtype : {kF32, kF16, kBF16}) {
        for (const int64_t channels : {1, 7, 8, 9, 16, 40, 64, 65, 150}) {
          for (const int64_t rows : {1, 31, 32, 33, 70, kSpanRows - 1, kSpanRows + 1}) {
            // Most of the time goes into spans: they meet a vector's end, and a block's.
            if (rows > 70 && channels != 1 && channels != 9 && channels != 65) continue;
            // In turn all sets of optional lists; a mask that is read may be absent, too.
            const unsigned read_mask = Op::kReads & kMask;
            unsigned absent = unsigned(++variant) & (Op::kOptional | read_mask);
            if (absent & Op::kTogether) absent |= Op::kTogether;
            compare<Op>({rows, channels, dtype}, absent);
          }
        }
        if (!Call<Op>::kAlongRows) continue;
        for (const int64_t spans : {1, 2, 5, kRowGroups, kRowGroups + 1}) {
          for (const int64_t more : {-1, 0, 1}) {
            compare<Op>({3, spans * kSpanColumns + more, dtype}, 0);
            compare<Op>({4, spans * kSpanColumns + more, dtype}, 0);
          }
        }
      }
    });
  }
}
