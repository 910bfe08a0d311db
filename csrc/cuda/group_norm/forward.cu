// Group norm on CUDA, with or without silu, in three kernels (parts.cuh): mean and sum of squared
// deviations of each part of a channel, then of each group, then the results.
// Bytes per element: 2 input + output. Done when a call whose tensors fit into L2 runs at the speed
// of a copy.
#include "cuda/backend.h"
#include "cuda/group_norm/parts.cuh"

namespace onepass::cuda {
namespace {

template <class A>
__device__ __forceinline__ Moments<A> add_lanes(Moments<A> own) {
  ONEPASS_UNROLL
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    own.add({__shfl_xor_sync(kAllLanes, own.count, lanes),
             __shfl_xor_sync(kAllLanes, own.mean, lanes),
             __shfl_xor_sync(kAllLanes, own.squares, lanes)});
  }
  return own;
}

// The results of a pack; channel_of(e): the numbers of an element's channel.
template <class Types>
__device__ __forceinline__ typename Types::Kept outputs_of(const GroupNormForward& args,
                                                           const typename Types::Kept& x,
                                                           auto&& channel_of) {
  using A = typename Types::A;
  A y[kPack];
  visit_silu(args, [&]<bool kSilu>() {
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      const Channel<A> of = channel_of(e);
      const A z = multiply_add((Types::value(x, e) - of.mean) * of.rstd, of.weight, of.bias);
      y[e] = kSilu ? Activated<Activation::kSilu, A>(z).value() : z;
    }
  });
  return Types::round(y, args.output_dtype);
}

// Channels first: mean and sum of squared deviations of a part.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1)
    group_norm_moments_kernel(const GroupNormForward args, const Work work,
                              Accumulator<T>* partials) {
  using A = Accumulator<T>;
  SharedMemory shared;
  Moments<A>* const of_warps = shared.take<Moments<A>>(kWarps);
  const PartRow row(args, work);
  Moments<A> own{};
  if (row.is_there) {
    for_each_pack<kAligned>(row, work, [&](const auto& columns, int64_t pack) {
      const Raw<T> x =
          load_pack(static_cast<const T*>(args.input) + row.offset(args, args.input_stride.batch),
                    columns, pack);
      // The moments of the pack alone: it is in registers, so two passes cost no memory traffic.
      Moments<A> of{};
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) {
        if (!columns.has(pack, e)) continue;
        of.count += A(1);
        of.mean += element<T>(x, e);
      }
      of.mean = of.count > A(0) ? of.mean / of.count : A(0);
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) {
        const A d = columns.has(pack, e) ? element<T>(x, e) - of.mean : A(0);
        of.squares = multiply_add(d, d, of.squares);
      }
      own.add(of);
    });
  }
  own = add_lanes(own);
  if (work.threads_per_row > kLanes) {
    if (threadIdx.x % kLanes == 0) of_warps[threadIdx.x / kLanes] = own;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int warp = 1; warp < kWarps; ++warp) own.add(of_warps[warp]);
    }
  }
  if (!row.is_there || row.thread > 0) return;
  store_global(partials + row.sum(args, work), own.mean);
  store_global(partials + row.sum(args, work) + args.channels, own.squares);
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1)
    group_norm_pixel_moments_kernel(const GroupNormForward args, const Work work,
                                    Accumulator<T>* partials) {
  using A = Accumulator<T>;
  SharedMemory shared;
  A* const means = shared.take<A>(kThreads * kPack);
  A* const squares_of = shared.take<A>(kThreads * kPack);
  const Place place(args, work);
  const auto columns = place.columns<kAligned>(args, work);
  // Welford, Note on a method for calculating corrected sums of squares, 1962: one division for the
  // thread's eight channels.
  A mean[kPack] = {}, squares[kPack] = {};
  A count = 0;
  for (int64_t pixel = place.begin + place.row; pixel < place.end; pixel += place.rows) {
    const T* x = static_cast<const T*>(args.input) + place.offset(args.input_stride, pixel);
    const Raw<T> raw = load_pack(x, columns, place.pixel_block);
    count += A(1);
    const A share = A(1) / count;
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      const A d = element<T>(raw, e) - mean[e];
      mean[e] = multiply_add(d, share, mean[e]);
      squares[e] = multiply_add(d, element<T>(raw, e) - mean[e], squares[e]);
    }
  }
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    means[e * kThreads + static_cast<int>(threadIdx.x)] = mean[e];
    squares_of[e * kThreads + static_cast<int>(threadIdx.x)] = squares[e];
  }
  __syncthreads();
  if (place.row > 0) return;
  const int64_t pixels = place.end - place.begin;
  for (int e = 0; e < kPack; ++e) {
    if (!columns.has(place.pixel_block, e)) continue;
    Moments<A> all{};
    for (int row = 0; row < place.rows && row < pixels; ++row) {
      const int slot = e * kThreads + row * work.threads_per_row + place.thread;
      const int64_t own = (pixels - row + place.rows - 1) / place.rows;
      all.add({static_cast<A>(own), means[slot], squares_of[slot]});
    }
    A* const to = partials + place.sum(args, work, columns.of(place.pixel_block, e));
    store_global(to, all.mean);
    store_global(to + args.channels, all.squares);
  }
}

template <class A>
__global__ void __launch_bounds__(kThreads, 1)
    group_norm_statistics_kernel(const GroupNormForward args, const Work work, const A* partials,
                                 A* mean, A* rstd) {
  // In float64: these are few numbers, and their rounding errors would show in every element.
  Moments<double> own{};
  const int64_t group = group_of_warp();
  const bool is_there = for_each_sum(args, work, group, [&](int64_t, int64_t part, int64_t first) {
    const int64_t pixels = work.end_of(part, args.pixels) - part * work.step;
    own.add({static_cast<double>(pixels), load_global(partials + first),
             load_global(partials + first + args.channels)});
  });
  if (!is_there) return;
  own = add_lanes(own);
  if (threadIdx.x % kLanes > 0) return;
  store_global(mean + group, static_cast<A>(own.mean));
  store_global(rstd + group, static_cast<A>(inverse_root(own.squares / own.count, args.eps)));
}

template <class Types, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1)
    group_norm_forward_kernel(const GroupNormForward args, const Work work, const void* mean,
                              const void* rstd) {
  using A = typename Types::A;
  const PartRow row(args, work);
  if (!row.is_there) return;
  const Channel<A> of = share_channel<A>(args, work, mean, rstd, row.sample, row.channel);
  for_each_pack<kAligned>(row, work, [&](const auto& columns, int64_t pack) {
    const auto x = Types::load(args.input, args.input_dtype,
                               row.offset(args, args.input_stride.batch), columns, pack);
    Types::store(args.output, args.output_dtype, row.offset(args, args.channels * args.pixels),
                 columns, pack, outputs_of<Types>(args, x, [&](int) { return of; }));
  });
}

template <class Types, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1)
    group_norm_pixel_forward_kernel(const GroupNormForward args, const Work work, const void* mean,
                                    const void* rstd) {
  using A = typename Types::A;
  const Place place(args, work);
  const auto columns = place.columns<kAligned>(args, work);
  const Channels<A> channels = load_channels<A>(args, work, mean, rstd, place, columns);
  for (int64_t pixel = place.begin + place.row; pixel < place.end; pixel += place.rows) {
    const auto x = Types::load(args.input, args.input_dtype, place.offset(args.input_stride, pixel),
                               columns, place.pixel_block);
    Types::store(args.output, args.output_dtype,
                 (place.sample * args.pixels + pixel) * args.channels, columns, place.pixel_block,
                 outputs_of<Types>(args, x, [&](int e) { return channels.of[e]; }));
  }
}

bool is_aligned(const GroupNormForward& args) {
  const ImageStride dense{args.channels * args.pixels, args.channels};
  return has_packs(args, args.input, args.input_dtype, args.input_stride) &&
         has_packs(args, args.output, args.output_dtype, dense);
}

Plan plan_forward(const GroupNormForward& args, const Machine&, Layout& layout) {
  const char* name =
      args.channels_last ? "group_norm_pixel_forward_kernel" : "group_norm_forward_kernel";
  return plan_of(args, name, is_aligned(args), layout);
}

template <class A>
void run_statistics(const GroupNormForward& args, const Layout& layout, int64_t blocks, A* partials,
                    A* mean, A* rstd, const Context& context) {
  const Work& work = layout.work;
  visit_bool(layout.aligned, [&]<bool kAligned>() {
    visit_dtype(args.input_dtype, [&]<class T>() {
      if constexpr (std::is_same_v<Accumulator<T>, A>) {
        if (args.channels_last) {
          const LaunchShape shape{.blocks = blocks,
                                  .threads = kThreads,
                                  .shared_bytes = 2 * kThreads * kPack * sizeof(A)};
          launch<group_norm_pixel_moments_kernel<T, kAligned>>(shape, context.stream, args, work,
                                                               partials);
        } else {
          const LaunchShape shape{.blocks = blocks,
                                  .threads = kThreads,
                                  .shared_bytes = (kWarps * sizeof(Moments<A>) + 15) / 16 * 16};
          launch<group_norm_moments_kernel<T, kAligned>>(shape, context.stream, args, work,
                                                         partials);
        }
      }
    });
  });
  launch<group_norm_statistics_kernel<A>>(shape_of_groups(args), context.stream, args, work,
                                          static_cast<const A*>(partials), mean, rstd);
}

void run_forward(const GroupNormForward& args, const Plan& plan, const Layout& layout,
                 void* workspace, const Context& context) {
  const Work work = work_of_results(args, layout.work);
  const LaunchShape shape{.blocks = blocks_of(args, work), .threads = kThreads};
  visit_types(args, args.input_dtype == args.output_dtype, layout.aligned,
              [&]<class Types, bool kAligned>() {
                using A = typename Types::A;
                A* const partials = static_cast<A*>(workspace);
                A* const own = partials + layout.statistics;
                A* const mean = args.mean ? static_cast<A*>(args.mean) : own;
                A* const rstd =
                    args.rstd ? static_cast<A*>(args.rstd) : own + args.batch * args.groups;
                run_statistics<A>(args, layout, plan.splits, partials, mean, rstd, context);
                const void* mean_in = mean;
                const void* rstd_in = rstd;
                if (args.channels_last) {
                  launch<group_norm_pixel_forward_kernel<Types, kAligned>>(
                      shape, context.stream, args, work, mean_in, rstd_in);
                } else {
                  launch<group_norm_forward_kernel<Types, kAligned>>(shape, context.stream, args,
                                                                     work, mean_in, rstd_in);
                }
              });
}

}  // namespace

Operator<GroupNormForward> group_norm_forward() {
  return operator_of<GroupNormForward, Layout, plan_forward, run_forward>();
}

}  // namespace onepass::cuda
