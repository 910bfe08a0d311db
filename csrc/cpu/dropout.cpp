// Dropout, alone or with a residual add: output = input * (0 or scale) + residual.
//
// Nothing is stored but the output: the 0-or-scale factors are Philox values of the element index,
// drawn a tile at a time into L1 and drawn again by the backward, which is the same kernel on the
// gradient. Traffic: one read of each input and one write. Done when it runs at the speed of the
// generator, which is below that of memory on every level.
//
// A scaled branch is output = residual + row_scale * column_scale * dropout(input), a row at a
// time; its backward writes dinput and sums dcolumn_scale over the rows in the same pass, in an
// order that depends on the shape alone. Traffic: forward as above, without the input of rows whose
// factor is 0; backward doutput, input and dinput. Done when it runs at the speed of memory.
#include "core/visit.h"
#include "cpu/branch.h"
#include "cpu/kernels.h"
#include "cpu/lines.h"
#include "cpu/parallel.h"
#include "cpu/pieces.h"
#include "cpu/random.h"
#include "cpu/row_sums.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

template <class T, class R, class O, bool kResidual>
void dropout_forward_kernel(const DropoutForward& args, const Dropout& dropout, int64_t begin,
                            int64_t end) {
  using A = Accumulator<T>;
  const T* input = static_cast<const T*>(args.input);
  const R* residual = static_cast<const R*>(args.residual);
  O* output = static_cast<O*>(args.output);
  KeepTile keep;
  for (int64_t tile = begin; tile < end; tile += kDropoutTile) {
    const int64_t count = tile + kDropoutTile < end ? kDropoutTile : end - tile;
    keep.fill(dropout, tile, count);
    // scalar: output[i] = input[i] * keep[i] + residual[i]
    for_each_vector<A>(0, count, [&](int64_t i, auto lanes) {
      const Vec<A> x = load<A>(input + tile + i, lanes);
      const Vec<A> factor = keep.scale<A>(dropout, i);
      if constexpr (kResidual) {
        store<A>(output + tile + i, load<A>(residual + tile + i, lanes) + x * factor, lanes);
      } else {
        store<A>(output + tile + i, x * factor, lanes);
      }
    });
  }
}

// Without dropout only the add remains.
template <class T, class R>
void add_kernel(const DropoutForward& args, const Dropout&, int64_t begin, int64_t end) {
  using A = Accumulator<T>;
  const T* input = static_cast<const T*>(args.input);
  const R* residual = static_cast<const R*>(args.residual);
  R* output = static_cast<R*>(args.output);
  for_each_vector<A>(begin, end, [&](int64_t i, auto lanes) {
    store<A>(output + i, load<A>(residual + i, lanes) + load<A>(input + i, lanes), lanes);
  });
}

using Kernel = void (*)(const DropoutForward&, const Dropout&, int64_t, int64_t);

Kernel kernel_for(const DropoutForward& args) {
  if (args.input_dtype == DType::kFloat64) {
    if (!args.seed) return add_kernel<double, double>;
    return args.residual ? dropout_forward_kernel<double, double, double, true>
                         : dropout_forward_kernel<double, double, double, false>;
  }
  return visit_dtype_up_to_float32(args.input_dtype, [&]<class T>() -> Kernel {
    if (!args.residual) {
      return visit_dtype_up_to_float32(args.output_dtype, [&]<class O>() -> Kernel {
        return dropout_forward_kernel<T, T, O, false>;
      });
    }
    return visit_dtype_up_to_float32(args.residual_dtype, [&]<class R>() -> Kernel {
      if (!args.seed) return add_kernel<T, R>;
      return dropout_forward_kernel<T, R, R, true>;
    });
  });
}

int64_t bytes_per_element(const DropoutForward& args) {
  return size_of(args.input_dtype) + size_of(args.output_dtype) +
         (args.residual ? size_of(args.residual_dtype) : 0);
}

Plan plan_forward(const DropoutForward& args, const Machine& machine) {
  const int64_t rate = args.seed ? kRandomBytes : kBytes;
  const int64_t tiles = (args.numel + kDropoutTile - 1) / kDropoutTile;
  const int64_t threads = threads_for(args.numel * bytes_per_element(args) / rate, tiles, machine);
  return {.workspace_bytes = 0,
          .kernel_name = args.seed ? "dropout_forward_kernel" : "add_kernel",
          .rows_per_tile = 1,
          .splits = tiles,
          .reason = threads > 1 ? "one parallel region" : "too small for a parallel region",
          .threads = threads};
}

void run_forward(const DropoutForward& args, const Plan& plan, void*, const Context& context) {
  const Dropout dropout = args.seed ? make_dropout(args.seed, args.dropout_p) : Dropout{};
  const Kernel kernel = kernel_for(args);
  // Pieces begin at whole tiles, so no two threads draw the same block.
  for_each_piece(context, plan.threads, plan.splits, [&](int64_t begin, int64_t end) {
    const int64_t last = end * kDropoutTile;
    kernel(args, dropout, begin * kDropoutTile, last < args.numel ? last : args.numel);
  });
}

// ---- scaled branches ----------------------------------------------------------------------------

int64_t accumulator_size_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : 4; }

// The column scale as accumulators, in a workspace: 1 everywhere without one.
template <class A, class Args>
const A* widened_columns(const Args& args, void* workspace) {
  A* line = static_cast<A*>(workspace);
  if (args.column_scale) {
    widen_line<A>(args.column_scale, args.column_scale_dtype, 0, args.cols, line);
  } else {
    std::fill(line, line + args.cols, A(1));
  }
  return line;
}

const char* at(const void* base, int64_t offset) { return static_cast<const char*>(base) + offset; }
char* at(void* base, int64_t offset) { return static_cast<char*>(base) + offset; }

template <class A>
void run_branch(const BranchForward& args, const Plan& plan, void* workspace,
                const Context& context) {
  const A* columns = widened_columns<A>(args, workspace);
  const Dropout dropout = args.seed ? make_dropout(args.seed, args.dropout_p) : Dropout{};
  const AddBranchRow<A> add_row =
      branch_row_of<A>(args.input_dtype, args.residual_dtype, args.output_dtype);
  for_each_piece(context, plan.threads, args.rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const RowIndex index = row_index(args.row_size, row);
      const BranchScale<A> scale{columns, row_scale_of<A>(args.row_scale, args.sample_rows, row),
                                 args.seed ? &dropout : nullptr};
      const char* residual = args.residual
                                 ? at(args.residual, row_offset(index, args.residual_stride) *
                                                         size_of(args.residual_dtype))
                                 : nullptr;
      add_row(at(args.input, row_offset(index, args.input_stride) * size_of(args.input_dtype)),
              residual, at(args.output, row * args.cols * size_of(args.output_dtype)), args.cols,
              scale, row * args.cols);
    }
  });
}

Plan plan_branch_forward(const BranchForward& args, const Machine& machine) {
  const int64_t element = size_of(args.input_dtype) + size_of(args.output_dtype) +
                          (args.residual ? size_of(args.residual_dtype) : 0);
  const int64_t rate = args.seed ? kRandomBytes : kBytes;
  const int64_t threads = threads_for(args.rows * args.cols * element / rate, args.rows, machine);
  return {.workspace_bytes = padded_bytes(args.cols, accumulator_size_of(args.input_dtype)),
          .kernel_name = "branch_forward_kernel",
          .rows_per_tile = 1,
          .splits = args.rows,
          .reason = threads > 1 ? "rows spread over threads" : "too small for a parallel region",
          .threads = threads};
}

void run_branch_forward(const BranchForward& args, const Plan& plan, void* workspace,
                        const Context& context) {
  if (args.input_dtype == DType::kFloat64) {
    run_branch<double>(args, plan, workspace, context);
  } else {
    run_branch<float>(args, plan, workspace, context);
  }
}

// Computes dinput of rows [first, last), and in `total` the sum for dcolumn_scale, through `run`.
template <class A>
void branch_chunk(const BranchBackward& args, const A* columns, const Dropout& dropout,
                  int64_t first, int64_t last, A* total, A* run) {
  const int64_t size = args.dcolumn_scale ? padded_bytes(args.cols, sizeof(A)) / sizeof(A) : 0;
  std::fill(total, total + size, A(0));
  KeepTile keep;
  alignas(64) A gradient[kDropoutTile];
  for_each_run(first, last, kRunRows, total, run, size, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const RowIndex index = row_index(args.row_size, row);
      const int64_t doutput = row_offset(index, args.doutput_stride);
      const int64_t branch = row_offset(index, args.branch_stride);
      const A factor = row_scale_of<A>(args.row_scale, args.sample_rows, row);
      for (int64_t tile = 0; tile < args.cols; tile += kDropoutTile) {
        const int64_t count = std::min(kDropoutTile, args.cols - tile);
        const int64_t element = row * args.cols + tile;
        if (factor != A(0)) {
          widen_line<A>(args.doutput, args.doutput_dtype, doutput + tile, count, gradient);
        }
        branch_backward_kernel<A>(
            gradient, {columns + tile, factor, args.seed ? &dropout : nullptr}, keep, element,
            args.branch ? at(args.branch, (branch + tile) * size_of(args.branch_dtype)) : nullptr,
            args.branch_dtype,
            args.dinput ? at(args.dinput, element * size_of(args.dinput_dtype)) : nullptr,
            args.dinput_dtype, run + tile, count);
      }
    }
  });
}

template <class A>
void run_branch(const BranchBackward& args, const Plan& plan, void* workspace,
                const Context& context) {
  const int64_t size = padded_bytes(args.cols, sizeof(A)) / static_cast<int64_t>(sizeof(A));
  const A* columns = widened_columns<A>(args, workspace);
  A* const partials = static_cast<A*>(workspace) + size;  // (chunks, total and run, size)
  const Dropout dropout = args.seed ? make_dropout(args.seed, args.dropout_p) : Dropout{};
  for_each_piece(context, plan.threads, plan.splits, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      A* total = partials + chunk * 2 * size;
      branch_chunk<A>(args, columns, dropout, args.rows * chunk / plan.splits,
                      args.rows * (chunk + 1) / plan.splits, total, total + size);
    }
  });
  if (!args.dcolumn_scale) return;
  reduce_partials<A>(partials, plan.splits, 2 * size, 0, args.cols, args.dcolumn_scale,
                     args.column_scale_dtype);
}

Plan plan_branch_backward(const BranchBackward& args, const Machine& machine) {
  const int64_t chunks = chunks_of(args.rows, args.cols);
  const int64_t element = size_of(args.doutput_dtype) + 2 * size_of(args.dinput_dtype);
  const int64_t rate = args.seed ? kRandomBytes : kBytes;
  const int64_t threads = threads_for(args.rows * args.cols * element / rate, chunks, machine);
  return {.workspace_bytes =
              (1 + 2 * chunks) * padded_bytes(args.cols, accumulator_size_of(args.doutput_dtype)),
          .kernel_name = "branch_backward_kernel",
          .rows_per_tile = 1,
          .splits = chunks,
          .reason = threads > 1   ? "chunks of rows spread over threads"
                    : chunks == 1 ? "too few rows to cut into chunks"
                                  : "too small for a parallel region",
          .threads = threads};
}

void run_branch_backward(const BranchBackward& args, const Plan& plan, void* workspace,
                         const Context& context) {
  if (args.doutput_dtype == DType::kFloat64) {
    run_branch<double>(args, plan, workspace, context);
  } else {
    run_branch<float>(args, plan, workspace, context);
  }
}

}  // namespace

Operator<DropoutForward> dropout_forward() { return {plan_forward, run_forward}; }
Operator<BranchForward> branch_forward() { return {plan_branch_forward, run_branch_forward}; }
Operator<BranchBackward> branch_backward() { return {plan_branch_backward, run_branch_backward}; }

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
