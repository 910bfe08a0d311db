// Layer norm and RMS norm on CUDA, forward and backward.
//
// A row is read once and stays in registers between the sums and the scaling, in the dtype it came
// in: up to 1,024 columns a warp has a row (four rows per block), up to 16,384 in 16 bit and 8,192
// in float32 a block has. Longer rows are read a second time. The backward keeps the sums for
// dweight and dbias of its rows in registers and writes them once; which rows a block has follows
// from the shape alone, so gradients are the same bits on every device, and no atomics are needed.
//
// Bytes per element: forward input + output (+ residual + residual_out), backward doutput + x + dx
// (+ dresidual_out); per block and column weight (+ partials); per row the statistics. Done when it
// runs at the speed of a copy of as many bytes.
#include <algorithm>

#include "cuda/backend.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"
#include "ops/norm.h"

namespace onepass::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kWarpsPerBlock = 4;  // of rows that have one warp each

// How the threads of a block share rows.
struct Geometry {
  int packs;            // of a thread; 0: rows are too long for registers
  int threads_per_row;  // a warp, or the block
  int threads;
  bool aligned;

  int rows_per_block() const { return threads / threads_per_row; }
};

Geometry geometry_of(int64_t cols, int max_packs, bool aligned) {
  const int64_t lanes = kLanes * kPack;  // columns that a warp has with one pack per thread
  if (!aligned) {
    // Single elements: every thread has the most packs, and no other kernel exists.
    if (cols <= lanes * max_packs) return {max_packs, kLanes, kLanes * kWarpsPerBlock, false};
    if (cols > lanes * max_packs * kMaxWarps) return {0, kMaxThreads, kMaxThreads, false};
    const int warps = static_cast<int>((cols + lanes * max_packs - 1) / (lanes * max_packs));
    return {max_packs, warps * kLanes, warps * kLanes, false};
  }
  for (int packs = 1; packs <= max_packs; packs *= 2) {
    if (cols <= lanes * packs) return {packs, kLanes, kLanes * kWarpsPerBlock, true};
  }
  const int64_t warps = (cols + lanes * max_packs - 1) / (lanes * max_packs);
  if (warps > kMaxWarps) return {0, kMaxThreads, kMaxThreads, true};
  const int threads = static_cast<int>(warps) * kLanes;
  return {max_packs, threads, threads, true};
}

// 16-byte accesses need rows that begin at multiples of 16 bytes and end at multiples of a pack.
class Alignment {
 public:
  explicit Alignment(int64_t cols) : aligned_(cols % kPack == 0) {}

  void rows(const void* base, DType dtype, const RowStride* stride = nullptr) {
    if (!base) return;
    vector(base);
    if (!stride) return;
    for (const int64_t s : stride->stride) aligned_ = aligned_ && s * size_of(dtype) % 16 == 0;
  }
  void vector(const void* base) {
    aligned_ = aligned_ && reinterpret_cast<uintptr_t>(base) % 16 == 0;
  }
  bool value() const { return aligned_; }

 private:
  bool aligned_;
};

// ---- forward ------------------------------------------------------------------------------------

template <class A>
struct Moments {
  A count;
  A mean;
  A squares;  // sum of (x - mean)^2; for rms of x^2
};

// Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for sample variances, 1979.
template <class A>
__device__ __forceinline__ void merge(Moments<A>& into, const Moments<A>& other) {
  const A count = into.count + other.count;
  if (count == A(0)) return;
  const A delta = other.mean - into.mean;
  const A share = other.count / count;
  into.mean += delta * share;
  into.squares += other.squares + delta * delta * into.count * share;
  into.count = count;
}

// x of one pack: input, or residual + dropout(input) rounded to residual_out, which is written.
template <class Types, bool kAligned>
__device__ __forceinline__ typename Types::Kept take_x(const NormForward& args,
                                                       const Dropout& dropout, int64_t row,
                                                       const Columns<kAligned>& columns,
                                                       int64_t pack) {
  using A = typename Types::A;
  const auto input = Types::load(args.input, args.input_dtype,
                                 row_offset(args.row_size, args.input_stride, row), columns, pack);
  if (!args.residual) return input;
  const auto residual =
      Types::load(args.residual, args.residual_dtype,
                  row_offset(args.row_size, args.residual_stride, row), columns, pack);
  A sum[kPack];
  for (int e = 0; e < kPack; ++e) sum[e] = Types::value(input, e);
  if (args.seed) {
    A factor[kPack];
    keep_factors(dropout, row * args.cols, columns, pack, factor);
    for (int e = 0; e < kPack; ++e) sum[e] *= factor[e];
  }
  for (int e = 0; e < kPack; ++e) sum[e] += Types::value(residual, e);
  const auto x = Types::round(sum, args.residual_out_dtype);
  Types::store(args.residual_out, args.residual_out_dtype, row * args.cols, columns, pack, x);
  return x;
}

// y = (x - mean) * rstd * (weight + offset) + bias of one pack.
template <class Types, bool kAligned>
__device__ __forceinline__ void scale_pack(const NormForward& args, int64_t row,
                                           const Columns<kAligned>& columns, int64_t pack,
                                           const typename Types::Kept& x, typename Types::A mean,
                                           typename Types::A rstd) {
  using A = typename Types::A;
  A weight[kPack], bias[kPack], y[kPack];
  load_values(args.weight, args.weight_dtype, A(1), columns, pack, weight);
  load_values(args.bias, args.bias_dtype, A(0), columns, pack, bias);
  const A offset = static_cast<A>(args.weight_offset);
  for (int e = 0; e < kPack; ++e) {
    y[e] = (Types::value(x, e) - mean) * rstd * (weight[e] + offset) + bias[e];
  }
  Types::store(args.output, args.output_dtype, row * args.cols, columns, pack,
               Types::round(y, args.output_dtype));
}

template <class A>
__device__ __forceinline__ A inverse_root(A variance, double eps) {
  return A(1) / sqrt((variance < A(0) ? A(0) : variance) + static_cast<A>(eps));
}

template <class A>
__device__ __forceinline__ void store_statistics(const NormForward& args, int64_t row, A mean,
                                                 A rstd) {
  if (args.mean) store_global(static_cast<A*>(args.mean) + row, mean);
  if (args.rstd) store_global(static_cast<A*>(args.rstd) + row, rstd);
}

// The row in registers: kPacks packs of each thread.
template <class Types, int kPacks, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads)
    norm_forward_kernel(const NormForward args, const int threads_per_row) {
  using A = typename Types::A;
  SharedMemory shared;
  A* scratch = shared.take<A>(kReduceScratch<1>);
  A* other_scratch = shared.take<A>(kReduceScratch<2>);
  const int thread = static_cast<int>(threadIdx.x);
  const int rows_per_block = static_cast<int>(blockDim.x) / threads_per_row;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * rows_per_block + thread / threads_per_row;
  if (row >= args.rows) return;  // whole warps, of blocks that meet at no barrier
  const Columns<kAligned> columns{threads_per_row, thread % threads_per_row, args.cols};
  const Dropout dropout = args.seed ? make_dropout(args.seed, args.dropout_p) : Dropout{};
  const A n = static_cast<A>(args.cols);

  typename Types::Kept x[kPacks];
  A sum[1] = {};
  for (int p = 0; p < kPacks; ++p) {
    x[p] = take_x<Types>(args, dropout, row, columns, p);
    for (int e = 0; e < kPack; ++e) {
      const A v = Types::value(x[p], e);
      sum[0] += args.rms ? v * v : v;
    }
  }
  reduce_row(sum, threads_per_row, scratch);
  A mean = 0;
  A variance = sum[0] / n;
  if (!args.rms) {
    // Around the mean as it was rounded, whose error the deviations then correct.
    mean = sum[0] / n;
    A sums[2] = {};  // deviations, squares
    for (int p = 0; p < kPacks; ++p) {
      for (int e = 0; e < kPack; ++e) {
        const A d = columns.has(p, e) ? Types::value(x[p], e) - mean : A(0);
        sums[0] += d;
        sums[1] += d * d;
      }
    }
    reduce_row(sums, threads_per_row, other_scratch);
    const A correction = sums[0] / n;
    mean += correction;
    variance = sums[1] / n - correction * correction;
  }
  const A rstd = inverse_root(variance, args.eps);
  if (columns.thread == 0) store_statistics(args, row, mean, rstd);
  for (int p = 0; p < kPacks; ++p) {
    if (columns.reaches(p)) scale_pack<Types>(args, row, columns, p, x[p], mean, rstd);
  }
}

// A row that is too long for that: a block reads it twice.
template <class Types, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads) norm_forward_long_kernel(const NormForward args) {
  using A = typename Types::A;
  SharedMemory shared;
  Moments<A>* of_threads = shared.take<Moments<A>>(kMaxThreads);
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int64_t row = blockIdx.x;
  const Columns<kAligned> columns{threads, thread, args.cols};
  const Dropout dropout = args.seed ? make_dropout(args.seed, args.dropout_p) : Dropout{};

  Moments<A> moments{};
  for (int64_t p = 0; columns.reaches(p); ++p) {
    const auto x = take_x<Types>(args, dropout, row, columns, p);
    Moments<A> pack{};
    for (int e = 0; e < kPack; ++e) {
      if (!columns.has(p, e)) continue;
      pack.count += A(1);
      pack.mean += Types::value(x, e);
    }
    if (pack.count > A(0)) pack.mean = args.rms ? A(0) : pack.mean / pack.count;
    for (int e = 0; e < kPack; ++e) {
      const A d = columns.has(p, e) ? Types::value(x, e) - pack.mean : A(0);
      pack.squares += d * d;
    }
    merge(moments, pack);
  }
  of_threads[thread] = moments;
  for (int half = threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) {
      Moments<A> mine = of_threads[thread];
      merge(mine, of_threads[thread + half]);
      of_threads[thread] = mine;
    }
  }
  __syncthreads();
  moments = of_threads[0];
  const A rstd = inverse_root(moments.squares / static_cast<A>(args.cols), args.eps);
  if (thread == 0) store_statistics(args, row, moments.mean, rstd);
  // Each thread reads back what it wrote itself.
  const bool summed = args.residual != nullptr;
  for (int64_t p = 0; columns.reaches(p); ++p) {
    const auto x =
        summed
            ? Types::load(args.residual_out, args.residual_out_dtype, row * args.cols, columns, p)
            : Types::load(args.input, args.input_dtype,
                          row_offset(args.row_size, args.input_stride, row), columns, p);
    scale_pack<Types>(args, row, columns, p, x, moments.mean, rstd);
  }
}

// ---- backward -----------------------------------------------------------------------------------

// The sums over a row that its gradient needs.
template <class A>
struct RowMeans {
  A g;   // of g = doutput * weight; 0 for rms
  A gh;  // of g * h
};

// dx of one pack, and what it adds to dweight and dbias.
template <class Types, bool kAligned>
__device__ __forceinline__ void apply_pack(
    const NormBackward& args, const Dropout& dropout, int64_t row, const Columns<kAligned>& columns,
    int64_t pack, const typename Types::Kept& doutput, const typename Types::Kept& x,
    const typename Types::A* weight, typename Types::A mean, typename Types::A rstd,
    const RowMeans<typename Types::A>& means, typename Types::A (&dweight)[kPack],
    typename Types::A (&dbias)[kPack]) {
  using A = typename Types::A;
  A dx[kPack];
  for (int e = 0; e < kPack; ++e) {
    const A d = Types::value(doutput, e);
    const A h = (Types::value(x, e) - mean) * rstd;
    dx[e] = (d * weight[e] - means.g - h * means.gh) * rstd;
    dweight[e] += d * h;
    dbias[e] += d;
  }
  if (args.dresidual_out) {
    const auto above =
        Types::load(args.dresidual_out, args.x_dtype,
                    row_offset(args.row_size, args.dresidual_out_stride, row), columns, pack);
    for (int e = 0; e < kPack; ++e) dx[e] += Types::value(above, e);
  }
  const int64_t first = row * args.cols;
  if (args.dresidual) {
    Types::store(args.dresidual, args.dresidual_dtype, first, columns, pack,
                 Types::round(dx, args.dresidual_dtype));
  }
  if (args.dinput) {
    if (args.seed) {
      A factor[kPack];
      keep_factors(dropout, first, columns, pack, factor);
      for (int e = 0; e < kPack; ++e) dx[e] *= factor[e];
    }
    Types::store(args.dinput, args.dinput_dtype, first, columns, pack,
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

template <class Types, bool kAligned>
__device__ __forceinline__ typename Types::Kept take_doutput(const NormBackward& args, int64_t row,
                                                             const Columns<kAligned>& columns,
                                                             int64_t pack) {
  return Types::load(args.doutput, args.doutput_dtype,
                     row_offset(args.row_size, args.doutput_stride, row), columns, pack);
}

template <class Types, bool kAligned>
__device__ __forceinline__ typename Types::Kept take_normalised(const NormBackward& args,
                                                                int64_t row,
                                                                const Columns<kAligned>& columns,
                                                                int64_t pack) {
  return Types::load(args.x, args.x_dtype, row_offset(args.row_size, args.x_stride, row), columns,
                     pack);
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
    for (int p = 0; p < kPacks; ++p) {
      A weight[kPack];
      load_values(args.weight, args.weight_dtype, A(1), columns, p, weight);
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
    const A mean = statistic<A>(args.mean, row);
    const A rstd = statistic<A>(args.rstd, row);
    typename Types::Kept doutput[kPacks], x[kPacks];
    A means[2] = {};  // of g * (x - mean), of g
    for (int p = 0; p < kPacks; ++p) {
      doutput[p] = take_doutput<Types>(args, row, columns, p);
      x[p] = take_normalised<Types>(args, row, columns, p);
      for (int e = 0; e < kPack; ++e) {
        const A g = Types::value(doutput[p], e) *
                    weights[(p * kPack + e) * threads_per_row + columns.thread];
        means[0] += g * (Types::value(x[p], e) - mean);
        means[1] += g;
      }
    }
    reduce_row(means, threads_per_row, scratch[turn]);
    const RowMeans<A> of_row{args.rms ? A(0) : means[1] / n, means[0] * rstd / n};
    for (int p = 0; p < kPacks; ++p) {
      if (!columns.reaches(p)) continue;
      A weight[kPack];
      for (int e = 0; e < kPack; ++e) {
        weight[e] = weights[(p * kPack + e) * threads_per_row + columns.thread];
      }
      apply_pack<Types>(args, dropout, row, columns, p, doutput[p], x[p], weight, mean, rstd,
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
    for (int p = 0; p < kPacks; ++p) {
      for (int e = 0; e < kPack; ++e) store(p, e, dweight[p][e], dbias[p][e]);
    }
    return;
  }
  // The warps' sums are added up in order.
  A* sums = shared.take<A>(2 * row_elements);  // as weights, of dweight and of dbias
  for (int warp = 0; warp < rows_per_block; ++warp) {
    if (group == warp) {
      for (int p = 0; p < kPacks; ++p) {
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
  const A mean = statistic<A>(args.mean, row);
  const A rstd = statistic<A>(args.rstd, row);
  A sums[2] = {};
  for (int64_t p = 0; columns.reaches(p); ++p) {
    const auto doutput = take_doutput<Types>(args, row, columns, p);
    const auto x = take_normalised<Types>(args, row, columns, p);
    A weight[kPack];
    load_values(args.weight, args.weight_dtype, A(1), columns, p, weight);
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
  for (int e = 0; e < kPack; ++e) weight[e] += static_cast<A>(args.weight_offset);
  A dweight[kPack] = {}, dbias[kPack] = {};
  for (int64_t row = args.rows * part / parts; row < args.rows * (part + 1) / parts; ++row) {
    const auto doutput = take_doutput<Types>(args, row, columns, pack);
    const auto x = take_normalised<Types>(args, row, columns, pack);
    const RowMeans<A> of_row{broadcast(&means[row].g), broadcast(&means[row].gh)};
    apply_pack<Types>(args, dropout, row, columns, pack, doutput, x, weight,
                      statistic<A>(args.mean, row), statistic<A>(args.rstd, row), of_row, dweight,
                      dbias);
  }
  A* const target = partials + part * 2 * args.cols;
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
    for (int64_t part = 0; part < parts; ++part) {
      sum[part % 8] += load_global(partials + (part * 2 + which) * args.cols + column);
    }
    for (int width = 4; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) sum[i] += sum[i + width];
    }
    store_gradient<A>(target, which == 0 ? args.dweight_dtype : args.dbias_dtype, column, sum[0]);
  }
}

// ---- plans --------------------------------------------------------------------------------------

// f.operator()<Types>() where all the dtypes given are the same, else with Mixed.
template <class F>
decltype(auto) visit_types(std::initializer_list<DType> dtypes, F&& f) {
  const DType first = *dtypes.begin();
  if (std::any_of(dtypes.begin(), dtypes.end(), [&](DType dtype) { return dtype != first; })) {
    return f.template operator()<Mixed>();
  }
  return visit_dtype(first, [&]<class T>() { return f.template operator()<Same<T>>(); });
}

// Packs that a thread keeps of a row in the forward, and of x and doutput in the backward, without
// running out of registers at 512 threads.
template <class Types>
inline constexpr int kForwardPacks = sizeof(typename Types::A) == 8 ? 2 : 4;
template <class Types>
inline constexpr int kBackwardPacks = sizeof(typename Types::A) == 8       ? 1
                                      : sizeof(typename Types::Kept) == 16 ? 4
                                                                           : 2;

// f.operator()<kPacks, kAligned>() for what geometry_of can give.
template <int kMaxPacks, class F>
void visit_geometry(const Geometry& geometry, F&& f) {
  if (!geometry.aligned) {
    f.template operator()<kMaxPacks, false>();
  } else if (geometry.packs == 1) {
    f.template operator()<1, true>();
  } else if (geometry.packs == 2) {
    if constexpr (kMaxPacks >= 2) f.template operator()<2, true>();
  } else {
    if constexpr (kMaxPacks >= 4) f.template operator()<4, true>();
  }
}

template <class F>
decltype(auto) visit_forward(const NormForward& args, F&& f) {
  if (!args.residual) return visit_types({args.input_dtype, args.output_dtype}, f);
  return visit_types(
      {args.input_dtype, args.output_dtype, args.residual_dtype, args.residual_out_dtype}, f);
}

template <class F>
decltype(auto) visit_backward(const NormBackward& args, F&& f) {
  return visit_types(
      {args.x_dtype, args.doutput_dtype, args.dinput ? args.dinput_dtype : args.x_dtype,
       args.dresidual ? args.dresidual_dtype : args.x_dtype},
      f);
}

Geometry forward_geometry(const NormForward& args) {
  Alignment alignment(args.cols);
  alignment.rows(args.input, args.input_dtype, &args.input_stride);
  alignment.rows(args.residual, args.residual_dtype, &args.residual_stride);
  for (const void* base : {args.weight, args.bias}) alignment.vector(base);
  for (const void* base : {args.output, args.residual_out}) alignment.vector(base);
  return visit_forward(args, [&]<class Types>() {
    return geometry_of(args.cols, kForwardPacks<Types>, alignment.value());
  });
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

Plan plan_forward(const NormForward& args, const Machine&) {
  const Geometry geometry = forward_geometry(args);
  const bool in_registers = geometry.packs > 0;
  const int64_t per_block = in_registers ? geometry.rows_per_block() : 1;
  return {.workspace_bytes = 0,
          .zeroed_bytes = 0,
          .kernel_name = in_registers ? "norm_forward_kernel" : "norm_forward_long_kernel",
          .rows_per_tile = per_block,
          .splits = (args.rows + per_block - 1) / per_block,
          .parallel = true,
          .reason = !in_registers      ? "rows too long for registers are read twice"
                    : geometry.aligned ? "rows in registers, 16-byte accesses"
                                       : "rows in registers, unaligned: single elements"};
}

void run_forward(const NormForward& args, const Plan& plan, void*, const Context& context) {
  if (args.rows == 0) return;
  const Geometry geometry = forward_geometry(args);
  visit_forward(args, [&]<class Types>() {
    using A = typename Types::A;
    LaunchShape shape{.blocks = static_cast<unsigned>(plan.splits),
                      .threads = static_cast<unsigned>(geometry.threads)};
    if (geometry.packs == 0) {
      shape.shared_bytes = kMaxThreads * sizeof(Moments<A>);
      visit_bool(geometry.aligned, [&]<bool kAligned>() {
        launch<norm_forward_long_kernel<Types, kAligned>>(shape, context.stream, args);
      });
      return;
    }
    shape.shared_bytes = (kReduceScratch<1> + kReduceScratch<2>)*sizeof(A);
    visit_geometry<kForwardPacks<Types>>(geometry, [&]<int kPacks, bool kAligned>() {
      launch<norm_forward_kernel<Types, kPacks, kAligned>>(shape, context.stream, args,
                                                           geometry.threads_per_row);
    });
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

NormBackend norm_backend() {
  return {.forward = {plan_forward, run_forward}, .backward = {plan_backward, run_backward}};
}

}  // namespace onepass::cuda
