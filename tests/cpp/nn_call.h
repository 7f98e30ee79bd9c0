// A pass of a fused layer with everything that it takes, in the memory of one backend.
#pragma once

#include <algorithm>

#include "core/nn_ops.h"
#include "world.h"

namespace ampfuse {

// What `Op` takes of one backend's memory, without the optional lists in `absent`.
template <class Op>
class NnCall {
 public:
  static constexpr bool kAlongRows =
      Op::kKind != PassKind::kChannelSum && Op::kKind != PassKind::kChannelMap;

  NnCall(bool cuda, ImageRows image, unsigned absent) : cuda_(cuda) {
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
    args_.batches = static_cast<int64_t*>(bytes(int64_t(sizeof(int64_t))));
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
    if constexpr (Op::kKind == PassKind::kChannelSum) {
      const int64_t count = image.channels * image.spans();
      partials_ = Buffer(cuda, std::vector<char>(size_t(count) * sizeof(typename Op::Partial)));
      args_.partials = partials_.data();
    }
  }

  void start(void* stream = nullptr) {
    (cuda_ ? *cuda_backend() : cpu_backend()).run(NnOp::of<Op>(), args_, stream);
  }

  // All lists, in the bits that every backend leaves.
  std::vector<std::vector<char>> results() {
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
  Buffer partials_{false, {}};  // each backend's in an order of its own
  std::vector<DType> types_;    // of the values in each
};

// All lists of a call on each backend. `where` names them in the message.
template <class... Where>
void expect_same_lists(const std::vector<std::vector<char>>& expected,
                       const std::vector<std::vector<char>>& found, const Where&... where) {
  for (size_t list = 0; list < expected.size(); ++list) {
    const auto& e = expected[list];
    const size_t at =
        size_t(std::mismatch(e.begin(), e.end(), found[list].begin()).first - e.begin());
    EXPECT(at == e.size(), where..., ": byte ", at, " of ", e.size(), " in list ", list, " is ",
           int(found[list][at]), " and not ", int(e[at]));
  }
}

}  // namespace ampfuse
