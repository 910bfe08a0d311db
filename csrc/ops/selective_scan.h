// The contract of the selective scan family between ops/selective_scan.cpp and a back end.
//
// Each channel has a state of `state` numbers, which starts at initial_state, or zero:
//   step[t] = delta[t] + delta_bias, or its softplus
//   h[t] = exp(step[t] A) h[t - 1] + step[t] u[t] B[t]
//   y[t] = sum over the state of C[t] h[t], + D u[t]
//   output[t] = y[t], or y[t] silu(z[t])
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "core/dtype.h"

namespace onepass {

// Tokens of a chunk: its first state is saved for the backward. Chunks begin with a sequence.
constexpr int64_t kScanChunk = 128;

struct ScanStride {
  int64_t sample;
  int64_t channel;
  int64_t token;
};

// Of B and C.
struct ScanFactorStride {
  int64_t sample;
  int64_t group;
  int64_t state;
  int64_t token;
};

struct SelectiveScan {
  const void* u;              // (batch, channels, length)
  const void* delta;          // likewise
  const void* A;              // (channels, state) contiguous
  const void* B;              // (batch, groups, state, length)
  const void* C;              // likewise
  const void* D;              // (channels,) contiguous; null: 0
  const void* z;              // (batch, channels, length); null: no gate
  const void* delta_bias;     // (channels,) contiguous; null: 0
  const void* initial_state;  // (sequences, channels, state) contiguous; null: 0
  const int32_t* cu_seqlens;  // (sequences + 1,), where they begin in a batch of 1; null: samples
  int64_t batch;
  int64_t channels;
  int64_t length;
  int64_t state;
  int64_t groups;  // of channels, each with its B and C
  int64_t sequences;
  int64_t chunks;  // of a sample, at most
  ScanStride u_stride;
  ScanStride delta_stride;
  ScanStride z_stride;
  ScanFactorStride B_stride;
  ScanFactorStride C_stride;
  bool delta_softplus;
  bool channels_last;  // whether results have dense channels, else dense tokens
  DType u_dtype;       // and that of the output
  DType delta_dtype;
  DType A_dtype;
  DType B_dtype;
  DType C_dtype;
  DType D_dtype;
  DType z_dtype;
  DType delta_bias_dtype;
  DType initial_state_dtype;
};

// A chunk that begins at token t of sequence s (of this sample) is number t / kScanChunk + s.
struct SelectiveScanForward : SelectiveScan {
  void* output;      // (batch, channels, length) dense
  void* last_state;  // (sequences, channels, state); may be initial_state
  void* states;      // (batch, chunks, state, channels) in the accumulator's dtype; null: not saved
  DType last_state_dtype;
};

// Gradients are in the dtype of what they are of, those of u, delta and z dense in the order of the
// output; null if not wanted.
struct SelectiveScanBackward : SelectiveScan {
  const void* states;       // as saved
  const void* doutput;      // (batch, channels, length) of u_dtype; null: 0
  const void* dlast_state;  // (sequences, channels, state) of the accumulator's dtype; null: 0
  void* du;
  void* ddelta;
  void* dA;  // (channels, state)
  void* dB;  // (batch, groups, state, length)
  void* dC;  // likewise
  void* dD;  // (channels,)
  void* dz;
  void* ddelta_bias;     // (channels,)
  void* dinitial_state;  // (sequences, channels, state)
  ScanStride doutput_stride;
};

// Strides of (batch, heads, channels); 0 of what is the same for all.
struct UpdateStride {
  int64_t sample;
  int64_t head;
  int64_t channel;
};

// The same for one token, with the state in place. Numbers of the state are dense wherever they
// are the last dimension.
struct SelectiveStateUpdate {
  void* state;          // (batch, heads, channels, state)
  const void* x;        // (batch, heads, channels), u of this token
  const void* dt;       // likewise, delta
  const void* A;        // (heads, channels, state); see A_is_shared
  const void* B;        // (batch, groups, state), each group for as many heads
  const void* C;        // likewise
  const void* D;        // (heads, channels); null: 0
  const void* z;        // (batch, heads, channels); null: no gate
  const void* dt_bias;  // (heads, channels); null: 0
  void* output;         // (batch, heads, channels) contiguous, of x_dtype
  int64_t batch;
  int64_t heads;
  int64_t channels;
  int64_t state_size;
  int64_t groups;
  UpdateStride state_stride;
  UpdateStride x_stride;
  UpdateStride dt_stride;
  UpdateStride A_stride;
  UpdateStride D_stride;
  UpdateStride z_stride;
  UpdateStride dt_bias_stride;
  UpdateStride B_stride;  // (sample, group, 0)
  UpdateStride C_stride;
  bool A_is_shared;  // by the numbers of a channel's state, of which the first is read
  bool dt_softplus;
  DType state_dtype;
  DType x_dtype;
  DType dt_dtype;
  DType A_dtype;
  DType B_dtype;
  DType C_dtype;
  DType D_dtype;
  DType z_dtype;
  DType dt_bias_dtype;
};

}  // namespace onepass
