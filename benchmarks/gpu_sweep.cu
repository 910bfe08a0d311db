// Times attention with one tile table, without torch: gpu_sweep.py compiles this once for each
// candidate, for one head dimension (ONEPASS_SWEPT) and bfloat16 alone.
//
//   gpu_sweep NAME FILE     NAME: of the candidate
//
// Prints a figure with and without a diagonal and writes the results of the first rows to FILE,
// which must be the same for all candidates but for rounding. With ONEPASS_SWEPT_BACKWARD it times
// the backward; backward.cu and backward_ends.cu are then linked. Exit code 2: there is no device.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "cuda/attention/backward_bias.h"
#include "cuda/attention/forward.cu"
#include "gpu_fastest.cuh"

namespace onepass::cuda {

#ifdef ONEPASS_SWEPT_BACKWARD
int64_t dbias_bytes(const AttentionBackward&) { return 0; }
void launch_dbias(const AttentionBackward&, const BackwardEnds&, void*, void*) {}
constexpr bool kBackward = true;
#else
Operator<AttentionBackward> tiled_attention_backward() { return {}; }
constexpr bool kBackward = false;
#endif

namespace {

constexpr int64_t kBatch = 4, kSeq = 4096, kDim = ONEPASS_SWEPT, kHeads = 2048 / kDim;
constexpr int64_t kRows = kBatch * kHeads * kSeq, kElements = kRows * kDim;
constexpr int64_t kKept = 64 * kDim;  // elements of a result that are written

// Values between -1 and 1 that look like noise.
__global__ void __launch_bounds__(256) fill_kernel(BFloat16* values, uint32_t seed) {
  const int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  uint32_t bits = static_cast<uint32_t>(i) * 2654435761u ^ seed * 2246822519u;
  bits = (bits ^ bits >> 15) * 2654435769u;
  bits ^= bits >> 13;
  const float value = static_cast<float>(static_cast<int32_t>(bits)) / 2147483648.0f;
  values[i] = {static_cast<uint16_t>(__float_as_uint(value) >> 16)};
}

void* allocate(size_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes), "memory");
  return memory;
}

Strided tensor(uint32_t seed) {
  auto* const values = static_cast<BFloat16*>(allocate(kElements * sizeof(BFloat16)));
  launch<fill_kernel>({.blocks = kElements / 256, .threads = 256}, nullptr, values, uint32_t{seed});
  return {values, kHeads * kSeq * kDim, kSeq * kDim, kDim};
}

// Seconds of the fastest call.
template <class Args>
double fastest_of(const Operator<Args>& of, const Args& args) {
  const Plan plan = of.plan(args, Machine{});
  void* const workspace = allocate(plan.workspace_bytes + 64);
  const double seconds = fastest([&] { of.run(args, plan, workspace, Context{}); });
  check(cudaFree(workspace), "memory");
  return seconds;
}

void sweep(const char* name, const char* path) {
  AttentionBackward args{};
  args.query = tensor(1), args.key = tensor(2), args.value = tensor(3);
  args.doutput = tensor(4), args.output = tensor(5);
  args.dquery = tensor(6), args.dkey = tensor(7), args.dvalue = tensor(8);
  args.batch = kBatch, args.heads = args.kv_heads = kHeads;
  args.seq_q = args.seq_k = args.whole_q = args.whole_k = kSeq;
  args.total_q = kBatch * kSeq;
  args.head_dim = args.value_dim = kDim;
  args.window_left = kNoLimit;
  args.scale = 0.125;
  args.dtype = args.bias_dtype = args.sinks_dtype = DType::kBFloat16;
  AttentionForward forward{};
  forward.lse = allocate(kRows * sizeof(float));
  forward.lse_rest = allocate(kRows * sizeof(float));
  args.lse = forward.lse, args.lse_rest = forward.lse_rest;
  forward.output = args.output;

  std::FILE* const file = std::fopen(path, "wb");
  if (file == nullptr) throw std::runtime_error("the file of results cannot be written");
  for (const bool causal : {false, true}) {
    args.window_right = causal ? 0 : kNoLimit;
    static_cast<Attention&>(forward) = args;
    double seconds = fastest_of(tiled_attention_forward(), forward);
    std::vector<Strided> results = {forward.output};
    if (kBackward) {
      seconds = fastest_of(tiled_attention_backward(), args);
      results = {args.dquery, args.dkey, args.dvalue};
    }
    const double products = kBackward ? 5.0 : 2.0, seen = causal ? 0.5 : 1.0;
    const double flops = products * 2.0 * kRows * kSeq * kDim * seen;
    std::printf("figure sweep, %s %d%s, %s: %.1f us, %.1f TFLOP/s\n",
                kBackward ? "backward" : "forward", static_cast<int>(kDim), causal ? " causal" : "",
                name, seconds * 1e6, flops / seconds / 1e12);
    std::fflush(stdout);
    for (const Strided& result : results) {
      std::vector<BFloat16> kept(kKept);
      check(cudaMemcpy(kept.data(), result.data, kKept * sizeof(BFloat16), cudaMemcpyDefault),
            "reading a result");
      std::fwrite(kept.data(), sizeof(BFloat16), kKept, file);
    }
  }
  std::fclose(file);
}

}  // namespace
}  // namespace onepass::cuda

int main(int argc, char** argv) {
  int devices = 0;
  if (const auto error = cudaGetDeviceCount(&devices); error != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "gpu_sweep: no device: %s\n", cudaGetErrorString(error));
    return 2;
  }
  if (argc != 3) return 1;
  try {
    onepass::cuda::sweep(argv[1], argv[2]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_sweep: %s\n", error.what());
    return 1;
  }
  return 0;
}
