// What the passes of the delta rule share: pieces of work, a head's chunk of tokens, and the
// system of equations between its tokens.
#pragma once

#include <algorithm>
#include <cmath>

#include "cpu/decay.h"
#include "cpu/lines.h"
#include "cpu/parallel.h"
#include "cpu/pieces.h"
#include "cpu/sequences.h"
#include "cpu/tiles.h"
#include "ops/delta_rule.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace delta_rule {

constexpr int64_t kTokens = kDeltaRuleTokens;
// Tokens of a block: their equations are solved one after the other, and decays of channels between
// them are products of those of tokens.
constexpr int64_t kBlock = 16;
constexpr int64_t kBlocks = kTokens / kBlock;
static_assert(kBlock % kLanes<float> == 0);

template <class A>
using Line = A[kTokens];

using Sequence = SequenceOf<DeltaRule, kTokens>;

// Tokens of a chunk.
struct Span {
  int64_t sample, begin, tokens;
};

// Calls f<A, kChannels>() with the type that the call is computed in, and with whether each channel
// has a decay.
template <class F>
void visit(const DeltaRule& args, F&& f) {
  visit_bool(args.g_has_channels, [&]<bool kChannels>() {
    args.q_dtype == DType::kFloat64 ? f.template operator()<double, kChannels>()
                                    : f.template operator()<float, kChannels>();
  });
}

// Forward, for each token and head.
inline int64_t nanoseconds_of(const DeltaRule& args) {
  const int64_t products =
      3 * args.key_dim * args.value_dim + kTokens * (args.key_dim + args.value_dim);
  return args.batch * args.length * args.heads * products / kMultiplyAdds;
}

// Columns of rows in scratch.
template <class A>
struct Widths {
  int64_t key, key_stride, value, value_stride;

  explicit Widths(const DeltaRule& args)
      : key(padded<A>(args.key_dim)),
        key_stride(row_stride_of<A>(args.key_dim)),
        value(padded<A>(args.value_dim)),
        value_stride(row_stride_of<A>(args.value_dim)) {}
};

// As add() of cpu/tiles.h, but in chains of so many additions, which are then added: one long chain
// would be further from float64 than torch's products are.
constexpr int64_t kChain = 32;

template <class A, int kRows, int kVectors>
ONEPASS_INLINE void add_chains(const Broadcasts<A>& a, const Panel<A>& b, int64_t steps,
                               Vec<A> (&sum)[kRows][kVectors]) {
  for (int64_t k = 0; k < steps; k += kChain) {
    Vec<A> part[kRows][kVectors] = {};
    add(Broadcasts<A>{a.at + k * a.of_step, a.of_row, a.of_step},
        Panel<A>{b.at + k * b.of_step, b.of_step}, std::min(kChain, steps - k), part);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] += part[r][v];
    }
  }
}

// ---- rows of tensors ----------------------------------------------------------------------------

// Rows of a head from a tensor (batch, length, heads, size), times a factor, filled up to a vector
// with zeros.
template <class A>
void read_rows(const void* tensor, DType dtype, const DeltaRuleStride& stride, const Span& span,
               int64_t head, int64_t size, A factor, int64_t row_stride, A* rows) {
  const int64_t origin =
      span.sample * stride.sample + span.begin * stride.token + head * stride.head;
  const Vec<A> times = broadcast<A>(factor);
  visit_numbers<A>(dtype, [&]<class T>() {
    for (int64_t t = 0; t < span.tokens; ++t) {
      const T* from = static_cast<const T*>(tensor) + origin + t * stride.token;
      A* row = rows + t * row_stride;
      for_each_vector<A>(0, size, [&](int64_t i, auto count) {
        store<A>(row + i, times * load<A>(from + i, count));  // a tail's other lanes are zero
      });
    }
  });
}

// Numbers of a head from a tensor (batch, length, heads).
template <class A>
void read_line(const void* tensor, DType dtype, const DeltaRuleStride& stride, const Span& span,
               int64_t head, A* line) {
  widen_strided(tensor, dtype,
                span.sample * stride.sample + span.begin * stride.token + head * stride.head,
                stride.token, span.tokens, line);
}

// Where a token's row is in a contiguous (batch, length, heads, ...).
inline int64_t place_of(const DeltaRule& args, const Span& span, int64_t t, int64_t head,
                        int64_t heads) {
  return (span.sample * args.length + span.begin + t) * heads + head;
}

// Rounds lines of one number each into a contiguous (batch, length, heads).
template <class A>
void write_line(const DeltaRule& args, const A* line, const Span& span, int64_t head, void* tensor,
                DType dtype) {
  for (int64_t t = 0; t < span.tokens; ++t) {
    round_line(line + t, 1, tensor, dtype, place_of(args, span, t, head, args.heads));
  }
}

// scalar: rows[n] = tensor[of][n], or 0 of null, filled up with zeros
template <class A>
void read_state(const DeltaRule& args, const void* tensor, DType dtype, int64_t of,
                const Widths<A>& widths, A* state) {
  for (int64_t n = 0; n < args.key_dim; ++n) {
    A* row = state + n * widths.value_stride;
    std::fill_n(row, widths.value, A(0));
    if (!tensor) continue;
    widen_line(tensor, dtype, (of * args.key_dim + n) * args.value_dim, args.value_dim, row);
  }
}

template <class A>
void write_state(const DeltaRule& args, const A* state, int64_t of, const Widths<A>& widths,
                 void* tensor, DType dtype) {
  for (int64_t n = 0; n < args.key_dim; ++n) {
    round_line(state + n * widths.value_stride, args.value_dim, tensor, dtype,
               (of * args.key_dim + n) * args.value_dim);
  }
}

// Divides rows by the roots of the sums of their squares; `inverse` keeps by what each is
// multiplied.
template <class A>
void normalize(int64_t tokens, int64_t width, int64_t row_stride, A* rows, A* inverse) {
  for (int64_t t = 0; t < tokens; ++t) {
    A* row = rows + t * row_stride;
    Vec<A> sum{};
    for (int64_t n = 0; n < width; n += kLanes<A>) {
      sum = fma<A>(load<A>(row + n), load<A>(row + n), sum);
    }
    inverse[t] = A(1) / std::sqrt(sum_of_lanes<A>(sum) + A(1e-6));
    const Vec<A> factor = broadcast<A>(inverse[t]);
    for (int64_t n = 0; n < width; n += kLanes<A>) store<A>(row + n, factor * load<A>(row + n));
  }
}

// A number whose exponential is 0, and whose sums stay exact: g below it counts as it. NaN stays.
template <class A>
ONEPASS_INLINE Vec<A> bounded(Vec<A> g) {
  const Vec<A> least = broadcast<A>(A(std::is_same_v<A, double> ? -800 : -200));
  return g < least ? least : g;
}

// ---- a head's chunk -----------------------------------------------------------------------------

// What a thread has of it. Rows of keys are (kTokens, key_dim), key_stride apart.
template <class A>
struct Chunk {
  Widths<A> widths;
  int64_t tokens;
  A *q, *k;                          // normalised
  A *q_before, *k_before, *k_after;  // q and k times the decay from before the chunk; to its end
  A* left;                           // (key_dim,), of the state
  Line<A>*of_keys, *of_queries;      // [t][s]: decayed products with k[s], for s < t and s <= t
  Line<A>* system;                   // -beta[t] of_keys[t][s]
  A *beta, *g;                       // (kTokens,)
  A *q_inverse, *k_inverse;          // likewise, of the norms
  // With a decay for a head.
  Line<A>* decay;     // [t][s], for s <= t; 0 for others of their vectors
  A *before, *after;  // (kTokens,)
  // With a decay for each channel, rows: that of a token, those over the tokens of a block up to a
  // token, and after it; (kBlocks, key_dim): over the blocks before one, and after it.
  A *decay_of_token, *up_to, *beyond;
  A *blocks_before, *blocks_after;
  A *q_local, *k_local;  // q and k times up_to
  A *reach, *scaled;     // see put_reach
  A* panel;              // (key_dim, kTokens)

  Chunk(const DeltaRule& args, Arena& arena) : widths(args) {
    for (A** each : {&q, &k, &q_before, &k_before, &k_after}) *each = rows(arena);
    left = arena.take<A>(widths.key_stride);
    for (auto* each : {&of_keys, &of_queries, &system}) *each = arena.take<Line<A>>(kTokens);
    for (A** each : {&beta, &g, &q_inverse, &k_inverse, &before, &after}) {
      *each = arena.take<A>(kTokens);
    }
    panel = arena.take<A>(args.key_dim * kTokens);
    if (!args.g_has_channels) {
      decay = arena.take<Line<A>>(kTokens);
      return;
    }
    for (A** each : {&decay_of_token, &up_to, &beyond, &q_local, &k_local, &reach, &scaled}) {
      *each = rows(arena);
    }
    for (A** each : {&blocks_before, &blocks_after}) {
      *each = arena.take<A>(kBlocks * widths.key_stride);
    }
  }

  A* rows(Arena& arena) const { return arena.take<A>(kTokens * widths.key_stride); }
};

// Decays of a head. Sums of g from the chunk's begin on are kept as two numbers each, so that their
// differences are exact: between two tokens after one that forgets everything they are small.
template <class A>
void put_decays(Chunk<A>& chunk) {
  using Wide = std::conditional_t<std::is_same_v<A, double>, long double, double>;
  alignas(64) Line<A> sum;
  alignas(64) Line<A> rest;
  Wide total = 0;
  for (int64_t t = 0; t < kTokens; ++t) {
    total += t < chunk.tokens ? chunk.g[t] : A(0);
    sum[t] = static_cast<A>(total);
    rest[t] = static_cast<A>(total - static_cast<Wide>(sum[t]));
  }
  const Vec<A> last = broadcast<A>(sum[kTokens - 1]), of_last = broadcast<A>(rest[kTokens - 1]);
  for (int64_t t = 0; t < chunk.tokens; t += kLanes<A>) {
    store<A>(chunk.before + t, decay_of(load<A>(sum + t)));
    const Vec<A> difference = last - load<A>(sum + t);
    store<A>(chunk.after + t, decay_of(difference + (of_last - load<A>(rest + t))));
  }
  for (int64_t t = 0; t < chunk.tokens; ++t) {
    const Vec<A> of_t = broadcast<A>(sum[t]), of_rest = broadcast<A>(rest[t]);
    for (int64_t s = 0; s <= t; s += kLanes<A>) {
      const Vec<A> difference = of_t - load<A>(sum + s);
      const Vec<A> decay = decay_of(difference + (of_rest - load<A>(rest + s)));
      store<A>(chunk.decay[t] + s,
               s + kLanes<A> <= t ? decay : keep_columns<A>(decay, s, 0, t + 1));
    }
  }
  const A left = chunk.before[chunk.tokens - 1];
  std::fill_n(chunk.left, chunk.widths.key, left);
  const int64_t stride = chunk.widths.key_stride;
  for (int64_t t = 0; t < chunk.tokens; ++t) {
    const Vec<A> from_before = broadcast<A>(chunk.before[t]);
    const Vec<A> to_after = broadcast<A>(chunk.after[t]);
    for (int64_t i = t * stride; i < t * stride + chunk.widths.key; i += kLanes<A>) {
      const Vec<A> k = load<A>(chunk.k + i);
      store<A>(chunk.q_before + i, from_before * load<A>(chunk.q + i));
      store<A>(chunk.k_before + i, from_before * k);
      store<A>(chunk.k_after + i, to_after * k);
    }
  }
}

// Decays of channels: exponentials of sums over the tokens of a block, and products over blocks,
// never a quotient. decay_of_token has g when this begins.
template <class A>
void put_channel_decays(Chunk<A>& chunk) {
  const int64_t stride = chunk.widths.key_stride, blocks = ceil_div(chunk.tokens, kBlock);
  for (int64_t n = 0; n < chunk.widths.key; n += kLanes<A>) {
    Vec<A> all = broadcast<A>(1);
    for (int64_t block = 0; block < blocks; ++block) {
      store<A>(chunk.blocks_before + block * stride + n, all);
      Vec<A> sum{}, decay{};
      const int64_t end = std::min(chunk.tokens, (block + 1) * kBlock);
      for (int64_t t = block * kBlock; t < end; ++t) {
        const int64_t i = t * stride + n;
        sum += load<A>(chunk.decay_of_token + i);
        decay = decay_of(sum);
        store<A>(chunk.up_to + i, decay);
        const Vec<A> q = decay * load<A>(chunk.q + i), k = decay * load<A>(chunk.k + i);
        store<A>(chunk.q_local + i, q);
        store<A>(chunk.k_local + i, k);
        store<A>(chunk.q_before + i, all * q);
        store<A>(chunk.k_before + i, all * k);
      }
      all *= decay;
    }
    store<A>(chunk.left + n, all);
    all = broadcast<A>(1);
    for (int64_t block = blocks - 1; block >= 0; --block) {
      store<A>(chunk.blocks_after + block * stride + n, all);
      Vec<A> sum{};
      const int64_t end = std::min(chunk.tokens, (block + 1) * kBlock);
      for (int64_t t = end - 1; t >= block * kBlock; --t) {
        const int64_t i = t * stride + n;
        const Vec<A> decay = decay_of(sum), g = load<A>(chunk.decay_of_token + i);
        store<A>(chunk.beyond + i, decay);
        store<A>(chunk.k_after + i, all * (decay * load<A>(chunk.k + i)));
        store<A>(chunk.decay_of_token + i, decay_of(g));
        sum += g;
      }
      all *= load<A>(chunk.up_to + (end - 1) * stride + n);
    }
  }
}

// scalar: to[t][s] = decay[t][s] sum over n of rows[t][n] k[s][n], for s <= t, and for others of
// their vectors. Without a decay the factors have it already.
template <class A>
struct PairProduct {
  Broadcasts<A> rows;
  Panel<A> k;
  int64_t key_dim, first;  // the first row's token
  const Line<A>* decay;
  Line<A>* to;

  template <int kRows, int kVectors>
  [[gnu::noinline]] void run(int64_t row, int64_t column) const {
    if (column >= first + row + kRows) return;
    Vec<A> sum[kRows][kVectors] = {};
    add_chains(rows.from(row), k.from(0, column), key_dim, sum);
    for_each_sum<A>(sum, [&](int r, int v, Vec<A> value) {
      const int64_t s = column + v * kLanes<A>;
      store<A>(to[row + r] + s, decay ? load<A>(decay[row + r] + s) * value : value);
    });
  }
};

template <class A>
void put_pairs(const DeltaRule& args, Chunk<A>& chunk) {
  const int64_t stride = chunk.widths.key_stride;
  turn(chunk.k, stride, chunk.tokens, args.key_dim, kTokens, chunk.panel);
  const int64_t columns = padded<A>(chunk.tokens);
  const Panel<A> panel{chunk.panel, kTokens};
  for_each_tile<A>(
      chunk.tokens, columns,
      PairProduct<A>{{chunk.k, stride, 1}, panel, args.key_dim, 0, chunk.decay, chunk.of_keys});
  for_each_tile<A>(
      chunk.tokens, columns,
      PairProduct<A>{{chunk.q, stride, 1}, panel, args.key_dim, 0, chunk.decay, chunk.of_queries});
}

// Keys of the tokens before a block, times their decay up to it.
template <class A>
void put_reach(Chunk<A>& chunk, int64_t block) {
  const int64_t stride = chunk.widths.key_stride, last = block - 1;
  for (int64_t s = 0; s < block * kBlock; ++s) {
    for (int64_t n = 0; n < chunk.widths.key; n += kLanes<A>) {
      const int64_t i = s * stride + n;
      Vec<A> decay;
      if (s >= last * kBlock) {
        decay = load<A>(chunk.beyond + i);
      } else {  // the product over the block that is added
        decay = load<A>(chunk.reach + i) *
                load<A>(chunk.up_to + ((last + 1) * kBlock - 1) * stride + n);
      }
      store<A>(chunk.reach + i, decay);
      store<A>(chunk.scaled + i, decay * load<A>(chunk.k + i));
    }
  }
}

// Pairs of tokens of one block: a key decays from token to token.
// scalar: decayed = k[s] times the decays of (s, t]; of_keys[t][s] = k[t] decayed
template <class A>
void put_pairs_of_block(Chunk<A>& chunk, int64_t first, int64_t last) {
  const int64_t stride = chunk.widths.key_stride;
  for (int64_t s = first; s < last; ++s) {
    A* decayed = chunk.scaled + s * stride;
    std::copy_n(chunk.k + s * stride, chunk.widths.key, decayed);
    for (int64_t t = s; t < last; ++t) {
      const int64_t i = t * stride;
      Vec<A> of_key[2] = {}, of_query[2] = {};
      int chain = 0;
      for (int64_t n = 0; n < chunk.widths.key; n += kLanes<A>, chain ^= 1) {
        Vec<A> key = load<A>(decayed + n);
        if (t > s) {
          key *= load<A>(chunk.decay_of_token + i + n);
          store<A>(decayed + n, key);
        }
        of_key[chain] = fma<A>(load<A>(chunk.k + i + n), key, of_key[chain]);
        of_query[chain] = fma<A>(load<A>(chunk.q + i + n), key, of_query[chain]);
      }
      chunk.of_keys[t][s] = sum_of_lanes<A>(of_key[0] + of_key[1]);
      chunk.of_queries[t][s] = sum_of_lanes<A>(of_query[0] + of_query[1]);
    }
  }
}

template <class A>
void put_channel_pairs(const DeltaRule& args, Chunk<A>& chunk) {
  const int64_t stride = chunk.widths.key_stride;
  for (int64_t first = 0; first < chunk.tokens; first += kBlock) {
    const int64_t last = std::min(chunk.tokens, first + kBlock);
    if (first > 0) {
      put_reach(chunk, first / kBlock);
      turn(chunk.scaled, stride, first, args.key_dim, first, chunk.panel);
      const auto put = [&](const A* rows, Line<A>* to) {
        for_each_tile<A>(last - first, first,
                         PairProduct<A>{{rows + first * stride, stride, 1},
                                        {chunk.panel, first},
                                        args.key_dim,
                                        first,
                                        nullptr,
                                        to + first});
      };
      put(chunk.k_local, chunk.of_keys);
      put(chunk.q_local, chunk.of_queries);
    }
    put_pairs_of_block(chunk, first, last);
  }
}

template <bool kChannels, class A>
void put_chunk(const DeltaRule& args, const Span& span, int64_t head, Chunk<A>& chunk) {
  const Widths<A>& widths = chunk.widths;
  const int64_t key_head = head / (args.heads / args.key_heads);
  chunk.tokens = span.tokens;
  read_rows(args.q, args.q_dtype, args.q_stride, span, key_head, args.key_dim, A(1),
            widths.key_stride, chunk.q);
  read_rows(args.k, args.k_dtype, args.k_stride, span, key_head, args.key_dim, A(1),
            widths.key_stride, chunk.k);
  if (args.qk_l2norm) {
    normalize(span.tokens, widths.key, widths.key_stride, chunk.q, chunk.q_inverse);
    normalize(span.tokens, widths.key, widths.key_stride, chunk.k, chunk.k_inverse);
  }
  read_line(args.beta, args.beta_dtype, args.beta_stride, span, head, chunk.beta);
  if constexpr (kChannels) {
    A* rows = chunk.decay_of_token;
    read_rows(args.g, args.g_dtype, args.g_stride, span, head, args.key_dim, A(1),
              widths.key_stride, rows);
    for (int64_t t = 0; t < span.tokens; ++t) {
      for (int64_t i = t * widths.key_stride; i < t * widths.key_stride + widths.key;
           i += kLanes<A>) {
        store<A>(rows + i, bounded<A>(load<A>(rows + i)));
      }
    }
    put_channel_decays(chunk);
    put_channel_pairs(args, chunk);
  } else {
    read_line(args.g, args.g_dtype, args.g_stride, span, head, chunk.g);
    std::fill(chunk.g + span.tokens, chunk.g + kTokens, A(0));
    for (int64_t t = 0; t < span.tokens; t += kLanes<A>) {
      store<A>(chunk.g + t, bounded<A>(load<A>(chunk.g + t)));
    }
    put_decays(chunk);
    put_pairs(args, chunk);
  }
  for (int64_t t = 0; t < span.tokens; ++t) {
    const Vec<A> factor = broadcast<A>(-chunk.beta[t]);
    for (int64_t s = 0; s <= t; s += kLanes<A>) {
      store<A>(chunk.system[t] + s, factor * load<A>(chunk.of_keys[t] + s));
    }
  }
}

// ---- the system of equations --------------------------------------------------------------------

// Of a block's rows, what those of other blocks bring: `count` rows of u from `first` on.
template <class A>
struct OtherBlocks {
  Broadcasts<A> system;
  Panel<A> u;
  int64_t count;
  A* rows;

  template <int kRows, int kVectors>
  [[gnu::noinline]] void run(int64_t row, int64_t column) const {
    Vec<A> sum[kRows][kVectors];
    A* to = rows + row * u.of_step + column;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = load<A>(to + r * u.of_step + v * kLanes<A>);
    }
    add_chains(system.from(row), u.from(0, column), count, sum);
    for_each_sum<A>(sum, [&](int r, int v, Vec<A> value) {
      store<A>(to + r * u.of_step + v * kLanes<A>, value);
    });
  }
};

// Rows of a block, each of which depends on those before it, or after it.
template <bool kUpper, int kVectors, class A>
void solve_block(const Line<A>* system, int64_t first, int64_t last, int64_t row_stride, A* u) {
  for (int64_t i = 0; i < last - first; ++i) {
    const int64_t t = kUpper ? last - 1 - i : first + i;
    Vec<A> sum[kVectors];
    for (int v = 0; v < kVectors; ++v) sum[v] = load<A>(u + t * row_stride + v * kLanes<A>);
    for (int64_t j = 0; j < i; ++j) {
      const int64_t s = kUpper ? last - 1 - j : first + j;
      const Vec<A> factor = broadcast<A>(kUpper ? system[s][t] : system[t][s]);
      for (int v = 0; v < kVectors; ++v) {
        sum[v] = fma<A>(factor, load<A>(u + s * row_stride + v * kLanes<A>), sum[v]);
      }
    }
    for (int v = 0; v < kVectors; ++v) store<A>(u + t * row_stride + v * kLanes<A>, sum[v]);
  }
}

// scalar: u[t] += sum over s < t of system[t][s] u[s]; kUpper: over s > t of system[s][t] u[s]
template <bool kUpper, class A>
void solve(const Line<A>* system, int64_t tokens, int64_t width, int64_t row_stride, A* u) {
  const int64_t blocks = ceil_div(tokens, kBlock);
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t block = kUpper ? blocks - 1 - i : i;
    const int64_t first = block * kBlock, last = std::min(tokens, first + kBlock);
    if (i > 0) {
      const int64_t from = kUpper ? last : 0, count = kUpper ? tokens - last : first;
      const Broadcasts<A> factors = kUpper ? Broadcasts<A>{system[from] + first, 1, kTokens}
                                           : Broadcasts<A>{system[first], kTokens, 1};
      for_each_tile<A>(
          last - first, width,
          OtherBlocks<A>{
              factors, {u + from * row_stride, row_stride}, count, u + first * row_stride});
    }
    int64_t column = 0;
    for (; column + 4 * kLanes<A> <= width; column += 4 * kLanes<A>) {
      solve_block<kUpper, 4>(system, first, last, row_stride, u + column);
    }
    for (; column < width; column += kLanes<A>) {
      solve_block<kUpper, 1>(system, first, last, row_stride, u + column);
    }
  }
}

// ---- products -----------------------------------------------------------------------------------

// scalar: u[t] = v[t] - sum over n of k_before[t][n] state[n]
template <class A>
struct Residual {
  Broadcasts<A> k_before;
  Panel<A> state;
  int64_t key_dim;
  A* u;

  template <int kRows, int kVectors>
  [[gnu::noinline]] void run(int64_t row, int64_t column) const {
    Vec<A> sum[kRows][kVectors] = {};
    add_chains(k_before.from(row), state.from(0, column), key_dim, sum);
    for_each_sum<A>(sum, [&](int r, int v, Vec<A> value) {
      A* to = u + (row + r) * state.of_step + column + v * kLanes<A>;
      store<A>(to, load<A>(to) - value);
    });
  }
};

// scalar: rows[t] *= factor[t]
template <class A>
void scale_rows(int64_t tokens, int64_t width, int64_t row_stride, const A* factor, const A* rows,
                A* to) {
  for (int64_t t = 0; t < tokens; ++t) {
    const Vec<A> times = broadcast<A>(factor[t]);
    for (int64_t i = t * row_stride; i < t * row_stride + width; i += kLanes<A>) {
      store<A>(to + i, times * load<A>(rows + i));
    }
  }
}

}  // namespace delta_rule
}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
