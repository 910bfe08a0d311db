// Which kernels a call of attention takes.
#include "cuda/attention/attention.h"
#include "cuda/backend.h"

namespace onepass::cuda {
namespace {

// Tiles of 16-bit rows where they fit; all else is the plain kernels.
template <class Args, auto tiled, auto plain>
Operator<Args> by_shape() {
  static constexpr auto of = [](const Args& args) { return is_tiled(args) ? tiled() : plain(); };
  return {
      .plan = [](const Args& args, const Machine& machine) { return of(args).plan(args, machine); },
      .run = [](const Args& args, const Plan& plan, void* workspace,
                const Context& context) { of(args).run(args, plan, workspace, context); }};
}

}  // namespace

Operator<AttentionForward> attention_forward() {
  return by_shape<AttentionForward, tiled_attention_forward, plain_attention_forward>();
}

Operator<AttentionBackward> attention_backward() {
  return by_shape<AttentionBackward, tiled_attention_backward, plain_attention_backward>();
}

}  // namespace onepass::cuda
