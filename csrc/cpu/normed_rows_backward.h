// The gradient of a block of rows of a norm, also where a rotation follows it.
#pragma once

#include "cpu/normed_rows.h"
#include "cpu/row_sums.h"

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

// Second sweep over the columns [begin, end): dx, and the rows' share of dweight and dbias.
template <class A, class D, class X, class DX, bool kRms, bool kBias, bool kResidual, int kRows>
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
  for_each_vector<A>(begin, end, [&](int64_t j, auto count) {
    const Vec<A> weight = load<A>(rows.weight + j, count);
    Vec<A> dweight = load<A>(rows.dweight + j, count);
    Vec<A> dbias = {};
    if constexpr (kBias) dbias = load<A>(rows.dbias + j, count);
    for (int r = 0; r < kRows; ++r) {
      const Vec<A> d = load<A>(doutput[r] + j, count);
      const Vec<A> v = load<A>(x[r] + j, count);
      const Vec<A> h = (kRms ? v : v - mean[r]) * rstd[r];
      const Vec<A> g = kRms ? d * weight : fma<A>(d, weight, -mean_g[r]);
      Vec<A> gradient = fma<A>(-h, mean_gh[r], g) * rstd[r];
      if constexpr (kResidual) gradient += load<A>(dresidual_out[r] + j, count);
      store<A>(dx[r] + (j - begin), gradient, count);
      dweight = fma<A>(d, h, dweight);
      if constexpr (kBias) dbias += d;
    }
    store<A>(rows.dweight + j, dweight, count);
    if constexpr (kBias) store<A>(rows.dbias + j, dbias, count);
  });
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
