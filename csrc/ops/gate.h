// The contract of the gate family between ops/gate.cpp and a back end.
//
// A row is the last dimension of one factor and is dense. Where gate and up are halves of one
// tensor, they lie a row's columns apart in rows twice as long.
#pragma once

#include <cstdint>

#include "core/activation.h"
#include "core/backend.h"
#include "core/dtype.h"
#include "core/rows.h"

namespace onepass {

// output = activation(gate) * up
struct GateForward {
  const void* gate;  // (rows, cols)
  const void* up;    // (rows, cols)
  void* output;      // (rows, cols) contiguous
  int64_t rows;
  int64_t cols;
  int64_t row_size[kRowDims];  // product is rows
  RowStride gate_stride;
  RowStride up_stride;
  DType gate_dtype;
  DType up_dtype;
  DType output_dtype;
  Activation activation;
};

// dgate = doutput * up * activation'(gate), dup = doutput * activation(gate).
struct GateBackward {
  const void* doutput;  // (rows, cols)
  const void* gate;     // (rows, cols)
  const void* up;       // (rows, cols)
  void* dgate;          // (rows, cols), rows gradient_stride apart; null if not wanted
  void* dup;            // (rows, cols), rows gradient_stride apart; null if not wanted
  int64_t rows;
  int64_t cols;
  int64_t row_size[kRowDims];  // product is rows
  RowStride doutput_stride;
  RowStride gate_stride;
  RowStride up_stride;
  int64_t gradient_stride;  // cols, or 2 cols where both are halves of one tensor
  DType doutput_dtype;
  DType gate_dtype;  // of dgate too
  DType up_dtype;    // of dup too
  Activation activation;
};

}  // namespace onepass
