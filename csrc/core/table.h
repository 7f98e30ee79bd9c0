// The table of tensors that one call works on, and the plan that cuts it into chunks.
//
// Both backends walk the same chunks in the same way, so a result depends on neither the number of
// tensors nor the number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/dtype.h"
#include "core/hyper.h"
#include "core/lists.h"
#include "core/quantized.h"
#include "core/reduce.h"

namespace ampfuse {

struct Chunk {
  int32_t row;
  int32_t index;  // of this chunk within its row: it starts at element index * kChunk
};

// The index of `list` among the lists that a pass measures.
HD constexpr int measure_of(unsigned measured, int list) {
  return count_lists(measured & (bit(list) - 1));
}

// A kernel's view of a table: columns, in host memory for the CPU backend and in device memory for
// CUDA.
struct TableView {
  void* const* data = nullptr;           // [kColumns][rows]
  const DType* dtype = nullptr;          // [kColumns][rows]
  const int64_t* numel = nullptr;        // [rows]
  const int64_t* origin = nullptr;       // [rows] where its elements begin in what it is a shard of
  const uint8_t* scaled = nullptr;       // [rows] 1: kGrad carries the loss scale
  const int64_t* first_chunk = nullptr;  // [rows + 1]
  // Rows with the same entry have the same hyper-parameters.
  const int32_t* hyper_of = nullptr;  // [rows] the row's entry in `hyper`
  const RowHyper* hyper = nullptr;    // [hyper_count], of at most `rows`
  const Chunk* chunks = nullptr;      // [chunk_count]
  RowCoef* coefs = nullptr;           // [rows]
  // Scratch of one pass: what it measures, of up to kMeasures lists.
  Partial* partials = nullptr;  // [kMeasures][chunk_count]
  float* norms = nullptr;       // [kMeasures][rows]
  int64_t rows = 0;
  int64_t chunk_count = 0;
  int64_t hyper_count = 0;
  int32_t only_algorithm = -1;  // see Table::only_algorithm

  HD void* pointer(int list, int64_t row) const { return data[list * rows + row]; }
  HD DType type(int list, int64_t row) const { return dtype[list * rows + row]; }
  // The scale of the block that holds element i of a state, if the state is quantized.
  HD float* scale(int list, int64_t row, int64_t i) const {
    float* scales = static_cast<float*>(pointer(list - kState0 + kScale0, row));
    return scales ? scales + i / kScaleBlock : nullptr;
  }
  HD bool has_gradient(int64_t row) const {
    return pointer(kGrad, row) != nullptr || pointer(kAccumulated, row) != nullptr;
  }
  // Whether the pass covers the row, if it has a gradient.
  HD bool is_in_pass(int64_t row) const {
    return only_algorithm < 0 || hyper[hyper_of[row]].algorithm == only_algorithm;
  }
  HD bool is_stepped(int64_t row) const { return has_gradient(row) && is_in_pass(row); }
};

// What may have changed in a table's columns.
struct Changes {
  unsigned lists = 0;
  bool scaled = false, hyper = false;

  bool any() const { return lists != 0 || scaled || hyper; }
  void operator|=(const Changes& more) {
    lists |= more.lists;
    scaled |= more.scaled;
    hyper |= more.hyper;
  }
};

// What a backend keeps with a table between calls: device copies of the columns, scratch memory.
struct TableCache {
  virtual ~TableCache() = default;
};

class Table {
 public:
  explicit Table(std::vector<int64_t> numel, std::vector<int64_t> origin = {})
      : numel_(std::move(numel)), origin_(std::move(origin)) {
    const int64_t rows = int64_t(numel_.size());
    origin_.resize(rows);
    data_.resize(kColumns * rows);
    dtype_.resize(kColumns * rows, DType::kNone);
    scaled_.resize(rows);
    hyper_of_.resize(rows);
    if (rows > 0) hyper_.emplace_back();
    hyper_uses_.assign(hyper_.size(), int32_t(rows));
    first_chunk_.push_back(0);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t count = (numel_[row] + kChunk - 1) / kChunk;
      for (int64_t i = 0; i < count; ++i) chunks_.push_back({int32_t(row), int32_t(i)});
      first_chunk_.push_back(int64_t(chunks_.size()));
    }
  }

  int64_t rows() const { return int64_t(numel_.size()); }
  int64_t numel(int64_t row) const { return numel_[row]; }

  void set(int list, int64_t row, void* data, DType dtype) {
    const int64_t i = list * rows() + row;
    if (data_[i] == data && dtype_[i] == dtype) return;
    data_[i] = data;
    dtype_[i] = dtype;
    changed.lists |= bit(list);
  }

  void set_scaled(int64_t row, bool scaled) {
    if (scaled_[row] == uint8_t(scaled)) return;
    scaled_[row] = scaled;
    changed.scaled = true;
  }

  // Sets the hyper-parameters of rows [begin, end), which share an entry.
  void set_hyper(int64_t begin, int64_t end, const RowHyper& hyper) {
    if (begin == end) return;
    for (int64_t row = begin; row < end; ++row) {
      if (--hyper_uses_[hyper_of_[row]] == 0) unused_.push_back(hyper_of_[row]);
    }
    if (unused_.empty()) {
      unused_.push_back(int32_t(hyper_.size()));
      hyper_.emplace_back();
      hyper_uses_.push_back(0);
    }
    const int32_t entry = unused_.back();
    unused_.pop_back();
    hyper_[entry] = hyper;
    hyper_uses_[entry] = int32_t(end - begin);
    for (int64_t row = begin; row < end; ++row) hyper_of_[row] = entry;
    changed.hyper = true;
  }

  // Host columns; coefs and partials are the backend's.
  TableView view() const {
    TableView view;
    view.data = data_.data();
    view.dtype = dtype_.data();
    view.numel = numel_.data();
    view.origin = origin_.data();
    view.scaled = scaled_.data();
    view.first_chunk = first_chunk_.data();
    view.hyper_of = hyper_of_.data();
    view.hyper = hyper_.data();
    view.chunks = chunks_.data();
    view.rows = rows();
    view.chunk_count = int64_t(chunks_.size());
    view.hyper_count = int64_t(hyper_.size());
    view.only_algorithm = only_algorithm;
    return view;
  }

  // Since a backend last copied the columns, which start as zeros; the backend clears it.
  Changes changed;

  // Which of the rows passes step from now on: those of the Algorithm with this index; -1: all.
  int32_t only_algorithm = -1;

  std::unique_ptr<TableCache> cache;

 private:
  std::vector<int64_t> numel_, origin_;
  std::vector<void*> data_;
  std::vector<DType> dtype_;
  std::vector<uint8_t> scaled_;
  std::vector<int32_t> hyper_of_, hyper_uses_, unused_;  // unused_: entries of no row
  std::vector<RowHyper> hyper_;
  std::vector<Chunk> chunks_;
  std::vector<int64_t> first_chunk_;
};

}  // namespace ampfuse
