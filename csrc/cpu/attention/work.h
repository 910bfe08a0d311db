// The order and the cost of attention's pieces of work, and the addresses of rows.
#pragma once

#include <algorithm>

#include "core/backend.h"
#include "core/visit.h"
#include "cpu/pack.h"
#include "cpu/pieces.h"
#include "ops/attention.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// order: (batch,) the batches. If lengths differ, those with the most scores come first, because
// the last piece should be short.
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

// Nanoseconds of a pass over the scores of a call, with `products` multiply-adds per score and its
// softmax, if every query sees as many keys as its window allows.
inline int64_t score_nanoseconds(const Attention& args, int64_t products) {
  constexpr int64_t kSoftmax = 16;  // in multiply-adds
  const int64_t seen =
      std::min(args.seq_k, args.window_left < kNoLimit && args.window_right < kNoLimit
                               ? args.window_left + args.window_right + 1
                               : args.seq_k);
  const double scores = static_cast<double>(args.heads) * static_cast<double>(args.total_q) *
                        static_cast<double>(seen);
  const double most = 1e15;  // longer times need no distinction
  return static_cast<int64_t>(
      std::min(scores * static_cast<double>(products + kSoftmax) / kMultiplyAdds, most));
}

// Calls f<T, M>() with the element type of a call and its multiplier. float64 has none.
template <class F>
void visit_multiplier(const Attention& args, F&& f) {
  visit_dtype_up_to_float32(args.dtype, [&]<class T>() {
    if constexpr (kHasPairProducts && std::is_same_v<T, float>) {
      if (args.rounds_factors) return f.template operator()<T, Dot>();
    }
    f.template operator()<T, MultiplierOf<T>>();
  });
}

// For the reason of a plan.
template <class T, class M = MultiplierOf<T>>
constexpr const char* multiplier_text() {
  constexpr bool kIsFloat = std::is_same_v<T, float>;
  if (M::kPerCell == 2) {
    return kIsFloat ? "bfloat16 dot products, rounded while packing" : "bfloat16 dot products";
  }
  return kIsFloat ? "float32 multiply-adds" : "float32 multiply-adds, converted while packing";
}

// The rounding error of a + b (Knuth's two-sum); 0 for infinities and NaN.
template <class A>
A lost_in_sum(A a, A b) {
  const A sum = a + b;
  const A b_taken = sum - a;
  const A lost = (a - (sum - b_taken)) + (b - b_taken);
  return lost == lost ? lost : A{0};
}

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
  // Calls f(i, where row first + i lies). Page by page: a row alone takes a division.
  template <class F>
  void for_each(int64_t first, int64_t count, F&& f) const {
    if (pages_ == nullptr) {
      for (int64_t i = 0; i < count; ++i) f(i, rows_(first + i));
      return;
    }
    for (int64_t i = 0; i < count;) {
      const int64_t page = (first + i) / page_size_;
      const int64_t row = (first + i) % page_size_;
      T* at = rows_(row) + pages_[page] * page_stride_;
      const int64_t last = std::min(count, i + page_size_ - row);
      for (; i < last; ++i, at += rows_.stride()) f(i, at);
    }
  }
  void list(int64_t first, int64_t count, const T** list) const {
    for_each(first, count, [&](int64_t i, const T* at) { list[i] = at; });
  }
  // The stride between neighbouring rows; 0 if it is not constant.
  int64_t stride() const { return pages_ == nullptr ? rows_.stride() : 0; }

 private:
  Rows<T> rows_;
  const int32_t* pages_ = nullptr;
  int64_t page_size_ = 1;
  int64_t page_stride_ = 0;
};

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
