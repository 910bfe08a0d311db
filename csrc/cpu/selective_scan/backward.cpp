#include "cpu/kernels.h"
#include "cpu/row_sums.h"
#include "cpu/selective_scan/chunk.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace selective_scan {
namespace {

constexpr int64_t kMostParts = 16;  // of a group's channels
constexpr int kTile = 2;            // numbers of the state that run together
constexpr int64_t kNumbers = 16;    // of the state that are summed before they are added to a sum
constexpr int64_t kRun = 16;        // tokens that are summed before they are added to a sum
constexpr int kApart = 4;           // sums that such a run is divided among

template <class A>
struct BackwardScratch {
  Chunk<A> chunk;
  Rows<A> y, z, dy, dproduct, dstep;
  Rows<A> run_y, run_dproduct, run_dstep;  // sums over kNumbers of the state
  // Of the numbers of a tile: states, and sums over vectors of channels.
  alignas(64) Vec<A> h[kTile][kTokens + 1], decay[kTile][kTokens];
  alignas(64) Vec<A> of_B[kTile][kTokens], of_C[kTile][kTokens];
};

// kCount numbers of the state of one vector of channels: computes the chunk's states again, then
// goes back. `gradient` is that of the states after the chunk, and becomes that of those before it.
// scalar, from the last token to the first, per number:
//   g += C[t] dy[t];  of_B[t] += g product[t];  of_C[t] += dy[t] h[t];  dproduct[t] += g B[t]
//   w = g h[t - 1] decay[t];  dstep[t] += w A;  dA += w step[t];  g *= decay[t]
template <class A, int kCount>
ONEPASS_INLINE void scan_back(BackwardScratch<A>& scratch, int64_t tokens, int64_t lane,
                              const Row<A>* of_A, const Row<A>* first, Row<A>* gradient,
                              Row<A>* sum_of_A, const A* B, const A* C, int64_t stride,
                              bool needs_y) {
  const Chunk<A>& chunk = scratch.chunk;
  Vec<A> a[kCount], h[kCount], g[kCount], dA[kCount], run[kCount], x[kCount], y[kCount];
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) {
    a[i] = load<A>(of_A[i] + lane);
    scratch.h[i][0] = h[i] = load<A>(first[i] + lane);
    g[i] = load<A>(gradient[i] + lane);
    dA[i] = run[i] = Vec<A>{};
  }
  for (int64_t t = 0; t < tokens; ++t) {
    const Vec<A> step = load<A>(chunk.step[t] + lane), product = load<A>(chunk.product[t] + lane);
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      const Vec<A> decay = decay_of(step * a[i]);
      h[i] = fma<A>(decay, h[i], product * broadcast<A>(B[i * stride + t]));
      scratch.decay[i][t] = decay;
      scratch.h[i][t + 1] = h[i];
    }
  }
  if (needs_y) {
    for (int64_t t = 0; t < tokens; ++t) {
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        x[i] = broadcast<A>(C[i * stride + t]);
        y[i] = scratch.h[i][t + 1];
      }
      A* sum = scratch.run_y[t] + lane;
      store<A>(sum, load<A>(sum) + sum_of<A, kCount>(x, y));
    }
  }
  for (int64_t t = tokens - 1; t >= 0; --t) {
    const Vec<A> dy = load<A>(scratch.dy[t] + lane), step = load<A>(chunk.step[t] + lane);
    const Vec<A> product = load<A>(chunk.product[t] + lane);
    Vec<A> w[kCount];
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      g[i] = fma<A>(broadcast<A>(C[i * stride + t]), dy, g[i]);
      scratch.of_B[i][t] = fma<A>(g[i], product, scratch.of_B[i][t]);
      scratch.of_C[i][t] = fma<A>(dy, scratch.h[i][t + 1], scratch.of_C[i][t]);
      x[i] = g[i];
      y[i] = broadcast<A>(B[i * stride + t]);
      g[i] *= scratch.decay[i][t];
      w[i] = g[i] * scratch.h[i][t];
      run[i] = fma<A>(w[i], step, run[i]);
    }
    A* dproduct = scratch.run_dproduct[t] + lane;
    store<A>(dproduct, load<A>(dproduct) + sum_of<A, kCount>(x, y));
    A* dstep = scratch.run_dstep[t] + lane;
    store<A>(dstep, load<A>(dstep) + sum_of<A, kCount>(w, a));
    if (t % kRun == 0) {
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        dA[i] += run[i];
        run[i] = Vec<A>{};
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) {
    store<A>(gradient[i] + lane, g[i]);
    store<A>(sum_of_A[i] + lane, load<A>(sum_of_A[i] + lane) + dA[i]);
  }
}

// Adds a run of numbers of the state to a sum.
template <class A>
void add_run(int64_t tokens, Rows<A>& run, Rows<A>& sum) {
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t c = 0; c < kBlock<A>; c += kLanes<A>) {
      store<A>(sum[t] + c, load<A>(sum[t] + c) + load<A>(run[t] + c));
      store<A>(run[t] + c, Vec<A>{});
    }
  }
}

// A sum over the chunks of a sequence of any length, with what its additions have lost (Kahan
// 1965).
template <class A>
struct LongSum {
  Row<A> sum = {}, lost = {};

  void add(int64_t lane, Vec<A> x) {
    const Vec<A> before = load<A>(sum + lane), rest = x - load<A>(lost + lane);
    const Vec<A> after = before + rest;
    const Vec<A> gone = (after - before) - rest;  // NaN where the sum is Inf
    store<A>(lost + lane, gone == gone ? gone : Vec<A>{});
    store<A>(sum + lane, after);
  }
};

// Sums of a block over tokens.
template <class A>
struct ChannelSums {
  LongSum<A> D, bias;
};

// The gradients of y and of the gate, from that of the output; y is complete.
template <class A>
void put_dz(const SelectiveScanBackward& args, const Block& block, const Span& span,
            BackwardScratch<A>& scratch) {
  const int64_t tokens = span.tokens;
  Rows<A>& doutput = scratch.dy;  // no longer needed
  if (!args.doutput) {
    std::fill_n(&scratch.z[0][0], tokens * kBlock<A>, A(0));
    return write_rows<A>(args, scratch.z, block, span, args.dz, args.z_dtype);
  }
  read_rows<A>(args.doutput, args.u_dtype, args.doutput_stride, block, span, doutput);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t c = 0; c < kBlock<A>; c += kLanes<A>) {
      const Vec<A> upstream = load<A>(doutput[t] + c) * load<A>(scratch.y[t] + c);
      const Activated<Activation::kSilu, A> gate(load<A>(scratch.z[t] + c));
      store<A>(scratch.z[t] + c, gate.times_slope(upstream));
    }
  }
  write_rows<A>(args, scratch.z, block, span, args.dz, args.z_dtype);
}

// The gradients of u and delta of a chunk, and their sums.
template <class A>
void put_du(const SelectiveScanBackward& args, const Block& block, const Span& span,
            const Row<A>& D, BackwardScratch<A>& scratch, ChannelSums<A>& sums) {
  const int64_t tokens = span.tokens;
  const Chunk<A>& chunk = scratch.chunk;
  for (int64_t c = 0; c < kBlock<A>; c += kLanes<A>) {
    Vec<A> of_D{}, of_bias{}, run_D[kApart]{}, run_bias[kApart]{};
    const auto add_runs = [&] {
      of_D += (run_D[0] + run_D[1]) + (run_D[2] + run_D[3]);
      of_bias += (run_bias[0] + run_bias[1]) + (run_bias[2] + run_bias[3]);
      std::fill_n(run_D, kApart, Vec<A>{});
      std::fill_n(run_bias, kApart, Vec<A>{});
    };
    for (int64_t t = 0; t < tokens; ++t) {
      const Vec<A> dy = load<A>(scratch.dy[t] + c), u = load<A>(chunk.u[t] + c);
      const Vec<A> dproduct = load<A>(scratch.dproduct[t] + c);
      Vec<A> ddelta = fma<A>(dproduct, u, load<A>(scratch.dstep[t] + c));
      if (args.delta_softplus) ddelta *= load<A>(chunk.slope[t] + c);
      const Vec<A> du = fma<A>(dproduct, load<A>(chunk.step[t] + c), dy * load<A>(D + c));
      run_D[t % kApart] = fma<A>(dy, u, run_D[t % kApart]);
      run_bias[t % kApart] += ddelta;
      if ((t + 1) % kRun == 0 || t + 1 == tokens) add_runs();
      store<A>(scratch.dproduct[t] + c, du);
      store<A>(scratch.dstep[t] + c, ddelta);
    }
    sums.D.add(c, of_D);
    sums.bias.add(c, of_bias);
  }
  if (args.du) {
    write_rows<A>(args, scratch.dproduct, block, span, args.du, args.u_dtype);
  }
  if (args.ddelta) {
    write_rows<A>(args, scratch.dstep, block, span, args.ddelta, args.delta_dtype);
  }
}

// The gradient of y: doutput, times the gate.
template <class A>
void put_dy(const SelectiveScanBackward& args, const Block& block, const Span& span,
            BackwardScratch<A>& scratch) {
  const int64_t tokens = span.tokens;
  if (!args.doutput) {
    std::fill_n(&scratch.dy[0][0], tokens * kBlock<A>, A(0));
    return;
  }
  read_rows<A>(args.doutput, args.u_dtype, args.doutput_stride, block, span, scratch.dy);
  if (args.z) put_gated(args, block, span, scratch.z, scratch.dy);
}

// A block of channels of one sequence. of_B and of_C, (state, length), are a part's sums.
template <class A>
void selective_scan_backward_kernel(const SelectiveScanBackward& args, const Factors<A>& factors,
                                    const Sequence& sequence, const Block& block,
                                    const Numbers<A>& numbers, BackwardScratch<A>& scratch,
                                    ChannelSums<A>& sums, A* of_B, A* of_C) {
  const int64_t state = args.state, of_sequence = sequence.number * args.channels + block.first;
  Row<A> bias, D;
  read_channels(args.delta_bias, args.delta_bias_dtype, block, bias);
  read_channels(args.D, args.D_dtype, block, D);
  read_states<A>(args.dlast_state, kAccumulator<A>, of_sequence, block.channels, state, numbers.h);
  const bool needs_y = args.dz && args.doutput;
  const int64_t length = sequence.end - sequence.begin;
  for (int64_t i = ceil_div(length, kTokens) - 1; i >= 0; --i) {
    const int64_t begin = sequence.begin + i * kTokens;
    const int64_t tokens = std::min(kTokens, sequence.end - begin);
    const Span span{sequence.sample, begin, tokens};
    const A* saved =
        static_cast<const A*>(args.states) +
        (sequence.sample * args.chunks + sequence.chunk(args, begin)) * state * args.channels +
        block.first;
    scratch.chunk.put(args, block, span, bias, true);
    put_dy(args, block, span, scratch);
    if (needs_y) put_skip(scratch.chunk, tokens, D, scratch.y);
    for (auto* rows : {&scratch.dproduct, &scratch.dstep, &scratch.run_y, &scratch.run_dproduct,
                       &scratch.run_dstep}) {
      std::fill_n(&(*rows)[0][0], tokens * kBlock<A>, A(0));
    }
    const auto scan = [&]<int kCount>(int64_t n, std::integral_constant<int, kCount>) {
      Row<A> first[kCount] = {};
      for (int i = 0; i < kCount; ++i) {
        std::copy_n(saved + (n + i) * args.channels, block.channels, first[i]);
        std::fill_n(scratch.of_B[i], tokens, Vec<A>{});
        std::fill_n(scratch.of_C[i], tokens, Vec<A>{});
      }
      const A* B = factors.line(0, sequence.sample, block.group, n) + begin;
      const A* C = factors.line(1, sequence.sample, block.group, n) + begin;
      for (int64_t c = 0; c < block.channels; c += kLanes<A>) {
        scan_back<A, kCount>(scratch, tokens, c, numbers.of_A + n, first, numbers.h + n,
                             numbers.dA + n, B, C, args.length, needs_y);
      }
      if (!of_B) return;
      for (int i = 0; i < kCount; ++i) {
        add_lanes(scratch.of_B[i], tokens, of_B + (n + i) * args.length + begin);
        add_lanes(scratch.of_C[i], tokens, of_C + (n + i) * args.length + begin);
      }
    };
    for (int64_t from = 0; from < state; from += kNumbers) {
      const int64_t end = std::min(state, from + kNumbers);
      int64_t n = from;
      for (; n + kTile <= end; n += kTile) scan(n, std::integral_constant<int, kTile>{});
      for (; n < end; ++n) scan(n, std::integral_constant<int, 1>{});
      if (needs_y) add_run(tokens, scratch.run_y, scratch.y);
      add_run(tokens, scratch.run_dproduct, scratch.dproduct);
      add_run(tokens, scratch.run_dstep, scratch.dstep);
    }
    put_du(args, block, span, D, scratch, sums);
    if (args.dz) put_dz(args, block, span, scratch);
  }
  if (args.dinitial_state) {
    write_states<A>(numbers.h[0], kBlock<A>, of_sequence, block.channels, state,
                    args.dinitial_state, args.initial_state_dtype);
  }
}

// The parts that a group's blocks are cut into.
template <class A>
struct Parts {
  int64_t blocks, count;

  explicit Parts(const SelectiveScan& args) {
    const int64_t all = Blocks<A>(args).per_group;
    blocks = ceil_div(all, kMostParts);
    count = ceil_div(all, blocks);
  }
};

template <class A>
struct BackwardLayout {
  A* factors;
  A* of_factors;   // (batch, groups, parts, 2, state, length)
  A* of_channels;  // (batch, state + 2, channels): sums for A, D, delta_bias
  Slots slots;

  BackwardLayout(const SelectiveScanBackward& args, void* base) {
    Arena arena(base);
    const int64_t size = Factors<A>{args, nullptr}.size();
    factors = arena.take<A>(2 * size);
    of_channels = arena.take<A>(args.batch * (args.state + 2) * args.channels);
    of_factors = args.dB || args.dC ? arena.take<A>(2 * size * Parts<A>(args).count) : nullptr;
    Arena one(nullptr);
    Numbers<A>(one, args.state);
    one.take<BackwardScratch<A>>(1);
    slots = {arena.used(), one.used()};
  }
};

Plan plan_backward(const SelectiveScanBackward& args, const Machine& machine) {
  Plan plan{.workspace_bytes = 0,
            .kernel_name = "selective_scan_backward_kernel",
            .rows_per_tile = kTokens,
            .splits = 0,
            .reason = "vectors of channels"};
  visit(args, [&]<class A>() {
    plan.splits = args.batch * args.groups * Parts<A>(args).count;
    plan.threads = threads_for(3 * nanoseconds_of(args), plan.splits, machine);
    plan.workspace_bytes = BackwardLayout<A>(args, nullptr).slots.end(plan.threads);
  });
  return plan;
}

// A part of a group's channels in one sample, block by block.
template <class A>
void run_part(const SelectiveScanBackward& args, const BackwardLayout<A>& layout, int64_t piece,
              void* scratch) {
  const Parts<A> parts(args);
  const Blocks<A> blocks(args);
  const Factors<A> factors{args, layout.factors};
  const int64_t group = piece / parts.count % args.groups;
  const int64_t sample = piece / parts.count / args.groups;
  Arena arena(scratch);
  const Numbers<A> numbers(arena, args.state);
  auto& own = *arena.take<BackwardScratch<A>>(1);
  const int64_t lines = args.state * args.length;
  A* of_B = layout.of_factors ? layout.of_factors + piece * 2 * lines : nullptr;
  A* of_C = of_B ? of_B + lines : nullptr;
  if (of_B) std::fill_n(of_B, 2 * lines, A(0));
  const int64_t end = std::min(blocks.per_group, (piece % parts.count + 1) * parts.blocks);
  for (int64_t number = piece % parts.count * parts.blocks; number < end; ++number) {
    const Block block = block_of(blocks, group, number);
    read_states<A>(args.A, args.A_dtype, block.first, block.channels, args.state, numbers.of_A);
    std::fill_n(&numbers.dA[0][0], args.state * kBlock<A>, A(0));
    ChannelSums<A> sums;
    const int64_t first = args.cu_seqlens ? 0 : sample;
    const int64_t last = args.cu_seqlens ? args.sequences : sample + 1;
    for (int64_t s = first; s < last; ++s) {
      selective_scan_backward_kernel(args, factors, Sequence(args, s), block, numbers, own, sums,
                                     of_B, of_C);
    }
    A* to = layout.of_channels + sample * (args.state + 2) * args.channels + block.first;
    const auto leave = [&](const A* line) {
      std::copy_n(line, block.channels, to);
      to += args.channels;
    };
    for (int64_t n = 0; n < args.state; ++n) leave(numbers.dA[n]);
    leave(sums.D.sum);
    leave(sums.bias.sum);
  }
}

// Adds up the samples' sums for A, D and delta_bias.
template <class A>
void reduce_channels(const SelectiveScanBackward& args, const BackwardLayout<A>& layout,
                     int64_t begin, int64_t end) {
  const int64_t stride = (args.state + 2) * args.channels;
  const auto reduce = [&](int64_t line, int64_t first, int64_t last, void* to, DType dtype) {
    reduce_partials<A>(layout.of_channels + line * args.channels, args.batch, stride, first, last,
                       to, dtype);
  };
  if (args.dA) {
    A* all = layout.of_channels;  // the sums lie where the first sample's were
    for (int64_t n = 0; n < args.state; ++n) {
      reduce(n, begin, end, all + n * args.channels, kAccumulator<A>);
    }
    for (int64_t first = begin; first < end; first += kBlock<A>) {
      const int64_t count = std::min(kBlock<A>, end - first);
      write_states<A>(all + first, args.channels, first, count, args.state, args.dA, args.A_dtype);
    }
  }
  if (args.dD) reduce(args.state, begin, end, args.dD, args.D_dtype);
  if (args.ddelta_bias) reduce(args.state + 1, begin, end, args.ddelta_bias, args.delta_bias_dtype);
}

// Adds up the parts' sums for B or C of one sample and group.
template <class A>
void reduce_factor(const SelectiveScanBackward& args, const BackwardLayout<A>& layout,
                   int64_t piece) {
  const int64_t parts = Parts<A>(args).count, lines = args.state * args.length;
  const int64_t of = piece / 2;  // sample and group
  const bool is_B = piece % 2 == 0;
  void* to = is_B ? args.dB : args.dC;
  const DType dtype = is_B ? args.B_dtype : args.C_dtype;
  if (!to) return;
  A* from = layout.of_factors + of * parts * 2 * lines + (is_B ? 0 : lines);
  reduce_partials<A>(from, parts, 2 * lines, 0, lines,
                     static_cast<char*>(to) + of * lines * size_of(dtype), dtype);
}

void run_backward(const SelectiveScanBackward& args, const Plan& plan, void* workspace,
                  const Context& context) {
  visit(args, [&]<class A>() {
    const BackwardLayout<A> layout(args, workspace);
    Factors<A>{args, layout.factors}.put(context, plan.threads);
    for_each_piece_in_order(context, plan.threads, plan.splits, [&](int64_t piece, int64_t slot) {
      run_part<A>(args, layout, piece, layout.slots.of(workspace, slot));
    });
    for_each_piece(context, plan.threads, ceil_div(args.channels, kBlock<A>),
                   [&](int64_t begin, int64_t end) {
                     reduce_channels<A>(args, layout, begin * kBlock<A>,
                                        std::min(end * kBlock<A>, args.channels));
                   });
    if (!layout.of_factors) return;
    for_each_piece(context, plan.threads, 2 * args.batch * args.groups,
                   [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; ++i) reduce_factor<A>(args, layout, i);
                   });
  });
}

}  // namespace
}  // namespace selective_scan

Operator<SelectiveScanBackward> selective_scan_backward() {
  return {selective_scan::plan_backward, selective_scan::run_backward};
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
