// Causal convolution of each channel alone, with silu after it, in one pass; and its backward in
// another, which computes the sum again instead of keeping it.
//
// Bytes per element: input + output; backward input + doutput + dinput. Done when it runs at the
// speed of a copy of as many bytes. Where channels are dense, a vector is one of channels: the
// tokens before are read again, from L1. Where tokens are dense, a vector is one of tokens: a line
// is widened into L1, with what stands before it, and read at `width` offsets.
//
// Gradients of weight and bias are sums over tokens, in pieces that follow from the shape alone.
#include <algorithm>

#include "core/visit.h"
#include "cpu/activation.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/pieces.h"
#include "cpu/row_sums.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

constexpr int64_t kTokens = 512;  // of a piece
constexpr int64_t kRun = 16;      // tokens that are summed before they are added to a piece's sums
constexpr int64_t kChannels = 256;  // of a piece where they are dense: a token's are 1 KiB of L1
constexpr int kMost = kMostConvWidth;

// The rate of work instead of kBytes where silu is computed, as for gates.
constexpr int64_t kActivationBytes = 16;

// A width that is known at compile time, or else read.
template <int kWidth>
ONEPASS_INLINE int width_of(const CausalConv& args) {
  return kWidth ? kWidth : static_cast<int>(args.width);
}

// Calls f<T, kWidth>() for the call's dtype, and for the widths of models.
template <class F>
void visit(const CausalConv& args, F&& f) {
  visit_dtype(args.input_dtype, [&]<class T>() {
    switch (args.width) {
      case 3:
        return f.template operator()<T, 3>();
      case 4:
        return f.template operator()<T, 4>();
      default:
        return f.template operator()<T, 0>();
    }
  });
}

bool same_sequence(const CausalConv& args, int64_t sample, int64_t one, int64_t other) {
  if (!args.sequence) return true;
  const int32_t* sequence = args.sequence + sample * args.length;
  return sequence[one] == sequence[other];
}

int64_t chunks_per_sample(const CausalConv& args) { return ceil_div(args.length, kTokens); }

// A part of the work: tokens [begin, end) of a sample, and a block of channels, or one.
struct Piece {
  int64_t sample, chunk, begin, end, channel, channels;

  Piece(const CausalConv& args, int64_t number) {
    const int64_t chunks = chunks_per_sample(args);
    if (args.channels_last) {
      const int64_t blocks = ceil_div(args.channels, kChannels);
      channel = number % blocks * kChannels;
      channels = std::min(kChannels, args.channels - channel);
      chunk = number / blocks % chunks;
      sample = number / blocks / chunks;
    } else {
      chunk = number % chunks;
      channel = number / chunks % args.channels;
      channels = 1;
      sample = number / chunks / args.channels;
    }
    begin = chunk * kTokens;
    end = std::min(begin + kTokens, args.length);
  }

  static int64_t count(const CausalConv& args) {
    const int64_t of_channels =
        args.channels_last ? ceil_div(args.channels, kChannels) : args.channels;
    return args.batch * chunks_per_sample(args) * of_channels;
  }

  // The first element of a line; null of null.
  template <class T>
  const T* line(const void* tensor, const LineStride& stride, int64_t number) const {
    return tensor ? static_cast<const T*>(tensor) + offset(stride, number) : nullptr;
  }
  template <class T>
  T* line(void* tensor, const LineStride& stride, int64_t number) const {
    return tensor ? static_cast<T*>(tensor) + offset(stride, number) : nullptr;
  }

 private:
  int64_t offset(const LineStride& stride, int64_t number) const {
    return sample * stride.sample + number * stride.line;
  }
};

LineStride dense(const CausalConv& args) {
  return {args.channels * args.length, args.channels_last ? args.channels : args.length};
}

// The weights of a block of channels: weight[k][channel], and the bias after them.
template <class A>
struct Weights {
  alignas(64) A of[kMost + 1][kChannels];

  Weights(const CausalConv& args, int64_t channel, int64_t channels) {
    const int width = static_cast<int>(args.width);
    A flat[kMost * kChannels];
    widen_line(args.weight, args.weight_dtype, channel * width, channels * width, flat);
    for (int64_t c = 0; c < channels; ++c) {
      for (int k = 0; k < width; ++k) of[k][c] = flat[c * width + k];
    }
    if (args.bias) {
      widen_line(args.bias, args.bias_dtype, channel, channels, of[width]);
    } else {
      std::fill_n(of[width], channels, A(0));
    }
  }
};

// Sums for the gradients of weight and bias: of[k][channel], as `Weights`.
template <class A>
using Sums = A (*)[kChannels];

// ---- channels are dense -------------------------------------------------------------------------

// The tokens that a sum reads, of a block of channels.
template <class T>
class Tokens {
 public:
  Tokens(const CausalConv& args, const Piece& piece) : args_(args), piece_(piece) {
    if (!args.initial_state) return;
    const int64_t before = args.width - 1;
    const T* state = static_cast<const T*>(args.initial_state) +
                     (piece.sample * args.channels + piece.channel) * before;
    for (int64_t c = 0; c < piece.channels; ++c) {
      for (int64_t s = 0; s < before; ++s) state_[s][c] = state[c * before + s];
    }
  }

  // Those of the sum at token t; zeros for what is not in its sequence.
  ONEPASS_INLINE void put_taps(int64_t t, int width, const T** taps) const {
    for (int k = 0; k < width; ++k) {
      const int64_t s = t - (width - 1) + k;
      if (s >= 0) {
        const bool is_in = same_sequence(args_, piece_.sample, s, t);
        taps[k] =
            is_in ? piece_.line<T>(args_.input, args_.input_stride, s) + piece_.channel : zeros_;
      } else {
        taps[k] = args_.initial_state ? state_[s + width - 1] : zeros_;
      }
    }
  }

 private:
  const CausalConv& args_;
  const Piece& piece_;
  alignas(64) T state_[kMost - 1][kChannels];
  alignas(64) T zeros_[kChannels] = {};
};

// scalar: bias[c] + sum over k of weight[k][c] * taps[k][c]
template <int kWidth, class A, class T, class Lanes>
ONEPASS_INLINE Vec<A> sum_of_taps(const Weights<A>& weights, const T* const* taps, int width,
                                  int64_t c, Lanes lanes) {
  Vec<A> sum = load<A>(weights.of[width] + c, lanes);
#pragma GCC unroll 8
  for (int k = 0; k < (kWidth ? kWidth : width); ++k) {
    sum = fma<A>(load<A>(weights.of[k] + c, lanes), load<A>(taps[k] + c, lanes), sum);
  }
  return sum;
}

template <class T, int kWidth>
void causal_conv_channels_kernel(const CausalConvForward& args, const Piece& piece) {
  using A = Accumulator<T>;
  const int width = width_of<kWidth>(args);
  const Weights<A> weights(args, piece.channel, piece.channels);
  const Tokens<T> tokens(args, piece);
  T* output = piece.line<T>(args.output, dense(args), 0) + piece.channel;
  const T* taps[kMost];
  for (int64_t t = piece.begin; t < piece.end; ++t) {
    tokens.put_taps(t, width, taps);
    T* to = output + t * args.channels;
    for_each_vector<A>(0, piece.channels, [&](int64_t c, auto lanes) {
      Vec<A> sum = sum_of_taps<kWidth>(weights, taps, width, c, lanes);
      if (args.silu) sum = Activated<Activation::kSilu, A>(sum).value();
      store<A>(to + c, sum, lanes);
    });
  }
}

// sums: null if neither the weight's nor the bias's gradient is wanted.
template <class T, int kWidth>
void causal_conv_backward_channels_kernel(const CausalConvBackward& args, const Piece& piece,
                                          Sums<Accumulator<T>> sums) {
  using A = Accumulator<T>;
  const int width = width_of<kWidth>(args), before = width - 1;
  const Weights<A> weights(args, piece.channel, piece.channels);
  const Tokens<T> tokens(args, piece);
  const T* doutput = piece.line<T>(args.doutput, args.doutput_stride, 0) + piece.channel;
  T* dinput = piece.line<T>(args.dinput, dense(args), 0);
  if (dinput) dinput += piece.channel;
  const bool of_state = piece.begin == 0 && args.dinitial_state;
  const bool of_inputs = dinput || of_state;

  // The sums of a run, which are then added to those of the piece.
  alignas(64) A run[kMost + 1][kChannels];
  const auto end_run = [&] {
    for (int k = 0; k <= width; ++k) {
      for_each_vector<A>(0, piece.channels, [&](int64_t c, auto lanes) {
        const Vec<A> sum = load<A>(sums[k] + c, lanes) + load<A>(run[k] + c, lanes);
        store<A>(sums[k] + c, sum, lanes);
      });
      std::fill_n(run[k], piece.channels, A(0));
    }
  };

  // The gradients of the last sums: that at token t is line t % kMost.
  alignas(64) A dsums[kMost][kChannels];
  alignas(64) const A zeros[kChannels] = {};
  const auto put_dsum = [&](int64_t t) {
    const T* taps[kMost];
    tokens.put_taps(t, width, taps);
    const T* upstream = doutput + t * args.doutput_stride.line;
    A* dsum = dsums[t % kMost];
    const bool is_own = sums && t < piece.end;
    for_each_vector<A>(0, piece.channels, [&](int64_t c, auto lanes) {
      Vec<A> d = load<A>(upstream + c, lanes);
      if (args.silu) {
        const Vec<A> sum = sum_of_taps<kWidth>(weights, taps, width, c, lanes);
        d = Activated<Activation::kSilu, A>(sum).times_slope(d);
      }
      store<A>(dsum + c, d, lanes);
      if (!is_own) return;
#pragma GCC unroll 8
      for (int k = 0; k < (kWidth ? kWidth : width); ++k) {
        const Vec<A> tap = load<A>(taps[k] + c, lanes);
        store<A>(run[k] + c, fma<A>(d, tap, load<A>(run[k] + c, lanes)), lanes);
      }
      store<A>(run[width] + c, d + load<A>(run[width] + c, lanes), lanes);
    });
    if (is_own && ((t + 1) % kRun == 0 || t + 1 == piece.end)) end_run();
  };
  // The gradient of token s, from the sums that read it.
  const auto put_gradient = [&](int64_t s, T* to) {
    const A* taps[kMost];  // of weight k
    for (int k = 0; k < width; ++k) {
      const int64_t t = s + before - k;
      const bool is_in =
          t >= 0 && t < args.length && (s < 0 || same_sequence(args, piece.sample, s, t));
      taps[k] = is_in ? dsums[t % kMost] : zeros;
    }
    for_each_vector<A>(0, piece.channels, [&](int64_t c, auto lanes) {
      Vec<A> sum{};
#pragma GCC unroll 8
      for (int k = 0; k < (kWidth ? kWidth : width); ++k) {
        sum = fma<A>(load<A>(weights.of[k] + c, lanes), load<A>(taps[k] + c, lanes), sum);
      }
      store<A>(to + c, sum, lanes);
    });
  };

  for (auto& line : run) std::fill_n(line, piece.channels, A(0));
  const int64_t end = of_inputs ? piece.end + before : piece.end;
  for (int64_t t = piece.begin; t < end; ++t) {
    if (t < args.length) put_dsum(t);
    const int64_t s = t - before;
    if (s >= piece.begin && dinput) put_gradient(s, dinput + s * args.channels);
    if (s < 0 && of_state) {
      T line[kChannels];
      put_gradient(s, line);
      T* dstate = static_cast<T*>(args.dinitial_state) +
                  (piece.sample * args.channels + piece.channel) * before + t;
      for (int64_t c = 0; c < piece.channels; ++c) dstate[c * before] = line[c];
    }
  }
}

// ---- tokens are dense ---------------------------------------------------------------------------

// Calls body(begin, end) for the runs of a piece that lie in one sequence.
template <class Body>
void for_each_run(const CausalConv& args, const Piece& piece, Body&& body) {
  for (int64_t begin = piece.begin, end; begin < piece.end; begin = end) {
    end = args.sequence ? begin + 1 : piece.end;
    while (end < piece.end && same_sequence(args, piece.sample, begin, end)) ++end;
    body(begin, end);
  }
}

// A run's numbers in L1, with the width - 1 before it.
template <class T>
struct Line {
  using A = Accumulator<T>;
  alignas(64) A numbers[kTokens + 2 * kMost];

  // scalar: numbers[i] is that at token begin - before + i, for tokens up to end
  void put(const CausalConv& args, const Piece& piece, int64_t begin, int64_t end) {
    const int64_t before = args.width - 1;
    int64_t first = begin;
    while (first > 0 && first > begin - before &&
           same_sequence(args, piece.sample, first - 1, begin)) {
      --first;
    }
    const int64_t missing = before - (begin - first);
    std::fill_n(numbers, missing, A(0));
    if (first == 0 && args.initial_state) {
      const T* state = static_cast<const T*>(args.initial_state) +
                       (piece.sample * args.channels + piece.channel) * before;
      for_each_vector<A>(0, missing, [&](int64_t i, auto lanes) {
        store<A>(numbers + i, load<A>(state + before - missing + i, lanes), lanes);
      });
    }
    const T* input = piece.line<T>(args.input, args.input_stride, piece.channel);
    for_each_vector<A>(first, end, [&](int64_t t, auto lanes) {
      store<A>(numbers + before + t - begin, load<A>(input + t, lanes), lanes);
    });
  }
};

// scalar: start + sum over k of weights[k] * numbers[k]
template <int kWidth, class A, class Lanes>
ONEPASS_INLINE Vec<A> sum_of_offsets(const A* weights, A start, const A* numbers, int width,
                                     Lanes lanes) {
  Vec<A> sum = broadcast<A>(start);
#pragma GCC unroll 8
  for (int k = 0; k < (kWidth ? kWidth : width); ++k) {
    sum = fma<A>(broadcast<A>(weights[k]), load<A>(numbers + k, lanes), sum);
  }
  return sum;
}

// The weights of one channel, and its bias.
template <class A>
struct ChannelWeights {
  A of[kMost], bias = 0;

  ChannelWeights(const CausalConv& args, int64_t channel) {
    widen_line(args.weight, args.weight_dtype, channel * args.width, args.width, of);
    if (args.bias) widen_line(args.bias, args.bias_dtype, channel, 1, &bias);
  }
};

template <class T, int kWidth>
void causal_conv_tokens_kernel(const CausalConvForward& args, const Piece& piece) {
  using A = Accumulator<T>;
  const int width = width_of<kWidth>(args);
  const ChannelWeights<A> weights(args, piece.channel);
  T* output = piece.line<T>(args.output, dense(args), piece.channel);
  Line<T> line;
  for_each_run(args, piece, [&](int64_t begin, int64_t end) {
    line.put(args, piece, begin, end);
    for_each_vector<A>(0, end - begin, [&](int64_t i, auto lanes) {
      Vec<A> sum = sum_of_offsets<kWidth>(weights.of, weights.bias, line.numbers + i, width, lanes);
      if (args.silu) sum = Activated<Activation::kSilu, A>(sum).value();
      store<A>(output + begin + i, sum, lanes);
    });
  });
}

template <class T, int kWidth>
void causal_conv_backward_tokens_kernel(const CausalConvBackward& args, const Piece& piece,
                                        Sums<Accumulator<T>> sums) {
  using A = Accumulator<T>;
  const int width = width_of<kWidth>(args), before = width - 1;
  const ChannelWeights<A> weights(args, piece.channel);
  A reversed[kMost];
  std::reverse_copy(weights.of, weights.of + width, reversed);
  const T* doutput = piece.line<T>(args.doutput, args.doutput_stride, piece.channel);
  T* dinput = piece.line<T>(args.dinput, dense(args), piece.channel);
  Vec<A> sum_of[kMost + 1] = {};
  Line<T> line;
  alignas(64) A dsums[kTokens + 3 * kMost];  // that of token begin - before + i
  for_each_run(args, piece, [&](int64_t begin, int64_t end) {
    int64_t last = end;  // the sums after the run read it too
    while (last < args.length && last < end + before &&
           same_sequence(args, piece.sample, begin, last)) {
      ++last;
    }
    line.put(args, piece, begin, last);
    A* dsum = dsums + before;
    std::fill_n(dsums, before, A(0));
    for_each_vector<A>(0, last - begin, [&](int64_t i, auto lanes) {
      Vec<A> d = load<A>(doutput + begin + i, lanes);
      if (args.silu) {
        const Vec<A> sum =
            sum_of_offsets<kWidth>(weights.of, weights.bias, line.numbers + i, width, lanes);
        d = Activated<Activation::kSilu, A>(sum).times_slope(d);
      }
      store<A>(dsum + i, d, lanes);
    });
    std::fill_n(dsum + (last - begin), end + before - last, A(0));
    for (int64_t first = begin; first < end; first += kRun * kLanes<A>) {
      Vec<A> run[kMost + 1] = {};
      for_each_vector<A>(
          first - begin, std::min(first + kRun * kLanes<A>, end) - begin,
          [&](int64_t i, auto lanes) {
            if (dinput) {
              store<A>(dinput + begin + i,
                       sum_of_offsets<kWidth>(reversed, A(0), dsum + i, width, lanes), lanes);
            }
            if (!sums) return;
            const Vec<A> d = load<A>(dsum + i, lanes);
#pragma GCC unroll 8
            for (int k = 0; k < (kWidth ? kWidth : width); ++k) {
              run[k] = fma<A>(d, load<A>(line.numbers + i + k, lanes), run[k]);
            }
            run[kMost] += d;
          });
      for (int k = 0; k <= kMost; ++k) sum_of[k] += run[k];
    }
    if (begin == 0 && args.dinitial_state) {
      T* dstate = static_cast<T*>(args.dinitial_state) +
                  (piece.sample * args.channels + piece.channel) * before;
      for_each_vector<A>(0, before, [&](int64_t i, auto lanes) {
        store<A>(dstate + i, sum_of_offsets<kWidth>(reversed, A(0), dsums + i, width, lanes),
                 lanes);
      });
    }
  });
  if (!sums) return;
  for (int k = 0; k < width; ++k) sums[k][0] = sum_of_lanes<A>(sum_of[k]);
  sums[width][0] = sum_of_lanes<A>(sum_of[kMost]);
}

// ---- plans --------------------------------------------------------------------------------------

Plan plan_pieces(const CausalConv& args, const char* kernel_name, int64_t tensors,
                 const Machine& machine) {
  const int64_t pieces = Piece::count(args);
  const int64_t bytes =
      tensors * size_of(args.input_dtype) * args.batch * args.channels * args.length;
  return {.workspace_bytes = 0,
          .kernel_name = kernel_name,
          .rows_per_tile = args.channels_last ? 1 : kTokens,
          .splits = pieces,
          .reason = args.channels_last ? "vectors of channels" : "vectors of tokens",
          .threads = threads_for(bytes / (args.silu ? kActivationBytes : kBytes), pieces, machine)};
}

Plan plan_forward(const CausalConvForward& args, const Machine& machine) {
  return plan_pieces(
      args, args.channels_last ? "causal_conv_channels_kernel" : "causal_conv_tokens_kernel", 2,
      machine);
}

void run_forward(const CausalConvForward& args, const Plan& plan, void*, const Context& context) {
  visit(args, [&]<class T, int kWidth>() {
    for_each_piece(context, plan.threads, plan.splits, [&](int64_t begin, int64_t end) {
      for (int64_t number = begin; number < end; ++number) {
        const Piece piece(args, number);
        if (args.channels_last) {
          causal_conv_channels_kernel<T, kWidth>(args, piece);
        } else {
          causal_conv_tokens_kernel<T, kWidth>(args, piece);
        }
      }
    });
  });
}

// The sums of all pieces, before they are added up: (samples x chunks, width + 1, stride).
struct Partials {
  int64_t count, lines, stride;

  explicit Partials(const CausalConv& args)
      : count(args.batch * chunks_per_sample(args)),
        lines(args.width + 1),
        stride(round_up(args.channels, 16)) {}

  int64_t bytes(int64_t accumulator) const { return count * lines * stride * accumulator; }
};

bool wants_sums(const CausalConvBackward& args) { return args.dweight || args.dbias; }

Plan plan_backward(const CausalConvBackward& args, const Machine& machine) {
  const char* kernel = args.channels_last ? "causal_conv_backward_channels_kernel"
                                          : "causal_conv_backward_tokens_kernel";
  Plan plan = plan_pieces(args, kernel, 3, machine);
  const int64_t accumulator = args.input_dtype == DType::kFloat64 ? 8 : 4;
  if (wants_sums(args)) plan.workspace_bytes = Partials(args).bytes(accumulator);
  return plan;
}

// Adds up the partials of a block of channels.
template <class A>
void reduce_block(const CausalConvBackward& args, const Partials& partials, const A* all,
                  int64_t block) {
  const int64_t first = block * kChannels, width = args.width;
  const int64_t channels = std::min(kChannels, args.channels - first);
  constexpr DType kDType = sizeof(A) == 8 ? DType::kFloat64 : DType::kFloat32;
  A line[kChannels], flat[kMost * kChannels];
  const auto reduce = [&](int64_t k) {
    reduce_partials<A>(all + k * partials.stride + first, partials.count,
                       partials.lines * partials.stride, 0, channels, line, kDType);
  };
  if (args.dweight) {
    for (int64_t k = 0; k < width; ++k) {
      reduce(k);
      for (int64_t c = 0; c < channels; ++c) flat[c * width + k] = line[c];
    }
    round_line(flat, channels * width, args.dweight, args.weight_dtype, first * width);
  }
  if (args.dbias) {
    reduce(width);
    round_line(line, channels, args.dbias, args.bias_dtype, first);
  }
}

void run_backward(const CausalConvBackward& args, const Plan& plan, void* workspace,
                  const Context& context) {
  const Partials partials(args);
  const bool has_sums = wants_sums(args);
  visit(args, [&]<class T, int kWidth>() {
    using A = Accumulator<T>;
    A* all = static_cast<A*>(workspace);
    for_each_piece(context, plan.threads, plan.splits, [&](int64_t begin, int64_t end) {
      alignas(64) A sums[kMost + 1][kChannels];
      for (int64_t number = begin; number < end; ++number) {
        const Piece piece(args, number);
        for (auto& line : sums) std::fill_n(line, piece.channels, A(0));
        if (args.channels_last) {
          causal_conv_backward_channels_kernel<T, kWidth>(args, piece, has_sums ? sums : nullptr);
        } else {
          causal_conv_backward_tokens_kernel<T, kWidth>(args, piece, has_sums ? sums : nullptr);
        }
        if (!has_sums) continue;
        const int64_t partial = piece.sample * chunks_per_sample(args) + piece.chunk;
        A* to = all + partial * partials.lines * partials.stride + piece.channel;
        for (int64_t k = 0; k <= args.width; ++k) {
          std::copy_n(sums[k], piece.channels, to + k * partials.stride);
        }
      }
    });
    if (!has_sums) return;
    for_each_piece(context, plan.threads, ceil_div(args.channels, kChannels),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t block = begin; block < end; ++block) {
                       reduce_block<A>(args, partials, all, block);
                     }
                   });
  });
}

}  // namespace

Operator<CausalConvForward> causal_conv_forward() { return {plan_forward, run_forward}; }
Operator<CausalConvBackward> causal_conv_backward() { return {plan_backward, run_backward}; }

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
