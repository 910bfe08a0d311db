// Attention against a KV cache: schemas, checks, allocation. Two operators, so that reading a cache
// does not count as writing it: functionalisation would clone it.
#include "ops/attention_decode.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/attention_checks.h"
#include "ops/library.h"
#include "ops/runtime.h"

namespace onepass {
namespace {

// The scales of caches that hold codes.
struct Scales {
  const OptionalTensor& key;
  const OptionalTensor& value;
};

// As the checks of the family take them.
AttentionOptions of_attention(const DecodeOptions& options) {
  AttentionOptions all{};
  static_cast<ScoreOptions&>(all) = options;
  all.seqused_k = options.cache_seqlens;
  all.block_table = options.block_table;
  all.bottom_right = true;
  return all;
}

// The further arguments of an append.
struct Append {
  const Tensor& key;
  const Tensor& value;
  const AppendOptions& rotary;
};

class DecodeCall {
 public:
  // Throws unless everything fits; lengths and page numbers are read where that costs nothing.
  DecodeCall(const char* op, const Tensor& query, const Tensor& k_cache, const Tensor& v_cache,
             const Scales& scales, const DecodeOptions& options, const Append* append)
      : op_(checked_dtype(op, query)),
        options_(options),
        scales_(scales),
        attention_(of_attention(options)),
        checks_(op, query, k_cache, v_cache, attention_,
                options.cache_batch_idx ? AttentionKeys::kAnyCache : AttentionKeys::kCaches,
                checked_scales(op, scales, k_cache)) {
    const TensorInfo cache = info_of(k_cache);
    static_cast<Attention&>(args_) = checks_.args();
    if (scales.key) {
      scale("k_scale", *scales.key, cache);
      scale("v_scale", *scales.value, info_of(v_cache));
    }
    require(!options.cache_batch_idx || !options.block_table, op_,
            ": cache_batch_idx must not be given with block_table, got one");
    checks_.index("cache_batch_idx", options.cache_batch_idx, args_.batch);
    checks_.index("cache_leftpad", options.cache_leftpad, args_.batch);
    caches_ = cache.sizes[0];
    if (append != nullptr) {
      require(options.cache_seqlens.has_value(), op_,
              ": cache_seqlens must be given where keys are appended, got none");
      writable("k_cache", cache);
      writable("v_cache", info_of(v_cache));
      apart(k_cache, v_cache, "v_cache", "k_cache");
      if (scales.key) {
        not_expanded("k_scale", info_of(*scales.key));
        not_expanded("v_scale", info_of(*scales.value));
        apart(*scales.key, *scales.value, "v_scale", "k_scale");
      }
      new_rows(*append);
      rotary(*append);
    }
    args_.seqused_k = dense_data_of<int32_t>(options.cache_seqlens, copies_);
    args_.block_table = dense_data_of<int32_t>(options.block_table, copies_);
    args_.cache_batch_idx = dense_data_of<int32_t>(options.cache_batch_idx, copies_);
    args_.cache_leftpad = dense_data_of<int32_t>(options.cache_leftpad, copies_);
    if (reads_lengths()) {
      lengths();
      if (args_.new_rows > 0) written_once();
    }
  }

  std::pair<Tensor, Tensor> run(const Tensor& query, const Tensor& k_cache, const Tensor& v_cache,
                                const Append* append) {
    const TensorInfo& shape = checks_.query();
    const int64_t sizes[] = {args_.batch, args_.heads, args_.seq_q, args_.value_dim};
    Tensor output = empty_rows(sizes, args_.dtype, shape.device, options_.out_bshd);
    Tensor lse = empty(Shape(sizes, 3), DType::kFloat32, shape.device);
    args_.key = rows_of(k_cache, checks_.key_layout(), copies_);
    args_.value = rows_of(v_cache, checks_.key_layout(), copies_);
    if (scales_.key) {
      args_.key_scale = scales_of(*scales_.key);
      args_.value_scale = scales_of(*scales_.value);
    }
    // Inputs that lie in a cache are copied before that is written.
    const auto outside = [&](const Tensor& tensor) {
      const bool inside =
          args_.new_rows > 0 &&
          (meet(tensor, k_cache) || meet(tensor, v_cache) ||
           (scales_.key && (meet(tensor, *scales_.key) || meet(tensor, *scales_.value))));
      if (inside) copies_.push_back(contiguous_copy(tensor));
      return rows_of(inside ? Tensor(copies_.back()) : tensor, AttentionLayout::kDense, copies_);
    };
    args_.query = outside(query);
    attach_score_options(op_, attention_, args_, copies_);
    if (append != nullptr) {
      args_.new_key = outside(append->key);
      args_.new_value = outside(append->value);
      args_.rotary_cos = dense_data_of(append->rotary.rotary_cos, copies_);
      args_.rotary_sin = dense_data_of(append->rotary.rotary_sin, copies_);
    }
    if (args_.batch * args_.heads > 0 && args_.seq_q + args_.new_rows > 0) {
      args_.output = rows_of(output, AttentionLayout::kDense, copies_);
      args_.lse = static_cast<float*>(lse.mutable_data_ptr());
      run_operator(backend().attention_decode, args_, shape.device, [&] { return describe(); });
    }
    return {output, lse};
  }

 private:
  // Before anything else looks at it: float64, which others take, is not for caches.
  static const char* checked_dtype(const char* op, const Tensor& query) {
    const int32_t type = input_of(op, "query", query).scalar_type;
    const std::optional<DType> dtype = dtype_of(type);
    require(dtype.has_value() && *dtype != DType::kFloat64, op,
            ": query must have dtype float32, bfloat16 or float16, got ", TypeName{type});
    return op;
  }

  // Whether the caches hold codes: both then have scales.
  static bool checked_scales(const char* op, const Scales& scales, const Tensor& k_cache) {
    require(scales.key.has_value() == scales.value.has_value(), op,
            ": k_scale must be given together with v_scale, got ",
            scales.key ? "it alone" : "v_scale alone");
    require(scales.key || !is(ScalarType::Char, input_of(op, "k_cache", k_cache).scalar_type), op,
            ": k_scale must be given where k_cache has dtype int8, got none");
    require(kHostReadsTensors || !scales.key, op,
            ": k_scale must not be given on CUDA, where no kernel reads codes, got one");
    return scales.key.has_value();
  }

  // A number for each row of a cache.
  void scale(const char* name, const Tensor& tensor, const TensorInfo& cache) const {
    const TensorInfo info = input_of(op_, name, tensor);
    require(dtype_of(info.scalar_type) == DType::kFloat32, op_, ": ", name,
            " must have dtype float32, got ", TypeName{info.scalar_type});
    checks_.checked().shape(name, info, Shape(cache.sizes, 3));
  }

  Strided scales_of(const Tensor& scale) const {
    return rows_at(scale.const_data_ptr(), info_of(scale), checks_.key_layout());
  }

  // Also for kv[0] and kv[1] where a compiler has lost their offsets (pytorch issue 198068).
  void apart(const Tensor& one, const Tensor& other, const char* name, const char* of_one) const {
    // About to be written: a lazy clone of torch's, which shares its memory until then, gets its
    // own here.
    const void* const begin = one.mutable_data_ptr();
    require(begin == nullptr || begin != other.mutable_data_ptr(), op_, ": ", name,
            " must not lie where ", of_one, " does, both are written in place, got one place");
  }

  // Whether the memory between the first and the last element of both overlaps.
  static bool meet(const Tensor& a, const Tensor& b) {
    const auto range = [](const Tensor& tensor) {
      const TensorInfo info = info_of(tensor);
      const int64_t bytes = *extent_of(info, info.strides) * element_size_of(info.scalar_type);
      const char* const begin = static_cast<const char*>(tensor.const_data_ptr());
      return std::pair{begin, begin + bytes};
    };
    const auto [begin_a, end_a] = range(a);
    const auto [begin_b, end_b] = range(b);
    return begin_a < end_a && begin_b < end_b && begin_a < end_b && begin_b < end_a;
  }

  // Rows are written where they lie, so that no copy can stand in for a cache.
  void writable(const char* name, const TensorInfo& info) const {
    require(info.sizes[3] == 1 || info.strides[3] == 1, op_, ": ", name,
            " must be dense in its last dimension, it is written in place, got strides ",
            Shape{info.strides, 4});
    not_expanded(name, info);
  }

  void not_expanded(const char* name, const TensorInfo& info) const {
    for (int64_t d = 0; d < 3; ++d) {
      require(info.sizes[d] <= 1 || info.strides[d] != 0, op_, ": ", name,
              " must not be expanded, it is written in place, got strides ",
              Shape{info.strides, info.dims});
    }
  }

  void new_rows(const Append& append) {
    const TensorInfo key = input_of(op_, "key", append.key);
    require(key.dims == 4, op_, ": key must have 4 dimensions, got ", key);
    args_.new_rows = key.sizes[2];
    const int64_t of_key[] = {args_.batch, args_.kv_heads, args_.new_rows, args_.head_dim};
    const int64_t of_value[] = {args_.batch, args_.kv_heads, args_.new_rows, args_.value_dim};
    checks_.like_query("key", key, of_key);
    checks_.like_query("value", input_of(op_, "value", append.value), of_value);
  }

  void rotary(const Append& append) {
    require(append.rotary.rotary_cos.has_value() == append.rotary.rotary_sin.has_value(), op_,
            ": rotary_cos must be given together with rotary_sin, got ",
            append.rotary.rotary_cos ? "it alone" : "rotary_sin alone");
    if (!append.rotary.rotary_cos) return;
    const TensorInfo cos = input_of(op_, "rotary_cos", *append.rotary.rotary_cos);
    const TensorInfo sin = input_of(op_, "rotary_sin", *append.rotary.rotary_sin);
    require(cos.dims == 2, op_, ": rotary_cos must have 2 dimensions, got ", cos);
    require(2 * cos.sizes[1] <= args_.head_dim, op_,
            ": rotary_cos must have at most head_dim / 2 columns, ", args_.head_dim / 2, ", got ",
            cos.sizes[1]);
    args_.rotary_dtype = require_dtype(op_, "rotary_cos", cos.scalar_type);
    require(args_.rotary_dtype == DType::kFloat32 || args_.rotary_dtype == args_.dtype, op_,
            ": rotary_cos must have dtype float32 or query's ", args_.dtype, ", got ",
            args_.rotary_dtype);
    checks_.checked().device("rotary_cos", cos);
    checks_.checked().tensor_of("rotary_sin", sin, cos, args_.rotary_dtype, "rotary_cos");
    args_.rotary_dim = 2 * cos.sizes[1];
    args_.rotary_interleaved = append.rotary.rotary_interleaved;
    args_.rotary_by_row = options_.window_left >= 0 || options_.window_right >= 0;
    rotary_rows_ = cos.sizes[0];
    has_rotary_ = true;
  }

  void lengths() const {
    for (int64_t b = 0; b < args_.batch; ++b) {
      const CachedKeys keys = cached_keys(args_, b);
      if (args_.cache_batch_idx) {
        const int64_t cache = args_.cache_batch_idx[b];
        require(cache >= 0 && cache < caches_, op_,
                ": cache_batch_idx must lie between 0 and the last cache, ", caches_ - 1, ", got ",
                cache);
      }
      require(keys.old >= 0 && keys.old <= args_.seq_k, op_,
              ": cache_seqlens must lie between 0 and the rows of the cache, ", args_.seq_k,
              ", got ", keys.old);
      require(keys.last <= args_.seq_k, op_, ": cache_seqlens must leave room for ", args_.new_rows,
              " new rows in a cache of ", args_.seq_k, " rows, got ", keys.old);
      require(keys.first >= 0 && keys.first <= keys.last, op_,
              ": cache_leftpad must lie between 0 and the rows in use, ", keys.last, ", got ",
              keys.first);
      if (has_rotary_) {
        const int64_t of_query =
            args_.rotary_by_row ? args_.seq_q : std::min<int64_t>(args_.seq_q, 1);
        const int64_t needed = keys.old + std::max(args_.new_rows, of_query);
        require(rotary_rows_ >= needed, op_, ": rotary_cos must have a row for every position, ",
                needed, ", got ", rotary_rows_);
      }
      if (args_.block_table) {  // pages before those read or written may be anything
        const int64_t seen = args_.seq_q > 0 ? cached_keys_of(args_, keys, 0).first : keys.last;
        checks_.pages(args_, b, std::min(seen, keys.old), keys.last);
      }
    }
  }

  // The threads of other sequences may not write, or read, the same memory at the same time.
  void written_once() const {
    if (args_.block_table != nullptr) return written_rows_once();
    if (args_.cache_batch_idx == nullptr) return;
    std::vector<int32_t> caches(args_.cache_batch_idx, args_.cache_batch_idx + args_.batch);
    std::sort(caches.begin(), caches.end());
    const auto twice = std::adjacent_find(caches.begin(), caches.end());
    if (twice == caches.end()) return;
    require(false, op_,
            ": cache_batch_idx must not name a cache twice where keys are appended, got ", *twice,
            " twice");
  }

  void written_rows_once() const {
    struct Written {
      int64_t row;  // of all pages
      int64_t batch;
      int64_t index;  // within the sequence
    };
    const auto in_order = [](const Written& a, const Written& b) { return a.row < b.row; };
    const int64_t size = args_.page_size;
    const auto first_row = [&](int64_t b, int64_t page) {
      return args_.block_table[b * args_.block_table_stride + page] * size;
    };
    std::vector<Written> written;
    for (int64_t b = 0; b < args_.batch; ++b) {
      const CachedKeys keys = cached_keys(args_, b);
      for (int64_t row = keys.old; row < keys.last; ++row) {
        written.push_back({first_row(b, row / size) + row % size, b, row});
      }
    }
    std::sort(written.begin(), written.end(), in_order);
    for (size_t i = 1; i < written.size(); ++i) {
      require(written[i].row != written[i - 1].row, op_,
              ": block_table must not give the same row to write twice, got row ",
              written[i].row % size, " of page ", written[i].row / size);
    }
    if (args_.seq_q == 0) return;
    for (int64_t b = 0; b < args_.batch; ++b) {
      const CachedKeys keys = cached_keys(args_, b);
      const int64_t first = cached_keys_of(args_, keys, 0).first;
      for (int64_t page = first / size; page * size < keys.last; ++page) {
        const int64_t begin = std::max(first - page * size, int64_t{0});
        const int64_t end = std::min(keys.last - page * size, size);
        const int64_t at = first_row(b, page);
        auto found =
            std::lower_bound(written.begin(), written.end(), Written{at + begin, 0, 0}, in_order);
        for (; found != written.end() && found->row < at + end; ++found) {
          require(found->batch == b && found->index == page * size + found->row - at, op_,
                  ": block_table must not let a row be read that is written at another place, got "
                  "row ",
                  found->row % size, " of page ", found->row / size);
        }
      }
    }
  }

  // The longest sequence where lengths can be read, else the room of a cache.
  int64_t longest() const {
    if (!reads_lengths()) return args_.seq_k;
    int64_t last = 0;
    for (int64_t b = 0; b < args_.batch; ++b) last = std::max(last, cached_keys(args_, b).last);
    return last;
  }

  bool reads_lengths() const {
    return kHostReadsTensors && checks_.query().device.type == aoti_torch_device_type_cpu();
  }

  Dispatch describe() const {
    return described(op_, text_of_heads(args_), ", ", args_.seq_q, " queries x up to ", longest(),
                     " keys", when(args_.new_rows > 0, ", ", args_.new_rows, " of them new"),
                     text_of_terms(args_), when(args_.rotary_cos, ", rotary ", args_.rotary_dim),
                     when(holds_codes(args_), ", caches of int8"));
  }

  const char* op_;
  const DecodeOptions& options_;
  const Scales scales_;
  const AttentionOptions attention_;
  const AttentionChecks checks_;
  Copies copies_;
  AttentionDecode args_{};
  int64_t caches_ = 0;
  int64_t rotary_rows_ = 0;
  bool has_rotary_ = false;
};

// ---- the operators -----------------------------------------------------------------------------

DecodeCall check_decode(const DecodeOptions& options, const Tensor& query, const Tensor& k_cache,
                        const Tensor& v_cache, const OptionalTensor& k_scale,
                        const OptionalTensor& v_scale) {
  const Scales scales{k_scale, v_scale};
  return {"attention_decode", query, k_cache, v_cache, scales, options, nullptr};
}

std::tuple<Tensor, Tensor> decode(const DecodeOptions& options, const Tensor& query,
                                  const Tensor& k_cache, const Tensor& v_cache,
                                  const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  return check_decode(options, query, k_cache, v_cache, k_scale, v_scale)
      .run(query, k_cache, v_cache, nullptr);
}

DecodeCall check_append(const AppendOptions& options, const Tensor& query, const Tensor& k_cache,
                        const Tensor& v_cache, const Tensor& key, const Tensor& value,
                        const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  const Append append{key, value, options};
  const Scales scales{k_scale, v_scale};
  return {"attention_decode_append", query, k_cache, v_cache, scales, options, &append};
}

std::tuple<Tensor, Tensor> append(const AppendOptions& options, const Tensor& query,
                                  const Tensor& k_cache, const Tensor& v_cache, const Tensor& key,
                                  const Tensor& value, const OptionalTensor& k_scale,
                                  const OptionalTensor& v_scale) {
  const Append append{key, value, options};
  return check_append(options, query, k_cache, v_cache, key, value, k_scale, v_scale)
      .run(query, k_cache, v_cache, &append);
}

}  // namespace

#define ONEPASS_DECODE_ARGUMENTS \
  ONEPASS_SCHEMA(ONEPASS_SCORE_OPTIONS) ONEPASS_SCHEMA(ONEPASS_DECODE_OPTIONS)

OperatorList attention_decode_operators() {
  return {
      entry<&decode, &check_decode>(
          "attention_decode",
          "Tensor query, Tensor k_cache, Tensor v_cache, Tensor? k_scale=None, "
          "Tensor? v_scale=None, *" ONEPASS_DECODE_ARGUMENTS,
          "(Tensor output, Tensor lse)"),
      entry<&append, &check_append>(
          "attention_decode_append",
          "Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor key, Tensor value, "
          "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, *" ONEPASS_DECODE_ARGUMENTS
              ONEPASS_SCHEMA(ONEPASS_ROTARY_OPTIONS),
          "(Tensor output, Tensor lse)"),
  };
}

}  // namespace onepass
