// A chunk's gradients, with dy that of y, g that of the state after the chunk, and of pairs s <= t
// decay[s][t] = exp(c[t] - c[s]), pairs[s][t] = C[t] B[s]:
//   dpairs[s][t] = decay[s][t] step[s] (x[s] dy[t]), summed over the heads of a group
//   dx[s] = step[s] v[s] + D dy[s],  v[s] = exp(c[last] - c[s]) g B[s]
//                                           + sum over t of decay[s][t] pairs[s][t] dy[t]
//   dC[t] = exp(c[t]) h dy[t] + sum over s of dpairs[s][t] B[s]
//   dB[s] = exp(c[last] - c[s]) step[s] g x[s] + sum over t of dpairs[s][t] C[t]
//   g becomes exp(c[last]) g + sum over t of exp(c[t]) dy[t] C[t]^T
// The gradient of a[t] = step[t] A sums over all that passes token t: pairs with s < t <= their t,
// what comes from the state before to t or later, what goes from before t to the state after, and
// what goes through. Each is summed on its own: as a difference of sums over all pairs it would
// drown in the rounding of pairs that do not decay.
//
// Multiply-adds per token, head and column: 4 state + kTokens; with a gate the forward's too.
#include "cpu/kernels.h"
#include "cpu/mamba_chunk_scan/backward_products.h"
#include "cpu/mamba_chunk_scan/chunk.h"
#include "cpu/row_sums.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace mamba_chunk_scan {
namespace {

constexpr int64_t kMostParts = 8;  // of a group's heads
constexpr int64_t kRun = 16;       // tokens that are summed before they are added to a sum

// Sums of a head over tokens, in float64: there may be many.
struct HeadSums {
  double A, bias;
  double* D;  // (columns,)
};

// What a thread has: of a part of a group's heads, of a chunk, and of one head's chunk. Panels and
// lines of (state,) have tokens as columns.
template <class A>
struct BackwardScratch {
  int64_t width, row_stride;
  A* g;  // (heads of a part, state, columns)
  HeadSums* sums;
  Line<A>*B, *C, *dB, *dC;         // (state,)
  Line<A>*dpairs, *dpairs_turned;  // (kTokens,)
  Steps<A>* steps;
  Line<A>*decay, *mixed, *passing;               // (kTokens,)
  Line<A>*x_panel, *dy_panel;                    // (head_dim,)
  A *x, *dy, *scaled, *v, *y, *z;                // (kTokens, columns)
  A* h;                                          // (state, columns)
  A *D, *line, *rows;                            // (columns,), (state,), (kTokens, state)
  Line<A>*left, *from_state, *to_state, *dstep;  // one each

  BackwardScratch(const MambaChunkScan& args, int64_t heads, Arena& arena)
      : width(padded<A>(args.head_dim)), row_stride(row_stride_of<A>(args.head_dim)) {
    g = arena.take<A>(heads * args.state * row_stride);
    sums = arena.take<HeadSums>(heads);
    double* of_D = arena.take<double>(heads * width);
    for (auto* each : {&B, &C, &dB, &dC}) *each = arena.take<Line<A>>(args.state);
    for (auto* each : {&dpairs, &dpairs_turned, &decay, &mixed, &passing}) {
      *each = arena.take<Line<A>>(kTokens);
    }
    steps = arena.take<Steps<A>>(1);
    for (auto* each : {&x_panel, &dy_panel}) *each = arena.take<Line<A>>(args.head_dim);
    for (auto* each : {&x, &dy, &scaled, &v, &y, &z}) *each = arena.take<A>(kTokens * row_stride);
    h = arena.take<A>(args.state * row_stride);
    D = arena.take<A>(row_stride);
    line = arena.take<A>(args.state);
    rows = arena.take<A>(kTokens * padded<A>(args.state));
    for (auto* each : {&left, &from_state, &to_state, &dstep}) *each = arena.take<Line<A>>(1);
    if (!g) return;
    for (int64_t i = 0; i < heads; ++i) {
      sums[i] = {0, 0, of_D + i * width};
      std::fill_n(sums[i].D, width, 0.0);
    }
  }
};

// scalar, s <= t: decay[s][t] = exp(c[t] - c[s]); mixed[s][t] = decay[s][t] pairs[s][t]
template <class A>
void put_decays(const Steps<A>& steps, int64_t tokens, const Line<A>* pairs, Line<A>* decay,
                Line<A>* mixed) {
  for (int64_t s = 0; s < tokens; ++s) {
    for (int64_t t = s / kLanes<A> * kLanes<A>; t < tokens; t += kLanes<A>) {
      const Vec<A> of = steps.decay(s, t);
      store<A>(decay[s] + t, of);
      store<A>(mixed[s] + t, of * load<A>(pairs[s] + t));
    }
  }
}

// The gradient of y from that of the output; with a gate also the gradient of z.
template <class A>
void put_dy(const MambaChunkScanBackward& args, const Factors<A>& factors, const Span& span,
            const Columns& columns, int64_t group, const Panel<A>& h, BackwardScratch<A>& own) {
  const int64_t tokens = span.tokens, row_stride = own.row_stride, width = own.width;
  if (!args.doutput) {
    std::fill_n(own.dy, tokens * row_stride, A(0));
  } else {
    read_rows(args.doutput, args.x_dtype, args.doutput_stride, span, columns,
              args.doutput_stride.head, row_stride, own.dy);
  }
  if (!args.z) return;
  read_rows(args.z, args.z_dtype, args.z_stride, span, columns, args.z_stride.head, row_stride,
            own.z);
  if (args.dz) {
    put_scaled(tokens, width, own.x, row_stride, own.scaled,
               [&](int64_t t) { return own.steps->step[t]; });
    for_each_tile<A>(tokens, width,
                     OutputProduct<A>{{factors.C(span, group), args.state, 1},
                                      h,
                                      args.state,
                                      own.steps->from_before,
                                      {own.mixed[0], 1, kTokens},
                                      {own.scaled, row_stride},
                                      own.y});
    add_skip(args, columns, tokens, own.D, own.x, row_stride, own.y);
  }
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t p = 0; p < width; p += kLanes<A>) {
      const int64_t i = t * row_stride + p;
      const Activated<Activation::kSilu, A> gate(load<A>(own.z + i));
      const Vec<A> doutput = load<A>(own.dy + i);
      if (args.dz) store<A>(own.y + i, gate.times_slope(doutput * load<A>(own.y + i)));
      store<A>(own.dy + i, doutput * gate.value());
    }
  }
  for (int64_t t = 0; args.dz && t < tokens; ++t) {
    round_line(own.y + t * row_stride, columns.count, args.dz, args.z_dtype,
               place_of(args, span, t, columns));
  }
}

// The gradient of x, and of the steps what comes through step x.
template <class A>
void put_dx(const MambaChunkScanBackward& args, const Span& span, const Columns& columns,
            BackwardScratch<A>& own, HeadSums& sums) {
  const int64_t row_stride = own.row_stride;
  for (int64_t t = 0; t < span.tokens; ++t) {
    const Vec<A> step = broadcast<A>(own.steps->step[t]);
    Vec<A> dot{};
    for (int64_t p = 0; p < own.width; p += kLanes<A>) {
      const int64_t i = t * row_stride + p;
      const Vec<A> v = load<A>(own.v + i);
      dot = fma<A>(load<A>(own.x + i), v, dot);
      store<A>(own.v + i, fma<A>(step, v, load<A>(own.D + p) * load<A>(own.dy + i)));
    }
    own.dstep[0][t] = sum_of_lanes<A>(dot);
    if (!args.dx) continue;
    round_line(own.v + t * row_stride, columns.count, args.dx, args.x_dtype,
               place_of(args, span, t, columns));
  }
  if (!args.dD) return;
  for (int64_t p = 0; p < own.width; p += kLanes<A>) {
    for (int64_t first = 0; first < span.tokens; first += kRun) {
      Vec<A> run{};
      for (int64_t t = first; t < std::min(first + kRun, span.tokens); ++t) {
        const int64_t i = t * row_stride + p;
        run = fma<A>(load<A>(own.x + i), load<A>(own.dy + i), run);
      }
      for (int i = 0; i < kLanes<A>; ++i) sums.D[p + i] += run[i];
    }
  }
}

// The sum of products of the states before a chunk and of the gradients of those after it.
template <class A>
A product_of_states(const Panel<A>& h, const Panel<A>& g, int64_t state, int64_t width) {
  Vec<A> sum{};
  for (int64_t n = 0; n < state; ++n) {
    Vec<A> run{};
    for (int64_t p = 0; p < width; p += kLanes<A>) {
      run = fma<A>(load<A>(h.from(n, p).at), load<A>(g.from(n, p).at), run);
    }
    sum += run;
  }
  return sum_of_lanes<A>(sum);
}

// The gradients of the steps, from what passes each token; `through` passes all of them.
template <class A>
void put_ddt(const MambaChunkScanBackward& args, const Span& span, int64_t head, A through,
             BackwardScratch<A>& own, HeadSums& sums) {
  const int64_t tokens = span.tokens;
  const Steps<A>& steps = *own.steps;
  // left[t]: what pairs with t bring over the token at hand.
  Line<A>& left = *own.left;
  std::fill_n(left, kTokens, A(0));
  double da[kTokens];
  for (int64_t t = 0; t < tokens; ++t) {  // left of t has pairs with s < t
    Vec<A> over{};
    for (int64_t i = t / kLanes<A> * kLanes<A>; i < tokens; i += kLanes<A>) {
      over += i >= t ? load<A>(left + i) : keep_columns<A>(load<A>(left + i), i, t, tokens);
      store<A>(left + i, load<A>(left + i) + load<A>(own.passing[t] + i));
    }
    da[t] = sum_of_lanes<A>(over);
  }
  double to_state = through, from_state = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    da[t] += to_state;
    to_state += own.to_state[0][t];
  }
  for (int64_t t = tokens - 1; t >= 0; --t) {
    from_state += own.from_state[0][t];
    da[t] += from_state;
  }
  const double factor = number_of<A>(args.A, args.A_dtype, head);
  double of_A = 0, of_bias = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const double ddt = steps.slope[t] * (own.dstep[0][t] + factor * da[t]);
    of_A += steps.step[t] * da[t];
    of_bias += ddt;
    if (!args.ddt) continue;
    const A rounded = static_cast<A>(ddt);
    round_line(&rounded, 1, args.ddt, args.dt_dtype, (span.token(args) + t) * args.heads + head);
  }
  sums.A += of_A;
  sums.bias += of_bias;
}

// A head's chunk; g becomes the gradient of the states before it.
template <class A>
void head_backward(const MambaChunkScanBackward& args, const Factors<A>& factors, const Span& span,
                   const A* saved, int64_t head, int64_t group, A* g, HeadSums& sums,
                   BackwardScratch<A>& own) {
  const int64_t tokens = span.tokens, state = args.state, row_stride = own.row_stride;
  const int64_t token_columns = padded<A>(tokens);
  const Columns columns{head, 0, args.head_dim};
  Steps<A>& steps = *own.steps;
  const bool in_place = args.head_dim == own.width;
  if (!in_place) {
    for (int64_t n = 0; n < state; ++n) {
      std::copy_n(saved + n * args.head_dim, args.head_dim, own.h + n * row_stride);
      std::fill_n(own.h + n * row_stride + args.head_dim, own.width - args.head_dim, A(0));
    }
  }
  const Panel<A> h{in_place ? saved : own.h, in_place ? args.head_dim : row_stride};
  steps.put(args, span, head);
  read_skip(args, columns, row_stride, own.D);
  read_rows(args.x, args.x_dtype, args.x_stride, span, columns, args.x_stride.head, row_stride,
            own.x);
  put_decays(steps, tokens, factors.pairs(span, group), own.decay, own.mixed);
  put_dy(args, factors, span, columns, group, h, own);
  turn(own.x, row_stride, tokens, args.head_dim, kTokens, own.x_panel[0]);
  turn(own.dy, row_stride, tokens, args.head_dim, kTokens, own.dy_panel[0]);
  for_each_tile<A>(tokens, token_columns,
                   PairGradient<A>{{own.x, row_stride, 1},
                                   {own.dy_panel[0], kTokens},
                                   args.head_dim,
                                   tokens,
                                   steps.step,
                                   own.decay,
                                   own.mixed,
                                   own.dpairs,
                                   own.passing});
  std::fill_n(own.from_state[0], kTokens, A(0));
  for_each_tile<A>(state, token_columns,
                   FactorGradient<A>{{h.at, h.of_step, 1},
                                     {own.dy_panel[0], kTokens},
                                     args.head_dim,
                                     steps.from_before,
                                     own.C,
                                     own.dC,
                                     own.from_state[0]});
  alignas(64) Line<A> put_in;
  for (int64_t t = 0; t < kTokens; ++t) {
    put_in[t] = t < tokens ? steps.to_after[t] * steps.step[t] : A(0);
  }
  std::fill_n(own.to_state[0], kTokens, A(0));
  for_each_tile<A>(state, token_columns,
                   FactorGradient<A>{{g, row_stride, 1},
                                     {own.x_panel[0], kTokens},
                                     args.head_dim,
                                     put_in,
                                     own.B,
                                     own.dB,
                                     own.to_state[0]});
  for_each_tile<A>(tokens, own.width,
                   InputGradient<A>{{factors.B(span, group), state, 1},
                                    {g, row_stride},
                                    state,
                                    steps.to_after,
                                    {own.mixed[0], kTokens, 1},
                                    {own.dy, row_stride},
                                    tokens,
                                    own.v});
  put_dx(args, span, columns, own, sums);
  const A left = steps.from_before[tokens - 1];
  put_ddt(args, span, head, left * product_of_states<A>(h, {g, row_stride}, state, own.width), own,
          sums);
  put_scaled(tokens, own.width, own.dy, row_stride, own.scaled,
             [&](int64_t t) { return steps.from_before[t]; });
  for_each_tile<A>(state, own.width,
                   StateProduct<A>{{own.C[0] + tokens - 1, kTokens, -1},
                                   {own.scaled + (tokens - 1) * row_stride, -row_stride},
                                   tokens,
                                   true,
                                   left,
                                   row_stride,
                                   g});
}

// ---- parts of heads -----------------------------------------------------------------------------

// The parts that a group's heads are cut into.
struct Parts {
  int64_t heads, count;

  explicit Parts(const MambaChunkScan& args) {
    const int64_t all = args.heads / args.groups;
    heads = ceil_div(all, kMostParts);
    count = ceil_div(all, heads);
  }
};

// The workspace: the factors, what pieces leave, and what each thread has.
template <class A>
struct BackwardLayout {
  Factors<A> factors;
  A* of_heads;    // (batch, 2 + columns of D, heads): sums for A, dt_bias, D
  A* of_factors;  // (batch, groups, parts, 2, length, state): sums for B and C
  Slots slots;

  BackwardLayout(const MambaChunkScanBackward& args, Arena arena) : factors(args, arena) {
    of_heads = arena.take<A>(args.batch * line_of_heads(args));
    of_factors = args.dB || args.dC
                     ? arena.take<A>(2 * factors.tokens() * args.state * Parts(args).count)
                     : nullptr;
    Arena one(nullptr);
    BackwardScratch<A>(args, Parts(args).heads, one);
    const int64_t bytes = factors.scratch() * static_cast<int64_t>(sizeof(A));
    slots = {arena.used(), std::max(one.used(), round_up(bytes, 64))};
  }

  // Numbers of a sample.
  static int64_t line_of_heads(const MambaChunkScan& args) {
    return args.heads * (2 + (args.D_has_columns ? args.head_dim : 1));
  }
};

// A chunk of a part of a group's heads; leaves the sums for B and C.
template <class A>
void chunk_backward(const MambaChunkScanBackward& args, const Factors<A>& factors, const Span& span,
                    const A* states, int64_t group, int64_t first_head, int64_t heads, A* of_B,
                    A* of_C, BackwardScratch<A>& own) {
  const int64_t tokens = span.tokens, state = args.state, columns = padded<A>(tokens);
  const A *B = factors.B(span, group), *C = factors.C(span, group);
  turn(B, state, tokens, state, kTokens, own.B[0]);
  turn(C, state, tokens, state, kTokens, own.C[0]);
  for (auto* lines : {own.dB, own.dC}) std::fill_n(lines[0], state * kTokens, A(0));
  std::fill_n(own.dpairs[0], kTokens * kTokens, A(0));
  for (int64_t i = 0; i < heads; ++i) {
    const int64_t head = first_head + i;
    head_backward(args, factors, span, states + head * state * args.head_dim, head, group,
                  own.g + i * state * own.row_stride, own.sums[i], own);
  }
  if (!of_B) return;
  turn(own.dpairs[0], kTokens, tokens, tokens, kTokens, own.dpairs_turned[0]);
  for_each_tile<A>(state, columns,
                   PairsToFactor<A>{{B, 1, state}, {own.dpairs[0], kTokens}, tokens, true, own.dC});
  for_each_tile<A>(
      state, columns,
      PairsToFactor<A>{{C, 1, state}, {own.dpairs_turned[0], kTokens}, tokens, false, own.dB});
  const int64_t row = padded<A>(state);
  const auto leave = [&](const Line<A>* lines, A* to) {
    turn(lines[0], kTokens, state, tokens, row, own.rows);
    for (int64_t t = 0; t < tokens; ++t) {
      std::copy_n(own.rows + t * row, state, to + (span.begin + t) * state);
    }
  };
  leave(own.dB, of_B);
  leave(own.dC, of_C);
}

// A part of a group's heads in one sample: the chunks of each sequence, from the last to the first.
template <class A>
void mamba_chunk_scan_backward_kernel(const MambaChunkScanBackward& args,
                                      const BackwardLayout<A>& layout, int64_t piece,
                                      void* scratch) {
  const Parts parts(args);
  const int64_t group = piece / parts.count % args.groups;
  const int64_t sample = piece / parts.count / args.groups, part = piece % parts.count;
  const int64_t of_group = args.heads / args.groups;
  const int64_t first_head = group * of_group + part * parts.heads;
  const int64_t heads = std::min(parts.heads, of_group - part * parts.heads);
  Arena arena(scratch);
  BackwardScratch<A> own(args, parts.heads, arena);
  const int64_t numbers = args.length * args.state;
  A* of_B = layout.of_factors ? layout.of_factors + piece * 2 * numbers : nullptr;
  A* of_C = of_B ? of_B + numbers : nullptr;
  const auto each_head = [&](const Sequence& sequence, auto&& body) {
    for (int64_t i = 0; i < heads; ++i) {
      const int64_t head = first_head + i;
      body(own.g + i * args.state * own.row_stride, sequence.number * args.heads + head,
           Columns{head, 0, args.head_dim});
    }
  };
  const int64_t last = args.cu_seqlens ? args.sequences : sample + 1;
  for (int64_t s = args.cu_seqlens ? 0 : sample; s < last; ++s) {
    const Sequence sequence(args, s);
    each_head(sequence, [&](A* g, int64_t of, const Columns& columns) {
      read_states(args, args.dfinal_states, kAccumulator<A>, of, columns, own.row_stride, own.line,
                  g);
    });
    for (int64_t i = ceil_div(sequence.end - sequence.begin, kTokens) - 1; i >= 0; --i) {
      const int64_t begin = sequence.begin + i * kTokens;
      const int64_t chunk = sample * args.chunks + sequence.chunk(args, begin);
      chunk_backward(
          args, layout.factors, {sample, begin, std::min(kTokens, sequence.end - begin)},
          static_cast<const A*>(args.states) + chunk * args.heads * args.state * args.head_dim,
          group, first_head, heads, of_B, of_C, own);
    }
    if (!args.dinitial_states) continue;
    each_head(sequence, [&](const A* g, int64_t of, const Columns& columns) {
      write_states(args, g, own.row_stride, of, columns, own.line, args.dinitial_states,
                   args.initial_states_dtype);
    });
  }
  A* to = layout.of_heads + sample * BackwardLayout<A>::line_of_heads(args);
  for (int64_t i = 0; i < heads; ++i) {
    const int64_t head = first_head + i;
    to[head] = static_cast<A>(own.sums[i].A);
    to[args.heads + head] = static_cast<A>(own.sums[i].bias);
    A* of_D = to + 2 * args.heads;
    if (args.D_has_columns) {
      std::copy_n(own.sums[i].D, args.head_dim, of_D + head * args.head_dim);
    } else {
      double sum = 0;
      for (int64_t p = 0; p < args.head_dim; ++p) sum += own.sums[i].D[p];
      of_D[head] = static_cast<A>(sum);
    }
  }
}

// ---- plans --------------------------------------------------------------------------------------

Plan plan_backward(const MambaChunkScanBackward& args, const Machine& machine) {
  Plan plan{.workspace_bytes = 0,
            .kernel_name = "mamba_chunk_scan_backward_kernel",
            .rows_per_tile = kTokens,
            .splits = args.batch * args.groups * Parts(args).count,
            .reason = "products of chunks"};
  plan.threads = threads_for(2 * nanoseconds_of(args), plan.splits, machine);
  visit(args, [&]<class A>() {
    plan.workspace_bytes = BackwardLayout<A>(args, Arena(nullptr)).slots.end(plan.threads);
  });
  return plan;
}

// Adds up the samples' sums for A, dt_bias and D.
template <class A>
void reduce_heads(const MambaChunkScanBackward& args, const BackwardLayout<A>& layout) {
  const int64_t stride = BackwardLayout<A>::line_of_heads(args);
  const auto reduce = [&](int64_t first, int64_t count, void* to, DType dtype) {
    if (!to) return;
    reduce_partials<A>(layout.of_heads + first, args.batch, stride, 0, count, to, dtype);
  };
  reduce(0, args.heads, args.dA, args.A_dtype);
  reduce(args.heads, args.heads, args.ddt_bias, args.dt_bias_dtype);
  reduce(2 * args.heads, stride - 2 * args.heads, args.dD, args.D_dtype);
}

// Adds up the parts' sums for B and C of some tokens, (batch, groups, length).
template <class A>
void reduce_factors(const MambaChunkScanBackward& args, const BackwardLayout<A>& layout,
                    int64_t begin, int64_t end) {
  const int64_t parts = Parts(args).count, numbers = args.length * args.state;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t token = i % args.length, of = i / args.length;  // sample and group
    const int64_t to = (of / args.groups * args.length + token) * args.groups + of % args.groups;
    const A* from = layout.of_factors + of * parts * 2 * numbers + token * args.state;
    const auto reduce = [&](const A* partials, void* tensor, DType dtype) {
      if (!tensor) return;
      reduce_partials<A>(partials, parts, 2 * numbers, 0, args.state,
                         static_cast<char*>(tensor) + to * args.state * size_of(dtype), dtype);
    };
    reduce(from, args.dB, args.B_dtype);
    reduce(from + numbers, args.dC, args.C_dtype);
  }
}

void run_backward(const MambaChunkScanBackward& args, const Plan& plan, void* workspace,
                  const Context& context) {
  visit(args, [&]<class A>() {
    const BackwardLayout<A> layout(args, Arena(workspace));
    for_each_piece_in_order(
        context, plan.threads, layout.factors.pieces(), [&](int64_t piece, int64_t slot) {
          layout.factors.put(piece, static_cast<A*>(layout.slots.of(workspace, slot)));
        });
    for_each_piece_in_order(context, plan.threads, plan.splits, [&](int64_t piece, int64_t slot) {
      mamba_chunk_scan_backward_kernel<A>(args, layout, piece, layout.slots.of(workspace, slot));
    });
    reduce_heads(args, layout);
    if (!layout.of_factors) return;
    for_each_piece(context, plan.threads, layout.factors.tokens(),
                   [&](int64_t begin, int64_t end) { reduce_factors(args, layout, begin, end); });
  });
}

}  // namespace
}  // namespace mamba_chunk_scan

Operator<MambaChunkScanBackward> mamba_chunk_scan_backward() {
  return {mamba_chunk_scan::plan_backward, mamba_chunk_scan::run_backward};
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
