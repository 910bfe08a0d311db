// The work of a decoding warp: the scores of its query rows with the keys of an iteration, and
// their running softmax.
#pragma once

#include "cuda/attention/decode_states.cuh"
#include "cuda/attention/decode_tiles.cuh"

namespace onepass::cuda {

// A key's number within a chunk of `count` keys, clamped to the chunk.
__device__ __forceinline__ int keys_within(int64_t key, int count) {
  return key < 0 ? 0 : key > count ? count : static_cast<int>(key);
}

// The keys of a chunk that each row of a lane sees, and the row's terms; keys are counted from the
// chunk's first.
template <class Tile>
struct OwnRows {
  KeysThere keys[Tile::kOwnRows];
  int position[Tile::kOwnRows];
  HeadNumbers numbers[Tile::kOwnRows];

  __device__ __forceinline__ OwnRows(const AttentionDecode& args, const DecodeShape& shape,
                                     const RowTile& tile, const CachedKeys& all, int64_t first_key,
                                     int count) {
    ONEPASS_UNROLL
    for (int i = 0; i < Tile::kOwnRows; ++i) {
      const int row = Tile::own_row(i);
      keys[i] = {0, 0};
      position[i] = 0;
      numbers[i] = {};
      if (row >= tile.rows) continue;
      const int64_t query = tile.query(shape, row);
      const KeyRange seen = cached_keys_of(args, all, query);
      keys[i] = {keys_within(seen.first - first_key, count),
                 keys_within(seen.last - first_key, count)};
      position[i] = static_cast<int>(all.last - args.seq_q + query - first_key);
      numbers[i] = load_head_numbers(args, tile.batch, tile.head(shape, row));
    }
  }
};

template <bool kExact>
__device__ __forceinline__ float exponential(float x) {
  if constexpr (kExact) {
    return std::exp(x);
  } else {
    return exp2_approximate(x * kLog2e);
  }
}

// scalar: score = terms(scale * score), -inf where the row does not see the key
template <class Tile>
__device__ __forceinline__ void add_terms(float (&score)[Tile::kOwnRows][Tile::kOwnScores],
                                          const AttentionDecode& args,
                                          const ScoreNumbers<float>& numbers,
                                          const OwnRows<Tile>& rows, int first_key) {
  constexpr int kScores = Tile::kOwnScores;  // per row
  const auto for_each = [&](auto&& body) {
    ONEPASS_UNROLL
    for (int e = 0; e < Tile::kOwnRows * kScores; ++e) body(score[e / kScores][e % kScores], e);
  };
  const auto key_of = [&](int e) { return first_key + Tile::own_key(e % kScores); };
  using Math = TermMath<Tile::kExact, false>;  // not fused: both kinds of tile round alike
  apply_terms<Math>(args, numbers, for_each, [&](int e) -> ScorePlace<float> {
    const int distance = rows.position[e / kScores] - key_of(e);
    return {rows.numbers[e / kScores], static_cast<float>(distance < 0 ? -distance : distance)};
  });
  for_each([&](float& s, int e) {
    if (!rows.keys[e / kScores].has(key_of(e))) s = -INFINITY;
  });
}

// A warp's share of a chunk: the running softmax of its rows.
template <class Tile>
struct WarpState {
  Tile tile;  // with the sums of values
  State own[Tile::kOwnRows];

  // scalar: weight = exp(score - maximum), with the largest score of the row so far; sums made with
  //         an older maximum are multiplied by exp(older - maximum)
  __device__ __forceinline__ void weigh(float (&score)[Tile::kOwnRows][Tile::kOwnScores],
                                        float (&shrink)[Tile::kOwnRows]) {
    ONEPASS_UNROLL
    for (int i = 0; i < Tile::kOwnRows; ++i) {
      float maximum = own[i].maximum;
      ONEPASS_UNROLL
      for (float s : score[i]) maximum = fmaxf(maximum, s);
      ONEPASS_UNROLL
      for (int lanes = Tile::kApart; lanes < Tile::kApart * Tile::kSharing; lanes *= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, lanes));
      }
      const float low = subtrahend(maximum);
      shrink[i] = exponential<Tile::kExact>(own[i].maximum - low);
      own[i].maximum = maximum;
      own[i].sum *= shrink[i];
      ONEPASS_UNROLL
      for (float& s : score[i]) {
        s = exponential<Tile::kExact>(s - low);
        own[i].sum += s;
      }
    }
  }

  // Stores the warp's states (kRows,) and values. Each lane has summed its own scores; here these
  // sums are added up per row.
  __device__ __forceinline__ void put(State* states, Values* values, int rows, int value_dim) {
    ONEPASS_UNROLL
    for (int i = 0; i < Tile::kOwnRows; ++i) {
      ONEPASS_UNROLL
      for (int lanes = Tile::kApart; lanes < Tile::kApart * Tile::kSharing; lanes *= 2) {
        own[i].sum += __shfl_xor_sync(kAllLanes, own[i].sum, lanes);
      }
      const bool is_first = lane_index() / Tile::kApart % Tile::kSharing == 0;
      if (is_first) states[Tile::own_row(i)] = own[i];
    }
    tile.put(values, rows, value_dim);
  }
};

}  // namespace onepass::cuda
