// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011):
// four random words from a 128-bit counter and a 64-bit key, with no state to carry, so a backward
// draws the forward's numbers again. The layout of counters and keys is frozen: every back end and
// every CPU level must agree bit for bit.
#pragma once

#include <array>
#include <cstdint>

#include "core/dtype.h"

namespace onepass {

struct PhiloxKey {
  uint32_t low;
  uint32_t high;
};

inline constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u;
inline constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u;
inline constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85u;
inline constexpr int kPhiloxRounds = 10;

ONEPASS_HOST_DEVICE constexpr std::array<uint32_t, 4> philox4x32(PhiloxKey key,
                                                                 std::array<uint32_t, 4> counter) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(kPhiloxMultiplier0) * counter[0];
    const uint64_t product1 = static_cast<uint64_t>(kPhiloxMultiplier1) * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key.low,
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key.high,
               static_cast<uint32_t>(product0)};
    key.low += kPhiloxWeyl0;
    key.high += kPhiloxWeyl1;
  }
  return counter;
}

// The third word of a counter is the stream's number, the fourth the seed's offset.
inline constexpr uint32_t kDropoutStream = 0;
inline constexpr uint32_t kRoundingStream = 1;  // stochastic rounding of a product's factor

// Dropout of elements in row-major order: block = element / 8, eight 16-bit values per block, low
// halves first. An element is dropped if its value is below the threshold.
struct Dropout {
  PhiloxKey key;
  uint32_t offset;
  uint32_t threshold;  // round(65536 p), 0..65536
  float scale;         // 65536 / (65536 - threshold), 0 if everything is dropped
};

// seed: (2,) the drawn seed and offset. p is quantised to 1/65536, and the scale is the inverse of
// the quantised keep probability, so that the expectation is exact.
ONEPASS_HOST_DEVICE constexpr Dropout make_dropout(const int64_t* seed, double p) {
  const uint32_t threshold = static_cast<uint32_t>(65536.0 * p + 0.5);
  const uint64_t bits = static_cast<uint64_t>(seed[0]);
  return {{static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)},
          static_cast<uint32_t>(seed[1]),
          threshold,
          threshold >= 65536u ? 0.0f : 65536.0f / static_cast<float>(65536u - threshold)};
}

ONEPASS_HOST_DEVICE constexpr std::array<uint32_t, 4> dropout_block(const Dropout& dropout,
                                                                    uint64_t block) {
  return philox4x32(dropout.key, {static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                                  kDropoutStream, dropout.offset});
}

}  // namespace onepass
