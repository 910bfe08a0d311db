// How the kernels of group norm divide the work of a call, and the code that they share.
//
// Groups are few and large. So pixels are divided into parts, by the shape alone, and the first
// kernel writes two sums for each part of a channel. In the second, one warp adds up the sums of a
// group. The third has the parts of the first: it reads the input again, from L2 if it fits, and
// writes the results.
// With channels first, a row is a part of a channel, and a warp or a block has one row. With
// channels last, a block has a part of the pixels of a sample, and each thread has eight channels
// of some of these pixels.
#pragma once

#include "cuda/activation.cuh"
#include "cuda/launch.cuh"
#include "cuda/row_sums.cuh"
#include "ops/group_norm.h"

namespace onepass::cuda {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / kLanes;
inline constexpr int64_t kPartPixels = 1024;  // least of a part with channels first
inline constexpr int64_t kLastPixels = 32;    // least of a part with channels last
inline constexpr int64_t kMaxParts = 64;

// How the work of a call is divided among blocks and threads.
struct Work {
  int64_t parts;
  int64_t step;          // pixels of a part, but for the last: a multiple of a pack
  int threads_per_row;   // a row: a channel's part, or a pixel's channels
  int64_t pixel_blocks;  // of channels last: blocks that share a pixel
  int64_t per_group;     // channels

  ONEPASS_HOST_DEVICE int64_t end_of(int64_t part, int64_t pixels) const {
    const int64_t end = (part + 1) * step;
    return end < pixels ? end : pixels;
  }
};

inline Work work_of(const GroupNorm& args) {
  Work work{};
  work.per_group = args.channels / args.groups;
  const int64_t least = args.channels_last ? kLastPixels : kPartPixels;
  int64_t parts = args.pixels / least;
  parts = parts < 1 ? 1 : parts > kMaxParts ? kMaxParts : parts;
  work.step = ((args.pixels + parts - 1) / parts + kPack - 1) / kPack * kPack;
  work.parts = (args.pixels + work.step - 1) / work.step;
  if (args.channels_last) {
    const int64_t packs = (args.channels + kPack - 1) / kPack;
    work.threads_per_row = 1;
    while (work.threads_per_row < kThreads && work.threads_per_row < packs) {
      work.threads_per_row *= 2;
    }
    work.pixel_blocks = (packs + work.threads_per_row - 1) / work.threads_per_row;
  } else {
    work.threads_per_row = work.step <= kLanes * kPack ? kLanes : kThreads;
    work.pixel_blocks = 1;
  }
  return work;
}

// The work of the kernel that writes the results. It adds nothing up, so a warp may take a row of
// eight packs per lane: to find a thread's place costs as many instructions as a pack.
inline Work work_of_results(const GroupNorm& args, Work work) {
  if (!args.channels_last && work.step < 2 * kPartPixels) work.threads_per_row = kLanes;
  return work;
}

inline int64_t blocks_of(const GroupNorm& args, const Work& work) {
  if (args.channels_last) return args.batch * work.parts * work.pixel_blocks;
  const int64_t rows_per_block = kThreads / work.threads_per_row;
  const int64_t rows = args.batch * args.channels * work.parts;
  return (rows + rows_per_block - 1) / rows_per_block;
}

// The numbers that one channel needs.
template <class A>
struct Channel {
  A mean;
  A rstd;
  A weight;
  A bias;
};

// Calls f.operator()<whether there is silu>(), once for a pack: a branch for each element would
// leave nothing to do while its exponential is computed.
template <class F>
__device__ __forceinline__ void visit_silu(const GroupNorm& args, F&& f) {
  visit_bool(args.activation != Activation::kNone, f);
}

template <class A>
__device__ __forceinline__ A load_value(const void* base, DType dtype, int64_t index, A missing) {
  if (!base) return missing;
  if constexpr (sizeof(A) == 8) {
    return load_global(static_cast<const double*>(base) + index);
  } else {
    A value{};
    visit_dtype_up_to_float32(
        dtype, [&]<class T>() { value = widen(load_global(static_cast<const T*>(base) + index)); });
    return value;
  }
}

// Loads the numbers of a sample's channel, in one thread; mean and rstd are those of its group.
template <class A>
__device__ __forceinline__ Channel<A> load_channel(const GroupNorm& args, const Work& work,
                                                   const void* mean, const void* rstd,
                                                   int64_t sample, int64_t channel) {
  const int64_t group = sample * args.groups + channel / work.per_group;
  return {load_global(static_cast<const A*>(mean) + group),
          load_global(static_cast<const A*>(rstd) + group),
          load_value(args.weight, args.weight_dtype, channel, A(1)),
          load_value(args.bias, args.bias_dtype, channel, A(0))};
}

// The same for all lanes of a warp: one lane loads, the others receive.
template <class A>
__device__ __forceinline__ Channel<A> share_channel(const GroupNorm& args, const Work& work,
                                                    const void* mean, const void* rstd,
                                                    int64_t sample, int64_t channel) {
  Channel<A> of{};
  if (threadIdx.x % kLanes == 0) of = load_channel<A>(args, work, mean, rstd, sample, channel);
  return {broadcast(of.mean), broadcast(of.rstd), broadcast(of.weight), broadcast(of.bias)};
}

// ---- channels first: the place of a thread -----------------------------------------------------

struct PartRow {
  int64_t sample;
  int64_t channel;
  int64_t part;
  int64_t begin;  // pixels
  int64_t cols;
  int thread;
  bool is_there;

  __device__ __forceinline__ PartRow(const GroupNorm& args, const Work& work) {
    const int rows_per_block = kThreads / work.threads_per_row;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * rows_per_block +
                        static_cast<int>(threadIdx.x) / work.threads_per_row;
    thread = static_cast<int>(threadIdx.x) % work.threads_per_row;
    const int64_t of_channel = row / work.parts;
    part = row - of_channel * work.parts;
    sample = of_channel / args.channels;
    channel = of_channel - sample * args.channels;
    begin = part * work.step;
    cols = work.end_of(part, args.pixels) - begin;
    is_there = sample < args.batch;
  }

  __device__ __forceinline__ int64_t offset(const GroupNorm& args, int64_t batch_stride) const {
    return sample * batch_stride + channel * args.pixels + begin;
  }
  // The index of the first of the part's two sums.
  __device__ __forceinline__ int64_t sum(const GroupNorm& args, const Work& work) const {
    return (sample * work.parts + part) * 2 * args.channels + channel;
  }
};

// Calls body(columns, pack) for each pack of a thread. With kAligned it has all its elements, and
// the compiler knows it.
template <bool kAligned, class Body>
__device__ __forceinline__ void for_each_pack(const PartRow& row, const Work& work, Body&& body) {
  const StridedColumns<kAligned> columns{work.threads_per_row, row.thread, row.cols};
  for (int64_t pack = 0; columns.has(pack, 0); ++pack) body(columns, pack);
}

// ---- channels last: the place of a thread ------------------------------------------------------

struct Place {
  int64_t sample;
  int64_t part;
  int64_t pixel_block;
  int64_t begin;  // pixels
  int64_t end;
  int rows;  // pixels that a block takes side by side
  int row;
  int thread;

  __device__ __forceinline__ Place(const GroupNorm& args, const Work& work) {
    const int64_t block = static_cast<int64_t>(blockIdx.x);
    const int64_t of_part = block / work.pixel_blocks;
    pixel_block = block - of_part * work.pixel_blocks;
    sample = of_part / work.parts;
    part = of_part - sample * work.parts;
    begin = part * work.step;
    end = work.end_of(part, args.pixels);
    rows = kThreads / work.threads_per_row;
    row = static_cast<int>(threadIdx.x) / work.threads_per_row;
    thread = static_cast<int>(threadIdx.x) % work.threads_per_row;
  }

  __device__ __forceinline__ int64_t offset(const ImageStride& stride, int64_t pixel) const {
    return sample * stride.batch + pixel * stride.pixel;
  }
  // The index of the first of the two sums of a channel's part.
  __device__ __forceinline__ int64_t sum(const GroupNorm& args, const Work& work,
                                         int64_t channel) const {
    return (sample * work.parts + part) * 2 * args.channels + channel;
  }

  template <bool kAligned>
  __device__ __forceinline__ StridedColumns<kAligned> columns(const GroupNorm& args,
                                                              const Work& work) const {
    return {work.threads_per_row, thread, args.channels};
  }
};

// The numbers of a thread's eight channels.
template <class A>
struct Channels {
  Channel<A> of[kPack];
};

// One of the numbers of these channels, by element: a weight or a bias. All of them have one dtype;
// with its branch inside the loop the code for sm_100 is three times as long.
template <class A, class Columns, class Body>
__device__ __forceinline__ void for_each_value(const void* base, DType dtype, A missing,
                                               const Columns& columns, int64_t pixel_block,
                                               Body&& body) {
  const auto each = [&](auto&& value) {
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      if (columns.has(pixel_block, e)) body(e, value(columns.of(pixel_block, e)));
    }
  };
  if (!base) {
    each([&](int64_t) { return missing; });
  } else if constexpr (sizeof(A) == 8) {
    each([&](int64_t channel) { return load_global(static_cast<const double*>(base) + channel); });
  } else {
    visit_dtype_up_to_float32(dtype, [&]<class T>() {
      each([&](int64_t channel) {
        return widen(load_global(static_cast<const T*>(base) + channel));
      });
    });
  }
}

template <class A, class Columns>
__device__ __forceinline__ Channels<A> load_channels(const GroupNorm& args, const Work& work,
                                                     const void* mean, const void* rstd,
                                                     const Place& place, const Columns& columns) {
  Channels<A> channels{};
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    if (!columns.has(place.pixel_block, e)) continue;
    const int64_t group =
        place.sample * args.groups + columns.of(place.pixel_block, e) / work.per_group;
    channels.of[e].mean = load_global(static_cast<const A*>(mean) + group);
    channels.of[e].rstd = load_global(static_cast<const A*>(rstd) + group);
  }
  for_each_value(args.weight, args.weight_dtype, A(1), columns, place.pixel_block,
                 [&](int e, A value) { channels.of[e].weight = value; });
  for_each_value(args.bias, args.bias_dtype, A(0), columns, place.pixel_block,
                 [&](int e, A value) { channels.of[e].bias = value; });
  return channels;
}

// ---- a warp for each group ---------------------------------------------------------------------

// Calls body(channel, part, index of the first sum) for a lane's share of a group's sums; returns
// false if there is no such group.
template <class Body>
__device__ __forceinline__ bool for_each_sum(const GroupNorm& args, const Work& work,
                                             int64_t number, Body&& body) {
  if (number >= args.batch * args.groups) return false;
  const int64_t sample = number / args.groups;
  const int64_t first = (number - sample * args.groups) * work.per_group;
  for (int64_t i = threadIdx.x % kLanes; i < work.parts * work.per_group; i += kLanes) {
    const int64_t part = i / work.per_group;
    const int64_t channel = first + i - part * work.per_group;
    body(channel, part, (sample * work.parts + part) * 2 * args.channels + channel);
  }
  return true;
}

__device__ __forceinline__ int64_t group_of_warp() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
}

// ---- calls -------------------------------------------------------------------------------------

// Whether all packs of a tensor begin at multiples of 16 bytes.
inline bool has_packs(const GroupNorm& args, const void* base, DType dtype,
                      const ImageStride& stride) {
  const int64_t row = args.channels_last ? args.channels : args.pixels;
  const int64_t size = size_of(dtype);
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && row % kPack == 0 &&
         (args.batch == 1 || stride.batch * size % 16 == 0) &&
         (!args.channels_last || args.pixels == 1 || stride.pixel * size % 16 == 0);
}

inline int64_t accumulator_size_of(const GroupNorm& args) {
  return args.input_dtype == DType::kFloat64 ? 8 : 4;
}

// The decisions of a plan.
struct Layout {
  Work work;
  bool aligned;
  int64_t statistics;  // (2, batch, groups) accumulators begin here, after the sums of parts
};

inline Plan plan_of(const GroupNorm& args, const char* kernel_name, bool aligned, Layout& layout) {
  const Work& work = layout.work = work_of(args);
  layout.aligned = aligned;
  layout.statistics = 2 * args.batch * work.parts * args.channels;
  const int64_t values = layout.statistics + 2 * args.batch * args.groups;
  return {.workspace_bytes = values * accumulator_size_of(args),
          .kernel_name = kernel_name,
          .rows_per_tile = kThreads / work.threads_per_row,
          .splits = blocks_of(args, work),
          .reason = aligned ? "16-byte accesses" : "unaligned: single elements"};
}

// Calls start<Types, kAligned>().
template <class Args, class Start>
void visit_types(const Args& args, bool same, bool aligned, Start&& start) {
  visit_bool(aligned, [&]<bool kAligned>() {
    if (!same) return start.template operator()<Mixed, kAligned>();
    visit_dtype(args.input_dtype,
                [&]<class T>() { start.template operator()<Same<T>, kAligned>(); });
  });
}

inline LaunchShape shape_of_groups(const GroupNorm& args) {
  const int64_t groups = args.batch * args.groups;
  return {.blocks = (groups + kWarps - 1) / kWarps, .threads = kThreads};
}

}  // namespace onepass::cuda
