// How the kernels of the norm family divide rows among threads, and which instance a call takes.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"
#include "ops/norm.h"

namespace onepass::cuda {

inline constexpr int kMaxThreads = 512;
inline constexpr int kWarpsPerBlock = 4;  // of rows that have one warp each; at least the packs

// How the threads of a block share rows.
struct Geometry {
  int packs;            // of a thread; 0: rows are too long for registers
  int threads_per_row;  // a warp, or the block
  int threads;
  bool aligned;

  int rows_per_block() const { return threads / threads_per_row; }
  int row_elements() const { return threads_per_row * packs * kPack; }  // padding included
};

// A modulated norm has a weight and a bias for each group of rows.
template <class Args>
inline constexpr bool kIsModulated =
    std::is_same_v<Args, ModulatedNormForward> || std::is_same_v<Args, ModulatedNormBackward>;

// Threads of a block that has one row. Unaligned rows of a modulated norm need an address for each
// element, and so more than the 128 registers that each of 512 threads can have.
inline constexpr int kFewThreads = 384;
template <class Args, bool kAligned>
inline constexpr int kMostThreads = kIsModulated<Args> && !kAligned ? kFewThreads : kMaxThreads;

template <class Args>
Geometry geometry_of(int64_t cols, int max_packs, bool aligned) {
  const int64_t lanes = kLanes * kPack;  // columns that a warp has with one pack per thread
  for (int packs = 1; packs <= max_packs; packs *= 2) {
    if (cols > lanes * packs) continue;
    // Unaligned rows have two instances only, one pack and the maximum: more are seldom worth their
    // compilation.
    const int taken = aligned || packs == 1 ? packs : max_packs;
    return {taken, kLanes, kLanes * kWarpsPerBlock, aligned};
  }
  const int64_t warps = (cols + lanes * max_packs - 1) / (lanes * max_packs);
  const int most_threads = aligned ? kMostThreads<Args, true> : kMostThreads<Args, false>;
  if (warps * kLanes > most_threads) return {0, kMaxThreads, kMaxThreads, aligned};
  const int threads = static_cast<int>(warps) * kLanes;
  return {max_packs, threads, threads, aligned};
}

// Rows share a block only if they share weight and bias.
template <class Args>
Geometry shared_geometry(const Args& args, Geometry geometry) {
  if constexpr (kIsModulated<Args>) {
    if (args.tokens % geometry.rows_per_block() != 0) geometry.threads = geometry.threads_per_row;
  }
  return geometry;
}

// A group's row in a tensor that has one row for each group.
template <class Args>
__device__ __forceinline__ const void* of_group(const Args& args, int64_t group, const void* base,
                                                DType dtype, const RowStride& stride) {
  if (!base) return nullptr;
  const int64_t offset = row_offset(row_index(args.group_size, group), stride);
  return static_cast<const char*>(base) + offset * size_of(dtype);
}

// 16-byte accesses need rows that begin at multiples of 16 bytes and end at multiples of a pack.
class Alignment {
 public:
  explicit Alignment(int64_t cols) : aligned_(cols % kPack == 0) {}

  void rows(const void* base, DType dtype, const RowStride* stride = nullptr) {
    if (!base) return;
    vector(base);
    if (!stride) return;
    for (const int64_t s : stride->stride) aligned_ = aligned_ && s * size_of(dtype) % 16 == 0;
  }
  void vector(const void* base) {
    aligned_ = aligned_ && reinterpret_cast<uintptr_t>(base) % 16 == 0;
  }
  bool value() const { return aligned_; }

 private:
  bool aligned_;
};

// Calls f.operator()<Types>(): with Same<T> if all dtypes are equal, else with Mixed.
template <class F>
decltype(auto) visit_types(std::initializer_list<DType> dtypes, F&& f) {
  const DType first = *dtypes.begin();
  if (std::any_of(dtypes.begin(), dtypes.end(), [&](DType dtype) { return dtype != first; })) {
    return f.template operator()<Mixed>();
  }
  return visit_dtype(first, [&]<class T>() { return f.template operator()<Same<T>>(); });
}

// Calls f.operator()<kPacks, kAligned>() for any result of geometry_of.
template <int kMaxPacks, class F>
void visit_geometry(const Geometry& geometry, F&& f) {
  visit_bool(geometry.aligned, [&]<bool kAligned>() {
    if (geometry.packs == 1) {
      f.template operator()<1, kAligned>();
    } else if (geometry.packs == kMaxPacks) {
      f.template operator()<kMaxPacks, kAligned>();
    } else if constexpr (kAligned && kMaxPacks == 4) {
      f.template operator()<2, kAligned>();
    }
  });
}

// Whether a group of a block does the work that is done once for each pack.
__device__ __forceinline__ bool has_iteration(int pack, int group, int groups) {
  return groups == 1 || pack == group;
}

// The warps of a block read weight and bias together into shared memory, pack by pack, as value
// plus offset, instead of once for each row. A barrier must follow.
template <int kPacks, class A, class Columns>
__device__ __forceinline__ void stage_values(const void* base, DType dtype, A missing, A offset,
                                             const Columns& columns, int group, int groups,
                                             A* staged) {
  ONEPASS_UNROLL
  for (int p = 0; p < kPacks; ++p) {
    if (!has_iteration(p, group, groups)) continue;
    A value[kPack];
    load_values(base, dtype, missing, columns, p, value);
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      staged[columns.slot(p, e)] = value[e] + offset;
    }
  }
}

template <class A, class Columns>
__device__ __forceinline__ void staged_pack(const A* staged, const Columns& columns, int pack,
                                            A (&value)[kPack]) {
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    value[e] = staged[columns.slot(pack, e)];
  }
}

// staged = value, or staged + value if `has`.
template <class A, class Columns>
__device__ __forceinline__ void add_staged(const A (&value)[kPack], const Columns& columns,
                                           int pack, bool has, A* staged) {
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    A& target = staged[columns.slot(pack, e)];
    target = has ? target + value[e] : value[e];
  }
}

}  // namespace onepass::cuda
