// The contract of the linear family between ops/linear.cpp and a back end.
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "core/dtype.h"

namespace onepass {

// Which product of a linear layer: output = input weight^T + bias, dinput = doutput weight, and
// dweight = doutput^T input.
enum class LinearKind { kForward, kInput, kWeight };

// output[i][j] = bias[j] + sum over k of left[i][k] * right[k][j].
struct LinearProduct {
  // Element (i, k) of left lies left_row * i + left_step * k elements from the first, one of which
  // strides is 1; likewise (k, j) of right.
  const void* left;
  const void* right;
  const void* bias;  // (cols,) contiguous, or null
  void* output;      // (rows, cols) contiguous
  void* left_sums;   // (rows,) contiguous: the sum over k of left; or null
  int64_t rows;
  int64_t cols;
  int64_t depth;  // of k
  int64_t left_row;
  int64_t left_step;
  int64_t right_step;
  int64_t right_col;
  DType left_dtype;
  DType right_dtype;
  DType bias_dtype;
  DType output_dtype;
  DType sums_dtype;
  LinearKind kind;
};

}  // namespace onepass
