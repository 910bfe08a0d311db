// The contract of the loss family between ops/loss.cpp and a back end.
//
// Cross entropy of rows of logits x, softcapped if softcap is not 0, with s = label_smoothing:
//   loss = (1 - s) w_t (lse - x_t) + s / cols * sum of w_c (lse - x_c) + z_loss w_t lse^2
// lse is the row's log-sum-exp, t its target, w the weights of classes. A row whose target is
// ignore_index has loss 0, weight 0 and gradient 0, and its logits are not read.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/backend.h"
#include "core/dtype.h"

namespace onepass {

// torch's numbers.
enum class Reduction : int64_t { kNone, kMean, kSum };
inline constexpr int64_t kReductions = 3;
constexpr const char* name_of(Reduction reduction) {
  constexpr const char* names[] = {"none", "mean", "sum"};
  return names[static_cast<int>(reduction)];
}

// Shared by both operators. Statistics and weights are float32, float64 for logits of float64.
struct LossCall {
  const void* input;      // (rows, cols), rows input_stride apart
  const int64_t* target;  // (rows,), target_stride apart
  const void* weight;     // (cols,); null: all are 1
  int64_t rows;
  int64_t cols;
  int64_t input_stride;
  int64_t target_stride;
  int64_t ignore_index;
  double label_smoothing;
  double softcap;  // 0: none
  Reduction reduction;
  DType dtype;  // of input
};

struct LossForward : LossCall {
  double z_loss;
  void* loss;       // (rows,), or one number if reduced
  void* maximum;    // (rows,), of the row
  void* factor;     // (rows,), of exp(x_c - maximum) in the gradient: the softmax's, over its sum
  void* of_target;  // (rows,), of the target's logit, the gradient for a dloss of 1
  void* total_weight;  // one number, of the rows that are not ignored; null unless Reduction::kMean
  DType loss_dtype;
};

// dinput_c = g (factor exp(x_c - maximum) - s / cols w_c) * (1 - tanh^2), dinput_t = g of_target,
// g = dloss, over total_weight if Reduction::kMean.
struct LossBackward : LossCall {
  const void* dloss;         // (rows,), dloss_stride apart, or one number if reduced
  const void* maximum;       // (rows,)
  const void* factor;        // (rows,)
  const void* of_target;     // (rows,)
  const void* total_weight;  // one number
  void* dinput;              // (rows, cols), rows dinput_stride apart; may be input
  int64_t dloss_stride;
  int64_t dinput_stride;
  DType dloss_dtype;
};

// The sums of the forward over a row.
template <class A>
struct LossSums {
  A maximum;
  A exponentials;  // exp(x_c - maximum)
  A logits;        // w_c (x_c - maximum), with label smoothing
  A weights;       // w_c, with label smoothing
};

// With label smoothing: sums relative to a maximum become sums relative to a larger one.
template <class A>
ONEPASS_HOST_DEVICE A logits_below(const LossSums<A>& sums, A larger) {
  const bool is_same = sums.weights == A(0) || sums.maximum == larger;  // -Inf, where nothing is
  return is_same ? sums.logits : sums.logits + sums.weights * (sums.maximum - larger);
}

// The target of a row: its logit after the softcap, the derivative of that by the stored logit,
// exp(logit - maximum), and the weight of its class.
template <class A>
struct LossTarget {
  A logit;
  A slope;
  A exponential;
  A weight;
};

template <class A>
struct LossOfRow {
  A loss;
  A factor;
  A of_target;
};

// Near certainty the gradient of the target's logit is the small difference of its probability and
// 1: that is the sum of the other exponentials, to which the other terms are added.
template <class A>
ONEPASS_HOST_DEVICE LossOfRow<A> loss_of(const LossForward& args, const LossSums<A>& sums,
                                         const LossTarget<A>& target) {
  const A smoothing = static_cast<A>(args.label_smoothing), z_loss = static_cast<A>(args.z_loss);
  const A logarithm = std::log(sums.exponentials);
  const A lse = sums.maximum + logarithm;
  const A inverse = A(1) / sums.exponentials;
  const A probability = target.exponential * inverse;
  const A others = (sums.exponentials - target.exponential) * inverse;
  A mass = (A(1) - smoothing) * target.weight;  // of the targets
  A loss = mass * ((sums.maximum - target.logit) + logarithm);
  A of_target = -mass * others;
  if (smoothing != A(0)) {
    const A share = smoothing / static_cast<A>(args.cols);
    loss += share * (sums.weights * logarithm - sums.logits);
    mass += share * sums.weights;
    of_target += share * (sums.weights * probability - target.weight);
  }
  if (z_loss != A(0)) {
    const A of_lse = A(2) * z_loss * target.weight * lse;
    loss += z_loss * target.weight * lse * lse;
    mass += of_lse;
    of_target += of_lse * probability;
  }
  return {loss, mass * inverse, of_target * target.slope};
}

// The numbers that a row's gradient is computed from.
template <class A>
struct LossScales {
  A of_softmax;  // of exp(x_c - maximum)
  A of_class;    // of w_c
  A of_target;   // the whole gradient of the target's logit
};

template <class A>
ONEPASS_HOST_DEVICE LossScales<A> loss_scales(const LossBackward& args, A gradient, A factor,
                                              A of_target) {
  const A smoothing = static_cast<A>(args.label_smoothing);
  return {gradient * factor, gradient * (smoothing / static_cast<A>(args.cols)),
          gradient * of_target};
}

}  // namespace onepass
