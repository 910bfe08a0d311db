// The arithmetic of the optimizers on a block in float32 (float64 for float64 parameters), with
// everything that does not depend on the element taken from StepScalars.
#pragma once

#include "core/visit.h"
#include "cpu/vec.h"
#include "ops/optimizer.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// A block of (count,) each: in memory, or in a tile.
template <class A>
struct Operands {
  A* param;
  const A* gradient;
  A* moments[kMoments];
};

// average + weight (value - average), from whichever end is nearer, so that weights of 0 and 1 are
// exact.
template <class A>
struct Average {
  Vec<A> coefficient;
  bool from_average;

  explicit Average(double weight)
      : coefficient(broadcast<A>(static_cast<A>(weight < 0.5 ? weight : weight - 1.0))),
        from_average(weight < 0.5) {}

  ONEPASS_INLINE Vec<A> operator()(Vec<A> average, Vec<A> value) const {
    return fma<A>(coefficient, value - average, from_average ? average : value);
  }
};

// Kingma, Ba: Adam, ICLR 2015; Loshchilov, Hutter: Decoupled weight decay regularization, ICLR
// 2019; Reddi, Kale, Kumar: On the convergence of Adam and beyond, ICLR 2018.
//
//   m = m + (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2;  top = amsgrad ? max(top, v) : v
//   p = p (1 - lr decay) - lr / (1 - beta1^t) m / (sqrt(top) / sqrt(1 - beta2^t) + eps)
template <class A, bool kGradientDecay, bool kAmsgrad>
void adam_block(const Operands<A>& on, int64_t count, const StepScalars& s, A gradient_factor) {
  const Average<A> average(s.one_minus_beta1);
  const Vec<A> factor = broadcast<A>(gradient_factor);
  const Vec<A> decay = broadcast<A>(static_cast<A>(s.gradient_decay));
  const Vec<A> beta2 = broadcast<A>(static_cast<A>(s.beta2));
  const Vec<A> one_minus_beta2 = broadcast<A>(static_cast<A>(s.one_minus_beta2));
  const Vec<A> inverse_root = broadcast<A>(static_cast<A>(s.inverse_root));
  const Vec<A> eps = broadcast<A>(static_cast<A>(s.eps));
  const Vec<A> param_factor = broadcast<A>(static_cast<A>(s.param_factor));
  const Vec<A> step = broadcast<A>(static_cast<A>(-s.step_size));
  for_each_vector<A>(0, count, [&](int64_t i, auto lanes) {
    Vec<A> p = load<A>(on.param + i, lanes);
    Vec<A> g = load<A>(on.gradient + i, lanes) * factor;
    if constexpr (kGradientDecay) g = fma<A>(decay, p, g);
    const Vec<A> m = average(load<A>(on.moments[0] + i, lanes), g);
    const Vec<A> v = fma<A>(one_minus_beta2 * g, g, beta2 * load<A>(on.moments[1] + i, lanes));
    store<A>(on.moments[0] + i, m, lanes);
    store<A>(on.moments[1] + i, v, lanes);
    Vec<A> top = v;
    if constexpr (kAmsgrad) {
      const Vec<A> before = load<A>(on.moments[2] + i, lanes);
      top = before > v || before != before ? before : v;  // a NaN stays
      store<A>(on.moments[2] + i, top, lanes);
    }
    const Vec<A> denominator = fma<A>(square_root<A>(top), inverse_root, eps);
    store<A>(on.param + i, fma<A>(step, m / denominator, p * param_factor), lanes);
  });
}

// Sutskever, Martens, Dahl, Hinton: On the importance of initialization and momentum in deep
// learning, ICML 2013, in torch's form: the learning rate stands outside the buffer.
template <class A, bool kGradientDecay, bool kMomentum, bool kNesterov>
void sgd_block(const Operands<A>& on, int64_t count, const StepScalars& s, A gradient_factor) {
  const Vec<A> factor = broadcast<A>(gradient_factor);
  const Vec<A> decay = broadcast<A>(static_cast<A>(s.gradient_decay));
  const Vec<A> momentum = broadcast<A>(static_cast<A>(s.momentum));
  const Vec<A> gain = broadcast<A>(static_cast<A>(s.momentum_gain));
  const Vec<A> step = broadcast<A>(static_cast<A>(-s.step_size));
  const bool first = s.step == 1;
  for_each_vector<A>(0, count, [&](int64_t i, auto lanes) {
    const Vec<A> p = load<A>(on.param + i, lanes);
    Vec<A> g = load<A>(on.gradient + i, lanes) * factor;
    if constexpr (kGradientDecay) g = fma<A>(decay, p, g);
    if constexpr (kMomentum) {
      const Vec<A> buffer =
          first ? g : fma<A>(momentum, load<A>(on.moments[0] + i, lanes), gain * g);
      store<A>(on.moments[0] + i, buffer, lanes);
      g = kNesterov ? fma<A>(momentum, buffer, g) : buffer;
    }
    store<A>(on.param + i, fma<A>(step, g, p), lanes);
  });
}

// Chen et al.: Symbolic discovery of optimization algorithms, NeurIPS 2023.
//
//   u = sign(beta1 m + (1 - beta1) g);  p = p (1 - lr decay) - lr u;  m = beta2 m + (1 - beta2) g
template <class A>
void lion_block(const Operands<A>& on, int64_t count, const StepScalars& s, A gradient_factor) {
  const Average<A> direction(s.one_minus_beta1);
  const Average<A> average(s.one_minus_beta2);
  const Vec<A> factor = broadcast<A>(gradient_factor);
  const Vec<A> param_factor = broadcast<A>(static_cast<A>(s.param_factor));
  const Vec<A> step = broadcast<A>(static_cast<A>(s.step_size));
  for_each_vector<A>(0, count, [&](int64_t i, auto lanes) {
    const Vec<A> p = load<A>(on.param + i, lanes);
    const Vec<A> g = load<A>(on.gradient + i, lanes) * factor;
    const Vec<A> m = load<A>(on.moments[0] + i, lanes);
    const Vec<A> u = direction(m, g);
    // The step with u's sign; u itself where it is zero or NaN.
    const Vec<A> signed_step = u > Vec<A>{} ? step : (u < Vec<A>{} ? -step : u);
    store<A>(on.param + i, p * param_factor - signed_step, lanes);
    store<A>(on.moments[0] + i, average(m, g), lanes);
  });
}

template <class A>
void update_block(Algorithm algorithm, const Operands<A>& on, int64_t count, const StepScalars& s,
                  double gradient_factor) {
  const A factor = static_cast<A>(gradient_factor * s.gradient_sign);
  visit_bool(s.gradient_decay != 0.0, [&]<bool kGradientDecay>() {
    switch (algorithm) {
      case Algorithm::kAdam:
        visit_bool(s.amsgrad, [&]<bool kAmsgrad>() {
          adam_block<A, kGradientDecay, kAmsgrad>(on, count, s, factor);
        });
        break;
      case Algorithm::kSgd:
        visit_bool(s.momentum != 0.0, [&]<bool kMomentum>() {
          visit_bool(s.nesterov, [&]<bool kNesterov>() {
            sgd_block<A, kGradientDecay, kMomentum, kNesterov>(on, count, s, factor);
          });
        });
        break;
      case Algorithm::kLion:
        lion_block<A>(on, count, s, factor);
    }
  });
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
