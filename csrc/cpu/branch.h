// The operations between a branch and the residual stream: dropout, a scale for each column and a
// factor for each row. One row, or a tile of one, at a time.
#pragma once

#include "core/visit.h"
#include "cpu/lines.h"
#include "cpu/random.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// The scales of one row. A row whose factor is 0 is not read.
template <class A>
struct BranchScale {
  const A* columns;        // (cols,)
  A row;                   // 1 without factors
  const Dropout* dropout;  // null without
};

// The factor of a row; each factor serves `sample_rows` rows.
template <class A>
A row_scale_of(const void* row_scale, int64_t sample_rows, int64_t row) {
  return row_scale ? static_cast<const A*>(row_scale)[row / sample_rows] : A(1);
}

// sum = residual + row_scale * column_scale * dropout(input), one row, whose first element has the
// index `first_element`; a residual of null is 0.
template <class A, class T, class R, class O>
void branch_forward_kernel(const void* input_, const void* residual_, void* sum_, int64_t cols,
                           const BranchScale<A>& scale, int64_t first_element) {
  const T* input = static_cast<const T*>(input_);
  const R* residual = static_cast<const R*>(residual_);
  O* sum = static_cast<O*>(sum_);
  const auto above = [&](int64_t j, auto count) {
    if (!residual) return Vec<A>{};
    prefetch_ahead(residual + j);
    return load<A>(residual + j, count);
  };
  if (scale.row == A(0)) {
    for_each_vector<A>(0, cols,
                       [&](int64_t j, auto count) { store<A>(sum + j, above(j, count), count); });
    return;
  }
  const Vec<A> factor = broadcast<A>(scale.row);
  KeepTile keep;
  for (int64_t tile = 0; tile < cols; tile += kDropoutTile) {
    const int64_t end = std::min(tile + kDropoutTile, cols);
    if (scale.dropout) keep.fill(*scale.dropout, first_element + tile, end - tile);
    // scalar: sum[j] = residual[j] + columns[j] * (row * keep[j] * input[j])
    for_each_vector<A>(tile, end, [&](int64_t j, auto count) {
      prefetch_ahead(input + j);
      Vec<A> branch = load<A>(input + j, count);
      if (scale.dropout) branch *= keep.scale<A>(*scale.dropout, j - tile);
      store<A>(sum + j, fma<A>(load<A>(scale.columns + j, count), branch * factor, above(j, count)),
               count);
    });
  }
}

template <class A>
using AddBranchRow = void (*)(const void*, const void*, void*, int64_t, const BranchScale<A>&,
                              int64_t);

// The kernel above for these dtypes.
template <class A>
AddBranchRow<A> branch_row_of(DType input, DType residual, DType sum) {
  return visit_numbers<A>(input, [&]<class T>() {
    return visit_numbers<A>(residual, [&]<class R>() {
      return visit_numbers<A>(
          sum, [&]<class O>() -> AddBranchRow<A> { return branch_forward_kernel<A, T, R, O>; });
    });
  });
}

// The branch's gradients from a tile of a row's dx, the gradient of the sum:
//   d = row_scale * dropout(dx); dinput = d * column_scale; dcolumn_scale += d * branch.
// dinput is null if it is not wanted, branch where dcolumn_scale is not.
template <class A>
void branch_backward_kernel(const A* dx, const BranchScale<A>& scale, KeepTile& keep,
                            int64_t element, const void* branch_, DType branch_dtype, void* dinput_,
                            DType dinput_dtype, A* dcolumn_scale, int64_t count) {
  if (scale.row == A(0)) {
    if (!dinput_) return;
    visit_numbers<A>(dinput_dtype, [&]<class T>() {
      for_each_vector<A>(0, count, [&](int64_t j, auto lanes) {
        store<A>(static_cast<T*>(dinput_) + j, Vec<A>{}, lanes);
      });
    });
    return;
  }
  if (scale.dropout) keep.fill(*scale.dropout, element, count);
  const Vec<A> factor = broadcast<A>(scale.row);
  const auto gradient = [&](int64_t j, auto lanes) {
    const Vec<A> d = load<A>(dx + j, lanes) * factor;
    return scale.dropout ? d * keep.scale<A>(*scale.dropout, j) : d;
  };
  const auto each = [&]<class T, bool kInput, bool kSum>() {
    const T* branch = static_cast<const T*>(branch_);
    T* dinput = static_cast<T*>(dinput_);
    for_each_vector<A>(0, count, [&](int64_t j, auto lanes) {
      const Vec<A> d = gradient(j, lanes);
      if constexpr (kInput) store<A>(dinput + j, d * load<A>(scale.columns + j, lanes), lanes);
      if constexpr (kSum) {
        store<A>(dcolumn_scale + j,
                 fma<A>(d, load<A>(branch + j, lanes), load<A>(dcolumn_scale + j, lanes)), lanes);
      }
    });
  };
  // If both exist, they have the same dtype.
  visit_numbers<A>(branch_ ? branch_dtype : dinput_dtype, [&]<class T>() {
    if (!branch_) {
      if (dinput_) each.template operator()<T, true, false>();
    } else if (!dinput_) {
      each.template operator()<T, false, true>();
    } else {
      each.template operator()<T, true, true>();
    }
  });
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
