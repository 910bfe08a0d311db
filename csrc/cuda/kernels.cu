// The CUDA back end's table.
#include "cuda/backend.h"

extern "C" onepass::Backend onepass_cuda_kernels() {
#define ONEPASS_TAKE_OPERATOR(name, Args) .name = onepass::cuda::name(),
  return {.name = "cuda",
          .fma_ceiling = nullptr,
          .bf16_dot_ceiling = nullptr,
          .int8_dot_ceiling = nullptr,
          ONEPASS_OPERATORS(ONEPASS_TAKE_OPERATOR)};
}
