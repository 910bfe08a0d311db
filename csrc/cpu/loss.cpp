// Cross entropy: the loss of rows of logits, and its gradient.
//
// A thread has whole rows. The forward reads a row tile by tile: first the tile's maximum, which
// brings it into L1, then the exponentials of its logits relative to the largest so far; meanwhile
// the next tile is prefetched. The backward recomputes the exponentials. The gradient of the
// target's logit is the forward's: it cancels, and the forward sums in float64.
// Bytes per element: input; backward input + dinput. With 16-bit logits both are limited by the
// exponential, in float32 by memory: done when they run at the speed of a read and of a copy.
#include <algorithm>

#include "core/visit.h"
#include "cpu/elementary.h"
#include "cpu/kernels.h"
#include "cpu/lines.h"
#include "cpu/parallel.h"
#include "cpu/sums.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

// Elements of a row that the forward has in L1 at a time.
constexpr int64_t kTile = 2048;

// The rate of work instead of kBytes where exponentials are computed.
constexpr int64_t kExponentialBytes = 4;

template <class A>
constexpr A kLowest = -std::numeric_limits<A>::infinity();

ONEPASS_INLINE Vec<float> exponential(Vec<float> x) { return exp(x); }
ONEPASS_INLINE Vec<double> exponential(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}

ONEPASS_INLINE Vec<float> hyperbolic_tangent(Vec<float> x) { return tanh(x); }
ONEPASS_INLINE Vec<double> hyperbolic_tangent(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::tanh(x[i]);
  return x;
}

// A logit after the softcap, and its derivative with respect to the stored logit.
template <class A, bool kSoftcap>
class Logit {
 public:
  ONEPASS_INLINE Logit(Vec<A> x, Vec<A> softcap) {
    if constexpr (kSoftcap) {
      tangent_ = hyperbolic_tangent(x / softcap);
      value_ = softcap * tangent_;
    } else {
      value_ = x;
    }
  }
  ONEPASS_INLINE Vec<A> value() const { return value_; }
  ONEPASS_INLINE Vec<A> times_slope(Vec<A> upstream) const {
    if constexpr (!kSoftcap) return upstream;
    return upstream * fma<A>(-tangent_, tangent_, broadcast<A>(A(1)));
  }

 private:
  Vec<A> value_;
  Vec<A> tangent_;  // of kSoftcap
};

// scalar: largest = max(largest, x[j]); NaN is left to the exponentials
template <class A, class T>
ONEPASS_INLINE A maximum_of(const T* x, int64_t count) {
  constexpr int64_t kStep = 4 * kLanes<A>;
  const auto larger = [](Vec<A> a, Vec<A> b) { return a > b ? a : b; };
  Vec<A> most0 = broadcast<A>(kLowest<A>), most1 = most0, most2 = most0, most3 = most0;
  int64_t j = 0;
  for (; j + kStep <= count; j += kStep) {
    most0 = larger(load<A>(x + j), most0);
    most1 = larger(load<A>(x + j + kLanes<A>), most1);
    most2 = larger(load<A>(x + j + 2 * kLanes<A>), most2);
    most3 = larger(load<A>(x + j + 3 * kLanes<A>), most3);
  }
  most0 = larger(larger(most0, most1), larger(most2, most3));
  for (; j + kLanes<A> <= count; j += kLanes<A>) most0 = larger(load<A>(x + j), most0);
  A largest = kLowest<A>;
  for (int i = 0; i < kLanes<A>; ++i) largest = std::max(largest, most0[i]);
  for (; j < count; ++j) largest = std::max(largest, load<A>(x + j, Tail{1})[0]);
  return largest;
}

// Of a row; kSmooths: with label smoothing.
template <class T, bool kSoftcap, bool kSmooths>
LossSums<double> sums_of(const LossForward& args, const T* row) {
  using A = Accumulator<T>;
  const A* weight = static_cast<const A*>(args.weight);
  const Vec<A> softcap = broadcast<A>(static_cast<A>(args.softcap));
  LossSums<double> sums{kLowest<double>, 0, 0, 0};
  for (int64_t first = 0; first < args.cols; first += kTile) {
    const int64_t count = std::min(kTile, args.cols - first);
    const T* x = row + first;
    A largest = maximum_of<A>(x, count);
    if constexpr (kSoftcap) largest = Logit<A, true>(broadcast<A>(largest), softcap).value()[0];
    if (largest > sums.maximum) {
      sums.exponentials *= std::exp(sums.maximum - largest);
      sums.logits = logits_below<double>(sums, largest);
      sums.maximum = largest;
    }
    // While all logits so far are -Inf, this adds 0.
    const A above = sums.maximum == kLowest<double> ? A(0) : static_cast<A>(sums.maximum);
    const Vec<A> maximum = broadcast<A>(above);
    const auto of_tile = sum_columns<A, kSmooths ? 3 : 1>(
        count, [&](Vec<A>* sum, int64_t j, auto lanes) __attribute__((always_inline)) {
          __builtin_prefetch(x + j + kTile);
          const Vec<A> below = Logit<A, kSoftcap>(load<A>(x + j, lanes), softcap).value() - maximum;
          sum[0] += keep_lanes<A>(exponential(below), lanes);
          if constexpr (kSmooths) {
            if (weight) {
              const Vec<A> of_class = load<A>(weight + first + j, lanes);
              sum[1] += keep_lanes<A>(of_class * below, lanes);
              sum[2] += of_class;
            } else {
              sum[1] += keep_lanes<A>(below, lanes);
            }
          }
        });
    sums.exponentials += of_tile[0];
    if constexpr (kSmooths) {
      sums.logits += of_tile[1];
      sums.weights += weight ? of_tile[2] : static_cast<double>(count);
    }
  }
  return sums;
}

// Of a row, before rows are added up.
struct RowLoss {
  double loss;
  double weight;
};

template <class A>
double weight_of(const LossCall& args, int64_t target) {
  return args.weight ? static_cast<double>(static_cast<const A*>(args.weight)[target]) : 1.0;
}

// Its exponential is the one in the row's sum, bit for bit, unless the maximum was another there.
template <class A, bool kSoftcap, class T>
LossTarget<double> target_of(const LossForward& args, const T* row, int64_t target,
                             double maximum) {
  const Vec<A> x = load<A>(row + target, Tail{1});
  const Vec<A> logit = Logit<A, kSoftcap>(x, broadcast<A>(static_cast<A>(args.softcap))).value();
  const Vec<A> below = logit - broadcast<A>(static_cast<A>(maximum));
  double slope = 1;
  if constexpr (kSoftcap) {
    const double tangent = std::tanh(x[0] / args.softcap);
    slope = 1 - tangent * tangent;
  }
  return {logit[0], slope, exponential(below)[0], weight_of<A>(args, target)};
}

template <class T, bool kSoftcap, bool kSmooths>
void loss_forward_kernel(const LossForward& args, int64_t begin, int64_t end, RowLoss* losses) {
  using A = Accumulator<T>;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t target = args.target[i * args.target_stride];
    LossOfRow<double> of_row{};
    double weight = 0;
    if (target != args.ignore_index) {
      const T* row = static_cast<const T*>(args.input) + i * args.input_stride;
      const LossSums<double> sums = sums_of<T, kSoftcap, kSmooths>(args, row);
      const LossTarget<double> of_target = target_of<A, kSoftcap>(args, row, target, sums.maximum);
      weight = of_target.weight;
      of_row = loss_of<double>(args, sums, of_target);
      static_cast<A*>(args.maximum)[i] = static_cast<A>(sums.maximum);
    } else {
      static_cast<A*>(args.maximum)[i] = A(0);
    }
    static_cast<A*>(args.factor)[i] = static_cast<A>(of_row.factor);
    static_cast<A*>(args.of_target)[i] = static_cast<A>(of_row.of_target);
    losses[i] = {of_row.loss, weight};
  }
}

template <class T, bool kSoftcap, bool kSmooths>
void loss_backward_kernel(const LossBackward& args, int64_t begin, int64_t end) {
  using A = Accumulator<T>;
  const A* weight = static_cast<const A*>(args.weight);
  const Vec<A> softcap = broadcast<A>(static_cast<A>(args.softcap));
  for (int64_t i = begin; i < end; ++i) {
    const T* row = static_cast<const T*>(args.input) + i * args.input_stride;
    T* drow = static_cast<T*>(args.dinput) + i * args.dinput_stride;
    const int64_t target = args.target[i * args.target_stride];
    if (target == args.ignore_index) {
      std::fill_n(drow, args.cols, T{});
      continue;
    }
    A upstream;
    widen_line(args.dloss, args.dloss_dtype, i * args.dloss_stride, 1, &upstream);
    double gradient = upstream;
    if (args.total_weight) gradient /= *static_cast<const A*>(args.total_weight);
    const LossScales<double> scales =
        loss_scales<double>(args, gradient, static_cast<const A*>(args.factor)[i],
                            static_cast<const A*>(args.of_target)[i]);
    const A at_target = static_cast<A>(scales.of_target);
    const Vec<A> maximum = broadcast<A>(static_cast<const A*>(args.maximum)[i]);
    const Vec<A> of_softmax = broadcast<A>(static_cast<A>(scales.of_softmax));
    const Vec<A> of_class = broadcast<A>(static_cast<A>(scales.of_class));
    // scalar: drow[j] = (of_softmax * exp(x[j] - maximum) - of_class * weight[j]) * slope
    for_each_vector<A>(0, args.cols, [&](int64_t j, auto lanes) __attribute__((always_inline)) {
      const Logit<A, kSoftcap> logit(load<A>(row + j, lanes), softcap);
      Vec<A> others{};
      if constexpr (kSmooths) {
        others = weight ? of_class * load<A>(weight + j, lanes) : of_class;
      }
      const Vec<A> softmax = exponential(logit.value() - maximum);
      store<A>(drow + j, logit.times_slope(fma<A>(of_softmax, softmax, -others)), lanes);
    });
    round_line(&at_target, 1, drow, args.dtype, target);
  }
}

// Sums over the rows, always in the same order.
template <class A>
void reduce(const LossForward& args, const RowLoss* losses) {
  const auto put = [&](double loss, int64_t place) {
    const A rounded = static_cast<A>(loss);
    round_line(&rounded, 1, args.loss, args.loss_dtype, place);
  };
  double sum = 0, total_weight = 0;
  for (int64_t i = 0; i < args.rows; ++i) {
    if (args.reduction == Reduction::kNone) put(losses[i].loss, i);
    sum += losses[i].loss;
    total_weight += losses[i].weight;
  }
  if (args.reduction == Reduction::kSum) put(sum, 0);
  if (args.reduction == Reduction::kMean) {
    put(sum / total_weight, 0);
    *static_cast<A*>(args.total_weight) = static_cast<A>(total_weight);
  }
}

Plan plan_rows(const LossCall& args, const char* kernel_name, int64_t tensors,
               const Machine& machine) {
  const int64_t bytes = tensors * args.rows * args.cols * size_of(args.dtype);
  return {.workspace_bytes = 0,
          .kernel_name = kernel_name,
          .rows_per_tile = 1,
          .splits = args.rows,
          .reason = "one pass",
          .threads = threads_for(bytes / kExponentialBytes, args.rows, machine)};
}

// Calls run<T, kSoftcap, kSmooths>().
template <class Run>
void visit_loss(const LossCall& args, Run&& run) {
  visit_dtype(args.dtype, [&]<class T>() {
    visit_bool(args.softcap != 0.0, [&]<bool kSoftcap>() {
      visit_bool(args.label_smoothing != 0.0,
                 [&]<bool kSmooths>() { run.template operator()<T, kSoftcap, kSmooths>(); });
    });
  });
}

Plan plan_forward(const LossForward& args, const Machine& machine) {
  Plan plan = plan_rows(args, "loss_forward_kernel", 1, machine);
  plan.workspace_bytes = args.rows * static_cast<int64_t>(sizeof(RowLoss));
  return plan;
}

void run_forward(const LossForward& args, const Plan& plan, void* workspace,
                 const Context& context) {
  RowLoss* losses = static_cast<RowLoss*>(workspace);
  visit_loss(args, [&]<class T, bool kSoftcap, bool kSmooths>() {
    for_each_piece(context, plan.threads, args.rows, [&](int64_t begin, int64_t end) {
      loss_forward_kernel<T, kSoftcap, kSmooths>(args, begin, end, losses);
    });
  });
  if (args.dtype == DType::kFloat64) {
    reduce<double>(args, losses);
  } else {
    reduce<float>(args, losses);
  }
}

Plan plan_backward(const LossBackward& args, const Machine& machine) {
  return plan_rows(args, "loss_backward_kernel", 2, machine);
}

void run_backward(const LossBackward& args, const Plan& plan, void*, const Context& context) {
  visit_loss(args, [&]<class T, bool kSoftcap, bool kSmooths>() {
    for_each_piece(context, plan.threads, args.rows, [&](int64_t begin, int64_t end) {
      loss_backward_kernel<T, kSoftcap, kSmooths>(args, begin, end);
    });
  });
}

}  // namespace

Operator<LossForward> loss_forward() { return {plan_forward, run_forward}; }
Operator<LossBackward> loss_backward() { return {plan_backward, run_backward}; }

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
