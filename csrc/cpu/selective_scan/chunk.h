// What the passes of selective scan share: pieces of work, and a chunk's rows.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cpu/activation.h"
#include "cpu/decay.h"
#include "cpu/parallel.h"
#include "cpu/pieces.h"
#include "cpu/selective_scan/rows.h"
#include "cpu/sequences.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace selective_scan {

// ---- pieces of work -----------------------------------------------------------------------------

using Sequence = SequenceOf<SelectiveScan, kTokens>;

// The blocks of each group.
template <class A>
struct Blocks {
  int64_t per_group, channels_per_group;

  explicit Blocks(const SelectiveScan& args)
      : per_group(ceil_div(args.channels / args.groups, kBlock<A>)),
        channels_per_group(args.channels / args.groups) {}
};

template <class A>
Block block_of(const Blocks<A>& blocks, int64_t group, int64_t number) {
  const int64_t first = number * kBlock<A>;
  return {group, group * blocks.channels_per_group + first,
          std::min(kBlock<A>, blocks.channels_per_group - first)};
}

// B and C in A, (2, batch, groups, state, length).
template <class A>
struct Factors {
  const SelectiveScan& args;
  A* lines;

  int64_t size() const { return args.batch * args.groups * args.state * args.length; }
  A* line(int which, int64_t sample, int64_t group, int64_t n) const {
    return lines + which * size() + ((sample * args.groups + group) * args.state + n) * args.length;
  }

  // Widens all of them.
  void put(const Context& context, int64_t threads) const {
    const int64_t count = args.batch * args.groups * args.state;
    for_each_piece(context, threads, 2 * count, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const bool is_B = i < count;
        const int64_t n = i % args.state, group = i / args.state % args.groups;
        const int64_t sample = i % count / args.state / args.groups;
        const ScanFactorStride& stride = is_B ? args.B_stride : args.C_stride;
        widen_strided(is_B ? args.B : args.C, is_B ? args.B_dtype : args.C_dtype,
                      sample * stride.sample + group * stride.group + n * stride.state,
                      stride.token, args.length, lines + i * args.length);
      }
    });
  }
};

// What a thread has of a block: A, the state (or its gradient), and sums for A's gradient.
template <class A>
struct Numbers {
  Row<A>* of_A;  // (state,) rows
  Row<A>* h;
  Row<A>* dA;

  Numbers(Arena& arena, int64_t state) {
    for (auto* each : {&of_A, &h, &dA}) *each = arena.take<Row<A>>(state);
  }
};

// Calls f<A>() with the type that the call is computed in.
template <class F>
void visit(const SelectiveScan& args, F&& f) {
  args.u_dtype == DType::kFloat64 ? f.template operator()<double>()
                                  : f.template operator()<float>();
}

constexpr int64_t kExponentials = 2;  // of the state per nanosecond, with their multiply-adds

inline int64_t nanoseconds_of(const SelectiveScan& args) {
  return args.batch * args.channels * args.length * args.state / kExponentials;
}

// ---- a chunk ------------------------------------------------------------------------------------

// The rows of a chunk that both passes read.
template <class A>
struct Chunk {
  Rows<A> u, step, slope, product;  // product: step * u

  void put(const SelectiveScan& args, const Block& block, const Span& span, const Row<A>& bias,
           bool wants_slope) {
    read_rows<A>(args.u, args.u_dtype, args.u_stride, block, span, u);
    read_rows<A>(args.delta, args.delta_dtype, args.delta_stride, block, span, step);
    for (int64_t t = 0; t < span.tokens; ++t) {
      for (int64_t c = 0; c < kBlock<A>; c += kLanes<A>) {
        Vec<A> x = load<A>(step[t] + c) + load<A>(bias + c);
        if (args.delta_softplus) {
          const Gate<A> of = softplus(x);
          x = of.value;
          if (wants_slope) store<A>(slope[t] + c, of.slope);
        }
        store<A>(step[t] + c, x);
        store<A>(product[t] + c, x * load<A>(u[t] + c));
      }
    }
  }
};

// The sum of products x[i] y[i]: of halves, halves of these, and so on.
template <class A, int kCount>
ONEPASS_INLINE Vec<A> sum_of(const Vec<A>* x, const Vec<A>* y) {
  constexpr int kHalf = kCount / 2;
  if constexpr (kCount == 1) {
    return x[0] * y[0];
  } else if constexpr (kCount == 2) {
    return fma<A>(x[1], y[1], x[0] * y[0]);
  } else {
    return sum_of<A, kHalf>(x, y) + sum_of<A, kCount - kHalf>(x + kHalf, y + kHalf);
  }
}

// y[t] += sum over kCount numbers of the state of C h; the state goes on in `h`.
// scalar: h = exp(step[t] A) h + product[t] B[t]; y[t] += C[t] h
template <class A, int kCount>
ONEPASS_INLINE void scan_tile(const Chunk<A>& chunk, int64_t tokens, int64_t lane,
                              const Row<A>* of_A, Row<A>* h, const A* B, const A* C, int64_t stride,
                              Rows<A>& y) {
  Vec<A> state[kCount], a[kCount];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
    state[i] = load<A>(h[i] + lane);
    a[i] = load<A>(of_A[i] + lane);
  }
  for (int64_t t = 0; t < tokens; ++t) {
    const Vec<A> step = load<A>(chunk.step[t] + lane);
    const Vec<A> product = load<A>(chunk.product[t] + lane);
    Vec<A> of_C[kCount];
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      state[i] = fma<A>(decay_of(step * a[i]), state[i], product * broadcast<A>(B[i * stride + t]));
      of_C[i] = broadcast<A>(C[i * stride + t]);
    }
    store<A>(y[t] + lane, load<A>(y[t] + lane) + sum_of<A, kCount>(of_C, state));
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) store<A>(h[i] + lane, state[i]);
}

// y[t] = D u[t]
template <class A>
void put_skip(const Chunk<A>& chunk, int64_t tokens, const Row<A>& D, Rows<A>& y) {
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t c = 0; c < kBlock<A>; c += kLanes<A>) {
      store<A>(y[t] + c, load<A>(D + c) * load<A>(chunk.u[t] + c));
    }
  }
}

// rows[t] *= silu(z[t]); reads z.
template <class A>
void put_gated(const SelectiveScan& args, const Block& block, const Span& span, Rows<A>& z,
               Rows<A>& rows) {
  read_rows<A>(args.z, args.z_dtype, args.z_stride, block, span, z);
  for (int64_t t = 0; t < span.tokens; ++t) {
    for (int64_t c = 0; c < kBlock<A>; c += kLanes<A>) {
      const Vec<A> gate = Activated<Activation::kSilu, A>(load<A>(z[t] + c)).value();
      store<A>(rows[t] + c, load<A>(rows[t] + c) * gate);
    }
  }
}

template <class A>
void read_channels(const void* tensor, DType dtype, const Block& block, Row<A>& to) {
  std::fill_n(to, kBlock<A>, A(0));
  if (tensor) widen_line(tensor, dtype, block.first, block.channels, to);
}

}  // namespace selective_scan
}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
