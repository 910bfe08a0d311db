// The contract of the delta rule family between ops/delta_rule.cpp and a back end.
//
// Each head has a state S of key_dim x value_dim numbers, which starts at initial_state, or zero:
//   S[t] = diag(exp(g[t])) S[t - 1] + k[t] u[t]^T
//   u[t] = beta[t] (v[t] - (diag(exp(g[t])) S[t - 1])^T k[t])
//   output[t] = scale S[t]^T q[t]
// g has a number for each head, or for each channel of its keys. With qk_l2norm, q and k are first
// divided by sqrt(the sum of their squares + 1e-6).
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "core/dtype.h"

namespace onepass {

// Tokens of a chunk: its first state is saved for the backward. Chunks begin with a sequence.
constexpr int64_t kDeltaRuleTokens = 64;

struct DeltaRuleStride {
  int64_t sample;
  int64_t token;
  int64_t head;
};

// The last dimension of q, k, v, doutput, and of g with channels, is dense.
struct DeltaRule {
  const void* q;              // (batch, length, key_heads, key_dim)
  const void* k;              // likewise
  const void* v;              // (batch, length, heads, value_dim)
  const void* g;              // (batch, length, heads), or (batch, length, heads, key_dim)
  const void* beta;           // (batch, length, heads)
  const void* initial_state;  // (sequences, heads, key_dim, value_dim) contiguous; null: 0
  const int32_t* cu_seqlens;  // (sequences + 1,), where they begin in a batch of 1; null: samples
  int64_t batch;
  int64_t length;
  int64_t heads;
  int64_t key_heads;  // each for as many heads
  int64_t key_dim;
  int64_t value_dim;
  int64_t sequences;
  int64_t chunks;  // of a sample, at most
  DeltaRuleStride q_stride;
  DeltaRuleStride k_stride;
  DeltaRuleStride v_stride;
  DeltaRuleStride g_stride;
  DeltaRuleStride beta_stride;
  double scale;
  bool qk_l2norm;
  bool g_has_channels;
  DType q_dtype;
  DType k_dtype;
  DType v_dtype;  // and that of the output
  DType g_dtype;
  DType beta_dtype;
  DType initial_state_dtype;
};

// A chunk that begins at token t of sequence s (of this sample) is number t / kDeltaRuleTokens + s.
struct DeltaRuleForward : DeltaRule {
  void* output;       // (batch, length, heads, value_dim) contiguous
  void* final_state;  // (sequences, heads, key_dim, value_dim) in the accumulator's dtype
  void* states;       // (batch, chunks, heads, key_dim, value_dim) likewise; null: not saved
};

// Gradients are contiguous, in the dtype of what they are of; null if not wanted.
struct DeltaRuleBackward : DeltaRule {
  const void* states;        // as saved
  const void* doutput;       // (batch, length, heads, value_dim) of v_dtype; null: 0
  const void* dfinal_state;  // (sequences, heads, key_dim, value_dim) of the accumulator's dtype
  void* dq;
  void* dk;
  void* dv;
  void* dg;
  void* dbeta;
  void* dinitial_state;
  DeltaRuleStride doutput_stride;
};

// Few tokens, with the state in place; its rows are dense. There is no initial_state.
struct DeltaRuleUpdate : DeltaRule {
  void* state;   // (sequences, heads, key_dim, value_dim)
  void* output;  // (batch, length, heads, value_dim) contiguous
  int64_t state_sequence_stride;
  int64_t state_head_stride;
  int64_t state_row_stride;
  DType state_dtype;
};

}  // namespace onepass
