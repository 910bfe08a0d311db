// Sums over consecutive elements in an order that depends on their number alone.
#pragma once

#include <algorithm>
#include <array>

#include "cpu/vec_two.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// kSums sums over the columns [0, cols). accumulate(sum, column, count) adds one vector to each of
// sum[0..kSums). Four chains hide the latency of the additions. Runs of 64 vectors are summed
// separately first, so that the error grows with the square root of some tens of additions, not of
// those of a whole row. The order depends on cols alone.
template <class A, int kSums, class Accumulate>
ONEPASS_INLINE std::array<A, kSums> sum_columns(int64_t cols, Accumulate&& accumulate) {
  constexpr int64_t kStep = 4 * kLanes<A>;
  constexpr int64_t kRun = 16 * kStep;
  // Four named structs rather than an array: g++ then keeps every sum in a register.
  struct Chain {
    Vec<A> sum[kSums] = {};
    ONEPASS_INLINE void add(const Chain& other) {
      for (int s = 0; s < kSums; ++s) sum[s] += other.sum[s];
    }
  };
  Chain total0, total1, total2, total3;
  const int64_t stepped = cols - cols % kStep;
  int64_t j = 0;
  while (j < stepped) {
    const int64_t run_end = std::min(j + kRun, stepped);
    Chain run0, run1, run2, run3;
    for (; j < run_end; j += kStep) {
      accumulate(run0.sum, j, WholeVector<A>{});
      accumulate(run1.sum, j + kLanes<A>, WholeVector<A>{});
      accumulate(run2.sum, j + 2 * kLanes<A>, WholeVector<A>{});
      accumulate(run3.sum, j + 3 * kLanes<A>, WholeVector<A>{});
    }
    total0.add(run0);
    total1.add(run1);
    total2.add(run2);
    total3.add(run3);
  }
  for (; j + kLanes<A> <= cols; j += kLanes<A>) accumulate(total0.sum, j, WholeVector<A>{});
  if (j < cols) accumulate(total1.sum, j, Tail{cols - j});
  total0.add(total1);
  total2.add(total3);
  total0.add(total2);
  std::array<A, kSums> sums;
  for (int s = 0; s < kSums; ++s) sums[s] = sum_of_lanes<A>(total0.sum[s]);
  return sums;
}

// Sums over [0, count), two vectors at a time: two(sum, element) adds both, one(sum, element,
// lanes) one of the rest. The order depends on count alone.
template <class A, int kSums, class Both, class One>
ONEPASS_INLINE std::array<A, kSums> sum_twos(int64_t count, Both&& two, One&& one) {
  const int64_t end = count - count % (2 * kLanes<A>);
  auto sums =
      sum_columns<A, kSums>(end / 2, [&](Vec<A>* sum, int64_t j, auto)
                                         __attribute__((always_inline)) { two(sum, 2 * j); });
  const auto rest = sum_columns<A, kSums>(
      count - end, [&](Vec<A>* sum, int64_t j, auto lanes)
                       __attribute__((always_inline)) { one(sum, end + j, lanes); });
  for (int s = 0; s < kSums; ++s) sums[s] += rest[s];
  return sums;
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
