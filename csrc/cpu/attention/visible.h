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

// words: (kTileWords,) bit j % 32 of word j / 32: the mask allows key j of the `count` at mask_row.
inline void mask_bits(const uint8_t* mask_row, int64_t count, uint32_t* words) {
  for (int64_t w = 0; w < kTileWords; ++w) {
    words[w] = 32 * w < count ? bits_of_bytes(mask_row + 32 * w, count - 32 * w) : 0u;
  }
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
