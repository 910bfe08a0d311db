// Packs panels of the right matrix and strips of the left one, which tiles read.
#pragma once

#include "cpu/pack.h"
#include "ops/linear.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// Sums of a tile, vectors of a panel and a broadcast fill the registers: 24 + 2 + 1 of 32, and
// 12 + 2 + 1 of 16.
inline constexpr int kStripRows = kVectorRegisters == 32 ? 12 : 6;
inline constexpr int kPanelVectors = 2;
// Cells in a partial sum of a bias gradient.
inline constexpr int64_t kRun = 16;

template <class M>
inline constexpr int64_t kPanel = kPanelVectors * M::kLanes;  // columns
template <class M>
inline constexpr int64_t kSquare = M::kLanes * M::kPerCell;  // elements of k, transposed together
template <class M>
inline constexpr int64_t kStrip =
    (kStripRows + M::kLanes - 1) / M::kLanes * M::kLanes;  // rows, padded

// Calls put(v, lanes) for the vectors of a panel that hold its first `columns` sums.
template <class A, class Put>
ONEPASS_INLINE void for_each_panel_vector(int64_t columns, Put&& put) {
#pragma GCC unroll 2
  for (int v = 0; v < kPanelVectors; ++v) {
    const int64_t left = columns - v * kLanes<A>;
    if (left >= kLanes<A>) {
      put(v, WholeVector<A>{});
    } else if (left > 0) {
      put(v, Tail{left});
    }
  }
}

// Calls tile<kRows>() for a strip of 1 to kRows rows.
template <int kRows = kStripRows, class Tile>
ONEPASS_INLINE void visit_strip(int64_t rows, Tile&& tile) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return tile.template operator()<kRows>();
    visit_strip<kRows - 1>(rows, tile);
  }
}

// Prefetches a rectangle of memory while tiles are computed, a few lines at a time: the operand to
// be packed next has too many short rows for the hardware's prefetchers.
class Ahead {
 public:
  Ahead(const void* first, int64_t rows, int64_t row_bytes, int64_t stride_bytes)
      : row_(static_cast<const char*>(first)),
        stride_(stride_bytes),
        rows_(first ? rows : 0),
        bytes_(row_bytes) {}

  int64_t lines() const { return rows_ * (bytes_ / kLine + 1); }

  ONEPASS_INLINE void take(int64_t lines) {
    for (; lines > 0 && rows_ > 0; --lines) {
      __builtin_prefetch(row_ + at_, 0, 2);
      at_ += kLine;
      if (at_ >= bytes_ + kLine) {
        at_ = 0;
        row_ += stride_;
        --rows_;
      }
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  const char* row_;
  int64_t stride_;
  int64_t rows_;
  int64_t bytes_;
  int64_t at_ = 0;
};

// `count` elements of k from the k-th on, of `rows` rows.
template <class M, class T>
void pack_left(const LinearProduct& args, int64_t row, int64_t rows, int64_t k, int64_t count,
               typename M::Element* strip) {
  const T* from = static_cast<const T*>(args.left) + row * args.left_row + k * args.left_step;
  if (args.left_step == 1) {
    pack_panel<M>([&](int64_t i) { return from + i * args.left_row; }, rows, count, kStrip<M>,
                  strip);
  } else {
    // The strip's own rows and those after them, if there are any: whole vectors load faster.
    const int64_t there = std::min(kStrip<M>, args.rows - row);
    pack_cells_of_rows<M>([&](int64_t i) { return from + i * args.left_step; }, count, there,
                          kStrip<M>, strip);
  }
}

// Prefetches a few lines per square that it transposes.
template <class M, class T>
void pack_right(const LinearProduct& args, int64_t col, int64_t cols, int64_t k, int64_t count,
                typename M::Element* panel, Ahead& ahead, int64_t lines) {
  const T* from = static_cast<const T*>(args.right) + k * args.right_step + col * args.right_col;
  for (int64_t first = 0; first < count; first += kSquare<M>) {
    const int64_t here = std::min(kSquare<M>, count - first);
    typename M::Element* to = panel + first * kPanel<M>;
    ahead.take(lines);
    if (args.right_step == 1) {
      pack_panel<M>([&](int64_t j) { return from + first + j * args.right_col; }, cols, here,
                    kPanel<M>, to);
    } else {
      pack_cells_of_rows<M>([&](int64_t i) { return from + (first + i) * args.right_step; }, here,
                            cols, kPanel<M>, to);
    }
  }
}

// sums[i] += `count` numbers of row `row` + i of a left matrix in float32, from the k-th on.
inline void add_left_numbers(const LinearProduct& args, int64_t row, int64_t rows, int64_t k,
                             int64_t count, float* sums) {
  const float* from =
      static_cast<const float*>(args.left) + row * args.left_row + k * args.left_step;
  if (args.left_step == 1) {
    for (int64_t i = 0; i < rows; ++i) {
      Vec<float> total = {};
      for_each_vector<float>(0, count, [&](int64_t j, auto lanes) {
        total += load<float>(from + i * args.left_row + j, lanes);
      });
      sums[i] += sum_of_lanes<float>(total);
    }
    return;
  }
  for_each_vector<float>(0, rows, [&](int64_t i, auto lanes) {
    Vec<float> total = {};
    for (int64_t first = 0; first < count; first += kRun) {
      Vec<float> run = {};
      for (int64_t j = first; j < std::min(first + kRun, count); ++j) {
        run += load<float>(from + j * args.left_step + i, lanes);
      }
      total += run;
    }
    store<float>(sums + i, load<float>(sums + i, lanes) + total, lanes);
  });
}

// sums[i] += the elements of row i in a strip, or the numbers that it was packed from if it rounded
// them.
template <class M>
void add_left(const LinearProduct& args, int64_t row, int64_t rows, int64_t k, int64_t count,
              const typename M::Element* strip, typename M::Number* sums) {
  using A = typename M::Number;
  if constexpr (M::kPerCell == 2) {
    if (args.left_dtype == DType::kFloat32) {
      return add_left_numbers(args, row, rows, k, count, sums);
    }
  }
  const int64_t cells = (count + M::kPerCell - 1) / M::kPerCell;
  for (int64_t i = 0; i < rows; i += M::kLanes) {
    const auto count = std::min<int64_t>(rows - i, M::kLanes);
    Vec<A> total = {};
    for (int64_t first = 0; first < cells; first += kRun) {
      Vec<A> run = {};
      for (int64_t cell = first; cell < std::min(first + kRun, cells); ++cell) {
        const auto* at = strip + (cell * kStrip<M> + i) * M::kPerCell;
        if constexpr (M::kPerCell == 1) {
          run += load<A>(at);
        } else {
          const WordBits pairs = M::load_cells(at);
          run += (Vec<float>)(pairs << 16) + (Vec<float>)(pairs & 0xffff0000u);
        }
      }
      total += run;
    }
    store<A>(sums + i, load<A>(sums + i, Tail{count}) + total, Tail{count});
  }
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
