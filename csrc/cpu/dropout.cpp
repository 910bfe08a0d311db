// Dropout, alone or with a residual add: output = input * (0 or scale) + residual.
//
// Nothing is stored but the output: the 0-or-scale factors are Philox values of the element index,
// drawn a tile at a time into L1 and drawn again by the backward, which is the same kernel on the
// gradient. Traffic: one read of each input and one write. Done when it runs at the speed of the
// generator, which is below that of memory on every level.
#include "core/visit.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/random.h"

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

// Without dropout only the add is left.
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

}  // namespace

Operator<DropoutForward> dropout_forward() { return {plan_forward, run_forward}; }

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
