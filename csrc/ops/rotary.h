// The contract of the rotary family between ops/rotary.cpp and a back end.
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "core/dtype.h"

namespace onepass {

// Elements from one to the next along each dimension; columns are dense.
struct HeadStride {
  int64_t batch;
  int64_t head;
  int64_t token;
};

// One tensor that is rotated, and its result.
struct RotatedHeads {
  const void* input;   // (batch, heads, tokens, head_dim), or null
  void* output;        // (batch, heads, tokens, head_dim)
  const void* weight;  // (head_dim,) of the norm of its rows, or null: they have none
  int64_t heads;       // 0 where there is none
  HeadStride input_stride;
  HeadStride output_stride;
  DType weight_dtype;
};

// cos or sin: (batch, tokens, width), or with positions (rows, width).
struct RotaryTable {
  const void* data;
  int64_t batch_stride;
  int64_t row_stride;  // columns are dense
};

// For a pair of columns (a, b) below rotary_dim, formed according to `interleaved`:
//   output[a] = input[a] * cos[a] - input[b] * sin[a]
//   output[b] = input[b] * cos[b] + input[a] * sin[b]
// and transposed, which is the backward:
//   output[a] = input[a] * cos[a] + input[b] * sin[b]
//   output[b] = input[b] * cos[b] - input[a] * sin[a]
// Columns from rotary_dim on are copied; in place they do not change. With a weight, the row x is
// normalised before it is rotated or copied:
//   norm(x) = x * rstd * (weight + weight_offset), rstd = 1 / sqrt(mean(x^2) + eps)
struct RotaryForward {
  RotatedHeads query;
  RotatedHeads key;
  RotaryTable cos;
  RotaryTable sin;
  const void* positions;  // (batch, tokens) rows of the tables, or null: that of the token
  int64_t positions_batch_stride;
  int64_t positions_stride;
  int64_t rows;  // of the tables, which positions stay below
  int64_t batch;
  int64_t tokens;
  int64_t head_dim;
  int64_t rotary_dim;
  double eps;
  double weight_offset;
  DType dtype;          // of query and key
  DType table_dtype;    // of cos and sin
  bool wide_positions;  // int64, else int32
  bool half_width;      // a column of the tables for each pair, else for each column
  bool interleaved;     // pairs are (2i, 2i + 1), else (i, i + rotary_dim / 2)
  bool transposed;
  bool in_place;  // outputs are the inputs
};

// Of a tensor with a weight: the backward's arguments besides the gradient, and the weight's own.
struct NormedHeads {
  const void* x;  // (batch, heads, tokens, head_dim) the normalised tensor
  HeadStride x_stride;
  void* dweight;  // (head_dim,) in the weight's dtype, or null if not wanted
};

// The backward with a weight. `input` is the gradient of the rotated rows, `output` that of the
// rows, or null if not wanted, and `transposed` is set. With u = transposed(input), h = x * rstd
// and g = u * (weight + weight_offset); rstd is recomputed from x, which is read anyway:
//   output = rstd * (g - h * mean(g * h)), dweight = sum over rows of u * h
// A tensor without a weight beside one that has it is rotated alone.
struct RotaryBackward : RotaryForward {
  NormedHeads query_norm;
  NormedHeads key_norm;
};

// The most columns of a row with a norm on CUDA, where the row is kept in a warp's registers.
inline constexpr int64_t kMostNormedColumns = 512;

// The row of the tables that a token has, read by the host.
inline int64_t rotary_row(const RotaryForward& args, int64_t batch, int64_t token) {
  if (!args.positions) return token;
  const int64_t at = batch * args.positions_batch_stride + token * args.positions_stride;
  return args.wide_positions ? static_cast<const int64_t*>(args.positions)[at]
                             : static_cast<const int32_t*>(args.positions)[at];
}

}  // namespace onepass
