// What the CUDA backend keeps between calls: tables uploaded behind the device's back, several
// streams, captured graphs. Streams are deferred (host_cuda/cuda_runtime.h): nothing runs before
// somebody waits for it.
#include "world.h"

using namespace ampfuse;

namespace {

struct Deferred {
  Deferred() { emulation::set_deferred(true); }
  ~Deferred() { emulation::set_deferred(false); }
};

struct Stream {
  cudaStream_t handle = nullptr;
  Stream() { cuda(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
  ~Stream() { (void)cudaStreamDestroy(handle); }
  operator cudaStream_t() const { return handle; }
};

std::vector<RowSpec> adam_rows() {
  std::vector<RowSpec> rows;
  for (int i = 0; i < 20; ++i) {
    RowSpec row;
    row.numel = i * 97 + 1;
    row.scaled = true;
    row.types[kGrad] = row.types[kModel] = i % 2 ? kBF16 : kF16;
    row.types[kParam] = row.types[kState0] = row.types[kState1] = kF32;
    row.hyper.lr = 1e-2;
    row.hyper.beta1 = 0.9;
    row.hyper.beta2 = 0.99;
    row.hyper.eps = 1e-8;
    rows.push_back(row);
  }
  return rows;
}

// A world's steps, of which none finds the gradients of the one before at their address.
class Steps {
 public:
  Steps(World& world, int count) : world_(world) {
    for (int step = 0; step < count; ++step) {
      gradients_.push_back(
          std::make_unique<World>(world.on_cuda, adam_rows(), unsigned(100 + step)));
    }
  }
  void step(int step, cudaStream_t stream = nullptr) {
    const TableView view = gradients_[size_t(step)]->table->view();
    for (int64_t row = 0; row < world_.rows(); ++row) {
      world_.table->set(kGrad, row, view.pointer(kGrad, row), view.type(kGrad, row));
    }
    RowHyper hyper = adam_rows()[0].hyper;
    hyper.lr = 1e-2 / (1 + step % 5);
    world_.table->set_hyper(0, world_.rows(), hyper);
    world_.step(Algorithm::of<AdamOp>(), 1.0, true, stream);
  }

 private:
  World& world_;
  std::vector<std::unique_ptr<World>> gradients_;
};

}  // namespace

TEST(a_hundred_steps_behind_a_delayed_stream) {
  for (const bool another_captures : {false, true}) {
    Pair pair(adam_rows());
    Steps cpu(pair.cpu, 100), gpu(pair.gpu, 100);
    const Deferred deferred;
    const Stream other;
    cudaGraph_t graph = nullptr;
    if (another_captures) cuda(cudaStreamBeginCapture(other, cudaStreamCaptureModeGlobal));
    for (int step = 0; step < 100; ++step) {
      cpu.step(step);
      gpu.step(step);
    }
    if (another_captures) {
      cuda(cudaStreamEndCapture(other, &graph));
      cuda(cudaGraphDestroy(graph));
    }
    pair.expect_same();
  }
}

TEST(steps_that_change_streams) {
  constexpr int kSteps = 9;
  Pair pair(adam_rows());
  Steps cpu(pair.cpu, kSteps), gpu(pair.gpu, kSteps);
  const Deferred deferred;
  const Stream streams[3];
  for (int step = 0; step < kSteps; ++step) {
    cpu.step(step);
    gpu.step(step, streams[step % 3]);
  }
  cuda(cudaStreamSynchronize(
      streams[(kSteps - 1) % 3]));  // the last alone: each has waited for the one before
  pair.expect_same();
}

// An allocator that gives freed memory to the next user on `owner`, the stream it was made on, as
// torch's does.
static cudaStream_t owner = nullptr;
static std::shared_ptr<void> allocate_on_owner(size_t bytes) {
  void* memory = nullptr;
  cuda(cudaMalloc(&memory, bytes));
  return {memory, [bytes](void* p) {
            (void)cudaMemsetAsync(p, 0xee, bytes, owner);
            (void)cudaStreamSynchronize(owner);
            (void)cudaFree(p);
          }};
}

TEST(a_table_dies_while_another_stream_uses_it) {
  Pair pair(adam_rows());
  {
    const Deferred deferred;
    const Stream first, second;
    owner = first;
    set_device_allocator(allocate_on_owner);
    pair.cpu.step(Algorithm::of<AdamOp>());
    pair.cpu.step(Algorithm::of<AdamOp>());
    pair.gpu.step(Algorithm::of<AdamOp>(), 1.0, true, first);
    pair.gpu.step(Algorithm::of<AdamOp>(), 1.0, true, second);
    pair.gpu.table->cache.reset();
    set_device_allocator(nullptr);
  }
  pair.expect_same();
}

TEST(uploads_are_only_of_what_changed) {
  World world(true, adam_rows());
  const auto copies = [&](auto change) {
    change();
    const int64_t before = emulation::copy_count();
    world.step(Algorithm::of<AdamOp>());
    return emulation::copy_count() - before;
  };
  Table& table = *world.table;
  EXPECT(copies([] {}) == 1, "a new table is one copy");
  EXPECT(copies([] {}) == 0, "nothing changed");
  EXPECT(copies([&] { world.fill(3, kGrad, 77); }) == 1, "one gradient moved");
  EXPECT(copies([&] { table.set_hyper(0, world.rows(), adam_rows()[0].hyper); }) == 1,
         "rows that had an entry each share one");
  EXPECT(copies([&] { table.set_hyper(0, world.rows(), adam_rows()[0].hyper); }) == 0,
         "hyper-parameters set to what they were");
  const auto there_and_back = [&] {
    const TableView view = table.view();
    for (int64_t row = 0; row < world.rows(); ++row) {
      void* const data = view.pointer(kGrad, row);
      const DType type = view.type(kGrad, row);
      table.set(kGrad, row, nullptr, DType::kNone);
      table.set_scaled(row, false);
      table.set(kGrad, row, data, type);
      table.set_scaled(row, true);
    }
  };
  EXPECT(copies(there_and_back) == 0, "gradients set to none and back");
}

// Columns of many rows are far from each other; those that change together are not.
TEST(a_change_of_gradients_is_one_copy) {
  std::vector<RowSpec> rows(5000, adam_rows()[1]);
  World world(true, rows);
  world.inspect();
  const int64_t before = emulation::copy_count();
  const TableView view = world.table->view();
  const std::vector<void*> gradients(view.data, view.data + world.rows());
  for (int64_t row = 0; row < world.rows(); ++row) {
    world.table->set(kGrad, row, gradients[size_t(world.rows() - 1 - row)], kBF16);
    world.table->set_scaled(row, row % 2);
  }
  world.inspect();
  EXPECT(emulation::copy_count() == before + 1, emulation::copy_count() - before);
}

// Which rows share hyper-parameters is told by their entries, whatever ranges set them.
TEST(rows_share_entries_of_hyper_parameters) {
  Table table(std::vector<int64_t>(6, 1));
  std::vector<double> expected(6, 0.0);
  const auto set = [&](int64_t begin, int64_t end, double lr) {
    RowHyper hyper;
    hyper.lr = lr;
    table.set_hyper(begin, end, hyper);
    std::fill(expected.begin() + begin, expected.begin() + end, lr);
    const TableView view = table.view();
    EXPECT(view.hyper_count <= view.rows, view.hyper_count);
    for (int64_t row = 0; row < 6; ++row) {
      EXPECT(view.hyper[view.hyper_of[row]].lr == expected[size_t(row)], "row ", row);
    }
  };
  const int64_t ranges[][2] = {{0, 6}, {0, 6}, {0, 3}, {3, 6}, {1, 2},
                               {2, 5}, {0, 0}, {0, 6}, {5, 6}};
  double lr = 0;
  for (int round = 0; round < 3; ++round) {
    for (const auto& range : ranges) set(range[0], range[1], lr += 1);
    for (int64_t row = 0; row < 6; ++row) set(row, row + 1, lr += 1);
  }
}

TEST(an_upload_waits_only_for_a_full_ring) {
  World world(true, adam_rows());
  const Deferred deferred;
  const int64_t before = emulation::wait_count();
  const auto upload = [&](int count) {
    for (int i = 0; i < count; ++i) {
      world.table->set_scaled(0, i % 2);
      world.inspect();
    }
  };
  upload(40);
  EXPECT(emulation::wait_count() == before, "buffers are free");
  upload(60);
  EXPECT(emulation::wait_count() > before, "the ring is full");
}

TEST(capture_eager_replay) {
  Pair pair(adam_rows());
  Steps cpu(pair.cpu, 4), gpu(pair.gpu, 4);
  const int64_t allocations = emulation::live_allocations();
  std::vector<int> history;
  {
    const Deferred deferred;
    const Stream stream;
    const auto eager = [&](int step) {
      gpu.step(step, stream);
      history.push_back(step);
    };
    eager(0);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (const int step : {1, 3}) gpu.step(step, stream);  // two steps in one graph
    cuda(cudaStreamEndCapture(stream, &graph));
    cuda(cudaGraphInstantiate(&exec, graph, 0));
    cuda(cudaGraphDestroy(graph));
    const auto replay = [&] {
      cuda(cudaGraphLaunch(exec, stream));
      history.insert(history.end(), {1, 3});
    };
    replay();
    for (const bool wait : {false, true}) {
      for (int step = 0; step < 70; ++step) {  // more than the ring has buffers
        eager(step % 4);
        // Once their copies are done, staging buffers are reused: a replay must not need them.
        if (wait) cuda(cudaStreamSynchronize(stream));
      }
      replay();
    }
    cuda(cudaStreamSynchronize(stream));
    cuda(cudaGraphExecDestroy(exec));
  }
  for (const int step : history) cpu.step(step);
  pair.expect_same();
  pair.gpu.table->cache.reset();
  World(true, adam_rows()).inspect();  // frees what the graph left behind
  EXPECT(emulation::live_allocations() == allocations, emulation::live_allocations(), " and ",
         allocations);
}
