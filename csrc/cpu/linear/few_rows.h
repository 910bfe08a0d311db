// The product of a few rows with a right matrix that is read once: packing panels of it would cost
// more than multiplying with them. It is read in blocks, each of which is prefetched while the
// block before it is computed; the left rows and the sums stay in L1 and L2. Done when it runs at
// the speed of a read. The sums are those of linear_kernel, added in the same order.
//
// If the matrix is dense along k, as a weight is in the forward, a block is some columns. They are
// transposed, one cache line of each at a time, into cells in L1, which are multiplied at once. If
// it is dense along the columns, as in the gradient of the input or for a transposed weight, a
// block is a chain of k, and cells are loaded directly.
//
// Keeping the transposed cells in registers is slower: a line of 16 rows needs half of the
// registers, and a load and a store are free beside the shuffles. So is loading quarters of a
// vector into place, which saves half of the shuffles: it takes four times as many loads.
#pragma once

#include "cpu/pack.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// With more rows, packing is cheap compared with the multiply-adds. Microseconds of this kernel,
// and of the packed product of one row more, at 768x3072 on one thread of a Zen 4: float32, 16
// rows, 1162 and 1494; float32 with AVX2, 8 rows, 722 and 1000; bfloat16 dot products, 16 rows, 547
// and 804.
inline constexpr int kMostFusedRows = kVectorRegisters == 32 ? 16 : 12;

// Vectors of columns that a broadcast is multiplied with. A sum is one chain of multiply-adds, each
// of which waits for the one before it. With one vector eight rows just fill two pipes of four
// cycles' latency, and the shuffles in between leave gaps. More vectors read more rows of the
// weight at a time, whose lines evict each other from L1. GB/s of a weight in L2, with one vector
// and with two, at k = 2048 on one thread of a Xeon with AVX-512: float32, 8 rows, 15.4 and 20.5;
// float16, 1 row, 20.6 and 22.7; float16, 8 rows, 8.7 and 10.5.
template <int kRows>
inline constexpr int kFusedVectors = kRows <= (kVectorRegisters == 32 ? 8 : 5) ? 2 : 1;

// Bytes of a weight's row in a block: two blocks stay in L2.
inline constexpr int64_t kBlockBytes = 8192;
inline constexpr int64_t kLineBytes = 64;

// For a matrix dense along the columns: the vectors whose sums fill the registers, and the columns
// of a block.
template <int kRows>
inline constexpr int kAcrossVectors =
    std::clamp((kVectorRegisters - 2) / (kRows + 1), 1, kVectorRegisters == 32 ? 6 : 4);
template <class M>
inline constexpr int64_t kAcrossColumns = 512 / M::kPerCell;

// There are kernels for 1 row and for even numbers of rows; an odd number gets a row of zeros.
constexpr int64_t padded_few_rows(int64_t rows) { return rows == 1 ? 1 : (rows + 1) / 2 * 2; }

// Calls f<padded_few_rows(rows)>().
template <int kRows = kMostFusedRows, class F>
void visit_few_rows(int64_t rows, const F& f) {
  constexpr int kFewer = kRows > 2 ? kRows - 2 : kRows - 1;
  if constexpr (kFewer > 0) {
    if (rows <= kFewer) return visit_few_rows<kFewer>(rows, f);
  }
  f.template operator()<kRows>();
}

// A line of each of kLanes rows, transposed.
template <class M, class T>
class Line {
 public:
  static constexpr int n = M::kLanes;
  static constexpr bool kRounds = M::kPerCell == 2 && sizeof(T) == 4;  // two lines make one
  static constexpr int kLines = kRounds ? 2 : 1;                       // of a row
  static constexpr int kElements = kLines * kLineBytes / sizeof(T);    // of k
  static constexpr int kCells = kElements / M::kPerCell;

  // The line of row j begins at row[j] + k.
  ONEPASS_INLINE void transpose_from(const T* const (&row)[n], int64_t k) {
    if constexpr (kAreHalves) {
#pragma GCC unroll 2
      for (int c = 0; c < kElements; c += kHalvesCells) {
        transpose_halves(row, k + c, reinterpret_cast<HalfBits*>(bytes_ + c * sizeof(HalfBits)));
      }
    } else {
#pragma GCC unroll 4
      for (int at = 0; at < kLineBytes; at += kVectorBytes) {
        Vec<float> square[n];
#pragma GCC unroll 16
        for (int j = 0; j < n; ++j) {
          if constexpr (kRounds) {
            square[j] = load_row_cells<M>(row[j] + k + at / 2);
          } else {
            std::memcpy(&square[j], row[j] + k + at / sizeof(T), sizeof(square[j]));
          }
        }
        transpose(square);
        std::memcpy(bytes_ + at * n, square, sizeof(square));
      }
    }
  }

  // Cell `c` of all rows.
  ONEPASS_INLINE typename M::Cells operator[](int c) const {
    if constexpr (kAreHalves) {
      const int first = c / kHalvesCells * kHalvesCells;
      return widen_float16(at<HalfBits>(first + slot_of_halves(c - first)));
    } else if constexpr (kCells == kWords) {
      return at<typename M::Cells>(c);
    } else {
      const WordBits words = at<WordBits>(c / 2);
      return (Vec<float>)(c % 2 == 0 ? words << 16 : words & 0xffff0000u);
    }
  }

 private:
  // Other types are transposed in words: a word is one cell, or two cells of bfloat16.
  static constexpr bool kAreHalves = std::is_same_v<T, Float16>;
  static constexpr int kWords = kLineBytes / 4;

  template <class V>
  ONEPASS_INLINE V at(int index) const {
    V v;
    std::memcpy(&v, bytes_ + index * sizeof(V), sizeof(V));
    return v;
  }

  alignas(64) char bytes_[n * kLineBytes];
};

// Whether the processor's own prefetchers suffice for rows of a block that have so many bytes.
// Intel's follow one stream in each of 32 pages; prefetched lines would evict those that are needed
// now. GB/s of a weight in no cache, with prefetches and without, on two threads of a Xeon with
// AVX-512: float32, 1 row, weight rows of 8 KiB, 20.1 and 23.8; float16, 8 rows, 4 KiB, 13.6 and
// 16.9; float16, 1 row, 3 KiB, 22.8 and 20.5, because such short streams end too soon.
inline bool prefetches_by_itself([[maybe_unused]] int64_t row_bytes) {
#if defined(__x86_64__)
  return row_bytes >= 4096 && __builtin_cpu_is("intel");
#else
  return false;
#endif
}

// Memory to prefetch in the order of addresses, some lines at a time. On other processors the rows
// of a block are too many streams for the hardware. Prefetches in the order of the reads help less.
class LinesAhead {
 public:
  LinesAhead() = default;
  LinesAhead(const void* first, int64_t row_bytes, int64_t stride_bytes)
      : at_(static_cast<const char*>(first)),
        row_bytes_(row_bytes),
        to_next_row_(stride_bytes - row_bytes),
        left_(row_bytes) {}

  // The first of the next kLines lines; if there are none, `none`, which lies in the cache.
  template <int kLines>
  ONEPASS_INLINE const char* take(const void* none) {
    if (at_ == nullptr) return static_cast<const char*>(none);
    const char* first = at_;
    at_ += kLines * kLineBytes;
    left_ -= kLines * kLineBytes;
    if (left_ <= 0) {
      at_ += to_next_row_ + left_;
      left_ = row_bytes_;
    }
    return first;
  }

  ONEPASS_INLINE void prefetch_one() {
    if (at_ != nullptr) __builtin_prefetch(take<1>(nullptr), 0, 2);
  }

 private:
  const char* at_ = nullptr;
  int64_t row_bytes_ = 0;
  int64_t to_next_row_ = 0;
  int64_t left_ = 0;
};

// Some columns of the output, of all rows.
template <class M>
struct FewRows {
  using A = typename M::Number;

  const typename M::Element* left;  // (padded_few_rows(rows), left_row)
  int64_t left_row;
  A* sums;  // (rows, sums_row)
  int64_t sums_row;
  const A* bias;  // (columns,) the first chain is added to it; or null
  bool add;       // to the output's own values
  int64_t rows;

  // Adds the sums of a chain to those of earlier chains, in vector `v` of columns.
  template <int kRows, int kVectors, class Count>
  ONEPASS_INLINE void put(const typename M::Sum (&sum)[kRows][kVectors], int v, Count count) const {
    const Vec<A> first = bias ? load<A>(bias + v * M::kLanes, count) : Vec<A>{};
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      if (kRows > 2 && r + 1 == kRows && rows < kRows) break;
      A* to = sums + r * sums_row + v * M::kLanes;
      store<A>(to, add ? load<A>(to, count) + sum[r][v] : sum[r][v] + first, count);
    }
  }
};

// `size` elements of k, in chains of kChainCells, of `columns` rows of the weight.
template <class M, class T, int64_t kChainCells, int kRows>
[[gnu::noinline]] void linear_few_rows_kernel(FewRows<M> few, const T* right, int64_t right_col,
                                              int64_t columns, int64_t size, LinesAhead ahead) {
  using A = typename M::Number;
  using Cells = Line<M, T>;
  constexpr int n = M::kLanes, kVectors = kFusedVectors<kRows>;
  constexpr int64_t kChain = kChainCells * M::kPerCell;
  static_assert(kChain % Cells::kElements == 0);
  const T* row[kVectors][n];  // those beyond the last are computed, and not stored
  for (int j = 0; j < kVectors * n; ++j) {
    row[j / n][j % n] = right + std::min<int64_t>(j, columns - 1) * right_col;
  }
  Cells line[kVectors];
  int64_t k = 0;
  do {
    typename M::Sum sum[kRows][kVectors] = {};
    const auto multiply = [&](int64_t at, int c) {
      typename M::Cells cells[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        cells[v] = line[v][c];
        keep_in_register(cells[v]);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const auto one = M::broadcast_cell(few.left + r * few.left_row + at + c * M::kPerCell);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sum[r][v] = M::multiply_add(one, cells[v], sum[r][v]);
      }
    };
    const int64_t end = std::min(k + kChain, size);
    for (; k + Cells::kElements <= end; k += Cells::kElements) {
      // One prefetch between two products: many at once delay the loads of this line. Eight rows in
      // float16, a weight in no cache, two threads: 12.1 GB/s with all at once, 13.9 one by one.
      constexpr int kAhead = n * kVectors * Cells::kLines;
      const char* next = ahead.take<kAhead>(few.left);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) line[v].transpose_from(row[v], k);
      keep_in_memory(line);
#pragma GCC unroll 32
      for (int c = 0; c < Cells::kCells; ++c) {
#pragma GCC unroll 4
        for (int i = c * kAhead / Cells::kCells; i < (c + 1) * kAhead / Cells::kCells; ++i) {
          __builtin_prefetch(next + i * kLineBytes, 0, 2);
        }
        multiply(k, c);
      }
    }
    if (k < end) {
      for (int v = 0; v < kVectors; ++v) {
        T rest[n][Cells::kElements] = {};
        const T* of_rest[n];
        for (int j = 0; j < n; ++j) {
          std::copy(row[v][j] + k, row[v][j] + end, rest[j]);
          of_rest[j] = rest[j];
        }
        line[v].transpose_from(of_rest, 0);
      }
      for (int c = 0; c * M::kPerCell < end - k; ++c) multiply(k, c);
      k = end;
    }
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const int64_t here = columns - v * n;
      if (here >= n) {
        few.put(sum, v, WholeVector<A>{});
      } else if (here > 0) {
        few.put(sum, v, Tail{here});
      }
    }
    few.add = true;
  } while (k < size);
}

// `columns` columns over all of k; `after` others follow them, and are prefetched.
template <class M, class T, int64_t kChainCells, int kRows>
void multiply_few_rows(const FewRows<M>& all, const T* right, int64_t right_col, int64_t columns,
                       int64_t depth, int64_t after) {
  constexpr int64_t kSize = sizeof(T);
  constexpr int64_t kBlock = kBlockBytes / kSize;  // of k
  static_assert(kBlock % (kChainCells * M::kPerCell) == 0);
  constexpr int64_t kGroup = kFusedVectors<kRows> * M::kLanes;  // columns
  for (int64_t col = 0; col < columns; col += kGroup) {
    const T* group = right + col * right_col;
    const int64_t here = std::min(kGroup, columns - col);
    const int64_t next = std::min(kGroup, columns - col - here + after);
    FewRows<M> few = all;
    few.sums += col;
    few.bias += few.bias ? col : 0;
    int64_t k = 0;
    do {
      const int64_t size = std::min(kBlock, depth - k), rest = depth - k - size;
      LinesAhead ahead;
      if (rest > 0) {
        ahead = {group + k + size, std::min(kBlock, rest) * kSize, right_col * kSize};
      } else if (next > 0 && size == right_col) {  // all one piece of memory
        ahead = {group + here * right_col, next * size * kSize, 0};
      } else if (next > 0) {
        ahead = {group + here * right_col, std::min(kBlock, depth) * kSize, right_col * kSize};
      }
      if (prefetches_by_itself(size * kSize)) ahead = {};
      linear_few_rows_kernel<M, T, kChainCells, kRows>(few, group + k, right_col, here, size,
                                                       ahead);
      few.left += size;
      few.add = true;
      k += size;
    } while (k < depth);
  }
}

// A chain of `size` elements of k, of kVectors vectors of columns.
template <class M, class T, int kRows, int kVectors, class Count>
[[gnu::noinline]] void linear_few_rows_across_kernel(const FewRows<M>& few, const T* right,
                                                     int64_t right_step, int64_t size, Count count,
                                                     LinesAhead& ahead) {
  constexpr int kVector = M::kLanes * M::kPerCell * static_cast<int>(sizeof(T));  // bytes
  constexpr int kSteps = std::max<int>(4, kLineBytes / kVector);  // between two prefetches
  constexpr int kLines = kSteps * kVectors * kVector / kLineBytes;
  typename M::Sum sum[kRows][kVectors] = {};
  const auto multiply = [&](int64_t k, bool is_odd) {
    const T* row = right + k * right_step;
    const T* next = is_odd ? nullptr : row + right_step;
    typename M::Cells cells[kVectors];
#pragma GCC unroll 6
    for (int v = 0; v < kVectors; ++v) {
      cells[v] =
          load_cells_of_rows<M>(row + v * M::kLanes, next ? next + v * M::kLanes : next, count);
      keep_in_register(cells[v]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const auto one = M::broadcast_cell(few.left + r * few.left_row + k);
#pragma GCC unroll 6
      for (int v = 0; v < kVectors; ++v) sum[r][v] = M::multiply_add(one, cells[v], sum[r][v]);
    }
  };
  int64_t k = 0;
  for (; k + kSteps * M::kPerCell <= size; k += kSteps * M::kPerCell) {
#pragma GCC unroll 4
    for (int i = 0; i < kLines; ++i) ahead.prefetch_one();
#pragma GCC unroll 8
    for (int step = 0; step < kSteps; ++step) multiply(k + step * M::kPerCell, false);
  }
  for (; k + M::kPerCell <= size; k += M::kPerCell) multiply(k, false);
  if (k < size) multiply(k, true);
#pragma GCC unroll 6
  for (int v = 0; v < kVectors; ++v) few.put(sum, v, count);
}

// `columns` columns (at most kAcrossColumns) over all of k, of a right matrix that is dense along
// the columns; `after` others follow them, and are prefetched.
template <class M, class T, int64_t kChainCells, int kRows>
void multiply_few_rows_across(const FewRows<M>& all, const T* right, int64_t right_step,
                              int64_t columns, int64_t depth, int64_t after) {
  using A = typename M::Number;
  constexpr int64_t n = M::kLanes, kSize = sizeof(T);
  constexpr int64_t kChain = kChainCells * M::kPerCell;
  constexpr int kVectors = kAcrossVectors<kRows>;
  FewRows<M> chain = all;
  int64_t k = 0;
  do {
    const int64_t size = std::min(kChain, depth - k);
    const T* block = right + k * right_step;
    LinesAhead ahead;
    if (k + size < depth) {
      ahead = {block + size * right_step, columns * kSize, right_step * kSize};
    } else if (after > 0) {
      ahead = {right + columns, std::min(kAcrossColumns<M>, after) * kSize, right_step * kSize};
    }
    FewRows<M> few = chain;
    int64_t col = 0;
    const auto take = [&](int64_t taken) {
      col += taken;
      few.sums += taken;
      few.bias += few.bias ? taken : 0;
    };
    for (; col + kVectors * n <= columns; take(kVectors * n)) {
      linear_few_rows_across_kernel<M, T, kRows, kVectors>(few, block + col, right_step, size,
                                                           WholeVector<A>{}, ahead);
    }
    for (; col + n <= columns; take(n)) {
      linear_few_rows_across_kernel<M, T, kRows, 1>(few, block + col, right_step, size,
                                                    WholeVector<A>{}, ahead);
    }
    if (col < columns) {
      linear_few_rows_across_kernel<M, T, kRows, 1>(few, block + col, right_step, size,
                                                    Tail{columns - col}, ahead);
    }
    chain.left += size;
    chain.add = true;
    k += size;
  } while (k < depth);
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
