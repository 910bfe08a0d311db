// Activations and their derivatives, for one number. cpu/activation.h has the same for vectors and
// names the sources of the formulas.
#pragma once

#include <cmath>

#include "core/activation.h"
#include "cuda/ptx.cuh"

namespace onepass::cuda {

template <class A>
struct Gate {
  A value;
  A slope;  // its derivative
};

// 1 / x for x from 1 to 2.
__device__ __forceinline__ float inverse(float x) { return reciprocal_approximate(x); }
// Two Newton steps instead of a division, which is a function call: values in registers would be
// spilled around it.
__device__ __forceinline__ double inverse(double x) {
  double estimate = reciprocal_approximate(static_cast<float>(x));
  ONEPASS_UNROLL
  for (int step = 0; step < 2; ++step) estimate += estimate * multiply_add(-x, estimate, 1.0);
  return estimate;
}

template <class A>
__device__ __forceinline__ Gate<A> sigmoid(A x) {
  const A e = std::exp(-std::abs(x));
  const A ratio = inverse(A(1) + e);
  return {x < A(0) ? e * ratio : ratio, e * ratio * ratio};
}

template <class A>
__device__ __forceinline__ Gate<A> normal(A x) {
  return {A(0.5) * std::erfc(x * A(-0.70710678118654752440)),
          A(0.39894228040143267794) * std::exp(A(-0.5) * x * x)};
}

template <Activation kActivation, class A>
__device__ __forceinline__ Gate<A> gate(A x) {
  if constexpr (kActivation == Activation::kSilu || kActivation == Activation::kSigmoid) {
    return sigmoid(x);
  }
  if constexpr (kActivation == Activation::kQuickGelu) {
    const Gate<A> of = sigmoid(x * A(1.702));
    return {of.value, of.slope * A(1.702)};
  }
  if constexpr (kActivation == Activation::kGelu) return normal(x);
  if constexpr (kActivation == Activation::kGeluTanh) {
    constexpr A kLinear = A(1.59576912160573071176), kCubic = A(0.0713548162726009257);
    const A square = x * x;
    const Gate<A> of = sigmoid(x * multiply_add(square, kCubic, kLinear));
    return {of.value, of.slope * multiply_add(square, A(3) * kCubic, kLinear)};
  }
}

// An activation at x, and its derivative there.
template <Activation kActivation, class A>
class Activated {
 public:
  __device__ __forceinline__ explicit Activated(A x) : x_(x) {
    if constexpr (!kIsRelu) of_ = gate<kActivation, A>(x);
  }

  __device__ __forceinline__ A value() const {
    if constexpr (kIsRelu) {
      const A positive = x_ < A(0) ? A(0) : x_;  // NaN stays
      return kActivation == Activation::kRelu2 ? positive * positive : positive;
    } else if constexpr (kActivation == Activation::kSigmoid) {
      return of_.value;
    } else {
      return x_ * of_.value;
    }
  }

  // upstream * activation'(x)
  __device__ __forceinline__ A times_slope(A upstream) const {
    if constexpr (kIsRelu) {
      const A passed = kActivation == Activation::kRelu2 ? upstream * (x_ + x_) : upstream;
      return x_ <= A(0) ? A(0) : passed;
    } else if constexpr (kActivation == Activation::kSigmoid) {
      return upstream * of_.slope;
    } else {
      return upstream * multiply_add(x_, of_.slope, of_.value);
    }
  }

 private:
  static constexpr bool kIsRelu =
      kActivation == Activation::kRelu || kActivation == Activation::kRelu2;

  A x_;
  Gate<A> of_{};  // unused by kIsRelu
};

}  // namespace onepass::cuda
