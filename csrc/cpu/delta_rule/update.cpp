// Few tokens of a delta rule, such as those of decoding, with the state in place.
//
// A piece of work is a head of a sequence, whose columns are taken a block at a time. A first pass
// over a block reads what the first token's key finds; then a pass for each token decays the rows,
// adds the new value, reads what the query finds, and what the next token's key finds. The first
// pass reads the block from memory, and prefetches the next one; the others find it in the first
// cache. Done when the state is read and written at the speed of memory.
//
// scalar: found[p] = sum over n of exp(g[n]) k[n] state[n][p];  u[p] = beta (v[p] - found[p])
//         state[n][p] = exp(g[n]) state[n][p] + k[n] u[p];  output[p] = sum over n of q[n]
//         state[n][p]
#include "cpu/delta_rule/chunk.h"
#include "cpu/kernels.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace delta_rule {
namespace {

// Of a row in a block, in A: a block of 128 rows takes half of the first cache.
constexpr int64_t kBlockBytes = 128;

// What a thread has of a head: rows of kTokens at a time.
template <class A>
struct UpdateScratch {
  Widths<A> widths;
  A *q, *k, *decay, *decayed_k;  // (kTokens, key_dim)
  A *v, *output;                 // (kTokens, value_dim)
  A *beta, *g, *inverse;         // (kTokens,)

  UpdateScratch(const DeltaRule& args, Arena& arena) : widths(args) {
    const int64_t tokens = std::min(kTokens, args.length);
    for (A** each : {&q, &k, &decay, &decayed_k}) {
      *each = arena.take<A>(tokens * widths.key_stride);
    }
    for (A** each : {&v, &output}) *each = arena.take<A>(tokens * widths.value_stride);
    for (A** each : {&beta, &g, &inverse}) *each = arena.take<A>(kTokens);
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
    read_line(args.beta, args.beta_dtype, args.beta_stride, span, head, beta);
    if (args.g_has_channels) {
      read_rows(args.g, args.g_dtype, args.g_stride, span, head, args.key_dim, A(1), stride, decay);
    } else {
      read_line(args.g, args.g_dtype, args.g_stride, span, head, g);
    }
    for (int64_t t = 0; t < span.tokens; ++t) {
      const Vec<A> of_token =
          args.g_has_channels ? Vec<A>{} : decay_of(bounded<A>(broadcast<A>(g[t])));
      for (int64_t i = t * stride; i < t * stride + widths.key; i += kLanes<A>) {
        const Vec<A> left =
            args.g_has_channels ? decay_of(bounded<A>(load<A>(decay + i))) : of_token;
        store<A>(decay + i, left);
        store<A>(decayed_k + i, left * load<A>(k + i));
      }
    }
  }
};

// Numbers of a token; decayed_k is k times its own decay.
template <class A>
struct TokenKeys {
  const A *q, *k, *decay, *decayed_k;
};

// A block's columns of a row: kVectors vectors, the last of them of `last` columns.
template <int kVectors, class A, class Last>
struct RowOf {
  Last last;

  template <class T>
  ONEPASS_INLINE Vec<A> read(const T* row, int i) const {
    const T* from = row + i * kLanes<A>;
    return i + 1 < kVectors ? load<A>(from) : load<A>(from, last);
  }
  template <class T>
  ONEPASS_INLINE void write(T* row, int i, Vec<A> v) const {
    T* to = row + i * kLanes<A>;
    i + 1 < kVectors ? store<A>(to, v) : store<A>(to, v, last);
  }
};

// A pass of a token over a block. found: what its key finds; it becomes what the next one's does.
template <int kVectors, bool kHasNext, class A, class T, class Row>
ONEPASS_INLINE void update_block(const Row& columns, int64_t key_dim, const TokenKeys<A>& token,
                                 const A* next_k, const A* v, A beta, A scale, T* state,
                                 int64_t row_stride, A* output, Vec<A> (&found)[kVectors]) {
  Vec<A> u[kVectors], y[kVectors] = {};
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    u[i] = broadcast<A>(beta) * (load<A>(v + i * kLanes<A>) - found[i]);
    found[i] = Vec<A>{};
  }
  for (int64_t n = 0; n < key_dim; ++n) {
    T* row = state + n * row_stride;
    const Vec<A> decay = broadcast<A>(token.decay[n]), key = broadcast<A>(token.k[n]);
    const Vec<A> query = broadcast<A>(token.q[n]);
    const Vec<A> next_key = kHasNext ? broadcast<A>(next_k[n]) : Vec<A>{};
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      Vec<A> after = fma<A>(key, u[i], decay * columns.read(row, i));
      y[i] = fma<A>(query, after, y[i]);
      columns.write(row, i, after);
      if constexpr (kHasNext) {
        if constexpr (!std::is_same_v<A, T>) after = columns.read(row, i);  // rounded
        found[i] = fma<A>(next_key, after, found[i]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    store<A>(output + i * kLanes<A>, broadcast<A>(scale) * y[i]);
  }
}

// A block of columns of a head, for all tokens. next: the block that follows it.
template <int kVectors, class A, class T, class Last>
void update_columns(const DeltaRuleUpdate& args, const UpdateScratch<A>& own, int64_t tokens,
                    int64_t column, T* state, const T* next, Last last) {
  const RowOf<kVectors, A, Last> columns{last};
  const int64_t stride = own.widths.key_stride, row_stride = args.state_row_stride;
  Vec<A> found[kVectors] = {};
  for (int64_t n = 0; n < args.key_dim; ++n) {
    const Vec<A> key = broadcast<A>(own.decayed_k[n]);
    const char* ahead = reinterpret_cast<const char*>(next + n * row_stride);
    for (int64_t byte = 0; byte < kBlockBytes; byte += 64) __builtin_prefetch(ahead + byte, 0, 2);
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      found[i] = fma<A>(key, columns.read(state + n * row_stride, i), found[i]);
    }
  }
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t of = t * stride, place = t * own.widths.value_stride + column;
    const TokenKeys<A> token{own.q + of, own.k + of, own.decay + of, own.decayed_k + of};
    visit_bool(t + 1 < tokens, [&]<bool kHasNext>() {
      update_block<kVectors, kHasNext>(columns, args.key_dim, token, token.decayed_k + stride,
                                       own.v + place, own.beta[t], static_cast<A>(args.scale),
                                       state, row_stride, own.output + place, found);
    });
  }
}

template <class A, class T>
void update_head(const DeltaRuleUpdate& args, const Span& span, int64_t head, T* state,
                 UpdateScratch<A>& own) {
  own.put(args, span, head);
  constexpr int kVectors = kBlockBytes / kVectorBytes;
  constexpr int64_t kColumns = kVectors * kLanes<A>;
  int64_t column = 0;
  for (; column + kColumns <= args.value_dim; column += kColumns) {
    const bool is_last = column + 2 * kColumns > args.value_dim;
    const T* next = is_last ? state + args.state_head_stride : state + column + kColumns;
    update_columns<kVectors>(args, own, span.tokens, column, state + column, next,
                             WholeVector<A>{});
  }
  for (; column < args.value_dim; column += kLanes<A>) {
    const int64_t left = args.value_dim - column;
    const T* at = state + column;
    if (left >= kLanes<A>) {
      update_columns<1>(args, own, span.tokens, column, state + column, at, WholeVector<A>{});
    } else {
      update_columns<1>(args, own, span.tokens, column, state + column, at, Tail{left});
    }
  }
  for (int64_t t = 0; t < span.tokens; ++t) {
    round_line(own.output + t * own.widths.value_stride, args.value_dim, args.output, args.v_dtype,
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
