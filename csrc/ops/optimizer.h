// The contract of the optimizer family between ops/optimizer.cpp and a back end. An operator takes
// all tensors of a call, of any sizes and dtypes, as one flat list of work.
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "core/dtype.h"

namespace onepass {

// One tensor, whose elements lie in `numel` consecutive places in whatever order.
struct FlatTensor {
  void* data;
  int64_t numel;
  DType dtype;
};

// Every tensor is cut into pieces of this many elements, the last one shorter.
inline constexpr int64_t kPieceElements = 4096;

struct FlatTensors {
  const FlatTensor* tensors;   // (count,)
  const int64_t* first_piece;  // (count + 1,) of each tensor, and behind the last one
  int64_t count;

  int64_t pieces() const { return first_piece[count]; }
};

// norm = (sum of |g|^order over all elements)^(1 / order), with order 1, 2 or infinity.
struct GradientNorm {
  FlatTensors gradients;
  double order;
  bool wide;     // sums in float64 throughout: a float64 tensor is among them
  double* norm;  // () in host memory
};

// g = g * factor, rounded once.
struct ScaleGradients {
  FlatTensors gradients;
  double factor;
};

struct OptimizerBackend {
  Operator<GradientNorm> norm;
  Operator<ScaleGradients> scale;
};

}  // namespace onepass
