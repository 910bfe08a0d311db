// The CUDA back end's table.
#include "cuda/backend.h"

extern "C" onepass::Backend onepass_cuda_kernels() {
  return {.name = "cuda",
          .norm = {.forward = onepass::cuda::norm_forward(),
                   .backward = onepass::cuda::norm_backward()},
          .dropout = {.forward = onepass::cuda::dropout_forward()},
          .optimizer = {.norm = onepass::cuda::gradient_norm(),
                        .scale = onepass::cuda::scale_gradients(),
                        .step = onepass::cuda::optimizer_step()},
          .attention = onepass::cuda::attention_backend(),
          .attention_decode = onepass::cuda::attention_decode(),
          .fma_ceiling = nullptr,
          .bf16_dot_ceiling = nullptr};
}
