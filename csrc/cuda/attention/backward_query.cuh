// dQ: its float32 sums in the workspace, how blocks add to them, and the last kernel, which scales
// and rounds them.
//
// The sums are stored in units of 8 rows by one slab of columns, in the order of C fragments: a
// lane has four values in each half of a unit. Every sequence begins a new unit, so that the rows
// of a unit are those of a fragment; a head has at most rows / 8 + sequences units.
#pragma once

#include "cuda/attention/backward_work.cuh"
#include "cuda/launch.cuh"

namespace onepass::cuda {

inline constexpr int kUnitRows = 8;
inline constexpr int kUnit = kUnitRows * kSlab;
inline constexpr int kHalfUnit = kUnit / 2;

ONEPASS_HOST_DEVICE inline int64_t units_of_rows(int64_t rows) {
  return (rows + kUnitRows - 1) / kUnitRows;
}

// Units per slab in a head, for all sequences.
ONEPASS_HOST_DEVICE inline int64_t units_of_head(const Attention& args) {
  return args.cu_seq_q ? args.total_q / kUnitRows + args.batch
                       : args.batch * units_of_rows(args.seq_q);
}

// The first unit of a sequence. In a packed batch sequence b begins at unit first_q / 8 + b, which
// leaves at least one unit for every 8 of its rows.
__device__ __forceinline__ int64_t first_unit(const Attention& args, const Sequence& sequence,
                                              int64_t batch, int64_t head) {
  const int64_t of_batch =
      args.cu_seq_q ? sequence.first_q / kUnitRows + batch : batch * units_of_rows(args.seq_q);
  return head * units_of_head(args) + of_batch;
}

// Where the four values of a lane lie in half a unit: next to each other if one instruction adds
// four; otherwise with a stride of kLanes, so that neighbouring lanes use neighbouring addresses.
__device__ __forceinline__ int first_in_half() {
  const int lane = thread_index() % kLanes;
  return adds_four() ? lane * 4 : lane;
}
__device__ __forceinline__ int step_in_half() { return adds_four() ? 1 : kLanes; }

// Adds four values of a lane; first: the address of its first one.
__device__ __forceinline__ void add_to_half(float* first, const float (&value)[4]) {
  if (adds_four()) {
    add_global_4(first, value);
  } else {
    ONEPASS_UNROLL
    for (int i = 0; i < 4; ++i) add_global(first + i * step_in_half(), value[i]);
  }
}

// Reads the lane's four sums.
__device__ __forceinline__ void load_half(const float* first, float (&value)[4]) {
  struct alignas(16) Four {
    float of[4];
  };
  if (adds_four()) {
    const Four four = load_global(reinterpret_cast<const Four*>(first));
    ONEPASS_UNROLL
    for (int i = 0; i < 4; ++i) value[i] = four.of[i];
  } else {
    ONEPASS_UNROLL
    for (int i = 0; i < 4; ++i) value[i] = load_global(first + i * step_in_half());
  }
}

// Rows of dQ that a warp computes in an iteration.
inline constexpr int kQueryRows = 32;

// The sums of the first row of an iteration (a tile of queries).
__device__ __forceinline__ float* sums_of_iteration(const Attention& args, const BackwardWork& work,
                                                    const BlockConstants& block,
                                                    const Iteration& iteration) {
  if (!work.dquery) return nullptr;
  const int64_t unit = first_unit(args, block.sequence, block.batch, iteration.head);
  return work.dquery + (unit + iteration.first / kUnitRows) * work.head_slabs * kUnit;
}

// Adds kQueryRows rows of dS K to one slab of columns, beginning at row `top` of the iteration.
// sums: of the iteration; rows: of the sequence, from the iteration's first row on.
__device__ __forceinline__ void add_query_gradient(const float (&sum)[2][4][4], float* sums,
                                                   int slabs, int rows, int top, int slab) {
  float* values = sums + (top / kUnitRows * slabs + slab) * kUnit + first_in_half();
  ONEPASS_UNROLL
  for (int r = 0; r < kQueryRows / kUnitRows; ++r, values += slabs * kUnit) {
    if (top + kUnitRows * r >= rows) continue;
    ONEPASS_UNROLL
    for (int n = 0; n < 4; n += 2) {
      const auto& left = sum[r / 2][n];
      const auto& right = sum[r / 2][n + 1];
      const int i = r % 2 * 2;
      add_to_half(values + n / 2 * kHalfUnit, {left[i], left[i + 1], right[i], right[i + 1]});
    }
  }
}

inline constexpr int kDqueryThreads = 128;

// scalar: dquery[i][d] = scale * sums[i][d]
//
// One warp per unit of rows. One instance for both 16-bit dtypes, which differ in the rounding
// alone: the kernel waits for memory.
static __global__ void __launch_bounds__(kDqueryThreads)
    attention_dquery_kernel(const AttentionBackward args, const float* sums, const float scale) {
  wait_for_kernel_before();
  constexpr int kWarps = kDqueryThreads / kLanes;
  const int64_t blocks = (units_of_rows(args.seq_q) + kWarps - 1) / kWarps;
  const int64_t batch = blockIdx.x / blocks / args.heads;
  const int64_t head = blockIdx.x / blocks % args.heads;
  const int64_t unit = blockIdx.x % blocks * kWarps + warp_index();
  const Sequence sequence = sequence_of(args, batch);
  if (unit * kUnitRows >= sequence.queries) return;
  const int64_t query = unit * kUnitRows + lane_index() / 4;
  const auto rows = rows_of<BFloat16>(args.dquery, batch, head, sequence.first_q, args.head_dim);
  const auto narrow = [&](float left, float right) {
    left *= scale, right *= scale;
    return args.dtype == DType::kBFloat16 ? narrow_pair<BFloat16>(left, right)
                                          : narrow_pair<Float16>(left, right);
  };
  const int slabs = slabs_of(args.head_dim);
  const float* values =
      sums + (first_unit(args, sequence, batch, head) + unit) * slabs * kUnit + first_in_half();
  for (int slab = 0; slab < slabs; ++slab, values += kUnit) {
    std::array<uint32_t, 4> word;  // columns 8 n + 2 t and the next
    ONEPASS_UNROLL
    for (int half = 0; half < 2; ++half) {
      float value[4];
      load_half(values + half * kHalfUnit, value);
      word[2 * half] = narrow(value[0], value[1]);
      word[2 * half + 1] = narrow(value[2], value[3]);
    }
    transpose_in_quad(word);
    const int col = slab * kSlab + lane_index() % 4 * kChunk;
    if (query >= sequence.queries || col >= rows.cols) continue;
    store_chunk(rows, query, col, {{word[0], word[1], word[2], word[3]}});
  }
}

inline void launch_dquery(const AttentionBackward& args, const BackwardWork& work, void* stream) {
  constexpr int kWarps = kDqueryThreads / kLanes;
  const int64_t blocks = (units_of_rows(args.seq_q) + kWarps - 1) / kWarps;
  launch<attention_dquery_kernel, kFollows>(
      {.blocks = args.batch * args.heads * blocks, .threads = kDqueryThreads}, stream, args,
      static_cast<const float*>(work.dquery), work.numbers.scale);
}

}  // namespace onepass::cuda
