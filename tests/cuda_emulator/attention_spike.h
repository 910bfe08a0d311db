// The attention spike's arguments: the schemas of attention_forward and attention_backward as the
// structs that a back end gets, as far as the spike goes.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace onepass::cuda::attention_spike {

// (batch, heads, rows, cols) with a dense last dimension; strides in elements, 0 where broadcast.
struct Tensor {
  void* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
};

// Of both directions. Tensors of 16-bit elements are 16-byte aligned and their strides multiples of
// 8. Rows are counted in int: sequences are shorter than 2^30.
struct Attention {
  Tensor query;         // (batch, heads, seq_q, head_dim)
  Tensor key;           // (batch, kv_heads, seq_k, head_dim)
  Tensor value;         // (batch, kv_heads, seq_k, head_dim)
  Tensor bias;          // (batch, heads, seq_q, seq_k) float32, or null
  const int64_t* seed;  // (2,) or null, which is no dropout
  int64_t batch;
  int64_t heads;  // a multiple of kv_heads
  int64_t kv_heads;
  int64_t seq_q;
  int64_t seq_k;
  int64_t head_dim;
  int64_t window_left;   // -1: no limit
  int64_t window_right;  // -1: no limit; causal is 0
  // Where this call's part of a sharded attention begins, and how many heads the whole has: without
  // total_heads, batch * heads + head would give two heads on two devices the same fates.
  int64_t query_offset;
  int64_t key_offset;  // not negative
  int64_t batch_offset;
  int64_t head_offset;
  int64_t total_heads;
  double scale;
  double dropout_p;
  DType dtype;
  bool bottom_right;
};

struct AttentionForward : Attention {
  Tensor output;  // (batch, heads, seq_q, head_dim)
  float* lse;     // (batch, heads, seq_q) contiguous
};

struct AttentionBackward : Attention {
  Tensor output;      // (batch, heads, seq_q, head_dim)
  Tensor doutput;     // (batch, heads, seq_q, head_dim)
  const float* lse;   // (batch, heads, seq_q) contiguous
  const float* dlse;  // (batch, heads, seq_q) contiguous, or null, which is 0
  Tensor dquery;      // (batch, heads, seq_q, head_dim)
  Tensor dkey;        // (batch, kv_heads, seq_k, head_dim)
  Tensor dvalue;      // (batch, kv_heads, seq_k, head_dim)
  Tensor dbias;       // (batch, heads, seq_q, seq_k) float32 or null; a batch stride of 0 sums
};

}  // namespace onepass::cuda::attention_spike
