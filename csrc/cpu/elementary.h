// exp and tanh of a vector of float32, to about an ulp of the result.
#pragma once

#include "cpu/vec.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// x / ln 2 as a whole number.
ONEPASS_INLINE Vec<float> whole_logarithm(Vec<float> x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  return fma<float>(x, broadcast<float>(1.44269504088896341f), broadcast<float>(kMagic)) -
         broadcast<float>(kMagic);
}

// x = n ln 2 + r with |r| <= ln 2 / 2, n a whole number; both in float32.
struct Reduced {
  Vec<float> n;
  Vec<float> r;
};

ONEPASS_INLINE Reduced reduce_by_ln2(Vec<float> x) {
  const Vec<float> n = whole_logarithm(x);
  // ln 2 as two numbers, the first with so few bits that n times it is exact.
  const Vec<float> r = fma<float>(n, broadcast<float>(-0.693359375f), x);
  return {n, fma<float>(n, broadcast<float>(2.12194440e-4f), r)};
}

// (exp(r) - 1 - r) / r^2 on |r| <= ln 2 / 2: relative error of the exp below 5e-9. The constant
// term and the linear one are exactly 1, or errors would pile up where a sum is rescaled again and
// again by exp(0).
ONEPASS_INLINE Vec<float> exp_tail(Vec<float> r) {
  Vec<float> p = broadcast<float>(0x1.6a1a6ap-10f);
  p = fma<float>(p, r, broadcast<float>(0x1.123fc8p-7f));
  p = fma<float>(p, r, broadcast<float>(0x1.555916p-5f));
  p = fma<float>(p, r, broadcast<float>(0x1.55548ap-3f));
  return fma<float>(p, r, broadcast<float>(0x1.fffffcp-2f));
}

// exp(x) for x <= 88. Below -87 float32 has no normal numbers left: the result is 0, or a subnormal
// at the levels that scale into subnormals. NaN stays NaN.
ONEPASS_INLINE Vec<float> exp(Vec<float> x) {
  // exp(-104) rounds to 0.
  const Vec<float> least = broadcast<float>(kScalesToSubnormals ? -104.0f : -87.0f);
  const Vec<float> clamped = larger(least, x);
  const Vec<float> n = whole_logarithm(clamped);
  // ln 2 as float32 alone: it is off by 2e-9, and where n is large the result is small.
  const Vec<float> r = fma<float>(n, broadcast<float>(-0.693147180559945309f), clamped);
  const Vec<float> p =
      fma<float>(fma<float>(exp_tail(r), r, broadcast<float>(1.0f)), r, broadcast<float>(1.0f));
  const Vec<float> result = scale_by_power_of_two(p, n);
  if constexpr (kScalesToSubnormals) return result;
  return x < least ? Vec<float>{} : result;
}

// tanh(x) = (exp(2x) - 1) / (exp(2x) + 1), the difference by its own series: no digits are lost
// near 0.
ONEPASS_INLINE Vec<float> tanh(Vec<float> x) {
  const Vec<float> limit = broadcast<float>(10.0f);  // tanh is 1 in float32 from 9.02
  Vec<float> doubled = x + x;
  doubled = doubled > limit + limit ? limit + limit : doubled;
  doubled = doubled < -(limit + limit) ? -(limit + limit) : doubled;
  const Reduced reduced = reduce_by_ln2(doubled);
  const Vec<float> r = reduced.r;
  const Vec<float> difference = fma<float>(exp_tail(r) * r, r, r);  // exp(r) - 1
  const Vec<float> scale = scale_by_power_of_two(broadcast<float>(1.0f), reduced.n);
  const Vec<float> one = broadcast<float>(1.0f);
  const Vec<float> numerator = fma<float>(difference, scale, scale - one);  // exp(2x) - 1
  return numerator / (numerator + one + one);
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
