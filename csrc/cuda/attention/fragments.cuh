// Scores in the C fragments of tensor cores: a lane has two rows, and two neighbouring keys of each
// n8 tile. Applies the functions of scores.cuh to all scores of a lane.
#pragma once

#include "cuda/attention/scores.cuh"
#include "cuda/attention/tiles.cuh"

namespace onepass::cuda {

// A query row of a lane. Rows and keys of one sequence are counted in int.
struct LaneRow {
  int query;
  int first;  // keys that it sees before any mask: first .. last - 1; none beyond the sequence
  int last;
};

// The lane's rows of the 16 rows from `first`.
__device__ __forceinline__ void lane_rows(const Attention& args, const Sequence& sequence,
                                          int first, LaneRow (&rows)[2]) {
  ONEPASS_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int query = first + lane_index() / 4 + 8 * r;
    rows[r] = {query, 0, 0};
    if (query >= sequence.queries) continue;
    const KeyRange keys = keys_of(args, sequence, query);
    if (keys.first >= keys.last) continue;
    rows[r].first = static_cast<int>(keys.first);
    rows[r].last = static_cast<int>(keys.last);
  }
}

// The key of element e of a lane's fragment n in a tile that begins at `first_key`.
__device__ __forceinline__ int key_of(int first_key, int n, int e) {
  return first_key + 8 * n + lane_index() % 4 * 2 + e % 2;
}

// Whether a call needs the instances with terms: a score is more than the product times a positive
// factor. It decides the tile, so it may depend on options alone, not on where rows lie.
inline bool has_terms(const Attention& args) {
  return changes_scores(args) || args.mask.data || args.seed || !(args.scale > 0.0);
}

// The values of a head that the terms of its scores use, beside the call's.
struct HeadTerms {
  int64_t batch;
  int64_t head;
  int64_t alignment;
  HeadNumbers numbers;

  __device__ __forceinline__ HeadTerms(const Attention& args, const Sequence& sequence,
                                       int64_t batch_index, int64_t head_index)
      : batch(batch_index),
        head(head_index),
        alignment(sequence.alignment),
        numbers(load_head_numbers(args, batch, head)) {}
};

// A lane's two rows of a bias or a mask.
template <class B>
struct TermRows {
  const B* row[2];  // from key 0 on

  __device__ __forceinline__ TermRows(const B* data, const Strided& tensor, const HeadTerms& terms,
                                      const LaneRow (&rows)[2]) {
    data += terms.batch * tensor.batch_stride + terms.head * tensor.head_stride;
    row[0] = data + rows[0].query * tensor.row_stride;
    row[1] = data + rows[1].query * tensor.row_stride;
  }

  // Element i % 4 of the lane's fragment i / 4.
  __device__ __forceinline__ const B* of(int i, int first_key) const {
    return row[i % 4 / 2] + key_of(first_key, i / 4, i % 4);
  }

  // Whether all of a tile's keys have elements, and in both rows they begin at a multiple of the
  // bytes of 8 (16 at most). Decided for the warp: lanes may differ.
  __device__ __forceinline__ bool has_whole_groups(const Attention& args, int first_key,
                                                   int tiles) const {
    constexpr uintptr_t kBytes = sizeof(B) == 1 ? 8 : 16;
    const uintptr_t places = reinterpret_cast<uintptr_t>(row[0] + first_key) |
                             reinterpret_cast<uintptr_t>(row[1] + first_key);
    const bool here = places % kBytes == 0 && first_key >= 0 && first_key + 8 * tiles <= args.seq_k;
    return __ballot_sync(kAllLanes, here) == kAllLanes;
  }

  // body(n, r, left, right) for the lane's keys of tile n in row r. Each lane of a quad reads the 8
  // keys of one tile in four at once, and the quad exchanges the pairs: one access instead of eight
  // dependent ones.
  template <int kTiles, class Body>
  __device__ __forceinline__ void for_each_pair(const LaneRow (&rows)[2], int first_key,
                                                Body&& body) const {
    struct alignas(sizeof(B) == 1 ? 8 : 16) Eight {
      B element[8];
    };
    static_assert(kTiles % 4 == 0);
    ONEPASS_UNROLL
    for (int i = 0; i < kTiles / 4 * 2; ++i) {
      const int n = i / 2 * 4, r = i % 2;
      Eight eight{};
      const int first = first_key + 8 * (n + lane_index() % 4);
      if (first < rows[r].last && first + 8 > rows[r].first) {  // one of them is seen
        eight = load_global(reinterpret_cast<const Eight*>(row[r] + first));
      }
      std::array<uint32_t, 4> low{}, high{};
      ONEPASS_UNROLL
      for (int k = 0; k < 4; ++k) {
        if constexpr (sizeof(B) == 4) {
          low[k] = std::bit_cast<uint32_t>(eight.element[2 * k]);
          high[k] = std::bit_cast<uint32_t>(eight.element[2 * k + 1]);
        } else {
          const B pair[2] = {eight.element[2 * k], eight.element[2 * k + 1]};
          low[k] = bits_of(pair[0]) | bits_of(pair[1]) << 16;
        }
      }
      transpose_in_quad(low);
      if constexpr (sizeof(B) == 4) transpose_in_quad(high);
      ONEPASS_UNROLL
      for (int k = 0; k < 4; ++k) {
        if constexpr (sizeof(B) == 4) {
          body(n + k, r, std::bit_cast<B>(low[k]), std::bit_cast<B>(high[k]));
        } else {
          body(n + k, r, of_bits(low[k] & 0xffffu), of_bits(low[k] >> 16));
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ uint32_t bits_of(B element) {
    if constexpr (sizeof(B) == 1) {
      return element;
    } else {
      return element.bits;
    }
  }
  static __device__ __forceinline__ B of_bits(uint32_t bits) {
    if constexpr (sizeof(B) == 1) {
      return static_cast<uint8_t>(bits);
    } else {
      return B{static_cast<uint16_t>(bits)};
    }
  }
};

// scalar: score = terms(scale * score), -inf where the row does not see the key
template <int kTiles>
__device__ __forceinline__ void add_terms(float (&score)[kTiles][4], const Attention& args,
                                          const ScoreNumbers<float>& numbers,
                                          const HeadTerms& terms, const LaneRow (&rows)[2],
                                          int first_key) {
  const auto for_each = [&](auto&& body) {
    ONEPASS_UNROLL
    for (int i = 0; i < 4 * kTiles; ++i) body(score[i / 4][i % 4], i);
  };
  const auto sees = [&](int i) {
    const LaneRow& row = rows[i % 4 / 2];
    const int key = key_of(first_key, i / 4, i % 4);
    return row.first <= key && key < row.last;
  };
  apply_terms<FastTerms>(args, numbers, for_each, [&](int i) -> ScorePlace<float> {
    // From the distance to the lane's first key: exact up to 2^24 keys, rounded to float32 beyond.
    const auto ahead =
        static_cast<float>(rows[i % 4 / 2].query + terms.alignment - key_of(first_key, 0, 0));
    return {terms.numbers, fabsf(ahead - static_cast<float>(8 * (i / 4) + i % 2))};
  });
  if (args.bias.data) {
    visit_dtype_up_to_float32(args.bias_dtype, [&]<class B>() {
      const TermRows<B> bias(static_cast<const B*>(args.bias.data), args.bias, terms, rows);
      if (bias.has_whole_groups(args, first_key, kTiles)) {
        bias.template for_each_pair<kTiles>(rows, first_key, [&](int n, int r, B left, B right) {
          score[n][2 * r] += widen(left);
          score[n][2 * r + 1] += widen(right);
        });
      } else {
        for_each([&](float& s, int i) {
          if (sees(i)) s += widen(load_global(bias.of(i, first_key)));
        });
      }
    });
  }
  for_each([&](float& s, int i) {
    if (!sees(i)) s = -INFINITY;
  });
  if (args.mask.data) {
    const TermRows<uint8_t> mask(static_cast<const uint8_t*>(args.mask.data), args.mask, terms,
                                 rows);
    if (mask.has_whole_groups(args, first_key, kTiles)) {
      mask.for_each_pair<kTiles>(rows, first_key, [&](int n, int r, uint8_t left, uint8_t right) {
        if (left == 0) score[n][2 * r] = -INFINITY;
        if (right == 0) score[n][2 * r + 1] = -INFINITY;
      });
    } else {
      for_each([&](float& s, int i) {
        if (sees(i) && load_global(mask.of(i, first_key)) == 0) s = -INFINITY;
      });
    }
  }
}

// Bit 2 n + i: no row of the warp sees the lane's key i of tile n, so its scores are all -inf. The
// value of such a key may be NaN, which times a probability of 0 would be NaN.
template <int kTiles>
__device__ __forceinline__ uint32_t unseen_keys(const float (&score)[kTiles][4]) {
  static_assert(2 * kTiles <= 32);
  uint32_t unseen = 0;
  ONEPASS_UNROLL
  for (int i = 0; i < 2 * kTiles; ++i) {
    const bool none = score[i / 2][i % 2] == -INFINITY && score[i / 2][i % 2 + 2] == -INFINITY;
    unseen |= static_cast<uint32_t>(none) << i;
  }
  ONEPASS_UNROLL
  for (int lanes = 4; lanes < kLanes; lanes *= 2) {
    unseen &= __shfl_xor_sync(kAllLanes, unseen, lanes);
  }
  return unseen;
}

// Zeroes the rows of B fragments (their k are keys 16 step .. 16 step + 15) that unseen_keys()
// reports.
__device__ __forceinline__ void drop_unseen(uint32_t (&b)[4], uint32_t unseen, int step) {
  ONEPASS_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t bits = unseen >> (4 * step + i % 2 * 2);
    b[i] &= (bits & 1 ? 0u : 0xffffu) | (bits & 2 ? 0u : 0xffff0000u);
  }
}

// scalar: keeps(i, j) = 16 bits number j % 8 of philox(seed; query i, j / 8, random head)
//                       >= threshold, with j counted from the whole sequence's first key
//
// Bit 4 n + e is element e of a lane's fragment n. One Philox call serves a row of an n8 tile; its
// word t is for the two keys of lane t of a quad. For four tiles each lane of the quad makes one
// call, and four shuffles exchange the words. `first_key` is a multiple of 8 of the whole sequence.
template <int kTiles>
__device__ __forceinline__ uint32_t draw(const Dropout& dropout, const Attention& args,
                                         uint32_t random_head, int first_query, int64_t first_key) {
  static_assert(kTiles % 4 == 0 && 4 * kTiles <= 32);
  const int64_t call = (args.key_offset + first_key) / kCallKeys;
  uint32_t kept = 0;
  ONEPASS_UNROLL
  for (int i = 0; i < kTiles / 4 * 2; ++i) {
    const int n = i / 2 * 4, r = i % 2;
    const int query = first_query + lane_index() / 4 + 8 * r;
    auto word = dropout_words(dropout, args, random_head, query, call + n + lane_index() % 4);
    transpose_in_quad(word);
    ONEPASS_UNROLL
    for (int k = 0; k < 8; ++k) {
      const auto is_kept = static_cast<uint32_t>(keeps(dropout, word, k));
      kept |= is_kept << (4 * (n + k / 2) + 2 * r + k % 2);
    }
  }
  return kept;
}

// The keys by which the first tile begins before the first key, so that tiles begin where Philox
// calls do.
ONEPASS_HOST_DEVICE inline int tile_shift(const Attention& args) {
  return args.seed ? static_cast<int>(args.key_offset % kCallKeys) : 0;
}

}  // namespace onepass::cuda
