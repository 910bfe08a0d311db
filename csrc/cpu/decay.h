// Functions of the steps of state-space layers: the decay of a state, and softplus.
#pragma once

#include <cmath>

#include "cpu/activation.h"
#include "cpu/elementary.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// exp(x), exactly 1 at 0; 0 below -87.6, where float32 has no normal numbers left, Inf above 88.3,
// NaN of NaN.
ONEPASS_INLINE Vec<float> decay_of(Vec<float> x) {
  constexpr float kLn2 = 0.693147180559945309f;
  constexpr float kMagic = 12583039.0f;  // 1.5 * 2^23 + 127: low bits become a biased exponent
  x = clamp(x, broadcast<float>(-127 * kLn2), broadcast<float>(128 * kLn2));
  const Vec<float> shifted =
      fma<float>(x, broadcast<float>(1.44269504088896341f), broadcast<float>(kMagic));
  const Vec<float> n = shifted - broadcast<float>(kMagic);
  Vec<float> r;
  if constexpr (kFusesMultiplyAdd) {
    r = fma<float>(n, broadcast<float>(-kLn2), x);
  } else {  // n times the first of two parts of ln 2 is exact
    r = x - n * broadcast<float>(0.693359375f) + n * broadcast<float>(2.12194440e-4f);
  }
  const Vec<float> one = broadcast<float>(1.0f);
  const Vec<float> p = fma<float>(fma<float>(exp_tail(r), r, one), r, one);
  return p * (Vec<float>)((WordBits)shifted << 23);
}

// scalar: in float64 exp itself, lane by lane
ONEPASS_INLINE Vec<double> decay_of(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}

// softplus(x) = max(x, 0) + log(1 + e), e = exp(-|x|), and its derivative. As in torch it is x from
// 20 on. log(1 + e) is twice the series of atanh at s = e / (2 + e), which is at most 1/3: it is
// e - s (e - r), with r what follows the first term of the series, so that what is rounded is
// small. e has no bias, which would add up over the tokens of a long sequence.
ONEPASS_INLINE Gate<float> softplus(Vec<float> x) {
  const Vec<float> one = broadcast<float>(1.0f), least = broadcast<float>(-87.0f);
  const Reduced of = reduce_by_ln2(larger(least, minus_absolute(x)));
  Vec<float> e = fma<float>(fma<float>(exp_tail(of.r), of.r, one), of.r, one);
  e = minus_absolute(x) < least ? Vec<float>{} : scale_by_power_of_two(e, of.n);
  const Vec<float> s = e / (e + broadcast<float>(2.0f));
  const Vec<float> square = s * s;
  Vec<float> r = broadcast<float>(2.0f / 15);
  r = fma<float>(r, square, broadcast<float>(2.0f / 13));
  r = fma<float>(r, square, broadcast<float>(2.0f / 11));
  r = fma<float>(r, square, broadcast<float>(2.0f / 9));
  r = fma<float>(r, square, broadcast<float>(2.0f / 7));
  r = fma<float>(r, square, broadcast<float>(2.0f / 5));
  r = fma<float>(r, square, broadcast<float>(2.0f / 3));
  const Vec<float> slope = (x < Vec<float>{} ? e : one) / (one + e);
  return {fma<float>(s, fma<float>(r, square, -e), e) + larger(Vec<float>{}, x), slope};
}

ONEPASS_INLINE Gate<double> softplus(Vec<double> x) {
  Gate<double> of = sigmoid(x);
  for (int i = 0; i < kLanes<double>; ++i) {
    of.value[i] = x[i] > 20 ? x[i] : std::log1p(std::exp(x[i]));
    of.slope[i] = x[i] > 20 ? 1 : sigmoid(x).value[i];
  }
  return of;
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
