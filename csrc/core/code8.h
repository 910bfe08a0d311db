// Optimizer moments in 8 bits: a code per element, a float32 scale per block (its largest
// magnitude). The code's exponent is dynamic: the leading zeros of its b bits (b = 8 for the second
// moment, 7 beside a sign for the first) count octaves of 8, the bits after the leading one are a
// linear fraction, so that large values keep 7 bits and small ones reach down to 8^-(b-1) (the idea
// is Dettmers': 8-bit optimizers via block-wise quantization, ICLR 2022). His codes are looked up
// in a table of 256; here, within an octave,
//
//   value(c) = 8^-k (1/8 + 7/8 (j + 1) / 2^(b-1-k)),  c = 2^(b-1-k) + j,  k leading zeros
//
// is linear in c, so either direction is one multiply-add with one of at most eight slopes, which
// fit into a register. The last octave, c = 1, reaches linearly down to value(0) = 0. The largest
// code is exactly 1: a block's largest magnitude survives encoding and decoding bit for bit.
//
// A second moment that is not zero never gets the code 0, however it is rounded. Its root is a
// denominator: with code 0, elements whose gradients are a thousandth of their block's largest
// would make steps a hundred times too long (tests/optim/test_precision.py). With code 1 their
// steps are too short instead.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "core/dtype.h"

namespace onepass {

struct CodeLine {
  float slope;
  float intercept;
};

ONEPASS_HOST_DEVICE constexpr float power_of_two(int exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(127 + exponent) << 23);
}

// value = slope * code + intercept, exactly.
template <int kBits>
ONEPASS_HOST_DEVICE constexpr CodeLine value_line(int octave) {
  constexpr int kLast = kBits - 1;
  const float unit = power_of_two(-3 * octave);
  if (octave == kLast) return {unit, 0.0f};
  const float levels = power_of_two(kLast - octave);
  const float slope = 0.875f * power_of_two(-3 * octave - (kLast - octave));  // no division
  return {slope, 0.125f * unit + slope * (1.0f - levels)};
}

// code = slope * value + intercept, before rounding.
template <int kBits>
ONEPASS_HOST_DEVICE constexpr CodeLine code_line(int octave) {
  constexpr int kLast = kBits - 1;
  const float unit = power_of_two(3 * octave);
  if (octave == kLast) return {unit, 0.0f};
  const float levels = power_of_two(kLast - octave);
  return {levels * unit * (8.0f / 7.0f), levels * (6.0f / 7.0f) - 1.0f};
}

// The term that encode8 adds before it truncates. It includes a slack: a value that lies a rounding
// error below a code counts as the code.
inline constexpr float kCodeSlack = 0x1p-14f;
inline constexpr float kNearestCode = 0.5f + kCodeSlack;

// For unbiased stochastic rounding: 16 random bits * kCodeNoise + kCodeSlack. The mean is one half
// and the sum stays below one, so that zero stays zero.
inline constexpr float kCodeNoise = (0.5f - kCodeSlack) / 32767.5f;

// The code of 0 <= x <= 1. rounding: kNearestCode, or the sum above of random bits.
template <int kBits>
ONEPASS_HOST_DEVICE inline uint32_t encode8(float x, float rounding) {
  constexpr int kLast = kBits - 1;
  constexpr int kTop = (1 << kBits) - 1;
  const int halvings = 126 - static_cast<int>(std::bit_cast<uint32_t>(x) >> 23);  // -1 for 1
  const int third = (halvings > 0 ? halvings : 0) / 3;
  const CodeLine line = code_line<kBits>(third < kLast ? third : kLast);
  const int code = static_cast<int>(std::fma(x, line.slope, line.intercept) + rounding);
  const int least = kBits == 8 && x > 0.0f ? 1 : 0;
  return static_cast<uint32_t>(code > kTop ? kTop : code > least ? code : least);
}

template <int kBits>
ONEPASS_HOST_DEVICE constexpr float decode8(uint32_t code) {
  if (code == 0) return 0.0f;
  const float number = static_cast<float>(code);
  const int leading = static_cast<int>(std::bit_cast<uint32_t>(number) >> 23) - 127;
  const CodeLine line = value_line<kBits>(kBits - 1 - leading);
  return number * line.slope + line.intercept;  // exact, fused or not
}

// 1 / scale, by which a block's values are multiplied before they are encoded; 0 where the scale is
// so small that it counts as 0 itself.
ONEPASS_HOST_DEVICE constexpr float inverse_scale(float scale) {
  return scale < 0x1p-126f ? 0.0f : 1.0f / scale;
}

}  // namespace onepass
