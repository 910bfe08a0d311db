// The one symbol that leaves a CPU level: its table.
#include "cpu/kernels.h"

#include "cpu/ceilings.h"

#define ONEPASS_JOIN_(a, b) a##b
#define ONEPASS_JOIN(a, b) ONEPASS_JOIN_(a, b)
#define ONEPASS_TEXT_(a) #a
#define ONEPASS_TEXT(a) ONEPASS_TEXT_(a)

extern "C" onepass::Backend ONEPASS_JOIN(onepass_cpu_kernels_, ONEPASS_ISA)();

extern "C" onepass::Backend ONEPASS_JOIN(onepass_cpu_kernels_, ONEPASS_ISA)() {
#define ONEPASS_TAKE_OPERATOR(name, Args) .name = onepass::cpu::name(),
  return {.name = ONEPASS_TEXT(ONEPASS_ISA),
          .fma_ceiling = onepass::cpu::fma_ceiling,
          .bf16_dot_ceiling = onepass::cpu::bf16_dot_ceiling,
          .int8_dot_ceiling = onepass::cpu::int8_dot_ceiling,
          ONEPASS_OPERATORS(ONEPASS_TAKE_OPERATOR) ONEPASS_CPU_OPERATORS(ONEPASS_TAKE_OPERATOR)};
}
