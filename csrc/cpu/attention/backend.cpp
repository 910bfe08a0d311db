// Which kernel a call of attention takes.
#include "cpu/attention/attention.h"
#include "cpu/kernels.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

AttentionBackend attention_backend() {
  return {.forward = plain_attention_forward(), .backward = plain_attention_backward()};
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
