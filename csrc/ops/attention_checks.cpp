#include "ops/attention_checks.h"

#include <algorithm>
#include <utility>

namespace onepass {
namespace {

constexpr int64_t kMaxOffset = int64_t{1} << 40;  // far from where sums of positions overflow

}  // namespace

AttentionChecks::AttentionChecks(const char* op, const Tensor& query, const Tensor& key,
                                 const Tensor& value, const AttentionOptions& options,
                                 AttentionKeys keys, bool holds_codes)
    : op_(op),
      options_(options),
      packed_(options.cu_seq_q.has_value()),
      paged_(options.block_table.has_value()),
      keys_(keys),
      holds_codes_(holds_codes),
      key_name_(keys == AttentionKeys::kOwn ? "key" : "k_cache"),
      value_name_(keys == AttentionKeys::kOwn ? "value" : "v_cache"),
      query_(input_of(op, "query", query)),
      checked_(op, "query", query_) {
  shapes(input_of(op, key_name_, key), input_of(op, value_name_, value));
  check_score_options(op, checked_, options, args_);
  positions();
}

void AttentionChecks::shapes(const TensorInfo& key, const TensorInfo& value) {
  const auto given = [](const OptionalTensor& tensor) { return tensor ? "one" : "none"; };
  if (keys_ == AttentionKeys::kOwn) {
    require(packed_ || !paged_, op_, ": cu_seq_q must be given with block_table, got none");
    require(options_.seqused_k || !paged_, op_,
            ": seqused_k must be given with block_table, got none");
    require(!options_.cu_seq_k || !paged_, op_,
            ": cu_seq_k must not be given with block_table, got one");
    require(options_.cu_seq_k.has_value() == packed_ || paged_, op_,
            ": cu_seq_k must be given with cu_seq_q, and not without, got ",
            given(options_.cu_seq_k));
  }
  const int64_t query_dims = packed_ ? 3 : 4;
  const int64_t key_dims = packed_ && !paged_ ? 3 : 4;
  require(query_.dims == query_dims, op_, ": query must have ", query_dims, " dimensions, got ",
          query_);
  require(key.dims == key_dims, op_, ": ", key_name_, " must have ", key_dims, " dimensions, got ",
          key);
  args_.heads = query_.sizes[1];
  args_.kv_heads = key.sizes[paged_ ? 2 : 1];
  args_.head_dim = query_.sizes[query_dims - 1];
  require(args_.head_dim >= 1 && args_.head_dim <= kMaxHeadDim, op_,
          ": query must have a head_dim of 1 to ", kMaxHeadDim, ", got ", args_.head_dim);
  require(args_.kv_heads > 0 || args_.heads == 0, op_, ": ", key_name_,
          " must have at least one head, got 0");
  require(args_.kv_heads == 0 || (args_.heads > 0 && args_.heads % args_.kv_heads == 0), op_,
          ": query must have a multiple of the ", args_.kv_heads, " heads of ", key_name_, ", got ",
          args_.heads);
  sequences(key);
  int64_t shape[4];
  std::copy(key.sizes, key.sizes + key_dims, shape);
  if (!packed_ && !paged_ && keys_ != AttentionKeys::kAnyCache) shape[0] = args_.batch;
  shape[key_dims - 1] = args_.head_dim;
  args_.dtype = checked_.first_dtype();
  like_key(key_name_, key, Shape(shape, key_dims));
  shape[key_dims - 1] = value.dims == key_dims ? value.sizes[key_dims - 1] : args_.head_dim;
  like_key(value_name_, value, Shape(shape, key_dims));
  args_.value_dim = shape[key_dims - 1];
  require(args_.value_dim >= 1 && args_.value_dim <= kMaxHeadDim, op_, ": ", value_name_,
          " must have a head_dim of 1 to ", kMaxHeadDim, ", got ", args_.value_dim);
}

// How many there are, and how long.
void AttentionChecks::sequences(const TensorInfo& key) {
  if (packed_) {
    const TensorInfo ends = input_of(op_, "cu_seq_q", *options_.cu_seq_q);
    require(ends.dims == 1 && ends.sizes[0] > 0, op_,
            ": cu_seq_q must have one dimension and an element more than sequences, got ", ends);
    args_.batch = ends.sizes[0] - 1;
    args_.total_q = query_.sizes[0];
    args_.seq_q = options_.max_q;
    args_.seq_k = options_.max_k;
  } else {
    args_.batch = query_.sizes[0];
    args_.seq_q = query_.sizes[2];
    args_.seq_k = key.sizes[2];
    args_.total_q = product(op_, "query", args_.batch, args_.seq_q);
  }
  index("cu_seq_q", options_.cu_seq_q, args_.batch + 1);
  index("cu_seq_k", options_.cu_seq_k, args_.batch + 1);
  index(keys_ == AttentionKeys::kOwn ? "seqused_k" : "cache_seqlens", options_.seqused_k,
        args_.batch);
  if (paged_) {
    const TensorInfo table = input_of(op_, "block_table", *options_.block_table);
    max_pages_ = args_.block_table_stride = table.dims == 2 ? table.sizes[1] : 0;
    index("block_table", options_.block_table, args_.batch, max_pages_);
    pages_ = key.sizes[0];
    args_.page_size = key.sizes[1];
    if (keys_ != AttentionKeys::kOwn) {
      args_.seq_k = product(op_, "block_table", max_pages_, args_.page_size);
    }
  } else {
    total_k_ = key.sizes[0];
  }
  if (packed_) {
    require(options_.max_q >= 0, op_, ": max_q must not be negative, got ", options_.max_q);
    require(options_.max_k >= 0, op_, ": max_k must not be negative, got ", options_.max_k);
  } else {
    const auto whole = [&](const char* name, int64_t length, int64_t rows) {
      if (length == 0) return;
      longest(name, length, rows);
      require(length < kMaxOffset, op_, ": ", name, " must be below 2^40, got ", length);
    };
    whole("max_q", options_.max_q, args_.seq_q);
    whole("max_k", options_.max_k, args_.seq_k);
  }
  args_.whole_q = options_.max_q ? options_.max_q : args_.seq_q;
  args_.whole_k = options_.max_k ? options_.max_k : args_.seq_k;
}

void AttentionChecks::like_key(const char* name, const TensorInfo& info, const Shape& shape) const {
  if (!holds_codes_) return like_query(name, info, shape);
  require(is(ScalarType::Char, info.scalar_type), op_, ": ", name,
          " must have dtype int8 with a scale for each row, got ", TypeName{info.scalar_type});
  checked_.shape(name, info, shape);
}

void AttentionChecks::like_query(const char* name, const TensorInfo& info,
                                 const Shape& shape) const {
  const DType dtype = require_dtype(op_, name, info.scalar_type);
  require(dtype == args_.dtype, op_, ": ", name, " must have dtype ", args_.dtype,
          " like query, got ", dtype);
  checked_.tensor(name, info, shape);
}

void AttentionChecks::index(const char* name, const OptionalTensor& tensor, int64_t rows,
                            int64_t cols) const {
  if (!tensor) return;
  const TensorInfo info = input_of(op_, name, *tensor);
  const int64_t sizes[] = {rows, cols};
  const Shape shape(sizes, cols < 0 ? 1 : 2);
  require(
      is(ScalarType::Int, info.scalar_type) && Shape(info) == shape && info.device == query_.device,
      op_, ": ", name, " must be an int32 tensor of shape ", shape, " on ", query_.device, ", got ",
      info, " of ", TypeName{info.scalar_type}, " on ", info.device);
}

void AttentionChecks::positions() {
  const bool own_lengths = packed_ || options_.seqused_k;
  for (const auto& [name, offset] : {std::pair("query_offset", options_.query_offset),
                                     std::pair("key_offset", options_.key_offset)}) {
    require(offset == 0 || !own_lengths, op_, ": ", name,
            " must be 0 where sequences have lengths of their own, got ", offset);
    require(offset >= 0, op_, ": ", name, " must not be negative, got ", offset);
    require(offset < kMaxOffset, op_, ": ", name, " must be below 2^40, got ", offset);
  }
  args_.query_offset = options_.query_offset;
  args_.key_offset = options_.key_offset;
  args_.bottom_right = options_.bottom_right;
}

// The rules for the lengths and page numbers in `args`. They are read where that costs nothing.
void AttentionChecks::lengths(const Attention& args) const {
  if (query_.device.type != aoti_torch_device_type_cpu()) {
    // The rules that need no reading: without a kernel the results would not be written.
    if (packed_ && args.total_q > 0) {
      require(args.batch > 0, op_, ": cu_seq_q must have an end for each sequence, got none");
      require(args.seq_q > 0, op_, ": max_q must be at least the longest sequence, got ",
              args.seq_q);
    }
    return;
  }
  if (packed_) cumulative("cu_seq_q", args.cu_seq_q, args.total_q);
  if (args.cu_seq_k) cumulative("cu_seq_k", args.cu_seq_k, total_k_);
  int64_t longest_q = 0;
  int64_t longest_k = 0;
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t rows_q = packed_ ? args.cu_seq_q[b + 1] - args.cu_seq_q[b] : args.seq_q;
    const int64_t rows_k = paged_    ? product(op_, "block_table", max_pages_, args.page_size)
                           : packed_ ? args.cu_seq_k[b + 1] - args.cu_seq_k[b]
                                     : args.seq_k;
    if (args.seqused_k) {
      const int64_t used = args.seqused_k[b];
      require(used >= 0 && used <= rows_k, op_,
              ": seqused_k must lie between 0 and the rows of the sequence, ", rows_k, ", got ",
              used);
    }
    longest_q = std::max(longest_q, rows_q);
    longest_k = std::max<int64_t>(longest_k, paged_ ? args.seqused_k[b] : rows_k);
    if (paged_) pages(args, b, 0, args.seqused_k[b]);
  }
  if (packed_) longest("max_q", args.seq_q, longest_q);
  if (packed_) longest("max_k", args.seq_k, longest_k);
}

void AttentionChecks::tighten(Attention& args, const Strided& dbias) const {
  if (!packed_) return;
  int64_t queries = args.total_q;
  int64_t keys = paged_ ? product(op_, "block_table", max_pages_, args.page_size) : total_k_;
  if (query_.device.type == aoti_torch_device_type_cpu()) {
    queries = keys = 0;
    for (int64_t b = 0; b < args.batch; ++b) {
      queries = std::max<int64_t>(queries, args.cu_seq_q[b + 1] - args.cu_seq_q[b]);
      keys = std::max<int64_t>(
          keys, paged_ ? args.seqused_k[b] : args.cu_seq_k[b + 1] - args.cu_seq_k[b]);
    }
  }
  if (dbias.row_stride == 0) args.seq_q = std::min(args.seq_q, queries);
  if (dbias.data == nullptr) args.seq_k = std::min(args.seq_k, keys);
}

void AttentionChecks::cumulative(const char* name, const int32_t* ends, int64_t total) const {
  require(ends[0] == 0, op_, ": ", name, " must begin with 0, got ", ends[0]);
  for (int64_t b = 0; b < args_.batch; ++b) {
    require(ends[b + 1] >= ends[b], op_, ": ", name, " must not decrease, got ", ends[b + 1],
            " after ", ends[b]);
  }
  require(ends[args_.batch] == total, op_, ": ", name, " must end with the number of rows, ", total,
          ", got ", ends[args_.batch]);
}

void AttentionChecks::longest(const char* name, int64_t bound, int64_t rows) const {
  require(bound >= rows, op_, ": ", name, " must be at least the longest sequence, ", rows,
          ", got ", bound);
}

// Checks only pages that hold keys in use: later entries of the table belong to no sequence.
void AttentionChecks::pages(const Attention& args, int64_t batch, int64_t first,
                            int64_t last) const {
  if (args.page_size == 0) return;  // then there are no keys either
  for (int64_t j = first / args.page_size; j * args.page_size < last; ++j) {
    const int32_t page = args.block_table[batch * args.block_table_stride + j];
    require(page >= 0 && page < pages_, op_, ": block_table must hold numbers of the ", pages_,
            " pages, got ", page);
  }
}

}  // namespace onepass
