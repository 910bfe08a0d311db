// The contract of the family of Mamba 2's scan between ops/mamba_chunk_scan.cpp and a back end.
//
// Each head has a state of head_dim x state numbers, which starts at initial_states, or zero:
//   step[t] = dt[t] + dt_bias, or its softplus; between dt_min and dt_max
//   h[t] = exp(step[t] A) h[t - 1] + step[t] x[t] B[t]^T
//   y[t] = h[t] C[t] + D x[t]
//   output[t] = y[t], or y[t] silu(z[t])
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "core/dtype.h"

namespace onepass {

// Tokens of a chunk: its first state is saved for the backward. Chunks begin with a sequence.
constexpr int64_t kChunkScanTokens = 64;

struct ChunkScanStride {
  int64_t sample;
  int64_t token;
  int64_t head;  // of B and C: group
};

// The last dimension of x, B, C, z and doutput is dense.
struct MambaChunkScan {
  const void* x;               // (batch, length, heads, head_dim)
  const void* dt;              // (batch, length, heads)
  const void* A;               // (heads,) contiguous
  const void* B;               // (batch, length, groups, state)
  const void* C;               // likewise
  const void* D;               // (heads,) or (heads, head_dim) contiguous; null: 0
  const void* z;               // (batch, length, heads, head_dim); null: no gate
  const void* dt_bias;         // (heads,) contiguous; null: 0
  const void* initial_states;  // (sequences, heads, head_dim, state) contiguous; null: 0
  const int32_t* cu_seqlens;   // (sequences + 1,), where they begin in a batch of 1; null: samples
  int64_t batch;
  int64_t length;
  int64_t heads;
  int64_t head_dim;
  int64_t groups;  // of heads, each with its B and C
  int64_t state;
  int64_t sequences;
  int64_t chunks;  // of a sample, at most
  ChunkScanStride x_stride;
  ChunkScanStride dt_stride;
  ChunkScanStride z_stride;
  ChunkScanStride B_stride;
  ChunkScanStride C_stride;
  double dt_min;
  double dt_max;
  bool dt_softplus;
  bool D_has_columns;  // whether D is (heads, head_dim)
  DType x_dtype;       // and that of the output
  DType dt_dtype;
  DType A_dtype;
  DType B_dtype;
  DType C_dtype;
  DType D_dtype;
  DType z_dtype;
  DType dt_bias_dtype;
  DType initial_states_dtype;
};

// A chunk that begins at token t of sequence s (of this sample) is number t / kChunkScanTokens + s.
struct MambaChunkScanForward : MambaChunkScan {
  void* output;        // (batch, length, heads, head_dim) contiguous
  void* final_states;  // (sequences, heads, head_dim, state) in the accumulator's dtype
  void* states;        // (batch, chunks, heads, state, head_dim) likewise; null: not saved
};

// Gradients are contiguous, in the dtype of what they are of; null if not wanted.
struct MambaChunkScanBackward : MambaChunkScan {
  const void* states;         // as saved
  const void* doutput;        // (batch, length, heads, head_dim) of x_dtype; null: 0
  const void* dfinal_states;  // (sequences, heads, head_dim, state) of the accumulator's dtype
  void* dx;
  void* ddt;
  void* dA;
  void* dB;
  void* dC;
  void* dD;
  void* dz;
  void* ddt_bias;
  void* dinitial_states;
  ChunkScanStride doutput_stride;
};

}  // namespace onepass
