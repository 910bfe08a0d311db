// The gradient of a linear layer's epilogue: doutput through dropout and the activation.
//
// A separate pass is cheaper. Computed while doutput is packed, the derivative would be computed
// again for each piece of 512 columns of both products: some 30 cycles of gelu per vector, next to
// its 512 multiply-adds or 256 dot products.
#include "cpu/activation.h"
#include "cpu/kernels.h"
#include "cpu/lines.h"
#include "cpu/pieces.h"
#include "cpu/random.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

Plan plan_epilogue_backward(const EpilogueBackward& args, const Machine& machine) {
  const int64_t bytes = size_of(args.doutput_dtype) + size_of(args.dpreactivation_dtype) +
                        (args.preactivation ? size_of(args.preactivation_dtype) : 0);
  const int64_t tiles = ceil_div(args.numel, kDropoutTile);
  return {.workspace_bytes = 0,
          .kernel_name = "epilogue_backward_kernel",
          .rows_per_tile = 1,
          .splits = tiles,
          .reason = "one pass",
          .threads = threads_for(args.numel * bytes / kRandomBytes, tiles, machine)};
}

template <class A>
void epilogue_backward_kernel(const EpilogueBackward& args, const Dropout& dropout, int64_t begin,
                              int64_t end) {
  KeepTile keep;
  A gradient[kDropoutTile], x[kDropoutTile];
  for (int64_t at = begin; at < end; at += kDropoutTile) {
    const int64_t count = std::min(kDropoutTile, end - at);
    widen_line(args.doutput, args.doutput_dtype, at, count, gradient);
    if (args.seed) keep.drop(dropout, at, count, gradient, gradient);
    if (args.preactivation) {
      widen_line(args.preactivation, args.preactivation_dtype, at, count, x);
      multiply_by_slope(args.activation, x, count, gradient);
    }
    round_line(gradient, count, args.dpreactivation, args.dpreactivation_dtype, at);
  }
}

void run_epilogue_backward(const EpilogueBackward& args, const Plan& plan, void*,
                           const Context& context) {
  const Dropout dropout = args.seed ? make_dropout(args.seed, args.dropout_p) : Dropout{};
  const auto kernel = args.doutput_dtype == DType::kFloat64 ? epilogue_backward_kernel<double>
                                                            : epilogue_backward_kernel<float>;
  // Pieces begin at whole tiles, so no two threads draw the same block.
  for_each_piece(context, plan.threads, plan.splits, [&](int64_t begin, int64_t end) {
    kernel(args, dropout, begin * kDropoutTile, std::min(end * kDropoutTile, args.numel));
  });
}

}  // namespace

Operator<EpilogueBackward> epilogue_backward() {
  return {plan_epilogue_backward, run_epilogue_backward};
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
