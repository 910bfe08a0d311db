// The operators of the CUDA back end.
#pragma once

#include "ops/backend.h"

namespace onepass::cuda {

Operator<NormForward> norm_forward();
Operator<NormBackward> norm_backward();
Operator<DropoutForward> dropout_forward();
Operator<GradientNorm> gradient_norm();
Operator<ScaleGradients> scale_gradients();
Operator<OptimizerStep> optimizer_step();
AttentionBackend attention_backend();
Operator<AttentionDecode> attention_decode();

}  // namespace onepass::cuda
