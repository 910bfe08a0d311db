// The contract of attention against a KV cache: few queries per sequence, keys and values of
// earlier calls in the cache, and the new rows of this call, which are appended before they are
// read.
//
// Score, softmax and LSE are those of ops/attention.h, aligned at the bottom right: with
// total = cache_seqlens + new_rows, query row i is at position total - seq_q + i, and row j of a
// cache at position j. Rows before cache_leftpad are not keys.
//
// With scales a cache holds codes of 8 bits: each row is its scale times whole numbers from -127 to
// 127. The scale of a new row is its largest magnitude / 127, in float32, and a code is a number
// of it / scale, rounded to nearest even. If an element is NaN or infinite, the scale is NaN and
// the codes are 0, so that the row reads as NaN. A scale of 0 has codes 0.
//
// Rotation of a row at a position, in float32 and rounded once, with c and s a row of rotary_cos
// and rotary_sin:
//   (x1, x2) -> (x1 c - x2 s, x1 s + x2 c)
// where (x1, x2) are the elements (2i, 2i + 1) if interleaved, else (i, i + rotary_dim / 2).
#pragma once

#include "ops/attention.h"

namespace onepass {

// These fields of Attention have another meaning here:
// - key, value: the caches, (caches, kv_heads, max_seq, dim) or pages, of dtype, or of int8 with
//   scales; new rows are written to them
// - seqused_k: (batch,) rows in use before the call, or null: all seq_k rows
// - seq_k: rows that a cache has room for
struct AttentionDecode : Attention {
  const int32_t* cache_batch_idx;  // (batch,) which cache is a sequence's; or null: its own number
  const int32_t* cache_leftpad;    // (batch,) or null: 0
  Strided key_scale;    // (caches, kv_heads, max_seq) float32, or pages; or null: key has no codes
  Strided value_scale;  // likewise; of both or of neither
  Strided new_key;      // (batch, kv_heads, new_rows, head_dim)
  Strided new_value;    // (batch, kv_heads, new_rows, value_dim)
  int64_t new_rows;     // 0: nothing is written
  const void* rotary_cos;  // (positions, rotary_dim / 2) contiguous, or null
  const void* rotary_sin;  // likewise
  int64_t rotary_dim;
  DType rotary_dtype;
  bool rotary_interleaved;
  bool rotary_by_row;  // query row i is rotated at cache_seqlens + i, else each at cache_seqlens
  Strided output;      // (batch, heads, seq_q, value_dim)
  float* lse;          // (batch, heads, seq_q) contiguous
};

ONEPASS_HOST_DEVICE inline bool holds_codes(const AttentionDecode& args) {
  return args.key_scale.data != nullptr;
}

// The keys of a sequence, as rows of its cache.
struct CachedKeys {
  int64_t first;  // the left padding
  int64_t old;    // rows in use before the call: where new ones begin
  int64_t last;   // after the last new one
};

ONEPASS_HOST_DEVICE inline CachedKeys cached_keys(const AttentionDecode& args, int64_t batch) {
  const int64_t old = args.seqused_k ? args.seqused_k[batch] : args.seq_k;
  return {args.cache_leftpad ? args.cache_leftpad[batch] : 0, old, old + args.new_rows};
}

// The keys that query row i sees.
ONEPASS_HOST_DEVICE inline KeyRange cached_keys_of(const AttentionDecode& args,
                                                   const CachedKeys& keys, int64_t query) {
  const int64_t position = keys.last - args.seq_q + query;
  const int64_t first = position - args.window_left;
  const int64_t last = position + args.window_right + 1;
  return {first > keys.first ? first : keys.first, last < keys.last ? last : keys.last};
}

}  // namespace onepass
