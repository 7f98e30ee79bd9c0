#include "fibers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/check.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace ampfuse {
namespace emulation {
namespace {

// --- switching stacks ----------------------------------------------------------------------------

// A stack and where its execution stopped. On x86-64 a switch is a dozen instructions; swapcontext,
// which serves elsewhere, makes two system calls. It ends with a jump: processors predict that a
// return goes where the last call came from, which is on the other stack.
struct Context {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  void* stack = nullptr;  // lowest address; null for the scheduler's own
  size_t bytes = 0;
  void* shadow = nullptr;  // AddressSanitizer's
};

#if defined(__x86_64__)
extern "C" void ampfuse_switch_stack(void** save, void* load);
asm(R"(
.text
.globl ampfuse_switch_stack
.hidden ampfuse_switch_stack
.type ampfuse_switch_stack, @function
ampfuse_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
.size ampfuse_switch_stack, .-ampfuse_switch_stack
)");
#endif

void switch_to(Context& from, Context& to) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.shadow, to.stack, to.bytes);
#endif
#if defined(__x86_64__)
  ampfuse_switch_stack(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.shadow, nullptr, nullptr);
#endif
}

constexpr size_t kStackBytes = 256 * 1024;  // address space; pages are taken when they are touched

void prepare_context(Context& context, void (*entry)()) {
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("emulation: no memory for a stack");
  mprotect(memory, page, PROT_NONE);  // an overflow faults at once
  context.stack = static_cast<char*>(memory) + page;
  context.bytes = kStackBytes;
#if defined(__x86_64__)
  void** top = reinterpret_cast<void**>(static_cast<char*>(context.stack) + kStackBytes);
  *--top = nullptr;  // entry starts as if called: 8 bytes off a multiple of 16
  *--top = reinterpret_cast<void*>(entry);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  context.stack_pointer = top;
#else
  getcontext(&context.context);
  context.context.uc_stack.ss_sp = context.stack;
  context.context.uc_stack.ss_size = kStackBytes;
  context.context.uc_link = nullptr;
  makecontext(&context.context, entry, 0);
#endif
}

void release_context(Context& context) {
#if defined(__SANITIZE_ADDRESS__)
  // A stack abandoned halfway leaves its frames' red zones; the next at this address starts clean.
  __asan_unpoison_memory_region(context.stack, context.bytes);
#endif
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  munmap(static_cast<char*>(context.stack) - page, context.bytes + page);
}

// --- one block -----------------------------------------------------------------------------------

struct Fiber {
  Context context;
  int thread = -1;
  bool finished = true;

  Fiber();
  ~Fiber() { release_context(context); }
};

// Where threads wait for each other: a whole block or one warp.
struct Barrier {
  int expected = 0, arrived = 0;
  std::vector<Fiber*> waiting;
  const char* file = nullptr;
  int line = 0;
  unsigned generation = 0;

  void reset(int threads) {
    expected = threads;
    arrived = 0;
    waiting.clear();
    generation = 0;
  }
};

struct Warp {
  Barrier barrier;
  uint64_t value[2][kWarp];  // by parity of the barrier's generation: a fast thread may be one
                             // exchange ahead
};

class Scheduler {
 public:
  void run(int threads, const std::function<void(int)>& job);
  void wait(Barrier& barrier, const char* file, int line);

  Barrier block;
  std::vector<Warp> warps;
  Fiber* current = nullptr;
  const std::function<void(int)>* job = nullptr;
  Context home;

 private:
  void resume(Fiber* fiber);
  [[noreturn]] void stop();

  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  std::deque<Fiber*> ready_;
  std::string error_;
};

Scheduler& scheduler() {
  static thread_local Scheduler scheduler;
  return scheduler;
}

void fiber_entry() {
  Scheduler& mine = scheduler();
#if defined(__SANITIZE_ADDRESS__)
  const void* stack;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
  mine.home.stack = const_cast<void*>(stack);
  mine.home.bytes = bytes;
#endif
  for (;;) {  // one job after another; a fiber never returns
    Fiber* self = mine.current;
    (*mine.job)(self->thread);
    self->finished = true;
    switch_to(self->context, mine.home);
  }
}

Fiber::Fiber() { prepare_context(context, fiber_entry); }

void Scheduler::resume(Fiber* fiber) {
  current = fiber;
  switch_to(home, fiber->context);
  current = nullptr;
  if (fiber->finished) idle_.push_back(fiber);
}

void Scheduler::run(int threads, const std::function<void(int)>& body) {
  if (current != nullptr) throw std::runtime_error("emulation: a kernel launched a kernel");
  job = &body;
  error_.clear();
  ready_.clear();
  block.reset(threads);
  warps.resize(size_t(threads + kWarp - 1) / kWarp);
  for (size_t w = 0; w < warps.size(); ++w) {
    const int rest = threads - int(w) * kWarp;
    warps[w].barrier.reset(rest < kWarp ? rest : kWarp);
  }
  int finished = 0;
  const auto step = [&](Fiber* fiber) {
    resume(fiber);
    finished += fiber->finished;
  };
  const Sequence sequence(threads);
  for (int i = 0; i < threads && error_.empty(); ++i) {
    if (idle_.empty()) {
      fibers_.push_back(std::make_unique<Fiber>());
      idle_.push_back(fibers_.back().get());
    }
    Fiber* fiber = idle_.back();
    idle_.pop_back();
    fiber->thread = int(sequence[i]);
    fiber->finished = false;
    step(fiber);
  }
  while (!ready_.empty() && error_.empty()) {
    Fiber* fiber = ready_.front();
    ready_.pop_front();
    step(fiber);
  }
  if (error_.empty() && finished == threads) return;
  if (error_.empty()) {
    const Barrier* stuck = &block;
    for (const Warp& warp : warps) {
      if (warp.barrier.arrived > 0) stuck = &warp.barrier;
    }
    error_ =
        message("divergent barrier at ", stuck->file, ":", stuck->line, ": ", stuck->arrived,
                " of ", stuck->expected, " threads arrived, the others ended or wait elsewhere");
  }
  idle_.clear();  // what the stuck fibers hold on their stacks is lost with them
  fibers_.clear();
  throw std::runtime_error("emulation: " + error_);
}

void Scheduler::wait(Barrier& barrier, const char* file, int line) {
  if (barrier.arrived == 0) {
    barrier.file = file;
    barrier.line = line;
  } else if (barrier.line != line ||
             (barrier.file != file && std::strcmp(barrier.file, file) != 0)) {
    error_ = message("divergent barrier: some threads wait at ", barrier.file, ":", barrier.line,
                     ", thread ", current->thread, " at ", file, ":", line);
    stop();
  }
  Fiber* self = current;
  if (++barrier.arrived < barrier.expected) {
    barrier.waiting.push_back(self);
    switch_to(self->context, home);
    return;
  }
  for (Fiber* other : barrier.waiting) ready_.push_back(other);
  barrier.waiting.clear();
  barrier.arrived = 0;
  ++barrier.generation;
}

// Leaves the fiber for good. Its caller must hold nothing that wants destroying.
void Scheduler::stop() {
  switch_to(current->context, home);
  std::abort();
}

Order& order() {
  static Order order = order_from_environment();
  return order;
}

}  // namespace

Order order_from_environment() {
  const char* name = std::getenv("AMPFUSE_EMULATED_BLOCK_ORDER");
  if (name == nullptr || std::strcmp(name, "forward") == 0) return Order::kForward;
  if (std::strcmp(name, "reverse") == 0) return Order::kReverse;
  if (std::strcmp(name, "random") == 0) return Order::kRandom;
  throw std::runtime_error("AMPFUSE_EMULATED_BLOCK_ORDER must be forward, reverse or random");
}

void set_order(Order wanted) { order() = wanted; }

// Random: i -> (i * factor + offset) mod count, with a factor that has no divisor in common with
// count.
Sequence::Sequence(int64_t count) : count_(count), reverse_(order() == Order::kReverse) {
  if (order() != Order::kRandom || count < 2) return;
  static thread_local std::mt19937_64 random(20240501);
  offset_ = int64_t(random() % uint64_t(count));
  do {
    factor_ = 1 + int64_t(random() % uint64_t(count));
  } while (std::gcd(factor_, count) != 1);
}

int64_t Sequence::operator[](int64_t i) const {
  if (reverse_) return count_ - 1 - i;
  return (i * factor_ + offset_) % count_;
}

void run_block(int threads, const std::function<void(int)>& job) { scheduler().run(threads, job); }

void block_barrier(const char* file, int line) {
  Scheduler& mine = scheduler();
  mine.wait(mine.block, file, line);
}

uint64_t warp_exchange(uint64_t value, int source_lane, const char* file, int line) {
  Scheduler& mine = scheduler();
  const int thread = mine.current->thread;
  Warp& warp = mine.warps[size_t(thread / kWarp)];
  uint64_t* values = warp.value[warp.barrier.generation % 2];
  values[thread % kWarp] = value;
  mine.wait(warp.barrier, file, line);
  return values[source_lane];
}

}  // namespace emulation
}  // namespace ampfuse
