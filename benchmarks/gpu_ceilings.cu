// The best speeds of a device's parts, by kernels of our own, so that shares of them mean
// something: products by mma.sync, reads of fragments by ldmatrix, additions by red, a copy.
//
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -Icsrc -arch=native benchmarks/gpu_ceilings.cu
//   ./a.out
//
// Prints each figure as soon as it is known: of the fastest launch. Exit code 2: there is no
// device. Neither torch nor a library of ours is needed.
#include <cstdio>
#include <exception>

#include "cuda/vec.cuh"
#include "gpu_fastest.cuh"

namespace onepass::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kAtOnce = 8;  // independent operations of a warp

// Products of 16 x 8 x 16; the factors stay in registers.
template <class T>
__global__ void __launch_bounds__(kThreads) mma_kernel(float* results, int turns) {
  const uint32_t a[4] = {threadIdx.x, threadIdx.x, threadIdx.x, threadIdx.x};
  const uint32_t b[2] = {blockIdx.x, blockIdx.x};
  float sum[kAtOnce][4] = {};
  ONEPASS_ROLL
  for (int turn = 0; turn < turns; ++turn) {
    ONEPASS_UNROLL
    for (int i = 0; i < kAtOnce; ++i) mma_m16n8k16<T>(sum[i], a, b);
  }
  float all = 0.0f;
  for (const auto& one : sum) all += one[0] + one[1] + one[2] + one[3];
  results[blockIdx.x * kThreads + threadIdx.x] = all;
}

// Fragments of 16 x 16 elements, of rows of 16 bytes in neighbouring banks.
__global__ void __launch_bounds__(kThreads) ldmatrix_kernel(float* results, int turns) {
  SharedMemory shared;
  auto* const rows = shared.take<Words>(kAtOnce * kThreads);
  for (int i = static_cast<int>(threadIdx.x); i < kAtOnce * kThreads; i += kThreads) rows[i] = {};
  __syncthreads();
  uint32_t all = 0;
  ONEPASS_ROLL
  for (int turn = 0; turn < turns; ++turn) {
    ONEPASS_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      uint32_t fragment[4];
      ldmatrix<4, false>(fragment, rows + i * kThreads + threadIdx.x);
      all |= fragment[0] | fragment[1] | fragment[2] | fragment[3];
    }
  }
  results[blockIdx.x * kThreads + threadIdx.x] = static_cast<float>(all);
}

// Additions of four neighbours, to places that no other thread adds to at the same time.
__global__ void __launch_bounds__(kThreads) red_kernel(float* sums, int turns) {
  const float ones[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  float* const own = sums + 4 * (blockIdx.x * kThreads + threadIdx.x);
  ONEPASS_ROLL
  for (int turn = 0; turn < turns; ++turn) add_global_4(own, ones);
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const Words* from, Words* to) {
  const int64_t first = int64_t{blockIdx.x} * kThreads * kAtOnce + threadIdx.x;
  Words words[kAtOnce];
  ONEPASS_UNROLL
  for (int i = 0; i < kAtOnce; ++i) words[i] = load_global(from + first + i * kThreads);
  ONEPASS_UNROLL
  for (int i = 0; i < kAtOnce; ++i) store_global(to + first + i * kThreads, words[i]);
}

void print(const char* name, double value, const char* unit) {
  std::printf("figure ceiling, %s: %.1f %s\n", name, value, unit);
  std::fflush(stdout);
}

void measure() {
  const auto processors = static_cast<int>(multiprocessors());
  constexpr int64_t kCopied = int64_t{1} << 30;
  char *memory = nullptr, *other = nullptr;
  check(cudaMalloc(&memory, kCopied), "memory");
  check(cudaMalloc(&other, kCopied), "memory");
  check(cudaMemset(memory, 0, kCopied), "memory");
  auto* const results = reinterpret_cast<float*>(memory);
  const LaunchShape blocks = {.blocks = 4 * processors, .threads = kThreads};
  const double warps = 4.0 * processors * kWarps;

  constexpr int kTurns = 4096;
  constexpr double kProduct = 2.0 * 16 * 8 * 16, kFragment = 512.0;
  const auto products = [&]<class T>(const char* name) {
    const double seconds =
        fastest([&] { launch<mma_kernel<T>>(blocks, nullptr, results, int{kTurns}); });
    print(name, warps * kTurns * kAtOnce * kProduct / seconds / 1e12, "TFLOP/s");
  };
  products.operator()<BFloat16>("mma.sync bfloat16");
  products.operator()<Float16>("mma.sync float16");

  const LaunchShape with_rows = {.blocks = 2 * processors,
                                 .threads = kThreads,
                                 .shared_bytes = kAtOnce * kThreads * sizeof(Words)};
  const double reading =
      fastest([&] { launch<ldmatrix_kernel>(with_rows, nullptr, results, int{kTurns}); });
  print("ldmatrix.x4", warps / 2 * kTurns * kAtOnce * kFragment / reading / 1e9, "GB/s");

  constexpr int kAdditions = 64;
  const double adding =
      fastest([&] { launch<red_kernel>(blocks, nullptr, results, int{kAdditions}); });
  const bool adds_four = attribute_of_device(cudaDevAttrComputeCapabilityMajor) >= 9;
  print(adds_four ? "red.v4" : "red", 4.0 * processors * kThreads * kAdditions * 16 / adding / 1e9,
        "GB/s");

  constexpr int64_t kOfBlock = int64_t{kThreads} * kAtOnce * static_cast<int64_t>(sizeof(Words));
  const double copying = fastest([&] {
    launch<copy_kernel>({.blocks = kCopied / kOfBlock, .threads = kThreads}, nullptr,
                        reinterpret_cast<const Words*>(memory), reinterpret_cast<Words*>(other));
  });
  print("copy", 2.0 * kCopied / copying / 1e9, "GB/s");
}

}  // namespace
}  // namespace onepass::cuda

int main() {
  int devices = 0;
  if (const auto error = cudaGetDeviceCount(&devices); error != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "gpu_ceilings: no device: %s\n", cudaGetErrorString(error));
    return 2;
  }
  try {
    onepass::cuda::measure();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_ceilings: %s\n", error.what());
    return 1;
  }
  return 0;
}
