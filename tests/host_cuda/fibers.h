// Runs the threads of one CUDA block as fibers: each runs until it ends or waits at a barrier, then
// the next one does. No two run at once, so data races cannot show here; a missing barrier does,
// under some order of the threads.
#pragma once

#include <cstdint>
#include <functional>

namespace ampfuse {
namespace emulation {

constexpr int kWarp = 32;

// The order of blocks in a grid and of threads in a block: kernels must not depend on it.
// AMPFUSE_EMULATED_BLOCK_ORDER=forward|reverse|random picks it at start.
enum class Order { kForward, kReverse, kRandom };
void set_order(Order order);
Order order_from_environment();

// A shuffled, reversed or plain sequence of 0 .. count-1, according to the order in force.
class Sequence {
 public:
  explicit Sequence(int64_t count);
  int64_t operator[](int64_t i) const;

 private:
  int64_t count_, factor_ = 1, offset_ = 0;
  bool reverse_ = false;
};

// Runs job(thread) for every thread of a block. Throws if some threads wait at a barrier that
// others passed by.
void run_block(int threads, const std::function<void(int thread)>& job);

// Called from within a job.
void block_barrier(const char* file, int line);
uint64_t warp_exchange(uint64_t value, int source_lane, const char* file, int line);

}  // namespace emulation
}  // namespace ampfuse
