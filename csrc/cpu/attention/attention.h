// The kernels that the attention family chooses from.
#pragma once

#include "ops/attention.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

Operator<AttentionForward> plain_attention_forward();
Operator<AttentionBackward> plain_attention_backward();

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
