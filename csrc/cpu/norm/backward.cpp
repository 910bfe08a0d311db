// Layer norm and RMS norm, backward: every gradient in one pass over memory.
//
// With g = doutput * weight and h = (x - mean) * rstd per row,
//   dx = rstd * (g - mean(g) - h * mean(g * h)) + dresidual_out     (rms: without mean(g))
//   dweight = sum over rows of doutput * h, dbias = sum over rows of doutput.
// Two sweeps over a block of rows: the first sums g and g * h, the second, over rows that are still
// in L1, writes dx and adds to dweight and dbias, whose loads and stores the block's rows share.
//
// Rows are divided into chunks whose number depends on the shape alone. A chunk sums runs of 64
// rows, and then the runs, into its own float32 partials. At the end the partials are added in a
// fixed tree: the same bits for any number of threads, and an error that grows slowly with the
// rows. Bytes per element: doutput + x + dx (+ dresidual_out). Done when it runs at the speed of
// memory for those bytes.
//
// A modulated norm has a weight, and so a sum, for each group of rows: its chunks are parts of a
// group. If a group is a single chunk, its sum is the gradient.
#include "cpu/branch.h"
#include "cpu/kernels.h"
#include "cpu/lines.h"
#include "cpu/normed_rows_backward.h"
#include "cpu/parallel.h"
#include "cpu/pieces.h"
#include "cpu/random.h"
#include "cpu/row_sums.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

// Rows in a run of a modulated norm. Most of its groups are one chunk, so that no later summation
// reduces the error of a run.
constexpr int64_t kModulatedRunRows = 32;

int64_t accumulator_size_of(const NormBackward& args) {
  return args.x_dtype == DType::kFloat64 ? 8 : 4;
}

int rows_per_block_of(const NormBackward& args) {
  const int64_t shared = 3 * accumulator_size_of(args);
  return rows_per_block(args.cols,
                        size_of(args.doutput_dtype) + 2 * size_of(args.x_dtype) + shared);
}

// First sweep: mean_g and mean_gh of each row. Prefetches the next rows, and dx, which the second
// sweep writes: layer norm of 2048x1024 in float32 takes 690 instead of 870 us (Xeon, AVX-512, two
// threads). In bfloat16, where instructions bind, only the former gains.
// kTwo as in norm_backward_kernel.
template <class A, class D, class X, bool kRms, bool kTwo>
void norm_backward_sums_kernel(BackwardRows<A>& rows, int row_count) {
  for (int r = 0; r < row_count; ++r) {
    const D* doutput = static_cast<const D*>(rows.doutput[r]);
    const X* x = static_cast<const X*>(rows.x[r]);
    const char* dx = static_cast<const char*>(rows.dx[r]);
    const Vec<A> mean = broadcast<A>(rows.mean[r]);
    // scalar: g = doutput[j] * weight[j]; sum_gh += g * (x[j] - mean); sum_g += g
    const auto add = [&](Vec<A>* sum, Vec<A> d, Vec<A> weight, Vec<A> v)
                         __attribute__((always_inline)) {
                           const Vec<A> g = d * weight;
                           sum[0] = fma<A>(g, kRms ? v : v - mean, sum[0]);
                           if constexpr (!kRms) sum[1] += g;
                         };
    const auto one = [&](Vec<A>* sum, int64_t j, auto count) __attribute__((always_inline)) {
      if constexpr (decltype(count)::kWhole) {
        prefetch_ahead(doutput + j);
        prefetch_ahead(x + j);
        if (sizeof(X) >= 4 && dx) __builtin_prefetch(dx + j * sizeof(X), 1);
      }
      add(sum, load<A>(doutput + j, count), load<A>(rows.weight + j, count), load<A>(x + j, count));
    };
    const auto two = [&](Vec<A>* sum, int64_t j) __attribute__((always_inline)) {
      const Two<A> d = load_two<true, A>(doutput + j), v = load_two<true, A>(x + j);
      const Two<A> weight = load_two<false, A>(rows.weight + j);
      add(sum, d.first, weight.first, v.first);
      add(sum, d.second, weight.second, v.second);
    };
    constexpr int kSums = kRms ? 1 : 2;
    const auto sums = [&] {
      if constexpr (kTwo) {
        return sum_twos<A, kSums>(rows.cols, two, one);
      } else {
        return sum_columns<A, kSums>(rows.cols, one);
      }
    }();
    const A n = static_cast<A>(rows.cols);
    rows.mean_gh[r] = sums[0] * rows.rstd[r] / n;
    if constexpr (!kRms) rows.mean_g[r] = sums[1] / n;
  }
}

template <class A>
struct BackwardKernels {
  void (*sums)(BackwardRows<A>&, int);
  void (*block)(const BackwardRows<A>&, int64_t, int64_t);
  void (*single)(const BackwardRows<A>&, int64_t, int64_t);
  bool in_halves;  // weight and sums have the order of to_halves_order
};

template <class A, class D, class X, class DX, bool kTwo>
BackwardKernels<A> kernels_of(const NormBackward& args) {
  const auto with = [&]<bool kRms, bool kBias>() {
    return visit_bool(args.dresidual_out != nullptr, [&]<bool kResidual>() -> BackwardKernels<A> {
      return {norm_backward_sums_kernel<A, D, X, kRms, kTwo>,
              norm_backward_kernel<A, D, X, DX, kRms, kBias, kResidual, kRowsPerBlock, kTwo>,
              norm_backward_kernel<A, D, X, DX, kRms, kBias, kResidual, 1, kTwo>, kTwo};
    });
  };
  if (args.kind != NormKind::kRms) return with.template operator()<false, true>();
  // An RMS norm has a bias if it is modulated.
  return args.dbias ? with.template operator()<true, true>()
                    : with.template operator()<true, false>();
}

// dx is written directly if it has one output of x's dtype and no dropout; otherwise it goes
// through L1 as accumulators, a tile of columns at a time.
bool is_direct(const NormBackward& args) {
  if (args.dinput && args.dresidual) return false;
  if (args.dinput) return !args.seed && args.dinput_dtype == args.x_dtype;
  return args.dresidual && args.dresidual_dtype == args.x_dtype;
}

// in_halves: where all tensors of rows are bfloat16.
template <class A>
BackwardKernels<A> path_of(const NormBackward& args, bool direct, bool in_halves) {
  return visit_numbers<A>(args.doutput_dtype, [&]<class D>() {
    return visit_numbers<A>(args.x_dtype, [&]<class X>() {
      if (!direct) return kernels_of<A, D, X, A, false>(args);
      if constexpr (__is_same(X, BFloat16) && __is_same(D, X)) {
        if (in_halves) return kernels_of<A, D, X, X, true>(args);
      }
      return kernels_of<A, D, X, X, false>(args);
    });
  });
}

// One row's tile of dx, rounded into an output, through dropout if there is one.
template <class A>
void emit(const A* dx, void* output, DType dtype, int64_t count, const Dropout* dropout,
          const KeepTile& keep) {
  visit_numbers<A>(dtype, [&]<class T>() {
    T* out = static_cast<T*>(output);
    for_each_vector<A>(0, count, [&](int64_t j, auto lanes) {
      Vec<A> v = load<A>(dx + j, lanes);
      if (dropout) v *= keep.scale<A>(*dropout, j);
      store<A>(out + j, v, lanes);
    });
  });
}

// Computes the rows of a call.
template <class A>
class Runner {
 public:
  // in_halves as of path_of; `scaled`, if there is one, has the scales of the branch.
  Runner(const NormBackward& args, bool in_halves, int64_t run_rows,
         const ModulatedNormBackward* scaled)
      : args_(args),
        run_rows_(run_rows),
        scaled_(scaled),
        block_rows_(scaled ? 1 : rows_per_block_of(args)),
        direct_(!scaled && is_direct(args)),
        kernels_(path_of<A>(args, direct_, in_halves)),
        dropout_(args.seed ? make_dropout(args.seed, args.dropout_p) : Dropout{}) {}

  // Accumulators of one sum over rows, and of all of them.
  int64_t sum_size() const { return padded_bytes(args_.cols, sizeof(A)) / sizeof(A); }
  int64_t sums_size() const { return (scaled_ && scaled_->gate ? 3 : 2) * sum_size(); }

  // The weight as run_chunk takes it; `buffer` (sum_size,) may be `weight`.
  const A* ordered(const A* weight, A* buffer) const {
    if constexpr (sizeof(A) == 4) {
      if (kernels_.in_halves) {
        to_halves_order(weight, args_.cols, buffer);
        return buffer;
      }
    }
    return weight;
  }

  // Computes dx of rows [first, last), and in `total` the sums for dweight, dbias and, with a gate,
  // dgate. A chunk of one run adds directly to its total, a longer one through `run`.
  void run_chunk(int64_t first_row, int64_t last_row, const A* weight, const A* gate, A* total,
                 A* run) const {
    const int64_t size = sums_size();
    if (last_row - first_row <= run_rows_) run = total;
    std::fill(total, total + size, A(0));
    BackwardRows<A> rows;
    rows.weight = weight;
    rows.cols = args_.cols;
    rows.dweight = run;
    rows.dbias = run + sum_size();
    for (int r = 0; r < kRowsPerBlock; ++r) rows.mean_g[r] = A(0);
    for_each_run(first_row, last_row, run_rows_, total, run, size, [&](int64_t row, int64_t end) {
      for_each_row_block(row, end, block_rows_, [&](int64_t first, auto row_count) {
        run_block(rows, first, row_count, gate, run + 2 * sum_size());
      });
    });
    if constexpr (sizeof(A) == 4) {
      if (!kernels_.in_halves) return;
      from_halves_order(total, args_.cols);
      from_halves_order(total + sum_size(), args_.cols);
    }
  }

 private:
  void run_block(BackwardRows<A>& rows, int64_t row, auto row_count, const A* gate,
                 A* dgate) const {
    const int64_t x_size = size_of(args_.x_dtype);
    int64_t branch[kRowsPerBlock] = {};  // element offsets
    BranchScale<A> scale[kRowsPerBlock] = {};
    for (int r = 0; r < row_count; ++r) {
      const RowIndex index = row_index(args_.row_size, row + r);
      rows.doutput[r] =
          at(args_.doutput, row_offset(index, args_.doutput_stride) * size_of(args_.doutput_dtype));
      rows.x[r] = at(args_.x, row_offset(index, args_.x_stride) * x_size);
      rows.dresidual_out[r] =
          args_.dresidual_out
              ? at(args_.dresidual_out, row_offset(index, args_.dresidual_out_stride) * x_size)
              : nullptr;
      rows.mean[r] = args_.mean ? static_cast<const A*>(args_.mean)[row + r] : A(0);
      rows.rstd[r] = static_cast<const A*>(args_.rstd)[row + r];
      if (scaled_) {
        scale[r] = {gate, row_scale_of<A>(scaled_->row_scale, scaled_->sample_rows, row + r),
                    args_.seed ? &dropout_ : nullptr};
        // It is not read until the sums are complete, and a row is too short for the hardware's
        // prefetchers.
        branch[r] = row_offset(index, scaled_->branch_stride);
        if (scaled_->branch && scale[r].row != A(0)) {
          prefetch_row(at(scaled_->branch, branch[r] * size_of(args_.dinput_dtype)),
                       args_.cols * size_of(args_.dinput_dtype));
        }
        if (rows.dresidual_out[r]) prefetch_row(rows.dresidual_out[r], args_.cols * x_size);
      }
    }
    for (int r = 0; r < row_count; ++r) {
      rows.dx[r] = direct_ ? at(args_.dinput ? args_.dinput : args_.dresidual,
                                (row + r) * args_.cols * x_size)
                           : nullptr;
    }
    kernels_.sums(rows, row_count);
    const auto apply = row_count == kRowsPerBlock ? kernels_.block : kernels_.single;
    if (direct_) {
      apply(rows, 0, args_.cols);
      return;
    }
    const int64_t dinput_size = size_of(args_.dinput_dtype);
    const int64_t dresidual_size = size_of(args_.dresidual_dtype);
    alignas(64) A dx[decltype(row_count)::value][kDropoutTile];
    for (int r = 0; r < row_count; ++r) rows.dx[r] = dx[r];
    KeepTile keep;
    for (int64_t begin = 0; begin < args_.cols; begin += kDropoutTile) {
      const int64_t end = std::min(begin + kDropoutTile, args_.cols);
      apply(rows, begin, end);
      for (int r = 0; r < row_count; ++r) {
        const int64_t element = (row + r) * args_.cols + begin;
        if (scaled_) {
          const BranchScale<A> of_tile{gate + begin, scale[r].row, scale[r].dropout};
          branch_backward_kernel<A>(
              dx[r], of_tile, keep, element,
              scaled_->branch ? at(scaled_->branch, (branch[r] + begin) * dinput_size) : nullptr,
              args_.dinput_dtype, args_.dinput ? at(args_.dinput, element * dinput_size) : nullptr,
              args_.dinput_dtype, dgate + begin, end - begin);
        } else if (args_.dinput) {
          if (args_.seed) keep.fill(dropout_, element, end - begin);
          emit<A>(dx[r], at(args_.dinput, element * dinput_size), args_.dinput_dtype, end - begin,
                  args_.seed ? &dropout_ : nullptr, keep);
        }
        if (args_.dresidual) {
          emit<A>(dx[r], at(args_.dresidual, element * dresidual_size), args_.dresidual_dtype,
                  end - begin, nullptr, keep);
        }
      }
    }
  }

  static char* at(const void* base, int64_t offset) {
    return const_cast<char*>(static_cast<const char*>(base)) + offset;
  }

  const NormBackward& args_;
  int64_t run_rows_;
  const ModulatedNormBackward* scaled_;  // null where nothing scales the branch
  // With a gate a row is read or written in six tensors, and four rows at a time do not stay in L1
  // (2048x1024 in bfloat16 took a third longer).
  int block_rows_;
  bool direct_;
  BackwardKernels<A> kernels_;
  Dropout dropout_;
};

template <class A>
void run(const NormBackward& args, const Plan& plan, void* workspace, const Context& context) {
  const Runner<A> runner(args, true, kRunRows, nullptr);
  A* buffer = static_cast<A*>(workspace);
  // (chunks, total and run, dweight and dbias, sum_size)
  A* partials = buffer + runner.sum_size();
  const int64_t chunk_stride = 2 * runner.sums_size();
  const A* weight = runner.ordered(
      widened<A>(args.weight, args.weight_dtype, args.weight_offset, 1.0, args.cols, buffer),
      buffer);
  for_each_piece(context, plan.threads, plan.splits, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      A* total = partials + chunk * chunk_stride;
      runner.run_chunk(args.rows * chunk / plan.splits, args.rows * (chunk + 1) / plan.splits,
                       weight, nullptr, total, total + runner.sums_size());
    }
  });
  const auto reduce = [&](int64_t begin, int64_t end) {
    if (args.dweight) {
      reduce_partials<A>(partials, plan.splits, chunk_stride, begin, end, args.dweight,
                         args.dweight_dtype);
    }
    if (args.dbias) {
      reduce_partials<A>(partials + runner.sum_size(), plan.splits, chunk_stride, begin, end,
                         args.dbias, args.dbias_dtype);
    }
  };
  const int64_t partial_bytes = 2 * plan.splits * args.cols * static_cast<int64_t>(sizeof(A));
  const Machine machine{.threads = static_cast<int32_t>(plan.threads)};
  for_each_piece(context, threads_for(partial_bytes / kBytes, args.cols, machine), args.cols,
                 reduce);
}

// The workspace of a modulated norm.
struct ModulatedLayout {
  int64_t row_bytes;  // of cols accumulators
  int64_t sums;       // over rows: dscale, dshift and, with a gate, dgate
  int64_t chunks;     // of a group
  Slots slots;        // scale and gate widened, a total, a run's sums
};

ModulatedLayout modulated_layout(const ModulatedNormBackward& args) {
  const int64_t row_bytes = padded_bytes(args.cols, accumulator_size_of(args));
  const int64_t sums = args.gate ? 3 : 2;
  const int64_t chunks = chunks_of(args.tokens, args.cols);
  const int64_t partials = chunks > 1 ? args.groups * chunks * sums * row_bytes : 0;
  return {row_bytes, sums, chunks, {.begin = partials, .bytes = (2 + 2 * sums) * row_bytes}};
}

template <class A>
void run_modulated(const ModulatedNormBackward& args, const Plan& plan,
                   const ModulatedLayout& layout, void* workspace, const Context& context) {
  const bool scales_branch = args.gate || args.row_scale || args.seed;
  const Runner<A> runner(args, args.tokens >= kLeastOrderedTokens, kModulatedRunRows,
                         scales_branch ? &args : nullptr);
  const int64_t chunks = layout.chunks;
  const int64_t row_size = runner.sum_size();
  A* const partials = static_cast<A*>(workspace);
  const struct {
    void* gradient;
    DType dtype;
  } outputs[] = {{args.dweight, args.dweight_dtype},
                 {args.dbias, args.dbias_dtype},
                 {args.dgate, args.gate_dtype}};

  const int64_t share = ceil_div(plan.splits, plan.threads);
  for_each_piece(context, plan.threads, plan.splits, [&](int64_t begin, int64_t end) {
    A* own = static_cast<A*>(layout.slots.of(workspace, begin / share));
    const A* weight = nullptr;
    const A* gate = nullptr;
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t group = piece / chunks;
      const int64_t chunk = piece % chunks;
      if (chunk == 0 || piece == begin) {
        const RowIndex index = row_index(args.group_size, group);
        weight = runner.ordered(widened_row<A>(args.weight, args.weight_dtype, args.weight_offset,
                                               1.0, index, args.scale_stride, args.cols, own),
                                own);
        if (scales_branch) {
          gate = widened_row<A>(args.gate, args.gate_dtype, 0.0, 1.0, index, args.gate_stride,
                                args.cols, own + row_size);
        }
      }
      A* run = own + 2 * row_size;
      A* total = chunks > 1 ? partials + piece * runner.sums_size() : run + runner.sums_size();
      const int64_t first_row = group * args.tokens;
      runner.run_chunk(first_row + args.tokens * chunk / chunks,
                       first_row + args.tokens * (chunk + 1) / chunks, weight, gate, total, run);
      for (int64_t s = 0; s < layout.sums && chunks == 1; ++s) {
        if (!outputs[s].gradient) continue;
        round_line(total + s * row_size, args.cols, outputs[s].gradient, outputs[s].dtype,
                   group * args.cols);
      }
    }
  });
  if (chunks == 1) return;
  const int64_t bytes = plan.splits * layout.sums * args.cols * static_cast<int64_t>(sizeof(A));
  const Machine machine{.threads = static_cast<int32_t>(plan.threads)};
  const int64_t elements = args.groups * args.cols;
  for_each_piece(context, threads_for(bytes / kBytes, elements, machine), elements,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t first = begin, last; first < end; first = last) {
                     const int64_t group = first / args.cols;
                     last = std::min(end, (group + 1) * args.cols);
                     for (int64_t s = 0; s < layout.sums; ++s) {
                       if (!outputs[s].gradient) continue;
                       reduce_partials<A>(
                           partials + group * chunks * runner.sums_size() + s * row_size, chunks,
                           runner.sums_size(), first - group * args.cols, last - group * args.cols,
                           static_cast<char*>(outputs[s].gradient) +
                               group * args.cols * size_of(outputs[s].dtype),
                           outputs[s].dtype);
                     }
                   }
                 });
}

Plan plan_norm_backward(const NormBackward& args, const Machine& machine) {
  const int64_t chunks = chunks_of(args.rows, args.cols);
  const int64_t bytes = size_of(args.doutput_dtype) + 2 * size_of(args.x_dtype);
  const int64_t rate = args.seed ? kRandomBytes : kBytes;
  const int64_t threads = threads_for(args.rows * args.cols * bytes / rate, chunks, machine);
  return {.workspace_bytes = (1 + 4 * chunks) * padded_bytes(args.cols, accumulator_size_of(args)),
          .kernel_name = "norm_backward_kernel",
          .rows_per_tile = rows_per_block_of(args),
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

Plan plan_modulated(const ModulatedNormBackward& args, const Machine& machine,
                    ModulatedLayout& layout) {
  layout = modulated_layout(args);
  Plan plan = plan_norm_backward(args, machine);
  plan.splits = args.groups * layout.chunks;
  if (args.gate || args.row_scale || args.seed) plan.rows_per_tile = 1;
  plan.threads = std::clamp<int64_t>(plan.splits, 1, plan.threads);
  plan.workspace_bytes = layout.slots.end(plan.threads);
  return plan;
}

void run_modulated_norm_backward(const ModulatedNormBackward& args, const Plan& plan,
                                 const ModulatedLayout& layout, void* workspace,
                                 const Context& context) {
  if (args.x_dtype == DType::kFloat64) {
    run_modulated<double>(args, plan, layout, workspace, context);
  } else {
    run_modulated<float>(args, plan, layout, workspace, context);
  }
}

}  // namespace

Operator<NormBackward> norm_backward() { return {plan_norm_backward, run_norm_backward}; }
Operator<ModulatedNormBackward> modulated_norm_backward() {
  return operator_of<ModulatedNormBackward, ModulatedLayout, plan_modulated,
                     run_modulated_norm_backward>();
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
