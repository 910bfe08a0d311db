// When and how work is spread over threads. torch's pool is used through the Context alone.
//
// A parallel region pays if each of its threads has enough work. With two threads awake it costs
// 2 us; if the other thread sleeps, or another process has its core, all wait for it, 30 us to many
// milliseconds. So plans estimate their work in nanoseconds, by the rates below, and take only as
// many threads as have kLeastNanoseconds each. The division among threads changes no sum: sums
// depend on the shape alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/backend.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// rms_norm of 512 columns in float32 in cache, one thread against two, best of 1200 calls: 64 KiB
// of traffic 10.3 against 10.9 us, 128 KiB 12.1 and 11.8, 256 KiB 16.1 and 14.3, 512 KiB 24.1
// and 19.1. With 0.2 ms of sleep between calls: 1 MiB 47 and 71, 2 MiB 81 and 76. Two threads from
// 256 KiB on.
inline constexpr int64_t kLeastNanoseconds = 4000;

// The approximate work of a thread in a nanosecond, with AVX2 and in cache. At a slower level, or
// from memory, pieces take longer than estimated, which does no harm.
inline constexpr int64_t kBytes = 32;             // of traffic: norms, adds, steps, gradients
inline constexpr int64_t kRandomBytes = 8;        // of traffic beside a random number per element
inline constexpr int64_t kMultiplyAdds = 16;      // in tiles of attention
inline constexpr int64_t kPlainMultiplyAdds = 1;  // score by score

// The number of threads for this many nanoseconds of work in this many pieces; at least one.
inline int64_t threads_for(int64_t nanoseconds, int64_t pieces, const Machine& machine) {
  const int64_t most = std::min<int64_t>(pieces, machine.threads);
  return std::clamp<int64_t>(nanoseconds / kLeastNanoseconds, 1, std::max<int64_t>(most, 1));
}

// Calls body(begin, end) over [0, count), in as many equal parts as the plan has threads.
template <class F>
void for_each_piece(const Context& context, int64_t threads, int64_t count, F&& body) {
  if (threads <= 1) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
  context.for_each(count, std::max<int64_t>((count + threads - 1) / threads, 1), body);
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
