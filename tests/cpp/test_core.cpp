// The core at its seams: the CUDA backend must leave the bits that the CPU backend leaves.
#include <algorithm>

#include "world.h"

using namespace ampfuse;

namespace {

constexpr DType kTypes[] = {kF32, kF16, kBF16};

// 0 .. 3 vectors of the widest CPU instruction set, packs, tiles, slices and chunks, each with its
// neighbours.
std::vector<int64_t> seam_sizes() {
  std::vector<int64_t> sizes;
  for (int64_t n = 0; n <= 49; ++n) sizes.push_back(n);
  for (const int64_t seam : {int64_t(256), int64_t(kTile), kChunk / 4, kChunk}) {
    for (int64_t n = seam - 1; n <= seam + 1; ++n) sizes.push_back(n);
  }
  sizes.push_back(3 * kChunk + 5);
  return sizes;
}

RowHyper adam_hyper(int variant) {
  RowHyper hyper;
  hyper.lr = 1e-2 / (1 + variant % 3);
  hyper.weight_decay = variant % 2 ? 0.1 : 0.0;
  hyper.beta1 = 0.9;
  hyper.beta2 = 0.99;
  hyper.eps = 1e-8;
  hyper.momentum = variant % 3 ? 0.9 : 0.0;
  hyper.dampening = variant % 3 == 2 ? 0.1 : 0.0;
  if (variant % 4 == 1) hyper.flags |= kDecoupled;
  if (variant % 5 == 2) hyper.flags |= kMaximize;
  if (variant % 3 == 1) hyper.flags |= kNesterov;
  if (variant % 7 == 3) hyper.flags |= kUncorrected;
  if (variant % 6 == 5) hyper.flags |= kUnaveraged | kLateDecay | kTrustAll | kInitZero;
  if (variant % 8 == 6) hyper.flags |= kInfinityNorm;
  if (variant % 5 == 3) hyper.flags |= kClippedRatio;
  hyper.lr_decay = variant % 4 == 3 ? 0.1 : 0.0;
  hyper.trust_coefficient = 0.02;
  hyper.trust_eps = 1e-8;
  return hyper;
}

// A row of an optimizer: a half model weight beside an FP32 master, or a parameter alone.
RowSpec optimizer_row(int64_t numel, int variant) {
  RowSpec row;
  row.numel = numel;
  row.hyper = adam_hyper(variant);
  row.misaligned = variant % 4 == 3 ? 1 + variant % 3 : 0;
  row.scaled = variant % 2 == 0;
  row.types[kGrad] = kTypes[variant % 3];
  if (variant % 3 != 0) row.types[kModel] = kTypes[variant % 3];
  row.types[kParam] = row.types[kModel] != kAbsent ? kF32 : kTypes[variant / 3 % 3];
  if (variant % 5 == 4) row.types[kAccumulated] = kF32;
  if (variant % 7 == 6) row.types[kGrad] = kAbsent;
  row.types[kState0] = row.types[kState1] = kF32;
  if (variant % 4 == 2) row.types[kState2] = kF32;
  return row;
}

std::vector<RowSpec> optimizer_rows() {
  std::vector<RowSpec> rows;
  int variant = 0;
  for (const int64_t n : seam_sizes()) rows.push_back(optimizer_row(n, variant++));
  return rows;
}

void new_gradients(World& world, unsigned seed) {
  for (int64_t row = 0; row < world.rows(); ++row) {
    for (const int list : {int(kGrad), int(kAccumulated)}) {
      if (!world.bytes(row, list).empty()) world.fill(row, list, seed);
    }
  }
}

RowSpec gradient_row(int64_t numel, DType type, bool scaled = false) {
  RowSpec row;
  row.numel = numel;
  row.types[kGrad] = type;
  row.scaled = scaled;
  return row;
}

// A row with encoded lists: a split master, quantized states, stochastic rounding, and an average.
RowSpec encoded_row(const AlgorithmInfo& info, int64_t numel, int variant) {
  RowSpec row = optimizer_row(numel, variant);
  row.hyper.seed = variant % 5;
  row.hyper.ema_decay = 0.9;
  if (variant % 3 != 1) row.types[kAverage] = kF32;
  if (row.types[kModel] == kF16) row.types[kParam] = variant % 2 ? DType::kRemainderFloat16 : kF32;
  if (row.types[kModel] == kBF16)
    row.types[kParam] = variant % 2 ? DType::kRemainderBFloat16 : kF32;
  if (row.types[kParam] == kBF16 && row.types[kModel] == kAbsent)
    row.types[kParam] = DType::kRandomBFloat16;
  const StorageInfo& storage = storages()[size_t(variant + variant / 3) % storages().size()];
  for (const List list : {kState0, kState1, kState2}) {
    if (row.types[list] == kAbsent || (storage.block > 0 && !info.quantizable)) continue;
    row.types[list] = storage.type(info.unsigned_states & bit(list));
  }
  return row;
}

std::vector<RowSpec> encoded_rows(const AlgorithmInfo& info) {
  std::vector<RowSpec> rows;
  int variant = 0;
  for (const int64_t n : seam_sizes()) rows.push_back(encoded_row(info, n, variant++));
  // Every kind at a vector, a block and a chunk, each with its neighbours.
  for (const int64_t seam :
       {int64_t(16), int64_t(kScaleBlock), int64_t(kTile), kChunk / 4, kChunk}) {
    for (int i = 0; i < 24; ++i) rows.push_back(encoded_row(info, seam - 1 + i % 3, variant++));
  }
  return rows;
}

constexpr float kInf = __builtin_inff(), kNan = __builtin_nanf("");

}  // namespace

// --- steps ---------------------------------------------------------------------------------------

TEST(steps) {
  for (const AlgorithmInfo& each : algorithms()) {
    for (const bool layerwise : {false, true}) {
      std::vector<RowSpec> rows = optimizer_rows();
      for (RowSpec& row : rows) row.hyper.flags |= layerwise ? kLayerwise : 0;
      Pair pair(rows);
      for (unsigned step = 0; step < 3; ++step) {
        pair.both([&](World& world) {
          world.layerwise = layerwise;
          new_gradients(world, 10 + step);
          world.step(each.algorithm, step == 1 ? 0.0 : 0.5);
        });
        pair.expect_same();
        EXPECT(!layerwise || step > 0 || pair.gpu.param_norms.read(4) > 0);
      }
    }
  }
}

TEST(steps_without_a_decision_are_not_skipped) {
  for (const Algorithm algorithm : {Algorithm::of<AdamOp>(), Algorithm::of<LambOp>()}) {
    Pair decided(optimizer_rows()), undecided(optimizer_rows());
    decided.both([&](World& world) { world.step(algorithm); });
    undecided.both([&](World& world) {
      world.knows_decision = false;
      world.step(algorithm);
    });
    undecided.expect_same();
    expect_same(decided.cpu, undecided.cpu);
  }
}

// Each row as in a table of its algorithm alone.
TEST(several_algorithms) {
  const std::vector<Algorithm> mixed = {Algorithm::of<AdamOp>(), Algorithm::of<LambOp>(),
                                        Algorithm::of<MuonOp>()};
  std::vector<RowSpec> rows = optimizer_rows();
  for (size_t row = 0; row < rows.size(); ++row)
    rows[row].hyper.algorithm = mixed[row % mixed.size()].index();
  Pair pair(rows);
  std::vector<std::unique_ptr<World>> alone;
  for (size_t i = 0; i < mixed.size(); ++i) alone.push_back(std::make_unique<World>(false, rows));
  for (unsigned step = 0; step < 3; ++step) {
    const double max_norm = step == 1 ? 0.0 : 0.5;
    pair.both([&](World& world) {
      new_gradients(world, 10 + step);
      world.step(mixed, max_norm);
    });
    pair.expect_same();
    for (size_t i = 0; i < mixed.size(); ++i) {
      new_gradients(*alone[i], 10 + step);
      alone[i]->step(mixed[i], max_norm);
    }
  }
  for (int64_t row = 0; row < pair.cpu.rows(); ++row) {
    World& same = *alone[size_t(row) % mixed.size()];
    for (int list = 0; list < kColumns; ++list)
      EXPECT(pair.cpu.bytes(row, list) == same.bytes(row, list));
  }
}

// What a metered step fills.
struct Metering {
  Cell<uint32_t> counts;
  Cell<float> norms;
  Cell<uint8_t> changed;
  Meter meter;

  explicit Metering(World& world)
      : counts(world.on_cuda, 0u, size_t(world.rows()) * kMeterCounts),
        norms(world.on_cuda, -1.0f, size_t(world.rows()) * 2),
        changed(world.on_cuda, 0, size_t(world.table->view().chunk_count * (kChunk / 8))) {
    meter.counts = counts.get();
    meter.norms = norms.get();
    meter.changed = changed.get();
    world.meter = &meter;
  }
};

// The first overflows, and changes and counts nothing. Metered ones have the bits of those that are
// not, and what is counted is the same on both backends.
TEST(encoded_and_metered_steps) {
  for (const AlgorithmInfo& each : algorithms()) {
    if (each.states.empty() || each.algorithm == Algorithm::of<LambUpdateOp>())
      continue;  // steps no parameter
    std::vector<RowSpec> rows = encoded_rows(each);
    for (const RowSpec& row : optimizer_rows()) rows.push_back(row);
    Pair pair(rows), metered(rows);
    World before(false, rows);
    for (unsigned step = 0; step < 3; ++step) {
      Metering cpu(metered.cpu), gpu(metered.gpu);
      for (World* world : {&pair.cpu, &pair.gpu, &metered.cpu, &metered.gpu}) {
        new_gradients(*world, 10 + step);
        if (step == 0) world->set(40, kGrad, 0, kNan);
        world->step(each.algorithm, step == 1 ? 0.0 : 0.5);
      }
      pair.expect_same();
      metered.expect_same();
      expect_same(pair.cpu, metered.cpu);
      EXPECT(cpu.counts.all() == gpu.counts.all(), each.name, " counts, step ", step);
      EXPECT(cpu.norms.all() == gpu.norms.all(), each.name, " norms, step ", step);
      EXPECT(cpu.changed.all() == gpu.changed.all(), each.name, " changed weights, step ", step);
      EXPECT((cpu.counts.read(40 * kMeterCounts + kElements) > 0) == (step != 0));
      if (step > 0) continue;
      EXPECT(pair.gpu.state.read().skip == 1 && pair.gpu.state.read().last_bad_row == 40);
      for (int64_t row = 0; row < before.rows(); ++row) {
        EXPECT(pair.gpu.steps.read(size_t(row)) == 0);
        EXPECT(pair.gpu.norm_averages.read(size_t(row)) == 0);
        for (int list = kParam; list < kColumns; ++list)
          EXPECT(pair.gpu.values(row, list) == before.values(row, list), row, " ", list);
      }
    }
  }
}

// Scales that a division without its slow path would round wrongly, and none.
TEST(quantized_states_of_any_size) {
  for (const float magnitude : {0.0f, 1e-37f, 1e-22f, 1e-15f, 1e10f, 1e18f, 1e25f}) {
    RowSpec row = optimizer_row(3 * kScaleBlock + 5, 0);
    row.types[kState0] = DType::kSigned8;
    row.types[kState1] = DType::kUnsigned8;
    Pair pair({row});
    pair.both([&](World& world) {
      for (const int scales : {kScale0 + 0, kScale0 + 1}) {
        for (int64_t block = 0; block < 4; ++block) world.set(0, scales, block, magnitude);
      }
      for (int64_t i = 0; i < row.numel; ++i)
        world.set(0, kGrad, i, magnitude * (float(1 + i) / float(row.numel)));
      world.step(Algorithm::of<AdamOp>(), 0.0);
    });
    pair.expect_same();
  }
}

// Blocks take a half of a chunk, or all of it, where there are many chunks.
TEST(encoded_steps_of_large_tables) {
  for (const int64_t small_rows : {1 << 13, 1 << 14}) {
    std::vector<RowSpec> rows;
    for (int variant = 0; variant < 12; ++variant)
      rows.push_back(
          encoded_row(info(Algorithm::of<AdamOp>()), 2 * kChunk + 77 * variant, variant));
    const RowSpec small = gradient_row(1, kF32);
    for (int64_t i = 0; i < small_rows; ++i) rows.push_back(small);
    Pair pair(rows);
    pair.both([](World& world) { world.step(Algorithm::of<AdamOp>()); });
    pair.expect_same();
  }
}

// Weights and updates out of FP32's safe range for squares are measured a second time.
TEST(lamb_measures_values_of_any_size) {
  for (const float magnitude : {1e-30f, 1e25f, 1e37f}) {
    for (const double eps : {0.0, 1e-8, 1e30}) {
      std::vector<RowSpec> rows = {optimizer_row(kTile + 3, 4), optimizer_row(77, 1)};
      for (RowSpec& row : rows) row.hyper.eps = eps;
      Pair pair(rows);
      pair.both([&](World& world) {
        for (int64_t i = 0; i < 77; ++i) world.set(1, kParam, i, magnitude * (float(1 + i) / 100));
        world.step(Algorithm::of<LambOp>());
      });
      pair.expect_same();
      for (const float value : pair.gpu.values(1, kParam)) EXPECT(std::isfinite(value), value);
    }
  }
}

TEST(every_dtype_mixture) {
  std::vector<RowSpec> rows;
  for (const DType grad : kTypes) {
    for (const DType param : kTypes) {
      for (const DType model : {kAbsent, kF16, kBF16}) {
        for (const int misaligned : {0, 1, 3, 8}) {
          RowSpec row = optimizer_row(kTile + 13, int(rows.size()));
          row.types[kGrad] = grad;
          row.types[kParam] = param;
          row.types[kModel] = model;
          row.misaligned = misaligned;
          rows.push_back(row);
        }
      }
    }
  }
  Pair pair(rows);
  pair.both([](World& world) { world.step(Algorithm::of<AdamOp>()); });
  pair.expect_same();
}

// In place, and not clipped. `mixed`: beside rows that have every other list.
TEST(updates_leave_unscaled_gradients) {
  for (const AlgorithmInfo& each : algorithms()) {
    const Algorithm algorithm = each.algorithm;
    if (each.states.empty()) continue;  // no optimizer
    for (const bool mixed : {false, true}) {
      std::vector<RowSpec> rows = mixed ? optimizer_rows() : std::vector<RowSpec>();
      const int64_t first = int64_t(rows.size());
      for (const int64_t n : seam_sizes()) {
        RowSpec row = optimizer_row(n, 3 * int(n % 4));
        row.types[kGrad] = row.types[kParam] = kF32;
        row.types[kAccumulated] = row.types[kState2] = kAbsent;
        row.scaled = true;
        rows.push_back(row);
      }
      World before(false, rows);
      Pair pair(rows);
      pair.both([&](World& world) {
        for (int64_t row = first; row < world.rows(); ++row) world.alias(row, kUnscaled, kGrad);
        world.step(algorithm, 0.5);
      });
      pair.expect_same();
      for (int64_t row = 0; row < before.rows(); ++row) {
        std::vector<float> expected = before.values(row, kGrad);
        for (float& value : expected) value *= row < first ? 1.0f : 1.0f / 1024;
        EXPECT(pair.gpu.values(row, kGrad) == expected, "row ", row);
      }
    }
  }
}

// --- inspect -------------------------------------------------------------------------------------

TEST(norms) {
  std::vector<RowSpec> rows;
  for (const int64_t n : seam_sizes()) {
    for (const DType type : kTypes) {
      rows.push_back(gradient_row(n, type, n % 2));
      rows.back().misaligned = int(rows.size() % 5 == 0);
    }
  }
  rows.push_back(
      gradient_row(40 * kChunk + 1, kBF16));  // a row of more chunks than a warp has lanes
  Pair pair(rows);
  pair.both([](World& world) { world.inspect(); });
  pair.expect_same();
  double sum = 0;
  for (int64_t row = 0; row < pair.cpu.rows(); ++row) {
    for (const float value : pair.cpu.values(row, kGrad)) {
      const double unscaled = double(value) / (rows[size_t(row)].scaled ? 1024.0 : 1.0);
      sum += unscaled * unscaled;
    }
  }
  EXPECT(std::abs(pair.gpu.norm.read() / std::sqrt(sum) - 1) < 1e-6);
}

TEST(non_finite_anywhere) {
  const int64_t n = kChunk + 5;
  for (const DType type : kTypes) {
    for (const float bad : {kInf, -kInf, kNan}) {
      for (const int64_t i : {int64_t(0), int64_t(kTile - 1), kChunk - 1, kChunk, n - 1}) {
        Pair pair({gradient_row(10, kF32), gradient_row(n, type), gradient_row(3, kF16)});
        pair.both([&](World& world) {
          world.set(1, kGrad, i, bad);
          world.inspect();
        });
        pair.expect_same();
        const StepState state = pair.gpu.state.read();
        EXPECT(state.found_inf == 1 && state.bad_row == 1);
        EXPECT((state.bad_bits == kInfinityBits) == (bad == bad));
        EXPECT(pair.gpu.found_inf.read() == 1);
      }
    }
  }
}

TEST(unscaled_gradients_are_written) {
  for (const bool in_place : {false, true}) {
    for (const float magnitude : {1.0f, 1e-20f, 1e-44f, 1e30f, 3e38f}) {
      std::vector<RowSpec> rows;
      for (const DType type : kTypes) {
        for (const DType out : {kF32, type}) {
          RowSpec row = gradient_row(2 * kTile + 3, type, true);
          row.misaligned = int(rows.size()) % 3;
          row.types[kGradOut] = in_place ? kAbsent : out;
          row.types[kAccumulated] = rows.size() % 2 ? kF32 : kAbsent;
          rows.push_back(row);
        }
      }
      Pair pair(rows);
      pair.both([&](World& world) {
        for (int64_t row = 0; row < world.rows(); ++row) {
          world.set(row, kGrad, 5, magnitude);
          if (in_place) world.alias(row, kGradOut, kGrad);
        }
        world.inspect();
      });
      pair.expect_same();
    }
  }
}

// A pass reports its own overflow, and never one that an earlier pass left.
TEST(an_overflow_belongs_to_the_pass_that_made_it) {
  for (const DType type : kTypes) {
    for (const float magnitude : {1.0f, 1e-25f}) {  // the small ones are summed twice
      for (const bool fresh : {false, true}) {
        for (const float earlier : {1.0f, kInf, kNan}) {
          for (const float now : {1.0f, -kInf}) {
            std::vector<RowSpec> rows;
            for (const int64_t n : {int64_t(9), kChunk + 3}) {
              rows.push_back(gradient_row(n, type, true));
              rows.back().types[kAccumulated] = type;
            }
            Pair pair(rows);
            pair.both([&](World& world) {
              world.fresh = fresh;
              for (int64_t row = 0; row < world.rows(); ++row) {
                for (int64_t i = 0; i < 9; ++i) {
                  world.set(row, kGrad, i, magnitude * float(1 + i));
                  world.set(row, kAccumulated, i, 0);
                }
                world.alias(row, kGradOut, kGrad);
              }
              world.set(1, kAccumulated, 5, earlier);
              if (now != 1) world.set(1, kGrad, 5, now);
              world.inspect();
            });
            pair.expect_same();
            const bool overflow = now != 1 || (earlier != 1 && !fresh);
            EXPECT(pair.gpu.state.read().found_inf == float(overflow));
            const float written = pair.gpu.values(1, kGrad)[5];
            EXPECT(std::isfinite(written) == (now == 1 && earlier == 1), written);
          }
        }
      }
    }
  }
}

// --- the last block ------------------------------------------------------------------------------

namespace {

enum class Gradients { kAll, kSome, kNone };

// Rows of 0 or 1 element, of a chunk and its neighbours, of several chunks; in all more rows than a
// block has threads, so that a thread prepares two.
std::vector<RowSpec> last_block_rows(Gradients gradients) {
  std::vector<RowSpec> rows;
  const auto add = [&](int64_t numel) {
    const int i = int(rows.size());
    rows.push_back(optimizer_row(numel, i / 50));  // runs that share hyper-parameters
    RowSpec& row = rows.back();
    const bool has = gradients == Gradients::kAll || (gradients == Gradients::kSome && i % 3 != 1);
    row.types[kGrad] = has ? kTypes[i % 3] : kAbsent;
    row.types[kAccumulated] = kAbsent;
  };
  for (const int64_t n : {int64_t(0), int64_t(1), kChunk - 1, kChunk, kChunk + 1, 3 * kChunk + 5,
                          2 * kChunk, int64_t(0)}) {
    add(n);
    add(n / 2);
  }
  while (rows.size() < kLanes + 3) add(int64_t(rows.size() % 3));
  return rows;
}

}  // namespace

// Two steps and an overflow between. Which block is last depends on the order that the test runs
// in.
TEST(the_last_block_finishes_rows_and_step) {
  for (const Gradients gradients : {Gradients::kAll, Gradients::kSome, Gradients::kNone}) {
    const std::vector<RowSpec> rows = last_block_rows(gradients);
    const bool any = gradients != Gradients::kNone;
    for (const Algorithm algorithm :
         {Algorithm::of<AdamOp>(), Algorithm::of<NovoGradOp>(), Algorithm::of<LambOp>()}) {
      Pair pair(rows);
      for (const bool overflow : {false, true, false}) {
        pair.both([&](World& world) {
          world.row_norms.write(-1.0f, 0);  // of a row without elements, which has no block
          new_gradients(world, overflow ? 2 : 3);
          if (overflow && any) world.set(8, kGrad, kChunk, kInf);
          world.step(algorithm, 0.5);
        });
        pair.expect_same();
        EXPECT(pair.gpu.row_norms.read(0) == 0);
      }
      EXPECT(pair.gpu.state.read().history.nonfinite == any);
      EXPECT(pair.gpu.steps.read(8) == (any ? 2 : 0));
    }
  }
}

TEST(one_call_prepares_as_two_calls_do) {
  for (const AlgorithmInfo& each : algorithms()) {
    const Algorithm algorithm = each.algorithm;
    for (const bool layerwise : {false, true}) {
      std::vector<RowSpec> rows = last_block_rows(Gradients::kSome);
      for (RowSpec& row : rows) row.hyper.flags |= layerwise ? kLayerwise : 0;
      World together(true, rows), apart(true, rows);
      apart.apart = true;
      for (World* world : {&together, &apart}) {
        world->layerwise = layerwise;
        world->step(algorithm);
      }
      expect_same(together, apart);
    }
  }
}

TEST(rows_without_elements_alone) {
  for (const AlgorithmInfo& each : algorithms()) {
    for (const bool layerwise : {false, true}) {
      for (const size_t count : {0, 1, 3}) {
        Pair pair(std::vector<RowSpec>(count, optimizer_row(0, 0)));
        pair.both([&](World& world) {
          world.layerwise = layerwise;
          world.step(each.algorithm);
        });
        pair.expect_same();
        EXPECT(pair.gpu.norm.read() == 0.0f);
        if (count == 0) continue;
        EXPECT(pair.gpu.row_norms.read() == 0);
        EXPECT(!layerwise || pair.gpu.param_norms.read() == 0);
      }
    }
  }
}

// --- multi-tensor ops ----------------------------------------------------------------------------

TEST(maps) {
  std::vector<RowSpec> rows;
  for (const int64_t n : seam_sizes()) {
    const size_t i = rows.size();
    RowSpec row;
    row.numel = n;
    row.misaligned = int(i % 4 == 3);
    row.types[kSource] = kTypes[i % 3];
    row.types[kSource2] = kTypes[i / 3 % 3];
    row.types[kTarget] = kTypes[i / 9 % 3];
    row.types[kParam] = kF32;
    row.types[kModel] = i % 5 == 0 ? kAbsent : kTypes[i % 3];
    rows.push_back(row);
  }
  for (int index = 0; index < MapOps::kCount; ++index) {
    const MapOp op(index);
    unsigned checked = 0;
    visit(op, [&](auto type) { checked = decltype(type)::type::kChecked; });
    for (const int bad : {-1, int(kSource), int(kSource2)}) {
      Pair pair(rows);
      pair.both([&](World& world) {
        if (bad >= 0) world.set(30, bad, 29, -kInf);
        MapArgs args;
        args.a = 0.37f;
        args.b = -1.25f;
        args.found_inf = world.found_inf.get();
        world.backend().map(*world.table, op, args, nullptr);
      });
      pair.expect_same();
      EXPECT(pair.gpu.found_inf.read() == float(bad >= 0 && (checked & bit(bad))));
    }
  }
}

TEST(refresh_leaves_rows_without_a_model_weight) {
  RowSpec row;
  row.numel = 9;
  row.types[kParam] = kF32;
  Pair pair({row});
  World before(false, {row});
  pair.both(
      [](World& world) { world.backend().map(*world.table, MapOp::of<RefreshOp>(), {}, nullptr); });
  EXPECT(pair.cpu.values(0, kParam) == before.values(0, kParam));
  EXPECT(pair.gpu.values(0, kParam) == before.values(0, kParam));
}

// --- encoded storage -----------------------------------------------------------------------------

template <DType kType>
static float joined(float x) {
  using S = Split<kType>;
  const float limited = S::limit(x), high = S::high(limited);
  return S::join(high, uint32_t(int16_t(S::remainder(limited, high))));
}

// A weight that somebody changed keeps its remainder: the master still rounds to it. What comes
// back of a master in FP16, comes back the next time.
TEST(edited_split_weights) {
  using Brain = Split<DType::kRemainderBFloat16>;
  for (uint32_t rest = 0; rest < 1u << 16; rest += 7) {
    const auto bits = uint32_t(int16_t(rest));
    EXPECT(Brain::join(0.0f, bits) >= 0.0f && Brain::join(0.0f, bits) < 1e-38f);
    EXPECT(Brain::high(Brain::join(1.0f, bits)) == 1.0f);
  }
  for (uint64_t bits = 0; bits < (1ull << 32); bits += 4099) {
    const float back = joined<DType::kRemainderFloat16>(bits_float(uint32_t(bits)));
    EXPECT(same(joined<DType::kRemainderFloat16>(back), back), back);
  }
}

// A value after a conversion, or a step, has encoded it and it is decoded.
template <class Quantizer>
static float decoded(Quantizer, float x, float scale, bool steps = false) {
  const float encoder = Quantizer::encoder(scale);
  const uint32_t quantized = Quantizer::encode(x, encoder, Quantizer::offset(steps));
  return Quantizer::decode(Quantizer::root(float(typename Quantizer::Stored(quantized))), scale);
}

// The nearer of the two values around it, or nearly, but where the least ones are, and the same
// again. A step leaves at most a little less, and what it takes off reaches zero.
template <class Quantizer>
static void check_values(Quantizer quantizer, float scale) {
  std::vector<float> values;
  for (int i = 0; i < 256; ++i)
    values.push_back(
        Quantizer::decode(Quantizer::root(float(typename Quantizer::Stored(i))), scale));
  std::sort(values.begin(), values.end());
  const float least = scale * (Quantizer::kSign ? 0x1p-14f : 0x1p-29f);
  for (float fraction = Quantizer::kLargest; fraction > 1e-12f; fraction *= 0.9993f) {
    for (const float x : {fraction * scale, -fraction * scale}) {
      if (x < 0 && !Quantizer::kSign) continue;  // but -0
      const float back = decoded(quantizer, x, scale);
      const auto above = std::lower_bound(values.begin(), values.end(), x);
      const float high = above == values.end() ? back : *above;
      const float low = above == values.begin() ? high : *(above - 1);
      EXPECT(std::fabs(back - x) <= 0.7f * (high - low) + least, x, " as ", back);
      EXPECT(Quantizer::kSign || x == 0 || back > 0, x, " as ", back);
      EXPECT(decoded(quantizer, back, scale) == back, x, " of ", scale);
      const float stepped = decoded(quantizer, x, scale, true);
      EXPECT(std::fabs(stepped) <= std::fabs(back), x, " as ", stepped);
      EXPECT(std::fabs(stepped - x) <= high - low + 4 * least, x, " as ", stepped);
    }
  }
  if (!Quantizer::kSign) return;
  for (const float value : values) {
    const float later = decoded(quantizer, 0.9f * value, scale, true);
    EXPECT(value == 0 ? later == 0 : std::fabs(later) < std::fabs(value), value, " to ", later);
  }
}

template <class Quantizer>
static void check_quantizer(Quantizer quantizer) {
  for (const float largest : {1.0f, 3e38f, 1e-30f, 0x1.8p-126f, 0.3f, 0.7f, 1.9f}) {
    const float scale = Quantizer::scale(float_bits(largest));
    if (largest > 1e-37f) check_values(quantizer, scale);
    const float zero = decoded(quantizer, 0.0f, scale);
    EXPECT(Quantizer::kSign ? zero == 0 : (zero > 0 || scale < 1e-28f) && zero <= scale * 0x1p-30f,
           zero);
    for (const bool steps : {false, true})
      EXPECT(same(decoded(quantizer, largest, scale, steps), largest), largest);
    EXPECT(same(Quantizer::scale(float_bits(largest)), scale), largest);
  }
  EXPECT(Quantizer::scale(0) == 0 && Quantizer::encoder(0) == 0 &&
         decoded(quantizer, 0.0f, 0.0f) == 0);
  const float poisoned = Quantizer::scale(float_bits(kInf) + 1);
  EXPECT(poisoned != poisoned);
  // Limited, or infinite as the square is, and so with all its neighbours.
  const float limit = Quantizer::scale(float_bits(kInf));
  const float infinite = decoded(quantizer, kInf, limit), beside = decoded(quantizer, 1.0f, limit);
  EXPECT(Quantizer::kSign ? infinite > 3.4e38f && infinite < kInf : infinite == kInf, infinite);
  EXPECT(beside == (Quantizer::kSign ? 0.0f : kInf), beside);
}

TEST(quantized_values) {
  for (const StorageInfo& storage : storages()) {
    if (storage.block == 0) continue;
    with_quantizer(storage.signed_type, [](auto quantizer) { check_quantizer(quantizer); });
    with_quantizer(storage.unsigned_type, [](auto quantizer) { check_quantizer(quantizer); });
  }
}

// In the mean a value stays, what BF16 holds does, and both neighbours are met.
TEST(rounding_at_random) {
  for (const float x : {1.0f, 1.001f, -0.37f, 3e38f, 1e-39f, kInf, -kInf}) {
    double sum = 0;
    constexpr uint32_t kDraws = 1u << 16;
    for (uint32_t i = 0; i < kDraws; ++i) {
      const float rounded = stochastic_round(x, hash(i ^ list_key(row_key(1, 2, 3), kParam, 0u)));
      EXPECT(same(round_to(kBF16, rounded), rounded), x);
      sum += double(rounded) / kDraws;
    }
    const double unit = std::fabs(double(x)) / 128;
    EXPECT(std::isinf(x) ? sum == double(x) : std::fabs(sum - double(x)) < unit / 100, x, sum);
  }
  EXPECT(std::isnan(stochastic_round(kNan, 0xffffu)));
}

// A shard may begin a few elements before a multiple of 2^32, within a vector.
TEST(random_bits_around_a_multiple_of_two_to_the_32) {
  std::vector<RowSpec> rows;
  for (int64_t before = 1; before < 40; ++before) {
    RowSpec row = gradient_row(64, kBF16);
    row.types[kParam] = DType::kRandomBFloat16;
    row.types[kState0] = row.types[kState1] = kF32;
    row.origin = (int64_t(1) << 32) - before;
    row.hyper.seed = 3;
    rows.push_back(row);
  }
  Pair pair(rows);
  pair.both([](World& world) { world.step(Algorithm::of<AdamOp>()); });
  pair.expect_same();
}
