// Work that threads take one piece at a time, each with scratch of its own.
#pragma once

#include <algorithm>
#include <atomic>

#include "core/backend.h"
#include "core/visit.h"
#include "cpu/attention/pack.h"
#include "cpu/parallel.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// Hands out 64-byte aligned pieces of a workspace; over null it only adds up what it would take.
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

// Where the scratch of each thread lies in a workspace: one after the other, to its end.
struct Slots {
  int64_t begin;
  int64_t bytes;  // of one

  int64_t end(int64_t threads) const { return begin + threads * bytes; }
  void* of(void* workspace, int64_t slot) const {
    return static_cast<char*>(workspace) + begin + slot * bytes;
  }
};

// order: (batch,) the batches, those with the most scores first where lengths differ: what is taken
// last should be short.
inline void order_by_work(const Attention& args, int32_t* order) {
  for (int64_t b = 0; b < args.batch; ++b) order[b] = static_cast<int32_t>(b);
  if (!args.cu_seq_q && !args.cu_seq_k && !args.seqused_k) return;
  const auto scores = [&](int32_t batch) {
    const Sequence sequence = sequence_of(args, batch);
    return sequence.queries * sequence.keys;
  };
  std::sort(order, order + args.batch, [&](int32_t a, int32_t b) {
    const int64_t of_a = scores(a);
    const int64_t of_b = scores(b);
    return of_a != of_b ? of_a > of_b : a < b;
  });
}

// body(piece, slot) for every piece in [0, count): threads take the next one as they come, so that
// long pieces belong in front. Slots, below `slots`, are never shared by two threads at a time.
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

// Likewise, but threads take runs of neighbouring pieces, each half a thread's share of what is
// left (guided self-scheduling, Polychronopoulos and Kuck 1987) and at most `most(its first piece)`
// long: for pieces that follow each other in memory, where a thread that goes on with the next one
// has asked for it already.
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

// Nanoseconds of a pass over the scores of a call, if every query sees as many keys as there can
// be: `products` multiply-adds per score, and what its softmax comes to.
inline int64_t score_nanoseconds(const Attention& args, int64_t products) {
  constexpr int64_t kSoftmax = 16;  // in multiply-adds
  const int64_t seen =
      std::min(args.seq_k, args.window_left < kNoLimit && args.window_right < kNoLimit
                               ? args.window_left + args.window_right + 1
                               : args.seq_k);
  const double scores = static_cast<double>(args.heads) * static_cast<double>(args.total_q) *
                        static_cast<double>(seen);
  const double most = 1e15;  // no need to tell longer ones apart
  return static_cast<int64_t>(
      std::min(scores * static_cast<double>(products + kSoftmax) / kMultiplyAdds, most));
}

// For plans: what a multiplier does with elements of a dtype.
template <class T>
constexpr const char* multiplier_text() {
  return MultiplierOf<T>::kPerCell == 2 ? "bfloat16 dot products"
         : std::is_same_v<T, float>     ? "float32 multiply-adds"
                                        : "float32 multiply-adds, converted while packing";
}

// What rounding takes from a + b (Knuth's two-sum). Of infinities and NaN: 0.
template <class A>
A lost_in_sum(A a, A b) {
  const A sum = a + b;
  const A b_taken = sum - a;
  const A lost = (a - (sum - b_taken)) + (b - b_taken);
  return lost == lost ? lost : A{0};
}

inline int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Where row `row` of a sequence lies, for one head.
template <class T>
class Rows {
 public:
  Rows(const Strided& tensor, int64_t batch, int64_t head, int64_t first)
      : base_(static_cast<T*>(tensor.data) + batch * tensor.batch_stride +
              head * tensor.head_stride + first * tensor.row_stride),
        stride_(tensor.row_stride) {}

  T* operator()(int64_t row) const { return base_ + row * stride_; }
  int64_t stride() const { return stride_; }

 private:
  T* base_;
  int64_t stride_;
};

// The same for keys and values, whose rows may be spread over pages.
template <class T>
class KeyRows {
 public:
  KeyRows(const Attention& args, const Strided& tensor, int64_t batch, int64_t head, int64_t first)
      : rows_(tensor, args.block_table ? 0 : batch, head, first) {
    if (args.block_table == nullptr) return;
    pages_ = args.block_table + batch * args.block_table_stride;
    page_size_ = args.page_size;
    page_stride_ = tensor.batch_stride;
  }

  T* operator()(int64_t row) const {
    if (pages_ == nullptr) return rows_(row);
    return rows_(row % page_size_) + pages_[row / page_size_] * page_stride_;
  }
  // list[i] is where row first + i lies. Page by page: a row alone takes a division.
  void list(int64_t first, int64_t count, const T** list) const {
    if (pages_ == nullptr) {
      for (int64_t i = 0; i < count; ++i) list[i] = rows_(first + i);
      return;
    }
    for (int64_t i = 0; i < count;) {
      const int64_t page = (first + i) / page_size_;
      const int64_t row = (first + i) % page_size_;
      const T* at = rows_(row) + pages_[page] * page_stride_;
      const int64_t last = std::min(count, i + page_size_ - row);
      for (; i < last; ++i, at += rows_.stride()) list[i] = at;
    }
  }
  // Between neighbouring rows; 0 where that is not one number.
  int64_t stride() const { return pages_ == nullptr ? rows_.stride() : 0; }

 private:
  Rows<T> rows_;
  const int32_t* pages_ = nullptr;
  int64_t page_size_ = 1;
  int64_t page_stride_ = 0;
};

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
