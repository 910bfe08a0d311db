// What the passes of Mamba 2's scan share: pieces of work, B and C of a group, and the numbers of a
// head's chunk.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cpu/decay.h"
#include "cpu/lines.h"
#include "cpu/parallel.h"
#include "cpu/pieces.h"
#include "cpu/sequences.h"
#include "cpu/tiles.h"
#include "ops/mamba_chunk_scan.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace mamba_chunk_scan {

constexpr int64_t kTokens = kChunkScanTokens;
static_assert(kTokens % kLanes<float> == 0);

template <class A>
using Line = A[kTokens];
template <class A>
using Square = Line<A>[kTokens];  // of pairs of tokens

// Calls f<A>() with the type that the call is computed in.
template <class F>
void visit(const MambaChunkScan& args, F&& f) {
  args.x_dtype == DType::kFloat64 ? f.template operator()<double>()
                                  : f.template operator()<float>();
}

// Forward, for each token and head.
inline int64_t nanoseconds_of(const MambaChunkScan& args) {
  const int64_t products = args.head_dim * (2 * args.state + kTokens / 2);
  return args.batch * args.length * args.heads * products / kMultiplyAdds;
}

// ---- pieces of work -----------------------------------------------------------------------------

using Sequence = SequenceOf<MambaChunkScan, kTokens>;

// Tokens of a chunk.
struct Span {
  int64_t sample, begin, tokens;

  int64_t token(const MambaChunkScan& args) const { return sample * args.length + begin; }
};

// A chunk of a sample by its number; without tokens if there is none.
inline Span chunk_of(const MambaChunkScan& args, int64_t sample, int64_t number) {
  int64_t begin = number * kTokens, end = args.length;
  if (args.cu_seqlens) {
    // The numbers of first chunks, begin / kTokens + sequence, grow with the sequence.
    int64_t low = 0, high = args.sequences;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (args.cu_seqlens[middle] / kTokens + middle <= number ? low : high) = middle;
    }
    const Sequence of(args, low);
    begin = of.begin + (number - of.chunk(args, of.begin)) * kTokens;
    end = of.end;
  }
  return {sample, begin, std::clamp<int64_t>(end - begin, 0, kTokens)};
}

// ---- rows of tensors ----------------------------------------------------------------------------

// Columns [first, first + count) of a head.
struct Columns {
  int64_t head, first, count;
};

// Rows of a head's columns from a tensor (batch, length, heads, head_dim), filled up to a vector
// with zeros. Those of the next chunk are prefetched; they need not exist.
template <class A>
void read_rows(const void* tensor, DType dtype, const ChunkScanStride& stride, const Span& span,
               const Columns& columns, int64_t ahead, int64_t row_stride, A* rows) {
  const int64_t origin = span.sample * stride.sample + span.begin * stride.token +
                         columns.head * stride.head + columns.first;
  visit_numbers<A>(dtype, [&]<class T>() {
    for (int64_t t = 0; t < span.tokens; ++t) {
      const T* from = static_cast<const T*>(tensor) + origin + t * stride.token;
      A* row = rows + t * row_stride;
      for_each_vector<A>(0, columns.count, [&](int64_t i, auto count) {
        store<A>(row + i, load<A>(from + i, count));  // a tail's other lanes are zero
      });
      const char* next = reinterpret_cast<const char*>(from + ahead);
      for (int64_t byte = 0; byte < columns.count * int64_t{sizeof(T)}; byte += 64) {
        __builtin_prefetch(next + byte);
      }
    }
  });
}

// Where a token's columns are in a contiguous (batch, length, heads, head_dim).
inline int64_t place_of(const MambaChunkScan& args, const Span& span, int64_t t,
                        const Columns& columns) {
  return ((span.token(args) + t) * args.heads + columns.head) * args.head_dim + columns.first;
}

// scalar: panel[n][p] = tensor[of][first + p][n], or 0 of null; the tensor is (..., head_dim,
// state), the panel's columns beyond the count are 0.
template <class A>
void read_states(const MambaChunkScan& args, const void* tensor, DType dtype, int64_t of,
                 const Columns& columns, int64_t row_stride, A* line, A* panel) {
  std::fill_n(panel, args.state * row_stride, A(0));
  if (!tensor) return;
  for (int64_t p = 0; p < columns.count; ++p) {
    const int64_t row = of * args.head_dim + columns.first + p;
    widen_line(tensor, dtype, row * args.state, args.state, line);
    for (int64_t n = 0; n < args.state; ++n) panel[n * row_stride + p] = line[n];
  }
}

// scalar: tensor[of][first + p][n] = panel[n][p]
template <class A>
void write_states(const MambaChunkScan& args, const A* panel, int64_t row_stride, int64_t of,
                  const Columns& columns, A* line, void* tensor, DType dtype) {
  for (int64_t p = 0; p < columns.count; ++p) {
    const int64_t row = of * args.head_dim + columns.first + p;
    for (int64_t n = 0; n < args.state; ++n) line[n] = panel[n * row_stride + p];
    round_line(line, args.state, tensor, dtype, row * args.state);
  }
}

// ---- B and C ------------------------------------------------------------------------------------

// scalar: c[s][t] = sum over n of B[s][n] C[t][n], for s <= t, and for others of their vectors.
template <class A>
struct PairProduct {
  Broadcasts<A> B;
  Panel<A> C;
  int64_t state;
  Line<A>* pairs;

  template <int kRows, int kVectors>
  [[gnu::noinline]] void run(int64_t row, int64_t column) const {
    if (column + kVectors * kLanes<A> <= row) return;
    Vec<A> sum[kRows][kVectors] = {};
    add(B.from(row), C.from(0, column), state, sum);
    for_each_sum<A>(sum, [&](int r, int v, Vec<A> value) {
      store<A>(pairs[row + r] + column + v * kLanes<A>, value);
    });
  }
};

// B and C in A, (2, batch, groups, length, state); B of each chunk as (state, tokens), whose lines
// lie close together where a product sums over tokens; and the products of tokens of a chunk, which
// all heads of a group share: (batch, groups, length, kTokens), row s has C[t] B[s] of its chunk.
template <class A>
struct Factors {
  const MambaChunkScan& args;
  A* numbers;
  Line<A>* products;

  Factors(const MambaChunkScan& args, Arena& arena)
      : args(args),
        numbers(arena.take<A>(3 * tokens() * args.state)),
        products(arena.take<Line<A>>(tokens())) {}

  int64_t tokens() const { return args.batch * args.groups * args.length; }
  int64_t token(const Span& span, int64_t group) const {
    return (span.sample * args.groups + group) * args.length + span.begin;
  }
  A* B(const Span& span, int64_t group) const { return numbers + token(span, group) * args.state; }
  A* C(const Span& span, int64_t group) const { return B(span, group) + tokens() * args.state; }
  A* B_turned(const Span& span, int64_t group) const {
    return C(span, group) + tokens() * args.state;
  }
  Line<A>* pairs(const Span& span, int64_t group) const { return products + token(span, group); }

  int64_t pieces() const { return args.batch * args.groups * args.chunks; }
  // (state, kTokens): C of a chunk as a panel.
  int64_t scratch() const { return args.state * kTokens; }

  void put(int64_t piece, A* panel) const {
    const int64_t group = piece / args.chunks % args.groups;
    const Span span = chunk_of(args, piece / args.chunks / args.groups, piece % args.chunks);
    if (span.tokens == 0) return;
    const Columns columns{group, 0, args.state};
    const auto widened = [&](const void* tensor, DType dtype, const ChunkScanStride& stride,
                             A* to) {
      for (int64_t t = 0; t < span.tokens; ++t) {
        const int64_t first = span.sample * stride.sample + (span.begin + t) * stride.token +
                              columns.head * stride.head;
        widen_line(tensor, dtype, first, args.state, to + t * args.state);
      }
    };
    A *of_B = B(span, group), *of_C = C(span, group);
    widened(args.B, args.B_dtype, args.B_stride, of_B);
    widened(args.C, args.C_dtype, args.C_stride, of_C);
    A* turned = B_turned(span, group);
    for (int64_t t = 0; t < span.tokens; ++t) {
      for (int64_t n = 0; n < args.state; ++n) {
        turned[n * span.tokens + t] = of_B[t * args.state + n];
      }
    }
    pack_panel<Multiplier<A>>([&](int64_t t) { return of_C + t * args.state; }, span.tokens,
                              args.state, kTokens, panel);
    for_each_tile<A>(
        span.tokens, padded<A>(span.tokens),
        PairProduct<A>{{of_B, args.state, 1}, {panel, kTokens}, args.state, pairs(span, group)});
  }
};

// ---- a head's chunk -----------------------------------------------------------------------------

// The steps of a head, and sums of a[t] = step[t] A from the chunk's begin on, each as two numbers:
// differences of sums are as exact as if they were summed on their own, after a step that forgets
// everything too.
template <class A>
struct Steps {
  alignas(64) Line<A> step;
  Line<A> slope;        // the derivative of the step by dt
  Line<A> sum, rest;    // of a, up to this token
  Line<A> from_before;  // exp(sum): what is left of the state before the chunk
  Line<A> to_after;     // what is left after the chunk of what a token puts in

  void put(const MambaChunkScan& args, const Span& span, int64_t head) {
    const ChunkScanStride& stride = args.dt_stride;
    widen_strided(args.dt, args.dt_dtype,
                  span.sample * stride.sample + span.begin * stride.token + head * stride.head,
                  stride.token, span.tokens, step);
    std::fill(step + span.tokens, step + kTokens, A(0));
    const Vec<A> bias = broadcast<A>(number_of<A>(args.dt_bias, args.dt_bias_dtype, head));
    const Vec<A> least = broadcast<A>(static_cast<A>(args.dt_min));
    const Vec<A> most = broadcast<A>(static_cast<A>(args.dt_max));
    const Vec<A> one = broadcast<A>(1);
    for (int64_t t = 0; t < span.tokens; t += kLanes<A>) {
      Vec<A> x = load<A>(step + t) + bias, derivative = one;
      if (args.dt_softplus) {
        const Gate<A> of = softplus(x);
        x = of.value;
        derivative = of.slope;
      }
      derivative = x < least ? Vec<A>{} : derivative;
      derivative = x > most ? Vec<A>{} : derivative;
      x = x < least ? least : x;  // NaN stays
      store<A>(step + t, x > most ? most : x);
      store<A>(slope + t, derivative);
    }
    put_sums(number_of<A>(args.A, args.A_dtype, head), span.tokens);
  }

  // exp(the sum of a over tokens (s, t]), of a vector of t.
  ONEPASS_INLINE Vec<A> decay(int64_t s, int64_t t) const {
    const Vec<A> difference = load<A>(sum + t) - broadcast<A>(sum[s]);
    return decay_of(difference + (load<A>(rest + t) - broadcast<A>(rest[s])));
  }

 private:
  void put_sums(A factor, int64_t tokens) {
    using Wide = std::conditional_t<std::is_same_v<A, double>, long double, double>;
    Wide total = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      total +=
          static_cast<Wide>(step[t] * factor);  // rounded, as where a token's decay is computed
      sum[t] = static_cast<A>(total);
      rest[t] = static_cast<A>(total - static_cast<Wide>(sum[t]));
    }
    std::fill(sum + tokens, sum + kTokens, A(0));
    std::fill(rest + tokens, rest + kTokens, A(0));
    std::fill(step + tokens, step + kTokens, A(0));
    const Vec<A> last = broadcast<A>(sum[tokens - 1]), of_last = broadcast<A>(rest[tokens - 1]);
    for (int64_t t = 0; t < tokens; t += kLanes<A>) {
      store<A>(from_before + t, decay_of(load<A>(sum + t)));
      const Vec<A> difference = last - load<A>(sum + t);
      store<A>(to_after + t, decay_of(difference + (of_last - load<A>(rest + t))));
    }
  }
};

// The output of a head's chunk, without D.
// scalar: y[t] = from_before[t] C[t] h + sum over s <= t of mixed[s][t] x[s]
template <class A>
struct OutputProduct {
  Broadcasts<A> C;
  Panel<A> h;
  int64_t state;  // 0 if h is
  const A* from_before;
  Broadcasts<A> mixed;
  Panel<A> x;
  A* y;

  template <int kRows, int kVectors>
  [[gnu::noinline]] void run(int64_t row, int64_t column) const {
    Vec<A> sum[kRows][kVectors] = {};
    if (state > 0) {
      add(C.from(row), h.from(0, column), state, sum);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec<A> decay = broadcast<A>(from_before[row + r]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[r][v] *= decay;
      }
    }
    add(mixed.from(row), x.from(0, column), row, sum);
    add_triangle<false>(mixed.from(row, row), x.from(row, column), sum);
    for_each_sum<A>(sum, [&](int r, int v, Vec<A> value) {
      store<A>(y + (row + r) * x.of_step + column + v * kLanes<A>, value);
    });
  }
};

// The state after a chunk; and backward, with C for B and gradients for x, that before it.
// Contributions that decayed most are added first, as where the state goes from token to token.
// scalar: h[n] = decay h[n] + sum over s of B[s][n] x[s]
template <class A>
struct StateProduct {
  Broadcasts<A> B;
  Panel<A> x;
  int64_t tokens;
  bool has_state;  // otherwise h is not read, as if it were 0
  A decay;
  int64_t row_stride;
  A* h;

  template <int kRows, int kVectors>
  [[gnu::noinline]] void run(int64_t row, int64_t column) const {
    Vec<A> sum[kRows][kVectors] = {};
    add(B.from(row), x.from(0, column), tokens, sum);
    const Vec<A> factor = broadcast<A>(decay);
    for_each_sum<A>(sum, [&](int r, int v, Vec<A> value) {
      A* to = h + (row + r) * row_stride + column + v * kLanes<A>;
      store<A>(to, has_state ? fma<A>(load<A>(to), factor, value) : value);
    });
  }
};

// Rows, each times the number that factor(t) gives.
template <class A, class Factor>
void put_scaled(int64_t tokens, int64_t width, const A* rows, int64_t row_stride, A* scaled,
                Factor&& factor) {
  for (int64_t t = 0; t < tokens; ++t) {
    const Vec<A> times = broadcast<A>(factor(t));
    for (int64_t p = 0; p < width; p += kLanes<A>) {
      store<A>(scaled + t * row_stride + p, times * load<A>(rows + t * row_stride + p));
    }
  }
}

// y[t] += D x[t]
template <class A>
void add_skip(const MambaChunkScan& args, const Columns& columns, int64_t tokens, const A* D,
              const A* x, int64_t row_stride, A* y) {
  if (!args.D) return;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t p = 0; p < columns.count; p += kLanes<A>) {
      const int64_t i = t * row_stride + p;
      store<A>(y + i, fma<A>(load<A>(D + p), load<A>(x + i), load<A>(y + i)));
    }
  }
}

// D of a head's columns, zeros beyond them.
template <class A>
void read_skip(const MambaChunkScan& args, const Columns& columns, int64_t row_stride, A* D) {
  std::fill_n(D, row_stride, A(0));
  if (args.D && args.D_has_columns) {
    widen_line(args.D, args.D_dtype, columns.head * args.head_dim + columns.first, columns.count,
               D);
  } else if (args.D) {
    std::fill_n(D, columns.count, number_of<A>(args.D, args.D_dtype, columns.head));
  }
}

}  // namespace mamba_chunk_scan
}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
