#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "graph_memory.cuh"
#include "launch.cuh"
#include "tickets.cuh"

namespace ampfuse {
namespace {

struct Tickets {
  unsigned* first = nullptr;
  int64_t count = 0;
};

Tickets zeroed(std::shared_ptr<void> memory, int64_t count, cudaStream_t stream) {
  CUDA_CHECK(cudaMemsetAsync(memory.get(), 0, size_t(count) * sizeof(unsigned), stream));
  return {static_cast<unsigned*>(memory.get()), count};
}

// They are never freed, as CUDA does not tell when a stream is destroyed: a kilobyte, and rarely
// more. (Where they replace fewer ones, launches that are queued still count in those.)
Tickets make_for_stream(int64_t count, cudaStream_t stream) {
  const AllowUnsafeCalls allowed;
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

Tickets make_for_graph(int64_t count, const Capture& capture) {
  const AllowUnsafeCalls allowed;
  free_orphans();
  const SideStream side;
  const std::shared_ptr<void> memory = allocate_for_graph(size_t(count) * sizeof(unsigned));
  const Tickets tickets = zeroed(memory, count, side);
  CUDA_CHECK(cudaStreamSynchronize(side));
  give_to_graph(capture, {memory});
  return tickets;
}

}  // namespace

unsigned* take_tickets(int64_t count, cudaStream_t stream) {
  // A device, whether it is a capture, and the id of that or of a stream.
  using Owner = std::tuple<int, bool, unsigned long long>;
  static std::mutex mutex;
  static auto* of_all = new std::map<Owner, Tickets>;  // CUDA may be gone when statics die
  constexpr int64_t kLeast = 256, kAtOnce = 4096;
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  const Capture capture = current_capture(stream);
  const bool is_captured = capture.id != 0;
  unsigned long long id = capture.id;
  if (!is_captured) CUDA_CHECK(cudaStreamGetId(stream, &id));
  const std::lock_guard<std::mutex> lock(mutex);
  Tickets& tickets = (*of_all)[{device, is_captured, id}];
  if (tickets.count < count) {
    tickets = is_captured ? make_for_graph(std::max(count, kAtOnce), capture)
                          : make_for_stream(std::max({2 * tickets.count, count, kLeast}), stream);
  }
  unsigned* const first = tickets.first;
  if (is_captured)
    tickets = {first + count, tickets.count - count};  // the next launch takes others
  return first;
}

}  // namespace ampfuse
