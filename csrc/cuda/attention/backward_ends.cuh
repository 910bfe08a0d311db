// The first and the last step of every backward, on tensor cores or not: delta of every query
// first, the sums over the rows of a head last.
//
//   delta[i] = sum over d of doutput[i][d] * output[i][d] - dlse[i]
//   dsinks[h] = -sum over batches and rows of exp(sink - lse) * delta
//   head_gradient() of scores.cuh: the gradient of the numbers that a term has for each head
//
// Sums over rows begin as one partial sum per block; a last launch adds these in order, so that
// the result does not depend on the order of blocks. delta and the partial sums of dsinks are
// computed here. The partial sums of the heads' numbers come from the kernel that computes ds,
// which calls store_partial().
#pragma once

#include "cuda/attention/scores.cuh"
#include "cuda/reduce.cuh"

namespace onepass::cuda {

// delta is summed in chains of this many elements, as the multiply-add kernels sum dP. So in a row
// whose weight is all on one key, where the output is that key's value, dP - delta is exactly 0.
template <class A>
inline constexpr int kDeltaChain = 128 / sizeof(A);

// Pointers into the workspace. A is the accumulator's dtype: double for float64, else float.
struct BackwardEnds {
  void* delta;         // A, laid out like lse, see lse_row()
  double* dsinks;      // (batch, heads, sink_parts) partial sums; null if not wanted
  void* head_sums;     // A (batch, heads, head_parts) partial sums of head_gradient()
  int64_t sink_parts;  // blocks per head of the kernel that computes delta
  int64_t head_parts;  // blocks per (batch, head) of the kernel that computes ds
};

// Bytes at the beginning of the workspace; a multiple of 16.
int64_t ends_bytes(const AttentionBackward& args, int64_t head_parts);
BackwardEnds ends_in(void* workspace, const AttentionBackward& args, int64_t head_parts);

// begin_backward() launches delta and the partial sums of dsinks; finish_backward() launches dsinks
// and head_gradient().
void begin_backward(const AttentionBackward& args, const BackwardEnds& ends, void* stream);
void finish_backward(const AttentionBackward& args, const BackwardEnds& ends, void* stream);

// The lse of a row, which turns its scores into probabilities.
template <class A>
struct RowLse {
  A lse;
  A lse_rest;

  __device__ __forceinline__ A probability(A score) const {
    return std::exp((score - lse) - lse_rest);
  }
};

// row: from lse_row(). For a row that saw no key the lse becomes inf, so that its probabilities are
// exp(-inf) = 0.
template <class A>
__device__ __forceinline__ RowLse<A> load_lse(const AttentionBackward& args, int64_t row) {
  const A lse = load_global(static_cast<const A*>(args.lse) + row);
  return {lse == -static_cast<A>(INFINITY) ? static_cast<A>(INFINITY) : lse,
          args.lse_rest ? load_global(static_cast<const A*>(args.lse_rest) + row) : A(0)};
}

// partials[index] = -(the sum of `value` over the block); every thread calls it once. scratch:
// kReduceScratch<1> elements of shared memory that nothing else uses until the next barrier.
template <class A>
__device__ __forceinline__ void store_partial(A value, A* partials, int64_t index, A* scratch) {
  A sum[1] = {value};
  reduce_row(sum, static_cast<int>(blockDim.x), scratch);
  if (threadIdx.x == 0) store_global(partials + index, -sum[0]);
}

}  // namespace onepass::cuda
