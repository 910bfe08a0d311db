// The product of quantised rows with a quantised weight, codes_by_codes.cpp.
#pragma once

#include "cpu/linear/quantized.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

inline bool multiplies_codes(const LinearProduct& args) {
  return args.quantized.words && args.quantizes_factors && args.left_dtype != DType::kFloat64 &&
         args.depth > 0 && args.depth <= kMostQuantizedDepth;
}

Operator<LinearProduct> codes_by_codes();

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
