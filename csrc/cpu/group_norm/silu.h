// silu and its derivative for numbers that were normalised: a third fewer operations than those of
// cpu/activation.h, which keep their digits down to the smallest numbers. Below -88, where silu is
// under 1e-36, these give 0 or a number as small.
//
// silu(x) = x / (1 + e) and silu'(x) = s (1 + x s e), with e = exp(-x), s = 1 / (1 + e): nothing is
// subtracted.
#pragma once

#include <cmath>

#include "cpu/elementary.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// exp(-x), of which `most` is the largest -x that is told apart: exp(88) is finite, exp(89) is not.
// exp(-x) below 1e-37 may be 1e-38: it is added to 1. The polynomial of exp(), whose terms are
// summed in pairs here: Horner's rule leaves the multipliers waiting.
ONEPASS_INLINE Vec<float> exp_of_minus(Vec<float> x, float most) {
  const Vec<float> upper = broadcast<float>(most), lower = broadcast<float>(-87.0f);
  const Vec<float> y = clamp(-x, lower, upper);
  const Vec<float> n = whole_logarithm(y);
  const Vec<float> r = fma<float>(n, broadcast<float>(-0.693147180559945309f), y);
  const Vec<float> square = r * r;
  const Vec<float> high =
      fma<float>(broadcast<float>(0x1.6a1a6ap-10f), r, broadcast<float>(0x1.123fc8p-7f));
  const Vec<float> middle =
      fma<float>(broadcast<float>(0x1.555916p-5f), r, broadcast<float>(0x1.55548ap-3f));
  const Vec<float> low = fma<float>(broadcast<float>(0x1.fffffcp-2f), square, r);
  const Vec<float> p = fma<float>(fma<float>(high, square, middle), square * r, low);
  return scale_by_power_of_two(p + broadcast<float>(1.0f), n);
}

ONEPASS_INLINE Vec<double> exp_of_minus(Vec<double> x, double most) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::exp(-x[i] > most ? most : -x[i]);
  return x;
}

template <class A>
ONEPASS_INLINE Vec<A> silu(Vec<A> x) {
  constexpr A kMost = sizeof(A) == 8 ? A(710) : A(89);  // whose exp is Inf: silu(-Inf) is NaN
  return x / (broadcast<A>(A(1)) + exp_of_minus(x, kMost));
}

// upstream * silu'(x)
template <class A>
ONEPASS_INLINE Vec<A> times_silu_slope(Vec<A> upstream, Vec<A> x) {
  constexpr A kMost = sizeof(A) == 8 ? A(700) : A(88);
  const Vec<A> one = broadcast<A>(A(1));
  const Vec<A> e = exp_of_minus(x, kMost);
  const Vec<A> s = one / (one + e);
  return upstream * (s * fma<A>(x * s, e, one));
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
