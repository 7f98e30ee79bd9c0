// A table's columns in device memory, kept between calls: only differences are uploaded.
//
// Note [captured tables]. A copy from host memory that is captured in a CUDA graph would read the
// host again at every replay, long after the staging buffer was reused; and columns shared between
// a graph and eager steps would give the graph the last upload of an eager step. So each capture
// gets its own columns, filled once, outside the graph, and given to the graph as a user object
// that dies with it. A change of the table within the capture makes new columns. Their scratch
// memory stays: a later kernel reads there what an earlier one has written. None of this memory
// comes from the allocator of the capture, whose pool may hand the graph an address that an earlier
// node of the same graph writes again at every replay.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <vector>

#include "core/backend.h"
#include "kernels.cuh"

namespace ampfuse {

// The columns that the host fills, and scratch memory for the kernels.
struct DeviceColumns {
  std::shared_ptr<void> memory, scratch;
  std::vector<char> image;  // what the device has in `memory`
  TableView view;           // every pointer is into `memory` or `scratch`
  // Blocks that have arrived, of each row and of the table; zero between launches.
  unsigned* tickets = nullptr;  // [rows + 1]
  unsigned present = 0;         // lists that some row has
  unsigned encoded = 0;         // ... in an encoded type
};

class DeviceTable : public TableCache {
 public:
  ~DeviceTable() override;

  // Columns that are up to date for work queued on `stream` from now on.
  const DeviceColumns& acquire(Table& table, cudaStream_t stream);
  // Must be called when that work has been queued.
  void release(cudaStream_t stream);

 private:
  void upload_changes(const Table& table, cudaStream_t stream);
  void wait_for_last_use(cudaStream_t stream);

  DeviceColumns eager_;
  bool is_stale_ = false;  // an upload failed: the contents of `eager_` are unknown
  Changes pending_;

  cudaEvent_t last_use_ = nullptr;
  // The ids of the streams that use it now and used it last: a handle may be used again.
  unsigned long long stream_ = 0, last_stream_ = 0;
  bool used_ = false, changed_stream_ = false;

  DeviceColumns captured_;
  unsigned long long capture_ = 0;  // 0: none
};

// The columns of `table` for the scope in which work on `stream` is queued.
class TableUse {
 public:
  TableUse(Table& table, cudaStream_t stream);
  ~TableUse() { cache_.release(stream_); }
  TableUse(const TableUse&) = delete;
  TableUse& operator=(const TableUse&) = delete;

  // A pass over the columns, with default arguments.
  DevicePass pass() const {
    DevicePass pass{columns_.view, columns_.present, columns_.encoded, columns_.tickets, stream_};
    pass.view.only_algorithm = only_algorithm_;
    return pass;
  }

 private:
  DeviceTable& cache_;
  cudaStream_t stream_;
  const DeviceColumns& columns_;
  int32_t only_algorithm_;
};

}  // namespace ampfuse
