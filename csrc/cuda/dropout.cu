// Dropout on CUDA, alone or with a residual add: output = input * (0 or scale) + residual.
//
// One pass: each input is read once and the output written once, a pack of eight elements per
// thread and turn, whose fates are one Philox block. The backward is the same kernel on the
// gradient. Done when it runs at the speed of a copy of as many bytes.
#include <algorithm>

#include "cuda/backend.h"
#include "cuda/launch.cuh"
#include "cuda/vec.cuh"
#include "ops/dropout.h"

namespace onepass::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kPacksPerBlock = 4 * kThreads;
constexpr int64_t kMaxBlocks = 1 << 20;

template <class Types, bool kAligned>
__device__ __forceinline__ void drop_pack(const DropoutForward& args, const Dropout& dropout,
                                          int64_t pack) {
  // The tensor as one row that one thread has.
  const StridedColumns<kAligned> columns{1, 0, args.numel};
  const auto input = Types::load(args.input, args.input_dtype, 0, columns, pack);
  typename Types::A value[kPack];
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) value[e] = Types::value(input, e);
  if (args.seed) drop(dropout, keep_bits(dropout, 0, columns, pack), value);
  if (args.residual) {
    const auto residual = Types::load(args.residual, args.residual_dtype, 0, columns, pack);
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) value[e] += Types::value(residual, e);
  }
  Types::store(args.output, args.output_dtype, 0, columns, pack,
               Types::round(value, args.output_dtype));
}

template <class Types, bool kAligned>
__global__ void __launch_bounds__(kThreads) dropout_forward_kernel(const DropoutForward args) {
  const Dropout dropout = load_dropout(args.seed, args.dropout_p);
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t packs = (args.numel + kPack - 1) / kPack;
  for (int64_t pack = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; pack < packs;
       pack += threads) {
    // The last pack may be cut, where elements are taken one by one.
    if (kAligned && (pack + 1) * kPack <= args.numel) {
      drop_pack<Types, true>(args, dropout, pack);
    } else {
      drop_pack<Types, false>(args, dropout, pack);
    }
  }
}

bool is_aligned(const DropoutForward& args) {
  const auto aligned = [](const void* base) { return reinterpret_cast<uintptr_t>(base) % 16 == 0; };
  return aligned(args.input) && aligned(args.residual) && aligned(args.output);
}

Plan plan_forward(const DropoutForward& args, const Machine&) {
  const int64_t packs = (args.numel + kPack - 1) / kPack;
  const int64_t blocks = (packs + kPacksPerBlock - 1) / kPacksPerBlock;
  return {.workspace_bytes = 0,
          .kernel_name = "dropout_forward_kernel",
          .rows_per_tile = 1,
          .splits = std::clamp<int64_t>(blocks, 1, kMaxBlocks),
          .reason = is_aligned(args) ? "16-byte accesses" : "unaligned: single elements"};
}

void run_forward(const DropoutForward& args, const Plan& plan, void*, const Context& context) {
  const LaunchShape shape{.blocks = plan.splits, .threads = kThreads};
  const bool same = args.input_dtype == args.output_dtype &&
                    (!args.residual || args.input_dtype == args.residual_dtype);
  const auto start = [&]<class Types>() {
    visit_bool(is_aligned(args), [&]<bool kAligned>() {
      launch<dropout_forward_kernel<Types, kAligned>>(shape, context.stream, args);
    });
  };
  if (!same) return start.template operator()<Mixed>();
  visit_dtype(args.input_dtype, [&]<class T>() { start.template operator()<Same<T>>(); });
}

}  // namespace

Operator<DropoutForward> dropout_forward() { return {plan_forward, run_forward}; }

}  // namespace onepass::cuda
