// The scores of attention's backward on tensor cores, and their gradients: what the kernel of dQ,
// dK, dV and that of dbias share.
//
//   P = exp(score - lse),   dS = P * (drop(dP) - delta),   dP = dO V^T
//
// Scores are computed transposed, S^T = K Q^T: element e of a lane's C fragment n is that of key
// g + 8 (e / 2) of the warp's 16 and of query 8 n + 2 t + e % 2. So narrowed fragments of P^T and
// dS^T are A fragments of P^T dO and dS^T Q as they lie.
#pragma once

#include "cuda/attention/backward_ends.cuh"
#include "cuda/attention/fragments.cuh"
#include "cuda/attention/table.h"

namespace onepass::cuda {

// ---- what the scores of a query depend on -------------------------------------------------------

// kTerms: in natural units, so that a bias of finfo.min works.
struct QueryNumbers {
  float lse;    // inf of a row that saw no key; without terms: -log2(e) (lse + rest)
  float rest;   // what rounding took from the lse
  float delta;  // sum(doutput * output) - dlse
  int first;    // keys that it sees before any mask, counted in the tile: first .. last - 1
  int last;
};

// Of a tile's queries in shared memory.
template <int kQueries>
struct QueryTile {
  static_assert(sizeof(QueryNumbers) == kQueryNumbers * sizeof(float));
  float* data;

  __device__ __forceinline__ void put(int i, const QueryNumbers& numbers) const {
    data[i] = numbers.lse;
    data[kQueries + i] = numbers.rest;
    data[2 * kQueries + i] = numbers.delta;
    data[3 * kQueries + i] = std::bit_cast<float>(numbers.first);
    data[4 * kQueries + i] = std::bit_cast<float>(numbers.last);
  }

  struct alignas(8) Two {
    float of[2];
  };
  // Of two neighbours, the first of which is even.
  __device__ __forceinline__ Two lse(int i) const { return two(i); }
  __device__ __forceinline__ Two rest(int i) const { return two(kQueries + i); }
  __device__ __forceinline__ Two delta(int i) const { return two(2 * kQueries + i); }

  // Bit e: whether query i + e % 2 sees key or, for e >= 2, key + 8, before any mask.
  __device__ __forceinline__ uint32_t sees(int i, int key) const {
    const Two first = two(3 * kQueries + i), last = two(4 * kQueries + i);
    uint32_t seen = 0;
    ONEPASS_UNROLL
    for (int e = 0; e < 4; ++e) {
      const int j = key + e / 2 * 8;
      const bool sees =
          std::bit_cast<int>(first.of[e % 2]) <= j && j < std::bit_cast<int>(last.of[e % 2]);
      seen |= static_cast<uint32_t>(sees) << e;
    }
    return seen;
  }

 private:
  __device__ __forceinline__ Two two(int i) const {
    return *reinterpret_cast<const Two*>(data + i);
  }
};

// What memory has of a query; read one tile ahead, so nothing is computed from it yet.
struct QueryMemory {
  float lse;
  float rest;
  float delta;
};

__device__ __forceinline__ QueryMemory load_query_memory(const AttentionBackward& args,
                                                         const BackwardEnds& ends,
                                                         const Sequence& sequence, int64_t batch,
                                                         int64_t head, int query) {
  if (query >= sequence.queries) return {-INFINITY, 0.0f, 0.0f};
  const int64_t row = lse_row(args, sequence, batch, head, query);
  return {load_global(static_cast<const float*>(args.lse) + row),
          args.lse_rest ? load_global(static_cast<const float*>(args.lse_rest) + row) : 0.0f,
          load_global(static_cast<const float*>(ends.delta) + row)};
}

template <bool kTerms>
__device__ __forceinline__ QueryNumbers query_numbers(const AttentionBackward& args,
                                                      const Sequence& sequence,
                                                      const QueryMemory& memory, int query,
                                                      int first_key, int tile_keys) {
  // With its lse turned around, a row that saw no key has no probabilities: exp(-inf) is 0.
  const float lse = memory.lse == -INFINITY ? INFINITY : memory.lse;
  QueryNumbers numbers{lse, memory.rest, memory.delta, 0, 0};
  if constexpr (!kTerms) numbers.lse = -multiply_add(lse, kLog2e, memory.rest * kLog2e);
  if (query >= sequence.queries) return numbers;
  const KeyRange keys = keys_of(args, sequence, query);
  const auto in_tile = [&](int64_t key) {
    const int64_t i = key - first_key;
    return static_cast<int>(i < 0 ? 0 : i > tile_keys ? tile_keys : i);
  };
  numbers.first = in_tile(keys.first);
  numbers.last = in_tile(keys.last);
  return numbers;
}

// ---- terms of scores ----------------------------------------------------------------------------

// The bias of a strip's scores, and which of them count: bit 4 n + e. first_query, first_key: of
// the strip's first query and of the warp's first key; i, key: where those are in their tiles.
template <int kTiles, int kQueries>
__device__ __forceinline__ uint32_t load_terms(float (&bias)[kTiles][4], const Attention& args,
                                               const HeadTerms& terms,
                                               const QueryTile<kQueries>& queries, int i, int key,
                                               int first_query, int first_key) {
  static_assert(4 * kTiles <= 32);
  const int column = lane_index() % 4 * 2, row = lane_index() / 4;
  uint32_t seen = 0;
  ONEPASS_UNROLL
  for (int n = 0; n < kTiles; ++n) {
    seen |= queries.sees(i + 8 * n + column, key + row) << 4 * n;
  }
  const auto for_each_seen = [&](auto&& body) {
    ONEPASS_UNROLL
    for (int j = 0; j < 4 * kTiles; ++j) {
      const int64_t query = first_query + 8 * (j / 4) + column + j % 2;
      if (seen >> j & 1) body(j, query, first_key + row + j % 4 / 2 * 8);
    }
  };
  if (args.mask.data) {
    const uint8_t* const mask = mask_row(args, terms.batch, terms.head, 0);
    uint32_t hidden = 0;
    for_each_seen([&](int j, int64_t query, int k) {
      hidden |= static_cast<uint32_t>(load_global(mask + query * args.mask.row_stride + k) == 0)
                << j;
    });
    seen &= ~hidden;
  }
  ONEPASS_UNROLL
  for (int j = 0; j < 4 * kTiles; ++j) bias[j / 4][j % 4] = 0.0f;
  if (args.bias.data) {
    visit_dtype_up_to_float32(args.bias_dtype, [&]<class B>() {
      const B* const base = static_cast<const B*>(args.bias.data) +
                            terms.batch * args.bias.batch_stride +
                            terms.head * args.bias.head_stride;
      for_each_seen([&](int j, int64_t query, int k) {
        bias[j / 4][j % 4] = widen(load_global(base + query * args.bias.row_stride + k));
      });
    });
  }
  return seen;
}

// scalar: as draw() of fragments.cuh, and bit 4 n + e is element e of a lane's fragment n here too.
//
// A Philox call has a query and 8 keys, which are eight lanes here, those of equal t. Each of the
// eight makes one of the calls of two tiles; the bits that it has of all lanes' scores and those
// that it needs of its own are a square, turned over in three exchanges for all tiles at once.
template <int kTiles>
__device__ __forceinline__ uint32_t draw_transposed(const Dropout& dropout, const Attention& args,
                                                    uint32_t random_head, int first_query,
                                                    int64_t first_key) {
  static_assert(kTiles % 2 == 0 && 4 * kTiles <= 32);
  const int g = lane_index() / 4, t = lane_index() % 4;
  const int64_t call = (args.key_offset + first_key) / kCallKeys + (g >> 1 & 1);
  uint32_t kept = 0;
  ONEPASS_UNROLL
  for (int n = 0; n < kTiles; n += 2) {
    const int query = first_query + 8 * (n + (g >> 2)) + 2 * t + (g & 1);
    const auto word = dropout_words(dropout, args, random_head, query, call);
    ONEPASS_UNROLL
    for (int k = 0; k < kCallKeys; ++k) {
      const bool keeps = (word[k / 2] >> k % 2 * 16 & 0xffffu) >= dropout.threshold;
      kept |= static_cast<uint32_t>(keeps) << (4 * n + k);
    }
  }
  constexpr uint32_t kLower[] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu};
  ONEPASS_UNROLL
  for (int i = 0; i < 3; ++i) {
    const int step = 1 << i;
    const uint32_t other = __shfl_xor_sync(kAllLanes, kept, 4 * step);
    kept = g & step ? (kept & ~kLower[i]) | (other & ~kLower[i]) >> step
                    : (kept & kLower[i]) | (other & kLower[i]) << step;
  }
  return kept;
}

// ---- P and dS -----------------------------------------------------------------------------------

// scalar: p = exp2(p * unit - lse * log2(e)), ds = p * (ds - delta), of scores that are products
//
// p: of S^T, ds: of dP^T; i: the strip's first query in its tile; key: the warp's first key, where
// `whole` says that no score is masked.
template <int kTiles, int kQueries>
__device__ __forceinline__ void plain_gradients(float (&p)[kTiles][4], float (&ds)[kTiles][4],
                                                const QueryTile<kQueries>& queries, int i, int key,
                                                float unit, bool whole) {
  const int column = lane_index() % 4 * 2, row = lane_index() / 4;
  ONEPASS_UNROLL
  for (int n = 0; n < kTiles; ++n) {
    const auto lse = queries.lse(i + 8 * n + column), delta = queries.delta(i + 8 * n + column);
    ONEPASS_UNROLL
    for (int e = 0; e < 4; ++e) {
      p[n][e] = exp2_approximate(multiply_add(p[n][e], unit, lse.of[e % 2]));
      ds[n][e] = p[n][e] * (ds[n][e] - delta.of[e % 2]);
    }
  }
  if (whole) return;
  ONEPASS_UNROLL
  for (int n = 0; n < kTiles; ++n) {
    const uint32_t seen = queries.sees(i + 8 * n + column, key + row);
    ONEPASS_UNROLL
    for (int e = 0; e < 4; ++e) {
      if (!(seen >> e & 1)) p[n][e] = ds[n][e] = 0.0f;
    }
  }
}

// P and dS where there is more to a score than its product.
struct TermGradients {
  float scale;
  float softcap;
  float slope;
  float keep_scale;  // of what dropout keeps
  bool has_slope;
  float dslope = 0.0f;  // sum(ds * distance), the lane's share

  __device__ __forceinline__ TermGradients(const Attention& args, const Dropout& dropout)
      : scale(static_cast<float>(args.scale)),
        softcap(static_cast<float>(args.softcap)),
        slope(0.0f),
        keep_scale(dropout.scale),
        has_slope(args.alibi_slopes != nullptr) {}

  // scalar: s = softcap * tanh(scale * p / softcap) - slope * distance + bias, where it is seen;
  //         p = exp(s - lse), ds = p * (drop(ds) - delta), p = drop(p) but for what it is scaled by
  //
  // ds: of dP^T, then the gradient of scale * product, which is another than that of the score
  // (kScore) by softcap's derivative. distance: of the strip's first query from key 0 of the tile.
  template <bool kScore, int kTiles, int kQueries>
  __device__ __forceinline__ void apply(float (&p)[kTiles][4], float (&ds)[kTiles][4],
                                        const float (&bias)[kTiles][4], uint32_t seen,
                                        uint32_t kept, const QueryTile<kQueries>& queries, int i,
                                        int key, float distance) {
    const int column = lane_index() % 4 * 2, row = lane_index() / 4;
    float tangent[kTiles][4];
    const auto for_each = [&](auto&& body) {
      ONEPASS_UNROLL
      for (int j = 0; j < 4 * kTiles; ++j) body(p[j / 4][j % 4], j / 4, j % 4);
    };
    for_each([&](float& s, int, int) { s *= scale; });
    if (softcap != 0.0f) {
      const float inverse = 1.0f / softcap;
      for_each([&](float& s, int n, int e) {
        const float bent = tanh_approximate(s * inverse);
        s = softcap * bent;
        tangent[n][e] = multiply_add(-bent, bent, 1.0f);
      });
    }
    const auto distance_of = [&](int n, int e) {
      const int step = 8 * n + column + e % 2 - (key + row + e / 2 * 8);
      return fabsf(distance + static_cast<float>(step));
    };
    if (has_slope) {
      for_each([&](float& s, int n, int e) { s = multiply_add(-slope, distance_of(n, e), s); });
    }
    ONEPASS_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      const int at = i + 8 * n + column;
      const auto lse = queries.lse(at), rest = queries.rest(at), delta = queries.delta(at);
      ONEPASS_UNROLL
      for (int e = 0; e < 4; ++e) {
        const bool sees = seen >> (4 * n + e) & 1, keeps = kept >> (4 * n + e) & 1;
        const float exponent = ((p[n][e] + bias[n][e]) - lse.of[e % 2]) - rest.of[e % 2];
        const float weight = sees ? exp2_approximate(exponent * kLog2e) : 0.0f;
        const float dp = keeps ? ds[n][e] * keep_scale : 0.0f;
        p[n][e] = keeps ? weight : 0.0f;
        ds[n][e] = sees ? weight * (dp - delta.of[e % 2]) : 0.0f;
      }
    }
    if constexpr (kScore) return;
    if (has_slope) {
      for_each([&](float&, int n, int e) { dslope += ds[n][e] * distance_of(n, e); });
    }
    if (softcap != 0.0f) {
      for_each([&](float&, int n, int e) {
        if (seen >> (4 * n + e) & 1) ds[n][e] *= tangent[n][e];
      });
    }
  }
};

}  // namespace onepass::cuda
