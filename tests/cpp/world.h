// One table of tensors with everything beside it, in the memory of one backend. Two worlds made
// from the same specification hold the same bits; after the same calls they still must.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <memory>
#include <vector>

#include "core/backend.h"
#include "core/ops.h"
#include "harness.h"

namespace ampfuse {

inline void cuda(cudaError_t status) { EXPECT(status == cudaSuccess, cudaGetErrorName(status)); }

// One tensor: its elements, and which lists it has in which type.
struct RowSpec {
  int64_t numel = 0;
  DType types[kLists] = {};
  int misaligned = 0;  // every list starts this many elements after a 16-byte boundary
  bool scaled = false;
  int64_t origin = 0;
  RowHyper hyper;
};

constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16,
                kAbsent = DType::kNone;

// SplitMix64 (Steele, Lea & Flood 2014): most of these tests' time went into the standard library's
// normal distribution.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed << 32) {}
  uint64_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // About that: four uniform parts, with deviation 1 together.
  float normal() {
    const uint64_t z = bits();
    const int64_t sum = int64_t(z & 0xffff) + int64_t(z >> 16 & 0xffff) +
                        int64_t(z >> 32 & 0xffff) + int64_t(z >> 48);
    return float(sum - 2 * 0xffff) * (1.7320508f / 0x10000);
  }

 private:
  uint64_t state_;
};

// Memory that the backend works on. On CUDA each buffer is an allocation of its own, so that a
// sanitizer sees the first byte past its end.
class Buffer {
 public:
  Buffer(bool on_cuda, std::vector<char> contents) : on_cuda_(on_cuda), host_(std::move(contents)) {
    if (host_.empty()) host_.push_back(0);  // an empty list is present all the same
    if (!on_cuda_) return;
    void* memory = nullptr;
    cuda(cudaMalloc(&memory, host_.size()));
    device_.reset(static_cast<char*>(memory), [](char* p) { (void)cudaFree(p); });
    cuda(cudaMemcpyAsync(memory, host_.data(), host_.size(), cudaMemcpyHostToDevice, nullptr));
    cuda(cudaDeviceSynchronize());
  }
  void* data() { return on_cuda_ ? device_.get() : host_.data(); }
  const std::vector<char>& read() {
    if (on_cuda_) {
      cuda(cudaDeviceSynchronize());
      cuda(cudaMemcpyAsync(host_.data(), device_.get(), host_.size(), cudaMemcpyDeviceToHost,
                           nullptr));
      cuda(cudaDeviceSynchronize());
    }
    return host_;
  }
  void write(size_t offset, const void* from, size_t bytes) {
    read();
    std::memcpy(host_.data() + offset, from, bytes);
    if (on_cuda_) {
      cuda(cudaMemcpyAsync(device_.get(), host_.data(), host_.size(), cudaMemcpyHostToDevice,
                           nullptr));
      cuda(cudaDeviceSynchronize());
    }
  }

 private:
  bool on_cuda_;
  std::vector<char> host_;
  std::shared_ptr<char> device_;
};

// A single value in the backend's memory.
template <class T>
class Cell {
 public:
  explicit Cell(bool on_cuda, const T& value, size_t count = 1)
      : buffer_(on_cuda, bytes(value, count)) {}
  T* get() { return static_cast<T*>(buffer_.data()); }
  T read(size_t i = 0) {
    T value;
    std::memcpy(static_cast<void*>(&value), buffer_.read().data() + i * sizeof(T), sizeof(T));
    return value;
  }
  const std::vector<char>& all() { return buffer_.read(); }
  void write(const T& value, size_t i = 0) { buffer_.write(i * sizeof(T), &value, sizeof(T)); }

 private:
  static std::vector<char> bytes(const T& value, size_t count) {
    std::vector<char> bytes(count * sizeof(T));
    for (size_t i = 0; i < count; ++i) std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
    return bytes;
  }
  Buffer buffer_;
};

class World {
 public:
  World(bool cuda, const std::vector<RowSpec>& specs, unsigned seed = 1)
      : on_cuda(cuda),
        state(cuda, StepState()),
        steps(cuda, 0.0f, specs.size() + 1),
        found_inf(cuda, 0.0f),
        norm(cuda, -1.0f),
        row_norms(cuda, -1.0f, specs.size() + 1),
        row_largest(cuda, -1.0f, specs.size() + 1),
        param_norms(cuda, -1.0f, specs.size() + 1),
        norm_averages(cuda, 0.0f, specs.size() + 1),
        loss_scale(cuda, 1024.0f),
        specs_(specs) {
    std::vector<int64_t> numel, origin;
    for (const RowSpec& spec : specs) {
      numel.push_back(spec.numel);
      origin.push_back(spec.origin);
    }
    table = std::make_unique<Table>(numel, origin);
    for (size_t row = 0; row < specs.size(); ++row) {
      table->set_scaled(int64_t(row), specs[row].scaled);
      table->set_hyper(int64_t(row), int64_t(row) + 1, specs[row].hyper);
      for (int column = 0; column < kColumns; ++column) {
        buffers_.push_back(nullptr);
        if (type(int64_t(row), column) != kAbsent) fill(int64_t(row), column, seed);
      }
    }
  }

  Backend& backend() const { return on_cuda ? *cuda_backend() : cpu_backend(); }

  // New random contents at a new address.
  void fill(int64_t row, int list, unsigned seed) {
    const RowSpec& spec = specs_[size_t(row)];
    const DType type = this->type(row, list);
    const int64_t size = element_size(type), count = length(row, list);
    Random random(seed * 7919u + unsigned(row) * 31u + unsigned(list));
    std::vector<char> contents(size_t((count + spec.misaligned) * size));
    for (int64_t i = 0; i < count; ++i) {
      float value = random.normal();
      if (!is_plain(plain(type))) {
        const auto bits = uint16_t(random.bits());
        std::memcpy(contents.data() + (i + spec.misaligned) * size, &bits, size_t(size));
        continue;
      }
      // Second moments are not negative; Adagrad's is the first state.
      if (is_state(list) || list >= kScale0) value = value * value;
      if (list == kGrad && spec.scaled) value *= 1024.0f;
      store_float(contents.data(), plain(type), i + spec.misaligned, value);
    }
    buffer(row, list) = std::make_unique<Buffer>(on_cuda, contents);
    alias(row, list, list);
  }
  // `list` shares the memory of `other`.
  void alias(int64_t row, int list, int other) {
    const DType type = this->type(row, other);
    char* data = static_cast<char*>(buffer(row, other)->data());
    table->set(list, row, data + specs_[size_t(row)].misaligned * element_size(type), type);
  }
  void set(int64_t row, int list, int64_t i, float value) {
    const RowSpec& spec = specs_[size_t(row)];
    const DType type = this->type(row, list);
    char stored[4];
    store_float(stored, type, 0, value);
    const int64_t size = element_size(type);
    buffer(row, list)->write(size_t((i + spec.misaligned) * size), stored, size_t(size));
  }
  const std::vector<char>& bytes(int64_t row, int list) {
    static const std::vector<char> none;
    return buffer(row, list) ? buffer(row, list)->read() : none;
  }
  // Types other than floats, such as 8-bit states, are read as integers.
  std::vector<float> values(int64_t row, int list) {
    const RowSpec& spec = specs_[size_t(row)];
    const DType type = this->type(row, list);
    std::vector<float> values;
    const std::vector<char>& bytes = this->bytes(row, list);
    if (bytes.empty()) return values;
    for (int64_t i = spec.misaligned; i < spec.misaligned + length(row, list); ++i) {
      if (is_plain(plain(type))) {
        values.push_back(load_float(bytes.data(), plain(type), i));
        continue;
      }
      uint16_t bits = 0;
      const auto size = size_t(element_size(type));
      std::memcpy(&bits, bytes.data() + size_t(i) * size, size);
      values.push_back(float(bits));
    }
    return values;
  }
  int64_t rows() const { return int64_t(specs_.size()); }

  void inspect(void* stream = nullptr, const Preparation& preparation = {}) {
    InspectArgs args;
    args.preparation = preparation;
    args.fresh = fresh;
    args.scale = loss_scale.get();
    args.state = state.get();
    args.found_inf = found_inf.get();
    args.norm = norm.get();
    args.row_norms = row_norms.get();
    args.row_largest = row_largest.get();
    backend().inspect(*table, args, stream);
  }
  void step(Algorithm algorithm, double max_norm = 1.0, bool skip = true, void* stream = nullptr) {
    for (int64_t row = 0; row < rows(); ++row) {
      RowHyper& hyper = specs_[size_t(row)].hyper;
      if (hyper.algorithm == algorithm.index()) continue;
      hyper.algorithm = algorithm.index();
      table->set_hyper(row, row + 1, hyper);
    }
    step(std::vector<Algorithm>{algorithm}, max_norm, skip, stream);
  }
  // Each row names its algorithm by its place in `algorithms`.
  void step(const std::vector<Algorithm>& algorithms, double max_norm = 1.0, bool skip = true,
            void* stream = nullptr) {
    Preparation preparation;
    preparation.state = state.get();
    StepDecision& decision = preparation.decision;
    decision.loss_scale = loss_scale.get();
    decision.max_norm = max_norm;
    decision.norm_known = true;
    decision.skip_nonfinite = skip;
    decision.skip_spikes = 6;
    RowColumns& columns = preparation.columns;
    columns.steps = steps.get();
    for (const Algorithm algorithm : algorithms) {
      if (info(algorithm).grad_norms) columns.norm_averages = norm_averages.get();
    }
    columns.grad_norms = row_norms.get();
    columns.grad_largest = row_largest.get();
    if (layerwise) {
      backend().measure_params(*table, param_norms.get(), stream);
      columns.param_norms = param_norms.get();
    }
    if (apart) {
      inspect(stream);
      backend().prepare(*table, preparation, stream);
    } else {
      inspect(stream, preparation);
    }
    const StepState* const decided = knows_decision ? state.get() : nullptr;
    for (const Algorithm algorithm : algorithms) {
      table->only_algorithm = algorithms.size() > 1 ? algorithm.index() : -1;
      backend().first_stage(*table, algorithm, decided, stream);
      backend().update(*table, algorithm, decided, meter, stream);
    }
    table->only_algorithm = -1;
  }

  const bool on_cuda;
  std::unique_ptr<Table> table;
  Cell<StepState> state;
  bool layerwise = false;        // the norms of parameters take part
  bool apart = false;            // the inspection and the preparation are two calls
  bool fresh = false;            // an inspection judges new gradients alone
  bool knows_decision = true;    // the passes of a step get its state, and not null
  const Meter* meter = nullptr;  // steps are metered
  Cell<float> steps, found_inf, norm, row_norms, row_largest, param_norms, norm_averages,
      loss_scale;

 private:
  // The type of a list, or of a column of scales, which exists where its state is quantized.
  DType type(int64_t row, int column) const {
    const RowSpec& spec = specs_[size_t(row)];
    if (column < kLists) return spec.types[column];
    return is_quantized(spec.types[column - kScale0 + kState0]) ? kF32 : kAbsent;
  }
  int64_t length(int64_t row, int column) const {
    const int64_t numel = specs_[size_t(row)].numel;
    return column < kLists ? numel : blocks_of(numel);
  }
  std::unique_ptr<Buffer>& buffer(int64_t row, int list) {
    return buffers_[size_t(row * kColumns + list)];
  }

  std::vector<RowSpec> specs_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

// Equal bits; which NaN it is may differ.
inline bool same(float a, float b) { return float_bits(a) == float_bits(b) || (a != a && b != b); }

inline void expect_same(World& a, World& b) {
  for (int64_t row = 0; row < a.rows(); ++row) {
    for (int list = 0; list < kColumns; ++list) {
      if (a.bytes(row, list) == b.bytes(row, list)) continue;  // not so: maybe by a NaN's kind
      const std::vector<float> x = a.values(row, list), y = b.values(row, list);
      EXPECT(x.size() == y.size());
      for (size_t i = 0; i < x.size(); ++i) {
        EXPECT(same(x[i], y[i]), "row ", row, " list ", list, " element ", i, " of ", x.size(),
               ": ", x[i], " and ", y[i]);
      }
    }
    EXPECT(same(a.steps.read(size_t(row)), b.steps.read(size_t(row))), "step of row ", row);
    for (const auto column :
         {&World::row_norms, &World::row_largest, &World::param_norms, &World::norm_averages}) {
      const float x = (a.*column).read(size_t(row)), y = (b.*column).read(size_t(row));
      EXPECT(same(x, y), "a norm of row ", row, ": ", x, " and ", y);
    }
  }
  const StepState x = a.state.read(), y = b.state.read();
  EXPECT(x.sum_squares == y.sum_squares ||
             (x.sum_squares != x.sum_squares && y.sum_squares != y.sum_squares),
         x.sum_squares, " and ", y.sum_squares);
  EXPECT(x.found_inf == y.found_inf && x.bad_row == y.bad_row && x.bad_bits == y.bad_bits);
  EXPECT(x.skip == y.skip && x.history.steps == y.history.steps &&
         x.history.nonfinite == y.history.nonfinite && x.history.spikes == y.history.spikes);
  EXPECT(x.history.log_mean == y.history.log_mean &&
         x.history.log_variance == y.history.log_variance);
  EXPECT(x.last_bad_row == y.last_bad_row && x.last_bad_bits == y.last_bad_bits);
  EXPECT(same(x.grad_norm, y.grad_norm) && same(x.clip_coef, y.clip_coef) &&
         x.loss_scale == y.loss_scale);
  EXPECT(a.found_inf.read() == b.found_inf.read());
  EXPECT(same(a.norm.read(), b.norm.read()));
}

// The same world on both backends.
struct Pair {
  World cpu, gpu;
  Pair(const std::vector<RowSpec>& specs, unsigned seed = 1)
      : cpu(false, specs, seed), gpu(true, specs, seed) {}

  template <class Body>
  void both(const Body& body) {
    body(cpu);
    body(gpu);
  }
  void expect_same() { ampfuse::expect_same(cpu, gpu); }
};

}  // namespace ampfuse
