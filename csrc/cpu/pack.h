// Packing operands into the layouts of the products: a panel has vectors along columns and k down
// its rows, a row tile has rows in the order of memory. In both, a cell is M::kPerCell elements of
// k, and cells are padded with zeros at an odd end. Pairs are of bfloat16; float32 is rounded to
// it.
#pragma once

#include <type_traits>

#include "cpu/multiply.h"
#include "cpu/vec_squares.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

ONEPASS_INLINE constexpr int64_t round_up(int64_t value, int64_t to) {
  return (value + to - 1) / to * to;
}

// One vector of cells, as 32-bit words.
template <class M, class T>
ONEPASS_INLINE Vec<float> load_row_cells(const T* from) {
  if constexpr (M::kPerCell == 1) {
    return load<float>(from);
  } else if constexpr (std::is_same_v<T, float>) {
    return (Vec<float>)neighbours_of(load<float>(from), load<float>(from + kLanes<float>));
  } else {
    Vec<float> cells;
    std::memcpy(&cells, from, sizeof(cells));
    return cells;
  }
}

// The first `count` elements, if there are so many in a vector; the others are zero.
ONEPASS_INLINE Vec<float> load_up_to(const float* from, int64_t count) {
  if (count >= kLanes<float>) return load<float>(from);
  return count > 0 ? load_partial<float>(from, count) : Vec<float>{};
}

// One vector of cells from a row of `size` elements, beginning with element `at`, as 32-bit words.
template <class M, class T>
ONEPASS_INLINE Vec<float> load_row_cells(const T* row, int64_t at, int64_t size) {
  constexpr int64_t kElements = kLanes<float> * M::kPerCell;
  if constexpr (M::kPerCell == 1) {
    return at + kElements <= size ? load<float>(row + at)
                                  : load_partial<float>(row + at, size - at);
  } else if constexpr (std::is_same_v<T, float>) {
    constexpr int64_t n = kLanes<float>;
    return (Vec<float>)neighbours_of(load_up_to(row + at, size - at),
                                     load_up_to(row + at + n, size - at - n));
  } else {
    Vec<float> cells = {};
    if (at + kElements <= size) {
      std::memcpy(&cells, row + at, sizeof(cells));
    } else {
      std::memcpy(&cells, row + at, static_cast<size_t>(size - at) * sizeof(T));
    }
    return cells;
  }
}

// The transpose of `rows` rows of `size` elements: panel row k has cell k of each, `columns` cells
// (a multiple of the lanes, at least `rows`) wide; columns beyond `rows` are zero. row(i) is where
// row i lies.
template <class M, class Row>
void pack_panel(Row&& row, int64_t rows, int64_t size, int64_t columns,
                typename M::Element* panel) {
  constexpr int n = kLanes<float>;
  const int64_t cells = (size + M::kPerCell - 1) / M::kPerCell;
  if constexpr (std::is_same_v<typename M::Element, double>) {  // rare: element by element
    for (int64_t i = 0; i < columns; ++i) {
      for (int64_t k = 0; k < size; ++k) panel[k * columns + i] = i < rows ? row(i)[k] : 0.0;
    }
  } else {
    for (int64_t first = 0; first < columns; first += n) {
      for (int64_t cell = 0; cell < cells; cell += n) {
        Vec<float> square[n];
        if (first + n <= rows && (cell + n) * M::kPerCell <= size) {
#pragma GCC unroll 16
          for (int i = 0; i < n; ++i) {
            square[i] = load_row_cells<M>(row(first + i) + cell * M::kPerCell);
          }
        } else {
          for (int i = 0; i < n; ++i) {
            square[i] = first + i < rows
                            ? load_row_cells<M>(row(first + i), cell * M::kPerCell, size)
                            : Vec<float>{};
          }
        }
        transpose(square);
        auto* to = panel + (cell * columns + first) * M::kPerCell;
        if (cells - cell >= n) {
#pragma GCC unroll 16
          for (int k = 0; k < n; ++k) {
            std::memcpy(to + k * columns * M::kPerCell, &square[k], sizeof(square[k]));
          }
        } else {
          for (int k = 0; k < cells - cell; ++k) {
            std::memcpy(to + k * columns * M::kPerCell, &square[k], sizeof(square[k]));
          }
        }
      }
    }
  }
}

// Rows as they are, converted to M's elements, `stride` elements apart; elements from `size` up to
// the stride are zero, and so is a row that is null.
template <class M, class Row>
void pack_rows(Row&& row, int64_t rows, int64_t size, int64_t stride, typename M::Element* tile) {
  for (int64_t i = 0; i < rows; ++i) {
    const auto* from = row(i);
    typename M::Element* to = tile + i * stride;
    if (from == nullptr) {
      std::fill_n(to, stride, typename M::Element{});
      continue;
    }
    if constexpr (M::kPerCell == 2 && std::is_same_v<decltype(from), const BFloat16*>) {
      std::memcpy(to, from, static_cast<size_t>(size) * sizeof(*to));
    } else {
      using A = typename M::Number;
      for_each_vector<A>(0, size, [&](int64_t j, auto count) {
        store<A>(to + j, load<A>(from + j, count), count);
      });
    }
    for (int64_t j = size; j < stride; ++j) to[j] = {};
  }
}

// One vector of cells, of kPerCell neighbouring rows; a row that is missing is zeros.
template <class M, class T, class Count>
ONEPASS_INLINE typename M::Cells load_cells_of_rows(const T* low, [[maybe_unused]] const T* high,
                                                    Count count) {
  if constexpr (M::kPerCell == 1) {
    return load<typename M::Number>(low, count);
  } else if constexpr (std::is_same_v<T, float>) {
    const auto numbers = [&](const T* from) {
      return from == nullptr ? Vec<float>{} : load<float>(from, count);
    };
    return pairs_of(numbers(low), numbers(high));
  } else {
    const auto bits = [&](const T* from) -> WordBits {
      if (from == nullptr) return WordBits{};
      HalfBits half = {};
      if constexpr (std::is_same_v<Count, Tail>) {
        std::memcpy(&half, from, static_cast<size_t>(count.count) * sizeof(T));
      } else {
        std::memcpy(&half, from, sizeof(half));
      }
      return widen_bits(half);
    };
    return bits(low) | bits(high) << 16;
  }
}

// Rows as the second factor of a product that sums over them: tile row i has cells of M::kPerCell
// neighbouring rows, `columns` wide (a multiple of the lanes). Elements beyond `size`, rows that
// are null, and one missing at an odd end are zero.
template <class M, class Row>
void pack_cells_of_rows(Row&& row, int64_t rows, int64_t size, int64_t columns,
                        typename M::Element* tile) {
  if constexpr (M::kPerCell == 1) {
    pack_rows<M>(row, rows, size, columns, tile);
  } else {
    for (int64_t i = 0; i < rows; i += 2) {
      const auto* low = row(i);
      const auto* high = i + 1 < rows ? row(i + 1) : nullptr;
      auto* to = tile + i * columns;
      for (int64_t j = 0; j < columns; j += M::kLanes) {
        const auto at = [&](const auto* from) { return from ? from + j : from; };
        WordBits cells = {};
        if (j + M::kLanes <= size) {
          cells = load_cells_of_rows<M>(at(low), at(high), WholeVector<float>{});
        } else if (j < size) {
          cells = load_cells_of_rows<M>(at(low), at(high), Tail{size - j});
        }
        std::memcpy(to + j * 2, &cells, sizeof(cells));
      }
    }
  }
}

// The multiplier of an element type on this level.
template <class T>
using MultiplierOf = std::conditional_t<std::is_same_v<T, BFloat16> && kHasPairProducts, Dot, Fma>;

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
