// Sums over rows, one for each column. A block has a part of the rows and writes a partial sum for
// each column; the partials are added in an order that depends on their number alone.
#pragma once

#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"

namespace onepass::cuda {

// A value of the row, read by one lane of each warp or by one thread alone; a missing one is 0.
template <class A>
__device__ __forceinline__ A read_once(const A* address, bool reads) {
  return address && reads ? load_global(address) : A(0);
}

template <class A>
__device__ __forceinline__ A read_once(const A* address) {
  return read_once(address, threadIdx.x % kLanes == 0);
}

template <class A>
__device__ __forceinline__ A broadcast(A value) {
  return __shfl_sync(kAllLanes, value, 0);
}

// n / d without a division, which is a function call that needs many registers. For 0 <= n < 2^52,
// where n * per_d is off by less than one.
__device__ __forceinline__ int64_t quotient(int64_t n, int64_t d, double per_d) {
  const int64_t about = static_cast<int64_t>(static_cast<double>(n) * per_d);
  const int64_t rest = n - about * d;
  return rest < 0 ? about - 1 : rest >= d ? about + 1 : about;
}

// The factor of a sample, for all lanes of a warp.
template <class A>
__device__ __forceinline__ A row_factor(const void* row_scale, int64_t sample) {
  if (!row_scale) return A(1);
  return broadcast(read_once(static_cast<const A*>(row_scale) + sample));
}

// Stores one pack of a gradient whose sum is complete.
template <class A, class Columns>
__device__ __forceinline__ void store_values(void* base, DType dtype, int64_t offset,
                                             const Columns& columns, auto pack,
                                             const A (&value)[kPack]) {
  if (!base) return;
  if constexpr (sizeof(A) == 8) {
    Same<double>::store(base, dtype, offset, columns, pack, narrow<double>(value));
  } else {
    Mixed::Kept kept;
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) kept.element[e] = value[e];
    Mixed::store(base, dtype, offset, columns, pack, kept);
  }
}

template <class A>
__device__ __forceinline__ void store_gradient(void* base, DType dtype, int64_t column, A value) {
  if constexpr (sizeof(A) == 8) {
    store_global(static_cast<double*>(base) + column, value);
  } else {
    visit_dtype_up_to_float32(dtype, [&]<class T>() {
      if constexpr (__is_same(T, float)) {
        store_global(static_cast<float*>(base) + column, value);
      } else {
        const uint32_t pair = narrow_pair<T>(value, value);
        store_global(static_cast<T*>(base) + column, T{static_cast<uint16_t>(pair)});
      }
    });
  }
}

// Columns and threads of a block that adds up partial sums.
inline constexpr int kReduceColumns = kLanes;
inline constexpr int kReduceThreads = kMaxWarps * kLanes;

// Adds up the partial sums of a column, `stride` elements apart. Warp w takes every kMaxWarps-th
// from number w on, in four running sums; the sums of the warps are added in order. Each lane has a
// column, and the total is valid in the first warp. sums: (kMaxWarps, kLanes) in shared memory.
template <class A>
__device__ __forceinline__ A sum_of_parts(const A* partials, int parts, int64_t stride,
                                          bool has_column, A* sums) {
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  constexpr int kChains = 4;
  A sum[kChains] = {};
  for (int64_t first = warp; first < parts; first += kChains * kMaxWarps) {
    ONEPASS_UNROLL
    for (int i = 0; i < kChains; ++i) {
      const int64_t part = first + i * kMaxWarps;
      if (part < parts && has_column) sum[i] += load_global(partials + part * stride);
    }
  }
  sums[threadIdx.x] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  __syncthreads();
  A total = 0;
  if (warp > 0) return total;
  for (int w = 0; w < kMaxWarps; ++w) total += sums[w * kLanes + threadIdx.x];
  return total;
}

}  // namespace onepass::cuda
