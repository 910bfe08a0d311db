// The backward of group norm, with or without silu after it: every gradient in two sweeps.
//
// With h = (x - mean) * rstd over a group, z = h * weight + bias and dz = dy * silu'(z):
//   g = dz * weight, dx = rstd * (g - mean(g) - h * mean(g * h))
//   dweight = sum over samples and pixels of dz * h, dbias = sum over samples and pixels of dz.
// z is computed again in each sweep, so nothing is kept but x, mean and rstd. Bytes per element:
// 2 dy + 2 x + dx, where the second reading comes from L2 as long as a unit of work fits there.
// Done when it runs at the speed of memory for dy + x + dx.
#include "cpu/group_norm/silu.h"
#include "cpu/group_norm/units.h"
#include "cpu/kernels.h"
#include "cpu/sums.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

// Channels first, 16-bit elements are read and written two vectors at a time.
template <class D, class X>
inline constexpr bool kTwo = __is_same(D, X) && sizeof(X) == 2;

// The one with more digits.
template <class T, class U>
using Wider = std::conditional_t<(sizeof(T) >= sizeof(U)), T, U>;

// {sum of dz, sum of dz * h} of a channel's part; dz goes to `kept` unless that is null, two
// vectors at a time in the order of x.
template <class A, class D, class X, bool kSilu>
std::array<A, 2> run_gradients(const void* doutput_, const void* x_, int64_t count,
                               const Channel<A>& channel, A* kept) {
  const D* doutput = static_cast<const D*>(doutput_);
  const X* x = static_cast<const X*>(x_);
  const Vec<A> mean = broadcast<A>(channel.mean), bias = broadcast<A>(channel.bias);
  const Vec<A> scale = broadcast<A>(channel.rstd * channel.weight);
  // Adds dz and dz * (x - mean) to the sums; returns dz. V is Vec<A> or Two<A>.
  const auto add = [&]<class V>(Vec<A>* sum, V d, const V& of_x) __attribute__((always_inline)) {
    const V centred = each<A>([&](Vec<A> v) { return v - mean; }, of_x);
    if constexpr (kSilu) d = times_silu_slope<A, Wider<D, X>>(d, z_of<A>(centred, scale, bias));
    return each<A>(
        [&](Vec<A> dz, Vec<A> v) {
          sum[0] += dz;
          sum[1] = fma<A>(dz, v, sum[1]);
          return dz;
        },
        d, centred);
  };
  const auto times_rstd = [&](std::array<A, 2> sums) {
    return std::array<A, 2>{sums[0], sums[1] * channel.rstd};
  };
  const auto one = [&](Vec<A>* sum, int64_t j, auto lanes) __attribute__((always_inline)) {
    if constexpr (decltype(lanes)::kWhole) {
      prefetch_ahead(x + j);
      prefetch_ahead(doutput + j);
    }
    const Vec<A> d = add(sum, load<A>(doutput + j, lanes), load<A>(x + j, lanes));
    if (kSilu && kept) store<A>(kept + j, d, lanes);
  };
  if constexpr (!kTwo<D, X>) {
    return times_rstd(sum_columns<A, 2>(count, one));
  } else {
    const auto two = [&](Vec<A>* sum, int64_t j) __attribute__((always_inline)) {
      const Two<A> d = add(sum, load_two<true, A>(doutput + j), load_two<true, A>(x + j));
      if (kSilu && kept) store_two<false, A>(kept + j, d);
    };
    return times_rstd(sum_twos<A, 2>(count, two, one));
  }
}

// The same sums for each channel, in two rows of `total`; `kept` (pixels, channels).
template <class A, class D, class X, bool kSilu>
void pixel_gradients(const void* doutput_, int64_t doutput_stride, const void* x_, int64_t x_stride,
                     int64_t pixels, int64_t channels, const Channels<A>& of, A* total, A* run,
                     int64_t size, A* kept) {
  const D* doutput = static_cast<const D*>(doutput_);
  const X* x = static_cast<const X*>(x_);
  std::fill(total, total + 2 * size, A(0));
  for_each_run(0, pixels, kRunRows, total, run, 2 * size, [&](int64_t begin, int64_t end) {
    for_each_pixel_block(end - begin, [&](int64_t pixel, auto count) {
      const D* d_rows = doutput + (begin + pixel) * doutput_stride;
      const X* x_rows = x + (begin + pixel) * x_stride;
      for_each_vector<A>(0, channels, [&](int64_t j, auto lanes) {
        const Vec<A> mean = load<A>(of.mean + j, lanes), rstd = load<A>(of.rstd + j, lanes);
        const Vec<A> scale = rstd * load<A>(of.weight + j, lanes);
        const Vec<A> bias = load<A>(of.bias + j, lanes);
        Vec<A> sum = load<A>(run + j, lanes), sum_h = load<A>(run + size + j, lanes);
        for (int p = 0; p < count; ++p) {
          prefetch_ahead(x_rows + p * x_stride + j);
          prefetch_ahead(d_rows + p * doutput_stride + j);
          const Vec<A> centred = load<A>(x_rows + p * x_stride + j, lanes) - mean;
          Vec<A> d = load<A>(d_rows + p * doutput_stride + j, lanes);
          if constexpr (kSilu) {
            d = times_silu_slope<A, Wider<D, X>>(d, z_of<A>(centred, scale, bias));
            if (kept) store<A>(kept + (begin + pixel + p) * channels + j, d, lanes);
          }
          sum += d;
          sum_h = fma<A>(d, centred * rstd, sum_h);
        }
        store<A>(run + j, sum, lanes);
        store<A>(run + size + j, sum_h, lanes);
      });
    });
  });
}

// The numbers of a channel in vectors.
template <class A>
struct GradientTerms {
  Vec<A> mean;
  Vec<A> rstd;
  Vec<A> weight;
  Vec<A> bias;
  Vec<A> offset;
  Vec<A> slope;
};

// scalar: dz = doutput[j] * silu'((x[j] - mean) * (rstd * weight) + bias)
//         dx[j] = dz * (rstd * weight) - ((x[j] - mean) * slope + offset)
// V is Vec<A> or Two<A>.
template <class A, class D, class X, bool kSilu, class V>
ONEPASS_INLINE V gradient_of(V d, const V& x, const GradientTerms<A>& of) {
  const V centred = each<A>([&](Vec<A> v) { return v - of.mean; }, x);
  const Vec<A> scale = of.rstd * of.weight;
  if constexpr (kSilu) d = times_silu_slope<A, Wider<D, X>>(d, z_of<A>(centred, scale, of.bias));
  // dz * scale is rounded, as in offset: the gradient of a group of one element is exactly zero.
  return each<A>([&](Vec<A> dz, Vec<A> v) { return dz * scale - fma<A>(v, of.slope, of.offset); },
                 d, centred);
}

// kInTwos: two vectors of doutput at a time have the order of x.
template <class A, class D, class X, bool kSilu, bool kInTwos>
void run_dinput(const void* doutput_, const void* x_, void* dx_, int64_t count,
                const Channel<A>& channel) {
  const D* doutput = static_cast<const D*>(doutput_);
  const X* x = static_cast<const X*>(x_);
  X* dx = static_cast<X*>(dx_);
  const GradientTerms<A> of{
      .mean = broadcast<A>(channel.mean),
      .rstd = broadcast<A>(channel.rstd),
      .weight = broadcast<A>(channel.weight),
      .bias = broadcast<A>(channel.bias),
      .offset = broadcast<A>(channel.offset),
      .slope = broadcast<A>(channel.slope),
  };
  const auto one = [&](int64_t j, auto lanes) {
    const Vec<A> d = load<A>(doutput + j, lanes), v = load<A>(x + j, lanes);
    store<A>(dx + j, gradient_of<A, D, X, kSilu>(d, v, of), lanes);
  };
  if constexpr (kInTwos) {
    for_each_two<A>(
        count,
        [&](int64_t j) {
          const Two<A> d = load_two<false, A>(doutput + j), v = load_two<false, A>(x + j);
          store_two<false, A>(dx + j, gradient_of<A, D, X, kSilu>(d, v, of));
        },
        one);
  } else {
    for_each_vector<A>(0, count, one);
  }
}

template <class A, class D, class X, bool kSilu>
void pixel_dinput(const void* doutput_, int64_t doutput_stride, const void* x_, int64_t x_stride,
                  void* dx_, int64_t pixels, int64_t channels, const Channels<A>& of) {
  const D* doutput = static_cast<const D*>(doutput_);
  const X* x = static_cast<const X*>(x_);
  X* dx = static_cast<X*>(dx_);
  for_each_pixel_block(pixels, [&](int64_t pixel, auto count) {
    for_each_vector<A>(0, channels, [&](int64_t j, auto lanes) {
      const GradientTerms<A> terms{
          .mean = load<A>(of.mean + j, lanes),
          .rstd = load<A>(of.rstd + j, lanes),
          .weight = load<A>(of.weight + j, lanes),
          .bias = load<A>(of.bias + j, lanes),
          .offset = load<A>(of.offset + j, lanes),
          .slope = load<A>(of.slope + j, lanes),
      };
      for (int p = 0; p < count; ++p) {
        prefetch_ahead(x + (pixel + p) * x_stride + j);
        prefetch_ahead(doutput + (pixel + p) * doutput_stride + j);
        const Vec<A> d = load<A>(doutput + (pixel + p) * doutput_stride + j, lanes);
        const Vec<A> v = load<A>(x + (pixel + p) * x_stride + j, lanes);
        store<A>(dx + (pixel + p) * channels + j, gradient_of<A, D, X, kSilu>(d, v, terms), lanes);
      }
    });
  });
}

// Kernels for a call's dtypes.
template <class A>
struct BackwardKernels {
  decltype(&run_gradients<A, A, A, true>) run_gradients;
  decltype(&pixel_gradients<A, A, A, true>) pixel_gradients;
  decltype(&run_dinput<A, A, A, true, false>) run_dinput;
  decltype(&pixel_dinput<A, A, A, true>) pixel_dinput;
  // This one reads dz instead of doutput.
  decltype(run_dinput) run_dinput_of_kept;
  decltype(pixel_dinput) pixel_dinput_of_kept;

  explicit BackwardKernels(const GroupNormBackward& args) {
    visit_numbers<A>(args.doutput_dtype, [&]<class D>() {
      visit_numbers<A>(args.input_dtype, [&]<class X>() {
        this->run_dinput_of_kept = cpu::run_dinput<A, A, X, false, kTwo<D, X>>;
        this->pixel_dinput_of_kept = cpu::pixel_dinput<A, A, X, false>;
        visit_bool(has_silu(args), [&]<bool kSilu>() {
          this->run_gradients = cpu::run_gradients<A, D, X, kSilu>;
          this->pixel_gradients = cpu::pixel_gradients<A, D, X, kSilu>;
          this->run_dinput = cpu::run_dinput<A, D, X, kSilu, kTwo<D, X>>;
          this->pixel_dinput = cpu::pixel_dinput<A, D, X, kSilu>;
        });
      });
    });
  }
};

Plan plan_backward(const GroupNormBackward& args, const Machine& machine, Layout& layout) {
  return plan_of(args, machine, layout, true,
                 2 * size_of(args.doutput_dtype) + 3 * size_of(args.input_dtype),
                 has_silu(args) && args.dinput);
}

template <class A>
void backward(const GroupNormBackward& args, const Plan& plan, const Layout& layout,
              void* workspace, const Context& context) {
  const Call<A> call(args, layout, workspace);
  const BackwardKernels<A> kernels(args);
  const Cut& cut = layout.cut;
  const int64_t channels = call.per_group();
  const int64_t row = layout.row;
  A* const parts = call.template in<A>(layout.parts);
  A* const sums = call.template in<A>(layout.sums);
  A* const offset = call.template in<A>(layout.statistics);
  A* const slope = offset + args.batch * args.groups;
  const A* const mean = static_cast<const A*>(args.mean);
  const A* const rstd = static_cast<const A*>(args.rstd);
  const auto input = [&](int64_t unit, const PartRange& part) {
    return at(args.input, args.input_dtype, call.begin_of(unit, part, args.input_stride));
  };
  const auto doutput = [&](int64_t unit, const PartRange& part) {
    return at(args.doutput, args.doutput_dtype, call.begin_of(unit, part, args.doutput_stride));
  };
  const auto dinput = [&](int64_t unit, const PartRange& part) {
    return at(args.dinput, args.input_dtype, call.begin_of(unit, part));
  };
  // dz of a part, or null where it is not kept.
  const auto kept = [&](int64_t unit, const PartRange& part, int64_t slot) -> A* {
    if (!layout.keeps) return nullptr;
    if (size_of(args.input_dtype) == sizeof(A)) return reinterpret_cast<A*>(dinput(unit, part));
    if (!args.channels_last) return call.scratch(slot).row(0) + part.begin;
    return call.scratch(slot).row(kScratchRows) + part.begin * args.channels;
  };
  // The offset, rstd * mean(g), and the slope, rstd^2 * mean(g * h), from the channels' sums.
  const auto finish = [&](int64_t sample, int64_t group) {
    const A* sum = sums + 2 * sample * row;
    const int64_t unit = sample * args.groups + group;
    double g = 0, gh = 0;  // times rstd
    for (int64_t c = group * channels; c < (group + 1) * channels; ++c) {
      const double scale = rstd[unit] * call.weight()[c];
      g += scale * sum[c];
      gh += scale * sum[row + c];
    }
    const double n = static_cast<double>(channels * args.pixels);
    offset[unit] = static_cast<A>(g / n);
    slope[unit] = static_cast<A>(gh / n * rstd[unit]);
  };
  if (!args.channels_last) {
    const auto channel_of = [&](int64_t unit, int64_t number, bool summed) {
      const int64_t channel = unit % args.groups * channels + number / cut.parts_of_channel;
      return Channel<A>{.mean = mean[unit],
                        .rstd = rstd[unit],
                        .weight = call.weight()[channel],
                        .bias = call.bias()[channel],
                        .offset = summed ? offset[unit] : A(0),
                        .slope = summed ? slope[unit] : A(0)};
    };
    for_each_unit(
        context, plan.threads, cut, layout.by_units,
        [&](int64_t unit, int64_t number, int64_t slot) {
          const PartRange part = cut.part(args, number);
          const auto found =
              kernels.run_gradients(doutput(unit, part), input(unit, part), part.end - part.begin,
                                    channel_of(unit, number, false), kept(unit, part, slot));
          std::copy(found.begin(), found.end(), parts + 2 * (unit * cut.parts + number));
        },
        [&](int64_t unit, int64_t) {
          const int64_t sample = unit / args.groups, group = unit % args.groups;
          const A* part = parts + 2 * unit * cut.parts;
          for (int64_t c = group * channels; c < (group + 1) * channels; ++c) {
            double sum = 0, sum_h = 0;
            for (int64_t i = 0; i < cut.parts_of_channel; ++i, part += 2) {
              sum += part[0];
              sum_h += part[1];
            }
            sums[2 * sample * row + c] = static_cast<A>(sum);
            sums[(2 * sample + 1) * row + c] = static_cast<A>(sum_h);
          }
          finish(sample, group);
        },
        [&](int64_t unit, int64_t number, int64_t slot) {
          if (!args.dinput) return;
          const PartRange part = cut.part(args, number);
          const A* dz = kept(unit, part, slot);
          (dz ? kernels.run_dinput_of_kept : kernels.run_dinput)(
              dz ? dz : static_cast<const void*>(doutput(unit, part)), input(unit, part),
              dinput(unit, part), part.end - part.begin, channel_of(unit, number, true));
        });
  } else {
    const auto channels_of = [&](int64_t sample, int64_t slot, bool summed) {
      const Scratch<A> scratch = call.scratch(slot);
      return Channels<A>{.mean = call.spread(mean, sample, scratch.row(0)),
                         .rstd = call.spread(rstd, sample, scratch.row(1)),
                         .weight = call.weight(),
                         .bias = call.bias(),
                         .offset = summed ? call.spread(offset, sample, scratch.row(2)) : nullptr,
                         .slope = summed ? call.spread(slope, sample, scratch.row(3)) : nullptr};
    };
    for_each_unit(
        context, plan.threads, cut, layout.by_units,
        [&](int64_t sample, int64_t number, int64_t slot) {
          const PartRange part = cut.part(args, number);
          kernels.pixel_gradients(
              doutput(sample, part), args.doutput_stride.pixel, input(sample, part),
              args.input_stride.pixel, part.end - part.begin, args.channels,
              channels_of(sample, slot, false), parts + 2 * (sample * cut.parts + number) * row,
              call.scratch(slot).row(4), row, kept(sample, part, slot));
        },
        [&](int64_t sample, int64_t) {
          const A* of_parts = parts + 2 * sample * cut.parts * row;
          A* sum = sums + 2 * sample * row;
          if (sum != of_parts) {
            reduce_partials<A>(of_parts, cut.parts, 2 * row, 0, 2 * row, sum,
                               sizeof(A) == 8 ? DType::kFloat64 : DType::kFloat32);
          }
          for (int64_t group = 0; group < args.groups; ++group) finish(sample, group);
        },
        [&](int64_t sample, int64_t number, int64_t slot) {
          if (!args.dinput) return;
          const PartRange part = cut.part(args, number);
          const A* dz = kept(sample, part, slot);
          (dz ? kernels.pixel_dinput_of_kept : kernels.pixel_dinput)(
              dz ? dz : static_cast<const void*>(doutput(sample, part)),
              dz ? args.channels : args.doutput_stride.pixel, input(sample, part),
              args.input_stride.pixel, dinput(sample, part), part.end - part.begin, args.channels,
              channels_of(sample, slot, true));
        });
  }
  const auto reduce = [&](const A* of, void* gradient, DType dtype) {
    if (!gradient) return;
    reduce_partials<A>(of, args.batch, 2 * row, 0, args.channels, gradient, dtype);
  };
  reduce(sums, args.dbias, args.dbias_dtype);
  reduce(sums + row, args.dweight, args.dweight_dtype);
}

void run_backward(const GroupNormBackward& args, const Plan& plan, const Layout& layout,
                  void* workspace, const Context& context) {
  if (args.input_dtype == DType::kFloat64) {
    backward<double>(args, plan, layout, workspace, context);
  } else {
    backward<float>(args, plan, layout, workspace, context);
  }
}

}  // namespace

Operator<GroupNormBackward> group_norm_backward() {
  return operator_of<GroupNormBackward, Layout, plan_backward, run_backward>();
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
