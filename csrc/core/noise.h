// Random bits for stochastic rounding, computed from (seed, step, tensor, element): no step draws
// from a generator, and replicas of a parameter round alike.
//
// Philox gives each stretch of kNoiseStretch elements a start and an odd stride, 63 random bits; in
// it, element i takes the finaliser of an integer hash (C. Wellons, hash-prospector, lowbias32) of
// start + i * stride: two multiplications for 32 bits where Philox needs five for each. That is
// good enough here: rounding needs every element's bits uniform and unrelated to its value, over
// steps and over neighbours; nothing is sampled from them. tests/optim/test_precision.py measures
// it.
#pragma once

#include <cstdint>

#include "core/philox.h"

namespace onepass {

inline constexpr int64_t kNoiseStretch = 4096;

struct Noise {
  uint32_t start;
  uint32_t stride;  // odd
};

// `tensor` numbers the optimizer's parameters; stretch = element / kNoiseStretch.
ONEPASS_HOST_DEVICE constexpr Noise make_noise(int64_t seed, uint32_t step, uint32_t tensor,
                                               int64_t stretch) {
  const uint64_t bits = static_cast<uint64_t>(seed);
  const std::array<uint32_t, 4> words = philox4x32(
      {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)},
      {static_cast<uint32_t>(stretch), static_cast<uint32_t>(stretch >> 32), tensor, step});
  return {words[0], words[1] | 1u};
}

// Also for vectors of words. The high halves are final here.
template <class Word>
ONEPASS_HOST_DEVICE constexpr Word mix_high_bits(Word word) {
  word ^= word >> 16;
  word *= 0x7feb352du;
  word ^= word >> 15;
  word *= 0x846ca68bu;
  return word;
}

template <class Word>
ONEPASS_HOST_DEVICE constexpr Word mix_bits(Word word) {
  word = mix_high_bits(word);
  word ^= word >> 16;
  return word;
}

// element: its number within the stretch. The low half rounds the parameter and its average (an
// average of unrounded parameters); the high half rounds the second moment.
ONEPASS_HOST_DEVICE constexpr uint32_t noise_bits(const Noise& noise, uint32_t element) {
  return mix_bits(noise.start + element * noise.stride);
}

}  // namespace onepass
