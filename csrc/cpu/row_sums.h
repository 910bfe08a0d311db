// Sums over rows, a number for each column: rows are cut into chunks whose number depends on the
// shape alone, chunks into runs, and the chunks' partials are added in a fixed tree.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "cpu/lines.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// Enough chunks for many threads; enough rows in each for the partials to be a few percent of the
// traffic.
inline constexpr int64_t kMaxChunks = 64;
inline constexpr int64_t kMinChunkRows = 32;
inline constexpr int64_t kMinChunkElements = 32768;
inline constexpr int64_t kRunRows = 64;

inline int64_t chunks_of(int64_t rows, int64_t cols) {
  const int64_t by_rows = rows / kMinChunkRows;
  const int64_t by_elements = rows * cols / kMinChunkElements;
  const int64_t most = std::clamp<int64_t>(std::min(by_rows, by_elements), 1, kMaxChunks);
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(most)));
}

// Calls body(begin, end) over [first, last) for a run of run_rows rows at a time; it adds their
// sums to `run`, (size,). `run` is then added to `total`, unless it is the same memory. The size is
// a multiple of a vector, and the numbers after a row's columns are zero.
template <class A, class Body>
void for_each_run(int64_t first, int64_t last, int64_t run_rows, A* total, A* run, int64_t size,
                  Body&& body) {
  for (int64_t row = first; row < last; row += run_rows) {
    if (run != total) std::fill(run, run + size, A(0));
    body(row, std::min(row + run_rows, last));
    if (run == total) continue;
    for (int64_t j = 0; j < size; j += kLanes<A>) {
      store<A>(total + j, load<A>(total + j) + load<A>(run + j));
    }
  }
}

// Bytes of cols accumulators, rounded up to a multiple of 64.
inline int64_t padded_bytes(int64_t cols, int64_t accumulator_size) {
  return (cols * accumulator_size + 63) / 64 * 64;
}

// Adds the chunks' partials (chunks, stride) into one gradient (cols,): eight running sums over the
// chunks, then a fixed tree over the eight.
template <class A>
void reduce_partials(const A* partials, int64_t chunks, int64_t stride, int64_t begin, int64_t end,
                     void* output, DType dtype) {
  visit_numbers<A>(dtype, [&]<class T>() {
    T* out = static_cast<T*>(output);
    for_each_vector<A>(begin, end, [&](int64_t j, auto count) {
      Vec<A> sum[8] = {};
      for (int64_t c = 0; c < chunks; ++c) sum[c % 8] += load<A>(partials + c * stride + j, count);
      for (int width = 4; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) sum[i] += sum[i + width];
      }
      store<A>(out + j, sum[0], count);
    });
  });
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
