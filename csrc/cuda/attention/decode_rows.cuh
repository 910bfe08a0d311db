// Rows of a KV cache, wherever they lie; new ones on their way there; and rotation, of these and of
// queries.
#pragma once

#include "cuda/attention/decode.h"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/tiles.cuh"
#include "cuda/ptx.cuh"
#include "cuda/vec.cuh"

namespace onepass::cuda {

// Lengths on a device are not checked beforehand: those that do not fit the cache must not lead
// beyond it, nor beyond a workspace that is made for it.
__device__ __forceinline__ CachedKeys keys_within_cache(const AttentionDecode& args,
                                                        int64_t batch) {
  CachedKeys keys = cached_keys(args, batch);
  keys.first = keys.first > 0 ? keys.first : 0;
  keys.old = keys.old > 0 ? keys.old : 0;
  keys.last = keys.last < args.seq_k ? keys.last : args.seq_k;
  return keys;
}

// The rows of one (sequence, kv head), in a cache or in pages.
template <class T>
struct CacheRows {
  T* base;
  int64_t stride;
  const int32_t* pages;  // of the sequence, or null
  int64_t page_stride;
  int page_size;
  int cols;
  bool aligned;  // each row begins at a multiple of 16 bytes and ends at one

  __device__ __forceinline__ CacheRows(const AttentionDecode& args, const Strided& cache,
                                       int64_t batch, int64_t kv_head, int64_t columns)
      : base(static_cast<T*>(cache.data) + kv_head * cache.head_stride),
        stride(cache.row_stride),
        pages(nullptr),
        page_stride(cache.batch_stride),
        page_size(0),
        cols(static_cast<int>(columns)) {
    constexpr int kPiece = 16 / sizeof(T);
    aligned = reinterpret_cast<uintptr_t>(base) % 16 == 0 && stride % kPiece == 0 &&
              page_stride % kPiece == 0 && columns % kPiece == 0;
    if (args.block_table) {
      pages = args.block_table + batch * args.block_table_stride;
      page_size = static_cast<int>(args.page_size);
    } else {
      const int64_t number =
          args.cache_batch_idx ? load_global(args.cache_batch_idx + batch) : batch;
      base += number * page_stride;
    }
  }

  __device__ __forceinline__ T* row(int i) const {
    if (!pages) return base + i * stride;
    const int page = i / page_size;
    return base + (i - page * page_size) * stride + load_global(pages + page) * page_stride;
  }
};

// Element d of a row that is rotated at a position: see ops/attention_decode.h.
template <class T>
__device__ __forceinline__ T rotated(const AttentionDecode& args, const T* row, int64_t position,
                                     int d) {
  const auto dims = static_cast<int>(args.rotary_dim);
  if (!args.rotary_cos || d >= dims) return load_global(row + d);
  const int pairs = dims / 2;
  const bool interleaved = args.rotary_interleaved;
  const int pair = interleaved ? d / 2 : d % pairs;
  const bool is_second = interleaved ? d % 2 == 1 : d >= pairs;
  const int first = interleaved ? 2 * pair : pair;
  const float x1 = widen(load_global(row + first));
  const float x2 = widen(load_global(row + first + (interleaved ? 1 : pairs)));
  const float c = load_as<float>(args.rotary_cos, args.rotary_dtype, position * pairs + pair);
  const float s = load_as<float>(args.rotary_sin, args.rotary_dtype, position * pairs + pair);
  return onepass::narrow<T>(is_second ? x1 * s + x2 * c : x1 * c - x2 * s);
}

// Writes the new rows that become rows [begin, end) of the cache, with all threads of the block.
template <class T>
__device__ __forceinline__ void write_new_rows(const AttentionDecode& args, const CachedKeys& keys,
                                               int64_t batch, int64_t kv_head, int64_t begin,
                                               int64_t end) {
  const CacheRows<T> key(args, args.key, batch, kv_head, args.head_dim);
  const CacheRows<T> value(args, args.value, batch, kv_head, args.value_dim);
  const auto new_row = [&](const Strided& rows, int64_t row) {
    return static_cast<const T*>(rows.data) + batch * rows.batch_stride +
           kv_head * rows.head_stride + (row - keys.old) * rows.row_stride;
  };
  const int cols = key.cols + value.cols;
  for (int64_t i = threadIdx.x; i < (end - begin) * cols; i += blockDim.x) {
    const int64_t row = begin + i / cols;
    const auto at = static_cast<int>(i % cols);
    if (at < key.cols) {
      store_global(key.row(static_cast<int>(row)) + at,
                   rotated(args, new_row(args.new_key, row), row, at));
    } else {
      const int d = at - key.cols;
      store_global(value.row(static_cast<int>(row)) + d,
                   load_global(new_row(args.new_value, row) + d));
    }
  }
}

}  // namespace onepass::cuda
