// The contract of the optimizer family between ops/optimizer.cpp and a back end. An operator takes
// all tensors of a call, of any sizes and dtypes, as one flat list of work.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "core/backend.h"
#include "core/dtype.h"

namespace onepass {

// One tensor, whose elements lie in `numel` consecutive places in whatever order.
struct FlatTensor {
  void* data;
  int64_t numel;
  DType dtype;
};

// Every tensor is cut into pieces of this many elements, the last one shorter.
inline constexpr int64_t kPieceElements = 4096;

template <class Item>
struct FlatList {
  const Item* tensors;         // (count,)
  const int64_t* first_piece;  // (count + 1,) of each tensor, and after the last one
  int64_t count;

  int64_t pieces() const { return first_piece[count]; }
};
using FlatTensors = FlatList<FlatTensor>;

// norm = (sum of |g|^order over all elements)^(1 / order), with order 1, 2 or infinity.
struct GradientNorm {
  FlatTensors gradients;
  double order;
  bool wide;     // sums in float64 throughout: a float64 tensor is among them
  double* norm;  // () in the gradients' memory

  // CUDA, where the host does not wait for it: the norm once more, rounded as torch returns it.
  void* total = nullptr;  // () or null
  DType total_dtype = DType::kFloat32;
};

// g = g * factor, rounded once.
struct ScaleGradients {
  FlatTensors gradients;
  double factor;  // CPU

  // CUDA, where the host does not wait for a norm: the factor is clip_factor of it, and nothing is
  // written where that is 1.
  const double* norm;  // ()
  double max_norm;
};

// ---- the step -----------------------------------------------------------------------------------

// All algorithms, as ALGORITHM(number, name). Python finds the numbers by these names in
// onepass._C.
#define ONEPASS_ALGORITHMS(ALGORITHM) \
  ALGORITHM(kAdam, "Adam")            \
  ALGORITHM(kSgd, "SGD")              \
  ALGORITHM(kLion, "Lion")

#define ONEPASS_NUMBER(number, name) number,
enum class Algorithm : int32_t { ONEPASS_ALGORITHMS(ONEPASS_NUMBER) };
#undef ONEPASS_NUMBER

#define ONEPASS_NAME(number, name) name,
inline constexpr const char* kAlgorithmNames[] = {ONEPASS_ALGORITHMS(ONEPASS_NAME)};
#undef ONEPASS_NAME
inline constexpr int64_t kAlgorithms = std::size(kAlgorithmNames);

// Calls f.operator()<Algorithm>() with the algorithm.
template <class F>
void visit_algorithm(Algorithm algorithm, F&& f) {
  switch (algorithm) {
#define ONEPASS_CASE(number, name)              \
  case Algorithm::number:                       \
    f.template operator()<Algorithm::number>(); \
    break;
    ONEPASS_ALGORITHMS(ONEPASS_CASE)
#undef ONEPASS_CASE
  }
}

// How a 16-bit parameter keeps the float32 result of a step.
enum class Master : int32_t {
  kNone,        // rounded to nearest even
  kFloat32,     // kept beside it; the parameter is the master rounded to nearest, ties away
  kRemainder,   // bfloat16 only: kept as the 16 bits that this rounding drops
  kStochastic,  // rounded up or down at random, without bias
};

enum class MomentType : int32_t {
  kFloat32,
  kBFloat16,
  kBFloat16Stochastic,  // moments[1] is rounded stochastically, the others to nearest
  kFloat16,
  kFloat64,
  kInt8,  // codes with a scale per kCodeBlock elements, core/code8.h
};

inline constexpr int64_t kCodeBlock = 256;
inline constexpr int kMoments = 3;

// A parameter with its gradient and states, all (numel,) in the same order of elements.
// moments: numbered as in moments_of; null if the group's settings need none.
struct StepTensor {
  void* param;
  void* gradient;
  void* moments[kMoments];
  float* scales[kMoments];  // (numel / kCodeBlock,) beside codes
  void* master;             // float32 or int16
  void* average;            // of the parameter over the steps, or null
  int64_t numel;
  DType param_dtype;
  DType gradient_dtype;
  DType average_dtype;  // float32 or the parameter's; 16 bits are rounded stochastically
  MomentType moment_type;
  Master master_kind;
  int32_t index;    // of the parameter in its optimizer: keys the noise
  int32_t scalars;  // its entry of OptimizerStep::scalars (CPU)
  int32_t group;    // its row of the settings
  float* step;      // () the number of steps made, in the parameter's memory
};

// The columns of `layout`, (parameters, kLayoutColumns) int64: where in the operator's list of
// states each parameter's lie, as pairs (number of the tensor in the list or -1, its first element
// there). python/onepass/optim/flat_state.py writes it.
enum LayoutColumn : int64_t {
  kIndexColumn,  // of the parameter in its optimizer
  kGroupColumn,  // row of `hyper`
  kStepColumn,   // float32, (): the number of steps made
  kMomentColumn = kStepColumn + 2,
  kScaleColumn = kMomentColumn + 2 * kMoments,
  kMasterColumn = kScaleColumn + 2 * kMoments,
  kAverageColumn = kMasterColumn + 2,
  kLayoutColumns = kAverageColumn + 2,
};

// The settings of a parameter group, as torch names them: a row of `hyper`, (groups, kHyperColumns)
// float64, is a Hyper. Python takes the names from onepass._C; flags are not zero where they hold.
// decoupled: weight decay acts on the parameter, not on the gradient. ema_decay: the factor of the
// old average in the new one.
#define ONEPASS_HYPER(FIELD) \
  FIELD(lr)                  \
  FIELD(beta1)               \
  FIELD(beta2)               \
  FIELD(eps)                 \
  FIELD(weight_decay)        \
  FIELD(momentum)            \
  FIELD(dampening)           \
  FIELD(decoupled)           \
  FIELD(amsgrad)             \
  FIELD(nesterov)            \
  FIELD(maximize)            \
  FIELD(ema_decay)

#define ONEPASS_FIELD(name) double name;
struct Hyper {
  ONEPASS_HYPER(ONEPASS_FIELD)
};
#undef ONEPASS_FIELD

#define ONEPASS_FIELD(name) #name,
inline constexpr const char* kHyperNames[] = {ONEPASS_HYPER(ONEPASS_FIELD)};
#undef ONEPASS_FIELD
inline constexpr int64_t kHyperColumns = std::size(kHyperNames);
static_assert(sizeof(Hyper) == kHyperColumns * sizeof(double));

ONEPASS_HOST_DEVICE inline Hyper hyper_of(const double* row) {
  Hyper hyper;
  std::memcpy(&hyper, row, sizeof(hyper));
  return hyper;
}

// The moments of a parameter, in the order of StepTensor: Adam exp_avg, exp_avg_sq, max_exp_avg_sq;
// SGD momentum_buffer; Lion exp_avg.
ONEPASS_HOST_DEVICE constexpr int moments_of(Algorithm algorithm, bool amsgrad, bool momentum) {
  switch (algorithm) {
    case Algorithm::kAdam:
      return amsgrad ? 3 : 2;
    case Algorithm::kSgd:
      return momentum ? 1 : 0;
    default:
      return 1;
  }
}

// The numbers that the loop over elements needs, for one step.
struct StepScalars {
  uint32_t step;  // this one's number, from 1
  bool amsgrad;
  bool nesterov;
  double gradient_sign;   // -1 to maximize
  double gradient_decay;  // weight_decay that is added to the gradient
  double param_factor;    // 1 - lr * weight_decay where that is decoupled
  double step_size;       // lr / (1 - beta1^step), or lr
  double one_minus_beta1;
  double beta2;
  double one_minus_beta2;
  double inverse_root;  // 1 / sqrt(1 - beta2^step)
  double eps;
  double momentum;       // SGD keeps a buffer if it is not zero
  double momentum_gain;  // 1 - dampening
  double ema_weight;     // 1 - ema_decay: average = average + ema_weight (param - average)
};

// beta1^step and beta2^step.
struct BetaPowers {
  double beta1 = 1.0;
  double beta2 = 1.0;
};

// Both powers by repeated squaring. On CUDA one thread of each block computes them while the others
// wait: two calls of pow are some 480 instructions there, most of which wait for the one before
// (`cuobjdump -sass`); this takes 13 for each bit of the step. Products round the same everywhere,
// which pow does not promise. The relative error of 1 - beta^step is at most 1.9e-14 for beta =
// 0.999, with pow 1.4e-14.
ONEPASS_HOST_DEVICE inline BetaPowers beta_powers(const Hyper& hyper, uint32_t step) {
  BetaPowers power;
  double square1 = hyper.beta1, square2 = hyper.beta2;
  for (; step != 0; step >>= 1) {
    if (step & 1) {
      power.beta1 *= square1;
      power.beta2 *= square2;
    }
    square1 *= square1;
    square2 *= square2;
  }
  return power;
}

ONEPASS_HOST_DEVICE inline StepScalars step_scalars(Algorithm algorithm, const Hyper& hyper,
                                                    uint32_t step) {
  const bool adam = algorithm == Algorithm::kAdam;
  const bool decoupled = hyper.decoupled != 0.0;
  const BetaPowers power = adam ? beta_powers(hyper, step) : BetaPowers{0.0, 0.0};
  const double correction1 = 1.0 - power.beta1, correction2 = 1.0 - power.beta2;
  return {.step = step,
          .amsgrad = hyper.amsgrad != 0.0,
          .nesterov = hyper.nesterov != 0.0,
          .gradient_sign = hyper.maximize != 0.0 ? -1.0 : 1.0,
          .gradient_decay = decoupled ? 0.0 : hyper.weight_decay,
          .param_factor = decoupled ? 1.0 - hyper.lr * hyper.weight_decay : 1.0,
          .step_size = hyper.lr / correction1,
          .one_minus_beta1 = 1.0 - hyper.beta1,
          .beta2 = hyper.beta2,
          .one_minus_beta2 = 1.0 - hyper.beta2,
          .inverse_root = 1.0 / std::sqrt(correction2),
          .eps = hyper.eps,
          .momentum = hyper.momentum,
          .momentum_gain = 1.0 - hyper.dampening,
          .ema_weight = 1.0 - hyper.ema_decay};
}

// The factor that brings a norm to at most max_norm, as torch computes it.
ONEPASS_HOST_DEVICE inline double clip_factor(double max_norm, double norm) {
  const double factor = max_norm / (norm + 1e-6);
  return factor >= 1.0 ? 1.0 : factor;  // NaN stays
}

struct OptimizerStep {
  FlatList<StepTensor> list;
  Algorithm algorithm;
  bool zero_gradients;
  int64_t seed;

  // CPU: computed by ops/, which counts the steps made.
  bool is_made;  // else gradients are set to zeros at most
  const StepScalars* scalars;
  double gradient_factor;  // unscaling and clipping

  // CUDA: in device memory, since the host does not wait for them. The kernel makes no step
  // where found_inf is not zero or norm / grad_scale is not finite, and counts those it makes.
  const double* hyper;      // (groups, kHyperColumns)
  const double* norm;       // () or null
  const float* grad_scale;  // () or null
  const float* found_inf;   // () or null
  double max_norm;          // infinity: gradients are not clipped
};

}  // namespace onepass
