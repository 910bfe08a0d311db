// Matrix products of small tiles, the inner loops of attention and linear:
//
//   scalar: c[row][col] = sum over k of a[row][k] * b[k][col]
//
// The columns are vector lanes, so b and c are dense along them. The elements of a are broadcast
// one at a time and may lie anywhere: along a row or a column of another matrix. A tile of
// kTileRows x kTileVectors sums stays in registers over all of k, so that each step loads
// kTileVectors vectors and kTileRows broadcasts for kTileRows x kTileVectors multiply-adds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cpu/vec.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// The sums of a tile, the vectors of b and a broadcast fill the registers: 24 + 4 + 1 of 32, and
// 12 + 2 + 1 of 16.
inline constexpr int kTileRows = 6;
inline constexpr int kTileVectors = kVectorRegisters == 32 ? 4 : 2;

// float32 elements, one multiply-add per step.
struct Fma {
  using Element = float;
  using Number = float;  // of sums
  using Sum = Vec<float>;
  static constexpr int kLanes = cpu::kLanes<float>;
  static constexpr int kPerCell = 1;  // elements of k that a cell of a or b holds
  // Additions in a chain of a product over a head's dimensions: torch's products sum lane by lane,
  // and one long chain would be further from float64 than they are.
  static constexpr int64_t kChain = 32;
  using Cells = Vec<float>;

  ONEPASS_INLINE static Cells broadcast_cell(const float* a) { return broadcast<float>(*a); }
  ONEPASS_INLINE static Cells load_cells(const float* b) { return load<float>(b); }
  ONEPASS_INLINE static Vec<float> multiply_add(Cells a, Cells b, Vec<float> sum) {
    return fma<float>(a, b, sum);
  }
};

struct Fma64 {
  using Element = double;
  using Number = double;
  using Sum = Vec<double>;
  static constexpr int kLanes = cpu::kLanes<double>;
  static constexpr int kPerCell = 1;
  using Cells = Vec<double>;

  ONEPASS_INLINE static Cells broadcast_cell(const double* a) { return broadcast<double>(*a); }
  ONEPASS_INLINE static Cells load_cells(const double* b) { return load<double>(b); }
  ONEPASS_INLINE static Vec<double> multiply_add(Cells a, Cells b, Vec<double> sum) {
    return fma<double>(a, b, sum);
  }
};

// Several narrow elements in a cell of 32 bits.
struct WordCells {
  static constexpr int kLanes = cpu::kLanes<float>;
  using Cells = WordBits;

  ONEPASS_INLINE static Cells broadcast_cell(const void* a) {
    uint32_t cell;
    std::memcpy(&cell, a, sizeof(cell));
    return cell - WordBits{};
  }
  ONEPASS_INLINE static Cells load_cells(const void* b) {
    Cells cells;
    std::memcpy(&cells, b, sizeof(cells));
    return cells;
  }
};

// Pairs of bfloat16 neighbours along k, two products per lane and step.
struct Dot : WordCells {
  using Element = BFloat16;
  using Number = float;
  using Sum = Vec<float>;
  static constexpr int kPerCell = 2;
  static constexpr int64_t kChain = 128;

  ONEPASS_INLINE static Vec<float> multiply_add(Cells a, Cells b, Vec<float> sum) {
    return multiply_add_pairs(a, b, sum);
  }
};

enum class Update {
  kStore,    // c = factor[0] * sum
  kAdd,      // c += factor[0] * sum
  kRescale,  // c = c * factor[col] + sum
};

// Strides in elements of a and b, in floats of c. A step is a cell: kPerCell elements of k.
template <class M>
struct Product {
  const typename M::Element* a;
  int64_t a_row;
  int64_t a_step;
  const typename M::Element* b;
  int64_t b_step;
  int64_t steps;
  float* c;
  int64_t c_row;
  Update update;
  const float* factor;
};

// sum[row][vector] += the products of `steps` cells.
template <class M, int kRows, int kVectors>
ONEPASS_INLINE void add_products(const typename M::Element* a, int64_t a_row, int64_t a_step,
                                 const typename M::Element* b, int64_t b_step, int64_t steps,
                                 typename M::Sum (&sum)[kRows][kVectors]) {
  for (; steps > 0; --steps) {
    typename M::Cells cells[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      typename M::Cells loaded = M::load_cells(b + v * M::kLanes * M::kPerCell);
      keep_in_register(loaded);
      cells[v] = loaded;
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      typename M::Cells one = M::broadcast_cell(a + r * a_row);
      keep_in_register(one);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = M::multiply_add(one, cells[v], sum[r][v]);
    }
    a += a_step;
    b += b_step;
  }
}

template <class M, int kRows, int kVectors>
[[gnu::noinline]] void multiply_tile(const Product<M>& p) {
  Vec<float> sum[kRows][kVectors] = {};
  add_products<M>(p.a, p.a_row, p.a_step, p.b, p.b_step, p.steps, sum);
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    float* c = p.c + v * kLanes<float>;
    if (p.update == Update::kStore) {
      const Vec<float> factor = broadcast<float>(*p.factor);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) store<float>(c + r * p.c_row, sum[r][v] * factor);
    } else if (p.update == Update::kAdd) {
      const Vec<float> factor = broadcast<float>(*p.factor);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        store<float>(c + r * p.c_row, fma<float>(sum[r][v], factor, load<float>(c + r * p.c_row)));
      }
    } else {
      const Vec<float> factor = load<float>(p.factor + v * kLanes<float>);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        store<float>(c + r * p.c_row, fma<float>(load<float>(c + r * p.c_row), factor, sum[r][v]));
      }
    }
  }
}

template <class M, int kVectors>
ONEPASS_INLINE void multiply_rows(const Product<M>& p, int64_t rows) {
  static_assert(kTileRows == 6);
  switch (rows) {  // not a table: a static one of a template is a symbol that every level shares
    case 1:
      return multiply_tile<M, 1, kVectors>(p);
    case 2:
      return multiply_tile<M, 2, kVectors>(p);
    case 3:
      return multiply_tile<M, 3, kVectors>(p);
    case 4:
      return multiply_tile<M, 4, kVectors>(p);
    case 5:
      return multiply_tile<M, 5, kVectors>(p);
    default:
      return multiply_tile<M, 6, kVectors>(p);
  }
}

// The part of a product that a strip of rows needs; it may name more steps than exist.
struct Part {
  int64_t first_step;
  int64_t last_step;
  int64_t first_vector;  // column groups wholly outside these vectors are skipped
  int64_t last_vector;
};

inline constexpr int64_t kAllSteps = std::numeric_limits<int64_t>::max();

// Computes rows x vectors of c. part(row, row + count) gives the steps that a strip of rows sums
// over: if a diagonal crosses the tile, strips need only a part.
template <class M, class PartOf>
ONEPASS_INLINE void multiply(const Product<M>& whole, int64_t rows, int64_t vectors,
                             PartOf&& part) {
  const int64_t strips = (rows + kTileRows - 1) / kTileRows;
  for (int64_t vector = 0; vector < vectors;) {
    const int64_t left = vectors - vector;
    const int64_t width = left >= kTileVectors ? kTileVectors : left;
    for (int64_t strip = 0; strip < strips; ++strip) {
      // Strips of almost equal height: 64 rows are 9 strips of 6 and 2 of 5, none of 4.
      const int64_t row = strip * rows / strips;
      const int64_t count = (strip + 1) * rows / strips - row;
      const Part taken = part(row, row + count);
      const int64_t steps = std::min(taken.last_step, whole.steps) - taken.first_step;
      if (steps <= 0 || vector >= taken.last_vector || vector + width <= taken.first_vector)
        continue;
      Product<M> p = whole;
      p.a += row * p.a_row + taken.first_step * p.a_step;
      p.b += vector * kLanes<float> * M::kPerCell + taken.first_step * p.b_step;
      p.c += row * p.c_row + vector * kLanes<float>;
      p.steps = steps;
      if (p.update == Update::kRescale) p.factor += vector * kLanes<float>;
      switch (width) {
        case 1:
          multiply_rows<M, 1>(p, count);
          break;
        case 2:
          multiply_rows<M, 2>(p, count);
          break;
        case 3:
          if constexpr (kTileVectors > 2) multiply_rows<M, 3>(p, count);
          break;
        default:
          if constexpr (kTileVectors > 2) multiply_rows<M, 4>(p, count);
      }
    }
    vector += width;
  }
}

template <class M>
ONEPASS_INLINE void multiply(const Product<M>& whole, int64_t rows, int64_t vectors) {
  multiply(whole, rows, vectors,
           [&](int64_t, int64_t) { return Part{0, whole.steps, 0, vectors}; });
}

// Computes rows x vectors of c = factor * a b, over `size` elements of k in chains of M::kChain.
template <class M, class PartOf>
ONEPASS_INLINE void multiply_in_chains(Product<M> p, int64_t size, int64_t rows, int64_t vectors,
                                       PartOf&& part) {
  p.update = Update::kStore;
  for (int64_t k = 0; k < size; k += M::kChain) {
    const int64_t length = size - k < M::kChain ? size - k : M::kChain;
    p.steps = (length + M::kPerCell - 1) / M::kPerCell;
    multiply(p, rows, vectors, part);
    p.a += M::kChain / M::kPerCell * p.a_step;
    p.b += M::kChain / M::kPerCell * p.b_step;
    p.update = Update::kAdd;
  }
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
