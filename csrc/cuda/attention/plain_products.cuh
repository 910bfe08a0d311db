// Products of slabs of rows in shared memory, with sums in registers, and which thread has which
// sum.
//
// A kernel is instantiated for a kind of product: MultiplyAdds<A>, whose factors and sums are A,
// float or double, or Tf32 of plain_tf32.cuh. A tile is kQueries x kKeys scores. A kind has
//
//   Accumulator: the type of sums, to which every element is widened
//   Scores<kThreads>: the thread's score (r, c) is element (row(r), col(c)) of the tile; among the
//     tile's two halves of 32 keys the key is number in_half(c) of half(c)
//   QueryResults<kThreads>: the same for a group of results whose rows are the tile's queries;
//     col(c) .. col(c + 3) are neighbours for every fourth c
//   KeyResults<kThreads>: the same for results whose rows are the tile's keys
//   kFactorStride: stride of the rows of scores when they are the left factor of rows of keys
//   kTransposedStride: the same when they are the left factor of rows of queries
//   kScoresAreFactors: whether a thread's scores are its factors of the next product, in registers
#pragma once

#include "cuda/ptx.cuh"

namespace onepass::cuda::plain {

// ---- sizes --------------------------------------------------------------------------------------
//
// 64 x 64 scores give each of 128 threads 8 x 4, where 12 accesses of 16 bytes to shared memory
// serve 128 multiply-adds. Rows as wide as a head are loaded in slabs of 128 bytes per row, and
// 512 bytes per row of results stay in registers. Columns beyond these are computed by other
// blocks, which compute the scores again. So neither shared memory nor registers grow with the head
// dimension.

inline constexpr int kKeys = 64;  // of a tile
inline constexpr int kColumnThreads = 16;
inline constexpr int kCols = 64;  // of the results of one product
static_assert(kKeys == 4 * kColumnThreads && kCols == 4 * kColumnThreads);

template <class A>
inline constexpr int kQueries = 256 / sizeof(A);  // of a tile
template <class A>
inline constexpr int kDepth = 128 / sizeof(A);  // of a slab: the products that are added up
template <class A>
inline constexpr int kOutCols = 512 / sizeof(A);  // of the results of a block
template <class A>
inline constexpr int kGroups = kOutCols<A> / kCols;
static_assert(kGroups<float> == 2 && kGroups<double> == 1);
template <class A>
inline constexpr int kChunk = 16 / sizeof(A);

// The stride of rows in shared memory is an odd multiple of 16 bytes, so that the same columns of
// eight rows are in different banks.
template <class A, int kWidth>
inline constexpr int kStride = kWidth + kChunk<A>;
template <class A>
inline constexpr int kSlabElements = 64 * kStride<A, kDepth<A>>;
static_assert(kSlabElements<float> >= kDepth<float> * kStride<float, kCols>);
static_assert(kSlabElements<double> >= kDepth<double> * kStride<double, kCols>);

template <class A>
struct alignas(16) Four {
  A at[4];
};

template <class A>
__device__ __forceinline__ Four<A> four(const A* address) {
  return *reinterpret_cast<const Four<A>*>(address);
}

// ---- multiply-adds ------------------------------------------------------------------------------

// The score of (query r, key c) of a tile belongs to thread (r % rows of threads, c % 16), so that
// 16 neighbouring lanes share a row. Products are summed slab by slab: chains of kDepth additions
// lose fewer bits than one long chain.
template <class A>
struct MultiplyAdds {
  using Accumulator = A;
  static constexpr int kFactorStride = kStride<A, kKeys>;
  static constexpr int kTransposedStride = kFactorStride;
  static constexpr bool kScoresAreFactors = false;

  static __device__ __forceinline__ int thread_col() { return thread_index() % kColumnThreads; }
  static __device__ __forceinline__ int thread_row() { return thread_index() / kColumnThreads; }

  template <int kThreads>
  struct Scores {
    static constexpr int kRowLanes = kColumnThreads;          // lanes that share a row
    static constexpr int kThreadRows = kThreads / kRowLanes;  // distance of a thread's rows
    static constexpr int kRows = kQueries<A> / kThreadRows;
    static constexpr int kCols = kKeys / kRowLanes;

    static __device__ __forceinline__ int thread_row() { return MultiplyAdds::thread_row(); }
    static __device__ __forceinline__ int row_lane() { return thread_col(); }
    static __device__ __forceinline__ int row(int r) { return thread_row() + kThreadRows * r; }
    static __device__ __forceinline__ int col(int c) { return row_lane() + kRowLanes * c; }
    static __device__ __forceinline__ int half(int c) { return c / 2; }
    static __device__ __forceinline__ int in_half(int c) { return col(c % 2); }
  };

  template <int kThreads>
  struct QueryResults {
    static constexpr int kRows = Scores<kThreads>::kRows;
    static constexpr int kCols = 4;

    static __device__ __forceinline__ int row(int r) { return Scores<kThreads>::row(r); }
    static __device__ __forceinline__ int col(int c) { return 4 * thread_col() + c; }
  };

  template <int kThreads>
  struct KeyResults {
    static constexpr int kRows = 4;
    static constexpr int kCols = 4;
    static_assert(kThreads / kColumnThreads * kRows == kKeys);

    static __device__ __forceinline__ int row(int r) { return 4 * thread_row() + r; }
    static __device__ __forceinline__ int col(int c) { return 4 * thread_col() + c; }
  };

  // scalar: sum[query][key] += sum over d < depth of left[query][d] * right[key][d]
  //
  // depth: at most kDepth. From `depth` up to a multiple of 4 the elements of rows are zero.
  template <int kThreads, int kRows>
  static __device__ __forceinline__ void add_dots(A (&sum)[kRows][4], const A* left, const A* right,
                                                  int depth) {
    constexpr int stride = kStride<A, kDepth<A>>;
    left += thread_row() * stride;
    right += thread_col() * stride;
    A chain[kRows][4] = {};
    ONEPASS_ROLL
    for (int d = 0; d < depth; d += 4) {
      Four<A> b[4];
      ONEPASS_UNROLL
      for (int c = 0; c < 4; ++c) b[c] = four(right + c * kColumnThreads * stride + d);
      ONEPASS_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const Four<A> a = four(left + r * Scores<kThreads>::kThreadRows * stride + d);
        ONEPASS_UNROLL
        for (int e = 0; e < 4; ++e) {
          ONEPASS_UNROLL
          for (int c = 0; c < 4; ++c) chain[r][c] = multiply_add(a.at[e], b[c].at[e], chain[r][c]);
        }
      }
    }
    ONEPASS_UNROLL
    for (int i = 0; i < 4 * kRows; ++i) sum[i / 4][i % 4] += chain[i / 4][i % 4];
  }

  // scalar: sum[query][col] += sum over kDepth keys of weight[query][key] * row[key][col]
  //
  // weights: of a tile; `rows` has its keys from kDepth part on.
  template <int kThreads, int kRows>
  static __device__ __forceinline__ void add_rows(A (&sum)[kRows][4], const A* weights, int part,
                                                  const A* rows) {
    constexpr int stride = kStride<A, kCols>;
    weights += thread_row() * kFactorStride + part * kDepth<A>;
    rows += 4 * thread_col();
    A chain[kRows][4] = {};
    ONEPASS_ROLL
    for (int key = 0; key < kDepth<A>; key += 4) {
      Four<A> row[4];
      ONEPASS_UNROLL
      for (int k = 0; k < 4; ++k) row[k] = four(rows + (key + k) * stride);
      ONEPASS_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const Four<A> weight =
            four(weights + r * Scores<kThreads>::kThreadRows * kFactorStride + key);
        ONEPASS_UNROLL
        for (int k = 0; k < 4; ++k) {
          ONEPASS_UNROLL
          for (int c = 0; c < 4; ++c) {
            chain[r][c] = multiply_add(weight.at[k], row[k].at[c], chain[r][c]);
          }
        }
      }
    }
    ONEPASS_UNROLL
    for (int i = 0; i < 4 * kRows; ++i) sum[i / 4][i % 4] += chain[i / 4][i % 4];
  }

  // scalar: sum[key][col] += sum over kDepth queries of weight[query][key] * row[query][col]
  template <int kThreads>
  static __device__ __forceinline__ void add_rows_of_queries(A (&sum)[4][4], const A* weights,
                                                             const A* rows) {
    constexpr int stride = kStride<A, kCols>;
    weights += 4 * thread_row();
    rows += 4 * thread_col();
    A chain[4][4] = {};
    ONEPASS_ROLL
    for (int first = 0; first < kDepth<A>; first += 4) {
      ONEPASS_UNROLL
      for (int query = first; query < first + 4; ++query) {
        const Four<A> weight = four(weights + query * kTransposedStride);
        const Four<A> row = four(rows + query * stride);
        ONEPASS_UNROLL
        for (int i = 0; i < 16; ++i) {
          chain[i / 4][i % 4] = multiply_add(weight.at[i / 4], row.at[i % 4], chain[i / 4][i % 4]);
        }
      }
    }
    ONEPASS_UNROLL
    for (int i = 0; i < 16; ++i) sum[i / 4][i % 4] += chain[i / 4][i % 4];
  }
};

}  // namespace onepass::cuda::plain
