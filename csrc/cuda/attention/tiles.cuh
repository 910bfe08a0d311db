// Tiles of 16-bit rows in shared memory, how they come there, and their products on tensor cores.
//
// Fragments are those of mma.m16n8k16 (cuda/ptx.cuh); g is lane / 4 and t is lane % 4. The C
// fragments of a tile's columns 16 k .. 16 k + 15 are, narrowed, the A fragment of the next product
// as they lie.
#pragma once

#include "cuda/ptx.cuh"
#include "cuda/vec.cuh"
#include "ops/attention.h"

namespace onepass::cuda {

// Columns that products take or leave together: what a row has beyond its length, up to a multiple
// of this, is zero in shared memory; what is beyond that is never looked at.
inline constexpr int kSlab = 32;

inline constexpr int kChunk = 8;  // elements of 16 bytes

ONEPASS_HOST_DEVICE inline int slabs_of(int64_t cols) {
  return static_cast<int>((cols + kSlab - 1) / kSlab);
}

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x % kLanes); }
__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x / kLanes); }

// The same number, opaque to the compiler: what follows from it is recomputed where it is needed
// instead of kept in registers through a loop.
__device__ __forceinline__ int opaque(int number) {
  auto bits = static_cast<uint32_t>(number);
  forget(bits);
  return static_cast<int>(bits);
}

// ---- rows in global memory ----------------------------------------------------------------------

// The rows of one (batch, head): row i is at base + i * stride.
template <class T>
struct Rows {
  T* base;
  int64_t stride;
  int cols;
  int piece;  // bytes: the most of 16, 8, 4 and 2 that divide where each row begins and ends

  __device__ __forceinline__ T* row(int64_t i) const { return base + i * stride; }
};

// The greatest power of two, up to 16, that divides all of them.
__device__ __forceinline__ int common_piece(uint64_t a, uint64_t b, uint64_t c = 0) {
  const auto bits = static_cast<uint32_t>(a | b | c) | 16u;
  return static_cast<int>(bits & (0u - bits));
}

// Of a dense or packed tensor, `first` rows in.
template <class T>
__device__ __forceinline__ Rows<T> rows_of(const Strided& tensor, int64_t batch, int64_t head,
                                           int64_t first, int64_t cols) {
  T* base = static_cast<T*>(tensor.data) + batch * tensor.batch_stride + head * tensor.head_stride +
            first * tensor.row_stride;
  const int piece = common_piece(reinterpret_cast<uintptr_t>(base),
                                 static_cast<uint64_t>(tensor.row_stride) * sizeof(T),
                                 static_cast<uint64_t>(cols) * sizeof(T));
  return {base, tensor.row_stride, static_cast<int>(cols), piece};
}

// Those of a sequence whose keys are in pages: row i of the sequence.
template <class T>
struct PagedRows {
  Rows<T> page0;  // of page 0
  int64_t page_stride;
  const int32_t* table;  // of the sequence
  int page_size;

  __device__ __forceinline__ T* row(int i) const {
    const int page = i / page_size;
    return page0.row(i - page * page_size) +
           static_cast<int64_t>(load_global(table + page)) * page_stride;
  }
};

// ---- tiles --------------------------------------------------------------------------------------

// Rows of kCols elements in shared memory, without gaps: the chunks of a row are exchanged by its
// number, so that eight rows have the same chunk in different banks.
template <class T, int kCols>
struct Tile {
  static_assert(kCols % 64 == 0 && sizeof(T) == 2);
  static constexpr int kChunks = kCols / kChunk;
  T* data;

  static constexpr int bytes(int rows) { return rows * kCols * static_cast<int>(sizeof(T)); }
  static __device__ __forceinline__ Tile take(SharedMemory& shared, int rows) {
    return {shared.take<T>(rows * kCols)};
  }
  __device__ __forceinline__ T* chunk(int row, int chunk) const {
    return data + row * kCols + (chunk ^ row % 8) * kChunk;
  }
  // Of the pair of elements that begins at an even column.
  __device__ __forceinline__ uint32_t* pair(int row, int col) const {
    return reinterpret_cast<uint32_t*>(chunk(row, col / kChunk) + col % kChunk);
  }
};

// A chunk of `cols` elements from column `col` of a row, zero where they end.
template <class T>
__device__ __forceinline__ Words gather_chunk(const T* row, int col, int cols) {
  Words words{};
  ONEPASS_UNROLL
  for (int e = 0; e < kChunk; ++e) {
    if (col + e >= cols) continue;
    words.word[e / 2] |= static_cast<uint32_t>(load_global(row + col + e).bits) << e % 2 * 16;
  }
  return words;
}

// Starts copying the chunk of a row at (row, col) of a tile, in pieces of so many bytes; what is
// beyond the row is zero and not read, nor is any of it unless `has`. Two bytes cannot be copied
// asynchronously: those are read and written here.
template <class T, int kCols>
__device__ __forceinline__ void load_chunk(const Tile<T, kCols>& tile, int row, int col,
                                           const T* from, int cols, int piece, bool has) {
  T* const target = tile.chunk(row, col / kChunk);
  const auto copy = [&]<int kBytes>() {
    constexpr int kElements = kBytes / sizeof(T);
    ONEPASS_UNROLL
    for (int e = 0; e < kChunk; e += kElements) {
      cp_async_few<kBytes>(target + e, from + col + e, has && col + e < cols);
    }
  };
  if (piece == 16) {
    cp_async_16(target, from + col, has);
  } else if (piece == 8) {
    copy.template operator()<8>();
  } else if (piece == 4) {
    copy.template operator()<4>();
  } else {
    *reinterpret_cast<Words*>(target) = has ? gather_chunk(from, col, cols) : Words{};
  }
}

// Starts copying rows first .. first + kRows - 1 with kThreads threads; those outside [begin, end)
// are zero and not read. Complete after the thread's next cp_async_wait and a barrier.
template <int kRows, int kThreads, class T, int kCols>
__device__ __forceinline__ void load_tile(const Tile<T, kCols>& tile, const Rows<const T>& rows,
                                          int first, int begin, int end) {
  constexpr int kChunks = Tile<T, kCols>::kChunks, kStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kStep == 0 && (kStep & (kStep - 1)) == 0);
  const int col = static_cast<int>(threadIdx.x % kChunks) * kChunk;
  if (col / kSlab * kSlab >= rows.cols) return;
  const int top = static_cast<int>(threadIdx.x / kChunks);
  // From row to row by one addition: products with the stride would each be kept in registers.
  const T* from = rows.row(first + top);
  if (rows.piece == 16) {
    // Likewise where a chunk goes: `top` and a multiple of kStep have no bit in common.
    T* const to = tile.data + top * kCols;
    const int own = (col / kChunk ^ top % 8) * kChunk;
    const int skipped = begin - first - top, there = col < rows.cols ? end - first - top : 0;
    ONEPASS_UNROLL
    for (int row = 0; row < kRows; row += kStep) {
      cp_async_16(to + row * kCols + (own ^ row % 8 * kChunk), from + col,
                  skipped <= row && row < there);
      from += kStep * rows.stride;
    }
  } else {
    ONEPASS_ROLL
    for (int row = top; row < top + kRows; row += kStep) {
      const bool has = begin <= first + row && first + row < end && col < rows.cols;
      load_chunk(tile, row, col, from, rows.cols, rows.piece, has);
      from += kStep * rows.stride;
    }
  }
}

// The same of rows in pages.
template <int kRows, int kThreads, class T, int kCols>
__device__ __forceinline__ void load_tile(const Tile<T, kCols>& tile,
                                          const PagedRows<const T>& rows, int first, int begin,
                                          int end) {
  constexpr int kChunks = Tile<T, kCols>::kChunks, kStep = kThreads / kChunks;
  const int cols = rows.page0.cols;
  const int col = static_cast<int>(threadIdx.x % kChunks) * kChunk;
  if (col / kSlab * kSlab >= cols) return;
  const int top = static_cast<int>(threadIdx.x / kChunks);
  const int piece = common_piece(static_cast<uint64_t>(rows.page0.piece),
                                 static_cast<uint64_t>(rows.page_stride) * sizeof(T));
  ONEPASS_ROLL
  for (int row = top; row < top + kRows; row += kStep) {
    const bool has = begin <= first + row && first + row < end && col < cols;
    load_chunk(tile, row, col, has ? rows.row(first + row) : rows.page0.base, cols, piece, has);
  }
}

// A chunk to column `col` of row i.
template <class T>
__device__ __forceinline__ void store_chunk(const Rows<T>& rows, int64_t i, int col,
                                            const Words& words) {
  T* const target = rows.row(i) + col;
  if (rows.piece == 16) {
    store_global(reinterpret_cast<Words*>(target), words);
    return;
  }
  ONEPASS_UNROLL
  for (int e = 0; e < kChunk; ++e) {
    if (col + e >= rows.cols) continue;
    store_global(target + e, T{static_cast<uint16_t>(words.word[e / 2] >> e % 2 * 16)});
  }
}

// Rows top .. top + kRows - 1 of a tile, that this warp has written, to rows first + top .. of
// global memory, those of [0, end).
template <int kRows, class T, int kCols>
__device__ __forceinline__ void store_tile(const Tile<T, kCols>& tile, const Rows<T>& rows, int top,
                                           int first, int end) {
  const int chunks = (rows.cols + kChunk - 1) / kChunk;
  for (int i = lane_index(); i < kRows * chunks; i += kLanes) {
    const int row = top + i / chunks, col = i % chunks * kChunk;
    if (first + row < 0 || first + row >= end) continue;
    store_chunk(rows, first + row, col,
                *reinterpret_cast<const Words*>(tile.chunk(row, col / kChunk)));
  }
}

// ---- fragments ----------------------------------------------------------------------------------

// Where a lane's row of the next ldmatrix lies from a fragment's first element, with the exchange
// of chunks: two offsets are all there is to it, for columns at multiples of 16 are one
// exclusive-or. In bytes.
template <int kCols>
struct FragmentLanes {
  uint32_t straight;  // matrices 0 1 2 3 are rows 0-7, 8-15, then those again, 8 columns on
  uint32_t crossed;   // rows 0-7, those again 8 columns on, then rows 8-15

  __device__ __forceinline__ explicit FragmentLanes(int lane = lane_index()) {
    const int within = lane % 8, second = lane / 8 % 2, fourth = lane / 16;
    const auto bytes = [](int row, int chunk) {
      return static_cast<uint32_t>((row * kCols + chunk * kChunk) * 2);
    };
    straight = bytes(8 * second + within, fourth ^ within);
    crossed = bytes(8 * fourth + within, second ^ within);
  }
  // In front of a loop's turn: else a compiler keeps the address of every fragment in a register.
  __device__ __forceinline__ void refresh() {
    forget(straight);
    forget(crossed);
  }
};

// The lane's row of a fragment that begins at column `col` of the rows from `rows` on.
__device__ __forceinline__ const void* fragment_row(const void* rows, uint32_t lane, int col) {
  return static_cast<const char*>(rows) + (lane ^ static_cast<uint32_t>(2 * col));
}

// The 16 x 16 A fragment at (row, col) of a matrix whose tile holds it, or its transpose.
template <bool kTransposed, class T, int kCols>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const Tile<T, kCols>& tile,
                                       const FragmentLanes<kCols>& lanes, int row, int col) {
  if constexpr (kTransposed) {
    ldmatrix<4, true>(a, fragment_row(tile.data + col * kCols, lanes.crossed, row));
  } else {
    ldmatrix<4, false>(a, fragment_row(tile.data + row * kCols, lanes.straight, col));
  }
}

// The B fragments of columns n .. n + 15 (b[0], b[1] and b[2], b[3]) and rows k .. k + 15 of a
// matrix that the tile holds, or whose transpose it holds.
template <bool kTransposed, class T, int kCols>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], const Tile<T, kCols>& tile,
                                       const FragmentLanes<kCols>& lanes, int k, int n) {
  if constexpr (kTransposed) {
    ldmatrix<4, false>(b, fragment_row(tile.data + n * kCols, lanes.crossed, k));
  } else {
    ldmatrix<4, true>(b, fragment_row(tile.data + k * kCols, lanes.straight, n));
  }
}

// sum[0], sum[1] (16 x 16) += a (16 x 16) b (16 x 16)
template <class T>
__device__ __forceinline__ void add_product(float (&left)[4], float (&right)[4],
                                            const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  mma_m16n8k16<T>(left, a, {b[0], b[1]});
  mma_m16n8k16<T>(right, a, {b[2], b[3]});
}

// The C fragments of columns 16 step .. 16 step + 15 as an A fragment.
template <class T, int kTiles>
__device__ __forceinline__ void as_a(uint32_t (&a)[4], const float (&c)[kTiles][4], int step) {
  a[0] = narrow_pair<T>(c[2 * step][0], c[2 * step][1]);
  a[1] = narrow_pair<T>(c[2 * step][2], c[2 * step][3]);
  a[2] = narrow_pair<T>(c[2 * step + 1][0], c[2 * step + 1][1]);
  a[3] = narrow_pair<T>(c[2 * step + 1][2], c[2 * step + 1][3]);
}

// An A fragment, or two C fragments narrowed to one, to where load_a<false> finds it again.
template <class T, int kCols>
__device__ __forceinline__ void put_a(const Tile<T, kCols>& tile, const uint32_t (&a)[4], int row,
                                      int col) {
  const auto lane = static_cast<uint32_t>(thread_index() % kLanes), g = lane / 4;
  const uint32_t own = g * (kCols + kChunk) + lane % 4 * 2;  // row g, column 2 t, exchanged
  ONEPASS_UNROLL
  for (int i = 0; i < 4; ++i) {
    T* const rows = tile.data + (row + i % 2 * 8) * kCols;
    *reinterpret_cast<uint32_t*>(rows + (own ^ (col + i / 2 * 8))) = a[i];
  }
}

// word[i] of a quad's lane t becomes word[t] of its lane i.
__device__ __forceinline__ void transpose_in_quad(std::array<uint32_t, 4>& word) {
  ONEPASS_UNROLL
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = lane_index() & step;
    ONEPASS_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t other = __shfl_xor_sync(kAllLanes, upper ? word[i] : word[i + step], step);
      (upper ? word[i] : word[i + step]) = other;
    }
  }
}

}  // namespace onepass::cuda
