// From the product of query and key to the probability, for every kernel of attention: the terms of
// a score, their derivatives, and which scores dropout keeps.
//
//   scalar: s = scale * product; s = softcap * tanh(s / softcap); s -= slope * |position - key|;
//           s += bias[query][key]; -inf unless mask, window and diagonal allow it
//
// Each term is defined here once, with its derivative. A kernel iterates over the scores of a
// thread, gives their positions, and loads bias and mask. These loads have no common form: the
// forward reads 8 neighbouring keys of a row in one access instead of 8 (TermRows), the backward
// has transposed scores and exchanges pairs by movmatrix (StripTerms), and the plain kernels read
// any dtype, one element at a time (RowScores).
#pragma once

#include <cmath>

#include "core/philox.h"
#include "core/visit.h"
#include "cuda/ptx.cuh"
#include "ops/attention.h"

namespace onepass::cuda {

inline constexpr float kLog2e = 1.44269504088896340736f;

// Element i of a tensor of any dtype that A can hold.
template <class A>
__device__ __forceinline__ A load_as(const void* base, DType dtype, int64_t i) {
  if constexpr (sizeof(A) == 8) {
    return dtype == DType::kFloat64
               ? load_global(static_cast<const double*>(base) + i)
               : static_cast<double>(load_global(static_cast<const float*>(base) + i));
  } else {
    return visit_dtype_up_to_float32(
        dtype, [&]<class T>() { return widen(load_global(static_cast<const T*>(base) + i)); });
  }
}

// ---- terms --------------------------------------------------------------------------------------

// Whether the score of a seen key is more than scale * product.
ONEPASS_HOST_DEVICE inline bool changes_scores(const Attention& args) {
  return args.softcap != 0.0 || args.alibi_slopes || args.bias.data;
}

// The numbers of a call's terms, in the type of its scores. The host converts them, because a
// device has few units for doubles and would convert the arguments again for every tile.
template <class A>
struct ScoreNumbers {
  A scale;
  A unit;     // scale * log2(e): a factor of exponents, in instances without terms
  A softcap;  // 0: none
  A inverse_softcap;

  explicit ScoreNumbers(const Attention& args)
      : scale(static_cast<A>(args.scale)),
        unit(scale * kLog2e),
        softcap(static_cast<A>(args.softcap)),
        inverse_softcap(A(1) / softcap) {}

  // Whether the derivative of a score by scale * product is not 1.
  __device__ __forceinline__ bool has_derivative() const { return softcap != A(0); }
};

// The numbers that terms have for each head.
struct HeadNumbers {
  float slope;
};

__device__ __forceinline__ HeadNumbers load_head_numbers(const Attention& args, int64_t batch,
                                                         int64_t head) {
  if (!args.alibi_slopes) return {0.0f};
  return {load_global(args.alibi_slopes + batch * args.alibi_batch_stride + head)};
}

// The inputs of the terms of a score, besides the product and the call.
template <class A>
struct ScorePlace {
  HeadNumbers head;
  A distance;  // |position - key|
};

// tanh with a relative error of a few 1e-7: by exp2, and by its series near 0, where exp2 would
// leave few digits.
__device__ __forceinline__ float tanh_approximate(float x) {
  const float square = x * x;
  float series = multiply_add(square, -17.0f / 315.0f, 2.0f / 15.0f);
  series = multiply_add(square, series, -1.0f / 3.0f);
  series = multiply_add(x * square, series, x);
  const float power = exp2_approximate(2.0f * kLog2e * x);
  const float whole = 1.0f - 2.0f * reciprocal_approximate(1.0f + power);
  return square < 0.04f ? series : whole;
}

// The arithmetic of terms. kExact: functions of the standard library; otherwise approximations, for
// products with 16-bit factors. kFused: a * b + c is rounded once.
template <bool kExact, bool kFused>
struct TermMath {
  template <class A>
  static __device__ __forceinline__ A tanh_of_capped(A score, const ScoreNumbers<A>& numbers) {
    if constexpr (kExact) {
      return std::tanh(score / numbers.softcap);
    } else {
      return tanh_approximate(score * numbers.inverse_softcap);
    }
  }
  template <class A>
  static __device__ __forceinline__ A multiply_add(A a, A b, A c) {
    if constexpr (kFused) {
      return cuda::multiply_add(a, b, c);
    } else {
      return a * b + c;
    }
  }
};

using ExactTerms = TermMath<true, false>;
using FastTerms = TermMath<false, true>;

// Turns products into scores, except for bias and masks. It goes term by term, so that the check
// whether the call has a term is made once for all scores of a thread.
//
// for_each(body): calls body(score, i, derivative) for each score i of the thread. derivative is
// that of the score by scale * product: written if has_derivative(), and may be left out.
// place(i): the ScorePlace of score i.
template <class Math, class A, class ForEach, class Place>
__device__ __forceinline__ void apply_terms(const Attention& args, const ScoreNumbers<A>& numbers,
                                            ForEach&& for_each, Place&& place) {
  for_each([&](A& s, auto, auto&...) { s *= numbers.scale; });
  if (numbers.softcap != A(0)) {
    for_each([&](A& s, auto, auto&... derivative) {
      const A capped = Math::tanh_of_capped(s, numbers);
      s = numbers.softcap * capped;
      ((derivative = Math::multiply_add(-capped, capped, A(1))), ...);
    });
  }
  if (args.alibi_slopes) {
    for_each([&](A& s, auto i, auto&...) {
      const ScorePlace<A> at = place(i);
      s = Math::multiply_add(-static_cast<A>(at.head.slope), at.distance, s);
    });
  }
}

// The gradient of HeadNumbers: (batch, heads), or (heads,) where all batches share the numbers;
// contiguous. Null: not wanted. A backward sums it over the scores of a head.
ONEPASS_HOST_DEVICE inline float* head_gradient(const AttentionBackward& args) {
  return args.dslopes;
}

inline bool batches_share_numbers(const Attention& args) { return args.alibi_batch_stride == 0; }

// scalar: sum += ds * |position - key|; the gradient is -sum
template <class Math, class A>
__device__ __forceinline__ void add_head_gradient(A& sum, A ds, const ScorePlace<A>& at) {
  sum = Math::multiply_add(ds, at.distance, sum);
}

// ---- dropout ------------------------------------------------------------------------------------

// The dropout of a call, or one that keeps all.
__device__ __forceinline__ Dropout dropout_of(const Attention& args) {
  if (!args.seed) return {.key = {}, .offset = 0, .threshold = 0, .scale = 1.0f};
  const int64_t drawn[2] = {load_global(args.seed), load_global(args.seed + 1)};
  return make_dropout(drawn, args.dropout_p);
}

// The number of scores that one Philox call draws for: those of a query and keys 8 call ..
// 8 call + 7 of the whole attention (key + key_offset). Each gets the sixteen bits number key % 8,
// and is kept if they are at least the threshold.
inline constexpr int kCallKeys = 8;

__device__ __forceinline__ std::array<uint32_t, 4> dropout_words(const Dropout& dropout,
                                                                 const Attention& args,
                                                                 uint32_t random_head,
                                                                 int64_t query, int64_t call) {
  return philox4x32(dropout.key, {static_cast<uint32_t>(args.query_offset + query),
                                  static_cast<uint32_t>(call), random_head, dropout.offset});
}

__device__ __forceinline__ bool keeps(const Dropout& dropout, const std::array<uint32_t, 4>& words,
                                      int key) {
  return (words[key / 2] >> key % 2 * 16 & 0xffffu) >= dropout.threshold;
}

}  // namespace onepass::cuda
