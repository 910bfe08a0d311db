// Which keys of a tile a query sees: the window and the diagonal as an interval, a boolean mask as
// bits.
#pragma once

#include <algorithm>

#include "cpu/vec.h"
#include "ops/attention.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

inline constexpr int64_t kTileKeys = 128;  // that are attended to at a time, at most
inline constexpr int64_t kTileWords = kTileKeys / 32;

// Of queries [first, last) of a sequence; intervals only grow and move to the right with the query,
// so the first and the last query say it all. No key: first >= last.
struct SeenKeys {
  int64_t first;      // of any query
  int64_t last;       // of any query
  int64_t all_first;  // of every query
  int64_t all_last;
};

inline SeenKeys seen_keys(const Attention& args, const Sequence& sequence, int64_t first,
                          int64_t last) {
  const KeyRange low = keys_of(args, sequence, first);
  const KeyRange high = keys_of(args, sequence, last - 1);
  return {low.first, high.last, high.first, low.last};
}

// Likewise the queries of a sequence that see any of keys [first, last).
inline KeyRange seeing_queries(const Attention& args, const Sequence& sequence, int64_t first,
                               int64_t last) {
  const int64_t begin = first - args.window_right - sequence.alignment;
  const int64_t end = last - 1 + args.window_left - sequence.alignment + 1;
  return {std::max<int64_t>(begin, 0), std::min(end, sequence.queries)};
}

// words: (kTileWords,) bit j % 32 of word j / 32: the mask allows key j of the `count` at mask_row.
inline void mask_bits(const uint8_t* mask_row, int64_t count, uint32_t* words) {
  for (int64_t w = 0; w < kTileWords; ++w) {
    words[w] = 32 * w < count ? bits_of_bytes(mask_row + 32 * w, count - 32 * w) : 0u;
  }
}

// The row of a boolean mask that a query goes by, indexed by key.
inline const uint8_t* mask_row(const Attention& args, int64_t batch, int64_t head, int64_t query) {
  return static_cast<const uint8_t*>(args.mask.data) + batch * args.mask.batch_stride +
         head * args.mask.head_stride + query * args.mask.row_stride;
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
