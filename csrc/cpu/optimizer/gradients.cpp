// Operators on all gradients of a model: their norm, and their scaling.
//
// The tensors are one flat list of pieces of kPieceElements, spread over threads in one parallel
// region, so that hundreds of small tensors cost as much as one large one. Traffic: one read for
// the norm; a read and a write where they are scaled. Done when it runs at the speed of memory.
#include <cmath>

#include "core/visit.h"
#include "cpu/optimizer/pieces.h"
#include "cpu/parallel.h"
#include "cpu/sums.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

// body.operator()<T>(first element of the piece, elements, number of the piece) for the pieces
// [begin, end).
template <class Body>
void for_each_typed_piece(const FlatTensors& list, int64_t begin, int64_t end, Body&& body) {
  for_each_in_pieces(
      list, begin, end, [&](const FlatTensor& tensor, int64_t first, int64_t count, int64_t piece) {
        visit_dtype(tensor.dtype, [&]<class T>() {
          body.template operator()<T>(static_cast<T*>(tensor.data) + first, count, piece);
        });
      });
}

template <class A>
ONEPASS_INLINE Vec<A> absolute(Vec<A> v) {
  return v < Vec<A>{} ? -v : v;
}

template <class T>
double widened(const T& value) {
  if constexpr (sizeof(T) == 2) {
    return widen(value);
  } else {
    return value;
  }
}

// |g|^order in float64.
template <class T>
double wide_sum(const T* g, int64_t count, double order) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const double magnitude = std::abs(widened(g[i]));
    sum += order == 2.0 ? magnitude * magnitude : magnitude;
  }
  return sum;
}

// The sum of |g|^order, order 1 or 2. If float32 overflows, it is computed again in float64.
template <class T>
double sum_of_powers(const T* g, int64_t count, double order) {
  using A = Accumulator<T>;
  A sum;
  if (order == 2.0) {
    sum = sum_columns<A, 1>(count, [&](Vec<A>* sums, int64_t i, auto lanes) {
      const Vec<A> v = load<A>(g + i, lanes);
      sums[0] = fma<A>(v, v, sums[0]);
    })[0];
  } else {
    sum = sum_columns<A, 1>(count, [&](Vec<A>* sums, int64_t i, auto lanes) {
      sums[0] += absolute<A>(load<A>(g + i, lanes));
    })[0];
  }
  return std::isfinite(sum) ? sum : wide_sum(g, count, order);
}

// NaN if there is one.
template <class T>
double largest_magnitude(const T* g, int64_t count) {
  using A = Accumulator<T>;
  Vec<A> largest{};
  for_each_vector<A>(0, count, [&](int64_t i, auto lanes) {
    const Vec<A> v = absolute<A>(load<A>(g + i, lanes));
    largest = ((v <= largest) | (largest != largest)) ? largest : v;  // a NaN comes in and stays
  });
  double result = 0.0;
  for (int lane = 0; lane < kLanes<A>; ++lane) {
    const double value = largest[lane];
    if (!(value <= result)) result = value;
    if (std::isnan(result)) break;
  }
  return result;
}

// The combined result of all pieces, in order, so that it does not depend on threads.
double combined(const double* partials, int64_t pieces, double order) {
  double total = 0.0;
  for (int64_t p = 0; p < pieces; ++p) {
    if (!std::isinf(order)) {
      total += partials[p];
    } else if (!(partials[p] <= total)) {
      total = partials[p];
      if (std::isnan(total)) break;
    }
  }
  return order == 2.0 ? std::sqrt(total) : total;
}

Plan plan_norm(const GradientNorm& args, const Machine& machine) {
  const int64_t partials = args.gradients.pieces() * static_cast<int64_t>(sizeof(double));
  return plan_pieces(args.gradients, machine, "gradient_norm_kernel", partials,
                     [](const FlatTensor& tensor) { return size_of(tensor.dtype); });
}

void gradient_norm_kernel(const GradientNorm& args, double* partials, int64_t begin, int64_t end) {
  for_each_typed_piece(args.gradients, begin, end,
                       [&]<class T>(T* g, int64_t count, int64_t piece) {
                         partials[piece] = std::isinf(args.order) ? largest_magnitude(g, count)
                                           : args.wide ? wide_sum(g, count, args.order)
                                                       : sum_of_powers(g, count, args.order);
                       });
}

void run_norm(const GradientNorm& args, const Plan& plan, void* workspace, const Context& context) {
  double* partials = static_cast<double*>(workspace);
  for_each_piece(context, plan.threads, plan.splits, [&](int64_t begin, int64_t end) {
    gradient_norm_kernel(args, partials, begin, end);
  });
  *args.norm = combined(partials, plan.splits, args.order);
}

Plan plan_scale(const ScaleGradients& args, const Machine& machine) {
  return plan_pieces(args.gradients, machine, "scale_gradients_kernel", 0,
                     [](const FlatTensor& tensor) { return 2 * size_of(tensor.dtype); });
}

void scale_gradients_kernel(const ScaleGradients& args, int64_t begin, int64_t end) {
  for_each_typed_piece(args.gradients, begin, end, [&]<class T>(T* g, int64_t count, int64_t) {
    using A = Accumulator<T>;
    const Vec<A> factor = broadcast<A>(static_cast<A>(args.factor));
    for_each_vector<A>(0, count, [&](int64_t i, auto lanes) {
      store<A>(g + i, load<A>(g + i, lanes) * factor, lanes);
    });
  });
}

void run_scale(const ScaleGradients& args, const Plan& plan, void*, const Context& context) {
  for_each_piece(context, plan.threads, plan.splits,
                 [&](int64_t begin, int64_t end) { scale_gradients_kernel(args, begin, end); });
}

}  // namespace

Operator<GradientNorm> gradient_norm() { return {plan_norm, run_norm}; }
Operator<ScaleGradients> scale_gradients() { return {plan_scale, run_scale}; }

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
