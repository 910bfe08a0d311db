// silu and its derivative for numbers that were normalised, of a vector or of two: half the
// operations of cpu/activation.h, which keep their digits down to the smallest numbers. Below -87,
// where silu is under 1e-35, these give 0 or a number as small. What is rounded to 16 bits needs
// fewer digits of the exponential.
//
// silu(x) = x / (1 + e) and silu'(x) = s (1 + x s e), with e = exp(-x), s = 1 / (1 + e): nothing is
// subtracted.
#pragma once

#include <cmath>

#include "cpu/elementary.h"
#include "cpu/vec_two.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// exp(x) from its exponent; the polynomial has a relative error of 8e-8, fitted with 1 as its
// constant.
ONEPASS_INLINE Vec<float> power_of(const Exponent& exponent) {
  const Vec<float> r = exponent.rest;
  Vec<float> p = fma<float>(r, broadcast<float>(0x1.7e61c6p-7f), broadcast<float>(0x1.40005p-5f));
  p = fma<float>(p, r, broadcast<float>(0x1.572706p-3f));
  p = fma<float>(p, r, broadcast<float>(0x1.ffde24p-2f));
  p = fma<float>(p, r, broadcast<float>(0x1.000064p+0f));
  p = fma<float>(p, r, broadcast<float>(1.0f));
  return scale_by_power_of_two(p, exponent.whole);
}

// 2^t from its exponent, for what is rounded to 16 bits: the polynomial has a relative error of
// 2.7e-6. (One of degree 3 has 7e-5, up to a third of half a unit of float16's last digit.)
ONEPASS_INLINE Vec<float> short_power_of(const Exponent& exponent) {
  const Vec<float> r = exponent.rest;
  Vec<float> p = fma<float>(r, broadcast<float>(0x1.bb7cd4p-7f), broadcast<float>(0x1.aa13fp-5f));
  p = fma<float>(p, r, broadcast<float>(0x1.ee798ap-3f));
  p = fma<float>(p, r, broadcast<float>(0x1.62d166p-1f));
  p = fma<float>(p, r, broadcast<float>(0x1.00002cp+0f));
  return scale_by_power_of_two(p, exponent.whole);
}

// exp(-x), of which the largest is Inf, or finite if it must be, and 1 / (1 + e) normal. Below
// 1e-37 it may be 1e-38, or 0: it is added to 1. kShort: with the digits of 16 bits.
template <bool kFinite, bool kShort>
ONEPASS_INLINE Vec<float> exp_of_minus(Vec<float> x) {
  if constexpr (kShort) {
    const Vec<float> t = x * broadcast<float>(-1.44269504088896341f);
    const Vec<float> most = broadcast<float>(kFinite ? 125.5f : 128.0f);
    if constexpr (kSplitsEveryNumber) {
      return short_power_of(binary_exponent_of(kFinite ? smaller(most, t) : t));
    }
    return short_power_of(binary_exponent_of(clamp(t, broadcast<float>(-126.0f), most)));
  }
  const Vec<float> most = broadcast<float>(kFinite ? 87.0f : 89.0f);
  return power_of(exponent_of(clamp(-x, broadcast<float>(-87.0f), most)));
}

template <bool kFinite, bool>
ONEPASS_INLINE Vec<double> exp_of_minus(Vec<double> x) {
  const double most = kFinite ? 700 : 710;  // whose exp is Inf: silu(-Inf) is NaN
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::exp(-x[i] > most ? most : -x[i]);
  return x;
}

// V is Vec<A> or Two<A>. T is what the result is rounded to.
template <class A, class T, class V>
ONEPASS_INLINE V silu(const V& x) {
  const V e =
      each<A>([](Vec<A> v)
                  __attribute__((always_inline)) { return exp_of_minus<false, sizeof(T) == 2>(v); },
              x);
  return each<A>([](Vec<A> v, Vec<A> exp)
                     __attribute__((always_inline)) { return v / (broadcast<A>(A(1)) + exp); },
                 x, e);
}

// upstream * silu'(x). V and T as for silu().
template <class A, class T, class V>
ONEPASS_INLINE V times_silu_slope(const V& upstream, const V& x) {
  const Vec<A> one = broadcast<A>(A(1));
  const V e = each<A>(
      [](Vec<A> v) __attribute__((always_inline)) { return exp_of_minus<true, sizeof(T) == 2>(v); },
      x);
  const V s =
      each<A>([&](Vec<A> exp) __attribute__((always_inline)) { return one / (one + exp); }, e);
  return each<A>([&](Vec<A> up, Vec<A> v, Vec<A> exp, Vec<A> s)
                     __attribute__((always_inline)) { return up * (s * fma<A>(v * s, exp, one)); },
                 upstream, x, e, s);
}

// What silu is taken of: centred * (rstd * weight) + bias.
template <class A, class V>
ONEPASS_INLINE V z_of(const V& centred, Vec<A> scale, Vec<A> bias) {
  return each<A>([&](Vec<A> v) { return fma<A>(v, scale, bias); }, centred);
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
