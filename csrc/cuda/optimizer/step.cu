// One step of an optimizer for all parameters of a model on CUDA, in one launch for every 290 or so
// tensors, of any sizes and dtypes.
//
// A block takes a run of up to kMaxRun pieces of 4,096 elements, and a warp 256 elements at a time:
// it loads parameter, gradient and states 16 bytes at a time (codes: 8), updates them in float32 in
// registers and stores them. So every byte crosses the memory bus once in each direction, in all
// dtypes. AdamW in float32 moves 28 bytes per parameter; with bfloat16 parameters, gradients and
// states and a 16-bit remainder 18. In addition a block reads, for each of its tensors, a row of
// settings and the step count (100 bytes), the norm, the scale and the flag if they are given (16),
// and takes a ticket (8); the last block of a launch counts the step, 8 bytes per tensor. Done when
// it runs at the speed of a copy of as many bytes.
#include "core/visit.h"
#include "cuda/backend.h"
#include "cuda/optimizer/elements.cuh"
#include "cuda/optimizer/tables.cuh"
#include "cuda/optimizer/update.cuh"

namespace onepass::cuda {
namespace {

struct StepHeader {
  const double* hyper;
  const double* norm;
  const float* grad_scale;
  const float* found_inf;
  double max_norm;
  int64_t seed;
  uint32_t* ticket;
  uint32_t run;  // pieces of a block
  bool zero_gradients;
};
using StepTable = Table<StepEntry, StepHeader>;
static_assert(sizeof(StepTable) <= kMaxParameterBytes);

constexpr int64_t kMaxRun = 4;

constexpr int kSecondMoment = 1;  // never negative

// Numbers that all elements of a block share.
struct alignas(16) BlockScalars {
  Scalars<float> narrow;
  Scalars<double> wide;
  uint32_t step;  // this one's number
  uint32_t ticket;
  bool is_made;

  __device__ __forceinline__ BlockScalars(const StepTable& table, const StepEntry& tensor,
                                          Algorithm algorithm) {
    const StepHeader& header = table.header;
    double factor = header.grad_scale ? 1.0 / load_global(header.grad_scale) : 1.0;
    is_made = !header.found_inf || load_global(header.found_inf) == 0.0f;
    if (header.norm) {
      const double norm = load_global(header.norm) * factor;
      is_made = is_made && norm - norm == 0.0;  // finite
      factor *= clip_factor(header.max_norm, norm);
    }
    double row[kHyperColumns];
    ONEPASS_UNROLL
    for (int i = 0; i < kHyperColumns; ++i) {
      row[i] = load_global(header.hyper + tensor.group * kHyperColumns + i);
    }
    step = static_cast<uint32_t>(load_global(tensor.step)) + 1;
    const StepScalars scalars = step_scalars(algorithm, hyper_of(row), step);
    narrow = Scalars<float>::of(algorithm, scalars, factor);
    wide = Scalars<double>::of(algorithm, scalars, factor);
  }
};

__device__ __forceinline__ int bytes_of(MomentType type) {
  return type == MomentType::kInt8 ? 1 : type == MomentType::kFloat32 ? 4 : 2;
}

// The scale for all lanes, in one access.
__device__ __forceinline__ float load_scale(const float* scale) {
  return threadIdx.x % kLanes == 0 ? load_global(scale) : 0.0f;
}

template <bool kSigned>
__device__ __forceinline__ void widen_moment(MomentType type, const Bits& bits, float scale,
                                             float (&value)[kPack]) {
  switch (type) {
    case MomentType::kBFloat16:
    case MomentType::kBFloat16Stochastic:
      return widen_bits(bits, DType::kBFloat16, value);
    case MomentType::kFloat16:
      return widen_bits(bits, DType::kFloat16, value);
    case MomentType::kInt8:
      return decode<kSigned>(bits, __shfl_sync(kAllLanes, scale, 0), value);
    default:
      return widen_bits(bits, DType::kFloat32, value);
  }
}

// noise_of(e): 32 random bits of an element, of which the high half rounds the second moment.
template <int kWhich, class NoiseOf>
__device__ __forceinline__ void store_moment(const StepEntry& t, const Row<kPack>& row,
                                             const float (&value)[kPack], NoiseOf&& noise_of) {
  constexpr bool kIsSecond = kWhich == kSecondMoment;
  void* const base = t.moments[kWhich];
  switch (t.moment_type) {
    case MomentType::kBFloat16Stochastic:
      if constexpr (kIsSecond) {
        return store_bits(base, 2, row, round_bits(value, DType::kBFloat16, [&](int e) {
                            return noise_of(e) >> 16;
                          }));
      }
      [[fallthrough]];
    case MomentType::kBFloat16:
      return store_bits(base, 2, row, narrow_bits(value, DType::kBFloat16));
    case MomentType::kFloat16:
      return store_bits(base, 2, row, narrow_bits(value, DType::kFloat16));
    case MomentType::kInt8: {
      float scale;
      const Bits bits = encode<(kWhich < kSecondMoment)>(value, scale, [&](int e) {
        return kIsSecond ? std::fma(static_cast<float>(noise_of(e) >> 16), kCodeNoise, kCodeSlack)
                         : kNearestCode;
      });
      store_bits(base, 1, row, bits);
      if (row.lane == 0) store_global(t.scales[kWhich] + row.first / kCodeBlock, scale);
      return;
    }
    default:
      return store_bits(base, 4, row, narrow_bits(value, DType::kFloat32));
  }
}

template <class NoiseOf>
__device__ __forceinline__ void store_param(const StepEntry& t, const Row<kPack>& row,
                                            const float (&value)[kPack], NoiseOf&& noise_of) {
  const int bytes = static_cast<int>(size_of(t.param_dtype));
  switch (t.master_kind) {
    case Master::kFloat32:
      store_bits(t.master, 4, row, narrow_bits(value, DType::kFloat32));
      return store_bits(t.param, bytes, row,
                        round_bits(value, t.param_dtype, [](int) { return kTiesAway; }));
    case Master::kRemainder: {
      Bits param, remainder;
      split(value, param, remainder);
      store_bits(t.param, bytes, row, param);
      return store_bits(t.master, bytes, row, remainder);
    }
    case Master::kStochastic:
      return store_bits(t.param, bytes, row, round_bits(value, t.param_dtype, [&](int e) {
                          return noise_of(e) & 0xffffu;
                        }));
    default:
      return store_bits(t.param, bytes, row, narrow_bits(value, t.param_dtype));
  }
}

// Whether the settings use a moment.
template <class A>
__device__ __forceinline__ bool has_moment(const StepEntry& t, const Scalars<A>& scalars, int i) {
  return i < scalars.moments && t.moments[i];
}

// kAverages: whether a parameter of the launch has an average. Without one, fewer registers are
// needed, and more blocks fit.
template <Algorithm kAlgorithm, bool kAverages>
__device__ __forceinline__ void step_row(const StepEntry& t, const Scalars<float>& scalars,
                                         const Noise& noise, bool zero_gradients,
                                         const Row<kPack>& row) {
  constexpr int kCount = kMomentsOf<kAlgorithm>;
  const bool has_master = t.master_kind == Master::kFloat32;
  const int param_bytes = has_master ? 4 : static_cast<int>(size_of(t.param_dtype));
  const int gradient_bytes = static_cast<int>(size_of(t.gradient_dtype));
  const int moment_bytes = bytes_of(t.moment_type);
  // SGD's buffer holds nothing before the first step.
  const bool reads_moments = kAlgorithm != Algorithm::kSgd || !scalars.is_first;

  Bits param, remainder{}, gradient, moment[kCount] = {};
  Bits average{};
  float scale[kCount] = {};
  const int average_bytes = static_cast<int>(size_of(t.average_dtype));
  load_bits(has_master ? t.master : t.param, param_bytes, row, param);
  if (t.master_kind == Master::kRemainder) load_bits(t.master, 2, row, remainder);
  load_bits(t.gradient, gradient_bytes, row, gradient);
  ONEPASS_UNROLL
  for (int i = 0; i < kCount; ++i) {
    if (!reads_moments || !has_moment(t, scalars, i)) continue;
    load_bits(t.moments[i], moment_bytes, row, moment[i]);
    if (t.moment_type == MomentType::kInt8) {
      scale[i] = load_scale(t.scales[i] + row.first / kCodeBlock);
    }
  }

  if (kAverages && t.average) load_bits(t.average, average_bytes, row, average);

  float p[kPack], g[kPack], m[kCount][kPack];
  if (t.master_kind == Master::kRemainder) {
    join(param, remainder, p);
  } else {
    widen_bits(param, has_master ? DType::kFloat32 : t.param_dtype, p);
  }
  widen_bits(gradient, t.gradient_dtype, g);
  widen_moment<true>(t.moment_type, moment[0], scale[0], m[0]);
  if constexpr (kCount > 1) {
    widen_moment<false>(t.moment_type, moment[1], scale[1], m[1]);
  }
  if constexpr (kCount > 2) {
    widen_moment<false>(t.moment_type, moment[2], scale[2], m[2]);
  }
  update<kAlgorithm>(scalars, p, g, m);

  const uint32_t in_stretch = static_cast<uint32_t>(row.first % kNoiseStretch);
  const auto noise_of = [&](int e) {
    return noise_bits(noise, in_stretch + static_cast<uint32_t>(row.of(e)));
  };
  store_param(t, row, p, noise_of);
  if (kAverages && t.average) {
    float mean[kPack];
    widen_bits(average, t.average_dtype, mean);
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) mean[e] = scalars.ema(mean[e], p[e]);
    store_bits(t.average, average_bytes, row,
               average_bytes == 4 ? narrow_bits(mean, DType::kFloat32)
                                  : round_bits(mean, t.average_dtype,
                                               [&](int e) { return noise_of(e) & 0xffffu; }));
  }
  if (has_moment(t, scalars, 0)) store_moment<0>(t, row, m[0], noise_of);
  if constexpr (kCount > 1) {
    if (has_moment(t, scalars, 1)) store_moment<1>(t, row, m[1], noise_of);
  }
  if constexpr (kCount > 2) {
    if (has_moment(t, scalars, 2)) store_moment<2>(t, row, m[2], noise_of);
  }
  if (zero_gradients) store_bits(t.gradient, gradient_bytes, row, Bits{});
}

// A float64 parameter has a float64 gradient and float64 states; nothing is rounded.
template <Algorithm kAlgorithm, bool kAverages>
__device__ __forceinline__ void step_wide_row(const StepEntry& t, const Scalars<double>& scalars,
                                              bool zero_gradients, const Row<kWidePack>& row) {
  constexpr int kCount = kMomentsOf<kAlgorithm>;
  const bool reads_moments = kAlgorithm != Algorithm::kSgd || !scalars.is_first;
  double p[kWidePack], g[kWidePack], m[kCount][kWidePack] = {};
  load_wide(t.param, row, p);
  load_wide(t.gradient, row, g);
  ONEPASS_UNROLL
  for (int i = 0; i < kCount; ++i) {
    if (reads_moments && has_moment(t, scalars, i)) load_wide(t.moments[i], row, m[i]);
  }
  update<kAlgorithm>(scalars, p, g, m);
  store_wide(t.param, row, p);
  if (kAverages && t.average) {
    double mean[kWidePack];
    load_wide(t.average, row, mean);
    ONEPASS_UNROLL
    for (int e = 0; e < kWidePack; ++e) mean[e] = scalars.ema(mean[e], p[e]);
    store_wide(t.average, row, mean);
  }
  ONEPASS_UNROLL
  for (int i = 0; i < kCount; ++i) {
    if (has_moment(t, scalars, i)) store_wide(t.moments[i], row, m[i]);
  }
  if (zero_gradients) store_wide(t.gradient, row, {0.0, 0.0});
}

template <Algorithm kAlgorithm, bool kAverages>
__device__ __forceinline__ void step_piece(const StepTable& table, const StepEntry& t,
                                           const BlockScalars& block, uint32_t piece) {
  const bool zero = table.header.zero_gradients;
  const int64_t first = static_cast<int64_t>(piece - t.first_piece) * kPieceElements;
  if (t.param_dtype == DType::kFloat64) {
    for_each_row<kWidePack>(first, t.numel, t.aligned, kStepWarps, [&](const auto& row) {
      step_wide_row<kAlgorithm, kAverages>(t, block.wide, zero, row);
    });
  } else {
    static_assert(kPieceElements == kNoiseStretch);
    const Noise noise = make_noise(table.header.seed, block.step, static_cast<uint32_t>(t.index),
                                   first / kNoiseStretch);
    for_each_row<kPack>(first, t.numel, t.aligned, kStepWarps, [&](const auto& row) {
      step_row<kAlgorithm, kAverages>(t, block.narrow, noise, zero, row);
    });
  }
}

// Zeroes a piece's gradients in a step that is not made.
__device__ __forceinline__ void zero_piece(const StepEntry& t, uint32_t piece) {
  const int64_t first = static_cast<int64_t>(piece - t.first_piece) * kPieceElements;
  if (t.gradient_dtype == DType::kFloat64) {
    for_each_row<kWidePack>(first, t.numel, t.aligned, kStepWarps,
                            [&](const auto& row) { store_wide(t.gradient, row, {0.0, 0.0}); });
  } else {
    const int bytes = static_cast<int>(size_of(t.gradient_dtype));
    for_each_row<kPack>(first, t.numel, t.aligned, kStepWarps,
                        [&](const auto& row) { store_bits(t.gradient, bytes, row, Bits{}); });
  }
}

template <Algorithm kAlgorithm, bool kAverages>
__global__ void __launch_bounds__(kStepThreads, 4)
    optimizer_step_kernel(const StepTable __grid_constant__ table) {
  SharedMemory shared;
  BlockScalars* const block = shared.take<BlockScalars>(1);
  uint32_t piece = blockIdx.x * table.header.run;
  const uint32_t end = min_of(piece + table.header.run, table.pieces);
  int t = tensor_of(table, piece);
  do {
    const StepEntry& tensor = table.tensors[t];
    if (threadIdx.x == 0) *block = BlockScalars(table, tensor, kAlgorithm);
    __syncthreads();
    if (!block->is_made && !table.header.zero_gradients) return;
    const uint32_t last = min_of(end, last_piece(table, t));
    for (; piece < last; ++piece) {
      if (block->is_made) {
        step_piece<kAlgorithm, kAverages>(table, tensor, *block, piece);
      } else {
        zero_piece(tensor, piece);
      }
    }
    t = next_tensor(table, t, piece);
    __syncthreads();
  } while (piece < end);
  if (!block->is_made) return;  // all blocks agree on that
  if (!is_last_block(table.header.ticket, &block->ticket)) return;
  for (uint32_t i = threadIdx.x; i < table.count; i += kStepThreads) {
    float* const step = table.tensors[i].step;
    store_global(step, load_global(step) + 1.0f);
  }
}

StepEntry step_entry(const StepTensor& tensor) {
  StepEntry entry{};
  entry.param = tensor.param;
  entry.gradient = tensor.gradient;
  entry.master = tensor.master;
  entry.average = tensor.average;
  entry.step = tensor.step;
  entry.numel = tensor.numel;
  entry.index = tensor.index;
  entry.group = tensor.group;
  entry.param_dtype = tensor.param_dtype;
  entry.gradient_dtype = tensor.gradient_dtype;
  entry.average_dtype = tensor.average_dtype;
  entry.moment_type = tensor.moment_type;
  entry.master_kind = tensor.master_kind;
  std::copy(tensor.moments, tensor.moments + kMoments, entry.moments);
  std::copy(tensor.scales, tensor.scales + kMoments, entry.scales);
  entry.aligned = true;
  for (const void* base : {tensor.param, tensor.gradient, tensor.moments[0], tensor.moments[1],
                           tensor.moments[2], tensor.master, tensor.average}) {
    entry.aligned = entry.aligned && is_aligned(base);
  }
  return entry;
}

// The decisions of a plan.
struct StepLayout {
  int64_t tables;
};

Plan plan_step(const OptimizerStep& args, const Machine&, StepLayout& layout) {
  const int64_t tables = layout.tables = tables_of<StepTable>(args.list);
  return {.workspace_bytes = tables * static_cast<int64_t>(sizeof(uint32_t)),
          .kernel_name = "optimizer_step_kernel",
          .rows_per_tile = kPieceElements,
          .splits = args.list.pieces(),
          .reason = launches_text(tables)};
}

void run_step(const OptimizerStep& args, const Plan&, const StepLayout& layout, void* workspace,
              const Context& context) {
  if (args.list.count == 0) return;
  uint32_t* const tickets = static_cast<uint32_t*>(workspace);
  zero(tickets, layout.tables * sizeof(uint32_t), context.stream);
  StepTable table;
  table.header = {.hyper = args.hyper,
                  .norm = args.norm,
                  .grad_scale = args.grad_scale,
                  .found_inf = args.found_inf,
                  .max_norm = args.max_norm,
                  .seed = args.seed,
                  .ticket = nullptr,
                  .run = 1,
                  .zero_gradients = args.zero_gradients};
  for (int64_t i = 0; i < layout.tables; ++i) {
    fill(table, args.list, i * StepTable::kCapacity, step_entry);
    const int64_t run = run_of(table.pieces, kMaxRun);
    table.header.ticket = tickets + i;
    table.header.run = static_cast<uint32_t>(run);
    // Tensors without elements have a step to count as well.
    const LaunchShape shape{.blocks = blocks_of(table.pieces, run),
                            .threads = kStepThreads,
                            .shared_bytes = sizeof(BlockScalars)};
    const bool averages = std::any_of(table.tensors, table.tensors + table.count,
                                      [](const StepEntry& entry) { return entry.average; });
    visit_algorithm(args.algorithm, [&]<Algorithm kAlgorithm>() {
      visit_bool(averages, [&]<bool kAverages>() {
        launch<optimizer_step_kernel<kAlgorithm, kAverages>>(shape, context.stream, table);
      });
    });
  }
}

}  // namespace

Operator<OptimizerStep> optimizer_step() {
  return operator_of<OptimizerStep, StepLayout, plan_step, run_step>();
}

}  // namespace onepass::cuda
