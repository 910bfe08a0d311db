// Sums over the threads that share a row, in an order that depends on their number alone.
#pragma once

#include "cuda/ptx.cuh"

namespace onepass::cuda {

inline constexpr int kMaxWarps = 16;  // of a block

// Elements of scratch that one reduce_row of kCount values needs.
template <int kCount>
inline constexpr int kReduceScratch = kCount * kMaxWarps;

// value[i] becomes its sum over the row's threads, for all of them: a butterfly within warps, then,
// where a row has the whole block, the warps' sums in order through scratch. Two calls in a row
// must be given different scratch; a third may use the first one's again.
template <int kCount, class A>
__device__ __forceinline__ void reduce_row(A (&value)[kCount], int threads_per_row, A* scratch) {
  ONEPASS_UNROLL
  for (int i = 0; i < kCount; ++i) {
    ONEPASS_UNROLL
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
      value[i] += __shfl_xor_sync(kAllLanes, value[i], lanes);
    }
  }
  if (threads_per_row <= kLanes) return;
  const int warps = threads_per_row / kLanes;
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  if (threadIdx.x % kLanes == 0) {
    ONEPASS_UNROLL
    for (int i = 0; i < kCount; ++i) scratch[i * kMaxWarps + warp] = value[i];
  }
  __syncthreads();
  ONEPASS_UNROLL
  for (int i = 0; i < kCount; ++i) {
    value[i] = 0;
    for (int w = 0; w < warps; ++w) value[i] += scratch[i * kMaxWarps + w];
  }
}

// Count, mean and squared deviations of some numbers; add() merges those of two parts. Chan, Golub,
// LeVeque: Updating formulae and a pairwise algorithm for sample variances, 1979.
template <class A>
struct Moments {
  A count;
  A mean;
  A squares;  // sum of (x - mean)^2; for RMS of x^2, with a mean of 0

  __device__ __forceinline__ void add(const Moments& other) {
    const A both = count + other.count;
    if (both == A(0)) return;
    const A delta = other.mean - mean;
    const A share = other.count / both;
    mean += delta * share;
    squares += other.squares + delta * delta * count * share;
    count = both;
  }
};

// rstd of a norm. Rounding may have made the variance slightly negative.
template <class A>
__device__ __forceinline__ A inverse_root(A variance, double eps) {
  return A(1) / sqrt((variance < A(0) ? A(0) : variance) + static_cast<A>(eps));
}

}  // namespace onepass::cuda
