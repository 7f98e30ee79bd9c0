#include "threads.h"

#include <atomic>
#include <vector>

#include "core/backend.h"
#include "float_mode.h"

namespace ampfuse {
namespace {

ParallelFor parallel_for = [](int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  body(0, count);
};
int (*thread_count)() = [] { return 1; };

// Below this, waking a second thread costs more than it saves.
constexpr int64_t kSerialCost = 32 * 1024;
// The number of pieces of a thread's share.
constexpr int64_t kPiecesPerThread = 16;

}  // namespace

void share_out(int64_t cost, const std::function<void(int64_t, int64_t)>& body) {
  const int threads = cost < kSerialCost ? 1 : thread_count();
  const int64_t pieces = threads == 1 ? 1 : kPiecesPerThread;  // of each thread
  std::vector<std::atomic<int64_t>> begun(threads);
  const auto work = [&](int64_t begin, int64_t end) {
    const FloatMode standard;
    for (int64_t thread = begin; thread < end; ++thread) {
      for (int64_t k = 0; k < threads; ++k) {
        const int64_t owner = (thread + k) % threads;
        for (int64_t i; (i = begun[owner]++) < pieces;) body(owner * pieces + i, threads * pieces);
      }
    }
    // Makes what was stored past the caches visible to other threads.
    std::atomic_thread_fence(std::memory_order_seq_cst);
  };
  if (threads == 1) {
    work(0, 1);
  } else {
    parallel_for(threads, work);
  }
}

void set_parallel_for(ParallelFor run, int (*count)()) {
  parallel_for = std::move(run);
  thread_count = count;
}

}  // namespace ampfuse
