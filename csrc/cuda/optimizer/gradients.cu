// Operators on all gradients of a model on CUDA: their norm, and their scaling.
//
// The norm reads every element once. A block takes a run of up to kMaxRun pieces, whose length
// depends on the list alone. A thread sums its part of a piece in float32; the sums of pieces and
// threads are added in float64, and a block writes one partial. The last block adds the partials in
// an order that depends on their number alone: the same bits on every device, without atomics on
// the sums. Bytes beside the elements: 16 per block for its partial, 8 for its ticket. Scaling
// reads and writes every element once, and nothing if the factor is 1. Done when both run at the
// speed of memory.
#include "core/visit.h"
#include "cuda/backend.h"
#include "cuda/optimizer/elements.cuh"
#include "cuda/optimizer/tables.cuh"

namespace onepass::cuda {
namespace {

constexpr double kInfinity = __builtin_inf();

// ---- the norm -----------------------------------------------------------------------------------

constexpr int kNormThreads = 256;
constexpr int kNormWarps = kNormThreads / kLanes;
constexpr int64_t kMaxRun = 16;

struct NormHeader {
  double* partials;  // (all blocks of all launches,)
  double* norm;      // ()
  void* total;       // () or null
  uint32_t* ticket;
  uint32_t first_block;  // of this launch, among those of all launches
  uint32_t run;          // pieces of a block
  DType total_dtype;
  bool is_last;  // launch
  bool wide;
};
using NormTable = Table<FlatEntry, NormHeader>;
static_assert(sizeof(NormTable) <= kMaxParameterBytes);

enum class Order { kOne, kTwo, kInfinity };

template <Order kOrder, class A>
__device__ __forceinline__ A with_element(A sum, A value) {
  if constexpr (kOrder == Order::kTwo) {
    return multiply_add(value, value, sum);
  } else {
    const A magnitude = value < A(0) ? -value : value;
    if constexpr (kOrder == Order::kOne) return sum + magnitude;
    return magnitude <= sum || sum != sum ? sum : magnitude;  // a NaN enters and stays
  }
}

template <Order kOrder>
__device__ __forceinline__ double combined(double one, double other) {
  if constexpr (kOrder == Order::kInfinity) return with_element<kOrder>(one, other);
  return one + other;
}

// The sum of this thread's part of a piece in float32 or 16 bits, computed in float32 or float64.
template <Order kOrder, class A>
__device__ __forceinline__ A sum_of_piece(const FlatEntry& t, int64_t first) {
  A sum = 0;
  for_each_row<kPack>(first, t.numel, t.aligned, kNormWarps, [&](const auto& row) {
    Bits bits;
    load_bits(t.data, static_cast<int>(size_of(t.dtype)), row, bits);
    float value[kPack];
    widen_bits(bits, t.dtype, value);
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) sum = with_element<kOrder>(sum, static_cast<A>(value[e]));
  });
  return sum;
}

template <Order kOrder>
__device__ __forceinline__ double sum_of_wide_piece(const FlatEntry& t, int64_t first) {
  double sum = 0;
  for_each_row<kWidePack>(first, t.numel, t.aligned, kNormWarps, [&](const auto& row) {
    double value[kWidePack];
    load_wide(t.data, row, value);
    ONEPASS_UNROLL
    for (int e = 0; e < kWidePack; ++e) sum = with_element<kOrder>(sum, value[e]);
  });
  return sum;
}

template <Order kOrder>
__device__ __forceinline__ double part_of_piece(const NormTable& table, const FlatEntry& t,
                                                int64_t first) {
  if (t.dtype == DType::kFloat64) return sum_of_wide_piece<kOrder>(t, first);
  if (table.header.wide) return sum_of_piece<kOrder, double>(t, first);
  const float sum = sum_of_piece<kOrder, float>(t, first);
  // If float32 overflows, the sum is computed again in float64; NaN stays NaN.
  if (kOrder != Order::kInfinity && sum - sum != 0.0f)
    return sum_of_piece<kOrder, double>(t, first);
  return sum;
}

// The sum of all threads' values, in order; valid in the first thread. Scratch may be reused after
// the next barrier.
template <Order kOrder>
__device__ __forceinline__ double combine_threads(double value, double* scratch) {
  ONEPASS_UNROLL
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    value = combined<kOrder>(value, __shfl_xor_sync(kAllLanes, value, lanes));
  }
  if (threadIdx.x % kLanes == 0) scratch[threadIdx.x / kLanes] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kNormWarps; ++warp) {
      value = combined<kOrder>(value, scratch[warp]);
    }
  }
  return value;
}

template <Order kOrder>
__global__ void __launch_bounds__(kNormThreads, 4)
    gradient_norm_kernel(const NormTable __grid_constant__ table) {
  SharedMemory shared;
  double* const scratch = shared.take<double>(kNormWarps);
  uint32_t* const shared_ticket = shared.take<uint32_t>(1);
  const NormHeader& header = table.header;
  const uint32_t begin = blockIdx.x * header.run;
  const uint32_t end = min_of(begin + header.run, table.pieces);
  double total = 0;
  int t = tensor_of(table, begin);
  for (uint32_t piece = begin; piece < end; ++piece) {
    t = next_tensor(table, t, piece);
    const FlatEntry& tensor = table.tensors[t];
    const int64_t first = static_cast<int64_t>(piece - tensor.first_piece) * kPieceElements;
    total = combined<kOrder>(total, part_of_piece<kOrder>(table, tensor, first));
  }
  total = combine_threads<kOrder>(total, scratch);
  if (threadIdx.x == 0) store_global(header.partials + header.first_block + blockIdx.x, total);
  if (!header.is_last || !is_last_block(header.ticket, shared_ticket)) return;
  const uint32_t blocks = header.first_block + gridDim.x;
  total = 0;
  for (uint32_t i = threadIdx.x; i < blocks; i += kNormThreads) {
    total = combined<kOrder>(total, load_global(header.partials + i));
  }
  total = combine_threads<kOrder>(total, scratch);
  if (threadIdx.x > 0) return;
  const double norm = kOrder == Order::kTwo ? sqrt(total) : total;
  store_global(header.norm, norm);
  if (header.total) store_number(header.total, header.total_dtype, norm);
}

// Calls body(index of the first tensor, blocks before it, blocks) for each launch; returns the
// number of all blocks.
template <class Body>
int64_t for_each_launch(const FlatTensors& list, int64_t run, Body&& body) {
  int64_t before = 0;
  for (int64_t i = 0; i == 0 || i < list.count; i += NormTable::kCapacity) {
    const int64_t end = std::min<int64_t>(list.count, i + NormTable::kCapacity);
    const int64_t blocks = blocks_of(list.first_piece[end] - list.first_piece[i], run);
    body(i, before, blocks);
    before += blocks;
  }
  return before;
}

// The ticket, in 16 bytes, and the partials.
constexpr int64_t kTicketBytes = 16;

// The decisions of the norm's plan.
struct NormLayout {
  int64_t run;  // pieces of a block
};

Plan plan_norm(const GradientNorm& args, const Machine&, NormLayout& layout) {
  const FlatTensors& list = args.gradients;
  layout.run = run_of(list.pieces(), kMaxRun);
  const int64_t blocks = for_each_launch(list, layout.run, [](int64_t, int64_t, int64_t) {});
  return {.workspace_bytes = kTicketBytes + blocks * static_cast<int64_t>(sizeof(double)),
          .kernel_name = "gradient_norm_kernel",
          .rows_per_tile = kPieceElements,
          .splits = blocks,
          .reason = launches_text(tables_of<NormTable>(list))};
}

void run_norm(const GradientNorm& args, const Plan& plan, const NormLayout& layout, void* workspace,
              const Context& context) {
  const FlatTensors& list = args.gradients;
  zero(workspace, kTicketBytes, context.stream);
  NormTable table;
  for_each_launch(list, layout.run, [&](int64_t first_tensor, int64_t before, int64_t blocks) {
    fill(table, list, first_tensor, flat_entry);
    table.header = {
        .partials = reinterpret_cast<double*>(static_cast<char*>(workspace) + kTicketBytes),
        .norm = args.norm,
        .total = args.total,
        .ticket = static_cast<uint32_t*>(workspace),
        .first_block = static_cast<uint32_t>(before),
        .run = static_cast<uint32_t>(layout.run),
        .total_dtype = args.total_dtype,
        .is_last = before + blocks == plan.splits,
        .wide = args.wide};
    const LaunchShape shape{.blocks = blocks,
                            .threads = kNormThreads,
                            .shared_bytes = kNormWarps * sizeof(double) + 16};
    if (args.order == 2.0) {
      launch<gradient_norm_kernel<Order::kTwo>>(shape, context.stream, table);
    } else if (args.order == kInfinity) {
      launch<gradient_norm_kernel<Order::kInfinity>>(shape, context.stream, table);
    } else {
      launch<gradient_norm_kernel<Order::kOne>>(shape, context.stream, table);
    }
  });
}

// ---- scaling ------------------------------------------------------------------------------------

struct ScaleHeader {
  const double* norm;
  double max_norm;
};
using ScaleTable = Table<FlatEntry, ScaleHeader>;
static_assert(sizeof(ScaleTable) <= kMaxParameterBytes);

__global__ void __launch_bounds__(kStepThreads)
    scale_gradients_kernel(const ScaleTable __grid_constant__ table) {
  const double norm = threadIdx.x % kLanes == 0 ? load_global(table.header.norm) : 0.0;
  const double factor = clip_factor(table.header.max_norm, __shfl_sync(kAllLanes, norm, 0));
  if (factor == 1.0) return;
  const FlatEntry& t = table.tensors[tensor_of(table, blockIdx.x)];
  const int64_t first = static_cast<int64_t>(blockIdx.x - t.first_piece) * kPieceElements;
  if (t.dtype == DType::kFloat64) {
    for_each_row<kWidePack>(first, t.numel, t.aligned, kStepWarps, [&](const auto& row) {
      double value[kWidePack];
      load_wide(t.data, row, value);
      ONEPASS_UNROLL
      for (int e = 0; e < kWidePack; ++e) value[e] *= factor;
      store_wide(t.data, row, value);
    });
    return;
  }
  const int bytes = static_cast<int>(size_of(t.dtype));
  const float narrow_factor = static_cast<float>(factor);
  for_each_row<kPack>(first, t.numel, t.aligned, kStepWarps, [&](const auto& row) {
    Bits bits;
    load_bits(t.data, bytes, row, bits);
    float value[kPack];
    widen_bits(bits, t.dtype, value);
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) value[e] *= narrow_factor;
    store_bits(t.data, bytes, row, narrow_bits(value, t.dtype));
  });
}

Plan plan_scale(const ScaleGradients& args, const Machine&) {
  return {.workspace_bytes = 0,
          .kernel_name = "scale_gradients_kernel",
          .rows_per_tile = kPieceElements,
          .splits = args.gradients.pieces(),
          .reason = launches_text(tables_of<ScaleTable>(args.gradients))};
}

void run_scale(const ScaleGradients& args, const Plan&, void*, const Context& context) {
  const FlatTensors& list = args.gradients;
  ScaleTable table;
  table.header = {.norm = args.norm, .max_norm = args.max_norm};
  for (int64_t i = 0; i < list.count; i += ScaleTable::kCapacity) {
    fill(table, list, i, flat_entry);
    if (table.pieces == 0) continue;
    launch<scale_gradients_kernel>({.blocks = table.pieces, .threads = kStepThreads},
                                   context.stream, table);
  }
}

}  // namespace

Operator<GradientNorm> gradient_norm() {
  return operator_of<GradientNorm, NormLayout, plan_norm, run_norm>();
}
Operator<ScaleGradients> scale_gradients() { return {plan_scale, run_scale}; }

}  // namespace onepass::cuda
