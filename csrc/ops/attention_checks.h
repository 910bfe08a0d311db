// The checks of the attention family: every rule that ties its arguments together, once for all
// operators and back ends.
#pragma once

#include "ops/attention_options.h"
#include "ops/rows.h"

namespace onepass {

enum class AttentionLayout {
  kDense,   // (batch, heads, rows, cols)
  kPacked,  // (rows, heads, cols)
  kPaged,   // (pages, rows, heads, cols)
};

// Where the keys and values of a call are.
enum class AttentionKeys {
  kOwn,       // as long as the call says
  kCaches,    // a cache for each sequence, or pages; seqused_k is how much of it is in use
  kAnyCache,  // the same, with cache_batch_idx as each sequence's cache
};

class AttentionChecks {
 public:
  // Throws unless everything fits that can be known without reading a tensor's values.
  AttentionChecks(const char* op, const Tensor& query, const Tensor& key, const Tensor& value,
                  const AttentionOptions& options, AttentionKeys keys = AttentionKeys::kOwn,
                  bool holds_codes = false);
  AttentionChecks(const AttentionChecks&) = delete;
  AttentionChecks& operator=(const AttentionChecks&) = delete;

  // The rules for the lengths and page numbers that `args` points to. They are read where that
  // costs nothing: on the CPU.
  void lengths(const Attention& args) const;
  // Lowers seq_q and seq_k of packed sequences, for which a caller may pass any upper bound: to the
  // longest sequence if lengths are read, otherwise to the number of rows. Not below the size of a
  // dbias, which must be written whole.
  void tighten(Attention& args, const Strided& dbias) const;

  // Sizes, numbers and dtypes, without pointers.
  const Attention& args() const { return args_; }
  const CheckedAgainst& checked() const { return checked_; }
  const TensorInfo& query() const { return query_; }
  AttentionLayout query_layout() const {
    return packed_ ? AttentionLayout::kPacked : AttentionLayout::kDense;
  }
  AttentionLayout key_layout() const { return paged_ ? AttentionLayout::kPaged : query_layout(); }

  // An int32 tensor of shape (rows,) or (rows, cols), if there is one.
  void index(const char* name, const OptionalTensor& tensor, int64_t rows, int64_t cols = -1) const;
  // Of query's dtype.
  void like_query(const char* name, const TensorInfo& info, const Shape& shape) const;
  // The pages of a sequence that hold its keys [first, last).
  void pages(const Attention& args, int64_t batch, int64_t first, int64_t last) const;

 private:
  void shapes(const TensorInfo& key, const TensorInfo& value);
  void like_key(const char* name, const TensorInfo& info, const Shape& shape) const;
  void sequences(const TensorInfo& key);
  void positions();
  void cumulative(const char* name, const int32_t* ends, int64_t total) const;
  void longest(const char* name, int64_t bound, int64_t rows) const;

  const char* op_;
  const AttentionOptions& options_;
  const bool packed_;
  const bool paged_;
  const AttentionKeys keys_;
  const bool holds_codes_;  // keys and values are int8
  const char* const key_name_;
  const char* const value_name_;
  const TensorInfo query_;
  const CheckedAgainst checked_;
  Attention args_{};
  int64_t total_k_ = 0;
  int64_t pages_ = 0;
  int64_t max_pages_ = 0;
};

// ---- how the operators find the rows of their tensors, and allocate gradients -------------------

// Where the rows of a tensor lie, whose last dimension is not one of rows.
inline Strided rows_at(const void* data, const TensorInfo& info, AttentionLayout layout) {
  const auto stride = [&](int64_t d) { return info.sizes[d] == 1 ? 0 : info.strides[d]; };
  void* const rows = const_cast<void*>(data);
  switch (layout) {
    case AttentionLayout::kPacked:
      return {rows, 0, stride(1), stride(0)};
    case AttentionLayout::kPaged:
      return {rows, stride(0), stride(2), stride(1)};
    default:
      return {rows, stride(0), stride(1), stride(2)};
  }
}

inline Strided rows_of(const Tensor& given, AttentionLayout layout, Copies& copies) {
  const Tensor& tensor = with_dense_columns(given, copies);
  return rows_at(tensor.const_data_ptr(), info_of(tensor), layout);
}

// The gradient of `tensor`, of size 0 if it is not wanted.
inline Tensor empty_gradient(bool wanted, const Tensor& tensor, bool bshd) {
  const TensorInfo info = info_of(tensor);
  const DType dtype = *dtype_of(info.scalar_type);
  return wanted ? empty_rows(info, dtype, info.device, bshd) : empty_1d(0, dtype, info.device);
}

}  // namespace onepass
