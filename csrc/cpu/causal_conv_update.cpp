// The causal convolution of a few tokens while decoding, with the latest inputs in place.
//
// Bytes: the state, read and written once. A vector is one of channels; since a channel's inputs
// lie next to each other, each of them is gathered, once. Done when the gathers bind.
#include <algorithm>
#include <type_traits>

#include "core/math.h"
#include "core/visit.h"
#include "cpu/activation.h"
#include "cpu/kernels.h"
#include "cpu/lines.h"
#include "cpu/parallel.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

// A vector of channels, with its weights.
template <class T>
class Block {
 public:
  using A = Accumulator<T>;

  Block(const CausalConvUpdate& args, int64_t channel, int64_t count)
      : args_(args), channel_(channel), count_(count), width_(args.width) {
    A flat[kMostConvWidth * kLanes<A>];
    if (count < kLanes<A>) std::fill_n(flat, width_ * kLanes<A>, A(0));
    widen_line(args.weight, args.weight_dtype, channel * width_, count * width_, flat);
    for (int64_t k = 0; k < width_; ++k) {
      for (int64_t c = 0; c < kLanes<A>; ++c) weight_[k][c] = flat[c * width_ + k];
    }
    if (args.bias) widen_line(args.bias, args.bias_dtype, channel, count, bias_);
  }

  // The outputs of a sample, and its state.
  void update(int64_t sample) const {
    const ConvUpdateStride &of_state = args_.state_stride, &of_input = args_.input_stride;
    T* state =
        static_cast<T*>(args_.state) + sample * of_state.sample + channel_ * of_state.channel;
    const T* input =
        static_cast<const T*>(args_.input) + sample * of_input.sample + channel_ * of_input.channel;
    T* output = static_cast<T*>(args_.output) + (sample * args_.channels + channel_) * args_.tokens;
    Vec<A> taps[kMostConvWidth];  // the latest is the last
    for (int64_t k = 1; k < width_; ++k) {
      taps[k] = gathered(state + (args_.before - width_ + k) * of_state.token, of_state.channel);
    }
    for (int64_t t = 0; t < args_.tokens; ++t) {
      std::move(taps + 1, taps + width_, taps);
      taps[width_ - 1] = gathered(input + t * of_input.token, of_input.channel);
      Vec<A> sum = load<A>(bias_);
      for (int64_t k = 0; k < width_; ++k) sum = fma<A>(load<A>(weight_[k]), taps[k], sum);
      if (args_.silu) sum = Activated<Activation::kSilu, A>(sum).value();
      alignas(64) T rounded[kLanes<A>];
      store<A>(rounded, sum);
      for (int64_t c = 0; c < count_; ++c) output[c * args_.tokens + t] = rounded[c];
    }
    for (int64_t c = 0; c < count_; ++c) {
      move_on(state + c * of_state.channel, input + c * of_input.channel);
    }
  }

 private:
  Vec<A> gathered(const T* from, int64_t stride) const {
    Vec<A> taken{};
    if (count_ == kLanes<A>) {  // in registers: a vector's load would wait for stores of its lanes
#pragma GCC unroll 16
      for (int c = 0; c < kLanes<A>; ++c) taken[c] = number(from[c * stride]);
    } else {
      for (int64_t c = 0; c < count_; ++c) taken[c] = number(from[c * stride]);
    }
    return taken;
  }

  static A number(T x) {
    if constexpr (std::is_same_v<T, A>) {
      return x;
    } else {
      return widen(x);
    }
  }

  // Drops as many of a channel's inputs as there are tokens. A place is read before it is written.
  void move_on(T* state, const T* input) const {
    const int64_t kept = std::max<int64_t>(args_.before - args_.tokens, 0);
    const int64_t step = args_.state_stride.token;
    for (int64_t i = 0; i < kept; ++i) state[i * step] = state[(i + args_.tokens) * step];
    for (int64_t i = kept; i < args_.before; ++i) {
      state[i * step] = input[(i + args_.tokens - args_.before) * args_.input_stride.token];
    }
  }

  const CausalConvUpdate& args_;
  int64_t channel_;
  int64_t count_;
  int64_t width_;
  alignas(64) A weight_[kMostConvWidth][kLanes<A>];  // of `width_`
  alignas(64) A bias_[kLanes<A>] = {};
};

template <class T>
constexpr int64_t kChannels = kLanes<Accumulator<T>>;

Plan plan_update(const CausalConvUpdate& args, const Machine& machine) {
  Plan plan{.workspace_bytes = 0,
            .kernel_name = "causal_conv_update_kernel",
            .rows_per_tile = args.tokens,
            .splits = 0,
            .reason = "vectors of channels"};
  visit_dtype(args.input_dtype,
              [&]<class T>() { plan.splits = args.batch * ceil_div(args.channels, kChannels<T>); });
  const int64_t gathered = args.batch * args.channels * (args.tokens + args.before);
  plan.threads = threads_for(gathered, plan.splits, machine);  // a nanosecond each
  return plan;
}

void run_update(const CausalConvUpdate& args, const Plan& plan, void*, const Context& context) {
  visit_dtype(args.input_dtype, [&]<class T>() {
    const int64_t blocks = ceil_div(args.channels, kChannels<T>);
    for_each_piece(context, plan.threads, plan.splits, [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t channel = piece % blocks * kChannels<T>;
        const Block<T> block(args, channel, std::min(kChannels<T>, args.channels - channel));
        block.update(piece / blocks);
      }
    });
  });
}

}  // namespace

Operator<CausalConvUpdate> causal_conv_update() { return {plan_update, run_update}; }

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
