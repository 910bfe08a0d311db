// Rotary embedding of query and key on CUDA: output[a] = input[a] * cos[a] - input[b] * sin[a] and
// output[b] = input[b] * cos[b] + input[a] * sin[b] for pairs (a, b) of columns, or the transpose.
//
// A thread has eight pairs of columns of one token, as two packs, for several heads of query and
// key. cos and sin are read once for all these heads and stay in registers: one factor for each of
// the 16 columns and one for its partner. Other threads copy the columns that are not rotated.
// Traffic: one read and one write of query and key, and cos and sin once for each group of heads.
// Done when it runs at the speed of a copy of query and key.
//
// With an RMS norm before the rotation, lanes of one warp share all columns of a row: it stays in
// registers while its squares are summed. The weight is multiplied into the factors. Traffic: as
// above, and the weight once for each block.
#include <algorithm>
#include <type_traits>

#include "cuda/backend.h"
#include "cuda/launch.cuh"
#include "cuda/rotary/normed.cuh"

namespace onepass::cuda {
namespace {

// Calls body(input, output) for each head of a thread.
template <class T, class Body>
__device__ __forceinline__ void for_each_head(const RotaryForward& args, int64_t batch,
                                              int64_t token, int64_t first, int64_t last,
                                              Body&& body) {
  for (int64_t head = first; head < last; ++head) {
    const bool of_query = head < args.query.heads;
    const RotatedHeads& heads = of_query ? args.query : args.key;
    const int64_t own = of_query ? head : head - args.query.heads;
    const auto at = [&](const HeadStride& stride) {
      return batch * stride.batch + own * stride.head + token * stride.token;
    };
    body(static_cast<const T*>(heads.input) + at(heads.input_stride),
         static_cast<T*>(heads.output) + at(heads.output_stride));
  }
}

template <class T, bool kInterleaved, bool kAligned>
__global__ void __launch_bounds__(kRotaryThreads)
    rotary_forward_kernel(const RotaryForward args, const int64_t heads_per_thread) {
  using A = Accumulator<T>;
  constexpr int kWide = kWidth<kAligned>;
  const int64_t rotating = args.rotary_dim / 2 / kWide;  // threads of a row
  const int64_t copying = args.in_place ? 0 : (args.head_dim - args.rotary_dim) / kWide;
  const int64_t heads = args.query.heads + args.key.heads;
  int64_t index = static_cast<int64_t>(blockIdx.x) * kRotaryThreads + threadIdx.x;
  const auto part = [&](int64_t size) {
    const int64_t own = index % size;
    index /= size;
    return own;
  };
  const int64_t place = part(rotating + copying);
  const int64_t token = part(args.tokens);
  const int64_t batch = part(args.batch);
  const int64_t first_head = index * heads_per_thread;
  if (first_head >= heads) return;
  const int64_t end = first_head + heads_per_thread;
  const int64_t last_head = end < heads ? end : heads;

  if (place >= rotating) {
    const int64_t column = args.rotary_dim + (place - rotating) * kWide;
    for_each_head<T>(args, batch, token, first_head, last_head, [&](const T* x, T* y) {
      store_pack(y + column, neighbours<kAligned>(), 0,
                 load_pack(x + column, neighbours<kAligned>(), 0));
    });
    return;
  }

  const Halves halves = halves_of<kInterleaved, kAligned>(args, place);
  const Factors<A, kInterleaved, kAligned> factors(args, batch, row_of(args, batch, token), halves);
  for_each_head<T>(args, batch, token, first_head, last_head, [&](const T* x, T* y) {
    Few<T, kAligned> half[2], turned;
    half[0].load(x + halves.first);
    half[1].load(x + halves.second);
    ONEPASS_UNROLL
    for (int h = 0; h < 2; ++h) {
      ONEPASS_UNROLL
      for (int e = 0; e < kWide; ++e) {
        const A partner =
            kInPack<kInterleaved, kAligned> ? half[h].value[e ^ 1] : half[1 - h].value[e];
        turned.value[e] =
            multiply_add(half[h].value[e], factors.own[h][e], partner * factors.other[h][e]);
      }
      turned.store(y + (h ? halves.second : halves.first));
    }
  });
}

// Blocks that share a multiprocessor, at least. Without it ptxas 13.0 aims at three of float32 on
// sm_90, and spills a register.
template <class T, bool kAligned>
inline constexpr int kLeastBlocks = kAligned && std::is_same_v<T, float> ? 2 : 1;

// With norms. A block has the heads of one group, blockIdx.x / token_blocks.
template <class T, bool kInterleaved, bool kAligned>
__global__ void __launch_bounds__(kRotaryThreads, kLeastBlocks<T, kAligned>)
    rotary_normed_forward_kernel(const RotaryForward args, const NormedShape shape) {
  using A = Accumulator<T>;
  SharedMemory shared;
  A* weights = shared.take<A>(kRowSlots);
  const int64_t group = blockIdx.x / shape.token_blocks;
  const int64_t query_groups = shape.head_groups(args.query);
  const bool of_query = group < query_groups;
  const RotatedHeads& heads = of_query ? args.query : args.key;
  const int64_t first_head = (of_query ? group : group - query_groups) * shape.heads_each;
  const int64_t end = first_head + shape.heads_each;
  const int64_t last_head = end < heads.heads ? end : heads.heads;
  stage_weight<A, kInterleaved, kAligned>(args, heads, shape, weights);
  __syncthreads();

  const NormedToken<kInterleaved, kAligned> token(args, shape, blockIdx.x % shape.token_blocks);
  NormedFactors<A, kInterleaved, kAligned> factors(args, token);
  A weight[2][kPack];
  ONEPASS_UNROLL
  for (int h = 0; h < 2; ++h) {
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) weight[h][e] = weights[token.columns.slot(h, e)];
  }
  ONEPASS_UNROLL
  for (int h = 0; h < 2; ++h) {
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      factors.own[h][e] *= weight[h][e];
      factors.other[h][e] *= factors.partner(weight, h, e);
    }
  }
  for (int64_t head = first_head; head < last_head; ++head) {
    const T* row = static_cast<const T*>(heads.input) + token.offset(heads.input_stride, head);
    const Raw<T> raw[2] = {load_pack(row, token.columns, 0), load_pack(row, token.columns, 1)};
    A x[2][kPack];
    A squares[1] = {};
    ONEPASS_UNROLL
    for (int h = 0; h < 2; ++h) {
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) {
        x[h][e] = element<T>(raw[h], e);
        squares[0] = multiply_add(x[h][e], x[h][e], squares[0]);
      }
    }
    sum_over_lanes(squares, shape.lanes);
    const A rstd =
        heads.weight ? inverse_root(squares[0] / static_cast<A>(args.head_dim), args.eps) : A(1);
    T* output = static_cast<T*>(heads.output) + token.offset(heads.output_stride, head);
    ONEPASS_UNROLL
    for (int h = 0; h < 2; ++h) {
      A y[kPack];
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) y[e] = factors.rotated(token.columns, x, h, e) * rstd;
      store_pack(output, token.columns, h, narrow<T>(y));
    }
  }
}

const char* reason_of(bool aligned) {
  return aligned ? "16-byte accesses" : "unaligned: single elements";
}

// The decisions of a plan.
struct ForwardLayout {
  bool aligned;
  bool has_norms;
  NormedShape normed;  // used with norms
  int64_t of_row;      // threads of a token in a group of heads, without
};

Plan plan_normed(const RotaryForward& args, const NormedShape& shape) {
  return {.workspace_bytes = 0,
          .kernel_name = "rotary_normed_forward_kernel",
          .rows_per_tile = shape.heads_each,
          .splits = shape.head_groups(args.query) + shape.head_groups(args.key),
          .reason = reason_of(shape.aligned)};
}

void run_normed(const RotaryForward& args, const NormedShape& shape, const Plan& plan,
                const Context& context) {
  visit_bool(shape.aligned, [&]<bool kAligned>() {
    visit_dtype(args.dtype, [&]<class T>() {
      visit_bool(args.interleaved, [&]<bool kInterleaved>() {
        const LaunchShape launched{.blocks = plan.splits * shape.token_blocks,
                                   .threads = kRotaryThreads,
                                   .shared_bytes = kRowSlots * sizeof(Accumulator<T>)};
        launch<rotary_normed_forward_kernel<T, kInterleaved, kAligned>>(launched, context.stream,
                                                                        args, shape);
      });
    });
  });
}

Plan plan_forward(const RotaryForward& args, const Machine&, ForwardLayout& layout) {
  layout.aligned = is_aligned(args);
  layout.has_norms = args.query.weight || args.key.weight;
  if (layout.has_norms) {
    layout.normed = normed_shape(args, layout.aligned);
    return plan_normed(args, layout.normed);
  }
  const int64_t heads = args.query.heads + args.key.heads;
  const int64_t columns = args.in_place ? args.rotary_dim : args.head_dim;
  layout.of_row = (columns - args.rotary_dim / 2) / (layout.aligned ? kPack : 1);
  const auto groups = [&](int64_t each) { return (heads + each - 1) / each; };
  const int64_t each = heads_of_thread(args.batch * args.tokens * layout.of_row, groups);
  return {.workspace_bytes = 0,
          .kernel_name = "rotary_forward_kernel",
          .rows_per_tile = each,
          .splits = groups(each),
          .reason = reason_of(layout.aligned)};
}

void run_forward(const RotaryForward& args, const Plan& plan, const ForwardLayout& layout, void*,
                 const Context& context) {
  if (layout.has_norms) return run_normed(args, layout.normed, plan, context);
  const int64_t threads = plan.splits * args.batch * args.tokens * layout.of_row;
  const LaunchShape shape{.blocks = (threads + kRotaryThreads - 1) / kRotaryThreads,
                          .threads = kRotaryThreads};
  visit_bool(layout.aligned, [&]<bool kAligned>() {
    visit_dtype(args.dtype, [&]<class T>() {
      visit_bool(args.interleaved, [&]<bool kInterleaved>() {
        launch<rotary_forward_kernel<T, kInterleaved, kAligned>>(shape, context.stream, args,
                                                                 plan.rows_per_tile);
      });
    });
  });
}

}  // namespace

Operator<RotaryForward> rotary_forward() {
  return operator_of<RotaryForward, ForwardLayout, plan_forward, run_forward>();
}

}  // namespace onepass::cuda
