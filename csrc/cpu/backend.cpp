// The CPU backend: distributes the chunks of a table and does the work on a table as a whole.
#include "core/backend.h"

#include <algorithm>
#include <atomic>

#include "core/advance.h"
#include "core/ops.h"
#include "float_mode.h"
#include "isa.h"
#include "kernels.h"
#include "nn.h"
#include "threads.h"

namespace ampfuse {
namespace {

// The cost of a chunk besides its elements, as a number of elements of a small tensor.
constexpr int64_t kChunkOverhead = 256;

struct CpuCache : TableCache {
  std::vector<RowCoef> coefs;
  std::vector<Partial> partials;
  std::vector<float> norms;
  std::vector<int64_t> cost;  // [chunk_count + 1] of the chunks before each
};

// Made at the first use.
CpuCache& cache_of(Table& table) {
  if (!table.cache) {
    const TableView view = table.view();
    auto cache = std::make_unique<CpuCache>();
    cache->coefs.resize(view.rows);
    cache->partials.resize(kMeasures * view.chunk_count);
    cache->norms.resize(kMeasures * view.rows);
    cache->cost.push_back(0);
    for (int64_t c = 0; c < view.chunk_count; ++c) {
      const Chunk& chunk = view.chunks[c];
      const int64_t n = std::min(kChunk, view.numel[chunk.row] - chunk.index * kChunk);
      cache->cost.push_back(cache->cost.back() + n + kChunkOverhead);
    }
    table.cache = std::move(cache);
  }
  return static_cast<CpuCache&>(*table.cache);
}

TableView view_of(Table& table) {
  CpuCache& cache = cache_of(table);
  TableView view = table.view();
  view.coefs = cache.coefs.data();
  view.partials = cache.partials.data();
  view.norms = cache.norms.data();
  return view;
}

// Calls body(begin, end) over all chunks, in pieces of equal cost, whatever the number and size of
// the tensors.
template <class Body>
void for_chunks(Table& table, const Body& body) {
  const std::vector<int64_t>& cost = cache_of(table).cost;
  share_out(cost.back(), [&](int64_t piece, int64_t pieces) {
    const auto boundary = [&](int64_t i) {
      const int64_t target = int64_t(double(cost.back()) * double(i) / double(pieces));
      return std::lower_bound(cost.begin(), cost.end(), target) - cost.begin();
    };
    const int64_t first = boundary(piece), last = boundary(piece + 1);
    if (first < last) body(first, last);
  });
}

// What a function computes itself is in a FloatMode of its own; share_out() has one for the rest.
class CpuBackend : public Backend {
 public:
  void inspect(Table& table, const InspectArgs& args, void*) override {
    const TableView view = view_of(table);
    const FloatMode standard;
    Pass pass;
    pass.a = inverse_scale(args);
    pass.b = args.fresh;
    run_op<InspectOp<>>(table, pass);
    int32_t bad_row = -1;
    uint32_t bad_bits = 0;
    for (int64_t c = 0; c < view.chunk_count; ++c) {
      if (view.partials[c].largest < kInfinityBits) continue;
      if (bad_row < 0) bad_row = view.chunks[c].row;
      if (view.chunks[c].row == bad_row) bad_bits = std::max(bad_bits, view.partials[c].largest);
    }
    const double sum = sum_partials<kLanes>(view.partials, view.chunk_count);
    report_inspection(args, sum, bad_row, bad_bits);
    if (args.row_norms || args.row_largest)
      write_row_norms(view, 1, args.row_norms, args.row_largest);
    if (args.preparation.state) prepare(table, args.preparation, nullptr);
  }

  void measure_params(Table& table, float* row_norms, void*) override {
    const FloatMode standard;
    run_op<ParamNormOp>(table, {});
    write_row_norms(view_of(table), 1, row_norms, nullptr);
  }

  void prepare(Table& table, const Preparation& preparation, void*) override {
    const TableView view = view_of(table);
    const FloatMode standard;
    decide_step(*preparation.state, preparation.decision);
    advance_rows(view, preparation, 0, 1);
  }

  void merge(const RankResults& found, void*) override {
    const FloatMode standard;
    if (found.state) merge_states(found);
    for (int64_t i = 0; i < found.values; ++i) merge_norm(found, i);
  }

  float* first_stage(Table& table, Algorithm algorithm, const StepState* state, void*) override {
    float* norms = nullptr;
    if (is_skipped(state)) return norms;
    const TableView view = view_of(table);
    visit(algorithm, [&](auto type) {
      using Before = typename decltype(type)::type::Before;
      if constexpr (!std::is_void_v<Before>) {
        const FloatMode standard;
        run_op<Before>(table, {});
        if constexpr (Before::kMeasured != 0) {
          norms = view.norms;
          write_row_norms(view, count_lists(Before::kMeasured), norms, nullptr);
        }
      }
    });
    return norms;
  }

  void update(Table& table, Algorithm algorithm, const StepState* state, const Meter* meter,
              void*) override {
    if (is_skipped(state)) return;
    visit(algorithm, [&](auto type) {
      using Op = typename decltype(type)::type;
      if constexpr (Op::kWrites & bit(kParam)) {
        if (meter != nullptr) return run_metered<Op>(table, *meter);
      }
      if constexpr (Op::kWrites != 0) run_op<Op>(table, {});
    });
  }

  void map(Table& table, MapOp op, const MapArgs& args, void*) override {
    std::atomic<bool> found_inf{false};
    visit(op, [&](auto type) {
      Pass pass;
      pass.a = args.a;
      pass.b = args.b;
      run_op<typename decltype(type)::type>(table, pass, &found_inf);
    });
    if (found_inf && args.found_inf) *args.found_inf = 1;
  }

  void update_scale(const LossScale& rule, const OverflowFlags& flags, bool fixed, void*) override {
    const FloatMode standard;
    update_loss_scale(rule, flags, fixed);
  }

  void run(NnOp op, const NnArgs& args, void*) override { run_nn(op, args); }

 private:
  template <class Op>
  static void run_op(Table& table, const Pass& pass, std::atomic<bool>* found_inf = nullptr) {
    const TableView view = view_of(table);
    for_chunks(table, [&](int64_t begin, int64_t end) {
      bool found = false;
      Pass mine = pass;
      mine.found_inf = &found;
      with_isa(
          [&](auto isa) { Kernel<typename decltype(isa)::type, Op>::run(view, mine, begin, end); });
      if (found) *found_inf = true;
    });
  }

  template <class Op>
  static void run_metered(Table& table, const Meter& meter) {
    const FloatMode standard;
    Pass pass;
    pass.meter = meter;
    run_op<Metered<Op>>(table, pass);
    write_row_norms(view_of(table), count_lists(Metered<Op>::kMeasured), meter.norms, nullptr);
  }

  // Computes the norm and largest magnitude of each row from partials: [measures][rows], either may
  // be null.
  static void write_row_norms(const TableView& view, int measures, float* norms, float* largest) {
    for (int64_t i = 0; i < measures * view.rows; ++i) {
      const int64_t row = i % view.rows;
      if (!view.is_in_pass(row)) continue;
      const int64_t first = view.first_chunk[row];
      const int64_t count = view.first_chunk[row + 1] - first;
      const Partial* partials = view.partials + i / view.rows * view.chunk_count + first;
      if (norms) norms[i] = norm_of(sum_partials<kRowLanes>(partials, count));
      if (largest) largest[i] = bits_float(largest_partial(partials, count));
    }
  }
};

}  // namespace

Backend& cpu_backend() {
  static CpuBackend backend;
  return backend;
}

}  // namespace ampfuse
