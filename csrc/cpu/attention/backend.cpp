// Which kernel a call of attention takes.
#include "cpu/attention/attention.h"
#include "cpu/kernels.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

namespace {

// float64 is for checking gradients, not for speed.
template <class Args, auto tiled, auto plain>
Operator<Args> by_dtype() {
  const auto pick = [](const Args& args) {
    return args.dtype == DType::kFloat64 ? plain() : tiled();
  };
  static constexpr auto of = pick;
  return {
      .plan = [](const Args& args, const Machine& machine) { return of(args).plan(args, machine); },
      .run = [](const Args& args, const Plan& plan, void* workspace,
                const Context& context) { of(args).run(args, plan, workspace, context); }};
}

}  // namespace

Operator<AttentionForward> attention_forward() {
  return by_dtype<AttentionForward, tiled_attention_forward, plain_attention_forward>();
}

Operator<AttentionBackward> attention_backward() {
  return by_dtype<AttentionBackward, tiled_attention_backward, plain_attention_backward>();
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
