// Shared by norms of rows, also where a rotation follows them: the statistic of an RMS norm, blocks
// of rows, and the weight in the accumulator's type.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include "core/rows.h"
#include "core/visit.h"
#include "cpu/row_sums.h"
#include "cpu/sums.h"
#include "cpu/vec.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// Rows computed together share each load of weight and bias (and, in the backward, of the weight
// gradients). That is faster if a row and these do not fit into L1 together, and four rows still
// fit into L2. Shorter rows are computed one at a time: each tensor is then one stream, which the
// hardware prefetches. (Four at a time, with lines prefetched in software, lost there: layer
// norm of 2048x384 in float32, not in cache, was half as fast on Zen 4.)
inline constexpr int kRowsPerBlock = 4;
inline constexpr int64_t kL1Bytes = int64_t{32} << 10;
inline constexpr int64_t kMaxBlockedBytes = int64_t{512} << 10;

// `column_bytes`: the bytes that a row reads and writes for each column, weight and bias included.
inline int rows_per_block(int64_t cols, int64_t column_bytes) {
  const int64_t bytes = cols * column_bytes;
  return bytes >= kL1Bytes && bytes <= kMaxBlockedBytes ? kRowsPerBlock : 1;
}

// Runs block(first_row, std::integral_constant rows) over [begin, end), in blocks of kRowsPerBlock
// where `block_rows` is that, the rest one at a time. Both instances compute a row in the same
// order, bit for bit.
template <class Block>
ONEPASS_INLINE void for_each_row_block(int64_t begin, int64_t end, int block_rows, Block&& block) {
  int64_t row = begin;
  if (block_rows == kRowsPerBlock) {
    for (; row + kRowsPerBlock <= end; row += kRowsPerBlock) {
      block(row, std::integral_constant<int, kRowsPerBlock>{});
    }
  }
  for (; row < end; ++row) block(row, std::integral_constant<int, 1>{});
}

// 1 / sqrt(mean square + eps). The few operations per row are done in float64: each of their
// roundings would show in every element.
template <class A>
ONEPASS_INLINE A rstd_of(A squares, int64_t cols, double eps) {
  return static_cast<A>(1.0 / std::sqrt(squares / static_cast<double>(cols) + eps));
}

// That of an RMS norm's row.
template <class A, class X>
ONEPASS_INLINE A rms_rstd(const X* x, int64_t cols, double eps) {
  const auto [squares] = sum_columns<A, 1>(cols, [&](Vec<A>* sum, int64_t j, auto count) {
    const Vec<A> v = load<A>(x + j, count);
    sum[0] = fma<A>(v, v, sum[0]);
  });
  return rstd_of<A>(squares, cols, eps);
}

// Whether source + offset is already in memory, as accumulators.
inline bool is_wide(const void* source, DType dtype, double offset, int64_t accumulator_size) {
  return source && offset == 0.0 && size_of(dtype) == accumulator_size;
}

// source + offset as (cols,) accumulators: source itself if it is that already, otherwise a copy in
// `buffer`, made once per call. Without a source all elements are `missing`.
template <class A>
const A* widened(const void* source, DType dtype, double offset, double missing, int64_t cols,
                 A* buffer) {
  if (is_wide(source, dtype, offset, sizeof(A))) return static_cast<const A*>(source);
  if (!source) {
    std::fill(buffer, buffer + cols, static_cast<A>(missing + offset));
    return buffer;
  }
  visit_numbers<A>(dtype, [&]<class T>() {
    for_each_vector<A>(0, cols, [&](int64_t j, auto count) {
      const Vec<A> v = load<A>(static_cast<const T*>(source) + j, count);
      store<A>(buffer + j, v + broadcast<A>(static_cast<A>(offset)), count);
    });
  });
  return buffer;
}

// Least tokens of a modulated norm that share a weight whose order is changed, and in the backward
// sums: with a scale for each token the change costs more than it saves.
inline constexpr int64_t kLeastOrderedTokens = 4;

// Rows that a modulated norm may have to widen for a group: scale, shift and gate.
inline constexpr int64_t kModulators = 3;

inline void prefetch_row(const void* row, int64_t bytes) {
  for (int64_t j = 0; j < bytes; j += 64) __builtin_prefetch(static_cast<const char*>(row) + j);
}

// The same for the row of a group.
template <class A>
const A* widened_row(const void* source, DType dtype, double offset, double missing,
                     const RowIndex& group, const RowStride& stride, int64_t cols, A* buffer) {
  if (!source) return widened<A>(source, dtype, offset, missing, cols, buffer);
  const char* row = static_cast<const char*>(source) + row_offset(group, stride) * size_of(dtype);
  prefetch_row(row + kPrefetchBytes, cols * size_of(dtype));
  return widened<A>(row, dtype, offset, missing, cols, buffer);
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
