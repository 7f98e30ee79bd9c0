#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "device_table.cuh"
#include "graph_memory.cuh"
#include "launch.cuh"

namespace ampfuse {
namespace {

// --- device memory -------------------------------------------------------------------------------

std::shared_ptr<void> allocate_plain(size_t bytes) {
  void* memory = nullptr;
  CUDA_CHECK(cudaMalloc(&memory, bytes));
  return {memory, [](void* p) { (void)cudaFree(p); }};
}

Allocate allocate_device = allocate_plain;

// --- staging -------------------------------------------------------------------------------------

// Pinned buffers that copies to one device read from, each reused only after the copy before it is
// done. The ring grows while the oldest buffer is still needed, so the host runs up to kMaxBuffers
// uploads ahead of the device before it waits.
class PinnedRing {
 public:
  struct Buffer {
    char* memory = nullptr;
    size_t bytes = 0;
    cudaEvent_t copied = nullptr;
  };

  // A buffer of at least `bytes`. The caller records `copied` after the copies, failed ones too.
  Buffer& take(size_t bytes) {
    bool free = !buffers_.empty() && done(buffers_[next_]);
    if (!free && buffers_.size() < kMaxBuffers) {
      Buffer buffer;
      CUDA_CHECK(cudaEventCreateWithFlags(&buffer.copied, cudaEventDisableTiming));
      buffers_.insert(buffers_.begin() + next_, buffer);
      free = true;
    }
    Buffer& buffer = buffers_[next_];
    if (!free) CUDA_CHECK(cudaEventSynchronize(buffer.copied));
    if (buffer.bytes < bytes) {
      (void)cudaFreeHost(buffer.memory);
      buffer.memory = nullptr;
      buffer.bytes = 0;
      const size_t rounded = std::max(size_t(4096), bytes + bytes / 2);
      void* memory = nullptr;
      CUDA_CHECK(cudaHostAlloc(&memory, rounded, cudaHostAllocDefault));
      buffer.memory = static_cast<char*>(memory);
      buffer.bytes = rounded;
    }
    next_ = (next_ + 1) % buffers_.size();
    return buffer;
  }

  std::mutex mutex;

 private:
  static constexpr size_t kMaxBuffers = 64;

  static bool done(const Buffer& buffer) {
    const cudaError_t status = cudaEventQuery(buffer.copied);
    if (status != cudaErrorNotReady) CUDA_CHECK(status);
    (void)cudaGetLastError();  // "not ready" must not be reported later as an error
    return status == cudaSuccess;
  }

  std::vector<Buffer> buffers_;
  size_t next_ = 0;  // the oldest
};

PinnedRing& pinned_ring() {
  static std::mutex mutex;
  static auto* rings =
      new std::map<int, PinnedRing>;  // by device; CUDA may be gone when statics die
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  const std::lock_guard<std::mutex> lock(mutex);
  return (*rings)[device];
}

// --- columns -------------------------------------------------------------------------------------

// Hands out aligned pieces of one allocation; with no memory yet, it adds up what is needed.
class Carver {
 public:
  explicit Carver(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <class T>
  T* take(int64_t count) {
    T* taken = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    used_ += (sizeof(T) * size_t(count) + 255) / 256 * 256;
    return taken;
  }
  size_t used() const { return used_; }

 private:
  char* memory_;
  size_t used_ = 0;
};

// Columns that change together are neighbours: which gradients a pass reads, and whether they are
// scaled. Returns the bytes of `memory`, which has the scratch memory too if there is none yet.
// Called twice: first without memory, to count them.
size_t lay_out(DeviceColumns& columns, void* memory, const TableView& host) {
  Carver carver(memory);
  TableView& view = columns.view;
  view = host;
  view.scaled = carver.take<uint8_t>(host.rows);
  view.data = carver.take<void*>(kColumns * host.rows);
  view.dtype = carver.take<DType>(kColumns * host.rows);
  view.hyper_of = carver.take<int32_t>(host.rows);
  view.hyper = carver.take<RowHyper>(host.rows);
  view.numel = carver.take<int64_t>(host.rows);
  view.origin = carver.take<int64_t>(host.rows);
  view.first_chunk = carver.take<int64_t>(host.rows + 1);
  view.chunks = carver.take<Chunk>(host.chunk_count);
  if (memory != nullptr) columns.image.assign(carver.used(), 0);
  Carver own(columns.scratch.get());
  Carver& scratch = columns.scratch ? own : carver;
  view.coefs = scratch.take<RowCoef>(host.rows);
  view.partials = scratch.take<Partial>(kMeasures * host.chunk_count);
  view.norms = scratch.take<float>(kMeasures * host.rows);
  columns.tickets = scratch.take<unsigned>(host.rows + 1);
  return carver.used();
}

// Zeroes the columns, as those of a new host table are, and the tickets.
DeviceColumns make_columns(const TableView& host, Allocate allocate, cudaStream_t stream,
                           std::shared_ptr<void> scratch = nullptr) {
  DeviceColumns columns;
  columns.scratch = std::move(scratch);
  const size_t bytes = lay_out(columns, nullptr, host);
  columns.memory = allocate(bytes);
  lay_out(columns, columns.memory.get(), host);
  if (!columns.scratch) columns.scratch = {columns.memory, columns.view.coefs};
  CUDA_CHECK(cudaMemsetAsync(columns.memory.get(), 0, bytes, stream));
  return columns;
}

// Brings columns up to date with the host's: what differs from the device's is copied there, in few
// copies.
class Upload {
 public:
  explicit Upload(DeviceColumns& columns) : columns_(columns) {}

  // Columns come in the order of lay_out().
  template <class T>
  void add(const T* to, const T* from, int64_t count) {
    const size_t bytes = sizeof(T) * size_t(count);
    const size_t begin = size_t(reinterpret_cast<const char*>(to) - device());
    char* image = columns_.image.data() + begin;
    if (bytes == 0 || std::memcmp(image, from, bytes) == 0) return;
    std::memcpy(static_cast<void*>(image), from, bytes);
    AMPFUSE_CHECK(spans_.empty() || begin >= spans_.back().end, "columns are out of order");
    if (!spans_.empty() && begin <= spans_.back().end + kGap) {
      spans_.back().end = begin + bytes;
    } else {
      spans_.push_back({begin, begin + bytes});
    }
  }

  void send(cudaStream_t stream) {
    if (spans_.empty()) return;
    size_t bytes = 0;
    for (const Span& span : spans_) bytes += span.end - span.begin;
    PinnedRing& ring = pinned_ring();
    const std::lock_guard<std::mutex> lock(ring.mutex);
    PinnedRing::Buffer& buffer = ring.take(bytes);
    char* staged = buffer.memory;
    cudaError_t copied = cudaSuccess;
    for (const Span& span : spans_) {
      const size_t size = span.end - span.begin;
      std::memcpy(staged, columns_.image.data() + span.begin, size);
      copied = cudaMemcpyAsync(device() + span.begin, staged, size, cudaMemcpyHostToDevice, stream);
      if (copied != cudaSuccess) break;
      staged += size;
    }
    CUDA_CHECK(cudaEventRecord(buffer.copied, stream));  // copies before a failed one are queued
    CUDA_CHECK(copied);
  }

 private:
  struct Span {
    size_t begin, end;
  };
  // Bytes between two columns that take less time to copy than a second copy takes to begin.
  static constexpr size_t kGap = 16 << 10;

  char* device() const { return static_cast<char*>(columns_.memory.get()); }

  DeviceColumns& columns_;
  std::vector<Span> spans_;
};

constexpr Changes kAll{~0u, true, true};

// `plan`: with what never changes once a table exists.
void upload(DeviceColumns& columns, const TableView& host, const Changes& changes, bool plan,
            cudaStream_t stream) {
  const TableView& view = columns.view;
  const int64_t rows = host.rows;
  Upload upload(columns);
  if (changes.scaled) upload.add(view.scaled, host.scaled, rows);
  for (int list = 0; list < kColumns; ++list) {
    if (!(changes.lists & bit(list))) continue;
    void* const* data = host.data + list * rows;
    const bool present = std::any_of(data, data + rows, [](void* p) { return p != nullptr; });
    columns.present = (columns.present & ~bit(list)) | (present ? bit(list) : 0);
    upload.add(view.data + list * rows, data, rows);
  }
  for (int list = 0; list < kColumns; ++list) {
    if (!(changes.lists & bit(list))) continue;
    const DType* dtype = host.dtype + list * rows;
    const bool plain = std::all_of(dtype, dtype + rows, is_plain);
    columns.encoded = (columns.encoded & ~bit(list)) | (plain ? 0 : bit(list));
    upload.add(view.dtype + list * rows, dtype, rows);
  }
  if (changes.hyper) {
    upload.add(view.hyper_of, host.hyper_of, rows);
    upload.add(view.hyper, host.hyper, host.hyper_count);
  }
  if (plan) {
    upload.add(view.numel, host.numel, rows);
    upload.add(view.origin, host.origin, rows);
    upload.add(view.first_chunk, host.first_chunk, rows + 1);
    upload.add(view.chunks, host.chunks, host.chunk_count);
  }
  upload.send(stream);
}

// Columns that belong to the graph being captured; see note [captured tables].
DeviceColumns capture_columns(const TableView& host, const Capture& capture,
                              std::shared_ptr<void> scratch) {
  const SideStream side;
  DeviceColumns columns = make_columns(host, allocate_for_graph, side, std::move(scratch));
  upload(columns, host, kAll, true, side);
  CUDA_CHECK(cudaStreamSynchronize(side));

  give_to_graph(capture, {columns.memory, columns.scratch});
  return columns;
}

}  // namespace

void set_device_allocator(Allocate allocate) {
  allocate_device = allocate ? allocate : allocate_plain;
}

// --- DeviceTable ---------------------------------------------------------------------------------

DeviceTable::~DeviceTable() {
  const AllowUnsafeCalls allowed;
  // The allocator may reuse the memory in the order of the stream it was made on; work on other
  // streams may still run.
  if (changed_stream_) (void)cudaEventSynchronize(last_use_);
  if (last_use_ != nullptr) (void)cudaEventDestroy(last_use_);
  eager_ = captured_ = {};
}

const DeviceColumns& DeviceTable::acquire(Table& table, cudaStream_t stream) {
  const AllowUnsafeCalls allowed;
  free_orphans();
  const Capture capture = current_capture(stream);
  if (capture.id == 0) {
    pending_ |= std::exchange(table.changed, {});
    captured_ = {};
    capture_ = 0;
    CUDA_CHECK(cudaStreamGetId(stream, &stream_));
    wait_for_last_use(stream);
    upload_changes(table, stream);
    return eager_;
  }
  const bool changed = table.changed.any();
  pending_ |= std::exchange(table.changed, {});
  if (capture_ != capture.id || changed) {
    auto scratch = capture_ == capture.id ? captured_.scratch : nullptr;
    capture_ = 0;  // until there are columns
    captured_ = capture_columns(table.view(), capture, std::move(scratch));
    capture_ = capture.id;
  }
  return captured_;
}

void DeviceTable::release(cudaStream_t stream) {
  if (capture_ != 0) return;
  if (last_use_ == nullptr) (void)cudaEventCreateWithFlags(&last_use_, cudaEventDisableTiming);
  (void)cudaEventRecord(last_use_, stream);
  last_stream_ = stream_;
  used_ = true;
}

void DeviceTable::wait_for_last_use(cudaStream_t stream) {
  if (!used_ || stream_ == last_stream_) return;
  CUDA_CHECK(cudaStreamWaitEvent(stream, last_use_, 0));
  changed_stream_ = true;
}

void DeviceTable::upload_changes(const Table& table, cudaStream_t stream) {
  const TableView host = table.view();
  bool all = true;
  if (eager_.memory == nullptr) {
    eager_ = make_columns(host, allocate_device, stream);
  } else if (is_stale_) {
    eager_.image.assign(eager_.image.size(), 0);
    CUDA_CHECK(cudaMemsetAsync(eager_.memory.get(), 0, eager_.image.size(), stream));
  } else {
    all = false;
  }
  is_stale_ = true;  // if the upload fails, the image is ahead of the device's memory
  upload(eager_, host, all ? kAll : pending_, all, stream);
  is_stale_ = false;
  pending_ = {};
}

// --- TableUse ------------------------------------------------------------------------------------

static DeviceTable& device_table(Table& table) {
  if (!table.cache) table.cache = std::make_unique<DeviceTable>();
  return static_cast<DeviceTable&>(*table.cache);
}

TableUse::TableUse(Table& table, cudaStream_t stream)
    : cache_(device_table(table)),
      stream_(stream),
      columns_(cache_.acquire(table, stream)),
      only_algorithm_(table.only_algorithm) {}

}  // namespace ampfuse
