// The contract of the norm family between ops/norm.cpp and a back end.
//
// A row is the flattened normalized_shape and is dense.
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "core/dtype.h"
#include "core/rows.h"

namespace onepass {

// Which statistics a row is normalised by; the numbers are those of the schemas and of Python.
// One byte: as four, the CUDA backward spills on sm_90.
enum class NormKind : uint8_t {
  kLayer = 0,  // mean and rstd
  kRms = 1,    // rstd alone, of x as it is
};
inline constexpr int64_t kNormKinds = 2;

// x = residual + dropout(input), or input itself without a residual;
// output = (x - mean) * rstd * (weight + weight_offset) + bias; kRms has no mean.
struct NormForward {
  const void* input;     // (rows, cols)
  const void* residual;  // (rows, cols) or null
  const void* weight;    // (cols,) or null, which is 1
  const void* bias;      // (cols,) or null, which is 0
  const int64_t* seed;   // (2,) or null, which is no dropout
  void* output;          // (rows, cols) contiguous
  void* residual_out;    // (rows, cols) contiguous, x rounded to its dtype; null without a residual
  void* mean;            // (rows,) contiguous in the accumulator's dtype; null if not kept or kRms
  void* rstd;            // (rows,) contiguous in the accumulator's dtype; null if not kept
  int64_t rows;
  int64_t cols;
  int64_t row_size[kRowDims];  // product is rows
  RowStride input_stride;
  RowStride residual_stride;
  DType input_dtype;
  DType residual_dtype;
  DType weight_dtype;
  DType bias_dtype;
  DType output_dtype;
  DType residual_out_dtype;
  double eps;
  double weight_offset;
  double dropout_p;
  NormKind kind;
};

// With g = doutput * (weight + weight_offset) and h = (x - mean) * rstd:
//   dx = rstd * (g - mean(g) - h * mean(g * h)) + dresidual_out     (kRms: without mean(g))
//   dinput = dropout(dx), dresidual = dx, dweight = sum over rows of doutput * h,
//   dbias = sum over rows of doutput.
struct NormBackward {
  const void* doutput;        // (rows, cols)
  const void* dresidual_out;  // (rows, cols) or null, which is 0; in x's dtype
  const void* x;              // (rows, cols) the normalised tensor: input or residual_out
  const void* weight;         // (cols,) or null
  const void* mean;           // (rows,) contiguous; null for kRms
  const void* rstd;           // (rows,) contiguous
  const int64_t* seed;        // (2,) or null
  void* dinput;               // (rows, cols) contiguous, or null if not wanted
  void* dresidual;            // (rows, cols) contiguous, or null if not wanted
  void* dweight;              // (cols,) or null if not wanted
  void* dbias;                // (cols,) or null if not wanted
  int64_t rows;
  int64_t cols;
  int64_t row_size[kRowDims];
  RowStride doutput_stride;
  RowStride dresidual_out_stride;
  RowStride x_stride;
  DType doutput_dtype;
  DType x_dtype;
  DType weight_dtype;
  DType dinput_dtype;
  DType dresidual_dtype;
  DType dweight_dtype;
  DType dbias_dtype;
  double weight_offset;
  double dropout_p;
  NormKind kind;
};

// A norm whose weight and bias are the rows of two tensors, scale and shift: `tokens` consecutive
// rows of input, a group, share one of each, and a gate. weight_offset is 1.
//   x = residual + row_scale * gate * dropout(input)
//   output = (x - mean) * rstd * (scale + weight_offset) + shift
// A norm after a residual add whose branch has a scale for each column is a modulated norm with one
// group: its scale, shift and gate are the norm's weight and bias and the scale of the columns.
struct ModulatedNormForward : NormForward {  // weight: scale, bias: shift, (groups, cols) or null
  const void* gate;                          // (groups, cols) or null, which is 1
  const void* row_scale;  // (samples,) contiguous, in the accumulator's dtype, or null, which is 1
  int64_t groups;
  int64_t tokens;                // rows is groups * tokens
  int64_t sample_rows;           // that share an element of row_scale
  int64_t group_size[kRowDims];  // product is groups
  RowStride scale_stride;
  RowStride shift_stride;
  RowStride gate_stride;
  DType gate_dtype;
};

// With d = row_scale * dropout(dx), the same elements dropped:
//   dresidual = dx, dinput = d * gate, and, summed over the tokens of a group,
//   dscale = doutput * h, dshift = doutput, dgate = d * branch.
struct ModulatedNormBackward : NormBackward {  // weight: scale, dweight and dbias: of scale, shift
  const void* branch;                          // (rows, cols) input of the forward; null sans gate
  const void* gate;                            // (groups, cols) or null
  const void* row_scale;                       // (samples,) contiguous, or null
  void* dgate;  // (groups, cols) contiguous as dweight and dbias are, or null if not wanted
  int64_t groups;
  int64_t tokens;                // rows is groups * tokens
  int64_t sample_rows;           // that share an element of row_scale
  int64_t group_size[kRowDims];  // product is groups
  RowStride branch_stride;
  RowStride scale_stride;
  RowStride gate_stride;
  DType branch_dtype;  // of dinput too, where there is a gate
  DType gate_dtype;    // of dgate too
};

}  // namespace onepass
