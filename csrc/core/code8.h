// Optimizer moments in 8 bits: a code per element, a float32 scale per block (its largest
// magnitude). The code's exponent is dynamic: the leading zeros of its b bits (b = 8 for the second
// moment, 7 beside a sign for the first) count octaves of 8, what follows the leading one is a
// linear fraction, so that large values keep 7 bits and small ones reach down to 8^-b (the idea is
// Dettmers': 8-bit approximations for parallelism in deep learning, ICLR 2016). Unlike his table,
// which a gather would have to look up for every element, both directions are a few integer and
// float32 operations:
//
//   value(0) = 0;  value(c) = 8^-k (1/8 + 7/8 (j + 1) / 2^(b-1-k)),  c = 2^(b-1-k) + j
//
// with k < b - 1 leading zeros; the last octave, c = 1, reaches linearly down to zero:
// value(1) = 8^-(b-1). The largest code is exactly 1, so a block's largest magnitude survives
// encoding and decoding bit for bit.
#pragma once

#include <bit>
#include <cstdint>

#include "core/dtype.h"

namespace onepass {

// The code of 0 <= x <= 1 in `kBits` bits. rounding: 0.5 for the nearest, or uniform in [0, 1) for
// stochastic rounding, which is right on average.
template <int kBits>
ONEPASS_HOST_DEVICE constexpr uint32_t encode8(float x, float rounding) {
  constexpr int kLast = kBits - 1;
  const int halvings = 126 - static_cast<int>(std::bit_cast<uint32_t>(x) >> 23);  // -1 for 1
  const int octave = halvings / 3 < kLast ? halvings / 3 : kLast;
  const float scaled = x * std::bit_cast<float>(static_cast<uint32_t>(127 + 3 * octave) << 23);
  const int levels = (1 << kLast) >> octave;
  const float place =
      octave == kLast ? scaled : (scaled - 0.125f) * (static_cast<float>(levels) * (8.0f / 7.0f));
  return static_cast<uint32_t>(levels - 1 + static_cast<int>(place + rounding));
}

template <int kBits>
ONEPASS_HOST_DEVICE constexpr float decode8(uint32_t code) {
  if (code <= 1) return code == 0 ? 0.0f : std::bit_cast<float>((127u - 3u * (kBits - 1)) << 23);
  const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(code));
  const uint32_t leading = (bits >> 23) - 127u;  // b - 1 - k
  const uint32_t octave = kBits - 1 - leading;
  const float step = std::bit_cast<float>((127u - leading) << 23);
  const float fraction = std::bit_cast<float>((bits & 0x7fffffu) | 0x3f800000u) - 1.0f + step;
  return std::bit_cast<float>((127u - 3u * octave) << 23) * (0.125f + 0.875f * fraction);
}

}  // namespace onepass
