// Group norm, with or without silu after it.
//
// With h = (x - mean) * rstd over a group, y = silu(h * weight + bias). Two sweeps over a unit of
// work, for the statistics and for the results. Bytes per element: 2 x + y, where the second
// reading comes from L2 as long as a unit fits there. Done when it runs at the speed of a copy.
#include <cmath>

#include "cpu/group_norm/silu.h"
#include "cpu/group_norm/units.h"
#include "cpu/kernels.h"
#include "cpu/sums.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

// Sums of x - centre and of its square.
struct Moments {
  double count = 0;
  double centre = 0;
  double deviation = 0;
  double squares = 0;

  // Both relative to this centre. In float64, where cancellation does no harm.
  void add(const Moments& other) {
    if (count == 0) centre = other.centre;
    const double shift = other.centre - centre;
    squares += other.squares + shift * (2 * other.deviation + other.count * shift);
    deviation += other.deviation + other.count * shift;
    count += other.count;
  }
  double mean() const { return centre + deviation / count; }
  double rstd(double eps) const {
    const double off = deviation / count;
    const double variance = squares / count - off * off;
    return 1.0 / std::sqrt((variance < 0.0 ? 0.0 : variance) + eps);
  }
};

static_assert(sizeof(Moments) == kMomentsBytes);

// The centre is the mean of the part's first four vectors. A part whose mean turns out more than
// half a standard deviation away from there is summed once more around that mean.
template <class A, class X>
Moments run_moments(const void* run, int64_t count) {
  const X* x = static_cast<const X*>(run);
  const int64_t first = std::min<int64_t>(count, 4 * kLanes<A>);
  Vec<A> first_sum = {};
  for_each_vector<A>(0, first, [&](int64_t j, auto lanes) { first_sum += load<A>(x + j, lanes); });
  A centre = sum_of_lanes<A>(first_sum) / static_cast<A>(first);
  const double n = static_cast<double>(count);
  for (bool again = false;; again = true) {
    const Vec<A> from = broadcast<A>(centre);
    const auto add = [&](Vec<A>* sum, Vec<A> d) __attribute__((always_inline)) {
      sum[0] += d;
      sum[1] = fma<A>(d, d, sum[1]);
    };
    const auto one = [&](Vec<A>* sum, int64_t j, auto lanes) __attribute__((always_inline)) {
      if constexpr (decltype(lanes)::kWhole) prefetch_ahead(x + j);
      add(sum, keep_lanes<A>(load<A>(x + j, lanes) - from, lanes));
    };
    const auto two = [&](Vec<A>* sum, int64_t j) __attribute__((always_inline)) {
      const Two<A> v = load_two<true, A>(x + j);
      add(sum, v.first - from);
      add(sum, v.second - from);
    };
    const auto [deviation, squares] = [&] {
      if constexpr (sizeof(X) == 2) {
        return sum_twos<A, 2>(count, two, one);
      } else {
        return sum_columns<A, 2>(count, one);
      }
    }();
    const double off = deviation / n;
    if (again || !(off * off > 0.25 * (squares / n - off * off))) {
      return {n, centre, deviation, squares};
    }
    centre = static_cast<A>(centre + off);
  }
}

// The same sums for each channel, relative to its own centre, the mean of the part's first pixels:
// in the scratch's rows 0 (centre), 1 (deviation) and 2 (squares).
template <class A, class X>
void pixel_moments(const void* part, int64_t pixels, int64_t stride, int64_t channels,
                   const Scratch<A>& scratch) {
  const X* x = static_cast<const X*>(part);
  A* centre = scratch.row(0);
  const int64_t first = std::min<int64_t>(pixels, kPixelsPerBlock);
  for_each_vector<A>(0, channels, [&](int64_t j, auto lanes) {
    Vec<A> sum = {};
    for (int64_t p = 0; p < first; ++p) sum += load<A>(x + p * stride + j, lanes);
    store<A>(centre + j, sum / broadcast<A>(static_cast<A>(first)), lanes);
  });
  A* deviation = scratch.row(3);
  A* squares = scratch.row(4);
  const int64_t sums = 2 * scratch.size;
  std::fill(scratch.row(1), scratch.row(1) + sums, A(0));
  for_each_run(
      0, pixels, kRunRows, scratch.row(1), deviation, sums, [&](int64_t begin, int64_t end) {
        for_each_pixel_block(end - begin, [&](int64_t pixel, auto count) {
          const X* rows = x + (begin + pixel) * stride;
          // scalar: d = x[p][j] - centre[j]; deviation[j] += d; squares[j] += d * d
          for_each_vector<A>(0, channels, [&](int64_t j, auto lanes) {
            const Vec<A> from = load<A>(centre + j, lanes);
            Vec<A> sum = load<A>(deviation + j, lanes), square = load<A>(squares + j, lanes);
            for (int p = 0; p < count; ++p) {
              prefetch_ahead(rows + p * stride + j);
              const Vec<A> d = load<A>(rows + p * stride + j, lanes) - from;
              sum += d;
              square = fma<A>(d, d, square);
            }
            store<A>(deviation + j, sum, lanes);
            store<A>(squares + j, square, lanes);
          });
        });
      });
}

// scalar: y[j] = silu((x[j] - mean) * (rstd * weight) + bias)
// V is Vec<A> or Two<A>.
template <class A, class Y, bool kSilu, class V>
ONEPASS_INLINE V output_of(const V& x, Vec<A> mean, Vec<A> scale, Vec<A> bias) {
  const V z = z_of<A>(each<A>([&](Vec<A> v) { return v - mean; }, x), scale, bias);
  if constexpr (kSilu) return silu<A, Y>(z);
  return z;
}

// While silu is computed, memory is idle: the elements `ahead`, if any, are prefetched meanwhile.
// (2x320x64x64 in float32, not in L2: 1.5 ms without, 1.3 with, one thread of a busy Zen 4.)
constexpr int64_t kMostAhead = 65536;

template <class A, class X, class Y, bool kSilu>
void run_output(const void* x_, void* y_, int64_t count, const Channel<A>& channel, int64_t ahead) {
  const X* x = static_cast<const X*>(x_);
  Y* y = static_cast<Y*>(y_);
  const Vec<A> mean = broadcast<A>(channel.mean), bias = broadcast<A>(channel.bias);
  const Vec<A> scale = broadcast<A>(channel.rstd * channel.weight);
  const auto one = [&](int64_t j, auto lanes) {
    if (ahead > 0) __builtin_prefetch(x + j + ahead, 0, 2);
    store<A>(y + j, output_of<A, Y, kSilu>(load<A>(x + j, lanes), mean, scale, bias), lanes);
  };
  if constexpr (kSameOrder<X, Y>) {
    for_each_two<A>(
        count,
        [&](int64_t j) {
          if (ahead > 0) {
            __builtin_prefetch(x + j + ahead, 0, 2);
            if constexpr (sizeof(X) == 4) __builtin_prefetch(x + j + kLanes<A> + ahead, 0, 2);
          }
          const Two<A> v = load_two<false, A>(x + j);
          store_two<false, A>(y + j, output_of<A, Y, kSilu>(v, mean, scale, bias));
        },
        one);
  } else {
    for_each_vector<A>(0, count, one);
  }
}

template <class A, class X, class Y, bool kSilu>
void pixel_output(const void* x_, int64_t x_stride, void* y_, int64_t pixels, int64_t channels,
                  const Channels<A>& of) {
  const X* x = static_cast<const X*>(x_);
  Y* y = static_cast<Y*>(y_);
  for_each_pixel_block(pixels, [&](int64_t pixel, auto count) {
    for_each_vector<A>(0, channels, [&](int64_t j, auto lanes) {
      const Vec<A> mean = load<A>(of.mean + j, lanes), bias = load<A>(of.bias + j, lanes);
      const Vec<A> scale = load<A>(of.rstd + j, lanes) * load<A>(of.weight + j, lanes);
      for (int p = 0; p < count; ++p) {
        prefetch_ahead(x + (pixel + p) * x_stride + j);
        const Vec<A> v = load<A>(x + (pixel + p) * x_stride + j, lanes);
        store<A>(y + (pixel + p) * channels + j, output_of<A, Y, kSilu>(v, mean, scale, bias),
                 lanes);
      }
    });
  });
}

// Kernels for a call's dtypes.
template <class A>
struct ForwardKernels {
  decltype(&run_moments<A, A>) run_moments;
  decltype(&pixel_moments<A, A>) pixel_moments;
  decltype(&run_output<A, A, A, true>) run_output;
  decltype(&pixel_output<A, A, A, true>) pixel_output;

  explicit ForwardKernels(const GroupNormForward& args) {
    visit_numbers<A>(args.input_dtype, [&]<class X>() {
      this->run_moments = cpu::run_moments<A, X>;
      this->pixel_moments = cpu::pixel_moments<A, X>;
      visit_numbers<A>(args.output_dtype, [&]<class Y>() {
        visit_bool(has_silu(args), [&]<bool kSilu>() {
          this->run_output = cpu::run_output<A, X, Y, kSilu>;
          this->pixel_output = cpu::pixel_output<A, X, Y, kSilu>;
        });
      });
    });
  }
};

Plan plan_forward(const GroupNormForward& args, const Machine& machine, Layout& layout) {
  return plan_of(args, machine, layout, false,
                 2 * size_of(args.input_dtype) + size_of(args.output_dtype), false);
}

template <class A>
void forward(const GroupNormForward& args, const Plan& plan, const Layout& layout, void* workspace,
             const Context& context) {
  const Call<A> call(args, layout, workspace);
  const ForwardKernels<A> kernels(args);
  const Cut& cut = layout.cut;
  const int64_t channels = call.per_group();
  Moments* const parts = call.template in<Moments>(layout.parts);
  A* const mean = args.mean ? static_cast<A*>(args.mean) : call.template in<A>(layout.statistics);
  A* const rstd = args.rstd ? static_cast<A*>(args.rstd) : mean + args.batch * args.groups;
  const auto input = [&](int64_t unit, const PartRange& part) {
    return at(args.input, args.input_dtype, call.begin_of(unit, part, args.input_stride));
  };
  const auto output = [&](int64_t unit, const PartRange& part) {
    return at(args.output, args.output_dtype, call.begin_of(unit, part));
  };
  const auto finish = [&](int64_t group, const Moments& moments) {
    mean[group] = static_cast<A>(moments.mean());
    rstd[group] = static_cast<A>(moments.rstd(args.eps));
  };
  if (!args.channels_last) {
    // Distance in elements from a group to the thread's next one, if both fit into L2.
    const int64_t run = channels * args.pixels;
    const int64_t ahead = layout.by_units && run <= kMostAhead ? run : 0;
    for_each_unit(
        context, plan.threads, cut, layout.by_units,
        [&](int64_t unit, int64_t number, int64_t) {
          const PartRange part = cut.part(args, number);
          parts[unit * cut.parts + number] =
              kernels.run_moments(input(unit, part), part.end - part.begin);
        },
        [&](int64_t unit, int64_t) {
          Moments moments;
          for (int64_t part = 0; part < cut.parts; ++part) {
            moments.add(parts[unit * cut.parts + part]);
          }
          finish(unit, moments);
        },
        [&](int64_t unit, int64_t number, int64_t) {
          const PartRange part = cut.part(args, number);
          const char* x = input(unit, part);
          char* y = output(unit, part);
          call.for_each_channel(unit, part, [&](int64_t channel, int64_t first, int64_t count) {
            const Channel<A> of{.mean = mean[unit],
                                .rstd = rstd[unit],
                                .weight = call.weight()[channel],
                                .bias = call.bias()[channel],
                                .offset = {},
                                .slope = {}};
            kernels.run_output(at(x, args.input_dtype, first),
                               y + first * size_of(args.output_dtype), count, of, ahead);
          });
        });
    return;
  }
  for_each_unit(
      context, plan.threads, cut, layout.by_units,
      [&](int64_t sample, int64_t number, int64_t slot) {
        const PartRange part = cut.part(args, number);
        const Scratch<A> scratch = call.scratch(slot);
        const int64_t pixels = part.end - part.begin;
        kernels.pixel_moments(input(sample, part), pixels, args.input_stride.pixel, args.channels,
                              scratch);
        Moments* of = parts + (sample * cut.parts + number) * args.groups;
        for (int64_t group = 0; group < args.groups; ++group) {
          Moments moments;
          for (int64_t c = group * channels; c < (group + 1) * channels; ++c) {
            moments.add({static_cast<double>(pixels), scratch.row(0)[c], scratch.row(1)[c],
                         scratch.row(2)[c]});
          }
          of[group] = moments;
        }
      },
      [&](int64_t sample, int64_t) {
        for (int64_t group = 0; group < args.groups; ++group) {
          Moments moments;
          for (int64_t part = 0; part < cut.parts; ++part) {
            moments.add(parts[(sample * cut.parts + part) * args.groups + group]);
          }
          finish(sample * args.groups + group, moments);
        }
      },
      [&](int64_t sample, int64_t number, int64_t slot) {
        const PartRange part = cut.part(args, number);
        const Scratch<A> scratch = call.scratch(slot);
        const Channels<A> of{.mean = call.spread(mean, sample, scratch.row(0)),
                             .rstd = call.spread(rstd, sample, scratch.row(1)),
                             .weight = call.weight(),
                             .bias = call.bias(),
                             .offset = nullptr,
                             .slope = nullptr};
        kernels.pixel_output(input(sample, part), args.input_stride.pixel, output(sample, part),
                             part.end - part.begin, args.channels, of);
      });
}

void run_forward(const GroupNormForward& args, const Plan& plan, const Layout& layout,
                 void* workspace, const Context& context) {
  if (args.input_dtype == DType::kFloat64) {
    forward<double>(args, plan, layout, workspace, context);
  } else {
    forward<float>(args, plan, layout, workspace, context);
  }
}

}  // namespace

Operator<GroupNormForward> group_norm_forward() {
  return operator_of<GroupNormForward, Layout, plan_forward, run_forward>();
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
