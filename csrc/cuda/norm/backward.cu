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

// What every thread of a block would hold, kept in shared memory because registers are short.
struct BlockConstants {
  int64_t first_row;
  int rows;
  Dropout dropout;
  double per_size[kRowDims];  // 1 / size of the rows' dimensions
  double per_column;          // 1 / cols

  // The block's part of the rows: a function of the shape and of the number of parts.
  __device__ __forceinline__ BlockConstants(const NormBackward& args, int64_t part, int64_t parts)
      : first_row(args.rows * part / parts),
        rows(static_cast<int>(args.rows * (part + 1) / parts - first_row)),
        dropout(load_dropout(args.seed, args.dropout_p)),
        per_size{1.0 / args.row_size[0], 1.0 / args.row_size[1], 1.0 / args.row_size[2]},
        per_column(1.0 / args.cols) {}
};

// n / d without the division, which is a function that needs many registers; for 0 <= n < 2^52,
// where n * per_d is off by less than one.
__device__ __forceinline__ int64_t quotient(int64_t n, int64_t d, double per_d) {
  const int64_t about = static_cast<int64_t>(static_cast<double>(n) * per_d);
  const int64_t rest = n - about * d;
  return rest < 0 ? about - 1 : rest >= d ? about + 1 : about;
}

// row_index without divisions.
__device__ __forceinline__ RowIndex row_index_by_inverse(const int64_t (&size)[kRowDims],
                                                         const double* per_size, int64_t row) {
  if (size[0] == 1 && size[1] == 1) return {{0, 0, row}};
  const int64_t outer = quotient(row, size[2], per_size[2]);
  const int64_t outermost = quotient(outer, size[1], per_size[1]);
  return {{outermost, outer - outermost * size[1], row - outer * size[2]}};
}

// Element offsets of a row in its tensors.
struct RowOffsets {
  int64_t doutput;
  int64_t x;
  int64_t dresidual_out;
  int64_t dense;  // in what is contiguous

  __device__ __forceinline__ RowOffsets(const NormBackward& args, int64_t row,
                                        const RowIndex& index)
      : doutput(row_offset(index, args.doutput_stride)),
        x(row_offset(index, args.x_stride)),
        dresidual_out(row_offset(index, args.dresidual_out_stride)),
        dense(row * args.cols) {}
};

// dx of one pack, and what it adds to dweight and dbias.
template <class Types, class Columns>
__device__ __forceinline__ void apply_pack(
    const NormBackward& args, const Dropout& dropout, uint32_t kept, const RowOffsets& row,
    const Columns& columns, auto pack, const typename Types::Kept& doutput,
    const typename Types::Kept& x, const typename Types::A* weight, typename Types::A mean,
    typename Types::A rstd, const RowMeans<typename Types::A>& means,
    typename Types::A (&dweight)[kPack], typename Types::A (&dbias)[kPack]) {
  using A = typename Types::A;
  A dx[kPack];
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    const A d = Types::value(doutput, e);
    const A h = (Types::value(x, e) - mean) * rstd;
    // Not fused: the difference is exactly zero in a row of one column.
    const A g = d * weight[e] - means.g;
    dx[e] = multiply_add(-h, means.gh, g) * rstd;
    dweight[e] = multiply_add(d, h, dweight[e]);
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
    if (args.seed) drop(dropout, kept, dx);
    Types::store(args.dinput, args.dinput_dtype, row.dense, columns, pack,
                 Types::round(dx, args.dinput_dtype));
  }
}

// A value of the row, read by one lane of each warp or by one thread alone; a missing one is 0.
template <class A>
__device__ __forceinline__ A read_once(const A* address, bool reads) {
  return address && reads ? load_global(address) : A(0);
}

template <class A>
__device__ __forceinline__ A read_once(const A* address) {
  return read_once(address, threadIdx.x % kLanes == 0);
}

template <class A>
__device__ __forceinline__ A broadcast(A value) {
  return __shfl_sync(kAllLanes, value, 0);
}

template <class A>
__device__ __forceinline__ const A* at_row(const void* base, int64_t row) {
  return base ? static_cast<const A*>(base) + row : nullptr;
}

// One pack of a part's sums, (2, cols).
template <class A, class Columns>
__device__ __forceinline__ void store_partials(const NormBackward& args, A* target,
                                               const Columns& columns, auto pack,
                                               const A (&dweight)[kPack], const A (&dbias)[kPack]) {
  if (args.dweight) store_pack(target, columns, pack, narrow<A>(dweight));
  if (args.dbias) store_pack(target + args.cols, columns, pack, narrow<A>(dbias));
}

// Whether doutput waits in shared memory for the sums of its row.
template <int kPacks>
inline constexpr bool kIsParked = kPacks == 4;

// Rows in registers. A block has a run of rows, in parts that follow from the shape, and leaves
// its sums in partials (parts, 2, cols). It has kThreads threads at most.
template <class Types, int kPacks, bool kAligned, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    norm_backward_kernel(const NormBackward args, const int threads_per_row,
                         typename Types::A* partials) {
  using A = typename Types::A;
  const int thread = static_cast<int>(threadIdx.x);
  const int rows_per_block = threads_per_row > kLanes ? 1 : static_cast<int>(blockDim.x) / kLanes;
  const int group = threads_per_row > kLanes ? 0 : thread / kLanes;
  const int row_elements = threads_per_row * kPacks * kPack;
  SharedMemory shared;
  A* scratch = shared.take<A>(2 * kReduceScratch<2>);  // of even and of odd rows
  A* weights = shared.take<A>(rows_per_block > 1 ? 2 * row_elements : row_elements);
  // Between its two uses, where the sums of many columns leave no registers for it.
  typename Types::Kept* parked =
      kIsParked<kPacks> ? shared.take<typename Types::Kept>(kPacks * blockDim.x) : nullptr;
  BlockConstants* constants = shared.take<BlockConstants>(1);
  // Of a row that the whole block has: mean and rstd of even and of odd ones, read one row ahead by
  // one thread. The barrier that sums the row's means stands between that and their use.
  A* statistics = shared.take<A>(4);
  const auto read_ahead = [&](int r) {
    if (threads_per_row == kLanes || thread != 0 || r >= constants->rows) return;
    const int64_t row = constants->first_row + r;
    statistics[2 * (r & 1)] = read_once(at_row<A>(args.mean, row), true);
    statistics[2 * (r & 1) + 1] = read_once(at_row<A>(args.rstd, row), true);
  };
  if (thread == 0) *constants = BlockConstants(args, blockIdx.x, gridDim.x);
  read_ahead(0);
  stage_values<kPacks>(args.weight, args.weight_dtype, A(1), static_cast<A>(args.weight_offset),
                       WarpColumns<kAligned, kPacks>(threads_per_row, args.cols), group,
                       rows_per_block, weights);
  __syncthreads();

  A dweight[kPacks][kPack] = {}, dbias[kPacks][kPack] = {};
  for (int r = group; r < constants->rows; r += rows_per_block) {
    const WarpColumns<kAligned, kPacks> columns(threads_per_row, args.cols);
    const int64_t row = constants->first_row + r;
    const RowOffsets offsets(args, row,
                             row_index_by_inverse(args.row_size, constants->per_size, row));
    // First, while few registers are taken: the generator needs many.
    uint32_t kept = 0;
    if (args.seed) {
      static_assert(kPacks * kPack <= 32);
      ONEPASS_ROLL
      for (int p = 0; p < kPacks; ++p) {
        kept |= keep_bits(constants->dropout, offsets.dense, columns, p) << p * kPack;
      }
    }
    typename Types::Kept doutput[kPacks], x[kPacks];
    const auto load_packs = [&](int p) {
      doutput[p] = Types::load(args.doutput, args.doutput_dtype, offsets.doutput, columns, p);
      x[p] = Types::load(args.x, args.x_dtype, offsets.x, columns, p);
    };
    // All loads of the row before anything waits for one of them, if there are registers for that.
    if constexpr (!kIsParked<kPacks>) {
      ONEPASS_UNROLL
      for (int p = 0; p < kPacks; ++p) load_packs(p);
    }
    A mean, rstd;
    if (threads_per_row > kLanes) {
      mean = statistics[2 * (r & 1)], rstd = statistics[2 * (r & 1) + 1];
      read_ahead(r + 1);
    } else {
      mean = read_once(at_row<A>(args.mean, row)), rstd = read_once(at_row<A>(args.rstd, row));
      mean = broadcast(mean), rstd = broadcast(rstd);
    }
    A means[2] = {};  // of g * (x - mean), of g
    ONEPASS_UNROLL
    for (int p = 0; p < kPacks; ++p) {
      if constexpr (kIsParked<kPacks>) load_packs(p);
      A weight[kPack];
      staged_pack(weights, columns, p, weight);
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) {
        const A g = Types::value(doutput[p], e) * weight[e];
        means[0] = multiply_add(g, Types::value(x[p], e) - mean, means[0]);
        means[1] += g;
      }
      if constexpr (kIsParked<kPacks>) parked[p * blockDim.x + thread] = doutput[p];
    }
    reduce_row(means, threads_per_row, scratch + (r & 1) * kReduceScratch<2>);
    const A per_column = static_cast<A>(constants->per_column);
    const RowMeans<A> of_row{args.kind == NormKind::kRms ? A(0) : means[1] * per_column,
                             means[0] * rstd * per_column};
    ONEPASS_UNROLL
    for (int p = 0; p < kPacks; ++p) {
      if constexpr (kIsParked<kPacks>) {
        doutput[p] = parked[p * blockDim.x + thread];
      } else {
        Types::forget(doutput[p]);
      }
      Types::forget(x[p]);
      A weight[kPack];
      staged_pack(weights, columns, p, weight);
      apply_pack<Types>(args, constants->dropout, kept >> p * kPack & 0xffu, offsets, columns, p,
                        doutput[p], x[p], weight, mean, rstd, of_row, dweight[p], dbias[p]);
    }
  }

  // The sums of a block's warps, if it has one per row, are added up in order.
  const WarpColumns<kAligned, kPacks> columns(threads_per_row, args.cols);
  constexpr int kWarpRow = kLanes * kPacks * kPack;
  A* sums = weights;  // of dweight and, kWarpRow further, of dbias
  if (rows_per_block > 1) {
    for (int warp = 0; warp < rows_per_block; ++warp) {
      __syncthreads();
      if (group != warp) continue;
      ONEPASS_UNROLL
      for (int p = 0; p < kPacks; ++p) {
        add_staged(dweight[p], columns, p, warp > 0, sums);
        add_staged(dbias[p], columns, p, warp > 0, sums + kWarpRow);
      }
    }
    __syncthreads();
  }
  A* const target = partials + static_cast<int64_t>(blockIdx.x) * 2 * args.cols;
  ONEPASS_UNROLL
  for (int p = 0; p < kPacks; ++p) {
    if (!has_turn(p, group, rows_per_block)) continue;
    if (rows_per_block > 1) {
      staged_pack(sums, columns, p, dweight[p]);
      staged_pack(sums + kWarpRow, columns, p, dbias[p]);
    }
    store_partials(args, target, columns, p, dweight[p], dbias[p]);
  }
}

// Long rows, first: the means of each row.
template <class Types, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads, 1)
    norm_backward_means_kernel(const NormBackward args, RowMeans<typename Types::A>* means) {
  using A = typename Types::A;
  SharedMemory shared;
  A* scratch = shared.take<A>(kReduceScratch<2>);
  const int64_t row = blockIdx.x;
  const StridedColumns<kAligned> columns{static_cast<int>(blockDim.x),
                                         static_cast<int>(threadIdx.x), args.cols};
  const RowOffsets offsets(args, row, row_index(args.row_size, row));
  A mean = read_once(at_row<A>(args.mean, row)), rstd = read_once(at_row<A>(args.rstd, row));
  mean = broadcast(mean), rstd = broadcast(rstd);
  A sums[2] = {};
  for (int64_t p = 0; columns.reaches(p); ++p) {
    const auto doutput = Types::load(args.doutput, args.doutput_dtype, offsets.doutput, columns, p);
    const auto x = Types::load(args.x, args.x_dtype, offsets.x, columns, p);
    A weight[kPack];
    load_values(args.weight, args.weight_dtype, A(1), columns, p, weight);
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      const A g = Types::value(doutput, e) * (weight[e] + static_cast<A>(args.weight_offset));
      if (columns.has(p, e)) sums[0] = multiply_add(g, Types::value(x, e) - mean, sums[0]);
      sums[1] += g;
    }
  }
  reduce_row(sums, columns.threads, scratch);
  if (columns.thread == 0) {
    const A n = static_cast<A>(args.cols);
    store_global(means + row,
                 {args.kind == NormKind::kRms ? A(0) : sums[1] / n, sums[0] * rstd / n});
  }
}

// Long rows, second: a block has a pack per thread (blockIdx.x / parts) of a run of rows
// (blockIdx.x % parts).
template <class A>
inline constexpr int kColumnsThreads = sizeof(A) == 8 ? kMaxThreads / 2 : kMaxThreads;

template <class Types, bool kAligned>
__global__ void __launch_bounds__(kColumnsThreads<typename Types::A>, 1)
    norm_backward_columns_kernel(const NormBackward args, const RowMeans<typename Types::A>* means,
                                 const int parts, typename Types::A* partials) {
  using A = typename Types::A;
  const StridedColumns<kAligned> columns{static_cast<int>(blockDim.x),
                                         static_cast<int>(threadIdx.x), args.cols};
  const int64_t pack = blockIdx.x / parts;
  const int64_t part = blockIdx.x % parts;
  SharedMemory shared;
  BlockConstants* constants = shared.take<BlockConstants>(1);
  if (threadIdx.x == 0) *constants = BlockConstants(args, part, parts);
  __syncthreads();
  A* weights = shared.take<A>(kPack * kColumnsThreads<A>) + threadIdx.x;  // each thread's own
  A value[kPack];
  load_values(args.weight, args.weight_dtype, A(1), columns, pack, value);
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    weights[e * kColumnsThreads<A>] = value[e] + static_cast<A>(args.weight_offset);
  }
  A dweight[kPack] = {}, dbias[kPack] = {};
  for (int r = 0; r < constants->rows; ++r) {
    const int64_t row = constants->first_row + r;
    const RowOffsets offsets(args, row,
                             row_index_by_inverse(args.row_size, constants->per_size, row));
    const auto doutput =
        Types::load(args.doutput, args.doutput_dtype, offsets.doutput, columns, pack);
    const auto x = Types::load(args.x, args.x_dtype, offsets.x, columns, pack);
    RowMeans<A> of_row{read_once(&means[row].g), read_once(&means[row].gh)};
    A mean = read_once(at_row<A>(args.mean, row)), rstd = read_once(at_row<A>(args.rstd, row));
    of_row = {broadcast(of_row.g), broadcast(of_row.gh)};
    mean = broadcast(mean), rstd = broadcast(rstd);
    A weight[kPack];
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) weight[e] = weights[e * kColumnsThreads<A>];
    const uint32_t kept =
        args.seed ? keep_bits(constants->dropout, offsets.dense, columns, pack) : 0;
    apply_pack<Types>(args, constants->dropout, kept, offsets, columns, pack, doutput, x, weight,
                      mean, rstd, of_row, dweight, dbias);
  }
  store_partials(args, partials + part * 2 * args.cols, columns, pack, dweight, dbias);
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

// Adds up the parts: a block has kReduceColumns columns of dweight or of dbias, a warp every
// kMaxWarps-th part of them, in four running sums; the warps' sums are added in order.
constexpr int kReduceColumns = kLanes;

template <class A>
__global__ void __launch_bounds__(kMaxThreads, 1)
    norm_backward_reduce_kernel(const NormBackward args, const A* partials, const int parts) {
  const int which = blockIdx.x % 2;  // dweight, dbias
  const int64_t column =
      static_cast<int64_t>(blockIdx.x / 2) * kReduceColumns + threadIdx.x % kLanes;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  void* const target = which == 0 ? args.dweight : args.dbias;
  if (!target) return;
  SharedMemory shared;
  A* sums = shared.take<A>(kMaxThreads);  // (warps, columns)
  constexpr int kChains = 4;
  A sum[kChains] = {};
  for (int64_t first = warp; first < parts; first += kChains * kMaxWarps) {
    ONEPASS_UNROLL
    for (int i = 0; i < kChains; ++i) {
      const int64_t part = first + i * kMaxWarps;
      if (part < parts && column < args.cols) {
        sum[i] += load_global(partials + (part * 2 + which) * args.cols + column);
      }
    }
  }
  sums[threadIdx.x] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  __syncthreads();
  if (warp > 0 || column >= args.cols) return;
  A total = 0;
  for (int w = 0; w < kMaxWarps; ++w) total += sums[w * kLanes + threadIdx.x];
  store_gradient<A>(target, which == 0 ? args.dweight_dtype : args.dbias_dtype, column, total);
}

// Packs that a thread keeps of x and of doutput, beside the sums of their columns.
template <class Types>
inline constexpr int kBackwardPacks = sizeof(typename Types::A) == 8       ? 1
                                      : sizeof(typename Types::Kept) == 16 ? 4
                                                                           : 2;

// f.operator()<kThreads>() for what geometry_of can give. The fewer threads a block has at most,
// the more of 65,536 registers each can have. With the 168 of 384 threads single elements of four
// packs of bfloat16 have 60 loads of a thread under way, with the 128 of 512 about 20
// (`cuobjdump -sass` for sm_90): those are for rows that need so many. Aligned packs would take up
// to 152 as well, but theirs are a few loads of 16 bytes.
template <int kPacks, bool kAligned, class F>
void visit_threads(const Geometry& geometry, F&& f) {
  constexpr int kFewThreads = 384;
  if constexpr (kPacks == 4 && !kAligned) {
    if (geometry.threads <= kFewThreads) return f.template operator()<kFewThreads>();
  }
  f.template operator()<kMaxThreads>();
}

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
// additions is the same on every device. A part of kRowsPerPart rows leaves partials of a twelfth
// of the bytes that it moves (bfloat16: 16 bytes for each 6 * kRowsPerPart); fewer rows share a
// part only where there would be too few blocks to keep a device busy.
constexpr int64_t kRowsPerPart = 32;
constexpr int64_t kMaxParts = 512;
constexpr int64_t kFewParts = 128;

int64_t parts_of(const NormBackward& args, const Geometry& geometry) {
  const int64_t groups = geometry.packs > 0 ? geometry.rows_per_block() : 1;
  // Blocks of four warps: two of them for one of a whole row.
  const int64_t few = groups > 1 ? 2 * kFewParts : kFewParts;
  const int64_t busy = std::min(args.rows / (2 * groups), few);
  return std::clamp<int64_t>(std::max(args.rows / kRowsPerPart, busy), 1, kMaxParts);
}

int64_t accumulator_size_of(const NormBackward& args) {
  return args.x_dtype == DType::kFloat64 ? 8 : 4;
}

Plan plan_backward(const NormBackward& args, const Machine&, Geometry& geometry) {
  geometry = backward_geometry(args);
  const bool in_registers = geometry.packs > 0;
  const int64_t parts = parts_of(args, geometry);
  const int64_t means = in_registers ? 0 : 2 * args.rows;
  return {.workspace_bytes = (2 * parts * args.cols + means) * accumulator_size_of(args),
          .kernel_name = in_registers ? "norm_backward_kernel" : "norm_backward_columns_kernel",
          .rows_per_tile = in_registers ? geometry.rows_per_block() : 1,
          .splits = parts,
          .reason = !in_registers      ? "rows too long for registers are read twice"
                    : geometry.aligned ? "rows in registers, 16-byte accesses"
                                       : "rows in registers, unaligned: single elements"};
}

void run_backward(const NormBackward& args, const Plan& plan, const Geometry& geometry,
                  void* workspace, const Context& context) {
  const int parts = static_cast<int>(plan.splits);
  visit_backward(args, [&]<class Types>() {
    using A = typename Types::A;
    A* const partials = static_cast<A*>(workspace);
    LaunchShape shape{.blocks = parts, .threads = static_cast<unsigned>(geometry.threads)};
    if (args.rows > 0 && geometry.packs > 0) {
      const int arrays = geometry.rows_per_block() > 1 ? 2 : 1;
      shape.shared_bytes =
          sizeof(BlockConstants) +
          (4 + 2 * kReduceScratch<2> + arrays * geometry.row_elements()) * sizeof(A);
      visit_geometry<kBackwardPacks<Types>>(geometry, [&]<int kPacks, bool kAligned>() {
        if (kIsParked<kPacks>) {
          shape.shared_bytes += kPacks * geometry.threads * sizeof(typename Types::Kept);
        }
        visit_threads<kPacks, kAligned>(geometry, [&]<int kThreads>() {
          launch<norm_backward_kernel<Types, kPacks, kAligned, kThreads>>(
              shape, context.stream, args, geometry.threads_per_row, partials);
        });
      });
    } else if (args.rows > 0) {
      auto* const means = reinterpret_cast<RowMeans<A>*>(partials + 2 * parts * args.cols);
      constexpr int64_t tile = kColumnsThreads<A> * kPack;
      const int64_t tiles = (args.cols + tile - 1) / tile;
      visit_bool(geometry.aligned, [&]<bool kAligned>() {
        shape.blocks = args.rows;
        shape.shared_bytes = kReduceScratch<2> * sizeof(A);
        launch<norm_backward_means_kernel<Types, kAligned>>(shape, context.stream, args, means);
        shape.blocks = tiles * parts;
        shape.threads = kColumnsThreads<A>;
        shape.shared_bytes = sizeof(BlockConstants) + tile * sizeof(A);
        launch<norm_backward_columns_kernel<Types, kAligned>>(
            shape, context.stream, args, static_cast<const RowMeans<A>*>(means), parts, partials);
      });
    }
    if (!args.dweight && !args.dbias) return;
    launch<norm_backward_reduce_kernel<A>>(
        {.blocks = 2 * ((args.cols + kReduceColumns - 1) / kReduceColumns),
         .threads = kMaxThreads,
         .shared_bytes = kMaxThreads * sizeof(A)},
        context.stream, args, static_cast<const A*>(partials), args.rows > 0 ? parts : 0);
  });
}

}  // namespace

Operator<NormBackward> norm_backward() {
  return operator_of<NormBackward, Geometry, plan_backward, run_backward>();
}

}  // namespace onepass::cuda
