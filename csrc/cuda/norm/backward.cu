// Layer norm and RMS norm on CUDA, backward.
//
// x and doutput are read once and stay in registers between the sums and the gradient (16-bit rows
// up to 16,384 columns, float32 up to 8,192); longer rows are read a second time. The sums for
// dweight and dbias stay in registers over a block's rows and are written once; which rows a block
// has follows from the shape alone, so gradients are the same bits on every device, and no atomics
// are needed. Bytes per element: doutput + x + dx (+ dresidual_out); per block and column weight
// and partials, which the last kernel reads once. Done when it runs at the speed of a copy of as
// many bytes.
//
// A modulated norm has a weight, named scale, for each group of rows, and separate sums for each
// group: a part has rows of one group. If a part has all of them, its sums are the gradients. With
// a gate, dx * gate is written instead of dx, and dx * branch is summed as well; the row's factor
// and dropout are applied before both, and a branch whose factor is 0 is not read. A norm with a
// scaled branch is the case of a single group.
#include "cuda/backend.h"
#include "cuda/launch.cuh"
#include "cuda/norm/backward_rows.cuh"

namespace onepass::cuda {
namespace {

// Whether doutput is kept in shared memory until the sums of its row are known.
template <int kPacks>
inline constexpr bool kIsParked = kPacks == 4;

// Rows in registers. A block has a part, which is a run of rows that follows from the shape, and
// writes its sums to partials (parts, kSums, cols). It has at most kThreads threads.
template <class Args, class Types, int kPacks, bool kAligned, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    norm_backward_kernel(const Args args, const int threads_per_row, typename Types::A* partials) {
  using A = typename Types::A;
  const int thread = static_cast<int>(threadIdx.x);
  const int rows_per_block = threads_per_row > kLanes ? 1 : static_cast<int>(blockDim.x) / kLanes;
  const int group = threads_per_row > kLanes ? 0 : thread / kLanes;
  const int row_elements = threads_per_row * kPacks * kPack;
  SharedMemory shared;
  A* scratch = shared.take<A>(2 * kReduceScratch<2>);  // of even and of odd rows
  // After the loop over rows, the same memory holds the sums of the warps.
  A* weights = shared.take<A>(rows_per_block > 1 ? kSums<Args> * row_elements : row_elements);
  // doutput between its two uses, if the sums of many columns leave no registers for it.
  typename Types::Kept* parked =
      kIsParked<kPacks> ? shared.take<typename Types::Kept>(kPacks * blockDim.x) : nullptr;
  BlockConstants* constants = shared.take<BlockConstants>(1);
  // If the whole block has a row: mean and rstd (and factor) of even and of odd rows. One thread
  // loads them one row ahead; the barrier of the row's reduction comes before their use.
  A* statistics = shared.take<A>(kStatistics<Args>);
  A* gates = nullptr;
  if constexpr (kIsModulated<Args>) {
    if (args.gate) gates = shared.take<A>(row_elements);
  }
  const auto read_ahead = [&](int r) {
    if (threads_per_row == kLanes || thread != 0 || r >= constants->rows) return;
    const int64_t row = constants->first_row + r;
    statistics[2 * (r & 1)] = read_once(at_row<A>(args.mean, row), true);
    statistics[2 * (r & 1) + 1] = read_once(at_row<A>(args.rstd, row), true);
    if constexpr (kIsModulated<Args>) {
      const A* scale = at_row<A>(args.row_scale, sample_of(args, *constants, row));
      statistics[4 + (r & 1)] = scale ? read_once(scale, true) : A(1);
    }
  };
  if (thread == 0) *constants = constants_of(args, blockIdx.x, gridDim.x);
  read_ahead(0);
  const auto& vectors = vectors_of(args, blockIdx.x, gridDim.x);
  stage_values<kPacks>(vectors.weight, args.weight_dtype, A(1), static_cast<A>(args.weight_offset),
                       WarpColumns<kAligned, kPacks>(threads_per_row, args.cols), group,
                       rows_per_block, weights);
  if constexpr (kIsModulated<Args>) {
    if (args.gate) {
      stage_values<kPacks>(vectors.gate, args.gate_dtype, A(1), A(0),
                           WarpColumns<kAligned, kPacks>(threads_per_row, args.cols), group,
                           rows_per_block, gates);
    }
  }
  __syncthreads();

  A dweight[kPacks][kPack] = {}, dbias[kPacks][kPack] = {}, dgate[kPacks][kPack] = {};
  for (int r = group; r < constants->rows; r += rows_per_block) {
    if constexpr (sizeof(A) < 8) {  // which has no register left on sm_100
      ask_for_row(args, *constants, r + rows_per_block, threads_per_row);
    }
    const WarpColumns<kAligned, kPacks> columns(threads_per_row, args.cols);
    const int64_t row = constants->first_row + r;
    const RowIndex index = row_index_by_inverse(args.row_size, constants->per_size, row);
    const RowOffsets offsets(args, row, index);
    // First, while few registers are in use: the generator needs many.
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
    // All loads of the row are issued before the first result is used, if registers suffice.
    if constexpr (!kIsParked<kPacks>) {
      ONEPASS_UNROLL
      for (int p = 0; p < kPacks; ++p) load_packs(p);
    }
    A mean, rstd, factor = 1;
    if (threads_per_row > kLanes) {
      mean = statistics[2 * (r & 1)], rstd = statistics[2 * (r & 1) + 1];
      if constexpr (kIsModulated<Args>) factor = statistics[4 + (r & 1)];
      read_ahead(r + 1);
    } else {
      mean = read_once(at_row<A>(args.mean, row)), rstd = read_once(at_row<A>(args.rstd, row));
      mean = broadcast(mean), rstd = broadcast(rstd);
      if constexpr (kIsModulated<Args>) {
        factor = row_factor<A>(args.row_scale, sample_of(args, *constants, row));
      }
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
      const auto load_gate = [&](A(&gate)[kPack]) { staged_pack(gates, columns, p, gate); };
      apply_pack<Types>(args, constants->dropout, kept >> p * kPack & 0xffu, offsets, index,
                        columns, p, doutput[p], x[p], weight, load_gate, factor, mean, rstd, of_row,
                        dweight[p], dbias[p], dgate[p]);
    }
  }

  // If each warp has a separate row, the sums of the block's warps are added in order.
  const WarpColumns<kAligned, kPacks> columns(threads_per_row, args.cols);
  uint32_t threads = blockDim.x;
  forget(threads);  // else sm_120 keeps rows_per_block through the loop, on the stack
  const int groups = threads_per_row > kLanes ? 1 : static_cast<int>(threads) / kLanes;
  constexpr int kWarpRow = kLanes * kPacks * kPack;
  A* sums = weights;  // of dweight, and kWarpRow further each of dbias and dgate
  if (groups > 1) {
    for (int warp = 0; warp < groups; ++warp) {
      __syncthreads();
      if (group != warp) continue;
      ONEPASS_UNROLL
      for (int p = 0; p < kPacks; ++p) {
        add_staged(dweight[p], columns, p, warp > 0, sums);
        add_staged(dbias[p], columns, p, warp > 0, sums + kWarpRow);
        if constexpr (kIsModulated<Args>) {
          add_staged(dgate[p], columns, p, warp > 0, sums + 2 * kWarpRow);
        }
      }
    }
    __syncthreads();
  }
  A* const target = partials + static_cast<int64_t>(blockIdx.x) * kSums<Args> * args.cols;
  ONEPASS_UNROLL
  for (int p = 0; p < kPacks; ++p) {
    if (!has_iteration(p, group, groups)) continue;
    if (groups > 1) {
      staged_pack(sums, columns, p, dweight[p]);
      staged_pack(sums + kWarpRow, columns, p, dbias[p]);
      if constexpr (kIsModulated<Args>) {
        staged_pack(sums + 2 * kWarpRow, columns, p, dgate[p]);
      }
    }
    store_sums(args, target, blockIdx.x, gridDim.x, columns, p, dweight[p], dbias[p], dgate[p]);
  }
}

// Long rows, first: the means of each row.
template <class Args, class Types, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads, 1)
    norm_backward_means_kernel(const Args args, RowMeans<typename Types::A>* means) {
  using A = typename Types::A;
  SharedMemory shared;
  A* scratch = shared.take<A>(kReduceScratch<2>);
  const int64_t row = blockIdx.x;
  const StridedColumns<kAligned> columns{static_cast<int>(blockDim.x),
                                         static_cast<int>(threadIdx.x), args.cols};
  const RowOffsets offsets(args, row, row_index(args.row_size, row));
  const auto& vectors = vectors_of(args, row, args.rows);
  A mean = read_once(at_row<A>(args.mean, row)), rstd = read_once(at_row<A>(args.rstd, row));
  mean = broadcast(mean), rstd = broadcast(rstd);
  A sums[2] = {};
  for (int64_t p = 0; columns.reaches(p); ++p) {
    const auto doutput = Types::load(args.doutput, args.doutput_dtype, offsets.doutput, columns, p);
    const auto x = Types::load(args.x, args.x_dtype, offsets.x, columns, p);
    A weight[kPack];
    load_values(vectors.weight, args.weight_dtype, A(1), columns, p, weight);
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
template <class Args, class A>
inline constexpr int kColumnsThreads =
    sizeof(A) == 8 || kIsModulated<Args> ? kMaxThreads / 2 : kMaxThreads;

template <class Args, class Types, bool kAligned>
__global__ void __launch_bounds__(kColumnsThreads<Args, typename Types::A>, 1)
    norm_backward_columns_kernel(const Args args, const RowMeans<typename Types::A>* means,
                                 const int parts, typename Types::A* partials) {
  using A = typename Types::A;
  const StridedColumns<kAligned> columns{static_cast<int>(blockDim.x),
                                         static_cast<int>(threadIdx.x), args.cols};
  const int64_t pack = blockIdx.x / parts;
  const int64_t part = blockIdx.x % parts;
  SharedMemory shared;
  BlockConstants* constants = shared.take<BlockConstants>(1);
  if (threadIdx.x == 0) *constants = constants_of(args, part, parts);
  __syncthreads();
  A* weights = shared.take<A>(kPack * kColumnsThreads<Args, A>) + threadIdx.x;  // each thread's own
  const auto& vectors = vectors_of(args, part, parts);
  A value[kPack];
  load_values(vectors.weight, args.weight_dtype, A(1), columns, pack, value);
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    weights[e * kColumnsThreads<Args, A>] = value[e] + static_cast<A>(args.weight_offset);
  }
  const auto load_gate = [&](A(&gate)[kPack]) {  // of the same columns for every row: in L1
    if constexpr (kIsModulated<Args>) {
      load_values(vectors.gate, args.gate_dtype, A(1), columns, pack, gate);
    }
  };
  A dweight[kPack] = {}, dbias[kPack] = {}, dgate[kPack] = {};
  for (int r = 0; r < constants->rows; ++r) {
    const int64_t row = constants->first_row + r;
    const RowIndex index = row_index_by_inverse(args.row_size, constants->per_size, row);
    const RowOffsets offsets(args, row, index);
    const auto doutput =
        Types::load(args.doutput, args.doutput_dtype, offsets.doutput, columns, pack);
    const auto x = Types::load(args.x, args.x_dtype, offsets.x, columns, pack);
    RowMeans<A> of_row{read_once(&means[row].g), read_once(&means[row].gh)};
    A mean = read_once(at_row<A>(args.mean, row)), rstd = read_once(at_row<A>(args.rstd, row));
    of_row = {broadcast(of_row.g), broadcast(of_row.gh)};
    mean = broadcast(mean), rstd = broadcast(rstd);
    A factor = 1;
    if constexpr (kIsModulated<Args>) {
      factor = row_factor<A>(args.row_scale, sample_of(args, *constants, row));
    }
    A weight[kPack];
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) weight[e] = weights[e * kColumnsThreads<Args, A>];
    const uint32_t kept =
        args.seed ? keep_bits(constants->dropout, offsets.dense, columns, pack) : 0;
    apply_pack<Types>(args, constants->dropout, kept, offsets, index, columns, pack, doutput, x,
                      weight, load_gate, factor, mean, rstd, of_row, dweight, dbias, dgate);
  }
  store_sums(args, partials + part * kSums<Args> * args.cols, part, parts, columns, pack, dweight,
             dbias, dgate);
}

// Adds up the partial sums of the parts. A block has kReduceColumns columns of one of the sums;
// `parts` is the number of parts of a group.
template <class Args, class A>
__global__ void __launch_bounds__(kReduceThreads, 1)
    norm_backward_reduce_kernel(const Args args, const A* partials, const int parts) {
  const int which = blockIdx.x % kSums<Args>;  // dweight, dbias, dgate
  int64_t column = static_cast<int64_t>(blockIdx.x / kSums<Args>) * kReduceColumns;
  void* target = which == 0 ? args.dweight : args.dbias;
  int64_t first_element = 0;
  if constexpr (kIsModulated<Args>) {
    const int64_t cols = (args.cols + kReduceColumns - 1) / kReduceColumns * kReduceColumns;
    const int64_t group = column / cols;
    column -= group * cols;
    partials += group * parts * kSums<Args> * args.cols;
    first_element = group * args.cols;
    if (which == 2) target = args.dgate;
  }
  column += threadIdx.x % kLanes;
  if (!target) return;
  SharedMemory shared;
  A* sums = shared.take<A>(kReduceThreads);
  const bool has_column = column < args.cols;
  const A total = sum_of_parts(partials + which * args.cols + column, parts,
                               kSums<Args> * args.cols, has_column, sums);
  if (threadIdx.x >= kLanes || !has_column) return;
  DType dtype = which == 0 ? args.dweight_dtype : args.dbias_dtype;
  if constexpr (kIsModulated<Args>) {
    if (which == 2) dtype = args.gate_dtype;
  }
  store_gradient<A>(target, dtype, first_element + column, total);
}

// The number of packs of x and of doutput that a thread keeps, beside the sums of their columns. A
// modulated norm has one sum more.
template <class Args, class Types>
inline constexpr int kBackwardPacks =
    (sizeof(typename Types::A) == 8       ? 1
     : sizeof(typename Types::Kept) == 16 ? 4
                                          : 2) /
    (kIsModulated<Args> && sizeof(typename Types::A) == 4 ? 2 : 1);

// Calls f.operator()<kThreads>() with the least limit of threads that the geometry allows. With a
// lower limit each thread can have more of the 65,536 registers: 168 with 384 threads, 128 with
// 512. For unaligned rows of four packs of bfloat16 that makes 60 loads of a thread in flight
// instead of about 20 (`cuobjdump -sass` for sm_90); 512 threads are for rows that need them.
// Aligned packs would take up to 152 registers as well, but they are only a few loads of 16 bytes.
template <class Args, int kPacks, bool kAligned, class F>
void visit_threads(const Geometry& geometry, F&& f) {
  if constexpr (kPacks == 4 && !kAligned) {
    if (geometry.threads <= kFewThreads) return f.template operator()<kFewThreads>();
  }
  f.template operator()<kMostThreads<Args, kAligned>>();
}

template <class Args, class F>
decltype(auto) visit_backward(const Args& args, F&& f) {
  DType branch = args.x_dtype;
  if constexpr (kIsModulated<Args>) {
    if (args.gate) branch = args.branch_dtype;
  }
  return visit_types(
      {args.x_dtype, args.doutput_dtype, args.dinput ? args.dinput_dtype : args.x_dtype,
       args.dresidual ? args.dresidual_dtype : args.x_dtype, branch},
      f);
}

template <class Args>
Geometry backward_geometry(const Args& args) {
  Alignment alignment(args.cols);
  alignment.rows(args.doutput, args.doutput_dtype, &args.doutput_stride);
  alignment.rows(args.x, args.x_dtype, &args.x_stride);
  alignment.rows(args.dresidual_out, args.x_dtype, &args.dresidual_out_stride);
  alignment.vector(args.dinput);
  alignment.vector(args.dresidual);
  if constexpr (kIsModulated<Args>) {
    alignment.rows(args.branch, args.branch_dtype, &args.branch_stride);
    alignment.rows(args.weight, args.weight_dtype, &args.scale_stride);
    alignment.rows(args.gate, args.gate_dtype, &args.gate_stride);
    alignment.vector(args.dweight);
    alignment.vector(args.dbias);
    alignment.vector(args.dgate);
  } else {
    alignment.vector(args.weight);
  }
  return visit_backward(args, [&]<class Types>() {
    const Geometry geometry =
        geometry_of<Args>(args.cols, kBackwardPacks<Args, Types>, alignment.value());
    return geometry.packs > 0 ? shared_geometry(args, geometry) : geometry;
  });
}

// The number of parts depends on the shape alone, so that the order of the additions is the same on
// every device. The partials of a part of kRowsPerPart rows are a twelfth of the bytes that it
// moves (bfloat16: 16 bytes for each 6 * kRowsPerPart). Parts have fewer rows only where there
// would otherwise be too few blocks to keep a device busy.
constexpr int64_t kRowsPerPart = 32;
constexpr int64_t kMaxParts = 512;
constexpr int64_t kFewParts = 128;

template <class Args>
int64_t parts_of(const Args& args, const Geometry& geometry) {
  const int64_t groups = geometry.packs > 0 ? geometry.rows_per_block() : 1;
  // Blocks with a row for each warp have four warps: twice as many of them.
  const int64_t few = groups > 1 ? 2 * kFewParts : kFewParts;
  const auto parts_of = [&](int64_t rows, int64_t few, int64_t most) {
    const int64_t busy = std::min(rows / (2 * groups), few);
    return std::clamp<int64_t>(std::max(rows / kRowsPerPart, busy), 1, most);
  };
  if constexpr (kIsModulated<Args>) {  // of each group, and together as many
    const int64_t most = std::max<int64_t>(kMaxParts / args.groups, 1);
    return args.groups * parts_of(args.tokens, few / args.groups, most);
  } else {
    return parts_of(args.rows, few, kMaxParts);
  }
}

int64_t accumulator_size_of(const NormBackward& args) {
  return args.x_dtype == DType::kFloat64 ? 8 : 4;
}

// Whether the sums of the parts must still be added up to gradients.
template <class Args>
bool has_partials(const Args& args, int64_t parts) {
  if constexpr (kIsModulated<Args>) return parts > args.groups;
  return true;
}

template <class Args>
Plan plan_backward(const Args& args, const Machine&, Geometry& geometry) {
  geometry = backward_geometry(args);
  const bool in_registers = geometry.packs > 0;
  const int64_t parts = parts_of(args, geometry);
  const int64_t means = in_registers ? 0 : 2 * args.rows;
  const int64_t partials = has_partials(args, parts) ? kSums<Args> * parts * args.cols : 0;
  return {.workspace_bytes = (partials + means) * accumulator_size_of(args),
          .kernel_name = in_registers ? "norm_backward_kernel" : "norm_backward_columns_kernel",
          .rows_per_tile = in_registers ? geometry.rows_per_block() : 1,
          .splits = parts,
          .reason = !in_registers      ? "rows too long for registers are read twice"
                    : geometry.aligned ? "rows in registers, 16-byte accesses"
                                       : "rows in registers, unaligned: single elements"};
}

template <class Args>
void run_backward(const Args& args, const Plan& plan, const Geometry& geometry, void* workspace,
                  const Context& context) {
  const int parts = static_cast<int>(plan.splits);
  int64_t groups = 1, gates = 0;
  if constexpr (kIsModulated<Args>) groups = args.groups, gates = args.gate ? 1 : 0;
  visit_backward(args, [&]<class Types>() {
    using A = typename Types::A;
    A* const partials = static_cast<A*>(workspace);
    LaunchShape shape{.blocks = parts, .threads = static_cast<unsigned>(geometry.threads)};
    if (args.rows > 0 && geometry.packs > 0) {
      const int64_t arrays = (geometry.rows_per_block() > 1 ? kSums<Args> : 1) + gates;
      shape.shared_bytes = sizeof(BlockConstants) + (kStatistics<Args> + 2 * kReduceScratch<2> +
                                                     arrays * geometry.row_elements()) *
                                                        sizeof(A);
      visit_geometry<kBackwardPacks<Args, Types>>(geometry, [&]<int kPacks, bool kAligned>() {
        if (kIsParked<kPacks>) {
          shape.shared_bytes += kPacks * geometry.threads * sizeof(typename Types::Kept);
        }
        visit_threads<Args, kPacks, kAligned>(geometry, [&]<int kThreads>() {
          launch<norm_backward_kernel<Args, Types, kPacks, kAligned, kThreads>>(
              shape, context.stream, args, geometry.threads_per_row, partials);
        });
      });
    } else if (args.rows > 0) {
      const int64_t sums = has_partials(args, parts) ? kSums<Args> * parts : 0;
      auto* const means = reinterpret_cast<RowMeans<A>*>(partials + sums * args.cols);
      constexpr int64_t tile = kColumnsThreads<Args, A> * kPack;
      const int64_t tiles = (args.cols + tile - 1) / tile;
      visit_bool(geometry.aligned, [&]<bool kAligned>() {
        shape.blocks = args.rows;
        shape.shared_bytes = kReduceScratch<2> * sizeof(A);
        launch<norm_backward_means_kernel<Args, Types, kAligned>>(shape, context.stream, args,
                                                                  means);
        shape.blocks = tiles * parts;
        shape.threads = kColumnsThreads<Args, A>;
        shape.shared_bytes = sizeof(BlockConstants) + tile * sizeof(A);
        launch<norm_backward_columns_kernel<Args, Types, kAligned>>(
            shape, context.stream, args, static_cast<const RowMeans<A>*>(means), parts, partials);
      });
    }
    bool has_sums = args.dweight || args.dbias;
    if constexpr (kIsModulated<Args>) has_sums = has_sums || args.dgate;
    // Without rows all sums are 0.
    if (!has_sums || (args.rows > 0 && !has_partials(args, parts))) return;
    launch<norm_backward_reduce_kernel<Args, A>>(
        {.blocks = kSums<Args> * groups * ((args.cols + kReduceColumns - 1) / kReduceColumns),
         .threads = kReduceThreads,
         .shared_bytes = kReduceThreads * sizeof(A)},
        context.stream, args, static_cast<const A*>(partials),
        args.rows > 0 ? static_cast<int>(parts / groups) : 0);
  });
}

}  // namespace

Operator<NormBackward> norm_backward() {
  return operator_of<NormBackward, Geometry, plan_backward<NormBackward>,
                     run_backward<NormBackward>>();
}
Operator<ModulatedNormBackward> modulated_norm_backward() {
  using Args = ModulatedNormBackward;
  return operator_of<Args, Geometry, plan_backward<Args>, run_backward<Args>>();
}

}  // namespace onepass::cuda
