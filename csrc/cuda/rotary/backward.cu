// The backward of RMS norm followed by rotary embedding, on CUDA. With u the transposed rotation of
// the gradient d, h = x * rstd and g = u * weight per row,
//   dx = rstd * (g - h * mean(g * h)), dweight = sum over rows of u * h.
//
// As in the forward, lanes of one warp hold a row of d and of x in registers; x^2 and g * x are
// summed in the same pass. A block has a part of the tokens and heads of query or of key. Its sums
// for the weight stay in shared memory during the whole part, and are written to partials
// (parts, head_dim), which the last kernel adds up. Parts depend on the shape alone: gradients are
// the same bits on every device.
// Traffic: d and x read once, dx written once; cos and sin once for each group of heads; the weight
// once, and the partials written and read, for each part. Done when it runs at the speed of a copy
// of as many bytes.
#include "cuda/backend.h"
#include "cuda/launch.cuh"
#include "cuda/rotary/normed.cuh"

namespace onepass::cuda {
namespace {

constexpr int64_t kMaxParts = 512;  // of a tensor
constexpr int kWarps = kRotaryThreads / kLanes;

// The steps of a tensor; a step is one group of heads at one block of tokens.
ONEPASS_HOST_DEVICE int64_t steps_of(const NormedShape& shape, const RotatedHeads& heads) {
  return shape.head_groups(heads) * shape.token_blocks;
}

struct Parts {
  int query;
  int key;
};

// A part for each step, up to kMaxParts. With 2 * 8 rows of bfloat16 for each group of lanes, the
// partials are a hundredth of the traffic.
Parts parts_of(const RotaryForward& args, const NormedShape& shape) {
  const auto parts = [&](const RotatedHeads& heads) {
    return static_cast<int>(std::min(steps_of(shape, heads), kMaxParts));
  };
  return {parts(args.query), parts(args.key)};
}

// With 128 registers per thread two blocks are resident. float64 and unaligned rows, which need an
// address for each element, take more.
template <class T, bool kAligned>
inline constexpr int kResidentBlocks = kAligned && sizeof(Accumulator<T>) == 4 ? 2 : 1;

template <class T, bool kInterleaved, bool kAligned>
__global__ void __launch_bounds__(kRotaryThreads, kResidentBlocks<T, kAligned>)
    rotary_backward_kernel(const RotaryBackward args, const NormedShape shape, const Parts parts,
                           Accumulator<T>* partials) {
  using A = Accumulator<T>;
  SharedMemory shared;
  A* weights = shared.take<A>(kRowSlots);
  A* dweights = shared.take<A>(kWarps * kRowSlots);
  const int thread = static_cast<int>(threadIdx.x);
  // The thread's own sums of u * h; in registers they would take 16.
  A* dweight = dweights + thread / kLanes * kRowSlots + thread % kLanes;
  ONEPASS_UNROLL
  for (int i = 0; i < kLaneColumns; ++i) dweight[i * kLanes] = 0;
  const bool of_query = static_cast<int>(blockIdx.x) < parts.query;
  const RotatedHeads& heads = of_query ? args.query : args.key;
  const NormedHeads& norm = of_query ? args.query_norm : args.key_norm;
  const int part = static_cast<int>(blockIdx.x) - (of_query ? 0 : parts.query);
  const int of_parts = of_query ? parts.query : parts.key;
  stage_weight<A, kInterleaved, kAligned>(args, heads, shape, weights);
  __syncthreads();

  const int64_t steps = steps_of(shape, heads);
  for (int64_t step = steps * part / of_parts; step < steps * (part + 1) / of_parts; ++step) {
    const int64_t first_head = step / shape.token_blocks * shape.heads_each;
    const int64_t end = first_head + shape.heads_each;
    const int64_t last_head = end < heads.heads ? end : heads.heads;
    const NormedToken<kInterleaved, kAligned> token(args, shape, step % shape.token_blocks);
    const auto& columns = token.columns;
    const NormedFactors<A, kInterleaved, kAligned> factors(args, token);
    for (int64_t head = first_head; head < last_head; ++head) {
      const T* d = static_cast<const T*>(heads.input) + token.offset(heads.input_stride, head);
      const T* x = static_cast<const T*>(norm.x) + token.offset(norm.x_stride, head);
      const Raw<T> raw_d[2] = {load_pack(d, columns, 0), load_pack(d, columns, 1)};
      Raw<T> raw_x[2] = {};
      if (heads.weight) {
        ONEPASS_UNROLL
        for (int h = 0; h < 2; ++h) raw_x[h] = load_pack(x, columns, h);
      }
      A gradient[2][kPack], u[2][kPack];
      ONEPASS_UNROLL
      for (int h = 0; h < 2; ++h) {
        ONEPASS_UNROLL
        for (int e = 0; e < kPack; ++e) gradient[h][e] = element<T>(raw_d[h], e);
      }
      A sum[2] = {};  // of x^2, of g * x
      ONEPASS_UNROLL
      for (int h = 0; h < 2; ++h) {
        ONEPASS_UNROLL
        for (int e = 0; e < kPack; ++e) {
          u[h][e] = factors.rotated(columns, gradient, h, e);
          const A v = element<T>(raw_x[h], e);
          sum[0] = multiply_add(v, v, sum[0]);
          sum[1] = multiply_add(u[h][e] * weights[columns.slot(h, e)], v, sum[1]);
        }
      }
      sum_over_lanes(sum, shape.lanes);
      const A n = static_cast<A>(args.head_dim);
      const A rstd = heads.weight ? inverse_root(sum[0] / n, args.eps) : A(1);
      const A mean_gh = sum[1] * rstd / n;
      if (!token.is_there) continue;
      T* dx = static_cast<T*>(heads.output) + token.offset(heads.output_stride, head);
      ONEPASS_UNROLL
      for (int h = 0; h < 2; ++h) {
        A value[kPack];
        ONEPASS_UNROLL
        for (int e = 0; e < kPack; ++e) {
          const A normalized = element<T>(raw_x[h], e) * rstd;
          const A g = u[h][e] * weights[columns.slot(h, e)];
          value[e] = multiply_add(-normalized, mean_gh, g) * rstd;
          A& sum_uh = dweight[(h * kPack + e) * kLanes];
          sum_uh = multiply_add(u[h][e], normalized, sum_uh);
        }
        if (heads.output) store_pack(dx, columns, h, narrow<T>(value));
      }
    }
  }

  if (!norm.dweight) return;
  __syncthreads();
  if (thread >= shape.lanes) return;
  // Added in order: over the warps, and in each warp over its groups of lanes.
  const NormedColumns<kInterleaved, kAligned> columns{
      thread, shape.lanes, static_cast<int>(args.rotary_dim), static_cast<int>(args.head_dim)};
  A* const target = partials + static_cast<int64_t>(blockIdx.x) * args.head_dim;
  ONEPASS_UNROLL
  for (int h = 0; h < 2; ++h) {
    A total[kPack] = {};
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      for (int warp = 0; warp < kWarps; ++warp) {
        const A* sums = dweights + warp * kRowSlots + columns.slot(h, e);
        A of_warp = 0;
        for (int lane = 0; lane < kLanes; lane += shape.lanes) of_warp += sums[lane];
        total[e] += of_warp;
      }
    }
    store_pack(target, columns, h, narrow<A>(total));
  }
}

// A block adds up the partials of kReduceColumns columns, of query's weight or of key's.
template <class A>
__global__ void __launch_bounds__(kReduceThreads, 1)
    rotary_backward_reduce_kernel(const RotaryBackward args, const Parts parts, const A* partials) {
  const bool of_query = blockIdx.x % 2 == 0;
  const NormedHeads& norm = of_query ? args.query_norm : args.key_norm;
  if (!norm.dweight) return;
  const int64_t column =
      static_cast<int64_t>(blockIdx.x / 2) * kReduceColumns + threadIdx.x % kLanes;
  SharedMemory shared;
  A* sums = shared.take<A>(kReduceThreads);
  if (!of_query) partials += static_cast<int64_t>(parts.query) * args.head_dim;
  const bool has_column = column < args.head_dim;
  const A total = sum_of_parts(partials + column, of_query ? parts.query : parts.key, args.head_dim,
                               has_column, sums);
  if (threadIdx.x >= kLanes || !has_column) return;
  store_gradient<A>(norm.dweight, (of_query ? args.query : args.key).weight_dtype, column, total);
}

NormedShape shape_of(const RotaryBackward& args) {
  const auto norm = [](const NormedHeads& norm) {
    return has_aligned_base(norm.x) && has_aligned_strides(norm.x_stride);
  };
  return normed_shape(args, is_aligned(args) && norm(args.query_norm) && norm(args.key_norm));
}

// The decisions of a plan.
struct BackwardLayout {
  NormedShape shape;
  Parts parts;
};

Plan plan_backward(const RotaryBackward& args, const Machine&, BackwardLayout& layout) {
  const NormedShape& shape = layout.shape = shape_of(args);
  const Parts& parts = layout.parts = parts_of(args, shape);
  const int64_t size = std::max<int64_t>(size_of(args.dtype), sizeof(float));
  return {.workspace_bytes = (parts.query + parts.key) * args.head_dim * size,
          .kernel_name = "rotary_backward_kernel",
          .rows_per_tile = shape.heads_each,
          .splits = parts.query + parts.key,
          .reason = shape.aligned ? "16-byte accesses" : "unaligned: single elements"};
}

void run_backward(const RotaryBackward& args, const Plan& plan, const BackwardLayout& layout,
                  void* workspace, const Context& context) {
  const auto& [shape, parts] = layout;
  visit_dtype(args.dtype, [&]<class T>() {
    using A = Accumulator<T>;
    A* const partials = static_cast<A*>(workspace);
    visit_bool(shape.aligned, [&]<bool kAligned>() {
      visit_bool(args.interleaved, [&]<bool kInterleaved>() {
        launch<rotary_backward_kernel<T, kInterleaved, kAligned>>(
            {.blocks = plan.splits,
             .threads = kRotaryThreads,
             .shared_bytes = (1 + kWarps) * kRowSlots * sizeof(A)},
            context.stream, args, shape, parts, partials);
      });
    });
    if (!args.query_norm.dweight && !args.key_norm.dweight) return;
    launch<rotary_backward_reduce_kernel<A>>(
        {.blocks = 2 * ((args.head_dim + kReduceColumns - 1) / kReduceColumns),
         .threads = kReduceThreads,
         .shared_bytes = kReduceThreads * sizeof(A)},
        context.stream, args, parts, static_cast<const A*>(partials));
  });
}

}  // namespace

Operator<RotaryBackward> rotary_backward() {
  return operator_of<RotaryBackward, BackwardLayout, plan_backward, run_backward>();
}

}  // namespace onepass::cuda
