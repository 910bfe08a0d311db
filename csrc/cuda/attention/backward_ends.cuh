// The two ends of a backward, for the kernels between them whatever those are made of: delta of
// every query before, the sums over a head's rows after.
//
//   delta[i] = sum over d of doutput[i][d] * output[i][d] - dlse[i]
//   dsinks[h] = -sum over batches and rows of exp(sink - lse) * delta
//   head_gradient() of scores.cuh, of the numbers that a term has for each head
//
// What is summed over rows comes as partial sums, one per block of a kernel, which a last launch
// adds up in order: nothing depends on the order of blocks. delta and the partial sums of dsinks
// are made here; those of the gradient of a head's numbers by the kernel that has ds, with
// store_partial().
#pragma once

#include "cuda/attention/scores.cuh"
#include "cuda/reduce.cuh"

namespace onepass::cuda {

// delta is added up as the multiply-add kernels add up dP, in chains of so many elements: in a row
// that has all its weight on one key, output is that key's value, and dP - delta exactly 0.
template <class A>
inline constexpr int kDeltaChain = 128 / sizeof(A);

// In the workspace. A is the accumulator's dtype: double for float64, else float.
struct BackwardEnds {
  void* delta;      // A, like lse: lse_row() says where
  double* dsinks;   // (batch, heads, sink_parts) partial sums; null if not wanted
  void* head_sums;  // A (batch, heads, head_parts) likewise of head_gradient(), each written once
  int64_t sink_parts;  // rows of a head in blocks
  int64_t head_parts;  // as the kernel between the ends cuts up a (batch, head)
};

// Of the workspace, from its beginning; a multiple of 16.
int64_t ends_bytes(const AttentionBackward& args, int64_t head_parts);
BackwardEnds ends_in(void* workspace, const AttentionBackward& args, int64_t head_parts);

// Launches: delta and the partial sums of dsinks; dsinks and head_gradient().
void begin_backward(const AttentionBackward& args, const BackwardEnds& ends, void* stream);
void finish_backward(const AttentionBackward& args, const BackwardEnds& ends, void* stream);

// What a row's scores are normalised by.
template <class A>
struct RowLse {
  A lse;
  A lse_rest;

  __device__ __forceinline__ A probability(A score) const {
    return std::exp((score - lse) - lse_rest);
  }
};

// row: of lse_row(). One that saw no key has no probabilities: with inf as its lse,
// exp(-inf) is 0.
template <class A>
__device__ __forceinline__ RowLse<A> load_lse(const AttentionBackward& args, int64_t row) {
  const A lse = load_global(static_cast<const A*>(args.lse) + row);
  return {lse == -static_cast<A>(INFINITY) ? static_cast<A>(INFINITY) : lse,
          args.lse_rest ? load_global(static_cast<const A*>(args.lse_rest) + row) : A(0)};
}

// For every thread of the block, once: partials[index] = -(the sum of their values). scratch:
// kReduceScratch<1> elements of shared memory that nothing else uses until the next barrier.
template <class A>
__device__ __forceinline__ void store_partial(A value, A* partials, int64_t index, A* scratch) {
  A sum[1] = {value};
  reduce_row(sum, static_cast<int>(blockDim.x), scratch);
  if (threadIdx.x == 0) store_global(partials + index, -sum[0]);
}

}  // namespace onepass::cuda
