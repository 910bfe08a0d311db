// The families' entry points of this CPU level, gathered into its table by kernels.cpp.
#pragma once

#include "ops/backend.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

AttentionBackend attention_backend();
Operator<AttentionDecode> attention_decode();
NormBackend norm_backend();
DropoutBackend dropout_backend();
Operator<GradientNorm> gradient_norm();
Operator<ScaleGradients> scale_gradients();
Operator<OptimizerStep> optimizer_step();

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
