// The operators of the CUDA back end.
#pragma once

#include "ops/backend.h"

namespace onepass::cuda {

ONEPASS_OPERATORS(ONEPASS_DECLARE_OPERATOR)

}  // namespace onepass::cuda
