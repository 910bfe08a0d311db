// Layer norm and RMS norm on CUDA, forward.
//
// A row is read once and stays in registers between the sums and the scaling, in its own dtype. A
// row of up to 1,024 columns has a warp (four rows per block), one of up to 16,384 a block; in
// float64 a quarter of each. Longer rows are read twice.
// Bytes per element: input + output (+ residual + residual_out); per block and column weight and
// bias; per row the statistics. Done when it runs at the speed of a copy of as many bytes.
//
// In a modulated norm weight and bias are the scale and shift of the row's group, and a gate may
// multiply the branch before the add. A norm with a scaled branch is the case of a single group; a
// branch whose factor is 0 is not read.
#include "cuda/backend.h"
#include "cuda/launch.cuh"
#include "cuda/norm/geometry.cuh"
#include "cuda/row_sums.cuh"

namespace onepass::cuda {
namespace {

// The vectors that some rows share.
struct Vectors {
  const void* weight;
  const void* bias;
  const void* gate;
};

// A plain norm has one weight and bias for all rows.
__device__ __forceinline__ const NormForward& vectors_of(const NormForward& args, int64_t) {
  return args;
}

// A modulated norm has vectors for each group.
__device__ __forceinline__ Vectors vectors_of(const ModulatedNormForward& args, int64_t row) {
  const int64_t group = row / args.tokens;
  return {of_group(args, group, args.weight, args.weight_dtype, args.scale_stride),
          of_group(args, group, args.bias, args.bias_dtype, args.shift_stride),
          of_group(args, group, args.gate, args.gate_dtype, args.gate_stride)};
}

template <class Types, class Columns>
__device__ __forceinline__ typename Types::Kept load_input(const NormForward& args,
                                                           const RowIndex& index,
                                                           const Columns& columns, auto pack) {
  return Types::load(args.input, args.input_dtype, row_offset(index, args.input_stride), columns,
                     pack);
}

template <class Types, class Columns>
__device__ __forceinline__ typename Types::Kept load_residual(const NormForward& args,
                                                              const RowIndex& index,
                                                              const Columns& columns, auto pack) {
  return Types::load(args.residual, args.residual_dtype, row_offset(index, args.residual_stride),
                     columns, pack);
}

// The factor of a row's branch; 1 in a plain norm.
template <class A>
__device__ __forceinline__ A factor_of(const NormForward&, int64_t) {
  return A(1);
}
template <class A>
__device__ __forceinline__ A factor_of(const ModulatedNormForward& args, int64_t row) {
  return args.row_scale ? row_factor<A>(args.row_scale, row / args.sample_rows) : A(1);
}

// x of one pack with a residual: residual + dropout(input), or residual + factor * gate *
// dropout(input), rounded to residual_out, which is written.
template <class Types, class Args, class Columns>
__device__ __forceinline__ typename Types::Kept add_pack(const Args& args, const auto& vectors,
                                                         const Dropout& dropout,
                                                         typename Types::A factor, int64_t row,
                                                         const Columns& columns, auto pack,
                                                         const typename Types::Kept& input,
                                                         const typename Types::Kept& residual) {
  typename Types::A sum[kPack];
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) sum[e] = Types::value(input, e);
  if constexpr (kIsModulated<Args>) {
    // Dropout comes before the gate is loaded: the generator needs many registers.
    if (args.seed) drop(dropout, keep_bits(dropout, row * args.cols, columns, pack), sum);
    typename Types::A gate[kPack] = {};
    if (factor != typename Types::A(0)) {
      load_values(vectors.gate, args.gate_dtype, typename Types::A(1), columns, pack, gate);
    }
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      sum[e] = multiply_add(sum[e] * factor, gate[e], Types::value(residual, e));
    }
  } else {
    if (args.seed) drop(dropout, keep_bits(dropout, row * args.cols, columns, pack), sum);
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) sum[e] += Types::value(residual, e);
  }
  const auto x = Types::round(sum, args.residual_out_dtype);
  Types::store(args.residual_out, args.residual_out_dtype, row * args.cols, columns, pack, x);
  return x;
}

// Weight plus offset, and bias, of one pack.
template <class A, class Columns>
__device__ __forceinline__ void load_scales(const NormForward& args, const auto& vectors,
                                            const Columns& columns, auto pack, A (&weight)[kPack],
                                            A (&bias)[kPack]) {
  load_values(vectors.weight, args.weight_dtype, A(1), columns, pack, weight);
  load_values(vectors.bias, args.bias_dtype, A(0), columns, pack, bias);
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) weight[e] += static_cast<A>(args.weight_offset);
}

// y = (x - mean) * rstd * weight + bias of one pack.
template <class Types, class Columns>
__device__ __forceinline__ void scale_pack(const NormForward& args, int64_t row,
                                           const Columns& columns, auto pack,
                                           const typename Types::Kept& x, typename Types::A mean,
                                           typename Types::A rstd,
                                           const typename Types::A (&weight)[kPack],
                                           const typename Types::A (&bias)[kPack]) {
  typename Types::A y[kPack];
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    y[e] = multiply_add((Types::value(x, e) - mean) * rstd, weight[e], bias[e]);
  }
  Types::store(args.output, args.output_dtype, row * args.cols, columns, pack,
               Types::round(y, args.output_dtype));
}

template <class A>
__device__ __forceinline__ void store_statistics(const NormForward& args, int64_t row, A mean,
                                                 A rstd) {
  if (args.mean) store_global(static_cast<A*>(args.mean) + row, mean);
  if (args.rstd) store_global(static_cast<A*>(args.rstd) + row, rstd);
}

// The row in registers: kPacks packs of each thread.
template <class Args, class Types, int kPacks, bool kAligned>
__global__ void __launch_bounds__(kMostThreads<Args, kAligned>, 1)
    norm_forward_kernel(const Args args, const int threads_per_row) {
  using A = typename Types::A;
  SharedMemory shared;
  A* scratch = shared.take<A>(kReduceScratch<1>);
  A* other_scratch = shared.take<A>(kReduceScratch<2>);
  // A row has one warp or the block: nothing is divided by threads_per_row.
  const bool shares_block = threads_per_row == kLanes;
  const int rows_per_block = shares_block ? static_cast<int>(blockDim.x) / kLanes : 1;
  const int group = shares_block ? static_cast<int>(threadIdx.x) / kLanes : 0;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * rows_per_block + group;
  const WarpColumns<kAligned, kPacks> columns(threads_per_row, args.cols);
  const bool has_row = row < args.rows;
  const RowIndex index = row_index(args.row_size, has_row ? row : 0);
  // Those of the block's first row: all rows of a block share them.
  const auto& vectors = vectors_of(args, static_cast<int64_t>(blockIdx.x) * rows_per_block);

  // All loads of the row are issued before the first result is used.
  typename Types::Kept x[kPacks] = {};
  typename Types::Kept residual[kPacks];
  const A factor = has_row ? factor_of<A>(args, row) : A(0);
  if (has_row) {
    if (factor != A(0)) {
      ONEPASS_UNROLL
      for (int p = 0; p < kPacks; ++p) x[p] = load_input<Types>(args, index, columns, p);
    }
    if (args.residual) {
      ONEPASS_UNROLL
      for (int p = 0; p < kPacks; ++p) residual[p] = load_residual<Types>(args, index, columns, p);
    }
  }
  A *weights = nullptr, *biases = nullptr;
  if (rows_per_block > 1) {
    weights = shared.take<A>(threads_per_row * kPacks * kPack);
    biases = shared.take<A>(threads_per_row * kPacks * kPack);
    stage_values<kPacks>(vectors.weight, args.weight_dtype, A(1),
                         static_cast<A>(args.weight_offset), columns, group, rows_per_block,
                         weights);
    stage_values<kPacks>(vectors.bias, args.bias_dtype, A(0), A(0), columns, group, rows_per_block,
                         biases);
    __syncthreads();
  }
  if (!has_row) return;  // whole warps, which meet at no other barrier
  if (args.residual) {
    const Dropout dropout = load_dropout(args.seed, args.dropout_p);
    ONEPASS_UNROLL
    for (int p = 0; p < kPacks; ++p) {
      x[p] = add_pack<Types>(args, vectors, dropout, factor, row, columns, p, x[p], residual[p]);
    }
  }
  const A n = static_cast<A>(args.cols);
  A sum[1] = {};
  ONEPASS_UNROLL
  for (int p = 0; p < kPacks; ++p) {
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      const A v = Types::value(x[p], e);
      sum[0] = args.kind == NormKind::kRms ? multiply_add(v, v, sum[0]) : sum[0] + v;
    }
  }
  reduce_row(sum, threads_per_row, scratch);
  A mean = 0;
  A variance = sum[0] / n;
  if (args.kind != NormKind::kRms) {
    // Deviations from the rounded mean; their sum corrects its error.
    mean = sum[0] / n;
    A sums[2] = {};  // deviations, squares
    ONEPASS_UNROLL
    for (int p = 0; p < kPacks; ++p) {
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) {
        const A d = columns.has(p, e) ? Types::value(x[p], e) - mean : A(0);
        sums[0] += d;
        sums[1] = multiply_add(d, d, sums[1]);
      }
    }
    reduce_row(sums, threads_per_row, other_scratch);
    const A correction = sums[0] / n;
    mean += correction;
    variance = sums[1] / n - correction * correction;
  }
  const A rstd = inverse_root(variance, args.eps);
  const int first = group * threads_per_row;  // thread of the row
  if (static_cast<int>(threadIdx.x) == first) store_statistics(args, row, mean, rstd);
  ONEPASS_UNROLL
  for (int p = 0; p < kPacks; ++p) {
    if (!columns.reaches(p)) continue;
    A weight[kPack], bias[kPack];
    if (weights) {
      staged_pack(weights, columns, p, weight);
      staged_pack(biases, columns, p, bias);
    } else {
      load_scales(args, vectors, columns, p, weight, bias);
    }
    scale_pack<Types>(args, row, columns, p, x[p], mean, rstd, weight, bias);
  }
}

// Rows too long for registers: a block reads its row twice.
template <class Args, class Types, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads, 1) norm_forward_long_kernel(const Args args) {
  using A = typename Types::A;
  SharedMemory shared;
  Moments<A>* of_threads = shared.take<Moments<A>>(kMaxThreads);
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int64_t row = blockIdx.x;
  const StridedColumns<kAligned> columns{threads, thread, args.cols};
  const RowIndex index = row_index(args.row_size, row);
  const Dropout dropout = load_dropout(args.seed, args.dropout_p);
  const auto& vectors = vectors_of(args, row);
  const A factor = factor_of<A>(args, row);

  Moments<A> moments{};
  for (int64_t p = 0; columns.reaches(p); ++p) {
    typename Types::Kept x{};
    if (factor != A(0)) x = load_input<Types>(args, index, columns, p);
    if (args.residual) {
      x = add_pack<Types>(args, vectors, dropout, factor, row, columns, p, x,
                          load_residual<Types>(args, index, columns, p));
    }
    // Deviations from the first element: in a row of equal elements they are exactly zero.
    const A first = args.kind == NormKind::kRms ? A(0) : Types::value(x, 0);
    Moments<A> pack{};
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      if (!columns.has(p, e)) continue;
      pack.count += A(1);
      pack.mean += Types::value(x, e) - first;
    }
    pack.mean =
        args.kind == NormKind::kRms || pack.count == A(0) ? A(0) : first + pack.mean / pack.count;
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      const A d = columns.has(p, e) ? Types::value(x, e) - pack.mean : A(0);
      pack.squares = multiply_add(d, d, pack.squares);
    }
    moments.add(pack);
  }
  of_threads[thread] = moments;
  for (int half = threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) {
      Moments<A> mine = of_threads[thread];
      mine.add(of_threads[thread + half]);
      of_threads[thread] = mine;
    }
  }
  __syncthreads();
  moments = of_threads[0];
  const A rstd = inverse_root(moments.squares / static_cast<A>(args.cols), args.eps);
  if (thread == 0) store_statistics(args, row, moments.mean, rstd);
  // Each thread reads back only elements that it wrote itself.
  const bool summed = args.residual != nullptr;
  for (int64_t p = 0; columns.reaches(p); ++p) {
    const auto x = summed ? Types::load(args.residual_out, args.residual_out_dtype, row * args.cols,
                                        columns, p)
                          : load_input<Types>(args, index, columns, p);
    A weight[kPack], bias[kPack];
    load_scales(args, vectors, columns, p, weight, bias);
    scale_pack<Types>(args, row, columns, p, x, moments.mean, rstd, weight, bias);
  }
}

// Packs of a row that fit into the registers of a thread, with kMaxThreads threads in a block.
template <class Types>
inline constexpr int kForwardPacks = sizeof(typename Types::A) == 8 ? 1 : 4;

template <class F>
decltype(auto) visit_forward(const NormForward& args, F&& f) {
  if (!args.residual) return visit_types({args.input_dtype, args.output_dtype}, f);
  return visit_types(
      {args.input_dtype, args.output_dtype, args.residual_dtype, args.residual_out_dtype}, f);
}

template <class Args>
Geometry forward_geometry(const Args& args) {
  Alignment alignment(args.cols);
  alignment.rows(args.input, args.input_dtype, &args.input_stride);
  alignment.rows(args.residual, args.residual_dtype, &args.residual_stride);
  if constexpr (kIsModulated<Args>) {
    alignment.rows(args.weight, args.weight_dtype, &args.scale_stride);
    alignment.rows(args.bias, args.bias_dtype, &args.shift_stride);
    alignment.rows(args.gate, args.gate_dtype, &args.gate_stride);
  } else {
    alignment.vector(args.weight);
    alignment.vector(args.bias);
  }
  alignment.vector(args.output);
  alignment.vector(args.residual_out);
  return visit_forward(args, [&]<class Types>() {
    return shared_geometry(args,
                           geometry_of<Args>(args.cols, kForwardPacks<Types>, alignment.value()));
  });
}

template <class Args>
Plan plan_forward(const Args& args, const Machine&, Geometry& geometry) {
  geometry = forward_geometry(args);
  const bool in_registers = geometry.packs > 0;
  const int64_t per_block = in_registers ? geometry.rows_per_block() : 1;
  return {.workspace_bytes = 0,
          .kernel_name = in_registers ? "norm_forward_kernel" : "norm_forward_long_kernel",
          .rows_per_tile = per_block,
          .splits = (args.rows + per_block - 1) / per_block,
          .reason = !in_registers      ? "rows too long for registers are read twice"
                    : geometry.aligned ? "rows in registers, 16-byte accesses"
                                       : "rows in registers, unaligned: single elements"};
}

template <class Args>
void run_forward(const Args& args, const Plan& plan, const Geometry& geometry, void*,
                 const Context& context) {
  if (args.rows == 0) return;
  visit_forward(args, [&]<class Types>() {
    using A = typename Types::A;
    LaunchShape shape{.blocks = plan.splits, .threads = static_cast<unsigned>(geometry.threads)};
    if (geometry.packs == 0) {
      shape.shared_bytes = kMaxThreads * sizeof(Moments<A>);
      visit_bool(geometry.aligned, [&]<bool kAligned>() {
        launch<norm_forward_long_kernel<Args, Types, kAligned>>(shape, context.stream, args);
      });
      return;
    }
    const int staged = geometry.rows_per_block() > 1 ? 2 * geometry.row_elements() : 0;
    shape.shared_bytes = (kReduceScratch<1> + kReduceScratch<2> + staged) * sizeof(A);
    visit_geometry<kForwardPacks<Types>>(geometry, [&]<int kPacks, bool kAligned>() {
      launch<norm_forward_kernel<Args, Types, kPacks, kAligned>>(shape, context.stream, args,
                                                                 geometry.threads_per_row);
    });
  });
}

}  // namespace

Operator<NormForward> norm_forward() {
  return operator_of<NormForward, Geometry, plan_forward<NormForward>, run_forward<NormForward>>();
}
Operator<ModulatedNormForward> modulated_norm_forward() {
  using Args = ModulatedNormForward;
  return operator_of<Args, Geometry, plan_forward<Args>, run_forward<Args>>();
}

}  // namespace onepass::cuda
