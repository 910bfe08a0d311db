// The contract of the group norm family between ops/group_norm.cpp and a back end.
//
// A sample is an image of `pixels` pixels with `channels` channels; a group is channels / groups
// neighbouring channels. With channels first a sample lies as (channels, pixels), dense; with
// channels last a pixel's channels are dense, and pixels are ImageStride::pixel elements apart.
#pragma once

#include <cstdint>

#include "core/activation.h"
#include "core/backend.h"
#include "core/dtype.h"

namespace onepass {

struct ImageStride {
  int64_t batch;
  int64_t pixel;  // of channels last; else 1
};

// Shared by forward and backward: h = (input - mean) * rstd over each group of a sample,
// z = h * weight + bias, output = activation(z).
struct GroupNorm {
  const void* input;   // (batch, channels, pixels)
  const void* weight;  // (channels,) or null, which is 1
  const void* bias;    // (channels,) or null, which is 0
  int64_t batch;
  int64_t channels;
  int64_t pixels;
  int64_t groups;
  ImageStride input_stride;
  DType input_dtype;
  DType weight_dtype;
  DType bias_dtype;
  Activation activation;  // kNone or kSilu
  bool channels_last;     // one pixel counts as channels last too
};

struct GroupNormForward : GroupNorm {
  void* output;  // (batch, channels, pixels), dense, in input's order of channels and pixels
  void* mean;    // (batch, groups) contiguous in the accumulator's dtype; null if not kept
  void* rstd;    // (batch, groups) likewise
  DType output_dtype;
  double eps;
};

// With dz = doutput * activation'(z), g = dz * weight, and means over a group:
//   dinput = rstd * (g - mean(g) - h * mean(g * h)),
//   dweight = sum over samples and pixels of dz * h, dbias = sum over samples and pixels of dz.
struct GroupNormBackward : GroupNorm {
  const void* doutput;  // (batch, channels, pixels)
  const void* mean;     // (batch, groups) contiguous
  const void* rstd;     // (batch, groups) contiguous
  void* dinput;         // (batch, channels, pixels), dense as output is; null if not wanted
  void* dweight;        // (channels,) or null if not wanted
  void* dbias;          // (channels,) or null if not wanted
  ImageStride doutput_stride;
  DType doutput_dtype;
  DType dweight_dtype;
  DType dbias_dtype;
};

}  // namespace onepass
