// Tiles of sums for products whose ends differ: each product is a struct with
//
//   template <int kRows, int kVectors> void run(int64_t row, int64_t column) const
//
// which sums a tile in registers with add_products (cpu/multiply.h), also over a part of k or in
// several stages, and does with the sums what it needs.
#pragma once

#include <type_traits>

#include "cpu/multiply.h"
#include "cpu/pack.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
template <class A>
using Multiplier = std::conditional_t<std::is_same_v<A, double>, Fma64, Fma>;

template <class A>
int64_t padded(int64_t size) {
  return round_up(size, kLanes<A>);
}

// Of rows of so many columns in scratch: an odd number of cache lines, so that the same columns of
// many rows lie in all sets of the first cache.
template <class A>
int64_t row_stride_of(int64_t columns) {
  constexpr int64_t kLine = 64 / sizeof(A);
  return ((columns + kLine - 1) / kLine | 1) * kLine;
}

// The first factor: element (row, k) is at[row * of_row + k * of_step].
template <class A>
struct Broadcasts {
  const A* at;
  int64_t of_row, of_step;

  Broadcasts from(int64_t row, int64_t k = 0) const {
    return {at + row * of_row + k * of_step, of_row, of_step};
  }
  // From k on backwards.
  Broadcasts back_from(int64_t row, int64_t k) const {
    return {at + row * of_row + k * of_step, of_row, -of_step};
  }
};

// The second factor: element (k, column) is at[k * of_step + column].
template <class A>
struct Panel {
  const A* at;
  int64_t of_step;

  Panel from(int64_t k, int64_t column) const { return {at + k * of_step + column, of_step}; }
  Panel back_from(int64_t k, int64_t column) const { return {at + k * of_step + column, -of_step}; }
};

// scalar: turned[k][i] = rows[i][k]; columns beyond the count are 0
template <class A>
void turn(const A* rows, int64_t row_stride, int64_t count, int64_t size, int64_t columns,
          A* turned) {
  pack_panel<Multiplier<A>>([&](int64_t i) { return rows + i * row_stride; }, count, size, columns,
                            turned);
}

template <class A, int kRows, int kVectors>
ONEPASS_INLINE void add(const Broadcasts<A>& a, const Panel<A>& b, int64_t steps,
                        Vec<A> (&sum)[kRows][kVectors]) {
  add_products<Multiplier<A>>(a.at, a.of_row, a.of_step, b.at, b.of_step, steps, sum);
}

// The square on the diagonal: row r sums k <= r, or k >= r, the diagonal last. Other elements are
// not read, and other rows of b do not reach a sum: they may be Inf or NaN.
template <bool kUpper, class A, int kRows, int kVectors>
ONEPASS_INLINE void add_triangle(const Broadcasts<A>& a, const Panel<A>& b,
                                 Vec<A> (&sum)[kRows][kVectors]) {
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    const int k = kUpper ? kRows - 1 - i : i;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Vec<A> cells = load<A>(b.at + k * b.of_step + v * kLanes<A>);
#pragma GCC unroll 8
      for (int r = kUpper ? 0 : k; r < (kUpper ? k + 1 : kRows); ++r) {
        sum[r][v] = fma<A>(broadcast<A>(a.at[r * a.of_row + k * a.of_step]), cells, sum[r][v]);
      }
    }
  }
}

// Lanes of columns [first, last) of the vector that begins at a column; others are 0, also of NaN.
template <class A>
ONEPASS_INLINE Vec<A> keep_columns(Vec<A> v, int64_t column, int64_t first, int64_t last) {
  Vec<A> lane;
  for (int i = 0; i < kLanes<A>; ++i) lane[i] = static_cast<A>(i);
  v = lane >= broadcast<A>(static_cast<A>(first - column)) ? v : Vec<A>{};
  return lane < broadcast<A>(static_cast<A>(last - column)) ? v : Vec<A>{};
}

// Calls store(r, v, sum) for all of a tile's.
template <class A, int kRows, int kVectors, class Store>
ONEPASS_INLINE void for_each_sum(const Vec<A> (&sum)[kRows][kVectors], Store&& store) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(r, v, sum[r][v]);
  }
}

template <class A, int kVectors, class Product>
void run_strip(const Product& product, int64_t row, int64_t count, int64_t column) {
  static_assert(kTileRows == 6);
  switch (count) {
    case 1:
      return product.template run<1, kVectors>(row, column);
    case 2:
      return product.template run<2, kVectors>(row, column);
    case 3:
      return product.template run<3, kVectors>(row, column);
    case 4:
      return product.template run<4, kVectors>(row, column);
    case 5:
      return product.template run<5, kVectors>(row, column);
    default:
      return product.template run<6, kVectors>(row, column);
  }
}

// Computes rows x columns, a multiple of the lanes. Strips of almost equal height, as in
// multiply(); an element's sum does not depend on the tile that it is in.
template <class A, class Product>
void for_each_tile(int64_t rows, int64_t columns, const Product& product) {
  const int64_t strips = (rows + kTileRows - 1) / kTileRows;
  for (int64_t column = 0; column < columns;) {
    const int64_t width = std::min<int64_t>((columns - column) / kLanes<A>, kTileVectors);
    for (int64_t strip = 0; strip < strips; ++strip) {
      const int64_t row = strip * rows / strips;
      const int64_t count = (strip + 1) * rows / strips - row;
      switch (width) {
        case 1:
          run_strip<A, 1>(product, row, count, column);
          break;
        case 2:
          run_strip<A, 2>(product, row, count, column);
          break;
        case 3:
          if constexpr (kTileVectors > 2) run_strip<A, 3>(product, row, count, column);
          break;
        default:
          if constexpr (kTileVectors > 2) run_strip<A, 4>(product, row, count, column);
      }
    }
    column += width * kLanes<A>;
  }
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
