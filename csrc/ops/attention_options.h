// The options of the attention family, each stated once: from a table ops/fields.h makes a struct,
// a part of the schemas, and the types that the dispatcher passes. attention_options.cpp has the
// check of each option of scores, its field in a kernel's arguments, its gradient and its
// description; its meaning is in ops/attention.h.
#pragma once

#include <string>
#include <vector>

#include "ops/attention.h"
#include "ops/fields.h"

namespace onepass {

// Of every operator of the family.
#define ONEPASS_SCORE_OPTIONS(FIELD)                                            \
  FIELD(OptionalTensor, alibi_slopes, "=None") /* (heads,) or (batch, heads) */ \
  FIELD(OptionalTensor, sinks, "=None")        /* (heads,) */                   \
  FIELD(int64_t, window_left, "=-1")           /* -1: no limit */               \
  FIELD(int64_t, window_right, "=-1")          /* 0: causal */                  \
  FIELD(double, scale, "")                                                      \
  FIELD(double, softcap, "=0.0")  /* 0: none */                                 \
  FIELD(bool, out_bshd, "=False") /* results lie as (batch, rows, heads, cols) does */

#define ONEPASS_ATTENTION_OPTIONS(FIELD)                                                    \
  FIELD(OptionalTensor, bias, "=None")        /* (batch, heads, seq_q, seq_k), some 1 */    \
  FIELD(OptionalTensor, mask, "=None")        /* likewise, bool */                          \
  FIELD(OptionalTensor, cu_seq_q, "=None")    /* (batch + 1,) int32: packed */              \
  FIELD(OptionalTensor, cu_seq_k, "=None")    /* likewise */                                \
  FIELD(OptionalTensor, seqused_k, "=None")   /* (batch,) int32 */                          \
  FIELD(OptionalTensor, block_table, "=None") /* (batch, max_pages) int32: paged */         \
  FIELD(OptionalTensor, seed, "=None")        /* (2,) int64: seed, offset */                \
  FIELD(int64_t, max_q, "=0")                 /* upper bounds of packed sequences, or */    \
  FIELD(int64_t, max_k, "=0")                 /* how long the whole of a shard is */        \
  FIELD(int64_t, query_offset, "=0")          /* where this shard of it begins */           \
  FIELD(int64_t, key_offset, "=0")                                                          \
  FIELD(double, dropout_p, "=0.0")                                                          \
  FIELD(bool, bottom_right, "=False")                                                       \
  FIELD(bool, allow_tf32, "=False")          /* float32 on CUDA may keep 10 bits */         \
  FIELD(OptionalTensor, block_mask, "=None") /* (batch, heads, query_blocks, key_blocks) */ \
  FIELD(bool, round_factors, "=False")       /* float32 on CPU may keep 8 bits of factors */

#define ONEPASS_DECODE_OPTIONS(FIELD)                                                   \
  FIELD(OptionalTensor, cache_seqlens, "=None")   /* (batch,) int32 */                  \
  FIELD(OptionalTensor, block_table, "=None")     /* (batch, max_pages) int32: paged */ \
  FIELD(OptionalTensor, cache_batch_idx, "=None") /* (batch,) int32 */                  \
  FIELD(OptionalTensor, cache_leftpad, "=None")   /* (batch,) int32 */

#define ONEPASS_ROTARY_OPTIONS(FIELD)                                          \
  FIELD(OptionalTensor, rotary_cos, "=None") /* (positions, rotary_dim / 2) */ \
  FIELD(OptionalTensor, rotary_sin, "=None") /* likewise */                    \
  FIELD(bool, rotary_interleaved, "=True")

ONEPASS_DEFINE_OPTIONS(ScoreOptions, ONEPASS_SCORE_OPTIONS);
ONEPASS_EXTEND_OPTIONS(AttentionOptions, ScoreOptions, ONEPASS_ATTENTION_OPTIONS);
ONEPASS_EXTEND_OPTIONS(DecodeOptions, ScoreOptions, ONEPASS_DECODE_OPTIONS);
ONEPASS_EXTEND_OPTIONS(AppendOptions, DecodeOptions, ONEPASS_ROTARY_OPTIONS);

class CheckedAgainst;

// Throws unless the options of scores fit `args`, which has sizes and dtype; then sets the fields
// that are known without reading a tensor.
void check_score_options(const char* op, const CheckedAgainst& checked,
                         const AttentionOptions& options, Attention& args);
// The options' tensors, for `args`. Throws unless a block mask has numbers of blocks alone.
void attach_score_options(const char* op, const AttentionOptions& options, Attention& args,
                          Copies& copies);

// Bits of grad_mask: those of query, key and value, and after them those of the options that have
// gradients, in the order of dterms.
inline constexpr int64_t kWantQuery = 1;
inline constexpr int64_t kWantKey = 2;
inline constexpr int64_t kWantValue = 4;
// Of the options that are given.
int64_t score_gradients(const AttentionOptions& options);
// dterms: of the options that grad_mask has, the others of size 0.
std::vector<Tensor> empty_score_gradients(const AttentionOptions& options, const Tensor& query,
                                          int64_t grad_mask);
void attach_score_gradients(int64_t grad_mask, const std::vector<Tensor>& dterms,
                            AttentionBackward& args, Copies& copies);

// For the record of plans: the text of the family's operators before and after their lengths.
std::string text_of_heads(const Attention& args);
std::string text_of_terms(const Attention& args);

}  // namespace onepass
