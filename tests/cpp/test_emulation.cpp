// The stand-in for CUDA finds what it is there to find.
#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "cuda/launch.cuh"
#include "cuda/pack.cuh"
#include "harness.h"

using namespace ampfuse;

namespace {

__global__ void reverse_block(int* values) {
  __shared__ int shared[256];
  const int i = int(threadIdx.x), base = int(blockIdx.x * blockDim.x);
  shared[i] = values[base + i];
  __syncthreads();
  values[base + i] = shared[blockDim.x - 1 - i];
}

__global__ void diverge_by_return(int* values) {
  if (threadIdx.x == 100) return;
  __syncthreads();
  values[threadIdx.x] = 1;
}

__global__ void diverge_by_branch(int* values) {
  if (threadIdx.x % 2) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  values[threadIdx.x] = 1;
}

__global__ void diverge_in_a_warp(float* values) {
  if (threadIdx.x == 5) return;
  values[threadIdx.x] = __shfl_down_sync(0xffffffffu, values[threadIdx.x], 1);
}

__global__ void missing_barrier(int* values, int* wrong) {
  __shared__ int shared[256];
  const int i = int(threadIdx.x);
  shared[i] = values[i];
  const int other = shared[(i + 1) % 256];
  if (other != values[(i + 1) % 256]) *wrong = 1;
  __syncthreads();
  shared[i] = -1;
}

__global__ void sum_by_ticket(const int* values, int* partial, unsigned* ticket, int* total,
                              int* last) {
  if (threadIdx.x != 0) return;
  partial[blockIdx.x] = values[blockIdx.x];
  __threadfence();
  if (atomicInc(ticket, gridDim.x - 1) != gridDim.x - 1) return;
  *total = 0;
  for (unsigned i = 0; i < gridDim.x; ++i) *total += partial[i];
  *last = int(blockIdx.x);
}

// The error message of a launch in one block, or "".
template <class... Args>
std::string error_of(void (*kernel)(Args...), int threads, Args... args) {
  try {
    launch(NamedKernel{"k", kernel}, 1, threads, nullptr, args...);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

struct OrderScope {
  explicit OrderScope(emulation::Order order) { emulation::set_order(order); }
  ~OrderScope() { emulation::set_order(emulation::order_from_environment()); }
};

}  // namespace

TEST(barriers_and_shared_memory) {
  std::vector<int> values(24 * 256);
  for (size_t i = 0; i < values.size(); ++i) values[i] = int(i);
  launch(NamedKernel{"reverse_block", reverse_block}, 24, 256, nullptr, values.data());
  for (size_t i = 0; i < values.size(); ++i)
    EXPECT(values[i] == int(i / 256 * 256 + 255 - i % 256));
}

TEST(divergent_barriers_are_errors) {
  std::vector<int> values(256);
  std::vector<float> floats(256);
  std::string error = error_of(diverge_by_return, 256, values.data());
  EXPECT(error.find("255 of 256 threads arrived") != std::string::npos, error);
  error = error_of(diverge_by_branch, 256, values.data());
  EXPECT(error.find("some threads wait at") != std::string::npos, error);
  error = error_of(diverge_in_a_warp, 64, floats.data());
  EXPECT(error.find("31 of 32 threads arrived") != std::string::npos, error);
  // The next launch is none the worse for it.
  EXPECT(error_of(reverse_block, 256, values.data()) == "no error");
}

TEST(an_order_of_threads_shows_a_missing_barrier) {
  std::vector<int> values(256);
  for (int i = 0; i < 256; ++i) values[size_t(i)] = i;
  int wrong = 0;
  for (const auto order : {emulation::Order::kForward, emulation::Order::kReverse}) {
    const OrderScope scope(order);
    launch(NamedKernel{"missing_barrier", missing_barrier}, 1, 256, nullptr, values.data(), &wrong);
  }
  EXPECT(wrong == 1);
}

TEST(every_block_order_ends_with_the_last_block) {
  std::vector<int> values(100), partial(100);
  for (int i = 0; i < 100; ++i) values[size_t(i)] = i;
  unsigned ticket = 0;
  for (const auto order :
       {emulation::Order::kForward, emulation::Order::kReverse, emulation::Order::kRandom}) {
    const OrderScope scope(order);
    for (int again = 0; again < 2; ++again) {
      int total = 0, last = -1;
      launch(NamedKernel{"sum_by_ticket", sum_by_ticket}, 100, 32, nullptr, values.data(),
             partial.data(), &ticket, &total, &last);
      EXPECT(total == 4950 && ticket == 0);
      if (order == emulation::Order::kForward) EXPECT(last == 99);
      if (order == emulation::Order::kReverse) EXPECT(last == 0);
    }
  }
}

TEST(launch_errors_name_the_kernel_and_the_place) {
  std::vector<int> values(256);
  const std::string error = error_of(reverse_block, 2048, values.data());
  for (const char* part : {"k at ", "test_emulation.cpp:", "cudaErrorInvalidConfiguration"}) {
    EXPECT(error.find(part) != std::string::npos, error);
  }
}

TEST(a_pack_is_rounded_as_each_of_its_values) {
  // Numbers: zeros, ties, subnormals, what rounds to infinity, infinity; NaNs with a high and a low
  // bit set.
  const uint32_t all[] = {0u,          0x80000000u, 0x3f808000u, 0x3f818000u,
                          0x3f808001u, 0x00008000u, 0x00018000u, 0x807fffffu,
                          0x7f7fffffu, 0x7f800000u, 0xff800000u, 0x42fe7fffu,
                          0x7fc00000u, 0x7f800001u, 0xffffffffu, 0xff80ffffu};
  constexpr int kNumbers = 12, kAll = 16;
  for (const int count : {kNumbers, kAll}) {
    for (int first = 0; first < count; ++first) {
      float value[8];
      for (int k = 0; k < 8; ++k) value[k] = bits_float(all[(first + k) % count]);
      const Pack<8> bfloat16 = narrow<DType::kBFloat16>(value);
      const Pack<8> float16 = narrow<DType::kFloat16>(value);
      for (int k = 0; k < 8; ++k) {
        EXPECT(bfloat16.get<2>(k) == float_to_bfloat16(value[k]));
        EXPECT(float16.get<2>(k) == float_to_float16(value[k]));
      }
    }
  }
}
