// The product of a few rows with a quantised weight, whose codes are read once, in place, and
// become numbers in registers. A lane is a column: nothing is added across lanes.
//
// A sum runs over a chain of at most kCodeChain numbers of one group, without the scale, and then
// is multiplied with it; the shift's part is the sum of the left numbers. Chains are the same for
// any number of rows, so a row's bits do not depend on the others. Done when it runs at the speed
// of a read.
#include "cpu/linear/few_rows_of_codes.h"

#include "cpu/linear/weight_codes.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

// Vectors of columns that are computed side by side, so that about eight chains of multiply-adds
// run at a time; all sums and words fit into the registers.
template <int kRows>
inline constexpr int kFewCodeVectors = kVectorRegisters == 32 ? (kRows <= 2   ? 4
                                                                 : kRows <= 8 ? 2
                                                                              : 1)
                                       : kRows <= 2           ? 4
                                       : kRows <= 4           ? 2
                                                              : 1;

template <class M>
struct FewRowsOfCodes {
  FewRows<M> few;
  const QuantizedWeight& weight;
  int64_t cols;  // of the weight
  int64_t depth;
  const float* chain_sums;  // (rows, chains), or null: no shifts
  int64_t chains;
};

// Columns col to col + columns, at most kVectors vectors.
template <class M, Codes kCodes, int kRows, int kVectors>
[[gnu::noinline]] void linear_few_rows_of_codes_kernel(const FewRowsOfCodes<M>& call, int64_t col,
                                                       int64_t columns) {
  using W = Words<kCodes>;
  constexpr int64_t n = kLanes<float>;
  constexpr int64_t kAhead = 32 * kPanelColumns;  // words
  const QuantizedWeight& weight = call.weight;
  const W codes(weight.format);
  const uint32_t* words[kVectors];
  set_words(weight, col, columns, words);
  const auto scales_at = [&](const void* scales, int64_t group, int v) {
    const int64_t at = group * call.cols + col + v * n, left = columns - v * n;
    if (left >= n) return load_scales(scales, weight.scales_dtype, at, WholeVector<float>{});
    if (left <= 0) return Vec<float>{};
    return load_scales(scales, weight.scales_dtype, at, Tail{left});
  };
  typename M::Sum total[kRows][kVectors] = {};
  int64_t chain = 0;
  for (int64_t k = 0; k < call.depth; ++chain) {
    const int64_t end = end_of_chain(weight, call.depth, k), group = k / weight.group;
    typename M::Sum sum[kRows][kVectors] = {};
    for (; k < end; k += W::kPerWord) {
      WordBits word[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        std::memcpy(&word[v], words[v], sizeof(word[v]));
        __builtin_prefetch(words[v] + kAhead, 0, 2);
        words[v] += kPanelColumns;
      }
      const auto* left = call.few.left + k;
#pragma GCC unroll 8
      for (int i = 0; i < W::kPerWord / M::kPerCell; ++i) {
        typename M::Cells cells[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          cells[v] = codes.template cells<M>(word[v], i);
          keep_in_register(cells[v]);
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const auto one =
              M::broadcast_cell(left + r * call.few.left_row + W::template place_of_cell<M>(i));
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) sum[r][v] = M::multiply_add(one, cells[v], sum[r][v]);
        }
      }
    }
    k = end;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Vec<float> scale = scales_at(weight.scales, group, v);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) total[r][v] = fma<float>(sum[r][v], scale, total[r][v]);
      if (call.chain_sums) {
        const Vec<float> shift = scales_at(weight.shifts, group, v);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const float of_left = call.chain_sums[r * call.chains + chain];
          total[r][v] = fma<float>(broadcast<float>(of_left), shift, total[r][v]);
        }
      }
    }
    keep_in_memory(total);
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const int64_t left = columns - v * n;
    if (left >= n) {
      call.few.put(total, v, WholeVector<float>{});
    } else if (left > 0) {
      call.few.put(total, v, Tail{left});
    }
  }
}

}  // namespace

template <class M>
void multiply_few_rows_of_codes(const LinearProduct& args, const FewRows<M>& few,
                                const float* chain_sums, int64_t col, int64_t columns) {
  if constexpr (M::kPerCell == 2 && !kHasPairProducts) return;  // no call has pairs
  const QuantizedWeight& weight = args.quantized;
  FewRowsOfCodes<M> call{few,        weight,     args.cols,
                         args.depth, chain_sums, chains_of(weight, args.depth)};
  visit_codes_of(weight.format, [&]<Codes kCodes>() {
    visit_few_rows(args.rows, [&]<int kRows>() {
      constexpr int kVectors = kFewCodeVectors<kRows>;
      constexpr int64_t kStep = kVectors * M::kLanes;
      for (int64_t j = 0; j < columns; j += kStep) {
        linear_few_rows_of_codes_kernel<M, kCodes, kRows, kVectors>(call, col + j,
                                                                    std::min(kStep, columns - j));
        call.few.sums += kStep;
        call.few.bias += call.few.bias ? kStep : 0;
      }
    });
  });
}

template void multiply_few_rows_of_codes<Fma>(const LinearProduct&, const FewRows<Fma>&,
                                              const float*, int64_t, int64_t);
template void multiply_few_rows_of_codes<Dot>(const LinearProduct&, const FewRows<Dot>&,
                                              const float*, int64_t, int64_t);

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
