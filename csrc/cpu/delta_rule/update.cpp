// Few tokens of a delta rule, such as those of decoding, with the state in place.
//
// A piece of work is a head of a sequence. Columns of its state are taken a block at a time: for
// each token a pass reads what the key finds, the next one decays the rows, adds the new value and
// reads what the query finds. The first of the passes reads the block from memory and the last one
// leaves it there: between them it stays in the first cache. Done when the state is read and
// written at the speed of memory.
//
// scalar, for each column p: x = 0; for each n: x += exp(g[n]) state[n][p] k[n]
//   u = beta (v[p] - x); for each n: state[n][p] = exp(g[n]) state[n][p] + k[n] u,
//   output[p] += q[n] state[n][p]
#include "cpu/delta_rule/chunk.h"
#include "cpu/kernels.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace delta_rule {
namespace {

constexpr int kColumns = 4;  // vectors of a block

// What a thread has of a head: rows of kTokens at a time.
template <class A>
struct UpdateScratch {
  Widths<A> widths;
  A *q, *k, *decay;      // (kTokens, key_dim)
  A *v, *output, *beta;  // (kTokens, value_dim), (kTokens,)
  A* inverse;

  UpdateScratch(const DeltaRule& args, Arena& arena) : widths(args) {
    const int64_t tokens = std::min(kTokens, args.length);
    for (A** each : {&q, &k, &decay}) *each = arena.take<A>(tokens * widths.key_stride);
    for (A** each : {&v, &output}) *each = arena.take<A>(tokens * widths.value_stride);
    for (A** each : {&beta, &inverse}) *each = arena.take<A>(kTokens);
  }

  void put(const DeltaRule& args, const Span& span, int64_t head) {
    const int64_t key_head = head / (args.heads / args.key_heads), stride = widths.key_stride;
    read_rows(args.q, args.q_dtype, args.q_stride, span, key_head, args.key_dim, A(1), stride, q);
    read_rows(args.k, args.k_dtype, args.k_stride, span, key_head, args.key_dim, A(1), stride, k);
    read_rows(args.v, args.v_dtype, args.v_stride, span, head, args.value_dim, A(1),
              widths.value_stride, v);
    if (args.qk_l2norm) {
      normalize(span.tokens, widths.key, stride, q, inverse);
      normalize(span.tokens, widths.key, stride, k, inverse);
    }
    if (args.g_has_channels) {
      read_rows(args.g, args.g_dtype, args.g_stride, span, head, args.key_dim, A(1), stride, decay);
      for (int64_t t = 0; t < span.tokens; ++t) {
        for (int64_t i = t * stride; i < t * stride + widths.key; i += kLanes<A>) {
          store<A>(decay + i, decay_of(bounded<A>(load<A>(decay + i))));
        }
      }
    } else {
      read_line(args.g, args.g_dtype, args.g_stride, span, head, beta);
      for (int64_t t = 0; t < span.tokens; ++t) {
        const Vec<A> of_token = decay_of(bounded<A>(broadcast<A>(beta[t])));
        for (int64_t i = t * stride; i < t * stride + widths.key; i += kLanes<A>) {
          store<A>(decay + i, of_token);
        }
      }
    }
    read_line(args.beta, args.beta_dtype, args.beta_stride, span, head, beta);
  }
};

// A token and a block of kVectors vectors of columns, the last of them of `last` columns.
template <int kVectors, class A, class T, class Last>
ONEPASS_INLINE void update_block(int64_t key_dim, const A* q, const A* k, const A* decay,
                                 const A* v, A beta, A scale, T* state, int64_t row_stride,
                                 Last last, A* output) {
  const auto load_row = [&](const T* row, Vec<A>(&cells)[kVectors]) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      cells[i] =
          i + 1 < kVectors ? load<A>(row + i * kLanes<A>) : load<A>(row + i * kLanes<A>, last);
    }
  };
  Vec<A> found[kVectors] = {}, cells[kVectors];
  for (int64_t n = 0; n < key_dim; ++n) {
    load_row(state + n * row_stride, cells);
    const Vec<A> factor = broadcast<A>(decay[n]), key = broadcast<A>(k[n]);
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) found[i] = fma<A>(factor * cells[i], key, found[i]);
  }
  Vec<A> u[kVectors], y[kVectors] = {};
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
    u[i] = broadcast<A>(beta) * (load<A>(v + i * kLanes<A>) - found[i]);
  }
  for (int64_t n = 0; n < key_dim; ++n) {
    T* row = state + n * row_stride;
    load_row(row, cells);
    const Vec<A> factor = broadcast<A>(decay[n]), key = broadcast<A>(k[n]);
    const Vec<A> query = broadcast<A>(q[n]);
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      const Vec<A> next = fma<A>(key, u[i], factor * cells[i]);
      y[i] = fma<A>(query, next, y[i]);
      if (i + 1 < kVectors) {
        store<A>(row + i * kLanes<A>, next);
      } else {
        store<A>(row + i * kLanes<A>, next, last);
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
    store<A>(output + i * kLanes<A>, broadcast<A>(scale) * y[i]);
  }
}

template <class A, class T>
void update_head(const DeltaRuleUpdate& args, const Span& span, int64_t head, T* state,
                 UpdateScratch<A>& own) {
  own.put(args, span, head);
  const Widths<A>& widths = own.widths;
  const A scale = static_cast<A>(args.scale);
  const auto block = [&]<int kVectors>(int64_t column, auto last) {
    for (int64_t t = 0; t < span.tokens; ++t) {
      const int64_t i = t * widths.key_stride, j = t * widths.value_stride + column;
      update_block<kVectors>(args.key_dim, own.q + i, own.k + i, own.decay + i, own.v + j,
                             own.beta[t], scale, state + column, args.state_row_stride, last,
                             own.output + j);
    }
  };
  int64_t column = 0;
  for (; column + kColumns * kLanes<A> <= args.value_dim; column += kColumns * kLanes<A>) {
    block.template operator()<kColumns>(column, WholeVector<A>{});
  }
  for (; column + kLanes<A> <= args.value_dim; column += kLanes<A>) {
    block.template operator()<1>(column, WholeVector<A>{});
  }
  if (column < args.value_dim) {
    block.template operator()<1>(column, Tail{args.value_dim - column});
  }
  for (int64_t t = 0; t < span.tokens; ++t) {
    round_line(own.output + t * widths.value_stride, args.value_dim, args.output, args.v_dtype,
               place_of(args, span, t, head, args.heads) * args.value_dim);
  }
}

template <class F>
void visit_number(const DeltaRule& args, F&& f) {
  args.q_dtype == DType::kFloat64 ? f.template operator()<double>()
                                  : f.template operator()<float>();
}

Plan plan_update(const DeltaRuleUpdate& args, const Machine& machine) {
  Plan plan{.workspace_bytes = 0,
            .kernel_name = "delta_rule_update_kernel",
            .rows_per_tile = 1,
            .splits = args.sequences * args.heads,
            .reason = "columns of the state"};
  const int64_t numbers =
      (args.sequences + 2 * args.batch * args.length) * args.heads * args.key_dim * args.value_dim;
  plan.threads = threads_for(4 * numbers / kBytes, plan.splits, machine);
  visit_number(args, [&]<class A>() {
    Arena one(nullptr);
    UpdateScratch<A>(args, one);
    plan.workspace_bytes = Slots{0, one.used()}.end(plan.threads);
  });
  return plan;
}

template <class A>
void delta_rule_update_kernel(const DeltaRuleUpdate& args, const Sequence& sequence, int64_t head,
                              UpdateScratch<A>& own) {
  visit_numbers<A>(args.state_dtype, [&]<class T>() {
    T* state = static_cast<T*>(args.state) + sequence.number * args.state_sequence_stride +
               head * args.state_head_stride;
    for (int64_t begin = sequence.begin; begin < sequence.end; begin += kTokens) {
      const Span span{sequence.sample, begin, std::min(kTokens, sequence.end - begin)};
      update_head(args, span, head, state, own);
    }
  });
}

void run_update(const DeltaRuleUpdate& args, const Plan& plan, void* workspace,
                const Context& context) {
  visit_number(args, [&]<class A>() {
    const Slots slots{0, plan.workspace_bytes / plan.threads};
    for_each_piece_in_order(context, plan.threads, plan.splits, [&](int64_t piece, int64_t slot) {
      Arena arena(slots.of(workspace, slot));
      UpdateScratch<A> own(args, arena);
      delta_rule_update_kernel(args, Sequence(args, piece / args.heads), piece % args.heads, own);
    });
  });
}

}  // namespace
}  // namespace delta_rule

Operator<DeltaRuleUpdate> delta_rule_update() {
  return {delta_rule::plan_update, delta_rule::run_update};
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
