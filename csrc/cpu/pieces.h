// Work that threads take one piece at a time, each thread with its own scratch.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "core/backend.h"
#include "core/math.h"
#include "cpu/pack.h"
#include "cpu/parallel.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// Hands out 64-byte aligned pieces of a workspace; over null it only adds up their sizes.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return piece;
  }

  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// The scratch of each thread in a workspace: one after the other, to its end.
struct Slots {
  int64_t begin;
  int64_t bytes;  // of one

  int64_t end(int64_t threads) const { return begin + threads * bytes; }
  void* of(void* workspace, int64_t slot) const {
    return static_cast<char*>(workspace) + begin + slot * bytes;
  }
};

// Calls body(piece, slot) for every piece in [0, count). A free thread takes the next piece, so
// long pieces should come first. Slots are below `slots`; two threads never share one at a time.
template <class Body>
void for_each_piece_in_order(const Context& context, int64_t slots, int64_t count, Body&& body) {
  std::atomic<int64_t> next{0};
  context.for_each(slots, 1, [&](int64_t begin, int64_t) {
    // Threads that found no slot left to take have their pieces done by the others.
    for (int64_t piece = next.fetch_add(1); piece < count; piece = next.fetch_add(1)) {
      body(piece, begin);
    }
  });
}

// The same, but threads take runs of neighbouring pieces. A run is half a thread's share of the
// remaining pieces (guided self-scheduling, Polychronopoulos and Kuck 1987), and at most
// `most(its first piece)` long. For pieces that follow each other in memory, so that a thread has
// already prefetched its next piece.
template <class Most, class Body>
void for_each_run_of_pieces(const Context& context, int64_t slots, int64_t count, Most&& most,
                            Body&& body) {
  std::atomic<int64_t> next{0};
  context.for_each(slots, 1, [&](int64_t begin, int64_t) {
    // Threads that found no slot left to take have their pieces done by the others.
    int64_t first = next.load(std::memory_order_relaxed);
    while (first < count) {
      const int64_t share = std::min((count - first) / (2 * slots), most(first));
      const int64_t last = first + std::max<int64_t>(share, 1);
      if (!next.compare_exchange_weak(first, last, std::memory_order_relaxed)) continue;
      for (int64_t piece = first; piece < last; ++piece) body(piece, begin);
      first = next.load(std::memory_order_relaxed);
    }
  });
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
