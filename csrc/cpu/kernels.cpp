// The one symbol that leaves a CPU level: its table.
#include "cpu/kernels.h"

#include "cpu/ceilings.h"

#define ONEPASS_JOIN_(a, b) a##b
#define ONEPASS_JOIN(a, b) ONEPASS_JOIN_(a, b)
#define ONEPASS_TEXT_(a) #a
#define ONEPASS_TEXT(a) ONEPASS_TEXT_(a)

extern "C" onepass::Backend ONEPASS_JOIN(onepass_cpu_kernels_, ONEPASS_ISA)();

extern "C" onepass::Backend ONEPASS_JOIN(onepass_cpu_kernels_, ONEPASS_ISA)() {
  return {.name = ONEPASS_TEXT(ONEPASS_ISA),
          .norm = onepass::cpu::norm_backend(),
          .dropout = onepass::cpu::dropout_backend(),
          .optimizer = {.norm = onepass::cpu::gradient_norm(),
                        .scale = onepass::cpu::scale_gradients(),
                        .step = onepass::cpu::optimizer_step()},
          .attention = onepass::cpu::attention_backend(),
          .attention_decode = onepass::cpu::attention_decode(),
          .fma_ceiling = onepass::cpu::fma_ceiling,
          .bf16_dot_ceiling = onepass::cpu::bf16_dot_ceiling};
}
