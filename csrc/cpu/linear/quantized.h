// The product with factors of 8 bits, quantized.cpp.
#pragma once

#include "core/backend.h"
#include "ops/linear.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// The sums of more products of codes could overflow.
inline constexpr int64_t kMostQuantizedDepth = 1 << 17;
static_assert(128 * 127 * kMostQuantizedDepth < int64_t{1} << 31);

inline bool quantizes(const LinearProduct& args) {
  return args.quantizes_factors && !args.quantized.words && args.left_dtype == DType::kFloat32 &&
         args.right_dtype == DType::kFloat32 && args.left_sums == nullptr && !args.accumulate &&
         args.cols > 0 && args.depth > 0 && args.depth <= kMostQuantizedDepth;
}

Operator<LinearProduct> quantized_product();

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
