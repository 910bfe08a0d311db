// Products of the backward of Mamba 2's scan (cpu/mamba_chunk_scan/backward.cpp).
#pragma once

#include "cpu/mamba_chunk_scan/chunk.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace mamba_chunk_scan {

// The products of x and dy of pairs of tokens.
// scalar, s <= t: dot = x[s] dy[t]; dpairs[s][t] += decay[s][t] step[s] dot
//         s < t:  passing[s][t] = mixed[s][t] step[s] dot
template <class A>
struct PairGradient {
  Broadcasts<A> x;
  Panel<A> dy;
  int64_t head_dim, tokens;
  const A* step;
  const Line<A>* decay;
  const Line<A>* mixed;
  Line<A>* dpairs;
  Line<A>* passing;

  template <int kRows, int kVectors>
  [[gnu::noinline]] void run(int64_t row, int64_t column) const {
    if (column + kVectors * kLanes<A> <= row) return;
    Vec<A> sum[kRows][kVectors] = {};
    add(x.from(row), dy.from(0, column), head_dim, sum);
    for_each_sum<A>(sum, [&](int r, int v, Vec<A> dot) {
      const int64_t s = row + r, t = column + v * kLanes<A>;
      dot *= broadcast<A>(step[s]);
      const Vec<A> of_pair = keep_columns<A>(dot * load<A>(decay[s] + t), t, s, tokens);
      store<A>(dpairs[s] + t, load<A>(dpairs[s] + t) + of_pair);
      store<A>(passing[s] + t, keep_columns<A>(dot * load<A>(mixed[s] + t), t, s + 1, tokens));
    });
  }
};

// The part of dC that comes from the state, with C, h and exp(c); that of dB that goes into it,
// with B, g and what is left of a token after the chunk.
// scalar: part = factor[t] sum over p of state[n][p] columns[p][t]
//         gradient[n][t] += part; passing[t] += factors[n][t] part
template <class A>
struct FactorGradient {
  Broadcasts<A> state;
  Panel<A> columns;
  int64_t head_dim;
  const A* factor;
  const Line<A>* factors;
  Line<A>* gradient;
  A* passing;

  template <int kRows, int kVectors>
  [[gnu::noinline]] void run(int64_t row, int64_t column) const {
    Vec<A> sum[kRows][kVectors] = {};
    add(state.from(row), columns.from(0, column), head_dim, sum);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const int64_t t = column + v * kLanes<A>;
      const Vec<A> of_token = load<A>(factor + t);
      Vec<A> passed{};
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec<A> part = sum[r][v] * of_token;
        A* to = gradient[row + r] + t;
        store<A>(to, load<A>(to) + part);
        passed = fma<A>(load<A>(factors[row + r] + t), part, passed);
      }
      store<A>(passing + t, load<A>(passing + t) + passed);
    }
  }
};

// scalar: v[s] = to_after[s] sum over n of B[s][n] g[n] + sum over t >= s of mixed[s][t] dy[t]
template <class A>
struct InputGradient {
  Broadcasts<A> B;
  Panel<A> g;
  int64_t state;
  const A* to_after;
  Broadcasts<A> mixed;
  Panel<A> dy;
  int64_t tokens;
  A* v;

  template <int kRows, int kVectors>
  [[gnu::noinline]] void run(int64_t row, int64_t column) const {
    Vec<A> sum[kRows][kVectors] = {};
    add(B.from(row), g.from(0, column), state, sum);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec<A> decay = broadcast<A>(to_after[row + r]);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) sum[r][i] *= decay;
    }
    add(mixed.back_from(row, tokens - 1), dy.back_from(tokens - 1, column), tokens - row - kRows,
        sum);
    add_triangle<true>(mixed.from(row, row), dy.from(row, column), sum);
    for_each_sum<A>(sum, [&](int r, int i, Vec<A> value) {
      store<A>(v + (row + r) * dy.of_step + column + i * kLanes<A>, value);
    });
  }
};

// Adds what reaches B or C through the products of pairs, whose panel is 0 outside of a triangle.
// scalar: gradient[n][t] += sum over s of factor[s][n] dpairs[s][t]
template <class A>
struct PairsToFactor {
  Broadcasts<A> factor;
  Panel<A> dpairs;
  int64_t tokens;
  bool is_before;  // whether the sum is over tokens up to the column's, or from it on
  Line<A>* gradient;

  template <int kRows, int kVectors>
  [[gnu::noinline]] void run(int64_t row, int64_t column) const {
    Vec<A> sum[kRows][kVectors] = {};
    if (is_before) {
      const int64_t last = std::min(tokens, column + kVectors * kLanes<A>);
      add(factor.from(row), dpairs.from(0, column), last, sum);
    } else {
      add(factor.back_from(row, tokens - 1), dpairs.back_from(tokens - 1, column), tokens - column,
          sum);
    }
    for_each_sum<A>(sum, [&](int r, int v, Vec<A> value) {
      A* to = gradient[row + r] + column + v * kLanes<A>;
      store<A>(to, load<A>(to) + value);
    });
  }
};

}  // namespace mamba_chunk_scan
}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
