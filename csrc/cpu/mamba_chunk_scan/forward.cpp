// The scan of Mamba 2, forward and backward: state-space duality (Dao, Gu, Transformers are SSMs,
// 2024).
//
// Of each chunk of tokens, with c the sums of step A from its begin on, and h the state before it:
//   y[t] = exp(c[t]) h C[t] + sum over s <= t of exp(c[t] - c[s]) step[s] (C[t] B[s]) x[s]
//   h becomes exp(c[last]) h + sum over s of exp(c[last] - c[s]) step[s] x[s] B[s]^T
// Both sums are products of small matrices, on the tiles of cpu/multiply.h; exponents are at most 0
// where A is negative, and none is a quotient. Columns of a head are vector lanes.
//
// B and C of a chunk are widened once, and their products computed once, for all heads of a group.
// A piece of work is then a head of a sequence, or some of its columns where there are few heads:
// its state (state, columns) stays in the cache. An element's sums do not depend on the columns of
// its piece.
//
// Multiply-adds per token, head and column: 2 state + kTokens / 2. Done when these bind: an exp per
// token and token of its chunk, half of them, is 4 % of the time.
#include "cpu/kernels.h"
#include "cpu/mamba_chunk_scan/chunk.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace mamba_chunk_scan {
namespace {

constexpr int64_t kLeastColumns = 32;

// What a thread has of a head: rows are row_stride apart.
template <class A>
struct ForwardScratch {
  Steps<A>* steps;
  Line<A>* mixed;  // (kTokens, kTokens)
  A* x;            // (kTokens, columns)
  A* put_in;       // likewise, times what is left of it after the chunk
  A* y;            // likewise
  A* z;            // likewise
  A* h;            // (state, columns)
  A* D;            // (columns,)
  A* line;         // (state,)

  ForwardScratch(const MambaChunkScan& args, int64_t row_stride, Arena& arena)
      : steps(arena.take<Steps<A>>(1)), mixed(arena.take<Line<A>>(kTokens)) {
    for (A** each : {&x, &put_in, &y, &z}) *each = arena.take<A>(kTokens * row_stride);
    h = arena.take<A>(args.state * row_stride);
    D = arena.take<A>(row_stride);
    line = arena.take<A>(args.state);
  }
};

// scalar: mixed[s][t] = exp(c[t] - c[s]) step[s] pairs[s][t], for s <= t
template <class A>
void put_mixed(const Steps<A>& steps, int64_t tokens, const Line<A>* pairs, Line<A>* mixed) {
  for (int64_t s = 0; s < tokens; ++s) {
    const Vec<A> step = broadcast<A>(steps.step[s]);
    for (int64_t t = s / kLanes<A> * kLanes<A>; t < tokens; t += kLanes<A>) {
      store<A>(mixed[s] + t, steps.decay(s, t) * step * load<A>(pairs[s] + t));
    }
  }
}

template <class A>
void write_output(const MambaChunkScanForward& args, const Span& span, const Columns& columns,
                  int64_t row_stride, const ForwardScratch<A>& own) {
  add_skip(args, columns, span.tokens, own.D, own.x, row_stride, own.y);
  if (args.z) {
    read_rows(args.z, args.z_dtype, args.z_stride, span, columns, kTokens * args.z_stride.token,
              row_stride, own.z);
    for (int64_t t = 0; t < span.tokens; ++t) {
      for (int64_t i = t * row_stride; i < t * row_stride + columns.count; i += kLanes<A>) {
        const Vec<A> gate = Activated<Activation::kSilu, A>(load<A>(own.z + i)).value();
        store<A>(own.y + i, load<A>(own.y + i) * gate);
      }
    }
  }
  for (int64_t t = 0; t < span.tokens; ++t) {
    round_line(own.y + t * row_stride, columns.count, args.output, args.x_dtype,
               place_of(args, span, t, columns));
  }
}

template <class A>
void mamba_chunk_scan_kernel(const MambaChunkScanForward& args, const Factors<A>& factors,
                             const Sequence& sequence, const Columns& columns, int64_t row_stride,
                             const ForwardScratch<A>& own) {
  const int64_t state = args.state, of = sequence.number * args.heads + columns.head;
  const int64_t group = columns.head / (args.heads / args.groups);
  const int64_t width = padded<A>(columns.count);
  Steps<A>& steps = *own.steps;
  read_skip(args, columns, row_stride, own.D);
  read_states(args, args.initial_states, args.initial_states_dtype, of, columns, row_stride,
              own.line, own.h);
  for (int64_t begin = sequence.begin; begin < sequence.end; begin += kTokens) {
    const Span span{sequence.sample, begin, std::min(kTokens, sequence.end - begin)};
    const int64_t tokens = span.tokens;
    if (args.states) {
      const int64_t chunk = sequence.sample * args.chunks + sequence.chunk(args, begin);
      A* saved = static_cast<A*>(args.states) +
                 (chunk * args.heads + columns.head) * state * args.head_dim + columns.first;
      for (int64_t n = 0; n < state; ++n) {
        std::copy_n(own.h + n * row_stride, columns.count, saved + n * args.head_dim);
      }
    }
    steps.put(args, span, columns.head);
    read_rows(args.x, args.x_dtype, args.x_stride, span, columns, kTokens * args.x_stride.token,
              row_stride, own.x);
    put_mixed(steps, tokens, factors.pairs(span, group), own.mixed);
    const Panel<A> x{own.x, row_stride};
    const bool has_state = args.initial_states || begin > sequence.begin;
    for_each_tile<A>(tokens, width,
                     OutputProduct<A>{{factors.C(span, group), state, 1},
                                      {own.h, row_stride},
                                      has_state ? state : 0,
                                      steps.from_before,
                                      {own.mixed[0], 1, kTokens},
                                      x,
                                      own.y});
    put_scaled(tokens, width, own.x, row_stride, own.put_in,
               [&](int64_t t) { return steps.to_after[t] * steps.step[t]; });
    for_each_tile<A>(state, width,
                     StateProduct<A>{{factors.B_turned(span, group), tokens, 1},
                                     {own.put_in, row_stride},
                                     tokens,
                                     has_state,
                                     steps.from_before[tokens - 1],
                                     row_stride,
                                     own.h});
    write_output(args, span, columns, row_stride, own);
  }
  write_states(args, own.h, row_stride, of, columns, own.line, args.final_states, kAccumulator<A>);
}

// ---- plans --------------------------------------------------------------------------------------

struct ForwardLayout {
  int64_t columns;  // of a piece
  Slots slots;
};

template <class A>
ForwardLayout layout_of(const MambaChunkScanForward& args, int64_t columns) {
  Arena arena(nullptr), one(nullptr);
  const Factors<A> factors(args, arena);
  ForwardScratch<A>(args, row_stride_of<A>(columns), one);
  return {columns, {arena.used(), std::max(one.used(), factors.scratch() * int64_t{sizeof(A)})}};
}

Plan plan_forward(const MambaChunkScanForward& args, const Machine& machine,
                  ForwardLayout& layout) {
  int64_t columns = args.head_dim;
  const int64_t heads = args.sequences * args.heads;
  while (heads * ceil_div(args.head_dim, columns) < machine.threads && columns > kLeastColumns) {
    columns = std::max(round_up(columns / 2, 16), kLeastColumns);
  }
  visit(args, [&]<class A>() { layout = layout_of<A>(args, columns); });
  Plan plan{.workspace_bytes = 0,
            .kernel_name = "mamba_chunk_scan_kernel",
            .rows_per_tile = kTokens,
            .splits = heads * ceil_div(args.head_dim, columns),
            .reason = "products of chunks"};
  plan.threads = threads_for(nanoseconds_of(args), plan.splits, machine);
  plan.workspace_bytes = layout.slots.end(plan.threads);
  return plan;
}

void run_forward(const MambaChunkScanForward& args, const Plan& plan, const ForwardLayout& layout,
                 void* workspace, const Context& context) {
  visit(args, [&]<class A>() {
    Arena arena(workspace);
    const Factors<A> factors(args, arena);
    for_each_piece_in_order(context, plan.threads, factors.pieces(),
                            [&](int64_t piece, int64_t slot) {
                              factors.put(piece, static_cast<A*>(layout.slots.of(workspace, slot)));
                            });
    const int64_t parts = ceil_div(args.head_dim, layout.columns);
    const int64_t row_stride = row_stride_of<A>(layout.columns);
    for_each_piece_in_order(context, plan.threads, plan.splits, [&](int64_t piece, int64_t slot) {
      Arena own(layout.slots.of(workspace, slot));
      const int64_t first = piece % parts * layout.columns;
      const Columns columns{piece / parts % args.heads, first,
                            std::min(layout.columns, args.head_dim - first)};
      mamba_chunk_scan_kernel<A>(args, factors, Sequence(args, piece / parts / args.heads), columns,
                                 row_stride, ForwardScratch<A>(args, row_stride, own));
    });
  });
}

}  // namespace
}  // namespace mamba_chunk_scan

Operator<MambaChunkScanForward> mamba_chunk_scan_forward() {
  using namespace mamba_chunk_scan;
  return operator_of<MambaChunkScanForward, ForwardLayout, plan_forward, run_forward>();
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
