// What the forward and the backward of the norm family share: addressing of strided rows, column
// sums of a fixed order, and the weight in the accumulator's type.
#pragma once

#include <algorithm>
#include <array>

#include "core/visit.h"
#include "cpu/vec.h"
#include "ops/norm.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// f.operator()<T>() for the dtypes that are accumulated in A: float64 in double, the others in
// float.
template <class A, class F>
decltype(auto) visit_accumulated(DType dtype, F&& f) {
  if constexpr (sizeof(A) == 8) {
    return f.template operator()<double>();
  } else {
    return visit_dtype_up_to_float32(dtype, std::forward<F>(f));
  }
}

// Rows taken together share each load of weight and bias (and, in the backward, of the weight
// gradients). Rows too long for that to stay in L1 are taken one at a time.
inline constexpr int kRowsPerBlock = 4;
inline constexpr int64_t kMaxBlockedColumns = 4096;

inline int rows_per_block(int64_t cols) { return cols <= kMaxBlockedColumns ? kRowsPerBlock : 1; }

// Runs block(first_row, std::integral_constant rows) over [begin, end) in blocks of kRowsPerBlock,
// the rest one at a time. Both instances compute a row in the same order, bit for bit.
template <class Block>
ONEPASS_INLINE void for_each_row_block(int64_t begin, int64_t end, int64_t cols, Block&& block) {
  int64_t row = begin;
  if (rows_per_block(cols) == kRowsPerBlock) {
    for (; row + kRowsPerBlock <= end; row += kRowsPerBlock) {
      block(row, std::integral_constant<int, kRowsPerBlock>{});
    }
  }
  for (; row < end; ++row) block(row, std::integral_constant<int, 1>{});
}

// kSums sums over the columns [0, cols). accumulate(sum, column, count) adds one vector to each of
// sum[0..kSums). Four chains hide the latency of the additions; runs of 64 vectors are summed on
// their own first, so that the error grows with the square root of some tens of additions and not
// of a whole row's. The order depends on cols alone.
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

// Bytes of cols accumulators, rounded up to a multiple of 64.
inline int64_t padded_bytes(int64_t cols, int64_t accumulator_size) {
  return (cols * accumulator_size + 63) / 64 * 64;
}

// Whether source + offset is there already, as accumulators.
inline bool is_wide(const void* source, DType dtype, double offset, int64_t accumulator_size) {
  return source && offset == 0.0 && size_of(dtype) == accumulator_size;
}

// source + offset as (cols,) accumulators: source itself where it already is that, else a copy in
// `buffer`, made once per call. A missing source is `missing` everywhere.
template <class A>
const A* widened(const void* source, DType dtype, double offset, double missing, int64_t cols,
                 A* buffer) {
  if (is_wide(source, dtype, offset, sizeof(A))) return static_cast<const A*>(source);
  if (!source) {
    std::fill(buffer, buffer + cols, static_cast<A>(missing + offset));
    return buffer;
  }
  visit_accumulated<A>(dtype, [&]<class T>() {
    for_each_vector<A>(0, cols, [&](int64_t j, auto count) {
      const Vec<A> v = load<A>(static_cast<const T*>(source) + j, count);
      store<A>(buffer + j, v + broadcast<A>(static_cast<A>(offset)), count);
    });
  });
  return buffer;
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
