// The product of a few rows with a quantised weight, few_rows_of_codes.cpp.
#pragma once

#include "cpu/linear/few_rows.h"
#include "cpu/pieces.h"
#include "ops/linear.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// Numbers along k that are summed before they are multiplied with the scale, at most. Chains of 64
// are up to 1 % further from float64 than the numerics rule allows, where shifts cancel sums
// (tests/quantized_linear, rows of 63 numbers of int4).
inline constexpr int64_t kCodeChain = 32;
// Vectors of columns that are computed side by side, at most.
inline constexpr int kMostCodeVectors = 4;

// The end of the chain that begins with number k.
inline int64_t end_of_chain(const QuantizedWeight& weight, int64_t depth, int64_t k) {
  return std::min({k + kCodeChain, (k / weight.group + 1) * weight.group, depth});
}

inline int64_t chains_of(const QuantizedWeight& weight, int64_t depth) {
  const int64_t group = std::min(weight.group, depth);
  return group == 0 ? 0 : depth / group * ceil_div(group, kCodeChain);
}

// The sums of a row of the left factor over each chain, which shifts are multiplied with.
template <class M>
void sum_chains(const QuantizedWeight& weight, int64_t depth, const typename M::Element* row,
                float* sums) {
  for (int64_t k = 0; k < depth; ++sums) {
    const int64_t end = end_of_chain(weight, depth, k);
    Vec<float> sum = {};
    for_each_vector<float>(k, end,
                           [&](int64_t j, auto count) { sum += load<float>(row + j, count); });
    *sums = sum_of_lanes<float>(sum);
    k = end;
  }
}

// Columns col to col + columns of all rows. few's sums and bias are those of column col.
template <class M>
void multiply_few_rows_of_codes(const LinearProduct& args, const FewRows<M>& few,
                                const float* chain_sums, int64_t col, int64_t columns);

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
