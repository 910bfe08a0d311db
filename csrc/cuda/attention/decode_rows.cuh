// Reads and writes rows of a KV cache, contiguous or in pages, and rotates new keys and queries.
#pragma once

#include "cuda/attention/decode.h"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/tiles.cuh"
#include "cuda/ptx.cuh"
#include "cuda/vec.cuh"

namespace onepass::cuda {

// Lengths on a device are not checked by the host. They are clamped here, so that no access leaves
// the cache or the workspace, whose size follows from it.
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
  bool aligned;  // each row begins and ends at a multiple of 16 bytes

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

  __device__ __forceinline__ int64_t offset(int i) const {
    if (!pages) return i * stride;
    const int page = i / page_size;
    return (i - page * page_size) * stride + load_global(pages + page) * page_stride;
  }
  __device__ __forceinline__ T* row(int i) const { return base + offset(i); }
};

// Element d of a row rotated for a position: see ops/attention_decode.h.
template <class T>
__device__ __forceinline__ T rotated(const AttentionDecode& args, const T* row, int64_t position,
                                     int d) {
  const auto dims = static_cast<int>(args.rotary_dim);
  if (!args.rotary_cos || d >= dims) return load_global(row + d);
  const int pairs = dims / 2, apart = args.rotary_interleaved ? 1 : pairs;
  const int pair = args.rotary_interleaved ? d / 2 : d < pairs ? d : d - pairs;
  const int first = args.rotary_interleaved ? 2 * pair : pair;
  const auto of_pair = [&](const void* table) {  // float32 or T
    const int64_t at = position * pairs + pair;
    if (args.rotary_dtype == DType::kFloat32)
      return load_global(static_cast<const float*>(table) + at);
    return widen(load_global(static_cast<const T*>(table) + at));
  };
  const float x1 = widen(load_global(row + first)), x2 = widen(load_global(row + first + apart));
  const float c = of_pair(args.rotary_cos), s = of_pair(args.rotary_sin);
  return onepass::narrow<T>(d == first ? x1 * c - x2 * s : x1 * s + x2 * c);
}

// Writes the new rows that become rows [begin, end) of the cache; called by all threads.
template <class T>
__device__ __forceinline__ void write_new_rows(const AttentionDecode& args, const CachedKeys& keys,
                                               int64_t batch, int64_t kv_head, int64_t begin,
                                               int64_t end) {
  constexpr int kRows = 16, kAhead = 4;  // a thread reads kAhead elements before it writes one
  const CacheRows<T> key(args, args.key, batch, kv_head, args.head_dim);
  const CacheRows<T> value(args, args.value, batch, kv_head, args.value_dim);
  const auto new_row = [&](const Strided& rows, int64_t row) {
    return static_cast<const T*>(rows.data) + batch * rows.batch_stride +
           kv_head * rows.head_stride + (row - keys.old) * rows.row_stride;
  };
  const int cols = key.cols + value.cols, threads = static_cast<int>(blockDim.x);
  for (; begin < end; begin += kRows) {
    const int count = (end - begin < kRows ? static_cast<int>(end - begin) : kRows) * cols;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kAhead * threads) {
      T element[kAhead] = {};
      ONEPASS_UNROLL
      for (int a = 0; a < kAhead; ++a) {
        const int at = i + a * threads, d = at % cols;
        const int64_t row = begin + at / cols;
        if (at >= count) continue;
        element[a] = d < key.cols ? rotated(args, new_row(args.new_key, row), row, d)
                                  : load_global(new_row(args.new_value, row) + d - key.cols);
      }
      ONEPASS_UNROLL
      for (int a = 0; a < kAhead; ++a) {
        const int at = i + a * threads, d = at % cols;
        const auto row = static_cast<int>(begin + at / cols);
        if (at >= count) continue;
        store_global(d < key.cols ? key.row(row) + d : value.row(row) + d - key.cols, element[a]);
      }
    }
  }
}

}  // namespace onepass::cuda
