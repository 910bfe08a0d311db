// The state of query rows after some of their keys, and how states are joined. The decoding kernel
// and the joining kernel both use this code, in the same order, so that the result does not depend,
// not by a bit, on which of them joins.
#pragma once

#include "cuda/attention/decode.h"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/tiles.cuh"
#include "cuda/ptx.cuh"

namespace onepass::cuda {

// The state of a row: its largest score, and the sum of exp(score - maximum). The sums of the
// values, weighted by the same exponentials, are kept beside it.
struct alignas(8) State {
  float maximum = -INFINITY;
  float sum = 0.0f;
};

// The factors of the former and the latter values when they are joined.
struct Joined {
  float former;
  float latter;
};

// The number that is subtracted from scores: 0 for a row without keys, where exp(-inf - 0) is 0.
__device__ __forceinline__ float subtrahend(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

// Joins `latter` to `state`, which is of earlier keys.
__device__ __forceinline__ Joined join(State& state, const State& latter) {
  const float maximum = fmaxf(state.maximum, latter.maximum);
  const float low = subtrahend(maximum);
  const Joined by = {std::exp(state.maximum - low), std::exp(latter.maximum - low)};
  state = {maximum, multiply_add(by.former, state.sum, by.latter * latter.sum)};
  return by;
}

struct alignas(16) Values {
  float of[4];  // columns
};

__device__ __forceinline__ Values join(const Joined& by, const Values& former,
                                       const Values& latter) {
  Values both;
  ONEPASS_UNROLL
  for (int e = 0; e < 4; ++e) {
    both.of[e] = multiply_add(by.former, former.of[e], by.latter * latter.of[e]);
  }
  return both;
}

// Joins the states of a warp's first `count` lanes in their order, with the results of join(). The
// largest score so far is exact in any order, so a prefix maximum comes first; then all lanes
// compute their exponentials at once.
struct WarpJoin {
  State state;  // of all lanes
  Joined own;   // joins the lane's state to those before it

  __device__ __forceinline__ WarpJoin(const State& latter, int count) {
    float maximum = latter.maximum;  // of this lane and those before
    ONEPASS_UNROLL
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
      const float before = from_lane(maximum, lanes);
      if (lane_index() >= lanes) maximum = fmaxf(maximum, before);
    }
    const float former = from_lane(maximum, 1), low = subtrahend(maximum);
    own = {std::exp((lane_index() > 0 ? former : -INFINITY) - low), std::exp(latter.maximum - low)};
    state.maximum = __shfl_sync(kAllLanes, maximum, count - 1);
    for (int i = 0; i < count; ++i) {
      const State next = {0.0f, __shfl_sync(kAllLanes, latter.sum, i)};
      const Joined by = of(i);
      state.sum = i == 0 ? next.sum : multiply_add(by.former, state.sum, by.latter * next.sum);
    }
  }

  // Joins `latter`, the values of state i, to `values`, those of states 0 .. i - 1.
  __device__ __forceinline__ Values add(const Values& values, const Values& latter, int i) const {
    const Joined by = of(i);
    return i == 0 ? latter : join(by, values, latter);
  }

 private:
  __device__ __forceinline__ Joined of(int i) const {
    return {__shfl_sync(kAllLanes, own.former, i), __shfl_sync(kAllLanes, own.latter, i)};
  }
  static __device__ __forceinline__ float from_lane(float value, int lanes_before) {
    return __shfl_sync(kAllLanes, value, (lane_index() - lanes_before) & (kLanes - 1));
  }
};

// The result of a row after all its keys. A sink joins like a key whose value is zero.
struct Finished {
  float lse;
  float normalise;  // factor of the values
};

__device__ __forceinline__ Finished finish(const AttentionDecode& args, int64_t head,
                                           const State& state) {
  float maximum = state.maximum, sum = state.sum, scale = 1.0f;
  if (args.sinks) {
    const float sink = load_as<float>(args.sinks, args.sinks_dtype, head);
    maximum = fmaxf(maximum, sink);
    const float low = subtrahend(maximum);
    scale = std::exp(state.maximum - low);
    sum = scale * sum + std::exp(sink - low);
  }
  return {maximum + std::log(sum), sum == 0.0f ? 0.0f : scale / sum};
}

// ---- where rows are -----------------------------------------------------------------------------

// A tile of query rows of one kv head. Rows are numbered `query * group + head`, so that a tile has
// all heads of a few queries, which see about the same keys. There are fewer than 2^31 rows, and
// fewer than 2^31 tiles, because a tile is a block.
struct RowTile {
  int64_t batch;
  int64_t kv_head;
  int first;  // row
  int rows;

  __device__ __forceinline__ RowTile(const AttentionDecode& args, const DecodeShape& shape,
                                     unsigned tile) {
    const auto kv_tiles = static_cast<unsigned>(shape.kv_tiles);
    const auto kv_heads = static_cast<unsigned>(args.kv_heads);
    batch = tile / kv_tiles / kv_heads;
    kv_head = tile / kv_tiles % kv_heads;
    first = static_cast<int>(tile % kv_tiles) * static_cast<int>(shape.tile_rows);
    const int left = static_cast<int>(shape.rows) - first;
    rows = left < shape.tile_rows ? left : static_cast<int>(shape.tile_rows);
  }
  __device__ __forceinline__ int query(const DecodeShape& shape, int row) const {
    return (first + row) / static_cast<int>(shape.group);
  }
  __device__ __forceinline__ int64_t head(const DecodeShape& shape, int row) const {
    const auto group = static_cast<int>(shape.group);
    return kv_head * group + (first + row) % group;
  }
  __device__ __forceinline__ Pieces pieces(const AttentionDecode& args, const DecodeShape& shape,
                                           const CachedKeys& keys) const {
    const Chunks chunks = chunks_of(args, keys, query(shape, 0), query(shape, rows - 1));
    return {chunks, shape.per_piece};
  }
};

__device__ __forceinline__ void store_lse(const AttentionDecode& args, int64_t batch, int64_t head,
                                          int64_t query, float lse) {
  store_global(args.lse + (batch * args.heads + head) * args.seq_q + query, lse);
}

// Columns col .. col + 3 of a row of the output.
template <class T>
__device__ __forceinline__ void store_output(const AttentionDecode& args, int64_t batch,
                                             int64_t head, int64_t query, int col,
                                             const Values& values, float normalise) {
  T* const row = static_cast<T*>(args.output.data) + batch * args.output.batch_stride +
                 head * args.output.head_stride + query * args.output.row_stride;
  ONEPASS_UNROLL
  for (int e = 0; e < 4; ++e) {
    if (col + e < args.value_dim)
      store_global(row + col + e, onepass::narrow<T>(values.of[e] * normalise));
  }
}

// States in the workspace: (tiles, slots, tile_rows).
struct StoredStates {
  State* states;
  Values* values;  // (..., value_cols / 4)

  __device__ __forceinline__ static int64_t index(const DecodeShape& shape, unsigned tile,
                                                  int64_t slot, int row) {
    return (int64_t{tile} * shape.slots + slot) * shape.tile_rows + row;
  }
};

}  // namespace onepass::cuda
