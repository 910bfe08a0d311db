// Products of the backward of the delta rule (cpu/delta_rule/backward.cpp).
#pragma once

#include "cpu/delta_rule/chunk.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace delta_rule {

// scalar: to[t] = sum over n of k_after[t][n] dstate[n] + sum over s >= t of of_queries[s][t] dy[s]
template <class A>
struct UpdateGradient {
  Broadcasts<A> k_after;
  Panel<A> dstate;
  int64_t key_dim, tokens;
  const Line<A>* of_queries;
  Panel<A> dy;
  A* to;

  template <int kRows, int kVectors>
  [[gnu::noinline]] void run(int64_t row, int64_t column) const {
    Vec<A> sum[kRows][kVectors] = {};
    add_chains(k_after.from(row), dstate.from(0, column), key_dim, sum);
    const Broadcasts<A> queries{of_queries[0], 1, kTokens};
    add_chains(queries.back_from(row, tokens - 1), dy.back_from(tokens - 1, column),
               tokens - row - kRows, sum);
    add_triangle<true>(queries.from(row, row), dy.from(row, column), sum);
    for_each_sum<A>(sum, [&](int r, int v, Vec<A> value) {
      store<A>(to + (row + r) * dy.of_step + column + v * kLanes<A>, value);
    });
  }
};

// scalar: to[row] = sum over k of factors[row][k] panel[k]
template <class A>
struct RowProduct {
  Broadcasts<A> factors;
  Panel<A> panel;
  int64_t steps;
  int64_t row_stride;
  A* to;

  template <int kRows, int kVectors>
  [[gnu::noinline]] void run(int64_t row, int64_t column) const {
    Vec<A> sum[kRows][kVectors] = {};
    add_chains(factors.from(row), panel.from(0, column), steps, sum);
    for_each_sum<A>(sum, [&](int r, int v, Vec<A> value) {
      store<A>(to + (row + r) * row_stride + column + v * kLanes<A>, value);
    });
  }
};

// scalar: to[t][s] = sum over p of rows[t][p] u[s][p], for s < t, or s <= t; 0 for others
template <class A>
struct PairGradient {
  Broadcasts<A> rows;
  Panel<A> u;
  int64_t value_dim;
  int64_t kept;  // before the diagonal, or with it
  Line<A>* to;

  template <int kRows, int kVectors>
  [[gnu::noinline]] void run(int64_t row, int64_t column) const {
    if (column >= row + kRows) {
      const Vec<A> zeros[kRows][kVectors] = {};
      return put(row, column, zeros);
    }
    Vec<A> sum[kRows][kVectors] = {};
    add_chains(rows.from(row), u.from(0, column), value_dim, sum);
    put(row, column, sum);
  }

  template <int kRows, int kVectors>
  ONEPASS_INLINE void put(int64_t row, int64_t column, const Vec<A> (&sum)[kRows][kVectors]) const {
    for_each_sum<A>(sum, [&](int r, int v, Vec<A> value) {
      const int64_t s = column + v * kLanes<A>;
      store<A>(to[row + r] + s, keep_columns<A>(value, s, 0, row + r + kept));
    });
  }
};

// scalar: dstate[n] = left[n] dstate[n] + sum over t of q_before[t][n] dy[t] + k_before[t][n] dr[t]
// with dr the gradient of what k_before reads.
template <class A>
struct StateGradient {
  Broadcasts<A> q_before, k_before;
  Panel<A> dy, dr;
  int64_t tokens;
  const A* left;
  A* dstate;

  template <int kRows, int kVectors>
  [[gnu::noinline]] void run(int64_t row, int64_t column) const {
    Vec<A> sum[kRows][kVectors] = {};
    add_chains(q_before.back_from(row, tokens - 1), dy.back_from(tokens - 1, column), tokens, sum);
    add_chains(k_before.back_from(row, tokens - 1), dr.back_from(tokens - 1, column), tokens, sum);
    for_each_sum<A>(sum, [&](int r, int v, Vec<A> value) {
      A* to = dstate + (row + r) * dy.of_step + column + v * kLanes<A>;
      store<A>(to, fma<A>(load<A>(to), broadcast<A>(left[row + r]), value));
    });
  }
};

// What pairs bring to q and k, to which it is added. Outside of their triangles pairs are 0.
// scalar: dq[t] += sum over s <= t of dqueries[t][s] k[s]
template <class A>
struct QueryGradient {
  Broadcasts<A> dqueries;
  Panel<A> k;
  A* dq;

  template <int kRows, int kVectors>
  [[gnu::noinline]] void run(int64_t row, int64_t column) const {
    Vec<A> sum[kRows][kVectors] = {};
    add_chains(dqueries.from(row), k.from(0, column), row + kRows, sum);
    for_each_sum<A>(sum, [&](int r, int v, Vec<A> value) {
      A* to = dq + (row + r) * k.of_step + column + v * kLanes<A>;
      store<A>(to, load<A>(to) + value);
    });
  }
};

// scalar: dk[t] += sum over s < t of dkeys[t][s] k[s] + sum over s > t of dkeys[s][t] k[s]
//                  + sum over s >= t of dqueries[s][t] q[s]
template <class A>
struct KeyGradient {
  const Line<A>*dkeys, *dqueries;
  Panel<A> k, q;
  int64_t tokens;
  A* dk;

  template <int kRows, int kVectors>
  [[gnu::noinline]] void run(int64_t row, int64_t column) const {
    Vec<A> sum[kRows][kVectors] = {};
    add_chains(Broadcasts<A>{dkeys[row], kTokens, 1}, k.from(0, column), row + kRows, sum);
    add_chains(Broadcasts<A>{dkeys[row] + row, 1, kTokens}, k.from(row, column), tokens - row, sum);
    add_chains(Broadcasts<A>{dqueries[row] + row, 1, kTokens}, q.from(row, column), tokens - row,
               sum);
    for_each_sum<A>(sum, [&](int r, int v, Vec<A> value) {
      A* to = dk + (row + r) * k.of_step + column + v * kLanes<A>;
      store<A>(to, load<A>(to) + value);
    });
  }
};

}  // namespace delta_rule
}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
