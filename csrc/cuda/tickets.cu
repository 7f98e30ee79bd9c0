#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "graph_memory.cuh"
#include "launch.cuh"
#include "tickets.cuh"

namespace ampfuse {
namespace {

struct Tickets {
  unsigned* first = nullptr;
  int64_t count = 0;
};

// A device, and the id of a stream or of a capture.
using Owner = std::pair<int, unsigned long long>;

Tickets zeroed(std::shared_ptr<void> memory, int64_t count, cudaStream_t stream) {
  CUDA_CHECK(cudaMemsetAsync(memory.get(), 0, size_t(count) * sizeof(unsigned), stream));
  return {static_cast<unsigned*>(memory.get()), count};
}

// They are never freed, as CUDA does not tell when a stream is destroyed: a kilobyte, and rarely
// more.
class StreamTickets {
 public:
  unsigned* take(const Owner& owner, int64_t count, cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Tickets& tickets = of_[owner];
    if (tickets.count < count) tickets = make(std::max(2 * tickets.count, count), stream);
    return tickets.first;
  }

 private:
  // (Where they replace fewer ones, launches that are queued still count in those.)
  static Tickets make(int64_t count, cudaStream_t stream) {
    const AllowUnsafeCalls allowed;
    count = std::max(count, kLeast);
    void* memory = nullptr;
    CUDA_CHECK(cudaMalloc(&memory, size_t(count) * sizeof(unsigned)));
    bool kept = false;
    const std::shared_ptr<void> owned(memory, [&kept](void* p) {
      if (!kept) (void)cudaFree(p);
    });
    const Tickets tickets = zeroed(owned, count, stream);
    kept = true;
    return tickets;
  }

  static constexpr int64_t kLeast = 256;
  std::mutex mutex_;
  std::map<Owner, Tickets> of_;
};

// Those of a capture, of which each launch takes some. A capture that is not among the last ones
// gets more.
class CapturedTickets {
 public:
  unsigned* take(const Owner& owner, int64_t count, const Capture& capture) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(left_.begin(), left_.end(),
                                    [&](const auto& each) { return each.first == owner; });
    Tickets& left = found != left_.end() ? found->second : add(owner);
    if (left.count < count) left = make(std::max(count, kAtOnce), capture);
    unsigned* const first = left.first;
    left = {first + count, left.count - count};
    return first;
  }

 private:
  Tickets& add(const Owner& owner) {
    if (left_.size() == kCaptures) left_.pop_front();
    left_.push_back({owner, {}});
    return left_.back().second;
  }

  static Tickets make(int64_t count, const Capture& capture) {
    const AllowUnsafeCalls allowed;
    free_orphans();
    const SideStream side;
    const std::shared_ptr<void> memory = allocate_for_graph(size_t(count) * sizeof(unsigned));
    const Tickets tickets = zeroed(memory, count, side);
    CUDA_CHECK(cudaStreamSynchronize(side));
    give_to_graph(capture, {memory});
    return tickets;
  }

  static constexpr int64_t kAtOnce = 4096;
  static constexpr size_t kCaptures = 16;
  std::mutex mutex_;
  std::deque<std::pair<Owner, Tickets>> left_;
};

}  // namespace

unsigned* take_tickets(int64_t count, cudaStream_t stream) {
  // CUDA may be gone when statics die.
  static auto* of_streams = new StreamTickets;
  static auto* captured = new CapturedTickets;
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  const Capture capture = current_capture(stream);
  if (capture.id != 0) return captured->take({device, capture.id}, count, capture);
  unsigned long long id = 0;
  CUDA_CHECK(cudaStreamGetId(stream, &id));
  return of_streams->take({device, id}, count, stream);
}

}  // namespace ampfuse
