// Run-time values to template arguments, by lambdas: visit_dtype(d, [&]<class T>() { ... }).
#pragma once

#include <utility>

#include "core/dtype.h"

namespace onepass {

template <class F>
constexpr decltype(auto) visit_bool(bool value, F&& f) {
  return value ? f.template operator()<true>() : f.template operator()<false>();
}

// The types that mix freely with one another: all but float64.
template <class F>
constexpr decltype(auto) visit_dtype_up_to_float32(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBFloat16:
      return f.template operator()<BFloat16>();
    case DType::kFloat16:
      return f.template operator()<Float16>();
    default:
      return f.template operator()<float>();
  }
}

template <class F>
constexpr decltype(auto) visit_dtype(DType dtype, F&& f) {
  return dtype == DType::kFloat64 ? f.template operator()<double>()
                                  : visit_dtype_up_to_float32(dtype, std::forward<F>(f));
}

}  // namespace onepass
