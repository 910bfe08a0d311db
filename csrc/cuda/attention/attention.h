// The kernels of attention on CUDA, and which of them a call gets.
#pragma once

#include "ops/attention.h"
#include "ops/attention_decode.h"

namespace onepass::cuda {

// Head dimensions that the tiles of 16-bit rows are made for.
inline constexpr int64_t kMaxTiledDim = 256;

inline bool is_tiled(const Attention& args) {
  const bool half = args.dtype == DType::kBFloat16 || args.dtype == DType::kFloat16;
  return half && args.head_dim <= kMaxTiledDim && args.value_dim <= kMaxTiledDim;
}

// bfloat16 and float16 up to kMaxTiledDim: tiles on tensor cores.
Operator<AttentionForward> tiled_attention_forward();
Operator<AttentionBackward> tiled_attention_backward();

// All else, float32 and float64 and head dimensions up to kMaxHeadDim: multiply-adds, or for
// float32 products of TF32 where they are allowed.
Operator<AttentionForward> plain_attention_forward();
Operator<AttentionBackward> plain_attention_backward();

}  // namespace onepass::cuda
