// The gradient of a block of rows of a norm, also where a rotation follows it.
#pragma once

#include "cpu/normed_rows.h"
#include "cpu/row_sums.h"
#include "cpu/vec_two.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

template <class A>
struct BackwardRows {
  const void* doutput[kRowsPerBlock];        // (cols,) each
  const void* x[kRowsPerBlock];              // (cols,) each
  const void* dresidual_out[kRowsPerBlock];  // (cols,) each, unused without kResidual
  void* dx[kRowsPerBlock];                   // (end - begin,) each: columns [begin, end)
  const A* weight;                           // (cols,)
  A* dweight;                                // (cols,) the run's sum
  A* dbias;                                  // (cols,) the run's sum
  A mean[kRowsPerBlock];
  A rstd[kRowsPerBlock];
  A mean_g[kRowsPerBlock];   // mean over columns of g
  A mean_gh[kRowsPerBlock];  // mean over columns of g * h
  int64_t cols;
};

// Second sweep over the columns [begin, end): dx, and the rows' share of dweight and dbias. kTwo:
// two vectors at a time; weight, dweight and dbias have the order of to_halves_order, and begin is
// 0.
template <class A, class D, class X, class DX, bool kRms, bool kBias, bool kResidual, int kRows,
          bool kTwo = false>
void norm_backward_kernel(const BackwardRows<A>& rows, int64_t begin, int64_t end) {
  const D* doutput[kRows];
  const X* x[kRows];
  const X* dresidual_out[kRows];
  DX* dx[kRows];
  Vec<A> mean[kRows], rstd[kRows], mean_g[kRows], mean_gh[kRows];
  for (int r = 0; r < kRows; ++r) {
    doutput[r] = static_cast<const D*>(rows.doutput[r]);
    x[r] = static_cast<const X*>(rows.x[r]);
    dresidual_out[r] = static_cast<const X*>(rows.dresidual_out[r]);
    dx[r] = static_cast<DX*>(rows.dx[r]);
    mean[r] = broadcast<A>(rows.mean[r]);
    rstd[r] = broadcast<A>(rows.rstd[r]);
    mean_g[r] = broadcast<A>(rows.mean_g[r]);
    mean_gh[r] = broadcast<A>(rows.mean_gh[r]);
  }
  // scalar: h = (x[r][j] - mean[r]) * rstd[r]; g = doutput[r][j] * weight[j]
  //         dx[r][j] = (g - mean_g[r] - h * mean_gh[r]) * rstd[r] + dresidual_out[r][j]
  //         dweight[j] += doutput[r][j] * h; dbias[j] += doutput[r][j]
  // V is Vec<A> or Two<A>: load_as(address) gives one, store_as(address, V) writes one.
  const auto columns = [&]<class V>(int64_t j, auto&& load_as,
                                    auto&& store_as) __attribute__((always_inline)) {
    const V weight = load_as(rows.weight + j);
    V dweight = load_as(rows.dweight + j);
    V dbias = {};
    if constexpr (kBias) dbias = load_as(rows.dbias + j);
    for (int r = 0; r < kRows; ++r) {
      const V d = load_as(doutput[r] + j);
      const V h =
          each<A>([&](Vec<A> v) { return (kRms ? v : v - mean[r]) * rstd[r]; }, load_as(x[r] + j));
      V gradient = each<A>(
          [&](Vec<A> upstream, Vec<A> w, Vec<A> of_h) {
            // Not fused: the difference is exactly zero in a row of one column.
            Vec<A> g = upstream * w;
            if constexpr (!kRms) g -= mean_g[r];
            return fma<A>(-of_h, mean_gh[r], g) * rstd[r];
          },
          d, weight, h);
      if constexpr (kResidual) {
        gradient = each<A>([](Vec<A> a, Vec<A> b) { return a + b; }, gradient,
                           load_as(dresidual_out[r] + j));
      }
      store_as(dx[r] + (j - begin), gradient);
      dweight = each<A>(
          [](Vec<A> upstream, Vec<A> of_h, Vec<A> sum) { return fma<A>(upstream, of_h, sum); }, d,
          h, dweight);
      if constexpr (kBias) dbias = each<A>([](Vec<A> a, Vec<A> b) { return a + b; }, dbias, d);
    }
    store_as(rows.dweight + j, dweight);
    if constexpr (kBias) store_as(rows.dbias + j, dbias);
  };
  const auto one = [&](int64_t j, auto count) __attribute__((always_inline)) {
    columns.template operator()<Vec<A>>(
        j, [&](const auto* p) { return load<A>(p, count); },
        [&](auto* p, Vec<A> v) { store<A>(p, v, count); });
  };
  if constexpr (kTwo) {
    for_each_two<A>(
        end,
        [&](int64_t j) __attribute__((always_inline)) {
          columns.template operator()<Two<A>>(
              j, [&](const auto* p) { return load_two<false, A>(p); },
              [&](auto* p, const Two<A>& v) { store_two<false, A>(p, v); });
        },
        one);
  } else {
    for_each_vector<A>(begin, end, one);
  }
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
