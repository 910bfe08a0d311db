// The arithmetic of the optimizers on a block in float32 (float64 for float64 parameters), with
// everything that does not depend on the element taken from StepScalars.
#pragma once

#include <limits>

#include "core/visit.h"
#include "cpu/vec.h"
#include "ops/optimizer.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// The operands and results of a loop below for a block, all in A, in memory or in tiles. fused.h
// has other operands, which convert while they load and store.
template <class A>
struct Operands {
  A* param;  // (count,) each
  const A* gradient;
  A* moments[kMoments];

  template <class Count>
  ONEPASS_INLINE Vec<A> load_param(int64_t i, Count lanes) const {
    return load<A>(param + i, lanes);
  }
  template <class Count>
  ONEPASS_INLINE Vec<A> load_gradient(int64_t i, Count lanes) const {
    return load<A>(gradient + i, lanes);
  }
  template <int kWhich, class Count>
  ONEPASS_INLINE Vec<A> load_moment(int64_t i, Count lanes) const {
    return load<A>(moments[kWhich] + i, lanes);
  }
  template <class Count>
  ONEPASS_INLINE void store_param(int64_t i, Vec<A> v, Count lanes) const {
    store<A>(param + i, v, lanes);
  }
  template <int kWhich, class Count>
  ONEPASS_INLINE void store_moment(int64_t i, Vec<A> v, Count lanes) const {
    store<A>(moments[kWhich] + i, v, lanes);
  }
};

// average + weight (value - average), computed from the nearer of the two, so that weights of 0 and
// 1 are exact.
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

// Operands that update an average of the parameter in the same pass, from the result before it is
// rounded: so the average of a 16-bit parameter has the bits that the parameter lacks.
template <class A, class On>
struct Averaged : On {
  A* average;
  Average<A> move;

  template <class Count>
  ONEPASS_INLINE void store_param(int64_t i, Vec<A> v, Count lanes) const {
    On::store_param(i, v, lanes);
    store<A>(average + i, move(load<A>(average + i, lanes), v), lanes);
  }
};

inline bool is_near(const StepScalars& s) { return s.one_minus_beta1 < 0.5; }

// Kingma, Ba: Adam, ICLR 2015; Loshchilov, Hutter: Decoupled weight decay regularization, ICLR
// 2019; Reddi, Kale, Kumar: On the convergence of Adam and beyond, ICLR 2018.
//
//   m = m + (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2;  top = amsgrad ? max(top, v) : v
//   p = p (1 - lr decay) - lr / (1 - beta1^t) m / (sqrt(top) / sqrt(1 - beta2^t) + eps)
//
// kNear: beta1 is above one half, as in Average.
template <class A, bool kGradientDecay, bool kAmsgrad, bool kNear>
class AdamStep {
 public:
  AdamStep(const StepScalars& s, A gradient_factor)
      : weight_(number(kNear ? s.one_minus_beta1 : s.one_minus_beta1 - 1.0)),
        factor_(number(gradient_factor)),
        decay_(number(s.gradient_decay)),
        beta2_(number(s.beta2)),
        one_minus_beta2_(number(s.one_minus_beta2)),
        inverse_root_(number(s.inverse_root)),
        eps_(number(s.eps)),
        param_factor_(number(s.param_factor)),
        step_(number(-s.step_size)) {}

  // top: the largest second moment so far, unused without amsgrad.
  ONEPASS_INLINE void operator()(Vec<A>& p, Vec<A> g, Vec<A>& m, Vec<A>& v, Vec<A>& top) const {
    g *= factor_;
    if constexpr (kGradientDecay) g = fma<A>(decay_, p, g);
    m = fma<A>(weight_, g - m, kNear ? m : g);
    v = fma<A>(one_minus_beta2_ * g, g, beta2_ * v);
    top = kAmsgrad ? (top > v || top != top ? top : v) : v;  // a NaN stays
    const Vec<A> denominator = fma<A>(square_root<A>(top), inverse_root_, eps_);
    p = fma<A>(step_, m / denominator, p * param_factor_);
  }

 private:
  // A NaN as arithmetic on bfloat16 numbers makes them, its low half zero (Pair::store of fused.h
  // relies on that); a CUDA device's own, for one, is all ones.
  static Vec<A> number(double value) {
    return broadcast<A>(value == value ? static_cast<A>(value)
                                       : std::numeric_limits<A>::quiet_NaN());
  }

  Vec<A> weight_, factor_, decay_, beta2_, one_minus_beta2_, inverse_root_, eps_, param_factor_,
      step_;
};

// The operands may accumulate over the elements that they store, so they are returned.
template <class A, bool kGradientDecay, bool kAmsgrad, bool kNear, class On>
On adam_block(On on, int64_t begin, int64_t end, const StepScalars& s, A gradient_factor) {
  const AdamStep<A, kGradientDecay, kAmsgrad, kNear> step(s, gradient_factor);
  for_each_vector<A>(begin, end, [&](int64_t i, auto lanes) {
    Vec<A> p = on.load_param(i, lanes);
    Vec<A> m = on.template load_moment<0>(i, lanes);
    Vec<A> v = on.template load_moment<1>(i, lanes);
    Vec<A> top{};
    if constexpr (kAmsgrad) top = on.template load_moment<2>(i, lanes);
    step(p, on.load_gradient(i, lanes), m, v, top);
    on.template store_moment<0>(i, m, lanes);
    on.template store_moment<1>(i, v, lanes);
    if constexpr (kAmsgrad) on.template store_moment<2>(i, top, lanes);
    on.store_param(i, p, lanes);
  });
  return on;
}

// Sutskever, Martens, Dahl, Hinton: On the importance of initialization and momentum in deep
// learning, ICML 2013, in torch's form: the learning rate stands outside the buffer.
template <class A, bool kGradientDecay, bool kMomentum, bool kNesterov, class On>
void sgd_block(const On on, int64_t count, const StepScalars& s, A gradient_factor) {
  const Vec<A> factor = broadcast<A>(gradient_factor);
  const Vec<A> decay = broadcast<A>(static_cast<A>(s.gradient_decay));
  const Vec<A> momentum = broadcast<A>(static_cast<A>(s.momentum));
  const Vec<A> gain = broadcast<A>(static_cast<A>(s.momentum_gain));
  const Vec<A> step = broadcast<A>(static_cast<A>(-s.step_size));
  const bool first = s.step == 1;
  for_each_vector<A>(0, count, [&](int64_t i, auto lanes) {
    const Vec<A> p = on.load_param(i, lanes);
    Vec<A> g = on.load_gradient(i, lanes) * factor;
    if constexpr (kGradientDecay) g = fma<A>(decay, p, g);
    if constexpr (kMomentum) {
      const Vec<A> buffer =
          first ? g : fma<A>(momentum, on.template load_moment<0>(i, lanes), gain * g);
      on.template store_moment<0>(i, buffer, lanes);
      g = kNesterov ? fma<A>(momentum, buffer, g) : buffer;
    }
    on.store_param(i, fma<A>(step, g, p), lanes);
  });
}

// Chen et al.: Symbolic discovery of optimization algorithms, NeurIPS 2023.
//
//   u = sign(beta1 m + (1 - beta1) g);  p = p (1 - lr decay) - lr u;  m = beta2 m + (1 - beta2) g
template <class A, class On>
void lion_block(const On on, int64_t count, const StepScalars& s, A gradient_factor) {
  const Average<A> direction(s.one_minus_beta1);
  const Average<A> average(s.one_minus_beta2);
  const Vec<A> factor = broadcast<A>(gradient_factor);
  const Vec<A> param_factor = broadcast<A>(static_cast<A>(s.param_factor));
  const Vec<A> step = broadcast<A>(static_cast<A>(s.step_size));
  for_each_vector<A>(0, count, [&](int64_t i, auto lanes) {
    const Vec<A> p = on.load_param(i, lanes);
    const Vec<A> g = on.load_gradient(i, lanes) * factor;
    const Vec<A> m = on.template load_moment<0>(i, lanes);
    const Vec<A> u = direction(m, g);
    // The step with u's sign; u itself where it is zero or NaN.
    const Vec<A> signed_step = u > Vec<A>{} ? step : (u < Vec<A>{} ? -step : u);
    on.store_param(i, p * param_factor - signed_step, lanes);
    on.template store_moment<0>(i, average(m, g), lanes);
  });
}

template <class A, class On>
void update_operands(Algorithm algorithm, const On& on, int64_t count, const StepScalars& s,
                     double gradient_factor) {
  const A factor = static_cast<A>(gradient_factor * s.gradient_sign);
  visit_bool(s.gradient_decay != 0.0, [&]<bool kGradientDecay>() {
    switch (algorithm) {
      case Algorithm::kAdam:
        visit_bool(s.amsgrad, [&]<bool kAmsgrad>() {
          visit_bool(is_near(s), [&]<bool kNear>() {
            adam_block<A, kGradientDecay, kAmsgrad, kNear>(on, 0, count, s, factor);
          });
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

// average: of the parameter, or null.
template <class A>
void update_block(Algorithm algorithm, const Operands<A>& on, A* average, int64_t count,
                  const StepScalars& s, double gradient_factor) {
  if (average) {
    const Averaged<A, Operands<A>> averaged{on, average, Average<A>(s.ema_weight)};
    update_operands<A>(algorithm, averaged, count, s, gradient_factor);
  } else {
    update_operands<A>(algorithm, on, count, s, gradient_factor);
  }
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
