// Layer norm and RMS norm, backward: every gradient in one pass over memory.
//
// With g = doutput * weight and h = (x - mean) * rstd per row,
//   dx = rstd * (g - mean(g) - h * mean(g * h)) + dresidual_out     (rms: without mean(g))
//   dweight = sum over rows of doutput * h, dbias = sum over rows of doutput.
// Two sweeps over a block of rows: the first sums g and g * h, the second, over rows that are still
// in L1, writes dx and adds to dweight and dbias, whose loads and stores the block's rows share.
//
// Rows are cut into chunks whose number depends on the shape alone. A chunk adds runs of 64 rows,
// and then the runs, into float32 partials of its own, and the partials are added in a fixed tree
// at the end: the same bits for any number of threads, and an error that grows slowly with the
// rows. Bytes per element: doutput + x + dx (+ dresidual_out). Done when it runs at the speed of
// memory for those bytes.
#include "cpu/kernels.h"
#include "cpu/norm/rows.h"
#include "cpu/parallel.h"
#include "cpu/random.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

// Enough chunks for many threads; enough rows in each for the partials to be a few percent of the
// traffic.
constexpr int64_t kMaxChunks = 64;
constexpr int64_t kMinChunkRows = 32;
constexpr int64_t kMinChunkElements = 32768;
constexpr int64_t kRunRows = 64;

int64_t chunks_of(const NormBackward& args) {
  const int64_t by_rows = args.rows / kMinChunkRows;
  const int64_t by_elements = args.rows * args.cols / kMinChunkElements;
  const int64_t most = std::clamp<int64_t>(std::min(by_rows, by_elements), 1, kMaxChunks);
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(most)));
}

int64_t accumulator_size_of(const NormBackward& args) {
  return args.x_dtype == DType::kFloat64 ? 8 : 4;
}

template <class A>
struct BackwardRows {
  const void* doutput[kRowsPerBlock];        // (cols,) each
  const void* x[kRowsPerBlock];              // (cols,) each
  const void* dresidual_out[kRowsPerBlock];  // (cols,) each, unused without kResidual
  void* dx[kRowsPerBlock];                   // (end - begin,) each: columns [begin, end)
  const A* weight;                           // (cols,)
  A* dweight;                                // (cols,) the run's sum
  A* dbias;                                  // (cols,) the run's sum
  A mean[kRowsPerBlock];
  A rstd[kRowsPerBlock];
  A mean_g[kRowsPerBlock];   // mean over columns of g
  A mean_gh[kRowsPerBlock];  // mean over columns of g * h
  int64_t cols;
};

// First sweep: mean_g and mean_gh of each row.
template <class A, class D, class X, bool kRms>
void norm_backward_sums_kernel(BackwardRows<A>& rows, int row_count) {
  for (int r = 0; r < row_count; ++r) {
    const D* doutput = static_cast<const D*>(rows.doutput[r]);
    const X* x = static_cast<const X*>(rows.x[r]);
    const Vec<A> mean = broadcast<A>(rows.mean[r]);
    // scalar: g = doutput[j] * weight[j]; sum_gh += g * (x[j] - mean); sum_g += g
    const auto sums =
        sum_columns<A, kRms ? 1 : 2>(rows.cols, [&](Vec<A>* sum, int64_t j, auto count) {
          prefetch_ahead(doutput + j);
          prefetch_ahead(x + j);
          const Vec<A> g = load<A>(doutput + j, count) * load<A>(rows.weight + j, count);
          const Vec<A> v = load<A>(x + j, count);
          sum[0] = fma<A>(g, kRms ? v : v - mean, sum[0]);
          if constexpr (!kRms) sum[1] += g;
        });
    const A n = static_cast<A>(rows.cols);
    rows.mean_gh[r] = sums[0] * rows.rstd[r] / n;
    if constexpr (!kRms) rows.mean_g[r] = sums[1] / n;
  }
}

// Second sweep over the columns [begin, end): dx, and the rows' share of dweight and dbias.
template <class A, class D, class X, class DX, bool kRms, bool kResidual, int kRows>
void norm_backward_kernel(const BackwardRows<A>& rows, int64_t begin, int64_t end) {
  const D* doutput[kRows];
  const X* x[kRows];
  const X* dresidual_out[kRows];
  DX* dx[kRows];
  Vec<A> mean[kRows], rstd[kRows], mean_g[kRows], mean_gh[kRows];
  for (int r = 0; r < kRows; ++r) {
    doutput[r] = static_cast<const D*>(rows.doutput[r]);
    x[r] = static_cast<const X*>(rows.x[r]);
    dresidual_out[r] = static_cast<const X*>(rows.dresidual_out[r]);
    dx[r] = static_cast<DX*>(rows.dx[r]);
    mean[r] = broadcast<A>(rows.mean[r]);
    rstd[r] = broadcast<A>(rows.rstd[r]);
    mean_g[r] = broadcast<A>(rows.mean_g[r]);
    mean_gh[r] = broadcast<A>(rows.mean_gh[r]);
  }
  // scalar: h = (x[r][j] - mean[r]) * rstd[r]; g = doutput[r][j] * weight[j]
  //         dx[r][j] = (g - mean_g[r] - h * mean_gh[r]) * rstd[r] + dresidual_out[r][j]
  //         dweight[j] += doutput[r][j] * h; dbias[j] += doutput[r][j]
  for_each_vector<A>(begin, end, [&](int64_t j, auto count) {
    const Vec<A> weight = load<A>(rows.weight + j, count);
    Vec<A> dweight = load<A>(rows.dweight + j, count);
    Vec<A> dbias = {};
    if constexpr (!kRms) dbias = load<A>(rows.dbias + j, count);
    for (int r = 0; r < kRows; ++r) {
      const Vec<A> d = load<A>(doutput[r] + j, count);
      const Vec<A> v = load<A>(x[r] + j, count);
      const Vec<A> h = (kRms ? v : v - mean[r]) * rstd[r];
      const Vec<A> g = kRms ? d * weight : fma<A>(d, weight, -mean_g[r]);
      Vec<A> gradient = fma<A>(-h, mean_gh[r], g) * rstd[r];
      if constexpr (kResidual) gradient += load<A>(dresidual_out[r] + j, count);
      store<A>(dx[r] + (j - begin), gradient, count);
      dweight = fma<A>(d, h, dweight);
      if constexpr (!kRms) dbias += d;
    }
    store<A>(rows.dweight + j, dweight, count);
    if constexpr (!kRms) store<A>(rows.dbias + j, dbias, count);
  });
}

template <class A>
struct BackwardKernels {
  void (*sums)(BackwardRows<A>&, int);
  void (*block)(const BackwardRows<A>&, int64_t, int64_t);
  void (*single)(const BackwardRows<A>&, int64_t, int64_t);
};

template <class A, class D, class X, class DX>
BackwardKernels<A> kernels_of(const NormBackward& args) {
  return visit_bool(args.kind == NormKind::kRms, [&]<bool kRms>() {
    return visit_bool(args.dresidual_out != nullptr, [&]<bool kResidual>() -> BackwardKernels<A> {
      return {norm_backward_sums_kernel<A, D, X, kRms>,
              norm_backward_kernel<A, D, X, DX, kRms, kResidual, kRowsPerBlock>,
              norm_backward_kernel<A, D, X, DX, kRms, kResidual, 1>};
    });
  });
}

// dx goes straight to its one output if that has x's dtype and no dropout stands before it;
// otherwise a tile of columns at a time through L1, as accumulators.
bool is_direct(const NormBackward& args) {
  if (args.dinput && args.dresidual) return false;
  if (args.dinput) return !args.seed && args.dinput_dtype == args.x_dtype;
  return args.dresidual && args.dresidual_dtype == args.x_dtype;
}

template <class A>
BackwardKernels<A> path_of(const NormBackward& args, bool direct) {
  return visit_accumulated<A>(args.doutput_dtype, [&]<class D>() {
    return visit_accumulated<A>(args.x_dtype, [&]<class X>() {
      return direct ? kernels_of<A, D, X, X>(args) : kernels_of<A, D, X, A>(args);
    });
  });
}

// One row's tile of dx, rounded into an output, through dropout if there is one.
template <class A>
void emit(const A* dx, void* output, DType dtype, int64_t count, const Dropout* dropout,
          const KeepTile& keep) {
  visit_accumulated<A>(dtype, [&]<class T>() {
    T* out = static_cast<T*>(output);
    for_each_vector<A>(0, count, [&](int64_t j, auto lanes) {
      Vec<A> v = load<A>(dx + j, lanes);
      if (dropout) v *= keep.scale<A>(*dropout, j);
      store<A>(out + j, v, lanes);
    });
  });
}

// Adds the chunks' partials (chunks, stride) into one gradient (cols,): eight running sums over the
// chunks, then a fixed tree over the eight.
template <class A>
void reduce_partials(const A* partials, int64_t chunks, int64_t stride, int64_t begin, int64_t end,
                     void* output, DType dtype) {
  visit_accumulated<A>(dtype, [&]<class T>() {
    T* out = static_cast<T*>(output);
    for_each_vector<A>(begin, end, [&](int64_t j, auto count) {
      Vec<A> sum[8] = {};
      for (int64_t c = 0; c < chunks; ++c) sum[c % 8] += load<A>(partials + c * stride + j, count);
      for (int width = 4; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) sum[i] += sum[i + width];
      }
      store<A>(out + j, sum[0], count);
    });
  });
}

template <class A>
void run(const NormBackward& args, const Plan& plan, void* workspace, const Context& context) {
  const int64_t buffer_size = padded_bytes(args.cols, sizeof(A)) / sizeof(A);
  A* buffer = static_cast<A*>(workspace);
  // (chunks, total and run, dweight and dbias, buffer_size)
  A* partials = buffer + buffer_size;
  const int64_t chunk_stride = 2 * buffer_size;
  const A* weight =
      widened<A>(args.weight, args.weight_dtype, args.weight_offset, 1.0, args.cols, buffer);
  const bool direct = is_direct(args);
  const BackwardKernels<A> kernels = path_of<A>(args, direct);
  const Dropout dropout = args.seed ? make_dropout(args.seed, args.dropout_p) : Dropout{};
  const int64_t doutput_size = size_of(args.doutput_dtype);
  const int64_t x_size = size_of(args.x_dtype);
  const int64_t dinput_size = size_of(args.dinput_dtype);
  const int64_t dresidual_size = size_of(args.dresidual_dtype);
  const auto at = [](const void* base, int64_t offset) {
    return const_cast<char*>(static_cast<const char*>(base)) + offset;
  };

  const auto run_block = [&](BackwardRows<A>& rows, int64_t row, auto row_count) {
    for (int r = 0; r < row_count; ++r) {
      const RowIndex index = row_index(args.row_size, row + r);
      rows.doutput[r] = at(args.doutput, row_offset(index, args.doutput_stride) * doutput_size);
      rows.x[r] = at(args.x, row_offset(index, args.x_stride) * x_size);
      rows.dresidual_out[r] =
          args.dresidual_out
              ? at(args.dresidual_out, row_offset(index, args.dresidual_out_stride) * x_size)
              : nullptr;
      rows.mean[r] = args.mean ? static_cast<const A*>(args.mean)[row + r] : A(0);
      rows.rstd[r] = static_cast<const A*>(args.rstd)[row + r];
    }
    kernels.sums(rows, row_count);
    const auto apply = row_count == kRowsPerBlock ? kernels.block : kernels.single;
    if (direct) {
      for (int r = 0; r < row_count; ++r) {
        rows.dx[r] = at(args.dinput ? args.dinput : args.dresidual, (row + r) * args.cols * x_size);
      }
      apply(rows, 0, args.cols);
      return;
    }
    alignas(64) A dx[decltype(row_count)::value][kDropoutTile];
    for (int r = 0; r < row_count; ++r) rows.dx[r] = dx[r];
    KeepTile keep;
    for (int64_t begin = 0; begin < args.cols; begin += kDropoutTile) {
      const int64_t end = std::min(begin + kDropoutTile, args.cols);
      apply(rows, begin, end);
      for (int r = 0; r < row_count; ++r) {
        const int64_t element = (row + r) * args.cols + begin;
        if (args.dinput) {
          if (args.seed) keep.fill(dropout, element, end - begin);
          emit<A>(dx[r], at(args.dinput, element * dinput_size), args.dinput_dtype, end - begin,
                  args.seed ? &dropout : nullptr, keep);
        }
        if (args.dresidual) {
          emit<A>(dx[r], at(args.dresidual, element * dresidual_size), args.dresidual_dtype,
                  end - begin, nullptr, keep);
        }
      }
    }
  };

  const auto run_chunk = [&](int64_t chunk) {
    A* total = partials + chunk * 2 * chunk_stride;
    const int64_t first_row = args.rows * chunk / plan.splits;
    const int64_t last_row = args.rows * (chunk + 1) / plan.splits;
    // A chunk of one run adds straight into its total.
    A* run = last_row - first_row > kRunRows ? total + chunk_stride : total;
    std::fill(total, total + chunk_stride, A(0));
    BackwardRows<A> rows;
    rows.weight = weight;
    rows.cols = args.cols;
    rows.dweight = run;
    rows.dbias = run + buffer_size;
    for (int r = 0; r < kRowsPerBlock; ++r) rows.mean_g[r] = A(0);
    for (int64_t row = first_row; row < last_row; row += kRunRows) {
      if (run != total) std::fill(run, run + chunk_stride, A(0));
      for_each_row_block(row, std::min(row + kRunRows, last_row), args.cols,
                         [&](int64_t first, auto row_count) { run_block(rows, first, row_count); });
      if (run == total) continue;
      // buffer_size is a multiple of a vector, and what lies beyond cols is zero.
      for (int64_t j = 0; j < chunk_stride; j += kLanes<A>) {
        store<A>(total + j, load<A>(total + j) + load<A>(run + j));
      }
    }
  };
  for_each_piece(context, plan.threads, plan.splits, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) run_chunk(chunk);
  });
  const auto reduce = [&](int64_t begin, int64_t end) {
    if (args.dweight) {
      reduce_partials<A>(partials, plan.splits, 2 * chunk_stride, begin, end, args.dweight,
                         args.dweight_dtype);
    }
    if (args.dbias) {
      reduce_partials<A>(partials + buffer_size, plan.splits, 2 * chunk_stride, begin, end,
                         args.dbias, args.dbias_dtype);
    }
  };
  const int64_t partial_bytes = 2 * plan.splits * args.cols * static_cast<int64_t>(sizeof(A));
  const Machine machine{.threads = static_cast<int32_t>(plan.threads)};
  for_each_piece(context, threads_for(partial_bytes / kBytes, args.cols, machine), args.cols,
                 reduce);
}

Plan plan_norm_backward(const NormBackward& args, const Machine& machine) {
  const int64_t chunks = chunks_of(args);
  const int64_t bytes = size_of(args.doutput_dtype) + 2 * size_of(args.x_dtype);
  const int64_t rate = args.seed ? kRandomBytes : kBytes;
  const int64_t threads = threads_for(args.rows * args.cols * bytes / rate, chunks, machine);
  return {.workspace_bytes = (1 + 4 * chunks) * padded_bytes(args.cols, accumulator_size_of(args)),
          .kernel_name = "norm_backward_kernel",
          .rows_per_tile = rows_per_block(args.cols),
          .splits = chunks,
          .reason = threads > 1   ? "chunks of rows spread over threads"
                    : chunks == 1 ? "too few rows to cut into chunks"
                                  : "too small for a parallel region",
          .threads = threads};
}

void run_norm_backward(const NormBackward& args, const Plan& plan, void* workspace,
                       const Context& context) {
  if (args.x_dtype == DType::kFloat64) {
    run<double>(args, plan, workspace, context);
  } else {
    run<float>(args, plan, workspace, context);
  }
}

}  // namespace

Operator<NormBackward> norm_backward() { return {plan_norm_backward, run_norm_backward}; }

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
