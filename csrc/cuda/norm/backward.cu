// Layer norm and RMS norm on CUDA, backward.
//
// x and doutput are read once and stay in registers between the sums and the gradient (16-bit rows
// up to 16,384 columns, float32 up to 8,192); longer rows are read a second time. The sums for
// dweight and dbias stay in registers over a block's rows and are written once; which rows a block
// has follows from the shape alone, so gradients are the same bits on every device, and no atomics
// are needed. Bytes per element: doutput + x + dx (+ dresidual_out); per block and column weight
// and partials, which the last kernel reads once. Done when it runs at the speed of a copy of as
// many bytes.
#include "cuda/backend.h"
#include "cuda/launch.cuh"
#include "cuda/norm/geometry.cuh"

namespace onepass::cuda {
namespace {

// The sums over a row that its gradient needs.
template <class A>
struct RowMeans {
  A g;   // of g = doutput * weight; 0 for rms
  A gh;  // of g * h
};

// Element offsets of a row in its tensors, taken once: their divisions need registers too.
struct RowOffsets {
  int64_t doutput;
  int64_t x;
  int64_t dresidual_out;
  int64_t dense;  // in what is contiguous

  __device__ __forceinline__ RowOffsets(const NormBackward& args, int64_t row)
      : doutput(row_offset(args.row_size, args.doutput_stride, row)),
        x(row_offset(args.row_size, args.x_stride, row)),
        dresidual_out(args.dresidual_out ? row_offset(args.row_size, args.dresidual_out_stride, row)
                                         : 0),
        dense(row * args.cols) {}
};

// dx of one pack, and what it adds to dweight and dbias.
template <class Types, bool kAligned>
__device__ __forceinline__ void apply_pack(
    const NormBackward& args, const Dropout& dropout, const RowOffsets& row,
    const Columns<kAligned>& columns, auto pack, const typename Types::Kept& doutput,
    const typename Types::Kept& x, const typename Types::A* weight, typename Types::A mean,
    typename Types::A rstd, const RowMeans<typename Types::A>& means,
    typename Types::A (&dweight)[kPack], typename Types::A (&dbias)[kPack]) {
  using A = typename Types::A;
  A dx[kPack];
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    const A d = Types::value(doutput, e);
    const A h = (Types::value(x, e) - mean) * rstd;
    dx[e] = (d * weight[e] - means.g - h * means.gh) * rstd;
    dweight[e] += d * h;
    dbias[e] += d;
  }
  if (args.dresidual_out) {
    const auto above =
        Types::load(args.dresidual_out, args.x_dtype, row.dresidual_out, columns, pack);
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) dx[e] += Types::value(above, e);
  }
  if (args.dresidual) {
    Types::store(args.dresidual, args.dresidual_dtype, row.dense, columns, pack,
                 Types::round(dx, args.dresidual_dtype));
  }
  if (args.dinput) {
    if (args.seed) {
      A factor[kPack];
      keep_factors(dropout, row.dense, columns, pack, factor);
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) dx[e] *= factor[e];
    }
    Types::store(args.dinput, args.dinput_dtype, row.dense, columns, pack,
                 Types::round(dx, args.dinput_dtype));
  }
}

// A value of the row, read by one lane of each warp.
template <class A>
__device__ __forceinline__ A broadcast(const A* address) {
  return __shfl_sync(kAllLanes, threadIdx.x % kLanes == 0 ? load_global(address) : A(0), 0);
}

template <class A>
__device__ __forceinline__ A statistic(const void* base, int64_t row) {
  return base ? broadcast(static_cast<const A*>(base) + row) : A(0);
}

// Rows in registers. A block has a run of rows, in parts that follow from the shape, and leaves
// its sums in partials (parts, 2, cols).
template <class Types, int kPacks, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads)
    norm_backward_kernel(const NormBackward args, const int threads_per_row,
                         typename Types::A* partials) {
  using A = typename Types::A;
  const int thread = static_cast<int>(threadIdx.x);
  const int rows_per_block = static_cast<int>(blockDim.x) / threads_per_row;
  const int group = thread / threads_per_row;
  const Columns<kAligned> columns{threads_per_row, thread % threads_per_row, args.cols};
  const int row_elements = threads_per_row * kPacks * kPack;
  SharedMemory shared;
  A* scratch[2] = {shared.take<A>(kReduceScratch<2>), shared.take<A>(kReduceScratch<2>)};
  A* weights = shared.take<A>(row_elements);  // by element of a thread's packs, then thread
  const Dropout dropout = args.seed ? make_dropout(args.seed, args.dropout_p) : Dropout{};
  const A n = static_cast<A>(args.cols);

  // Each row's threads would read the weight again: it is read once per block.
  if (group == 0) {
    ONEPASS_UNROLL
    for (int p = 0; p < kPacks; ++p) {
      A weight[kPack];
      load_values(args.weight, args.weight_dtype, A(1), columns, p, weight);
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) {
        weights[(p * kPack + e) * threads_per_row + columns.thread] =
            weight[e] + static_cast<A>(args.weight_offset);
      }
    }
  }
  __syncthreads();

  A dweight[kPacks][kPack] = {}, dbias[kPacks][kPack] = {};
  const int64_t parts = gridDim.x;
  const int64_t first = args.rows * blockIdx.x / parts;
  const int64_t last = args.rows * (blockIdx.x + 1) / parts;
  int turn = 0;
  for (int64_t row = first + group; row < last; row += rows_per_block, turn ^= 1) {
    const RowOffsets offsets(args, row);
    const A mean = statistic<A>(args.mean, row);
    const A rstd = statistic<A>(args.rstd, row);
    typename Types::Kept doutput[kPacks], x[kPacks];
    A means[2] = {};  // of g * (x - mean), of g
    ONEPASS_UNROLL
    for (int p = 0; p < kPacks; ++p) {
      doutput[p] = Types::load(args.doutput, args.doutput_dtype, offsets.doutput, columns, p);
      x[p] = Types::load(args.x, args.x_dtype, offsets.x, columns, p);
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) {
        const A g = Types::value(doutput[p], e) *
                    weights[(p * kPack + e) * threads_per_row + columns.thread];
        means[0] += g * (Types::value(x[p], e) - mean);
        means[1] += g;
      }
    }
    reduce_row(means, threads_per_row, scratch[turn]);
    const RowMeans<A> of_row{args.rms ? A(0) : means[1] / n, means[0] * rstd / n};
    ONEPASS_UNROLL
    for (int p = 0; p < kPacks; ++p) {
      if (!columns.reaches(p)) continue;
      A weight[kPack];
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) {
        weight[e] = weights[(p * kPack + e) * threads_per_row + columns.thread];
      }
      apply_pack<Types>(args, dropout, offsets, columns, p, doutput[p], x[p], weight, mean, rstd,
                        of_row, dweight[p], dbias[p]);
    }
  }

  A* const target = partials + static_cast<int64_t>(blockIdx.x) * 2 * args.cols;
  const auto store = [&](int p, int e, A of_weight, A of_bias) {
    if (!columns.has(p, e)) return;
    if (args.dweight) store_global(target + columns.of(p, e), of_weight);
    if (args.dbias) store_global(target + args.cols + columns.of(p, e), of_bias);
  };
  if (rows_per_block == 1) {
    ONEPASS_UNROLL
    for (int p = 0; p < kPacks; ++p) {
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) store(p, e, dweight[p][e], dbias[p][e]);
    }
    return;
  }
  // The warps' sums are added up in order.
  A* sums = shared.take<A>(2 * row_elements);  // as weights, of dweight and of dbias
  for (int warp = 0; warp < rows_per_block; ++warp) {
    if (group == warp) {
      ONEPASS_UNROLL
      for (int p = 0; p < kPacks; ++p) {
        ONEPASS_UNROLL
        for (int e = 0; e < kPack; ++e) {
          A* const sum = sums + (p * kPack + e) * threads_per_row + columns.thread;
          const A of_weight = warp == 0 ? dweight[p][e] : sum[0] + dweight[p][e];
          const A of_bias = warp == 0 ? dbias[p][e] : sum[row_elements] + dbias[p][e];
          sum[0] = of_weight;
          sum[row_elements] = of_bias;
          if (warp == rows_per_block - 1) store(p, e, of_weight, of_bias);
        }
      }
    }
    __syncthreads();
  }
}

// Long rows, first: the means of each row.
template <class Types, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads)
    norm_backward_means_kernel(const NormBackward args, RowMeans<typename Types::A>* means) {
  using A = typename Types::A;
  SharedMemory shared;
  A* scratch = shared.take<A>(kReduceScratch<2>);
  const int64_t row = blockIdx.x;
  const Columns<kAligned> columns{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x),
                                  args.cols};
  const RowOffsets offsets(args, row);
  const A mean = statistic<A>(args.mean, row);
  const A rstd = statistic<A>(args.rstd, row);
  A sums[2] = {};
  for (int64_t p = 0; columns.reaches(p); ++p) {
    const auto doutput = Types::load(args.doutput, args.doutput_dtype, offsets.doutput, columns, p);
    const auto x = Types::load(args.x, args.x_dtype, offsets.x, columns, p);
    A weight[kPack];
    load_values(args.weight, args.weight_dtype, A(1), columns, p, weight);
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      const A g = Types::value(doutput, e) * (weight[e] + static_cast<A>(args.weight_offset));
      sums[0] += columns.has(p, e) ? g * (Types::value(x, e) - mean) : A(0);
      sums[1] += g;
    }
  }
  reduce_row(sums, columns.threads, scratch);
  if (columns.thread == 0) {
    const A n = static_cast<A>(args.cols);
    store_global(means + row, {args.rms ? A(0) : sums[1] / n, sums[0] * rstd / n});
  }
}

// Long rows, second: a block has kMaxThreads packs of columns (blockIdx.x / parts) of a run of rows
// (blockIdx.x % parts).
template <class Types, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads)
    norm_backward_columns_kernel(const NormBackward args, const RowMeans<typename Types::A>* means,
                                 const int parts, typename Types::A* partials) {
  using A = typename Types::A;
  const Columns<kAligned> columns{static_cast<int>(blockDim.x), static_cast<int>(threadIdx.x),
                                  args.cols};
  const int64_t pack = blockIdx.x / parts;
  const int64_t part = blockIdx.x % parts;
  const Dropout dropout = args.seed ? make_dropout(args.seed, args.dropout_p) : Dropout{};
  A weight[kPack];
  load_values(args.weight, args.weight_dtype, A(1), columns, pack, weight);
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) weight[e] += static_cast<A>(args.weight_offset);
  A dweight[kPack] = {}, dbias[kPack] = {};
  for (int64_t row = args.rows * part / parts; row < args.rows * (part + 1) / parts; ++row) {
    const RowOffsets offsets(args, row);
    const auto doutput =
        Types::load(args.doutput, args.doutput_dtype, offsets.doutput, columns, pack);
    const auto x = Types::load(args.x, args.x_dtype, offsets.x, columns, pack);
    const RowMeans<A> of_row{broadcast(&means[row].g), broadcast(&means[row].gh)};
    apply_pack<Types>(args, dropout, offsets, columns, pack, doutput, x, weight,
                      statistic<A>(args.mean, row), statistic<A>(args.rstd, row), of_row, dweight,
                      dbias);
  }
  A* const target = partials + part * 2 * args.cols;
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    if (!columns.has(pack, e)) continue;
    if (args.dweight) store_global(target + columns.of(pack, e), dweight[e]);
    if (args.dbias) store_global(target + args.cols + columns.of(pack, e), dbias[e]);
  }
}

template <class A>
__device__ __forceinline__ void store_gradient(void* base, DType dtype, int64_t column, A value) {
  if constexpr (sizeof(A) == 8) {
    store_global(static_cast<double*>(base) + column, value);
  } else {
    visit_dtype_up_to_float32(dtype, [&]<class T>() {
      if constexpr (__is_same(T, float)) {
        store_global(static_cast<float*>(base) + column, value);
      } else {
        const uint32_t pair = narrow_pair<T>(value, value);
        store_global(static_cast<T*>(base) + column, T{static_cast<uint16_t>(pair)});
      }
    });
  }
}

// Adds up the parts, a thread per column: eight running sums, then a fixed tree.
template <class A>
__global__ void __launch_bounds__(kMaxThreads)
    norm_backward_reduce_kernel(const NormBackward args, const A* partials, const int parts) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= args.cols) return;
  for (int which = 0; which < 2; ++which) {
    void* const target = which == 0 ? args.dweight : args.dbias;
    if (!target) continue;
    A sum[8] = {};
    for (int64_t first = 0; first < parts; first += 8) {
      ONEPASS_UNROLL
      for (int i = 0; i < 8; ++i) {
        if (first + i >= parts) continue;
        sum[i] += load_global(partials + ((first + i) * 2 + which) * args.cols + column);
      }
    }
    ONEPASS_UNROLL
    for (int width = 4; width > 0; width /= 2) {
      ONEPASS_UNROLL
      for (int i = 0; i < width; ++i) sum[i] += sum[i + width];
    }
    store_gradient<A>(target, which == 0 ? args.dweight_dtype : args.dbias_dtype, column, sum[0]);
  }
}

// Packs that a thread keeps of x and of doutput, beside the sums of their columns.
template <class Types>
inline constexpr int kBackwardPacks = sizeof(typename Types::A) == 8       ? 1
                                      : sizeof(typename Types::Kept) == 16 ? 4
                                                                           : 2;

template <class F>
decltype(auto) visit_backward(const NormBackward& args, F&& f) {
  return visit_types(
      {args.x_dtype, args.doutput_dtype, args.dinput ? args.dinput_dtype : args.x_dtype,
       args.dresidual ? args.dresidual_dtype : args.x_dtype},
      f);
}

Geometry backward_geometry(const NormBackward& args) {
  Alignment alignment(args.cols);
  alignment.rows(args.doutput, args.doutput_dtype, &args.doutput_stride);
  alignment.rows(args.x, args.x_dtype, &args.x_stride);
  alignment.rows(args.dresidual_out, args.x_dtype, &args.dresidual_out_stride);
  alignment.vector(args.weight);
  for (const void* base : {args.dinput, args.dresidual}) alignment.vector(base);
  return visit_backward(args, [&]<class Types>() {
    return geometry_of(args.cols, kBackwardPacks<Types>, alignment.value());
  });
}

// Parts of the rows whose sums are kept apart: a function of the shape, so that the order of the
// additions is the same on every device.
constexpr int64_t kMaxParts = 128;
constexpr int64_t kMinPartRows = 8;

int64_t parts_of(const NormBackward& args, const Geometry& geometry) {
  const int64_t groups = geometry.packs > 0 ? geometry.rows_per_block() : 1;
  const int64_t blocks_at_once = std::min<int64_t>(kMaxThreads / geometry.threads, 4);
  return std::clamp<int64_t>(args.rows / (kMinPartRows * groups), 1, kMaxParts * blocks_at_once);
}

int64_t accumulator_size_of(const NormBackward& args) {
  return args.x_dtype == DType::kFloat64 ? 8 : 4;
}

Plan plan_backward(const NormBackward& args, const Machine&) {
  const Geometry geometry = backward_geometry(args);
  const bool in_registers = geometry.packs > 0;
  const int64_t parts = parts_of(args, geometry);
  const int64_t means = in_registers ? 0 : 2 * args.rows;
  return {.workspace_bytes = (2 * parts * args.cols + means) * accumulator_size_of(args),
          .zeroed_bytes = 0,
          .kernel_name = in_registers ? "norm_backward_kernel" : "norm_backward_columns_kernel",
          .rows_per_tile = in_registers ? geometry.rows_per_block() : 1,
          .splits = parts,
          .parallel = true,
          .reason = !in_registers      ? "rows too long for registers are read twice"
                    : geometry.aligned ? "rows in registers, 16-byte accesses"
                                       : "rows in registers, unaligned: single elements"};
}

void run_backward(const NormBackward& args, const Plan& plan, void* workspace,
                  const Context& context) {
  const Geometry geometry = backward_geometry(args);
  const int parts = static_cast<int>(plan.splits);
  visit_backward(args, [&]<class Types>() {
    using A = typename Types::A;
    A* const partials = static_cast<A*>(workspace);
    LaunchShape shape{.blocks = static_cast<unsigned>(parts),
                      .threads = static_cast<unsigned>(geometry.threads)};
    if (args.rows > 0 && geometry.packs > 0) {
      const int64_t row_elements =
          static_cast<int64_t>(geometry.threads_per_row) * geometry.packs * kPack;
      const int64_t arrays = geometry.rows_per_block() > 1 ? 3 : 1;
      shape.shared_bytes = (2 * kReduceScratch<2> + arrays * row_elements) * sizeof(A);
      visit_geometry<kBackwardPacks<Types>>(geometry, [&]<int kPacks, bool kAligned>() {
        launch<norm_backward_kernel<Types, kPacks, kAligned>>(shape, context.stream, args,
                                                              geometry.threads_per_row, partials);
      });
    } else if (args.rows > 0) {
      auto* const means = reinterpret_cast<RowMeans<A>*>(partials + 2 * parts * args.cols);
      const int64_t tile = static_cast<int64_t>(geometry.threads) * kPack;
      const int64_t tiles = (args.cols + tile - 1) / tile;
      visit_bool(geometry.aligned, [&]<bool kAligned>() {
        shape.blocks = static_cast<unsigned>(args.rows);
        shape.shared_bytes = kReduceScratch<2> * sizeof(A);
        launch<norm_backward_means_kernel<Types, kAligned>>(shape, context.stream, args, means);
        shape.blocks = static_cast<unsigned>(tiles * parts);
        shape.shared_bytes = 0;
        launch<norm_backward_columns_kernel<Types, kAligned>>(
            shape, context.stream, args, static_cast<const RowMeans<A>*>(means), parts, partials);
      });
    }
    if (!args.dweight && !args.dbias) return;
    constexpr unsigned kColumnThreads = 128;
    launch<norm_backward_reduce_kernel<A>>(
        {.blocks = static_cast<unsigned>((args.cols + kColumnThreads - 1) / kColumnThreads),
         .threads = kColumnThreads},
        context.stream, args, static_cast<const A*>(partials), args.rows > 0 ? parts : 0);
  });
}

}  // namespace

Operator<NormBackward> norm_backward() { return {plan_backward, run_backward}; }

}  // namespace onepass::cuda
