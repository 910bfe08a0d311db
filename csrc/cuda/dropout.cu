// Dropout on CUDA, alone or with a residual add: output = input * (0 or scale) + residual.
//
// One pass: each input is read once and the output is written once. In each iteration a thread
// takes a pack of eight elements; one Philox block decides which of them are kept. The backward is
// the same kernel on the gradient. Done when it runs at the speed of a copy of as many bytes.
#include <algorithm>

#include "cuda/backend.h"
#include "cuda/launch.cuh"
#include "cuda/row_sums.cuh"
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
  // The tensor as one row, indexed as by a single thread.
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
    // The last pack may be incomplete; its elements are taken one by one.
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

// The decisions of a plan.
struct DropoutLayout {
  bool aligned;
};

Plan plan_forward(const DropoutForward& args, const Machine&, DropoutLayout& layout) {
  layout.aligned = is_aligned(args);
  const int64_t packs = (args.numel + kPack - 1) / kPack;
  const int64_t blocks = (packs + kPacksPerBlock - 1) / kPacksPerBlock;
  return {.workspace_bytes = 0,
          .kernel_name = "dropout_forward_kernel",
          .rows_per_tile = 1,
          .splits = std::clamp<int64_t>(blocks, 1, kMaxBlocks),
          .reason = layout.aligned ? "16-byte accesses" : "unaligned: single elements"};
}

void run_forward(const DropoutForward& args, const Plan& plan, const DropoutLayout& layout, void*,
                 const Context& context) {
  const LaunchShape shape{.blocks = plan.splits, .threads = kThreads};
  const bool same = args.input_dtype == args.output_dtype &&
                    (!args.residual || args.input_dtype == args.residual_dtype);
  const auto start = [&]<class Types>() {
    visit_bool(layout.aligned, [&]<bool kAligned>() {
      launch<dropout_forward_kernel<Types, kAligned>>(shape, context.stream, args);
    });
  };
  if (!same) return start.template operator()<Mixed>();
  visit_dtype(args.input_dtype, [&]<class T>() { start.template operator()<Same<T>>(); });
}

// ---- scaled branches ----------------------------------------------------------------------------
//
// A block has a tile of columns, one pack for each thread, and a part of the rows. The column scale
// is read once, and the sum for dcolumn_scale stays in registers. A row whose factor is 0 is not
// read.

constexpr int kBranchThreads = 256;
constexpr int64_t kForwardRows = 4;  // of a block
constexpr int64_t kManyBlocks = 4096;
// Rows of a part in the backward. Parts depend on the shape alone, and are as few as keep a device
// busy.
constexpr int64_t kRowsPerPart = 32;
constexpr int64_t kFewParts = 128;
constexpr int64_t kMaxParts = 512;

struct BranchGeometry {
  int threads;
  int64_t tiles;  // of columns
  int64_t parts;  // of rows
  bool aligned;
};

BranchGeometry branch_geometry(int64_t cols) {
  const int64_t packs = (cols + kPack - 1) / kPack;
  const int64_t threads =
      std::clamp<int64_t>((packs + kLanes - 1) / kLanes * kLanes, kLanes, kBranchThreads);
  return {static_cast<int>(threads), (packs + threads - 1) / threads, 1, cols % kPack == 0};
}

// The sample whose factor applies to a row; 0 where no factor is read.
template <class Args>
__device__ __forceinline__ int64_t sample_of(const Args& args, int64_t row) {
  return args.row_scale ? row / args.sample_rows : 0;
}

// Whether rows begin at multiples of 16 bytes.
bool has_aligned_rows(const void* base, DType dtype, const RowStride* stride = nullptr) {
  if (!base) return true;
  bool aligned = reinterpret_cast<uintptr_t>(base) % 16 == 0;
  if (stride) {
    for (const int64_t s : stride->stride) aligned = aligned && s * size_of(dtype) % 16 == 0;
  }
  return aligned;
}

template <class Types, bool kAligned>
__global__ void __launch_bounds__(kBranchThreads)
    branch_forward_kernel(const BranchForward args, const int64_t tiles, const int64_t parts) {
  using A = typename Types::A;
  const StridedColumns<kAligned> columns{static_cast<int>(blockDim.x),
                                         static_cast<int>(threadIdx.x), args.cols};
  const int64_t tile = blockIdx.x % tiles;
  const int64_t part = blockIdx.x / tiles;
  const Dropout dropout = load_dropout(args.seed, args.dropout_p);
  A scale[kPack];
  load_values(args.column_scale, args.column_scale_dtype, A(1), columns, tile, scale);
  const int64_t last = args.rows * (part + 1) / parts;
  for (int64_t row = args.rows * part / parts; row < last; ++row) {
    const RowIndex index = row_index(args.row_size, row);
    const A factor = row_factor<A>(args.row_scale, sample_of(args, row));
    A value[kPack] = {};
    if (factor != A(0)) {
      const auto input = Types::load(args.input, args.input_dtype,
                                     row_offset(index, args.input_stride), columns, tile);
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) value[e] = Types::value(input, e);
      if (args.seed) drop(dropout, keep_bits(dropout, row * args.cols, columns, tile), value);
    }
    typename Types::Kept residual{};
    if (args.residual) {
      residual = Types::load(args.residual, args.residual_dtype,
                             row_offset(index, args.residual_stride), columns, tile);
    }
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      const A above = args.residual ? Types::value(residual, e) : A(0);
      value[e] = factor == A(0) ? above : multiply_add(value[e] * factor, scale[e], above);
    }
    Types::store(args.output, args.output_dtype, row * args.cols, columns, tile,
                 Types::round(value, args.output_dtype));
  }
}

template <class Types, bool kAligned>
__global__ void __launch_bounds__(kBranchThreads)
    branch_backward_kernel(const BranchBackward args, const int64_t tiles, const int64_t parts,
                           typename Types::A* partials) {
  using A = typename Types::A;
  const StridedColumns<kAligned> columns{static_cast<int>(blockDim.x),
                                         static_cast<int>(threadIdx.x), args.cols};
  const int64_t tile = blockIdx.x % tiles;
  const int64_t part = blockIdx.x / tiles;
  const Dropout dropout = load_dropout(args.seed, args.dropout_p);
  A scale[kPack];
  load_values(args.column_scale, args.column_scale_dtype, A(1), columns, tile, scale);
  A sum[kPack] = {};
  const int64_t last = args.rows * (part + 1) / parts;
  for (int64_t row = args.rows * part / parts; row < last; ++row) {
    const RowIndex index = row_index(args.row_size, row);
    const A factor = row_factor<A>(args.row_scale, sample_of(args, row));
    A d[kPack] = {};
    if (factor != A(0)) {
      const auto doutput = Types::load(args.doutput, args.doutput_dtype,
                                       row_offset(index, args.doutput_stride), columns, tile);
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) d[e] = Types::value(doutput, e) * factor;
      if (args.seed) drop(dropout, keep_bits(dropout, row * args.cols, columns, tile), d);
      if (args.branch) {
        const auto branch = Types::load(args.branch, args.branch_dtype,
                                        row_offset(index, args.branch_stride), columns, tile);
        ONEPASS_UNROLL
        for (int e = 0; e < kPack; ++e)
          sum[e] = multiply_add(d[e], Types::value(branch, e), sum[e]);
      }
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) d[e] *= scale[e];
    }
    if (args.dinput) {
      Types::store(args.dinput, args.dinput_dtype, row * args.cols, columns, tile,
                   Types::round(d, args.dinput_dtype));
    }
  }
  if (!args.dcolumn_scale) return;
  if (parts == 1) {
    store_values(args.dcolumn_scale, args.column_scale_dtype, 0, columns, tile, sum);
  } else {
    store_pack(partials + part * args.cols, columns, tile, narrow<A>(sum));
  }
}

// Adds up the partial sums of the parts. A block has kReduceColumns columns.
template <class A>
__global__ void __launch_bounds__(kReduceThreads, 1)
    branch_backward_reduce_kernel(const BranchBackward args, const A* partials, const int parts) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kReduceColumns + threadIdx.x % kLanes;
  SharedMemory shared;
  A* sums = shared.take<A>(kReduceThreads);
  const bool has_column = column < args.cols;
  const A total = sum_of_parts(partials + column, parts, args.cols, has_column, sums);
  if (threadIdx.x < kLanes && has_column) {
    store_gradient<A>(args.dcolumn_scale, args.column_scale_dtype, column, total);
  }
}

// Calls f.operator()<Types>(): with Same<T> if all dtypes are equal, else with Mixed.
template <class F>
void visit_branch(std::initializer_list<DType> dtypes, F&& f) {
  const DType first = *dtypes.begin();
  if (std::any_of(dtypes.begin(), dtypes.end(), [&](DType dtype) { return dtype != first; })) {
    return f.template operator()<Mixed>();
  }
  visit_dtype(first, [&]<class T>() { f.template operator()<Same<T>>(); });
}

const char* branch_reason(const BranchGeometry& geometry) {
  return geometry.aligned ? "16-byte accesses" : "unaligned: single elements";
}

Plan plan_branch_forward(const BranchForward& args, const Machine&, BranchGeometry& geometry) {
  geometry = branch_geometry(args.cols);
  geometry.aligned = geometry.aligned &&
                     has_aligned_rows(args.input, args.input_dtype, &args.input_stride) &&
                     has_aligned_rows(args.residual, args.residual_dtype, &args.residual_stride) &&
                     has_aligned_rows(args.column_scale, args.column_scale_dtype) &&
                     has_aligned_rows(args.output, args.output_dtype);
  const bool many = args.rows * geometry.tiles >= kManyBlocks;
  geometry.parts = many ? (args.rows + kForwardRows - 1) / kForwardRows : args.rows;
  return {.workspace_bytes = 0,
          .kernel_name = "branch_forward_kernel",
          .rows_per_tile = 1,
          .splits = geometry.tiles * geometry.parts,
          .reason = branch_reason(geometry)};
}

void run_branch_forward(const BranchForward& args, const Plan& plan, const BranchGeometry& geometry,
                        void*, const Context& context) {
  const LaunchShape shape{.blocks = plan.splits,
                          .threads = static_cast<unsigned>(geometry.threads)};
  const DType residual = args.residual ? args.residual_dtype : args.input_dtype;
  visit_branch({args.input_dtype, residual, args.output_dtype}, [&]<class Types>() {
    visit_bool(geometry.aligned, [&]<bool kAligned>() {
      launch<branch_forward_kernel<Types, kAligned>>(shape, context.stream, args, geometry.tiles,
                                                     geometry.parts);
    });
  });
}

Plan plan_branch_backward(const BranchBackward& args, const Machine&, BranchGeometry& geometry) {
  geometry = branch_geometry(args.cols);
  geometry.aligned = geometry.aligned &&
                     has_aligned_rows(args.doutput, args.doutput_dtype, &args.doutput_stride) &&
                     has_aligned_rows(args.branch, args.branch_dtype, &args.branch_stride) &&
                     has_aligned_rows(args.column_scale, args.column_scale_dtype) &&
                     has_aligned_rows(args.dinput, args.dinput_dtype) &&
                     has_aligned_rows(args.dcolumn_scale, args.column_scale_dtype);
  const int64_t busy = std::min(args.rows / 2, kFewParts);
  geometry.parts = std::clamp<int64_t>(std::max(args.rows / kRowsPerPart, busy), 1, kMaxParts);
  const int64_t size = args.doutput_dtype == DType::kFloat64 ? 8 : 4;
  return {.workspace_bytes =
              args.dcolumn_scale && geometry.parts > 1 ? geometry.parts * args.cols * size : 0,
          .kernel_name = "branch_backward_kernel",
          .rows_per_tile = 1,
          .splits = geometry.parts,
          .reason = branch_reason(geometry)};
}

void run_branch_backward(const BranchBackward& args, const Plan&, const BranchGeometry& geometry,
                         void* workspace, const Context& context) {
  const LaunchShape shape{.blocks = geometry.tiles * geometry.parts,
                          .threads = static_cast<unsigned>(geometry.threads)};
  const DType dinput = args.dinput ? args.dinput_dtype : args.doutput_dtype;
  const DType branch = args.branch ? args.branch_dtype : args.doutput_dtype;
  visit_branch({args.doutput_dtype, branch, dinput}, [&]<class Types>() {
    using A = typename Types::A;
    A* const partials = static_cast<A*>(workspace);
    visit_bool(geometry.aligned, [&]<bool kAligned>() {
      launch<branch_backward_kernel<Types, kAligned>>(shape, context.stream, args, geometry.tiles,
                                                      geometry.parts, partials);
    });
    if (!args.dcolumn_scale || geometry.parts == 1) return;
    launch<branch_backward_reduce_kernel<A>>(
        {.blocks = (args.cols + kReduceColumns - 1) / kReduceColumns,
         .threads = kReduceThreads,
         .shared_bytes = kReduceThreads * sizeof(A)},
        context.stream, args, static_cast<const A*>(partials), static_cast<int>(geometry.parts));
  });
}

}  // namespace

Operator<DropoutForward> dropout_forward() {
  return operator_of<DropoutForward, DropoutLayout, plan_forward, run_forward>();
}
Operator<BranchForward> branch_forward() {
  return operator_of<BranchForward, BranchGeometry, plan_branch_forward, run_branch_forward>();
}
Operator<BranchBackward> branch_backward() {
  return operator_of<BranchBackward, BranchGeometry, plan_branch_backward, run_branch_backward>();
}

}  // namespace onepass::cuda
