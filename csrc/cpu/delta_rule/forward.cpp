// Linear attention with a gated delta rule (Yang, Kautz, Hatamizadeh, Gated delta networks, 2024)
// or a decay for each channel (Kimi team, Kimi Linear, 2025), forward: the recurrence by chunks of
// tokens (Yang et al., Parallelizing linear transformers with the delta rule over sequence length,
// 2024).
//
// Of each chunk, with S the state before it and c[t] the sum of g from its begin up to t:
//   r[t] = v[t] - S^T (exp(c[t]) k[t])
//   u[t] = beta[t] (r[t] - sum over s < t of (k[t] (exp(c[t] - c[s]) k[s])) u[s])
//   output[t] = S^T (exp(c[t]) q[t]) + sum over s <= t of (q[t] (exp(c[t] - c[s]) k[s])) u[s]
//   S becomes exp(c[last]) S + sum over s of (exp(c[last] - c[s]) k[s]) u[s]^T
// All but u are products of small matrices on the tiles of cpu/multiply.h. The equations for u are
// solved by blocks of tokens, without an inverse: what other blocks bring is a product too. Decays
// are exponentials of sums and products of these, and none is a quotient: nothing overflows where g
// is at most 0.
//
// A piece of work is a head of a sequence, whose state stays in the cache; columns of values are
// vector lanes. Multiply-adds per token and head: 3 key_dim value_dim + kTokens (key_dim +
// value_dim). Done when these bind.
#include "cpu/delta_rule/chunk.h"
#include "cpu/kernels.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace delta_rule {
namespace {

// The output of a head's chunk, before it is scaled.
// scalar: output[t] = q_before[t] state + sum over s <= t of of_queries[t][s] u[s]
template <class A>
struct OutputProduct {
  Broadcasts<A> q_before;
  Panel<A> state;
  int64_t key_dim;  // 0 if the state is
  Broadcasts<A> of_queries;
  Panel<A> u;
  Vec<A> scale;
  A* output;

  template <int kRows, int kVectors>
  [[gnu::noinline]] void run(int64_t row, int64_t column) const {
    Vec<A> sum[kRows][kVectors] = {};
    add_chains(q_before.from(row), state.from(0, column), key_dim, sum);
    add_chains(of_queries.from(row), u.from(0, column), row, sum);
    add_triangle<false>(of_queries.from(row, row), u.from(row, column), sum);
    for_each_sum<A>(sum, [&](int r, int v, Vec<A> value) {
      store<A>(output + (row + r) * u.of_step + column + v * kLanes<A>, scale * value);
    });
  }
};

// scalar: state[n] = left[n] state[n] + sum over s of k_after[s][n] u[s]
template <class A>
struct StateProduct {
  Broadcasts<A> k_after;
  Panel<A> u;
  int64_t tokens;
  bool has_state;  // otherwise it is not read, as if it were 0
  const A* left;
  A* state;

  template <int kRows, int kVectors>
  [[gnu::noinline]] void run(int64_t row, int64_t column) const {
    Vec<A> sum[kRows][kVectors] = {};
    add_chains(k_after.from(row), u.from(0, column), tokens, sum);
    for_each_sum<A>(sum, [&](int r, int v, Vec<A> value) {
      A* to = state + (row + r) * u.of_step + column + v * kLanes<A>;
      const Vec<A> factor = broadcast<A>(left[row + r]);
      store<A>(to, has_state ? fma<A>(load<A>(to), factor, value) : value);
    });
  }
};

template <class A>
struct ForwardScratch {
  Chunk<A> chunk;
  A *state, *u, *output;  // (key_dim, value_dim), and (kTokens, value_dim)

  ForwardScratch(const DeltaRule& args, Arena& arena)
      : chunk(args, arena),
        state(arena.take<A>(args.key_dim * chunk.widths.value_stride)),
        u(arena.take<A>(kTokens * chunk.widths.value_stride)),
        output(arena.take<A>(kTokens * chunk.widths.value_stride)) {}
};

template <bool kChannels, class A>
void delta_rule_kernel(const DeltaRuleForward& args, const Sequence& sequence, int64_t head,
                       ForwardScratch<A>& own) {
  Chunk<A>& chunk = own.chunk;
  const Widths<A>& widths = chunk.widths;
  const int64_t of = sequence.number * args.heads + head, stride = widths.value_stride;
  read_state(args, args.initial_state, args.initial_state_dtype, of, widths, own.state);
  for (int64_t begin = sequence.begin; begin < sequence.end; begin += kTokens) {
    const Span span{sequence.sample, begin, std::min(kTokens, sequence.end - begin)};
    if (args.states) {
      const int64_t number = sequence.sample * args.chunks + sequence.chunk(args, begin);
      write_state(args, own.state, number * args.heads + head, widths, args.states,
                  kAccumulator<A>);
    }
    put_chunk<kChannels>(args, span, head, chunk);
    read_rows(args.v, args.v_dtype, args.v_stride, span, head, args.value_dim, A(1), stride, own.u);
    const bool has_state = args.initial_state || begin > sequence.begin;
    const int64_t key_dim = has_state ? args.key_dim : 0;
    const Panel<A> state{own.state, stride}, u{own.u, stride};
    if (has_state) {
      for_each_tile<A>(
          span.tokens, widths.value,
          Residual<A>{{chunk.k_before, widths.key_stride, 1}, state, args.key_dim, own.u});
    }
    scale_rows(span.tokens, widths.value, stride, chunk.beta, own.u, own.u);
    solve<false>(chunk.system, span.tokens, widths.value, stride, own.u);
    for_each_tile<A>(span.tokens, widths.value,
                     OutputProduct<A>{{chunk.q_before, widths.key_stride, 1},
                                      state,
                                      key_dim,
                                      {chunk.of_queries[0], kTokens, 1},
                                      u,
                                      broadcast<A>(static_cast<A>(args.scale)),
                                      own.output});
    for_each_tile<A>(args.key_dim, widths.value,
                     StateProduct<A>{{chunk.k_after, 1, widths.key_stride},
                                     u,
                                     span.tokens,
                                     has_state,
                                     chunk.left,
                                     own.state});
    for (int64_t t = 0; t < span.tokens; ++t) {
      round_line(own.output + t * stride, args.value_dim, args.output, args.v_dtype,
                 place_of(args, span, t, head, args.heads) * args.value_dim);
    }
  }
  write_state(args, own.state, of, widths, args.final_state, kAccumulator<A>);
}

Plan plan_forward(const DeltaRuleForward& args, const Machine& machine) {
  Plan plan{.workspace_bytes = 0,
            .kernel_name = "delta_rule_kernel",
            .rows_per_tile = kTokens,
            .splits = args.sequences * args.heads,
            .reason = "products of chunks"};
  plan.threads = threads_for(nanoseconds_of(args), plan.splits, machine);
  visit(args, [&]<class A, bool kChannels>() {
    Arena one(nullptr);
    ForwardScratch<A>(args, one);
    plan.workspace_bytes = Slots{0, one.used()}.end(plan.threads);
  });
  return plan;
}

void run_forward(const DeltaRuleForward& args, const Plan& plan, void* workspace,
                 const Context& context) {
  visit(args, [&]<class A, bool kChannels>() {
    const Slots slots{0, plan.workspace_bytes / plan.threads};
    for_each_piece_in_order(context, plan.threads, plan.splits, [&](int64_t piece, int64_t slot) {
      Arena arena(slots.of(workspace, slot));
      ForwardScratch<A> own(args, arena);
      delta_rule_kernel<kChannels>(args, Sequence(args, piece / args.heads), piece % args.heads,
                                   own);
    });
  });
}

}  // namespace
}  // namespace delta_rule

Operator<DeltaRuleForward> delta_rule_forward() {
  return {delta_rule::plan_forward, delta_rule::run_forward};
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
