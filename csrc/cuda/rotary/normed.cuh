// RMS norm before the rotation: a group of a warp's lanes holds a row in registers.
#pragma once

#include <algorithm>

#include "cuda/rotary/columns.cuh"

namespace onepass::cuda {

inline constexpr int kLaneColumns = 2 * kPack;
inline constexpr int kRowSlots = kLanes * kLaneColumns;  // of shared memory, for any row
static_assert(kMostNormedColumns == kRowSlots);

// The columns of a lane: two runs of eight, each with the interface of StridedColumns (vec.cuh).
// They are two packs if kAligned, else eight pairs of columns. The first lanes have the rotated
// columns.
template <bool kInterleaved, bool kAligned_>
struct NormedColumns {
  static constexpr bool kAligned = kAligned_;
  int lane;
  int lanes;  // of the row
  int rotary_dim;
  int head_dim;

  __device__ __forceinline__ int place(int e) const { return kAligned ? lane : e * lanes + lane; }
  __device__ __forceinline__ bool rotates(int e) const {
    return place(e) < rotary_dim / 2 / kWidth<kAligned>;
  }
  __device__ __forceinline__ int of(int h, int e) const {
    constexpr int kWide = kWidth<kAligned>;
    const int within = kAligned ? e : 0;
    if (!rotates(e)) {
      const int column = place(e) * kWide - rotary_dim / 2;  // of the first half of the rest
      return rotary_dim + h * half_of_rest() + column + within;
    }
    if (kInterleaved && !kAligned) return 2 * place(e) + h;
    return h * (rotary_dim / 2) + place(e) * kWide + within;
  }
  __device__ __forceinline__ bool has(int h, int e) const {
    if (rotates(e)) return true;
    const int column = place(e) * kWidth<kAligned> - rotary_dim / 2;
    return column < half_of_rest() && rotary_dim + h * half_of_rest() + column < head_dim;
  }
  template <class T>
  __device__ __forceinline__ T* in(T* row, int h, int e) const {
    return row + of(h, e);
  }
  // The index of an element in shared memory, (kLaneColumns, kLanes): without bank conflicts, and
  // at constant distances, so that one register addresses all.
  __device__ __forceinline__ int slot(int h, int e) const {
    return (h * kPack + e) * kLanes + lane;
  }

 private:
  __device__ __forceinline__ int half_of_rest() const {
    constexpr int kWide = kWidth<kAligned>;
    return ((head_dim - rotary_dim) / kWide + 1) / 2 * kWide;
  }
};

// How rows are divided: a group of lanes of a warp holds one row; the groups of a block have
// different tokens, and each takes several heads of query or of key.
struct NormedShape {
  bool aligned;
  int lanes;
  int groups;            // of a block
  int64_t heads_each;    // that a group passes over
  int64_t token_blocks;  // of all sequences

  ONEPASS_HOST_DEVICE int64_t head_groups(const RotatedHeads& heads) const {
    return (heads.heads + heads_each - 1) / heads_each;
  }
};

inline NormedShape normed_shape(const RotaryForward& args, bool aligned) {
  NormedShape shape{};
  shape.aligned = aligned;
  const int64_t wide = aligned ? kPack : 1;
  const int64_t rest = (args.head_dim - args.rotary_dim) / wide;
  const int64_t places = args.rotary_dim / 2 / wide + (rest + 1) / 2;
  shape.lanes = static_cast<int>(std::min<int64_t>(
      static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(places))), kLanes));
  shape.groups = kRotaryThreads / shape.lanes;
  const int64_t tokens = args.batch * args.tokens;
  shape.token_blocks = (tokens + shape.groups - 1) / shape.groups;
  shape.heads_each = heads_of_thread(tokens * shape.lanes, [&](int64_t each) {
    return (args.query.heads + each - 1) / each + (args.key.heads + each - 1) / each;
  });
  return shape;
}

// The token of a group of lanes. After the last token there is none, and no columns.
template <bool kInterleaved, bool kAligned>
struct NormedToken {
  int64_t batch;
  int64_t token;
  bool is_there;
  NormedColumns<kInterleaved, kAligned> columns;

  __device__ __forceinline__ NormedToken(const RotaryForward& args, const NormedShape& shape,
                                         int64_t token_block) {
    const int thread = static_cast<int>(threadIdx.x);
    const int64_t at = token_block * shape.groups + thread / shape.lanes;
    batch = at / args.tokens;
    token = at - batch * args.tokens;
    is_there = batch < args.batch;
    columns = {thread % shape.lanes, shape.lanes, is_there ? static_cast<int>(args.rotary_dim) : 0,
               is_there ? static_cast<int>(args.head_dim) : 0};
  }

  __device__ __forceinline__ int64_t offset(const HeadStride& stride, int64_t head) const {
    return batch * stride.batch + head * stride.head + token * stride.token;
  }
};

// Factors for a lane's columns; 1 and 0 for columns that are not rotated.
template <class A, bool kInterleaved, bool kAligned>
struct NormedFactors {
  A own[2][kPack], other[2][kPack];

  __device__ __forceinline__ NormedFactors(const RotaryForward& args,
                                           const NormedToken<kInterleaved, kAligned>& token) {
    int64_t row = -1;
    bool has_row = false;
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; e += kWidth<kAligned>) {
      ONEPASS_UNROLL
      for (int i = 0; i < kWidth<kAligned>; ++i) {
        own[0][e + i] = own[1][e + i] = A(1);
        other[0][e + i] = other[1][e + i] = A(0);
      }
      if (!token.columns.rotates(e)) continue;
      if (!has_row) row = row_of(args, token.batch, token.token);
      has_row = true;
      const Factors<A, kInterleaved, kAligned> factors(
          args, token.batch, row, halves_of<kInterleaved, kAligned>(args, token.columns.place(e)));
      ONEPASS_UNROLL
      for (int h = 0; h < 2; ++h) {
        ONEPASS_UNROLL
        for (int i = 0; i < kWidth<kAligned>; ++i) {
          own[h][e + i] = factors.own[h][i];
          other[h][e + i] = factors.other[h][i];
        }
      }
    }
  }

  // x's partner in a pair.
  static __device__ __forceinline__ A partner(const A (&x)[2][kPack], int h, int e) {
    return kInPack<kInterleaved, kAligned> ? x[h][e ^ 1] : x[1 - h][e];
  }
  __device__ __forceinline__ A rotated(const NormedColumns<kInterleaved, kAligned>& columns,
                                       const A (&x)[2][kPack], int h, int e) const {
    const A scaled = x[h][e] * own[h][e];
    const A turned = multiply_add(x[h][e], own[h][e], partner(x, h, e) * other[h][e]);
    return columns.rotates(e) ? turned : scaled;  // a partner that is not one may be infinite
  }
};

// Loads the weight of a block's rows into shared memory, (kLaneColumns, kLanes). A barrier must
// follow.
template <class A, bool kInterleaved, bool kAligned>
__device__ __forceinline__ void stage_weight(const RotaryForward& args, const RotatedHeads& heads,
                                             const NormedShape& shape, A* staged) {
  const NormedColumns<kInterleaved, kAligned> columns{static_cast<int>(threadIdx.x), shape.lanes,
                                                      static_cast<int>(args.rotary_dim),
                                                      static_cast<int>(args.head_dim)};
  if (columns.lane >= shape.lanes) return;
  ONEPASS_UNROLL
  for (int h = 0; h < 2; ++h) {
    A value[kPack];
    load_values(heads.weight, heads.weight_dtype, A(1), columns, h, value);
    const A offset = heads.weight ? static_cast<A>(args.weight_offset) : A(0);
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) staged[columns.slot(h, e)] = value[e] + offset;
  }
}

// value[i] becomes its sum over the lanes of the row.
template <int kCount, class A>
__device__ __forceinline__ void sum_over_lanes(A (&value)[kCount], int lanes) {
  ONEPASS_UNROLL
  for (int i = 0; i < kCount; ++i) {
    ONEPASS_UNROLL
    for (int step = kLanes / 2; step > 0; step /= 2) {
      if (step < lanes) value[i] += __shfl_xor_sync(kAllLanes, value[i], step);
    }
  }
}

}  // namespace onepass::cuda
