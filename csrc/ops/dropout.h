// The contract of the dropout family between ops/dropout.cpp and a back end.
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "core/dtype.h"

namespace onepass {

// output = dropout(input) + residual. The backward of dropout is the same map on the gradient, with
// the same seed, so one operator serves both.
struct DropoutForward {
  const void* input;     // (numel,) contiguous
  const void* residual;  // (numel,) contiguous, or null, which is 0
  const int64_t* seed;   // (2,) or null, which is no dropout: then there is a residual
  void* output;          // (numel,) contiguous
  int64_t numel;
  DType input_dtype;
  DType residual_dtype;
  DType output_dtype;
  double dropout_p;
};

}  // namespace onepass
