// The kernels of attention on CPU, and which calls each of them serves.
#pragma once

#include "ops/attention.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// float64 alone: plain loops.
Operator<AttentionForward> plain_attention_forward();
Operator<AttentionBackward> plain_attention_backward();

// float32, bfloat16 and float16: tiles in registers.
Operator<AttentionForward> tiled_attention_forward();
Operator<AttentionBackward> tiled_attention_backward();

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
