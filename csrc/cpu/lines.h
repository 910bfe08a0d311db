// Lines of numbers in L1: read from tensors of any dtype, and rounded to them.
#pragma once

#include <type_traits>

#include "core/visit.h"
#include "cpu/vec.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

template <class A>
constexpr DType kAccumulator = std::is_same_v<A, double> ? DType::kFloat64 : DType::kFloat32;

// Calls f<T>() with the type of a dtype that is computed in A; float64 is computed in double only.
template <class A, class F>
ONEPASS_INLINE decltype(auto) visit_numbers(DType dtype, F&& f) {
  if constexpr (sizeof(A) == 8) {
    return f.template operator()<double>();
  } else {
    return visit_dtype_up_to_float32(dtype, std::forward<F>(f));
  }
}

// line[i] = tensor[first + i]
template <class A>
void widen_line(const void* tensor, DType dtype, int64_t first, int64_t count, A* line) {
  visit_numbers<A>(dtype, [&]<class T>() {
    const T* from = static_cast<const T*>(tensor) + first;
    for_each_vector<A>(0, count, [&](int64_t i, auto lanes) {
      store<A>(line + i, load<A>(from + i, lanes), lanes);
    });
  });
}

// line[i] = tensor[first + i * stride]
template <class A>
void widen_strided(const void* tensor, DType dtype, int64_t first, int64_t stride, int64_t count,
                   A* line) {
  if (stride == 1) return widen_line(tensor, dtype, first, count, line);
  visit_numbers<A>(dtype, [&]<class T>() {
    const T* from = static_cast<const T*>(tensor) + first;
    for (int64_t i = 0; i < count; ++i) {
      if constexpr (std::is_same_v<T, A>) {
        line[i] = from[i * stride];
      } else {
        line[i] = widen(from[i * stride]);
      }
    }
  });
}

// tensor[place], or 0 of null
template <class A>
A number_of(const void* tensor, DType dtype, int64_t place) {
  A number = 0;
  if (tensor) widen_strided(tensor, dtype, place, 1, 1, &number);
  return number;
}

// tensor[first + i] = line[i]; line may be that memory itself.
template <class A>
void round_line(const A* line, int64_t count, void* tensor, DType dtype, int64_t first) {
  visit_numbers<A>(dtype, [&]<class T>() {
    T* to = static_cast<T*>(tensor) + first;
    for_each_vector<A>(0, count, [&](int64_t i, auto lanes) {
      store<A>(to + i, load<A>(line + i, lanes), lanes);
    });
  });
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
