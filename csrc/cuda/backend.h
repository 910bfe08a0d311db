// The families' entry points of the CUDA back end.
#pragma once

#include "ops/backend.h"

namespace onepass::cuda {

NormBackend norm_backend();
DropoutBackend dropout_backend();

}  // namespace onepass::cuda
