// How both directions of group norm divide a call into units and parts, their workspace, and the
// numbers that a channel needs.
//
// With channels first a unit of work is a group, a run of memory; with channels last it is a
// sample, whose pixels are rows of channels. A unit is cut into parts by the shape alone, each part
// is summed on its own, and the parts' sums are added in order: the same bits for any number of
// threads, and an error that does not grow with the image. A thread computes both sweeps of a unit.
// Where that would leave other threads without work, all threads take parts, one sweep at a time.
#pragma once

#include "core/visit.h"
#include "cpu/lines.h"
#include "cpu/normed_rows.h"
#include "cpu/parallel.h"
#include "cpu/pieces.h"
#include "cpu/row_sums.h"
#include "ops/group_norm.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// Elements of a part with channels first: a part in float32 fits into L1.
inline constexpr int64_t kPart = 4096;
// The fewest pixels of a part with channels last, and the most parts of a sample.
inline constexpr int64_t kPartPixels = 256;
inline constexpr int64_t kMaxParts = 64;
// Pixels that share each load of a channel's numbers.
inline constexpr int kPixelsPerBlock = 4;

// The largest dz of a unit, in accumulators, that the backward keeps between its sweeps: with x and
// doutput it must fit into L2.
inline constexpr int64_t kMostKept = int64_t{384} << 10;

// The rate of work instead of kBytes where silu is computed, as in gated activations.
inline constexpr int64_t kActivationBytes = 16;

inline const char* at(const void* base, DType dtype, int64_t element) {
  return static_cast<const char*>(base) + element * size_of(dtype);
}
inline char* at(void* base, DType dtype, int64_t element) {
  return static_cast<char*>(base) + element * size_of(dtype);
}

inline int64_t accumulator_size_of(const GroupNorm& args) {
  return args.input_dtype == DType::kFloat64 ? 8 : 4;
}

inline bool has_silu(const GroupNorm& args) { return args.activation != Activation::kNone; }

// The part [begin, end) of a unit: elements of the run of a group, or pixels of a sample.
struct PartRange {
  int64_t begin;
  int64_t end;
};

// How a call is divided. The backward sums each channel on its own, so its parts end with channels.
struct Cut {
  int64_t units;
  int64_t parts;             // of a unit
  int64_t parts_of_channel;  // of a backward with channels first, else 0

  PartRange part(const GroupNorm& args, int64_t number) const {
    if (args.channels_last) {
      return {args.pixels * number / parts, args.pixels * (number + 1) / parts};
    }
    if (parts_of_channel > 0) {
      const int64_t begin = number / parts_of_channel * args.pixels;
      const int64_t first = number % parts_of_channel * kPart;
      return {begin + first, begin + std::min(first + kPart, args.pixels)};
    }
    const int64_t run = args.channels / args.groups * args.pixels;
    return {number * kPart, std::min((number + 1) * kPart, run)};
  }
};

inline Cut cut_of(const GroupNorm& args, bool backward) {
  if (args.channels_last) {
    return {args.batch, std::clamp<int64_t>(args.pixels / kPartPixels, 1, kMaxParts), 0};
  }
  const int64_t channels = args.channels / args.groups;
  if (!backward) return {args.batch * args.groups, ceil_div(channels * args.pixels, kPart), 0};
  const int64_t parts = ceil_div(args.pixels, kPart);
  return {args.batch * args.groups, channels * parts, parts};
}

// Calls sum(unit, part, slot) for all parts, finish(unit, slot) for units whose parts are summed,
// then apply(unit, part, slot); each thread has its own slot. by_units: a thread takes whole units.
template <class Sum, class Finish, class Apply>
void for_each_unit(const Context& context, int64_t threads, const Cut& cut, bool by_units,
                   Sum&& sum, Finish&& finish, Apply&& apply) {
  const auto spread = [&](int64_t count, auto&& body) {
    const int64_t share = ceil_div(count, threads);
    for_each_piece(context, threads, count, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(i, begin / share);
    });
  };
  if (by_units) {
    spread(cut.units, [&](int64_t unit, int64_t slot) {
      for (int64_t part = 0; part < cut.parts; ++part) sum(unit, part, slot);
      finish(unit, slot);
      for (int64_t part = 0; part < cut.parts; ++part) apply(unit, part, slot);
    });
    return;
  }
  spread(cut.units * cut.parts,
         [&](int64_t i, int64_t slot) { sum(i / cut.parts, i % cut.parts, slot); });
  spread(cut.units, finish);
  spread(cut.units * cut.parts,
         [&](int64_t i, int64_t slot) { apply(i / cut.parts, i % cut.parts, slot); });
}

// The numbers of a channel that its results need: one number each, or rows of channels.
template <class A>
struct Channel {
  A mean;
  A rstd;
  A weight;
  A bias;
  A offset;  // of the backward
  A slope;   // of the backward
};
template <class A>
struct Channels {  // (channels,) each
  const A* mean;
  const A* rstd;
  const A* weight;
  const A* bias;
  const A* offset;
  const A* slope;
};

// Calls body(pixel, std::integral_constant pixels) over [0, count), kPixelsPerBlock at a time.
template <class Body>
ONEPASS_INLINE void for_each_pixel_block(int64_t count, Body&& body) {
  int64_t pixel = 0;
  for (; pixel + kPixelsPerBlock <= count; pixel += kPixelsPerBlock) {
    body(pixel, std::integral_constant<int, kPixelsPerBlock>{});
  }
  for (; pixel < count; ++pixel) body(pixel, std::integral_constant<int, 1>{});
}

// Rows of a thread's scratch, `size` accumulators each.
template <class A>
struct Scratch {
  A* base;
  int64_t size;
  A* row(int64_t number) const { return base + number * size; }
};
inline constexpr int64_t kScratchRows = 6;

// Bytes that the forward keeps of a part and, with channels last, of a group.
inline constexpr int64_t kMomentsBytes = 32;

// Offsets in the workspace, in bytes.
struct Layout {
  Cut cut;
  int64_t row;         // accumulators of a row of channels, padded
  int64_t weight;      // (channels,)
  int64_t bias;        // (channels,)
  int64_t statistics;  // (batch, groups) mean, then rstd, or offset and slope: accumulators
  int64_t sums;        // of channels: backward (batch, 2, row)
  int64_t parts;       // Moments or accumulators of each part
  Slots slots;         // of each thread: kScratchRows rows, and a unit's dz
  bool by_units;       // a thread computes both sweeps of a unit, else parts of any unit
  bool keeps;          // keeps dz between the sweeps: in dinput if it has accumulators, else here
};

// element_bytes: traffic per element; keeps: whether dz may be kept between sweeps, if it fits L2.
inline Plan plan_of(const GroupNorm& args, const Machine& machine, Layout& layout, bool backward,
                    int64_t element_bytes, bool keeps) {
  const int64_t size = accumulator_size_of(args);
  const int64_t row_bytes = padded_bytes(args.channels, size);
  const int64_t statistics = args.batch * args.groups;
  layout.cut = cut_of(args, backward);
  layout.row = row_bytes / size;
  const int64_t units = layout.cut.units;
  const int64_t parts = units * layout.cut.parts;
  const int64_t rate = has_silu(args) ? kActivationBytes : kBytes;
  const int64_t threads =
      threads_for(args.batch * args.channels * args.pixels * element_bytes / rate, parts, machine);
  layout.by_units = threads == 1 || units % threads == 0 || units >= 4 * threads;
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    const int64_t begin = used;
    used += round_up(bytes, 64);
    return begin;
  };
  layout.weight = take(row_bytes);
  layout.bias = take(row_bytes);
  layout.statistics = take(2 * statistics * size);
  if (backward) {
    layout.parts = take(parts * 2 * (args.channels_last ? row_bytes : size));
    // With channels last the sums of a single part are those of its sample.
    const bool is_whole = args.channels_last && layout.cut.parts == 1;
    layout.sums = is_whole ? layout.parts : take(2 * args.batch * row_bytes);
  } else {
    const int64_t moments = args.channels_last ? args.groups : 1;
    layout.parts = take(parts * moments * kMomentsBytes);
  }
  const int64_t kept = args.batch * args.channels * args.pixels / units * size;
  layout.keeps = keeps && kept <= kMostKept && layout.by_units;
  layout.slots = {.begin = used, .bytes = args.channels_last ? kScratchRows * row_bytes : 0};
  if (layout.keeps && size_of(args.input_dtype) != size) {
    layout.slots.bytes += round_up(kept, 64);
  }
  return {.workspace_bytes = layout.slots.end(threads),
          .kernel_name = backward ? "group_norm_backward_kernel" : "group_norm_forward_kernel",
          .rows_per_tile = 1,
          .splits = parts,
          .reason = threads > 1 ? "groups spread over threads" : "too small for a parallel region",
          .threads = threads};
}

// The facts of a call that both directions need.
template <class A>
class Call {
 public:
  Call(const GroupNorm& args, const Layout& layout, void* workspace)
      : args_(args), layout_(layout), workspace_(static_cast<char*>(workspace)) {
    weight_ =
        widened<A>(args.weight, args.weight_dtype, 0.0, 1.0, args.channels, in<A>(layout.weight));
    bias_ = widened<A>(args.bias, args.bias_dtype, 0.0, 0.0, args.channels, in<A>(layout.bias));
  }

  int64_t per_group() const { return args_.channels / args_.groups; }

  template <class T>
  T* in(int64_t offset) const {
    return reinterpret_cast<T*>(workspace_ + offset);
  }
  Scratch<A> scratch(int64_t slot) const {
    return {static_cast<A*>(layout_.slots.of(workspace_, slot)), layout_.row};
  }

  // Offset of a tensor's element where a part of a unit begins.
  int64_t begin_of(int64_t unit, const PartRange& part, const ImageStride& stride) const {
    if (args_.channels_last) return unit * stride.batch + part.begin * stride.pixel;
    return unit / args_.groups * stride.batch + unit % args_.groups * per_group() * args_.pixels +
           part.begin;
  }
  // The same in a dense tensor.
  int64_t begin_of(int64_t unit, const PartRange& part) const {
    return begin_of(unit, part,
                    {args_.channels * args_.pixels, args_.channels_last ? args_.channels : 1});
  }

  // Calls body(channel, first element of the part, elements) for the channels of a part of a group.
  template <class Body>
  void for_each_channel(int64_t unit, const PartRange& part, Body&& body) const {
    const int64_t first = unit % args_.groups * per_group();
    for (int64_t begin = part.begin; begin < part.end;) {
      const int64_t channel = begin / args_.pixels;
      const int64_t end = std::min(part.end, (channel + 1) * args_.pixels);
      body(first + channel, begin - part.begin, end - begin);
      begin = end;
    }
  }

  // Spreads a number per group of a sample over a row of channels.
  const A* spread(const A* of_groups, int64_t sample, A* row) const {
    const A* from = of_groups + sample * args_.groups;
    for (int64_t group = 0; group < args_.groups; ++group) {
      std::fill(row + group * per_group(), row + (group + 1) * per_group(), from[group]);
    }
    return row;
  }

  const A* weight() const { return weight_; }
  const A* bias() const { return bias_; }

 private:
  const GroupNorm& args_;
  const Layout& layout_;
  char* workspace_;
  const A* weight_;
  const A* bias_;
};

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
