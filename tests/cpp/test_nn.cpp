// Fused layers at their seams: for every op of NnOps, the CUDA backend must leave the bits that the
// CPU backend leaves. Every list is an allocation of its own, so that a sanitizer sees what is past
// its end.
#include "nn_call.h"

using namespace ampfuse;

template <class Op>
static void compare(const ImageRows& image, unsigned absent) {
  NnCall<Op> cpu(false, image, absent), gpu(true, image, absent);
  cpu.start();
  gpu.start();
  expect_same_lists(cpu.results(), gpu.results(), Op::kName, ": ", image.rows, " rows of ",
                    image.channels, " channels of type ", int(image.dtype), " without ", absent);
}

TEST(nn_ops) {
  int variant = 0;
  for (int op = 0; op < NnOps::kCount; ++op) {
    visit(NnOp{op}, [&](auto type) {
      using Op = typename decltype(type)::type;
      for (const DType dtype : {kF32, kF16, kBF16}) {
        for (const int64_t channels : {1, 7, 8, 9, 16, 40, 64, 65, 150}) {
          for (const int64_t rows : {1, 31, 32, 33, 70, kSpanRows - 1, kSpanRows + 1}) {
            // Most of the time goes into spans: they meet a vector's end, and a block's.
            if (rows > 70 && channels != 1 && channels != 9 && channels != 65) continue;
            // In turn all sets of optional lists; a mask that is read may be absent, too.
            const unsigned read_mask = Op::kReads & kMask;
            unsigned absent = unsigned(++variant) & (Op::kOptional | read_mask);
            if (absent & Op::kTogether) absent |= Op::kTogether;
            compare<Op>({rows, channels, dtype}, absent);
          }
        }
        if (!NnCall<Op>::kAlongRows) continue;
        for (const int64_t spans : {1, 2, 5, kRowGroups, kRowGroups + 1}) {
          for (const int64_t more : {-1, 0, 1}) {
            compare<Op>({3, spans * kSpanColumns + more, dtype}, 0);
            compare<Op>({4, spans * kSpanColumns + more, dtype}, 0);
          }
        }
      }
    });
  }
}

// The spans of a channel are more than its lanes, and more than a block of the CUDA kernels
// finishes; blocks are wide.
TEST(sums_over_many_rows) {
  for (int op = 0; op < NnOps::kCount; ++op) {
    visit(NnOp{op}, [&](auto type) {
      using Op = typename decltype(type)::type;
      if constexpr (Op::kKind == PassKind::kChannelSum) {
        constexpr int64_t kLanesFull = kRowLanes * kSpanRows, kFinishedApart = 128 * kSpanRows;
        for (const int64_t rows :
             {kLanesFull, kLanesFull + 1, kFinishedApart, kFinishedApart + 1}) {
          compare<Op>({rows, 3, kBF16}, 0);
          if (rows < kFinishedApart) compare<Op>({rows, 8, kBF16}, 0);
        }
      }
    });
  }
  compare<BatchNormMoments>({33 * kSpanRows, 264, kBF16}, 0);
}
