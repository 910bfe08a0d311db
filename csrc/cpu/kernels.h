// The operators of this CPU level, gathered into its table by kernels.cpp.
#pragma once

#include "ops/backend.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

ONEPASS_OPERATORS(ONEPASS_DECLARE_OPERATOR)
ONEPASS_CPU_OPERATORS(ONEPASS_DECLARE_OPERATOR)

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
