// Layer norm and RMS norm, forward: y = (x - mean) * rstd * weight + bias per row.
//
// Two passes over a row: statistics, then scaling, which finds the row in L1. With a residual,
// x = residual + dropout(input) is rounded to residual_out's dtype first, in a separate pass, and
// the norm is that of the rounded x, which the backward will read. (Summing in the pass for
// the statistics lost in bfloat16 and won nothing in float32.) Bytes per element: input + output
// (+ residual + residual_out). Done when it runs at the speed of a copy of that size.
//
// A modulated norm has a weight and a bias, 1 + scale and shift, for each group of rows: a thread
// widens them at the beginning of a group, and computes the rows in the same way. A norm whose
// branch is scaled is treated as one group.
#include <cmath>

#include "cpu/branch.h"
#include "cpu/kernels.h"
#include "cpu/normed_rows.h"
#include "cpu/parallel.h"
#include "cpu/pieces.h"
#include "cpu/random.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

template <class A>
struct Moments {
  A mean;
  A rstd;
};

// The statistics of one row in one pass.
//
// Layer norm sums x - centre and its square. The centre is the mean of the row's first four
// vectors: near enough to the row's mean for the sums to lose nothing by cancellation. A row whose
// mean turns out more than half a standard deviation away from there is summed once more around
// that mean. (A pass for the mean and one for the centred squares lost, and Welford costs a
// division per element.)
//
// The few operations per row that end it are done in float64: each of their roundings would show in
// every element.
template <class A, class X, bool kRms>
ONEPASS_INLINE Moments<A> moments_of(const X* x, int64_t cols, double eps) {
  if constexpr (kRms) {
    return {A(0), rms_rstd<A>(x, cols, eps)};
  } else {
    const double n = static_cast<double>(cols);
    const int64_t first = std::min<int64_t>(cols, 4 * kLanes<A>);
    Vec<A> first_sum = {};
    for_each_vector<A>(0, first,
                       [&](int64_t j, auto count) { first_sum += load<A>(x + j, count); });
    A centre = sum_of_lanes<A>(first_sum) / static_cast<A>(first);
    for (bool again = false;; again = true) {
      const Vec<A> from = broadcast<A>(centre);
      const auto add = [&](Vec<A>* sum, Vec<A> d) __attribute__((always_inline)) {
        sum[0] += d;
        sum[1] = fma<A>(d, d, sum[1]);
      };
      const auto one = [&](Vec<A>* sum, int64_t j, auto count) __attribute__((always_inline)) {
        add(sum, keep_lanes<A>(load<A>(x + j, count) - from, count));
      };
      const auto two = [&](Vec<A>* sum, int64_t j) __attribute__((always_inline)) {
        const Two<A> v = load_two<true, A>(x + j);
        add(sum, v.first - from);
        add(sum, v.second - from);
      };
      const auto [deviation, squares] = [&]() __attribute__((always_inline)) {
        if constexpr (__is_same(X, BFloat16)) {
          return sum_twos<A, 2>(cols, two, one);
        } else {
          return sum_columns<A, 2>(cols, one);
        }
      }();
      const double correction = deviation / n;
      const double variance = squares / n - correction * correction;
      const A mean = static_cast<A>(centre + correction);
      if (again || !(correction * correction > 0.25 * variance)) {
        return {mean, static_cast<A>(1.0 / std::sqrt((variance < 0.0 ? 0.0 : variance) + eps))};
      }
      centre = mean;
    }
  }
}

template <class A>
struct ForwardRows {
  const void* x[kRowsPerBlock];  // (cols,) each
  void* output[kRowsPerBlock];   // (cols,) each
  const A* weight;               // (cols,)
  const A* bias;                 // (cols,), unused without kBias
  A* mean;                       // (rows of the block,) or null
  A* rstd;                       // (rows of the block,) or null
  int64_t cols;
  double eps;
};

// kTwo: two vectors at a time; weight and bias have the order of to_halves_order.
template <class A, class X, class Y, bool kRms, bool kBias, int kRows, bool kTwo>
void norm_forward_kernel(const ForwardRows<A>& rows) {
  const X* x[kRows];
  Y* y[kRows];
  Vec<A> mean[kRows];
  Vec<A> rstd[kRows];
  for (int r = 0; r < kRows; ++r) {
    x[r] = static_cast<const X*>(rows.x[r]);
    y[r] = static_cast<Y*>(rows.output[r]);
    const Moments<A> moments = moments_of<A, X, kRms>(x[r], rows.cols, rows.eps);
    if (rows.mean) rows.mean[r] = moments.mean;
    if (rows.rstd) rows.rstd[r] = moments.rstd;
    mean[r] = broadcast<A>(moments.mean);
    rstd[r] = broadcast<A>(moments.rstd);
  }
  // scalar: y[r][j] = (x[r][j] - mean[r]) * rstd[r] * weight[j] + bias[j]
  // V is Vec<A> or Two<A>: load_as(address) gives one, store_as(address, V) writes one.
  const auto columns = [&]<class V>(int64_t j, auto&& load_as,
                                    auto&& store_as) __attribute__((always_inline)) {
    const V weight = load_as(rows.weight + j);
    V bias = {};
    if constexpr (kBias) bias = load_as(rows.bias + j);
    for (int r = 0; r < kRows; ++r) {
      store_as(y[r] + j, each<A>(
                             [&](Vec<A> v, Vec<A> w, Vec<A> b) __attribute__((always_inline)) {
                               const Vec<A> normalized = (kRms ? v : v - mean[r]) * rstd[r];
                               return kBias ? fma<A>(normalized, w, b) : normalized * w;
                             },
                             load_as(x[r] + j), weight, bias));
    }
  };
  const auto one = [&](int64_t j, auto count) __attribute__((always_inline)) {
    columns.template operator()<Vec<A>>(
        j, [&](const auto* p) { return load<A>(p, count); },
        [&](auto* p, Vec<A> v) { store<A>(p, v, count); });
  };
  if constexpr (kTwo) {
    for_each_two<A>(
        rows.cols,
        [&](int64_t j) __attribute__((always_inline)) {
          columns.template operator()<Two<A>>(
              j, [&](const auto* p) { return load_two<false, A>(p); },
              [&](auto* p, const Two<A>& v) { store_two<false, A>(p, v); });
        },
        one);
  } else {
    for_each_vector<A>(0, rows.cols, one);
  }
}

// residual_out = residual + dropout(input), one row.
template <class A, class T, class R, class O, bool kDropout>
void add_row(const void* input_, const void* residual_, void* sum_, int64_t cols,
             const Dropout& dropout, int64_t first_element) {
  const T* input = static_cast<const T*>(input_);
  const R* residual = static_cast<const R*>(residual_);
  O* sum = static_cast<O*>(sum_);
  if constexpr (kDropout) {
    KeepTile keep;
    for (int64_t tile = 0; tile < cols; tile += kDropoutTile) {
      const int64_t end = std::min(tile + kDropoutTile, cols);
      keep.fill(dropout, first_element + tile, end - tile);
      for_each_vector<A>(tile, end, [&](int64_t j, auto count) {
        const Vec<A> kept = load<A>(input + j, count) * keep.scale<A>(dropout, j - tile);
        store<A>(sum + j, load<A>(residual + j, count) + kept, count);
      });
    }
  } else {
    for_each_vector<A>(0, cols, [&](int64_t j, auto count) {
      store<A>(sum + j, load<A>(residual + j, count) + load<A>(input + j, count), count);
    });
  }
}

template <class A>
struct ForwardKernels {
  void (*block)(const ForwardRows<A>&);
  void (*single)(const ForwardRows<A>&);
  bool in_halves;  // weight and bias have the order of to_halves_order

  // `line` (cols,) as the kernels take it; `buffer` (cols,) may be `line`.
  const A* ordered(const A* line, int64_t cols, A* buffer) const {
    if constexpr (sizeof(A) == 4) {
      if (in_halves) {
        to_halves_order(line, cols, buffer);
        return buffer;
      }
    }
    return line;
  }
};

template <class A, class X, class Y, bool kTwo>
ForwardKernels<A> kernels_of(const NormForward& args) {
  return visit_bool(args.kind == NormKind::kRms, [&]<bool kRms>() {
    return visit_bool(args.bias != nullptr, [&]<bool kBias>() -> ForwardKernels<A> {
      return {norm_forward_kernel<A, X, Y, kRms, kBias, kRowsPerBlock, kTwo>,
              norm_forward_kernel<A, X, Y, kRms, kBias, 1, kTwo>, kTwo};
    });
  });
}

using AddRow = void (*)(const void*, const void*, void*, int64_t, const Dropout&, int64_t);

template <class A>
struct ForwardPath {
  ForwardKernels<A> kernels;
  AddRow add_row;
  AddBranchRow<A> add_branch_row = nullptr;
};

// The dtype of what is normed.
DType x_dtype_of(const NormForward& args) {
  return args.residual ? args.residual_out_dtype : args.input_dtype;
}

// in_halves: where x and output are bfloat16.
template <class A>
ForwardPath<A> path_of(const NormForward& args, bool in_halves) {
  ForwardPath<A> path;
  path.kernels = visit_numbers<A>(x_dtype_of(args), [&]<class X>() {
    return visit_numbers<A>(args.output_dtype, [&]<class Y>() {
      if constexpr (__is_same(X, BFloat16) && __is_same(X, Y)) {
        if (in_halves) return kernels_of<A, X, Y, true>(args);
      }
      return kernels_of<A, X, Y, false>(args);
    });
  });
  path.add_row = visit_numbers<A>(args.input_dtype, [&]<class T>() {
    return visit_numbers<A>(args.residual_dtype, [&]<class R>() {
      return visit_numbers<A>(args.residual_out_dtype, [&]<class O>() -> AddRow {
        return args.seed ? add_row<A, T, R, O, true> : add_row<A, T, R, O, false>;
      });
    });
  });
  return path;
}

// The weight and bias that rows share, as accumulators.
template <class A>
struct Shared {
  const A* weight;          // (cols,)
  const A* bias;            // (cols,) or null
  const A* gate = nullptr;  // (cols,) or null where nothing scales the branch
  const void* row_scale = nullptr;
  int64_t sample_rows = 0;
};

int64_t accumulator_size_of(const NormForward& args) {
  return args.input_dtype == DType::kFloat64 ? 8 : 4;
}

int rows_per_block_of(const NormForward& args) {
  const int64_t shared = (args.bias ? 2 : 1) * accumulator_size_of(args);
  return rows_per_block(args.cols, size_of(x_dtype_of(args)) + size_of(args.output_dtype) + shared);
}

template <class A>
void run_rows(const NormForward& args, const ForwardPath<A>& path, const Shared<A>& shared,
              const Dropout& dropout, int64_t begin, int64_t end) {
  const char* input = static_cast<const char*>(args.input);
  const char* residual = static_cast<const char*>(args.residual);
  char* output = static_cast<char*>(args.output);
  char* residual_out = static_cast<char*>(args.residual_out);
  const int64_t input_size = size_of(args.input_dtype);
  const int64_t residual_size = size_of(args.residual_dtype);
  const int64_t output_row_bytes = args.cols * size_of(args.output_dtype);
  const int64_t residual_out_row_bytes = args.cols * size_of(args.residual_out_dtype);

  for_each_row_block(begin, end, rows_per_block_of(args), [&](int64_t row, auto row_count) {
    ForwardRows<A> rows;
    for (int r = 0; r < row_count; ++r) {
      const RowIndex index = row_index(args.row_size, row + r);
      const char* x = input + row_offset(index, args.input_stride) * input_size;
      if (residual) {
        char* sum = residual_out + (row + r) * residual_out_row_bytes;
        const char* above = residual + row_offset(index, args.residual_stride) * residual_size;
        if (shared.gate) {
          const A factor = row_scale_of<A>(shared.row_scale, shared.sample_rows, row + r);
          path.add_branch_row(x, above, sum, args.cols,
                              {shared.gate, factor, args.seed ? &dropout : nullptr},
                              (row + r) * args.cols);
        } else {
          path.add_row(x, above, sum, args.cols, dropout, (row + r) * args.cols);
        }
        x = sum;
      }
      rows.x[r] = x;
      rows.output[r] = output + (row + r) * output_row_bytes;
    }
    rows.weight = shared.weight;
    rows.bias = shared.bias;
    rows.mean = args.mean ? static_cast<A*>(args.mean) + row : nullptr;
    rows.rstd = args.rstd ? static_cast<A*>(args.rstd) + row : nullptr;
    rows.cols = args.cols;
    rows.eps = args.eps;
    (row_count == kRowsPerBlock ? path.kernels.block : path.kernels.single)(rows);
  });
}

// The workspace: the widened weight, and the arrays that follow it.
struct ForwardLayout {
  int64_t bias;       // begin of the bias, widened
  int64_t row_bytes;  // of cols accumulators
  Slots slots;        // of a modulated norm: rows of kModulators, a thread's own
};

template <class A>
void run(const NormForward& args, const Plan& plan, const ForwardLayout& layout, void* workspace,
         const Context& context) {
  const ForwardPath<A> path = path_of<A>(args, true);
  A* const buffer = static_cast<A*>(workspace);
  const A* weight = path.kernels.ordered(
      widened<A>(args.weight, args.weight_dtype, args.weight_offset, 1.0, args.cols, buffer),
      args.cols, buffer);
  const A* bias = nullptr;
  if (args.bias) {
    A* own = buffer + layout.bias / sizeof(A);
    bias = path.kernels.ordered(widened<A>(args.bias, args.bias_dtype, 0.0, 0.0, args.cols, own),
                                args.cols, own);
  }
  const Dropout dropout = args.seed ? make_dropout(args.seed, args.dropout_p) : Dropout{};
  const Shared<A> shared{weight, bias};
  for_each_piece(context, plan.threads, args.rows, [&](int64_t begin, int64_t end) {
    run_rows(args, path, shared, dropout, begin, end);
  });
}

template <class A>
void run_modulated(const ModulatedNormForward& args, const Plan& plan, const ForwardLayout& layout,
                   void* workspace, const Context& context) {
  ForwardPath<A> path = path_of<A>(args, args.tokens >= kLeastOrderedTokens);
  path.add_branch_row =
      branch_row_of<A>(args.input_dtype, args.residual_dtype, args.residual_out_dtype);
  const bool scales_branch = args.gate || args.row_scale || args.seed;
  const Dropout dropout = args.seed ? make_dropout(args.seed, args.dropout_p) : Dropout{};
  const int64_t row_size = layout.row_bytes / static_cast<int64_t>(sizeof(A));
  const int64_t share = ceil_div(args.rows, plan.threads);
  for_each_piece(context, plan.threads, args.rows, [&](int64_t begin, int64_t end) {
    A* own = static_cast<A*>(layout.slots.of(workspace, begin / share));
    for (int64_t row = begin, last; row < end; row = last) {
      const int64_t group = row / args.tokens;
      last = std::min(end, (group + 1) * args.tokens);
      const RowIndex index = row_index(args.group_size, group);
      Shared<A> shared{};
      shared.weight =
          path.kernels.ordered(widened_row<A>(args.weight, args.weight_dtype, args.weight_offset,
                                              1.0, index, args.scale_stride, args.cols, own),
                               args.cols, own);
      if (args.bias) {
        A* bias = own + row_size;
        shared.bias =
            path.kernels.ordered(widened_row<A>(args.bias, args.bias_dtype, 0.0, 0.0, index,
                                                args.shift_stride, args.cols, bias),
                                 args.cols, bias);
      }
      if (scales_branch) {
        shared.gate = widened_row<A>(args.gate, args.gate_dtype, 0.0, 1.0, index, args.gate_stride,
                                     args.cols, own + 2 * row_size);
        shared.row_scale = args.row_scale;
        shared.sample_rows = args.sample_rows;
      }
      run_rows(args, path, shared, dropout, row, last);
    }
  });
}

int64_t forward_row_bytes(const NormForward& args) {
  int64_t element = size_of(args.input_dtype) + size_of(args.output_dtype);
  if (args.residual) element += size_of(args.residual_dtype) + size_of(args.residual_out_dtype);
  return element * args.cols;
}

Plan plan_norm_forward(const NormForward& args, const Machine& machine, ForwardLayout& layout) {
  const int64_t accumulator_size = accumulator_size_of(args);
  layout.row_bytes = padded_bytes(args.cols, accumulator_size);
  const bool orders = x_dtype_of(args) == DType::kBFloat16 && args.output_dtype == DType::kBFloat16;
  const bool widens_weight =
      orders || !is_wide(args.weight, args.weight_dtype, args.weight_offset, accumulator_size);
  const bool widens_bias =
      args.bias && (orders || !is_wide(args.bias, args.bias_dtype, 0.0, accumulator_size));
  layout.bias = widens_weight ? layout.row_bytes : 0;
  const int64_t rate = args.seed ? kRandomBytes : kBytes;
  const int64_t threads =
      threads_for(args.rows * forward_row_bytes(args) / rate, args.rows, machine);
  return {.workspace_bytes = layout.bias + (widens_bias ? layout.row_bytes : 0),
          .kernel_name = "norm_forward_kernel",
          .rows_per_tile = rows_per_block_of(args),
          .splits = args.rows,
          .reason = threads > 1      ? "rows spread over threads"
                    : args.rows <= 1 ? "one row is not cut"
                                     : "too small for a parallel region",
          .threads = threads};
}

void run_norm_forward(const NormForward& args, const Plan& plan, const ForwardLayout& layout,
                      void* workspace, const Context& context) {
  if (args.input_dtype == DType::kFloat64) {
    run<double>(args, plan, layout, workspace, context);
  } else {
    run<float>(args, plan, layout, workspace, context);
  }
}

Plan plan_modulated(const ModulatedNormForward& args, const Machine& machine,
                    ForwardLayout& layout) {
  Plan plan = plan_norm_forward(args, machine, layout);
  layout.slots = {.begin = 0, .bytes = kModulators * layout.row_bytes};
  plan.workspace_bytes = layout.slots.end(plan.threads);
  return plan;
}

void run_modulated_norm_forward(const ModulatedNormForward& args, const Plan& plan,
                                const ForwardLayout& layout, void* workspace,
                                const Context& context) {
  if (args.input_dtype == DType::kFloat64) {
    run_modulated<double>(args, plan, layout, workspace, context);
  } else {
    run_modulated<float>(args, plan, layout, workspace, context);
  }
}

}  // namespace

Operator<NormForward> norm_forward() {
  return operator_of<NormForward, ForwardLayout, plan_norm_forward, run_norm_forward>();
}
Operator<ModulatedNormForward> modulated_norm_forward() {
  return operator_of<ModulatedNormForward, ForwardLayout, plan_modulated,
                     run_modulated_norm_forward>();
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
