// The contract of the linear family between ops/linear.cpp and a back end.
#pragma once

#include <cstdint>

#include "core/activation.h"
#include "core/backend.h"
#include "core/dtype.h"
#include "ops/quantized_linear.h"

namespace onepass {

// Which product of a linear layer: output = input weight^T + bias, dinput = doutput weight, and
// dweight = doutput^T input.
enum class LinearKind { kForward, kInput, kWeight };

// How float32 factors of a layer's products are taken: bits of a mask. In Python they are those of
// onepass/reference/products.py.
inline constexpr int64_t kRoundedFactors = 1;    // of all products that no other bit names
inline constexpr int64_t kQuantizedForward = 2;  // of output = input weight^T
inline constexpr int64_t kQuantizedInput = 4;    // of dinput
inline constexpr int64_t kQuantizedWeight = 8;   // of dweight
inline constexpr int64_t kAllFactorBits = 15;

// The activations that may come after the forward's sums: the first of all. In Python,
// onepass._ops.linear.Activation.
inline constexpr int kLinearActivations = 5;

// From a sum of the forward to the output:
// output = residual + dropout(activation(preactivation)), and preactivation = sum.
struct LinearEpilogue {
  const void* residual;  // (rows, cols) contiguous, of output's dtype; or null
  void* preactivation;   // (rows, cols) contiguous; or null
  const int64_t* seed;   // (2,), or null, which is no dropout
  double dropout_p;
  Activation activation;
  DType preactivation_dtype;
};

// output[i][j] = bias[j] + sum over k of left[i][k] * right[k][j].
struct LinearProduct {
  // Element (i, k) of left lies left_row * i + left_step * k elements from the first, and one of
  // the two strides is 1; likewise (k, j) of right.
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
  LinearEpilogue epilogue{};  // of kForward
  // Factors that are both float32 are rounded to bfloat16, where the CPU multiplies pairs of those.
  bool rounds_factors{};
  // Factors that are both float32 are quantised to codes of 8 bits: a row of left and a column of
  // right by its largest magnitude each. This comes before rounds_factors.
  bool quantizes_factors{};
  // (2,), or null: left, whose rows are dense then, is rounded to codes stochastically.
  const int64_t* rounding_seed{};
  // For kWeight: output and left_sums already hold sums, in the dtype of sums, and the product is
  // added to them.
  bool accumulate{};
  // A quantised weight, or none. It is the right factor, and `right` has no memory: its transpose
  // for kForward, itself for kInput. Its numbers are converted to left's dtype.
  QuantizedWeight quantized{};
};

// dpreactivation = dropout(doutput) * activation'(preactivation).
struct EpilogueBackward {
  const void* doutput;        // (numel,) contiguous
  const void* preactivation;  // (numel,) contiguous; or null without an activation
  const int64_t* seed;        // (2,), or null, which is no dropout
  void* dpreactivation;       // (numel,) contiguous
  int64_t numel;
  double dropout_p;
  Activation activation;
  DType doutput_dtype;
  DType preactivation_dtype;
  DType dpreactivation_dtype;
};

}  // namespace onepass
