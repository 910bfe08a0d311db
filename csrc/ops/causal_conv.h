// The contract of the causal convolution family between ops/causal_conv.cpp and a back end.
//
// Each channel has `width` weights of its own:
//   sum[b, c, t] = bias[c] + sum over k of weight[c, k] * before[b, c, t - (width - 1) + k]
// where `before` is the input, the initial state in front of it, and zero in front of that. Of a
// position in another sequence it is zero too.
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "core/dtype.h"

namespace onepass {

inline constexpr int64_t kLeastConvWidth = 2;
inline constexpr int64_t kMostConvWidth = 8;

// Where channels are dense (channels_last) a line is a token, else a channel; lines are dense.
struct LineStride {
  int64_t sample;
  int64_t line;
};

struct CausalConv {
  const void* input;          // (batch, channels, length)
  const void* weight;         // (channels, width) contiguous
  const void* bias;           // (channels,); null: 0
  const void* initial_state;  // (batch, channels, width - 1) contiguous, of input_dtype; null: 0
  const int32_t* sequence;    // (batch, length) contiguous, of each position; null: one sequence
  int64_t batch;
  int64_t channels;
  int64_t length;
  int64_t width;
  LineStride input_stride;
  bool channels_last;
  bool silu;  // after the sum
  DType input_dtype;
  DType weight_dtype;
  DType bias_dtype;
};

struct CausalConvForward : CausalConv {
  void* output;  // (batch, channels, length) of input_dtype, dense in input's order
};

// The sum is recomputed. Gradients are in the dtype of what they are of; null if not wanted.
struct CausalConvBackward : CausalConv {
  const void* doutput;   // (batch, channels, length) of input_dtype
  void* dinput;          // dense in input's order
  void* dweight;         // (channels, width)
  void* dbias;           // (channels,)
  void* dinitial_state;  // (batch, channels, width - 1)
  LineStride doutput_stride;
};

struct ConvUpdateStride {
  int64_t sample;
  int64_t channel;
  int64_t token;
};

// The forward of a few tokens after the inputs in `state`, which moves on to the latest in place.
struct CausalConvUpdate {
  void* state;         // (batch, channels, before) of input_dtype, before >= width - 1
  const void* input;   // (batch, channels, tokens)
  const void* weight;  // (channels, width) contiguous
  const void* bias;    // (channels,); null: 0
  void* output;        // (batch, channels, tokens) contiguous
  int64_t batch;
  int64_t channels;
  int64_t tokens;
  int64_t before;
  int64_t width;
  ConvUpdateStride state_stride;
  ConvUpdateStride input_stride;
  bool silu;  // after the sum
  DType input_dtype;
  DType weight_dtype;
  DType bias_dtype;
};

}  // namespace onepass
