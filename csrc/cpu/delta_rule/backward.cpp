// Linear attention with a delta rule, backward: chunks from the last to the first. With the chunk's
// numbers as in forward.cpp, dy that of the output before it is scaled, and dS that of the state
// after the chunk:
//   du[s] = dS^T k_after[s] + sum over t >= s of of_queries[t][s] dy[t]
//   w solves the transposed system of equations: w[s] = du[s] - sum over t > s of beta[t]
//     of_keys[t][s] w[t]; it is the gradient of beta r
//   dv = beta w,  dbeta[t] = w[t] e[t]; u = beta e, and e has a system of its own
//   of_keys[t][s] has -beta[t] w[t] u[s], of_queries[t][s] has dy[t] u[s]
//   q_before[t] has S dy[t], k_before[t] has -S (beta[t] w[t]), k_after[s] has dS u[s]
//   dS becomes left dS + sum over t of q_before[t] dy[t]^T - k_before[t] (beta[t] w[t])^T
//
// A piece of work is a head of keys in a sequence, with all heads of values that it has. e and u
// are computed again. Multiply-adds per token and head: 7 key_dim value_dim + kTokens (3 key_dim
// + 2.5 value_dim).
#include "cpu/delta_rule/backward_pairs.h"
#include "cpu/kernels.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace delta_rule {
namespace {

template <class A>
struct BackwardScratch {
  Chunk<A> chunk;
  KeyGradients<A> keys;
  A* dstates;         // (heads of a key head, key_dim, value_dim)
  A* state;           // (key_dim, value_dim)
  A* turned;          // (value_dim, key_dim), of a state or its gradient
  A *e, *u, *w, *dy;  // (kTokens, value_dim)
  A* panel;           // (value_dim, kTokens), of u
  Line<A>* system;    // of e
  A* dbeta;           // (kTokens,)

  BackwardScratch(const DeltaRule& args, Arena& arena)
      : chunk(args, arena), keys(args, chunk, arena) {
    const Widths<A>& widths = chunk.widths;
    const int64_t of_state = args.key_dim * widths.value_stride;
    dstates = arena.take<A>(args.heads / args.key_heads * of_state);
    state = arena.take<A>(of_state);
    turned = arena.take<A>(args.value_dim * widths.key_stride);
    for (A** each : {&e, &u, &w, &dy}) *each = arena.take<A>(kTokens * widths.value_stride);
    panel = arena.take<A>(args.value_dim * kTokens);
    system = arena.take<Line<A>>(kTokens);
    dbeta = arena.take<A>(kTokens);
  }
};

// scalar: dbeta[t] = w[t] e[t]
template <class A>
void put_dbeta(BackwardScratch<A>& own) {
  const int64_t stride = own.chunk.widths.value_stride;
  for (int64_t t = 0; t < own.chunk.tokens; ++t) {
    Vec<A> sum{};
    for (int64_t i = t * stride; i < t * stride + own.chunk.widths.value; i += kLanes<A>) {
      sum = fma<A>(load<A>(own.w + i), load<A>(own.e + i), sum);
    }
    own.dbeta[t] = sum_of_lanes<A>(sum);
  }
}

// scalar: system[t][s] = -of_keys[t][s] beta[s], for s < t, and for others of their vectors
template <class A>
void put_column_system(const Chunk<A>& chunk, Line<A>* system) {
  std::fill(chunk.beta + chunk.tokens, chunk.beta + kTokens, A(0));
  for (int64_t t = 0; t < chunk.tokens; ++t) {
    for (int64_t s = 0; s <= t; s += kLanes<A>) {
      store<A>(system[t] + s, -load<A>(chunk.beta + s) * load<A>(chunk.of_keys[t] + s));
    }
  }
}

// scalar: dleft[n] = sum over p of state[n][p] dstate[n][p]
template <class A>
void put_dleft(const Widths<A>& widths, int64_t key_dim, const A* state, const A* dstate,
               A* dleft) {
  std::fill_n(dleft, widths.key, A(0));
  for (int64_t n = 0; n < key_dim; ++n) {
    Vec<A> sum{};
    for (int64_t i = n * widths.value_stride; i < n * widths.value_stride + widths.value;
         i += kLanes<A>) {
      sum = fma<A>(load<A>(state + i), load<A>(dstate + i), sum);
    }
    dleft[n] = sum_of_lanes<A>(sum);
  }
}

// A head's chunk; dstate becomes the gradient of the state before it.
template <bool kChannels, class A>
void head_backward(const DeltaRuleBackward& args, const Span& span, int64_t chunk_number,
                   int64_t head, A* dstate, BackwardScratch<A>& own) {
  Chunk<A>& chunk = own.chunk;
  KeyGradients<A>& keys = own.keys;
  const Widths<A>& widths = chunk.widths;
  const int64_t tokens = span.tokens, stride = widths.value_stride, of_keys = widths.key_stride;
  put_chunk<kChannels>(args, span, head, chunk);
  read_state(args, args.states, kAccumulator<A>, chunk_number * args.heads + head, widths,
             own.state);
  read_rows(args.v, args.v_dtype, args.v_stride, span, head, args.value_dim, A(1), stride, own.e);
  const Panel<A> state{own.state, stride};
  for_each_tile<A>(tokens, widths.value,
                   Residual<A>{{chunk.k_before, of_keys, 1}, state, args.key_dim, own.e});
  put_column_system(chunk, own.system);
  solve<false>(own.system, tokens, widths.value, stride, own.e);
  scale_rows(tokens, widths.value, stride, chunk.beta, own.e, own.u);
  if (args.doutput) {
    read_rows(args.doutput, args.v_dtype, args.doutput_stride, span, head, args.value_dim,
              static_cast<A>(args.scale), stride, own.dy);
  } else {
    std::fill_n(own.dy, tokens * stride, A(0));
  }
  const Panel<A> dy{own.dy, stride};
  for_each_tile<A>(tokens, widths.value,
                   UpdateGradient<A>{{chunk.k_after, of_keys, 1},
                                     {dstate, stride},
                                     args.key_dim,
                                     tokens,
                                     chunk.of_queries,
                                     dy,
                                     own.w});
  solve<true>(chunk.system, tokens, widths.value, stride, own.w);
  put_dbeta(own);
  scale_rows(tokens, widths.value, stride, chunk.beta, own.w, own.w);
  if (args.dv) {
    for (int64_t t = 0; t < tokens; ++t) {
      round_line(own.w + t * stride, args.value_dim, args.dv, args.v_dtype,
                 place_of(args, span, t, head, args.heads) * args.value_dim);
    }
  }
  // w becomes the gradient of what k_before reads.
  for (int64_t i = 0; i < tokens * stride; i += kLanes<A>) store<A>(own.w + i, -load<A>(own.w + i));
  turn(own.u, stride, tokens, args.value_dim, kTokens, own.panel);
  const Panel<A> u{own.panel, kTokens};
  const int64_t columns = padded<A>(tokens);
  for_each_tile<A>(tokens, columns,
                   PairGradient<A>{{own.w, stride, 1}, u, args.value_dim, 0, keys.dkeys});
  for_each_tile<A>(tokens, columns,
                   PairGradient<A>{{own.dy, stride, 1}, u, args.value_dim, 1, keys.dqueries});
  put_dleft(widths, args.key_dim, own.state, dstate, keys.dleft);
  const auto of_rows = [&](const A* rows, A* to) {
    for_each_tile<A>(
        tokens, widths.key,
        RowProduct<A>{{rows, stride, 1}, {own.turned, of_keys}, args.value_dim, of_keys, to});
  };
  turn(own.state, stride, args.key_dim, args.value_dim, of_keys, own.turned);
  of_rows(own.dy, keys.dq_before);
  of_rows(own.w, keys.dk_before);
  turn(dstate, stride, args.key_dim, args.value_dim, of_keys, own.turned);
  of_rows(own.u, keys.dk_after);
  for_each_tile<A>(args.key_dim, widths.value,
                   StateGradient<A>{{chunk.q_before, 1, of_keys},
                                    {chunk.k_before, 1, of_keys},
                                    dy,
                                    {own.w, stride},
                                    tokens,
                                    chunk.left,
                                    dstate});
  if (args.dbeta) write_line(args, own.dbeta, span, head, args.dbeta, args.beta_dtype);
  if constexpr (kChannels) {
    put_channel_gradients(chunk, keys);
    for (int64_t t = 0; args.dg && t < tokens; ++t) {
      round_line(keys.dg + t * of_keys, args.key_dim, args.dg, args.g_dtype,
                 place_of(args, span, t, head, args.heads) * args.key_dim);
    }
  } else {
    put_key_gradients(chunk, keys);
    if (args.dg) write_line(args, keys.dg, span, head, args.dg, args.g_dtype);
  }
}

// Rounds the gradient of q or k, from that of the normalised rows.
// scalar: dx[t] = inverse[t] (dy[t] - y[t] (y[t] dy[t])), if rows are normalised
template <class A>
void write_key_rows(const DeltaRule& args, const Span& span, int64_t key_head, const A* rows,
                    const A* inverse, const Widths<A>& widths, A* gradient, void* tensor,
                    DType dtype) {
  if (!tensor) return;
  for (int64_t t = 0; t < span.tokens; ++t) {
    A* dy = gradient + t * widths.key_stride;
    if (args.qk_l2norm) {
      const A* y = rows + t * widths.key_stride;
      Vec<A> dot{};
      for (int64_t n = 0; n < widths.key; n += kLanes<A>) {
        dot = fma<A>(load<A>(y + n), load<A>(dy + n), dot);
      }
      const Vec<A> along = broadcast<A>(-sum_of_lanes<A>(dot));
      const Vec<A> factor = broadcast<A>(inverse[t]);
      for (int64_t n = 0; n < widths.key; n += kLanes<A>) {
        store<A>(dy + n, factor * fma<A>(along, load<A>(y + n), load<A>(dy + n)));
      }
    }
    round_line(dy, args.key_dim, tensor, dtype,
               place_of(args, span, t, key_head, args.key_heads) * args.key_dim);
  }
}

template <bool kChannels, class A>
void delta_rule_backward_kernel(const DeltaRuleBackward& args, const Sequence& sequence,
                                int64_t key_head, BackwardScratch<A>& own) {
  const Chunk<A>& chunk = own.chunk;
  const Widths<A>& widths = chunk.widths;
  const int64_t heads = args.heads / args.key_heads, first_head = key_head * heads;
  const int64_t of_state = args.key_dim * widths.value_stride;
  for (int64_t i = 0; i < heads; ++i) {
    read_state(args, args.dfinal_state, kAccumulator<A>,
               sequence.number * args.heads + first_head + i, widths, own.dstates + i * of_state);
  }
  for (int64_t n = ceil_div(sequence.end - sequence.begin, kTokens) - 1; n >= 0; --n) {
    const int64_t begin = sequence.begin + n * kTokens;
    const Span span{sequence.sample, begin, std::min(kTokens, sequence.end - begin)};
    const int64_t number = sequence.sample * args.chunks + sequence.chunk(args, begin);
    for (A* rows : {own.keys.dq, own.keys.dk}) {
      std::fill_n(rows, span.tokens * widths.key_stride, A(0));
    }
    for (int64_t i = 0; i < heads; ++i) {
      head_backward<kChannels>(args, span, number, first_head + i, own.dstates + i * of_state, own);
    }
    write_key_rows(args, span, key_head, chunk.q, chunk.q_inverse, widths, own.keys.dq, args.dq,
                   args.q_dtype);
    write_key_rows(args, span, key_head, chunk.k, chunk.k_inverse, widths, own.keys.dk, args.dk,
                   args.k_dtype);
  }
  for (int64_t i = 0; args.dinitial_state && i < heads; ++i) {
    write_state(args, own.dstates + i * of_state, sequence.number * args.heads + first_head + i,
                widths, args.dinitial_state, args.initial_state_dtype);
  }
}

Plan plan_backward(const DeltaRuleBackward& args, const Machine& machine) {
  Plan plan{.workspace_bytes = 0,
            .kernel_name = "delta_rule_backward_kernel",
            .rows_per_tile = kTokens,
            .splits = args.sequences * args.key_heads,
            .reason = "products of chunks"};
  plan.threads = threads_for(2 * nanoseconds_of(args), plan.splits, machine);
  visit(args, [&]<class A, bool kChannels>() {
    Arena one(nullptr);
    BackwardScratch<A>(args, one);
    plan.workspace_bytes = Slots{0, one.used()}.end(plan.threads);
  });
  return plan;
}

void run_backward(const DeltaRuleBackward& args, const Plan& plan, void* workspace,
                  const Context& context) {
  visit(args, [&]<class A, bool kChannels>() {
    const Slots slots{0, plan.workspace_bytes / plan.threads};
    for_each_piece_in_order(context, plan.threads, plan.splits, [&](int64_t piece, int64_t slot) {
      Arena arena(slots.of(workspace, slot));
      BackwardScratch<A> own(args, arena);
      delta_rule_backward_kernel<kChannels>(args, Sequence(args, piece / args.key_heads),
                                            piece % args.key_heads, own);
    });
  });
}

}  // namespace
}  // namespace delta_rule

Operator<DeltaRuleBackward> delta_rule_backward() {
  return {delta_rule::plan_backward, delta_rule::run_backward};
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
