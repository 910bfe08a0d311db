// The arithmetic of the optimizers on the elements of one lane, in float32 (float64 for float64
// parameters): the same operations in the same order as in cpu/optimizer/update.h, so that both
// back ends agree bit for bit. The formulas and their sources are there.
#pragma once

#include "core/visit.h"
#include "cuda/ptx.cuh"
#include "ops/optimizer.h"

namespace onepass::cuda {

// average + weight (value - average), computed from the nearer end, so that weights 0 and 1 are
// exact.
template <class A>
struct Average {
  A coefficient;
  bool from_average;

  static __device__ __forceinline__ Average of(double weight) {
    return {static_cast<A>(weight < 0.5 ? weight : weight - 1.0), weight < 0.5};
  }
  __device__ __forceinline__ A operator()(A average, A value) const {
    return multiply_add(coefficient, value - average, from_average ? average : value);
  }
};

// StepScalars in the type of the arithmetic.
template <class A>
struct Scalars {
  A gradient_factor;  // unscaling, clipping and the sign
  A gradient_decay;
  A param_factor;
  A step_size;
  A beta2;
  A one_minus_beta2;
  A inverse_root;
  A eps;
  A momentum;
  A momentum_gain;
  Average<A> average1;  // by 1 - beta1
  Average<A> average2;  // by 1 - beta2
  Average<A> ema;       // of the parameter
  int moments;          // used by the settings; there may be others, which stay as they are
  bool has_gradient_decay;
  bool nesterov;
  bool is_first;

  static __device__ __forceinline__ Scalars of(Algorithm algorithm, const StepScalars& s,
                                               double gradient_factor) {
    return {.gradient_factor = static_cast<A>(gradient_factor * s.gradient_sign),
            .gradient_decay = static_cast<A>(s.gradient_decay),
            .param_factor = static_cast<A>(s.param_factor),
            .step_size = static_cast<A>(s.step_size),
            .beta2 = static_cast<A>(s.beta2),
            .one_minus_beta2 = static_cast<A>(s.one_minus_beta2),
            .inverse_root = static_cast<A>(s.inverse_root),
            .eps = static_cast<A>(s.eps),
            .momentum = static_cast<A>(s.momentum),
            .momentum_gain = static_cast<A>(s.momentum_gain),
            .average1 = Average<A>::of(s.one_minus_beta1),
            .average2 = Average<A>::of(s.one_minus_beta2),
            .ema = Average<A>::of(s.ema_weight),
            .moments = moments_of(algorithm, s.amsgrad, s.momentum != 0.0),
            .has_gradient_decay = s.gradient_decay != 0.0,
            .nesterov = s.nesterov,
            .is_first = s.step == 1};
  }
};

// The most moments that an algorithm has.
template <Algorithm kAlgorithm>
inline constexpr int kMomentsOf = moments_of(kAlgorithm, true, true);

template <class A>
__device__ __forceinline__ A scaled_gradient(const Scalars<A>& s, A param, A gradient) {
  const A scaled = gradient * s.gradient_factor;
  return s.has_gradient_decay ? multiply_add(s.gradient_decay, param, scaled) : scaled;
}

// Settings are template arguments: one branch per row instead of one per element.
template <bool kAmsgrad, class A>
__device__ __forceinline__ void adam(const Scalars<A>& s, A& param, A gradient, A& average,
                                     A& square, A& top) {
  const A g = scaled_gradient(s, param, gradient);
  average = s.average1(average, g);
  square = multiply_add(s.one_minus_beta2 * g, g, s.beta2 * square);
  A largest = square;
  if constexpr (kAmsgrad) {
    top = top > square || top != top ? top : square;  // a NaN stays
    largest = top;
  }
  const A denominator = multiply_add(static_cast<A>(sqrt(largest)), s.inverse_root, s.eps);
  param = multiply_add(-s.step_size, average / denominator, param * s.param_factor);
}

template <bool kBuffer, bool kNesterov, class A>
__device__ __forceinline__ void sgd(const Scalars<A>& s, A& param, A gradient, A& buffer) {
  A g = scaled_gradient(s, param, gradient);
  if constexpr (kBuffer) {
    buffer = s.is_first ? g : multiply_add(s.momentum, buffer, s.momentum_gain * g);
    g = kNesterov ? multiply_add(s.momentum, buffer, g) : buffer;
  }
  param = multiply_add(-s.step_size, g, param);
}

template <class A>
__device__ __forceinline__ void lion(const Scalars<A>& s, A& param, A gradient, A& average) {
  const A g = gradient * s.gradient_factor;
  const A u = s.average1(average, g);
  // The step with u's sign; u itself where it is zero or NaN. Two conditions, each of which selects
  // a number: for one inside the other the compiler branches.
  const A below = u < A(0) ? -s.step_size : u;
  const A signed_step = u > A(0) ? s.step_size : below;
  param = param * s.param_factor - signed_step;
  average = s.average2(average, g);
}

template <Algorithm kAlgorithm, class A, int kCount>
__device__ __forceinline__ void update(const Scalars<A>& s, A (&param)[kCount],
                                       const A (&gradient)[kCount],
                                       A (&moment)[kMomentsOf<kAlgorithm>][kCount]) {
  const auto each = [&](auto&& element) {
    ONEPASS_UNROLL
    for (int e = 0; e < kCount; ++e) element(e);
  };
  if constexpr (kAlgorithm == Algorithm::kAdam) {
    visit_bool(s.moments > 2, [&]<bool kAmsgrad>() {
      each([&](int e) {
        adam<kAmsgrad>(s, param[e], gradient[e], moment[0][e], moment[1][e], moment[2][e]);
      });
    });
  } else if constexpr (kAlgorithm == Algorithm::kSgd) {
    visit_bool(s.moments > 0, [&]<bool kBuffer>() {
      visit_bool(s.nesterov, [&]<bool kNesterov>() {
        each([&](int e) { sgd<kBuffer, kNesterov>(s, param[e], gradient[e], moment[0][e]); });
      });
    });
  } else {
    each([&](int e) { lion(s, param[e], gradient[e], moment[0][e]); });
  }
}

}  // namespace onepass::cuda
