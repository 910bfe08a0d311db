// silu and its derivative for numbers that were normalised, of a vector or of two: half the
// operations of cpu/activation.h, which keep their digits down to the smallest numbers. Below -87,
// where silu is under 1e-35, these give 0 or a number as small. In float32 -x log2(e) is rounded
// once, so that silu(x) may be wrong by 8 ulp at -10, by 30 at -40 and by 56 at -87.
//
// silu(x) = x / (1 + e) and silu'(x) = s (1 + x s e), with e = exp(-x), s = 1 / (1 + e): nothing is
// subtracted.
#pragma once

#include <cmath>

#include "cpu/elementary.h"
#include "cpu/vec_two.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// 2^t of the rest of an exponent, with a relative error of 9e-8: fitted with 1 as its constant.
ONEPASS_INLINE Vec<float> power_of_two(const Exponent& exponent) {
  const Vec<float> x = exponent.rest;
  Vec<float> p = fma<float>(x, broadcast<float>(0x1.e974fcp-10f), broadcast<float>(0x1.277854p-7f));
  p = fma<float>(p, x, broadcast<float>(0x1.c91ce6p-5f));
  p = fma<float>(p, x, broadcast<float>(0x1.ebdb56p-3f));
  p = fma<float>(p, x, broadcast<float>(0x1.62e4bap-1f));
  p = fma<float>(p, x, broadcast<float>(1.0f));
  return scale_by_power_of_two(p, exponent.whole);
}

// exp(-x); Inf from 2^128 on, or at most 2^126 if it must be finite, and 1 / (1 + e) normal. Below
// 1e-37 it may be 1e-38: it is added to 1.
template <bool kFinite>
ONEPASS_INLINE Vec<float> exp_of_minus(Vec<float> x) {
  const Vec<float> most = broadcast<float>(kFinite ? 126.0f : 128.0f);
  Vec<float> t = x * broadcast<float>(-1.44269504088896341f);
  if constexpr (!kScalesToSubnormals) {
    t = clamp(t, broadcast<float>(-126.0f), most);
  } else if constexpr (kFinite) {
    t = smaller(most, t);
  }
  return power_of_two(exponent_of(t));
}

template <bool kFinite>
ONEPASS_INLINE Vec<double> exp_of_minus(Vec<double> x) {
  const double most = kFinite ? 700 : 710;  // whose exp is Inf: silu(-Inf) is NaN
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::exp(-x[i] > most ? most : -x[i]);
  return x;
}

// V is Vec<A> or Two<A>.
template <class A, class V>
ONEPASS_INLINE V silu(const V& x) {
  const V e =
      each<A>([](Vec<A> v) __attribute__((always_inline)) { return exp_of_minus<false>(v); }, x);
  return each<A>([](Vec<A> v, Vec<A> exp)
                     __attribute__((always_inline)) { return v / (broadcast<A>(A(1)) + exp); },
                 x, e);
}

// upstream * silu'(x)
template <class A, class V>
ONEPASS_INLINE V times_silu_slope(const V& upstream, const V& x) {
  const Vec<A> one = broadcast<A>(A(1));
  const V e =
      each<A>([](Vec<A> v) __attribute__((always_inline)) { return exp_of_minus<true>(v); }, x);
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
