// Activations and their derivatives.
//
// All but sigmoid, relu and relu2 are x times a number between 0 and 1, the gate: sigmoid(x) for
// silu, the normal distribution's function for gelu, sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)) for
// its tanh form, sigmoid(1.702 x) for quick_gelu (Hendrycks and Gimpel, Gaussian error linear
// units, 2016). No gate is computed as 1 - (nearly 1), so that they keep their digits where x is
// negative. As in torch, -Inf gives NaN in these.
#pragma once

#include <cmath>

#include "core/activation.h"
#include "cpu/elementary.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

template <class A>
struct Gate {
  Vec<A> value;
  Vec<A> slope;  // its derivative
};

// By their sign bits, an instruction each.
ONEPASS_INLINE Vec<float> absolute(Vec<float> x) { return (Vec<float>)((WordBits)x & 0x7fffffffu); }
ONEPASS_INLINE Vec<float> minus_absolute(Vec<float> x) {
  return (Vec<float>)((WordBits)x | 0x80000000u);
}

ONEPASS_INLINE Gate<float> sigmoid(Vec<float> x) {
  const Vec<float> e = exp(minus_absolute(x));
  const Vec<float> ratio = broadcast<float>(1.0f) / (broadcast<float>(1.0f) + e);
  const Vec<float> slope = e * ratio * ratio;
  if constexpr (kChoosesByMask) return {x < Vec<float>{} ? e * ratio : ratio, slope};
  // 1, or e where x is negative, by the sign bit and the larger of 0 or 1 and e, which is at
  // most 1.
  const WordBits not_negative = ~(WordBits)((SignedWords)x >> 31);
  const Vec<float> least = (Vec<float>)((WordBits)broadcast<float>(1.0f) & not_negative);
  return {larger(least, e) * ratio, slope};
}

// The function of the normal distribution: exp(-x^2 / 2) t p(t) for x < 0, where t is
// 1 / (1 - 0.34 x): the form of Abramowitz and Stegun 7.1.26. p was fitted for its largest relative
// error down to x = -12, where the function is 2e-33; with numbers of float32 it is 3.5e-8.
ONEPASS_INLINE Gate<float> normal(Vec<float> x) {
  const Vec<float> z = absolute(x);
  const Vec<float> one = broadcast<float>(1.0f);
  const Vec<float> t = one / fma<float>(z, broadcast<float>(0.34f), one);
  Vec<float> p = broadcast<float>(-0x1.bd058ep-6f);
  p = fma<float>(p, t, broadcast<float>(0x1.27be5ep-3f));
  p = fma<float>(p, t, broadcast<float>(-0x1.21b75ap-2f));
  p = fma<float>(p, t, broadcast<float>(0x1.b428aep-3f));
  p = fma<float>(p, t, broadcast<float>(-0x1.a8e2ccp-5f));
  p = fma<float>(p, t, broadcast<float>(0x1.e46e2ep-4f));
  p = fma<float>(p, t, broadcast<float>(0x1.d4f234p-4f));
  p = fma<float>(p, t, broadcast<float>(0x1.16f368p-3f));
  p = fma<float>(p, t, broadcast<float>(0x1.15bd76p-3f));
  const Vec<float> e = exp(z * z * broadcast<float>(-0.5f));
  const Vec<float> tail = e * (p * t);
  return {x < Vec<float>{} ? tail : one - tail, e * broadcast<float>(0.398942280401432678f)};
}

// scalar: in float64, lane by lane.
ONEPASS_INLINE Gate<double> sigmoid(Vec<double> x) {
  Vec<double> value{};
  Vec<double> slope{};
  for (int i = 0; i < kLanes<double>; ++i) {
    const double e = std::exp(-std::abs(x[i]));
    value[i] = (x[i] < 0 ? e : 1.0) / (1.0 + e);
    slope[i] = e / ((1.0 + e) * (1.0 + e));
  }
  return {value, slope};
}

ONEPASS_INLINE Gate<double> normal(Vec<double> x) {
  Vec<double> value{};
  Vec<double> slope{};
  for (int i = 0; i < kLanes<double>; ++i) {
    value[i] = 0.5 * std::erfc(x[i] * -0.70710678118654752440);
    slope[i] = 0.39894228040143267794 * std::exp(-0.5 * x[i] * x[i]);
  }
  return {value, slope};
}

template <Activation kActivation, class A>
ONEPASS_INLINE Gate<A> gate(Vec<A> x) {
  if constexpr (kActivation == Activation::kSilu || kActivation == Activation::kSigmoid) {
    return sigmoid(x);
  }
  if constexpr (kActivation == Activation::kQuickGelu) {
    const Vec<A> steepness = broadcast<A>(A(1.702));
    const Gate<A> of = sigmoid(x * steepness);
    return {of.value, of.slope * steepness};
  }
  if constexpr (kActivation == Activation::kGelu) return normal(x);
  if constexpr (kActivation == Activation::kGeluTanh) {
    constexpr A kLinear = A(1.59576912160573071176), kCubic = A(0.0713548162726009257);
    const Vec<A> square = x * x;
    const Gate<A> of = sigmoid(x * fma<A>(square, broadcast<A>(kCubic), broadcast<A>(kLinear)));
    return {of.value,
            of.slope * fma<A>(square, broadcast<A>(A(3) * kCubic), broadcast<A>(kLinear))};
  }
}

// An activation at x, and its derivative there.
template <Activation kActivation, class A>
class Activated {
 public:
  ONEPASS_INLINE explicit Activated(Vec<A> x) : x_(x) {
    if constexpr (!kIsRelu) of_ = gate<kActivation, A>(x);
  }

  ONEPASS_INLINE Vec<A> value() const {
    if constexpr (kIsRelu) {
      const Vec<A> positive = x_ < Vec<A>{} ? Vec<A>{} : x_;  // NaN stays
      return kActivation == Activation::kRelu2 ? positive * positive : positive;
    } else if constexpr (kActivation == Activation::kSigmoid) {
      return of_.value;
    } else {
      return x_ * of_.value;
    }
  }

  // upstream * activation'(x)
  ONEPASS_INLINE Vec<A> times_slope(Vec<A> upstream) const {
    if constexpr (kIsRelu) {
      const Vec<A> passed = kActivation == Activation::kRelu2 ? upstream * (x_ + x_) : upstream;
      return x_ <= Vec<A>{} ? Vec<A>{} : passed;
    } else if constexpr (kActivation == Activation::kSigmoid) {
      return upstream * of_.slope;
    } else {
      return upstream * fma<A>(x_, of_.slope, of_.value);
    }
  }

 private:
  static constexpr bool kIsRelu =
      kActivation == Activation::kRelu || kActivation == Activation::kRelu2;

  Vec<A> x_;
  Gate<A> of_;  // unused by kIsRelu
};

// to[i] = activation(from[i]); from may be to.
template <class A>
void activate(Activation activation, const A* from, int64_t count, A* to) {
  visit_activation(activation, [&]<Activation kActivation>() {
    for_each_vector<A>(0, count, [&](int64_t i, auto lanes) {
      store<A>(to + i, Activated<kActivation, A>(load<A>(from + i, lanes)).value(), lanes);
    });
  });
}

// gradient[i] *= activation'(x[i])
template <class A>
void multiply_by_slope(Activation activation, const A* x, int64_t count, A* gradient) {
  visit_activation(activation, [&]<Activation kActivation>() {
    for_each_vector<A>(0, count, [&](int64_t i, auto lanes) {
      const Activated<kActivation, A> at(load<A>(x + i, lanes));
      store<A>(gradient + i, at.times_slope(load<A>(gradient + i, lanes)), lanes);
    });
  });
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
