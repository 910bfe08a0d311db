// The contract of the attention family between ops/ and a back end.
//
//   score = softcap(scale * query key^T) - slope |position - key| + bias
//   P = softmax(score), with one more logit per row if there are sinks
//   output = drop(P) value, lse = log(sum(exp(score))), the sink included
//
// with softcap(s) = softcap * tanh(s / softcap). Keys outside the mask, the window or the diagonal
// have no score.
//
// Dense tensors are (batch, heads, seq, head_dim) by strides. Packed ones are (total, heads,
// head_dim), one sequence after another: their batch_stride is 0, and cu_seq_* holds the first row
// of each sequence. Paged keys are (pages, page_size, kv_heads, head_dim), batch_stride is the
// stride of a page, and block_table lists the pages of each sequence.
//
// ops/ fills the gradients of rows beyond seqused_k; kernels do not write them.
// There is at least one query.
#pragma once

#include <cstdint>
#include <limits>

#include "core/backend.h"
#include "core/dtype.h"

namespace onepass {

inline constexpr int64_t kMaxHeadDim = 512;

// A window without a limit; far enough from overflow that positions may be added to it.
inline constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max() / 4;

// The numbers of a block mask: which keys a block of a dense call may see. The last blocks of
// queries and of keys may be shorter. The mask is then (1, tiles, block_q, block_k).
inline constexpr int32_t kNoKeys = 0;
inline constexpr int32_t kAllKeys = 1;
inline constexpr int32_t kFirstTile = 2;  // the keys of the mask's first tile; then the second's

// (batch, heads, rows, cols) with a dense last dimension; strides in elements, 0 where broadcast.
// Null data: not given, or not wanted.
struct Strided {
  void* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
};

// Of both directions.
struct Attention {
  Strided query;               // (batch, heads, seq_q, head_dim) or (total_q, heads, head_dim)
  Strided key;                 // (batch, kv_heads, seq_k, head_dim) or packed or paged
  Strided value;               // (batch, kv_heads, seq_k, value_dim) or packed or paged
  Strided bias;                // (batch, heads, seq_q, seq_k) or null; packed: of positions
  Strided mask;                // likewise, a byte each, 0: not allowed; or null
  Strided blocks;              // (batch, heads, query_blocks, key_blocks) int32 or null
  int64_t block_q;             // queries of a block
  int64_t block_k;             // keys of a block
  const float* alibi_slopes;   // (batch, heads) or null
  int64_t alibi_batch_stride;  // 0 or heads
  const void* sinks;           // (heads,) contiguous or null
  const int32_t* cu_seq_q;     // (batch + 1,) or null, which is dense
  const int32_t* cu_seq_k;     // (batch + 1,) or null, which is dense or paged
  const int32_t* seqused_k;    // (batch,) how many of a sequence's keys there are; or null, all
  const int32_t* block_table;  // (batch, max_pages) or null, which is not paged
  int64_t block_table_stride;  // of a row
  int64_t page_size;
  const int64_t* seed;  // (2,) or null, which is no dropout
  int64_t batch;
  int64_t heads;  // a multiple of kv_heads
  int64_t kv_heads;
  int64_t seq_q;    // dense: of every sequence; packed: of the longest (an upper bound)
  int64_t seq_k;    // likewise
  int64_t total_q;  // rows of query of one head: batch * seq_q, or the packed total
  int64_t head_dim;
  int64_t value_dim;
  // A query at position p sees keys p - window_left .. p + window_right; causal is 0 on the right.
  int64_t window_left;   // 0 .. kNoLimit
  int64_t window_right;  // 0 .. kNoLimit
  // Where this call's part of a sharded attention begins: query row i is at position
  // query_offset + i + alignment, key j at key_offset + j.
  int64_t query_offset;
  int64_t key_offset;
  // Bottom-right alignment is whole_k - whole_q (dense), or that of each sequence's own lengths
  // (packed and seqused_k); top-left is 0.
  bool bottom_right;
  int64_t whole_q;
  int64_t whole_k;
  double scale;
  double softcap;  // 0: none
  double dropout_p;
  bool allow_tf32;      // of float32 on CUDA: products may keep 10 bits of their factors
  bool rounds_factors;  // of float32 on CPU: products may round their factors to bfloat16
  DType dtype;          // of query, key, value, output and their gradients
  DType bias_dtype;     // of bias and dbias
  DType sinks_dtype;
};

struct AttentionForward : Attention {
  Strided output;  // (batch, heads, seq_q, value_dim) or packed
  void* lse;  // (batch, heads, seq_q) or (heads, total_q) contiguous, in the accumulator's dtype
  void* lse_rest;  // likewise: the rounding error of the LSE. Of a row that averages huge scores,
                   // as a bias of finfo.min makes them, that is the whole logarithm of the count.
};

// With delta = sum(doutput * output) - dlse and dP = drop(doutput value^T):
//   ds = P * (dP - delta)              of the score, after softcap
//   dvalue = drop(P)^T doutput         dsinks = -sum(exp(sink - lse) * delta)
//   dbias = ds, summed over broadcast dimensions;   dslopes = -sum(ds * |position - key|)
//   dquery = scale * (ds * softcap') key         dkey = scale * (ds * softcap')^T query
struct AttentionBackward : Attention {
  Strided doutput;       // (batch, heads, seq_q, value_dim) or packed
  Strided output;        // likewise
  const void* lse;       // as the forward wrote it
  const void* lse_rest;  // likewise, or null, which is 0
  const void* dlse;      // likewise
  Strided dquery;        // as query
  Strided dkey;          // as key; never paged
  Strided dvalue;        // as value
  Strided dbias;         // as bias, 0 strides where it is to be summed; contiguous
  int64_t dbias_numel;
  float* dslopes;      // as alibi_slopes: (batch, heads) or (heads,); contiguous
  void* dsinks;        // (heads,)
  bool deterministic;  // bitwise repeatable: on CUDA, where sums are atomic otherwise
};

// ---- the shape of a call, shared by back ends and plans -----------------------------------------

// Where a sequence's rows are, and which keys its queries see.
struct Sequence {
  int64_t first_q;  // its first row in a packed query; 0 if dense
  int64_t first_k;  // likewise in a packed key; 0 if dense or paged
  int64_t queries;  // of the sequence
  int64_t keys;
  int64_t alignment;  // position of row i, minus i, minus the position of key 0
};

ONEPASS_HOST_DEVICE inline Sequence sequence_of(const Attention& args, int64_t batch) {
  Sequence sequence{0, 0, args.seq_q, args.seq_k, 0};
  bool own_lengths = false;
  if (args.cu_seq_q) {
    sequence.first_q = args.cu_seq_q[batch];
    sequence.queries = args.cu_seq_q[batch + 1] - sequence.first_q;
    own_lengths = true;
  }
  if (args.cu_seq_k) {
    sequence.first_k = args.cu_seq_k[batch];
    sequence.keys = args.cu_seq_k[batch + 1] - sequence.first_k;
    own_lengths = true;
  }
  if (args.seqused_k) sequence.keys = args.seqused_k[batch], own_lengths = true;
  const int64_t bottom_right =
      own_lengths ? sequence.keys - sequence.queries : args.whole_k - args.whole_q;
  sequence.alignment = args.query_offset - args.key_offset + (args.bottom_right ? bottom_right : 0);
  return sequence;
}

// Query row i sees keys [first, last) of its sequence, before any mask.
struct KeyRange {
  int64_t first;
  int64_t last;
};

ONEPASS_HOST_DEVICE inline KeyRange keys_of(const Attention& args, const Sequence& sequence,
                                            int64_t query) {
  const int64_t position = query + sequence.alignment;
  const int64_t first = position - args.window_left;
  const int64_t last = position + args.window_right + 1;
  return {first > 0 ? first : 0, last < sequence.keys ? last : sequence.keys};
}

// Of queries [first, last) of a sequence; intervals only grow and move to the right with the query,
// so the first and the last query say it all. No key: first >= last.
struct SeenKeys {
  int64_t first;      // of any query
  int64_t last;       // of any query
  int64_t all_first;  // of every query
  int64_t all_last;
};

ONEPASS_HOST_DEVICE inline SeenKeys seen_keys(const Attention& args, const Sequence& sequence,
                                              int64_t first, int64_t last) {
  const KeyRange low = keys_of(args, sequence, first);
  const KeyRange high = keys_of(args, sequence, last - 1);
  return {low.first, high.last, high.first, low.last};
}

// Likewise the queries of a sequence that see any of keys [first, last).
ONEPASS_HOST_DEVICE inline KeyRange seeing_queries(const Attention& args, const Sequence& sequence,
                                                   int64_t first, int64_t last) {
  const int64_t begin = first - args.window_right - sequence.alignment;
  const int64_t end = last - 1 + args.window_left - sequence.alignment + 1;
  return {begin > 0 ? begin : 0, end < sequence.queries ? end : sequence.queries};
}

// Whether there is a mask of either kind.
ONEPASS_HOST_DEVICE inline bool is_masked(const Attention& args) {
  return args.mask.data || args.blocks.data;
}

// The blocks of keys for a query, of a call that has them.
inline const int32_t* block_row(const Attention& args, int64_t batch, int64_t head, int64_t query) {
  return static_cast<const int32_t*>(args.blocks.data) + batch * args.blocks.batch_stride +
         head * args.blocks.head_stride + query / args.block_q * args.blocks.row_stride;
}

// The row of a block's tile that a query goes by, indexed by the key within the block.
inline const uint8_t* tile_row(const Attention& args, int32_t block, int64_t query) {
  return static_cast<const uint8_t*>(args.mask.data) +
         (block - kFirstTile) * args.mask.head_stride + query % args.block_q * args.mask.row_stride;
}

// The row of a boolean mask that a query goes by, indexed by key; of a call without blocks.
ONEPASS_HOST_DEVICE inline const uint8_t* mask_row(const Attention& args, int64_t batch,
                                                   int64_t head, int64_t query) {
  return static_cast<const uint8_t*>(args.mask.data) + batch * args.mask.batch_stride +
         head * args.mask.head_stride + query * args.mask.row_stride;
}

// Where the LSE of a query lies among those of the call.
ONEPASS_HOST_DEVICE inline int64_t lse_row(const Attention& args, const Sequence& sequence,
                                           int64_t batch, int64_t head, int64_t query) {
  return args.cu_seq_q ? head * args.total_q + sequence.first_q + query
                       : (batch * args.heads + head) * args.seq_q + query;
}

// The word of a random counter that stands for a head.
ONEPASS_HOST_DEVICE inline uint32_t random_head(const Attention& args, int64_t batch,
                                                int64_t head) {
  return static_cast<uint32_t>(batch * args.heads + head);
}

}  // namespace onepass
