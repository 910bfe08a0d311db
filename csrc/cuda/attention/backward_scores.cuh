// The scores of attention's backward on tensor cores and their gradients, shared by the kernel of
// dQ, dK, dV and that of dbias.
//
//   P = exp(score - lse),   dS = P * (drop(dP) - delta),   dP = dO V^T
//
// Scores are computed transposed, S^T = K Q^T: element e of a lane's C fragment n belongs to key
// g + 8 (e / 2) of the warp's 16 keys and to query 8 n + 2 t + e % 2, with g = lane / 4 and
// t = lane % 4. So the fragments of P^T and dS^T, rounded to 16 bits, are the A fragments of P^T dO
// and dS^T Q without any exchange.
#pragma once

#include "cuda/attention/backward_ends.cuh"
#include "cuda/attention/fragments.cuh"
#include "cuda/attention/table.h"

namespace onepass::cuda {

// ---- products -----------------------------------------------------------------------------------

// sum (16 kRowTiles x 8 kTiles) += left (16 kRowTiles x columns) right^T, by slabs of columns;
// factor(a, m, k) gives rows 16 m .. 16 m + 15 of columns k .. k + 15 of the left factor, and the
// rows of `right` begin at `first`.
//
// There is at least one slab. kBegins: the sums are zero before, and the first slab is computed
// without a branch; that takes one more register, which not every kernel has.
template <class T, bool kBegins = false, int kRowTiles, int kTiles, int kCols, class Factor>
__device__ __forceinline__ void add_scores(float (&sum)[kRowTiles][kTiles][4],
                                           const Tile<T, kCols>& right,
                                           const FragmentLanes<kCols>& lanes, int first, int slabs,
                                           Factor&& factor) {
  const FragmentLanes<kCols> own = lanes.from_row(first);
  ONEPASS_UNROLL
  for (int slab = 0; slab < kCols / kSlab; ++slab) {
    if (!(kBegins && slab == 0) && slab >= slabs) continue;
    ONEPASS_UNROLL
    for (int k = slab * kSlab; k < (slab + 1) * kSlab; k += 16) {
      uint32_t a[kRowTiles][4];
      ONEPASS_UNROLL
      for (int m = 0; m < kRowTiles; ++m) factor(a[m], m, k);
      ONEPASS_UNROLL
      for (int n = 0; n < kTiles; n += 2) {
        uint32_t b[4];
        load_b<true>(b, right, own, k, 8 * n);
        ONEPASS_UNROLL
        for (int m = 0; m < kRowTiles; ++m) add_product<T>(sum[m][n], sum[m][n + 1], a[m], b);
      }
    }
  }
}

// ---- the numbers of a query that its scores depend on -------------------------------------------

// With terms the lse is kept in natural units, so that a bias of finfo.min works.
struct QueryNumbers {
  float lse;    // inf if the row saw no key; without terms: -log2(e) (lse + rest)
  float rest;   // the part of the lse that rounding lost
  float delta;  // sum(doutput * output) - dlse
  int first;    // keys of the tile that the query sees before any mask: first .. last - 1
  int last;
};

// The numbers of a tile's queries, in shared memory.
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
  // The numbers of queries i and i + 1; i is even.
  __device__ __forceinline__ Two lse(int i) const { return two(i); }
  __device__ __forceinline__ Two rest(int i) const { return two(kQueries + i); }
  __device__ __forceinline__ Two delta(int i) const { return two(2 * kQueries + i); }

  // Whether query i sees any of keys first .. first + keys - 1, before any mask.
  __device__ __forceinline__ bool sees_any(int i, int first, int keys) const {
    const int begin = std::bit_cast<int>(data[3 * kQueries + i]);
    const int end = std::bit_cast<int>(data[4 * kQueries + i]);
    return (begin > first ? begin : first) < (end < first + keys ? end : first + keys);
  }
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

// The loaded statistics of a query row, prefetched one tile ahead; query_numbers() uses them.
struct RowStatistics {
  float lse;
  float rest;
  float delta;
};

__device__ __forceinline__ RowStatistics load_row_statistics(const AttentionBackward& args,
                                                             const BackwardEnds& ends,
                                                             const Sequence& sequence,
                                                             int64_t batch, int64_t head,
                                                             int query) {
  if (query >= sequence.queries) return {-INFINITY, 0.0f, 0.0f};
  const int64_t row = lse_row(args, sequence, batch, head, query);
  return {load_global(static_cast<const float*>(args.lse) + row),
          args.lse_rest ? load_global(static_cast<const float*>(args.lse_rest) + row) : 0.0f,
          load_global(static_cast<const float*>(ends.delta) + row)};
}

template <bool kTerms>
__device__ __forceinline__ QueryNumbers query_numbers(const AttentionBackward& args,
                                                      const Sequence& sequence,
                                                      const RowStatistics& statistics, int query,
                                                      int first_key, int tile_keys) {
  // A row that saw no key gets inf for -inf, so that its probabilities are exp(-inf) = 0.
  const float lse = statistics.lse == -INFINITY ? INFINITY : statistics.lse;
  QueryNumbers numbers{lse, statistics.rest, statistics.delta, 0, 0};
  if constexpr (!kTerms) numbers.lse = -multiply_add(lse, kLog2e, statistics.rest * kLog2e);
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

// The scores that a warp computes at a time: those of 16 keys and the queries of its fragments.
template <int kQueries>
struct Strip {
  QueryTile<kQueries> queries;
  int lane;
  int query;        // the first one, counted in its tile
  int key;          // likewise
  int first_query;  // the same, counted in the sequence
  int first_key;

  // The query and the key of element j % 4 of a lane's fragment j / 4.
  __device__ __forceinline__ int query_of(int j) const {
    return first_query + j / 4 * 8 + lane % 4 * 2 + j % 2;
  }
  __device__ __forceinline__ int key_of(int j) const {
    return first_key + lane / 4 + j % 4 / 2 * 8;
  }
  // The first of the lane's two queries in fragment n, counted in the tile.
  __device__ __forceinline__ int queries_of(int n) const { return query + 8 * n + lane % 4 * 2; }
  __device__ __forceinline__ uint32_t sees(int n) const {
    return queries.sees(queries_of(n), key + lane / 4);
  }
  // Distances are exact up to 2^24.
  __device__ __forceinline__ ScorePlace<float> place(const HeadTerms& terms, int j) const {
    const auto first = static_cast<float>(first_query + terms.alignment - first_key);
    const int further = query_of(j) - first_query - (key_of(j) - first_key);
    return {terms.numbers, fabsf(first + static_cast<float>(further))};
  }
};

// scalar: as draw() of fragments.cuh; bit 4 n + e is element e of a lane's fragment n here too
//
// A Philox call draws for one query and 8 keys. Here these 8 scores are in the eight lanes of equal
// t. Each of the eight makes one of the calls of two fragments. It then has bits of all eight
// lanes' scores and needs the bits of its own scores: an 8 x 8 bit matrix, transposed by three
// exchanges for all fragments at once.
template <int kTiles, int kQueries>
__device__ __forceinline__ uint32_t draw_transposed(const Dropout& dropout, const Attention& args,
                                                    uint32_t random_head,
                                                    const Strip<kQueries>& at) {
  static_assert(kTiles % 2 == 0 && 4 * kTiles <= 32);
  const int g = at.lane / 4, t = at.lane % 4;
  const int64_t call = (args.key_offset + at.first_key) / kCallKeys + (g >> 1 & 1);
  uint32_t kept = 0;
  ONEPASS_UNROLL
  for (int n = 0; n < kTiles; n += 2) {
    const int query = at.first_query + 8 * (n + (g >> 2)) + 2 * t + (g & 1);
    const auto word = dropout_words(dropout, args, random_head, query, call);
    ONEPASS_UNROLL
    for (int k = 0; k < kCallKeys; ++k) {
      kept |= static_cast<uint32_t>(keeps(dropout, word, k)) << (4 * n + k);
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

// scalar: p = exp2(p * unit - lse * log2(e)), ds = p * (ds - delta), for scores without terms
//
// p: the products S^T, ds: dP^T. whole: no score is masked.
template <int kTiles, int kQueries>
__device__ __forceinline__ void plain_gradients(float (&p)[kTiles][4], float (&ds)[kTiles][4],
                                                const Strip<kQueries>& at, float unit, bool whole) {
  ONEPASS_UNROLL
  for (int n = 0; n < kTiles; ++n) {
    const auto lse = at.queries.lse(at.queries_of(n)), delta = at.queries.delta(at.queries_of(n));
    ONEPASS_UNROLL
    for (int e = 0; e < 4; ++e) {
      p[n][e] = exp2_approximate(multiply_add(p[n][e], unit, lse.of[e % 2]));
      ds[n][e] = p[n][e] * (ds[n][e] - delta.of[e % 2]);
    }
  }
  if (whole) return;
  ONEPASS_UNROLL
  for (int n = 0; n < kTiles; ++n) {
    const uint32_t seen = at.sees(n);
    ONEPASS_UNROLL
    for (int e = 0; e < 4; ++e) {
      if (!(seen >> e & 1)) p[n][e] = ds[n][e] = 0.0f;
    }
  }
}

// scalar: p = score of p, without bias and mask
//
// derivative: of the score with respect to scale * p, written if the call has one.
template <int kTiles, int kQueries>
__device__ __forceinline__ void add_terms(float (&p)[kTiles][4], float (&derivative)[kTiles][4],
                                          const Attention& args, const ScoreNumbers<float>& numbers,
                                          const HeadTerms& terms, const Strip<kQueries>& at) {
  apply_terms<FastTerms>(
      args, numbers,
      [&](auto&& body) {
        ONEPASS_UNROLL
        for (int j = 0; j < 4 * kTiles; ++j) body(p[j / 4][j % 4], j, derivative[j / 4][j % 4]);
      },
      [&](int j) { return at.place(terms, j); });
}

// scalar: p = exp(p - lse), 0 where it does not count
template <int kTiles, int kQueries>
__device__ __forceinline__ void term_probabilities(float (&p)[kTiles][4], uint32_t counts,
                                                   const Strip<kQueries>& at) {
  ONEPASS_UNROLL
  for (int n = 0; n < kTiles; ++n) {
    const auto lse = at.queries.lse(at.queries_of(n)), rest = at.queries.rest(at.queries_of(n));
    ONEPASS_UNROLL
    for (int e = 0; e < 4; ++e) {
      const float exponent = (p[n][e] - lse.of[e % 2]) - rest.of[e % 2];
      p[n][e] = counts >> (4 * n + e) & 1 ? exp2_approximate(exponent * kLog2e) : 0.0f;
    }
  }
}

// scalar: ds = p * (drop(ds) - delta);  p = drop(p), without dropout's scale
//
// keep_scale: dropout's scale of the elements that it keeps.
template <int kTiles, int kQueries>
__device__ __forceinline__ void term_gradients(float (&p)[kTiles][4], float (&ds)[kTiles][4],
                                               uint32_t counts, uint32_t kept, float keep_scale,
                                               const Strip<kQueries>& at) {
  ONEPASS_UNROLL
  for (int n = 0; n < kTiles; ++n) {
    const auto delta = at.queries.delta(at.queries_of(n));
    ONEPASS_UNROLL
    for (int e = 0; e < 4; ++e) {
      const bool is_kept = kept >> (4 * n + e) & 1;
      const float dp = is_kept ? ds[n][e] * keep_scale : 0.0f;
      ds[n][e] = counts >> (4 * n + e) & 1 ? p[n][e] * (dp - delta.of[e % 2]) : 0.0f;
      if (!is_kept) p[n][e] = 0.0f;
    }
  }
}

// sum: of a head; see add_head_gradient(), which adds one score.
template <int kTiles, int kQueries>
__device__ __forceinline__ void add_head_gradients(float& sum, const float (&ds)[kTiles][4],
                                                   const AttentionBackward& args,
                                                   const HeadTerms& terms,
                                                   const Strip<kQueries>& at) {
  if (!head_gradient(args)) return;
  ONEPASS_UNROLL
  for (int j = 0; j < 4 * kTiles; ++j) {
    add_head_gradient<FastTerms>(sum, ds[j / 4][j % 4], at.place(terms, j));
  }
}

// scalar: ds *= derivative: the gradient of the score becomes that of scale * product
template <int kTiles>
__device__ __forceinline__ void apply_derivatives(float (&ds)[kTiles][4],
                                                  const float (&derivative)[kTiles][4],
                                                  uint32_t counts,
                                                  const ScoreNumbers<float>& numbers) {
  if (!numbers.has_derivative()) return;
  ONEPASS_UNROLL
  for (int j = 0; j < 4 * kTiles; ++j) {
    // A score that does not count may have any value, and so may its derivative.
    if (counts >> j & 1) ds[j / 4][j % 4] *= derivative[j / 4][j % 4];
  }
}

}  // namespace onepass::cuda
