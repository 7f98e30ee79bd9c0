// Launches whose last block continues: those that may run at once must not count in the same
// tickets. Streams are deferred, and take turns block by block (host_cuda/cuda_runtime.h).
#include <memory>

#include "cuda/tickets.cuh"
#include "nn_call.h"
#include "streams.h"

using namespace ampfuse;

namespace {

// Sums of several spans on both backends, of other values for each seed.
template <class Op>
struct Sums {
  NnCall<Op> cpu, gpu;

  explicit Sums(int64_t spans, unsigned absent = 0)
      : cpu(false, image_of(spans), absent), gpu(true, image_of(spans), absent) {}
  void start(cudaStream_t stream, int replays = 1) {
    gpu.start(stream);
    for (int i = 0; i < replays; ++i) cpu.start();
  }
  void expect_same() { expect_same_lists(cpu.results(), gpu.results(), Op::kName); }

 private:
  static ImageRows image_of(int64_t spans) { return {spans * kSpanRows, 20, kBF16}; }
};

struct Graph {
  cudaGraphExec_t exec = nullptr;

  template <class Run>
  Graph(cudaStream_t stream, const Run& run) {
    cudaGraph_t graph = nullptr;
    cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    run();
    cuda(cudaStreamEndCapture(stream, &graph));
    cuda(cudaGraphInstantiate(&exec, graph, 0));
    cuda(cudaGraphDestroy(graph));
  }
  ~Graph() { (void)cudaGraphExecDestroy(exec); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void replay(cudaStream_t stream) const { cuda(cudaGraphLaunch(exec, stream)); }
};

}  // namespace

TEST(a_sum_is_one_launch) {
  for (const int64_t spans : {1, 5}) {
    NnCall<BatchNormMoments> sums(true, {spans * kSpanRows, 20, kBF16}, 0);
    const int64_t before = emulation::launch_count();
    sums.start();
    EXPECT(emulation::launch_count() == before + 1, spans, " spans");
  }
}

TEST(sums_on_several_streams) {
  Sums<BatchNormMoments> first(5), third(4);
  Sums<BatchNormReduce> second(3);
  const Deferred deferred;
  const Stream streams[2];
  for (int i = 0; i < 3; ++i) {
    first.start(streams[0]);
    second.start(streams[1]);
    third.start(nullptr);
  }
  cuda(cudaDeviceSynchronize());
  first.expect_same();
  second.expect_same();
  third.expect_same();
}

TEST(sums_in_graphs_beside_others) {
  Sums<BatchNormMoments> first(5), third(4);
  Sums<BatchNormReduce> second(3);
  const Deferred deferred;
  const Stream captured, others[2];
  // Two launches in one graph, one in another, and eager ones on the stream of the captures.
  const Graph graph(captured, [&] {
    first.start(captured, 2);
    second.start(captured, 2);
  });
  const Graph another(captured, [&] { third.start(captured, 2); });
  Sums<BatchNormMoments> eager(6);
  for (int i = 0; i < 2; ++i) {
    graph.replay(others[0]);
    another.replay(others[1]);
    eager.start(captured);
  }
  cuda(cudaDeviceSynchronize());
  first.expect_same();
  second.expect_same();
  third.expect_same();
  eager.expect_same();
}

TEST(tickets_of_what_may_run_at_once_are_apart) {
  constexpr int64_t kCount = 300;
  std::vector<unsigned*> taken;
  const auto take = [&](cudaStream_t stream) { taken.push_back(take_tickets(kCount, stream)); };
  cudaStream_t handle = nullptr;
  {
    const Stream stream;
    handle = stream;
    take(stream);
    EXPECT(take_tickets(1, stream) == taken[0], "launches of a stream share them");
  }
  const Stream stream;
  EXPECT(stream == handle);
  take(stream);
  cuda_backend()->set_device(1);
  take(stream);
  cuda_backend()->set_device(0);
  // In each capture more than are made at once.
  std::vector<std::unique_ptr<Graph>> graphs;
  for (int capture = 0; capture < 2; ++capture) {
    graphs.push_back(std::make_unique<Graph>(stream, [&] {
      for (int launch = 0; launch < 20; ++launch) take(stream);
    }));
  }
  std::sort(taken.begin(), taken.end());
  for (size_t i = 1; i < taken.size(); ++i) EXPECT(taken[i - 1] + kCount <= taken[i], i);
  for (unsigned* const first : taken)
    EXPECT(std::all_of(first, first + kCount, [](unsigned ticket) { return ticket == 0; }));
}

TEST(tickets_of_a_graph_are_freed_with_it) {
  const Stream stream;
  const auto capture = [&] { return Graph(stream, [&] { (void)take_tickets(1, stream); }); };
  (void)capture();
  const int64_t allocations = emulation::live_allocations();
  for (int i = 0; i < 40; ++i) (void)capture();  // each frees those of the one before
  EXPECT(emulation::live_allocations() == allocations);
}

// Each call of the runtime fails once: the next launch works as if nothing had been.
TEST(a_failing_call_leaves_no_tickets_behind) {
  for (const bool captures : {false, true}) {
    bool failed = true;
    for (int calls = 0; failed; ++calls) {
      Sums<BatchNormMoments> sums(3);
      const Stream stream;
      failed = false;
      const auto start = [&] {
        emulation::fail_after(calls);
        try {
          sums.gpu.start(stream);
        } catch (const std::runtime_error&) {
          failed = true;
        }
        emulation::fail_after(-1);
        if (failed) sums.gpu.start(stream);
      };
      if (captures) {
        Graph(stream, start).replay(stream);
      } else {
        start();
      }
      EXPECT(calls > 0 || failed);
      sums.cpu.start();
      sums.expect_same();
    }
  }
}
