// Products of slabs on tensor cores, in TF32: a factor keeps 11 of its 24 bits, rounded to nearest,
// and sums are float. A warp has 16 rows and 64 columns of the sums, or 32 columns with twice as
// many warps; a lane's 16 bytes of the right factor serve two mma.
//
// Fragments are those of mma.m16n8k8 (cuda/ptx.cuh); g is lane / 4 and t is lane % 4. The order of
// the eight k of an mma is free if both factors use the same one. Here k = t and k = t + 4 are
// neighbours in memory: so the scores that a lane gets from one mma are the factors that it needs
// for the next one, and rows can be loaded 16 bytes at a time.
#pragma once

#include <bit>
#include <cmath>

#include "cuda/attention/plain_products.cuh"

namespace onepass::cuda::plain {

// Bits of which an mma, which drops the lower 13, makes x rounded to nearest, ties away from zero.
// Numbers that would round to infinity, infinities and NaN are passed as they are: they are
// truncated, and the upper bits of a NaN made by arithmetic are still a NaN.
__device__ __forceinline__ uint32_t to_tf32(float x) {
  constexpr float kRoundsToInfinity = 0x1.ffep127f;
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return std::fabs(x) < kRoundsToInfinity ? bits + 0x1000 : bits;
}

struct Tf32 {
  using Accumulator = float;
  // A quarter of a warp reads pairs of scores from four rows at once.
  static constexpr int kFactorStride = kStride<float, kKeys> + 4;
  // A whole warp reads single scores from eight columns at once.
  static constexpr int kTransposedStride = kStride<float, kKeys>;
  static constexpr bool kScoresAreFactors = true;

  template <int kThreads>
  struct Lane {
    static constexpr int kWarps = kThreads / kLanes;
    static constexpr int kWidth = 64 * 4 / kWarps;  // columns of a warp
    static constexpr int kTiles = kWidth / 8;       // of eight columns, those of an mma
    static_assert(kWarps == 4 || kWarps == 8);

    static __device__ __forceinline__ int g() { return thread_index() % kLanes / 4; }
    static __device__ __forceinline__ int t() { return thread_index() % 4; }
    static __device__ __forceinline__ int first_row() { return thread_index() / kLanes % 4 * 16; }
    static __device__ __forceinline__ int first_col() {
      return kWarps == 4 ? 0 : thread_index() / (4 * kLanes) * kWidth;
    }
  };

  template <int kThreads>
  struct Scores {
    using Own = Lane<kThreads>;
    static constexpr int kRowLanes = 4;
    static constexpr int kRows = 2;
    static constexpr int kCols = 2 * Own::kTiles;

    static __device__ __forceinline__ int row_lane() { return Own::t(); }
    static __device__ __forceinline__ int row(int r) { return Own::first_row() + Own::g() + 8 * r; }
    static __device__ __forceinline__ int col(int c) {
      return Own::first_col() + 8 * (c / 2) + 2 * Own::t() + c % 2;
    }
    static __device__ __forceinline__ int half(int c) { return Own::first_col() / 32 + c / 8; }
    static __device__ __forceinline__ int in_half(int c) {
      return 8 * (c / 2 % 4) + 2 * Own::t() + c % 2;
    }
  };

  // Column n of tile i, of each four tiles, is column 4 n + i, so that a lane's eight columns are
  // neighbours.
  template <int kThreads>
  struct QueryResults {
    using Own = Lane<kThreads>;
    static constexpr int kRows = 2;
    static constexpr int kCols = 2 * Own::kTiles;

    static __device__ __forceinline__ int row(int r) { return Scores<kThreads>::row(r); }
    static __device__ __forceinline__ int col(int c) {
      return Own::first_col() + 32 * (c / 8) + 8 * Own::t() + c % 8;
    }
  };

  template <int kThreads>
  using KeyResults = QueryResults<kThreads>;

  // scalar: sum[query][key] += sum over kDepth columns d of left[query][d] * right[key][d]
  //
  // A lane reads columns 8 t .. 8 t + 7 of its rows, so neighbouring lanes are two chunks of 16
  // bytes apart. Rows are an odd number of chunks apart, so that two rows together use all banks.
  template <int kThreads, int kScores>
  static __device__ __forceinline__ void add_dots(float (&sum)[2][kScores], const float* left,
                                                  const float* right, int /*depth*/) {
    using Own = Lane<kThreads>;
    constexpr int stride = kStride<float, kDepth<float>>;
    left += (Own::first_row() + Own::g()) * stride + 8 * Own::t();
    right += (Own::first_col() + Own::g()) * stride + 8 * Own::t();
    ONEPASS_ROLL
    for (int half = 0; half < 8; half += 4) {
      const Four<float> upper = four(left + half), lower = four(left + 8 * stride + half);
      uint32_t a[2][4];
      ONEPASS_UNROLL
      for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = to_tf32((i % 2 ? lower : upper).at[i / 2]);
      ONEPASS_UNROLL
      for (int n = 0; n < Own::kTiles; ++n) {
        const Four<float> b = four(right + 8 * n * stride + half);
        add_product(sum, {2 * n, 2 * n + 1}, a[0], b.at[0], b.at[1]);
        add_product(sum, {2 * n, 2 * n + 1}, a[1], b.at[2], b.at[3]);
      }
    }
  }

  // scalar: sum[query][col] += sum over kDepth keys of weight[query][key] * row[key][col]
  //
  // weights: of a tile; `rows` has its keys from kDepth part on.
  template <int kThreads, int kSums>
  static __device__ __forceinline__ void add_rows(float (&sum)[2][kSums], const float* weights,
                                                  int part, const float* rows) {
    using Own = Lane<kThreads>;
    struct alignas(8) Two {
      float at[2];
    };
    weights += (Own::first_row() + Own::g()) * kFactorStride + part * kDepth<float> + 2 * Own::t();
    add_weighted_rows<kThreads>(sum, rows, [&](float (&factor)[4], int pair, int step) {
      ONEPASS_UNROLL
      for (int r = 0; r < 2; ++r) {
        const float* const at = weights + 8 * r * kFactorStride + 16 * pair + 8 * step;
        const Two two = *reinterpret_cast<const Two*>(at);
        factor[r] = two.at[0], factor[2 + r] = two.at[1];
      }
    });
  }

  // The same with the thread's scores as weights. They are chosen by selections: a computed index
  // would move them out of registers.
  template <int kThreads, int kSums>
  static __device__ __forceinline__ void add_rows(float (&sum)[2][kSums],
                                                  const float (&weights)[2][kKeys / 4], int part,
                                                  const float* rows) {
    static_assert(kKeys / 16 == 4 && kPairs == 2 && Lane<kThreads>::kWidth == kKeys);
    add_weighted_rows<kThreads>(sum, rows, [&](float (&factor)[4], int pair, int step) {
      const bool later = part != 0, odd = pair != 0;
      ONEPASS_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float* const row = weights[i % 2] + 2 * step + i / 2;  // 4 of them for each pair
        const float even = later ? row[8] : row[0], other = later ? row[12] : row[4];
        factor[i] = odd ? other : even;
      }
    });
  }

  // scalar: sum[key][col] += sum over kDepth queries of weight[query][key] * row[query][col]
  template <int kThreads, int kSums>
  static __device__ __forceinline__ void add_rows_of_queries(float (&sum)[2][kSums],
                                                             const float* weights,
                                                             const float* rows) {
    using Own = Lane<kThreads>;
    weights += 2 * Own::t() * kTransposedStride + Own::first_row() + Own::g();
    add_weighted_rows<kThreads>(sum, rows, [&](float (&factor)[4], int pair, int step) {
      ONEPASS_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int query = 16 * pair + 8 * step + i / 2;  // and 2 t
        factor[i] = weights[query * kTransposedStride + i % 2 * 8];
      }
    });
  }

 private:
  static constexpr int kPairs = kDepth<float> / 16;  // pairs of mma per slab of rows

  // sum[r][cols[0]], sum[r][cols[1]] += a lane's elements of an mma's product, in row g + 8 r.
  // first, second: the lane's two elements of the right factor.
  template <int kSums>
  static __device__ __forceinline__ void add_product(float (&sum)[2][kSums], const int (&cols)[2],
                                                     const uint32_t (&a)[4], float first,
                                                     float second) {
    float sums[4];
    ONEPASS_UNROLL
    for (int i = 0; i < 4; ++i) sums[i] = sum[i / 2][cols[i % 2]];
    mma_m16n8k8_tf32(sums, a, {to_tf32(first), to_tf32(second)});
    ONEPASS_UNROLL
    for (int i = 0; i < 4; ++i) sum[i / 2][cols[i % 2]] = sums[i];
  }

  // scalar: sum[row][col] += sum over kDepth k of weight[row][k] * rows[k][col]
  //
  // load(weights, pair, step) loads a lane's four weights for k = 8 (2 pair + step) + 2 t and k +
  // 1: rows g and g + 8 of the first k, then of the second. For each k the lane reads chunk g of a
  // row in shared memory. Rows are an odd number of chunks apart, so that in a quarter of a warp 2
  // t + g, and with it the bank, differs from lane to lane.
  template <int kThreads, int kSums, class Load>
  static __device__ __forceinline__ void add_weighted_rows(float (&sum)[2][kSums],
                                                           const float* rows, Load&& load) {
    using Own = Lane<kThreads>;
    constexpr int stride = kStride<float, kCols>;
    rows += 2 * Own::t() * stride + Own::first_col() + 4 * Own::g();
    ONEPASS_ROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      ONEPASS_UNROLL
      for (int step = 0; step < 2; ++step) {
        float weights[4];
        load(weights, pair, step);
        uint32_t a[4];
        ONEPASS_UNROLL
        for (int i = 0; i < 4; ++i) a[i] = to_tf32(weights[i]);
        ONEPASS_UNROLL
        for (int tile = 0; tile < Own::kTiles; tile += 4) {
          const float* const row = rows + 8 * (2 * pair + step) * stride + 8 * tile;
          const Four<float> first = four(row), second = four(row + stride);
          ONEPASS_UNROLL
          for (int n = 0; n < 4; ++n) {
            add_product(sum, {2 * tile + n, 2 * tile + 4 + n}, a, first.at[n], second.at[n]);
          }
        }
      }
    }
  }
};

}  // namespace onepass::cuda::plain
