// The two halves of the norm family, and the bytes of a row that their plans go by.
#pragma once

#include "ops/norm.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

int64_t forward_row_bytes(const NormForward& args);
Plan plan_norm_forward(const NormForward& args, const Machine& machine);
void run_norm_forward(const NormForward& args, const Plan& plan, void* workspace,
                      const Context& context);

Plan plan_norm_backward(const NormBackward& args, const Machine& machine);
void run_norm_backward(const NormBackward& args, const Plan& plan, void* workspace,
                       const Context& context);

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
