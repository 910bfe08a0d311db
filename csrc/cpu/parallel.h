// When and how work is spread over threads. torch's pool is reached through the Context alone.
#pragma once

#include <cstdint>

#include "core/backend.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// Below about a microsecond of work a parallel region costs more than it brings.
inline constexpr int64_t kSerialBytes = 32 * 1024;

// body(begin, end) over [0, count), each thread taking at least kSerialBytes of traffic.
template <class F>
void for_each_piece(const Context& context, bool parallel, int64_t count, int64_t bytes_per_item,
                    F&& body) {
  if (!parallel) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
  const int64_t grain = bytes_per_item > 0 ? kSerialBytes / bytes_per_item : count;
  context.for_each(count, grain > 1 ? grain : 1, body);
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
