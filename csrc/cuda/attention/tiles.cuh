// Tiles of 16-bit rows in shared memory: how they are loaded, and their products on tensor cores.
//
// Fragments are those of mma.m16n8k16 (cuda/ptx.cuh); g is lane / 4 and t is lane % 4. The C
// fragments of a tile's columns 16 k .. 16 k + 15, narrowed, are the A fragment of the next
// product: no lane needs another lane's elements.
#pragma once

#include "cuda/ptx.cuh"
#include "cuda/vec.cuh"
#include "ops/attention.h"

namespace onepass::cuda {

// Products include or skip this many columns at once. In shared memory a row is padded with zeros
// to a multiple of this; columns beyond that are never read.
inline constexpr int kSlab = 32;

inline constexpr int kChunk = 8;  // elements of 16 bytes

ONEPASS_HOST_DEVICE inline int slabs_of(int64_t cols) {
  return static_cast<int>((cols + kSlab - 1) / kSlab);
}

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x % kLanes); }
__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x / kLanes); }

// The same number, opaque to the compiler: values derived from it are recomputed where they are
// used, not kept in registers through a loop.
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
  int piece;  // bytes: the largest of 16, 8, 4 and 2 that divides each row's address and length

  __device__ __forceinline__ T* row(int64_t i) const { return base + i * stride; }
};

// The greatest power of two, up to 16, that divides all of them.
__device__ __forceinline__ int common_piece(uint64_t a, uint64_t b, uint64_t c = 0) {
  const auto bits = static_cast<uint32_t>(a | b | c) | 16u;
  return static_cast<int>(bits & (0u - bits));
}

// The rows of a dense or packed tensor from row `first` on.
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

// Rows whose addresses are in shared memory: row `first` begins at address[0].
template <class T>
struct ListedRows {
  T* const* address;
  int first;
  int cols;
  int piece;  // as in Rows

  __device__ __forceinline__ T* row(int i) const { return address[i - first]; }
};

// Whether all rows of a tensor begin and end at multiples of 16 bytes.
inline bool has_whole_pieces(const Strided& rows, DType dtype, int64_t cols) {
  const int64_t elements = 16 / size_of(dtype);
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.batch_stride % elements == 0 &&
         rows.head_stride % elements == 0 && rows.row_stride % elements == 0 &&
         cols % elements == 0;
}

// ---- tiles --------------------------------------------------------------------------------------

// Rows of kCols elements in shared memory, without gaps. The chunks of a row are permuted by the
// row's number (XOR swizzle), so that the same chunk of eight rows lies in different banks.
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
  // The pair of elements that begins at an even column.
  __device__ __forceinline__ uint32_t* pair(int row, int col) const {
    return reinterpret_cast<uint32_t*>(chunk(row, col / kChunk) + col % kChunk);
  }
};

// The chunk at column `col` of a row of `cols` elements; zero beyond its end.
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

// Starts copying a chunk of a row to (row, col) of a tile, in pieces of so many bytes. Elements
// beyond the row's end, and all of them unless `has`, are zero and are not read. Pieces of two
// bytes cannot be copied asynchronously: they are read and written here.
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
//
// kWhole: rows are as long as the tile's, in pieces of 16 bytes. Otherwise this is decided here, by
// branches that cost a loop registers and instructions even where they are not taken.
template <int kRows, int kThreads, bool kWhole = false, class T, int kCols>
__device__ __forceinline__ void load_tile(const Tile<T, kCols>& tile, const Rows<const T>& rows,
                                          int first, int begin, int end) {
  constexpr int kChunks = Tile<T, kCols>::kChunks, kStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kStep == 0 && (kStep & (kStep - 1)) == 0);
  const int col = static_cast<int>(threadIdx.x % kChunks) * kChunk;
  if (!kWhole && col / kSlab * kSlab >= rows.cols) return;
  const int top = static_cast<int>(threadIdx.x / kChunks);
  // Advanced by one addition per row: the compiler would keep each product with the stride in a
  // register.
  const T* from = rows.row(first + top);
  if (kWhole || rows.piece == 16) {
    // The swizzle is split: `top` and a multiple of kStep have no bit in common.
    T* const to = tile.data + top * kCols;
    const int own = (col / kChunk ^ top % 8) * kChunk;
    const int skipped = begin - first - top;
    const int there = kWhole || col < rows.cols ? end - first - top : 0;
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

// The same for listed rows. Rows outside [begin, end) need valid addresses too.
template <int kRows, int kThreads, bool kWhole = false, class T, int kCols>
__device__ __forceinline__ void load_tile(const Tile<T, kCols>& tile,
                                          const ListedRows<const T>& rows, int first, int begin,
                                          int end) {
  constexpr int kChunks = Tile<T, kCols>::kChunks, kStep = kThreads / kChunks;
  const int col = static_cast<int>(threadIdx.x % kChunks) * kChunk;
  if (!kWhole && col / kSlab * kSlab >= rows.cols) return;
  const int top = static_cast<int>(threadIdx.x / kChunks);
  if (kWhole || rows.piece == 16) {
    T* const to = tile.data + top * kCols;
    const int own = (col / kChunk ^ top % 8) * kChunk;
    const int skipped = begin - first - top;
    const int there = kWhole || col < rows.cols ? end - first - top : 0;
    // A few addresses are read before their copies: the compiler moves no read across a copy.
    constexpr int kAtOnce = kRows / kStep % 4 == 0 ? 4 : 2;
    static_assert(kRows / kStep % kAtOnce == 0);
    ONEPASS_UNROLL
    for (int group = 0; group < kRows; group += kAtOnce * kStep) {
      const T* from[kAtOnce];
      ONEPASS_UNROLL
      for (int i = 0; i < kAtOnce; ++i) from[i] = rows.row(first + top + group + i * kStep) + col;
      ONEPASS_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = group + i * kStep;
        cp_async_16(to + row * kCols + (own ^ row % 8 * kChunk), from[i],
                    skipped <= row && row < there);
      }
    }
  } else {
    ONEPASS_ROLL
    for (int row = top; row < top + kRows; row += kStep) {
      const bool has = begin <= first + row && first + row < end && col < rows.cols;
      load_chunk(tile, row, col, rows.row(first + row), rows.cols, rows.piece, has);
    }
  }
}

// Stores a chunk at column `col` of row i.
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

// Stores rows top .. top + kRows - 1 of a tile, which this warp has written, to rows first + top ..
// of global memory, as far as they are in [0, end).
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

// Offsets in bytes from a fragment's first element to the row that a lane addresses for ldmatrix,
// with the swizzle. Two offsets are enough: a column at a multiple of 16 is one XOR.
//
// kPlaced: shared_base() is already added to them, so that the step to another tile or row is a
// constant in an instruction. Otherwise the address of the tile is added after the XOR, by one
// instruction for each column and warp's row. Code of sm_90 adds the address of shared memory in
// the instruction itself, so that short loops may gain nothing there.
template <int kCols, bool kPlaced = true>
struct FragmentLanes {
  uint32_t straight;  // matrices 0 1 2 3: rows 0-7, 8-15, then the same 8 columns further
  uint32_t crossed;   // rows 0-7, the same 8 columns further, then both for rows 8-15

  __device__ __forceinline__ explicit FragmentLanes(int lane = lane_index()) {
    const int within = lane % 8, second = lane / 8 % 2, fourth = lane / 16;
    const auto bytes = [](int row, int chunk) {
      return static_cast<uint32_t>((row * kCols + chunk * kChunk) * 2);
    };
    straight = bytes(8 * second + within, fourth ^ within);
    crossed = bytes(8 * fourth + within, second ^ within);
    if (kPlaced) straight += shared_base(), crossed += shared_base();
  }
  // For fragments whose rows are counted from `row`, a multiple of 8.
  __device__ __forceinline__ FragmentLanes from_row(int row) const {
    FragmentLanes lanes = *this;
    lanes.straight += static_cast<uint32_t>(row * kCols * 2);
    lanes.crossed += static_cast<uint32_t>(row * kCols * 2);
    return lanes;
  }
  // At the top of a loop, so that the compiler does not keep the address of every fragment in a
  // register. `nothing` is 0 and read from memory: ptxas sees through an empty asm.
  __device__ __forceinline__ void refresh(uint32_t nothing) {
    straight ^= nothing;
    crossed ^= nothing;
  }
};

// The address of the lane's row of a fragment that begins at column `col` of `rows`.
template <bool kPlaced>
__device__ __forceinline__ const void* fragment_row(const void* rows, uint32_t lane, int col) {
  const uint32_t own = lane ^ static_cast<uint32_t>(2 * col);
  return kPlaced ? at_place(rows, own) : static_cast<const char*>(rows) + own;
}

// The 16 x 16 A fragment at (row, col) of a matrix whose tile holds it, or its transpose.
template <bool kTransposed, class T, int kCols, bool kPlaced>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const Tile<T, kCols>& tile,
                                       const FragmentLanes<kCols, kPlaced>& lanes, int row,
                                       int col) {
  if constexpr (kTransposed) {
    ldmatrix<4, true>(a, fragment_row<kPlaced>(tile.data + col * kCols, lanes.crossed, row));
  } else {
    ldmatrix<4, false>(a, fragment_row<kPlaced>(tile.data + row * kCols, lanes.straight, col));
  }
}

// The B fragments of columns n .. n + 15 (b[0], b[1] and b[2], b[3]) and rows k .. k + 15 of a
// matrix that the tile holds, or whose transpose it holds.
template <bool kTransposed, class T, int kCols, bool kPlaced>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], const Tile<T, kCols>& tile,
                                       const FragmentLanes<kCols, kPlaced>& lanes, int k, int n) {
  if constexpr (kTransposed) {
    ldmatrix<4, false>(b, fragment_row<kPlaced>(tile.data + n * kCols, lanes.crossed, k));
  } else {
    ldmatrix<4, true>(b, fragment_row<kPlaced>(tile.data + k * kCols, lanes.straight, n));
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

// Stores an A fragment, or two C fragments narrowed to one, where load_a<false> reads it.
template <class T, int kCols>
__device__ __forceinline__ void put_a(const Tile<T, kCols>& tile, const uint32_t (&a)[4], int row,
                                      int col) {
  const auto lane = static_cast<uint32_t>(thread_index() % kLanes), g = lane / 4;
  // The place of row g, column 2 t, swizzled.
  const uint32_t own = shared_base() + static_cast<uint32_t>(2 * row * kCols) +
                       2 * (g * (kCols + kChunk) + lane % 4 * 2);
  ONEPASS_UNROLL
  for (int i = 0; i < 4; ++i) {
    T* const rows = tile.data + i % 2 * 8 * kCols;
    const auto columns = static_cast<uint32_t>(2 * (col + i / 2 * 8));
    *reinterpret_cast<uint32_t*>(at_place(rows, own ^ columns)) = a[i];
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
