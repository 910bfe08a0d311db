// Chooses the kernel for a call of attention.
#include "cpu/attention/attention.h"
#include "cpu/kernels.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

namespace {

// float64 is for checking gradients, not for speed.
template <class Args>
bool is_float64(const Args& args) {
  return args.dtype == DType::kFloat64;
}

}  // namespace

Operator<AttentionForward> attention_forward() {
  return either_of<AttentionForward, is_float64, plain_attention_forward,
                   tiled_attention_forward>();
}

Operator<AttentionBackward> attention_backward() {
  return either_of<AttentionBackward, is_float64, plain_attention_backward,
                   tiled_attention_backward>();
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
