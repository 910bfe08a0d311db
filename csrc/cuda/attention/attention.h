// The kernels of attention on CUDA, and which calls each of them serves.
#pragma once

#include "ops/attention.h"
#include "ops/attention_decode.h"

namespace onepass::cuda {

// The largest head dimension for which the 16-bit tile kernels are instantiated.
inline constexpr int64_t kMaxTiledDim = 256;

inline bool is_tiled(const Attention& args) {
  const bool half = args.dtype == DType::kBFloat16 || args.dtype == DType::kFloat16;
  return half && args.head_dim <= kMaxTiledDim && args.value_dim <= kMaxTiledDim;
}

// bfloat16 and float16 up to kMaxTiledDim: tiles on tensor cores.
Operator<AttentionForward> tiled_attention_forward();
Operator<AttentionBackward> tiled_attention_backward();

// All other calls: float32, float64, and head dimensions up to kMaxHeadDim. Multiply-adds, or TF32
// products for float32 where torch allows them.
Operator<AttentionForward> plain_attention_forward();
Operator<AttentionBackward> plain_attention_backward();

}  // namespace onepass::cuda
