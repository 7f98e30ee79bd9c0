// What the CUDA backend keeps between calls: tables uploaded behind the device's back, several
// streams, captured graphs. Streams are deferred (host_cuda/cuda_runtime.h): nothing runs before
// somebody waits for it.
#include "streams.h"
#include "world.h"

using namespace ampfuse;

namespace {

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
  for (const bool another_captures : {false, true}) {
    Pair pair(adam_rows());
    {
      const Deferred deferred;
      const Stream first, second, other;
      owner = first;
      set_device_allocator(allocate_on_owner);
      pair.cpu.step(Algorithm::of<AdamOp>());
      pair.cpu.step(Algorithm::of<AdamOp>());
      pair.gpu.step(Algorithm::of<AdamOp>(), 1.0, true, first);
      pair.gpu.step(Algorithm::of<AdamOp>(), 1.0, true, second);
      cudaGraph_t graph = nullptr;
      if (another_captures) cuda(cudaStreamBeginCapture(other, cudaStreamCaptureModeGlobal));
      pair.gpu.table->cache.reset();
      if (another_captures) {
        cuda(cudaStreamEndCapture(other, &graph));
        cuda(cudaGraphDestroy(graph));
      }
      set_device_allocator(nullptr);
    }
    pair.expect_same();
  }
}

TEST(a_new_stream_has_the_handle_of_an_old_one) {
  Pair pair(adam_rows());
  Steps cpu(pair.cpu, 2), gpu(pair.gpu, 2);
  const Deferred deferred;
  cudaStream_t handle = nullptr;
  {
    const Stream first;
    handle = first;
    gpu.step(0, first);
  }
  const Stream second;
  EXPECT(second == handle);
  gpu.step(1, second);
  cuda(cudaStreamSynchronize(second));
  for (const int step : {0, 1}) cpu.step(step);
  pair.expect_same();
}

// Each call of the runtime fails once, while a table is uploaded: the next call works as if nothing
// had been, and no memory is lost.
TEST(a_failing_call_leaves_nothing_behind) {
  const std::vector<RowSpec> rows(300, adam_rows()[1]);  // columns too far apart for one copy
  for (const bool captures : {false, true}) {
    bool failed = true;
    for (int calls = 0; failed; ++calls) {
      Pair pair(rows);
      const Stream stream;
      pair.both([&](World& world) { world.inspect(world.on_cuda ? stream.handle : nullptr); });
      const int64_t allocations = emulation::live_allocations();
      pair.both([&](World& world) {
        world.table->set_scaled(0, false);
        RowHyper hyper = rows[0].hyper;
        hyper.lr = 0.5;
        world.table->set_hyper(1, 2, hyper);
      });
      {
        const Deferred deferred;
        cudaGraph_t graph = nullptr;
        if (captures) cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        emulation::fail_after(calls);
        failed = false;
        try {
          pair.gpu.inspect(stream);
        } catch (const std::runtime_error&) {
          failed = true;
        }
        emulation::fail_after(-1);
        if (captures) {
          cuda(cudaStreamEndCapture(stream, &graph));
          cuda(cudaGraphDestroy(graph));
        }
        if (failed || captures) pair.gpu.inspect(stream);
      }
      EXPECT(calls > 0 || failed);
      pair.cpu.inspect();
      pair.expect_same();
      World(true, adam_rows()).inspect();  // frees what a graph left behind
      EXPECT(emulation::live_allocations() == allocations, calls,
             " calls: ", emulation::live_allocations(), " and ", allocations);
    }
  }
}

// An update finds the results of its inspection although a list was set between the two.
TEST(a_list_is_set_within_a_captured_step) {
  std::vector<RowSpec> rows(3);
  for (int i = 0; i < 3; ++i) {
    rows[size_t(i)].numel = 100 + i;
    rows[size_t(i)].types[kGrad] = rows[size_t(i)].types[kParam] = kF32;
    RowHyper& hyper = rows[size_t(i)].hyper;
    hyper.lr = 0.1;
    hyper.trust_coefficient = 0.02;
    hyper.flags = kLayerwise;
    hyper.algorithm = Algorithm::of<LayerwiseOp>().index();
  }
  Pair pair(rows);
  const auto scale_gradients = [](World& world, void* stream) {
    Preparation preparation;
    preparation.state = world.state.get();
    RowColumns& columns = preparation.columns;
    columns.steps = world.steps.get();
    columns.grad_norms = world.row_norms.get();
    columns.param_norms = world.param_norms.get();
    for (int64_t row = 0; row < world.rows(); ++row)
      world.table->set(kGradOut, row, nullptr, kAbsent);
    world.backend().measure_params(*world.table, world.param_norms.get(), stream);
    world.inspect(stream, preparation);
    for (int64_t row = 0; row < world.rows(); ++row) world.alias(row, kGradOut, kGrad);
    world.backend().update(*world.table, Algorithm::of<LayerwiseOp>(), preparation.state, nullptr,
                           stream);
  };
  scale_gradients(pair.cpu, nullptr);
  const Stream stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  scale_gradients(pair.gpu, stream);
  cuda(cudaStreamEndCapture(stream, &graph));
  cuda(cudaGraphInstantiate(&exec, graph, 0));
  cuda(cudaGraphDestroy(graph));
  cuda(cudaGraphLaunch(exec, stream));
  cuda(cudaGraphExecDestroy(exec));
  pair.expect_same();
}

TEST(calls_are_on_the_device_of_their_tensors) {
  for (const int device : {1, 0}) {
    cuda_backend()->set_device(device);
    int found = -1;
    cuda(cudaGetDevice(&found));
    EXPECT(found == device, found);
  }
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
  World(true, adam_rows()).inspect();  // frees what graphs of other tests left behind
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
