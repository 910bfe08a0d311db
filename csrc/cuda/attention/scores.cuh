// What stands between a product of query and key and a probability: the scale, softcap, ALiBi,
// bias, mask, window and dropout of one query row, a score at a time. Kernels of tiles use it for
// the calls that have any of these, and keep their own code for those that have none.
#pragma once

#include <cmath>

#include "core/philox.h"
#include "core/visit.h"
#include "cuda/ptx.cuh"
#include "ops/attention.h"

namespace onepass::cuda {

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

template <class A>
struct Score {
  A value;       // -inf where the query does not see the key
  A derivative;  // of value by scale * product: that of softcap
};

// scalar: s = scale * product; s = softcap * tanh(s / softcap); s -= slope * |position - key|;
//         s += bias[query][key]; -inf unless mask, window and diagonal allow it
template <class A>
class RowScores {
 public:
  // Of a query row of one (batch, head); one beyond the sequence sees no key.
  __device__ __forceinline__ RowScores(const Attention& args, const Sequence& sequence,
                                       int64_t batch, int64_t head, int64_t query)
      : args_(args), position_(query + sequence.alignment), keys_{0, 0} {
    if (query >= sequence.queries) return;
    keys_ = keys_of(args, sequence, query);
    if (args.bias.data) {
      bias_ = batch * args.bias.batch_stride + head * args.bias.head_stride +
              query * args.bias.row_stride;
    }
    if (args.mask.data) mask_ = mask_row(args, batch, head, query);
    if (args.alibi_slopes) {
      slope_ = load_global(args.alibi_slopes + batch * args.alibi_batch_stride + head);
    }
  }

  // Before any mask.
  __device__ __forceinline__ const KeyRange& keys() const { return keys_; }

  __device__ __forceinline__ bool sees(int64_t key) const {
    return keys_.first <= key && key < keys_.last && (!mask_ || load_global(mask_ + key) != 0);
  }

  __device__ __forceinline__ A distance(int64_t key) const {
    const int64_t distance = position_ - key;
    return static_cast<A>(distance < 0 ? -distance : distance);
  }

  __device__ __forceinline__ Score<A> score(A product, int64_t key) const {
    return sees(key) ? score_of_seen(product, key) : Score<A>{-static_cast<A>(INFINITY), A(0)};
  }

  // Of a key that the row is known to see.
  __device__ __forceinline__ Score<A> score_of_seen(A product, int64_t key) const {
    Score<A> score = {product * static_cast<A>(args_.scale), A(1)};
    if (args_.softcap != 0.0) {
      const A cap = static_cast<A>(args_.softcap);
      const A bent = std::tanh(score.value / cap);
      score = {cap * bent, A(1) - bent * bent};
    }
    if (args_.alibi_slopes) score.value -= slope_ * distance(key);
    if (args_.bias.data) score.value += load_as<A>(args_.bias.data, args_.bias_dtype, bias_ + key);
    return score;
  }

 private:
  const Attention& args_;
  int64_t position_;  // of the row, counted as keys are
  KeyRange keys_;
  int64_t bias_ = 0;
  const uint8_t* mask_ = nullptr;
  A slope_ = 0;
};

// The dropout of a call, or one that keeps all.
__device__ __forceinline__ Dropout dropout_of(const Attention& args) {
  if (!args.seed) return {.key = {}, .offset = 0, .threshold = 0, .scale = 1.0f};
  const int64_t drawn[2] = {load_global(args.seed), load_global(args.seed + 1)};
  return make_dropout(drawn, args.dropout_p);
}

// The scores whose fates one Philox call has: of a query, and keys 8 call .. 8 call + 7 of the
// whole attention (key + key_offset). Sixteen bits each, key % 8 of them; kept from the threshold.
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
  // Selected: an array with a computed index would leave the registers.
  const uint32_t low = key & 2 ? words[1] : words[0], high = key & 2 ? words[3] : words[2];
  return ((key & 4 ? high : low) >> key % 2 * 16 & 0xffffu) >= dropout.threshold;
}

}  // namespace onepass::cuda
