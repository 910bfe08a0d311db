// The contract of the dropout family between ops/dropout.cpp and a back end.
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "core/dtype.h"
#include "core/rows.h"

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

// output = residual + row_scale * column_scale * dropout(input). A row whose row_scale is 0 is
// residual's: its input is not read.
struct BranchForward {
  const void* input;         // (rows, cols)
  const void* residual;      // (rows, cols) or null, which is 0
  const void* column_scale;  // (cols,) contiguous, or null, which is 1
  const void* row_scale;  // (samples,) contiguous, in the accumulator's dtype, or null, which is 1
  const int64_t* seed;    // (2,) or null, which is no dropout
  void* output;           // (rows, cols) contiguous
  int64_t rows;
  int64_t cols;
  int64_t sample_rows;         // that share an element of row_scale
  int64_t row_size[kRowDims];  // product is rows
  RowStride input_stride;
  RowStride residual_stride;
  DType input_dtype;
  DType residual_dtype;
  DType column_scale_dtype;
  DType output_dtype;
  double dropout_p;
};

// With d = row_scale * dropout(doutput), the same elements dropped:
//   dinput = d * column_scale, dcolumn_scale = sum over rows of d * branch.
struct BranchBackward {
  const void* doutput;       // (rows, cols)
  const void* branch;        // (rows, cols) input of the forward; null without dcolumn_scale
  const void* column_scale;  // (cols,) contiguous, or null
  const void* row_scale;     // (samples,) contiguous, or null
  const int64_t* seed;       // (2,) or null
  void* dinput;              // (rows, cols) contiguous, or null if not wanted
  void* dcolumn_scale;       // (cols,) contiguous, or null if not wanted
  int64_t rows;
  int64_t cols;
  int64_t sample_rows;
  int64_t row_size[kRowDims];
  RowStride doutput_stride;
  RowStride branch_stride;
  DType doutput_dtype;
  DType branch_dtype;
  DType column_scale_dtype;  // of dcolumn_scale too
  DType dinput_dtype;
  double dropout_p;
};

}  // namespace onepass
