// The backward of group norm on CUDA; silu is recomputed. It has four kernels (parts.cuh): the sums
// of dz and of dz * h over each part of a channel, the means of each group, dinput, and dweight and
// dbias from the channels' sums over samples and parts.
// Bytes per element: 2 doutput + 2 input + dinput. Done when a call whose tensors fit into L2 runs
// at the speed of a copy of the bytes that are not in L2.
#include "cuda/backend.h"
#include "cuda/group_norm/parts.cuh"

namespace onepass::cuda {
namespace {

// The derivative of silu: s (1 + z (1 - s)) with s = sigmoid(z). Neither s nor 1 - s is computed as
// a difference. The reciprocal gets one Newton step: its last bits show in the largest gradients.
template <class A>
__device__ __forceinline__ A silu_slope(A z) {
  const A e = std::exp(-std::abs(z));
  const A sum = A(1) + e;
  A large = inverse(sum);
  large = multiply_add(large, multiply_add(-sum, large, A(1)), large);
  const A small = e * large;
  const A s = z < A(0) ? small : large;
  const A rest = z < A(0) ? large : small;
  return s * multiply_add(z, rest, A(1));
}

// dz of an element; h is the normalised input.
template <bool kSilu, class A>
__device__ __forceinline__ A dz_of(A doutput, A h, A weight, A bias) {
  return kSilu ? doutput * silu_slope(multiply_add(h, weight, bias)) : doutput;
}

// Channels first: the sums of dz and of dz * h.
template <class Types, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1)
    group_norm_sums_kernel(const GroupNormBackward args, const Work work,
                           typename Types::A* partials) {
  using A = typename Types::A;
  SharedMemory shared;
  A* const scratch = shared.take<A>(kReduceScratch<2>);
  const PartRow row(args, work);
  A sum[2] = {};
  if (row.is_there) {
    const Channel<A> of =
        share_channel<A>(args, work, args.mean, args.rstd, row.sample, row.channel);
    for_each_pack<kAligned>(row, work, [&](const auto& columns, int64_t pack) {
      const auto x = Types::load(args.input, args.input_dtype,
                                 row.offset(args, args.input_stride.batch), columns, pack);
      const auto d = Types::load(args.doutput, args.doutput_dtype,
                                 row.offset(args, args.doutput_stride.batch), columns, pack);
      visit_silu(args, [&]<bool kSilu>() {
        ONEPASS_UNROLL
        for (int e = 0; e < kPack; ++e) {
          if (!columns.has(pack, e)) continue;
          const A h = (Types::value(x, e) - of.mean) * of.rstd;
          const A dz = dz_of<kSilu>(Types::value(d, e), h, of.weight, of.bias);
          sum[0] += dz;
          sum[1] = multiply_add(dz, h, sum[1]);
        }
      });
    });
  }
  reduce_row(sum, work.threads_per_row, scratch);
  if (!row.is_there || row.thread > 0) return;
  store_global(partials + row.sum(args, work), sum[0]);
  store_global(partials + row.sum(args, work) + args.channels, sum[1]);
}

template <class Types, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1)
    group_norm_pixel_sums_kernel(const GroupNormBackward args, const Work work,
                                 typename Types::A* partials) {
  using A = typename Types::A;
  SharedMemory shared;
  A* const sums = shared.take<A>(2 * kThreads * kPack);
  const Place place(args, work);
  const auto columns = place.columns<kAligned>(args, work);
  const Channels<A> channels = load_channels<A>(args, work, args.mean, args.rstd, place, columns);
  // float64 has too few registers for weight and bias: they stay in shared memory, where the
  // thread's sums go later.
  const int own = static_cast<int>(threadIdx.x);
  if constexpr (sizeof(A) == 8) {
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      sums[e * kThreads + own] = channels.of[e].weight;
      sums[(kPack + e) * kThreads + own] = channels.of[e].bias;
    }
  }
  A sum[kPack] = {}, sum_h[kPack] = {};
  for (int64_t pixel = place.begin + place.row; pixel < place.end; pixel += place.rows) {
    const auto x = Types::load(args.input, args.input_dtype, place.offset(args.input_stride, pixel),
                               columns, place.pixel_block);
    const auto d =
        Types::load(args.doutput, args.doutput_dtype, place.offset(args.doutput_stride, pixel),
                    columns, place.pixel_block);
    visit_silu(args, [&]<bool kSilu>() {
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) {
        const Channel<A>& of = channels.of[e];
        const A h = (Types::value(x, e) - of.mean) * of.rstd;
        const A weight = sizeof(A) == 8 ? sums[e * kThreads + own] : of.weight;
        const A bias = sizeof(A) == 8 ? sums[(kPack + e) * kThreads + own] : of.bias;
        const A dz = dz_of<kSilu>(Types::value(d, e), h, weight, bias);
        sum[e] += dz;
        sum_h[e] = multiply_add(dz, h, sum_h[e]);
      }
    });
  }
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    sums[e * kThreads + static_cast<int>(threadIdx.x)] = sum[e];
    sums[(kPack + e) * kThreads + static_cast<int>(threadIdx.x)] = sum_h[e];
  }
  __syncthreads();
  if (place.row > 0) return;
  for (int e = 0; e < kPack; ++e) {
    if (!columns.has(place.pixel_block, e)) continue;
    A all = 0, all_h = 0;
    for (int row = 0; row < place.rows; ++row) {
      const int slot = e * kThreads + row * work.threads_per_row + place.thread;
      all += sums[slot];
      all_h += sums[kPack * kThreads + slot];
    }
    A* const to = partials + place.sum(args, work, columns.of(place.pixel_block, e));
    store_global(to, all);
    store_global(to + args.channels, all_h);
  }
}

// The means of g and of g * h.
template <class A>
__global__ void __launch_bounds__(kThreads, 1)
    group_norm_means_kernel(const GroupNormBackward args, const Work work, const A* partials,
                            A* mean_g, A* mean_gh) {
  double sum[2] = {};
  const int64_t group = group_of_warp();
  const bool is_there =
      for_each_sum(args, work, group, [&](int64_t channel, int64_t, int64_t first) {
        const double weight = load_value(args.weight, args.weight_dtype, channel, A(1));
        sum[0] = multiply_add(weight, static_cast<double>(load_global(partials + first)), sum[0]);
        sum[1] = multiply_add(
            weight, static_cast<double>(load_global(partials + first + args.channels)), sum[1]);
      });
  if (!is_there) return;
  reduce_row(sum, kLanes, static_cast<double*>(nullptr));
  if (threadIdx.x % kLanes > 0) return;
  const double count = static_cast<double>(work.per_group * args.pixels);
  store_global(mean_g + group, static_cast<A>(sum[0] / count));
  store_global(mean_gh + group, static_cast<A>(sum[1] / count));
}

// The numbers that dinput of a channel needs.
template <class A>
struct GradientChannel {
  const Channel<A>& of;
  A mean_g;
  A mean_gh;
};

// dinput of a pack; channel_of(e): the numbers of an element's channel.
template <class Types>
__device__ __forceinline__ typename Types::Kept dinputs_of(const GroupNormBackward& args,
                                                           const typename Types::Kept& doutput,
                                                           const typename Types::Kept& x,
                                                           auto&& channel_of) {
  using A = typename Types::A;
  A dx[kPack];
  visit_silu(args, [&]<bool kSilu>() {
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      const GradientChannel<A> channel = channel_of(e);
      const Channel<A>& of = channel.of;
      const A h = (Types::value(x, e) - of.mean) * of.rstd;
      const A dz = dz_of<kSilu>(Types::value(doutput, e), h, of.weight, of.bias);
      // Not fused: the difference is exactly zero in a group of one element.
      dx[e] = multiply_add(-h, channel.mean_gh, dz * of.weight - channel.mean_g) * of.rstd;
    }
  });
  return Types::round(dx, args.input_dtype);
}

template <class Types, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1)
    group_norm_backward_kernel(const GroupNormBackward args, const Work work,
                               const typename Types::A* mean_g, const typename Types::A* mean_gh) {
  using A = typename Types::A;
  const PartRow row(args, work);
  if (!row.is_there) return;
  const Channel<A> of = share_channel<A>(args, work, args.mean, args.rstd, row.sample, row.channel);
  const int64_t group = row.sample * args.groups + row.channel / work.per_group;
  const A g = broadcast(read_once(mean_g + group)), gh = broadcast(read_once(mean_gh + group));
  for_each_pack<kAligned>(row, work, [&](const auto& columns, int64_t pack) {
    const auto x = Types::load(args.input, args.input_dtype,
                               row.offset(args, args.input_stride.batch), columns, pack);
    const auto d = Types::load(args.doutput, args.doutput_dtype,
                               row.offset(args, args.doutput_stride.batch), columns, pack);
    Types::store(args.dinput, args.input_dtype, row.offset(args, args.channels * args.pixels),
                 columns, pack,
                 dinputs_of<Types>(args, d, x, [&](int) { return GradientChannel<A>{of, g, gh}; }));
  });
}

template <class Types, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1)
    group_norm_pixel_backward_kernel(const GroupNormBackward args, const Work work,
                                     const typename Types::A* mean_g,
                                     const typename Types::A* mean_gh) {
  using A = typename Types::A;
  const Place place(args, work);
  const auto columns = place.columns<kAligned>(args, work);
  const Channels<A> channels = load_channels<A>(args, work, args.mean, args.rstd, place, columns);
  A g[kPack] = {}, gh[kPack] = {};
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    if (!columns.has(place.pixel_block, e)) continue;
    const int64_t group =
        place.sample * args.groups + columns.of(place.pixel_block, e) / work.per_group;
    g[e] = load_global(mean_g + group);
    gh[e] = load_global(mean_gh + group);
  }
  for (int64_t pixel = place.begin + place.row; pixel < place.end; pixel += place.rows) {
    const auto x = Types::load(args.input, args.input_dtype, place.offset(args.input_stride, pixel),
                               columns, place.pixel_block);
    const auto d =
        Types::load(args.doutput, args.doutput_dtype, place.offset(args.doutput_stride, pixel),
                    columns, place.pixel_block);
    Types::store(args.dinput, args.input_dtype,
                 (place.sample * args.pixels + pixel) * args.channels, columns, place.pixel_block,
                 dinputs_of<Types>(args, d, x, [&](int e) {
                   return GradientChannel<A>{channels.of[e], g[e], gh[e]};
                 }));
  }
}

// dbias by even blocks, dweight by odd ones: a column's sums over samples and parts.
template <class A>
__global__ void __launch_bounds__(kReduceThreads, 1)
    group_norm_weight_kernel(const GroupNormBackward args, const Work work, const A* partials) {
  SharedMemory shared;
  A* const sums = shared.take<A>(kReduceThreads);
  const bool is_weight = blockIdx.x % 2 == 1;
  void* const gradient = is_weight ? args.dweight : args.dbias;
  if (!gradient) return;
  const int64_t column =
      static_cast<int64_t>(blockIdx.x / 2) * kReduceColumns + threadIdx.x % kLanes;
  const bool has_column = column < args.channels;
  const A total =
      sum_of_parts(partials + (is_weight ? args.channels : 0) + column,
                   static_cast<int>(args.batch * work.parts), 2 * args.channels, has_column, sums);
  if (has_column && threadIdx.x < kLanes) {
    store_gradient(gradient, is_weight ? args.dweight_dtype : args.dbias_dtype, column, total);
  }
}

bool is_aligned(const GroupNormBackward& args) {
  const ImageStride dense{args.channels * args.pixels, args.channels};
  return has_packs(args, args.input, args.input_dtype, args.input_stride) &&
         has_packs(args, args.doutput, args.doutput_dtype, args.doutput_stride) &&
         has_packs(args, args.dinput, args.input_dtype, dense);
}

Plan plan_backward(const GroupNormBackward& args, const Machine&, Layout& layout) {
  const char* name =
      args.channels_last ? "group_norm_pixel_backward_kernel" : "group_norm_backward_kernel";
  return plan_of(args, name, is_aligned(args), layout);
}

void run_backward(const GroupNormBackward& args, const Plan& plan, const Layout& layout,
                  void* workspace, const Context& context) {
  const Work& work = layout.work;
  const bool same = args.input_dtype == args.doutput_dtype;
  visit_types(args, same, layout.aligned, [&]<class Types, bool kAligned>() {
    using A = typename Types::A;
    A* const partials = static_cast<A*>(workspace);
    A* const mean_g = partials + layout.statistics;
    A* const mean_gh = mean_g + args.batch * args.groups;
    const A* const sums = partials;
    const A* const g = mean_g;
    const A* const gh = mean_gh;
    LaunchShape shape{.blocks = plan.splits, .threads = kThreads};
    if (args.channels_last) {
      shape.shared_bytes = 2 * kThreads * kPack * sizeof(A);
      launch<group_norm_pixel_sums_kernel<Types, kAligned>>(shape, context.stream, args, work,
                                                            partials);
    } else {
      shape.shared_bytes = kReduceScratch<2> * sizeof(A);
      launch<group_norm_sums_kernel<Types, kAligned>>(shape, context.stream, args, work, partials);
    }
    if (args.dinput) {
      launch<group_norm_means_kernel<A>>(shape_of_groups(args), context.stream, args, work, sums,
                                         mean_g, mean_gh);
      const Work of_results = work_of_results(args, work);
      const LaunchShape results{.blocks = blocks_of(args, of_results), .threads = kThreads};
      if (args.channels_last) {
        launch<group_norm_pixel_backward_kernel<Types, kAligned>>(results, context.stream, args,
                                                                  of_results, g, gh);
      } else {
        launch<group_norm_backward_kernel<Types, kAligned>>(results, context.stream, args,
                                                            of_results, g, gh);
      }
    }
    if (args.dweight || args.dbias) {
      const LaunchShape columns{
          .blocks = 2 * ((args.channels + kReduceColumns - 1) / kReduceColumns),
          .threads = kReduceThreads,
          .shared_bytes = kReduceThreads * sizeof(A)};
      launch<group_norm_weight_kernel<A>>(columns, context.stream, args, work, sums);
    }
  });
}

}  // namespace

Operator<GroupNormBackward> group_norm_backward() {
  return operator_of<GroupNormBackward, Layout, plan_backward, run_backward>();
}

}  // namespace onepass::cuda
