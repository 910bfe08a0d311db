// The tile sizes of the tensor-core kernels.
//
// A bucket is the head dimension that a kernel is compiled for; smaller head dimensions use the
// same kernel and skip slabs of 32 columns. Warps divide a tile by rows alone, so that a row's
// maximum and sum stay in four lanes. Nothing here has been timed on a device yet: sizes follow
// flash-attention's on the A100, within the shared memory of each architecture and without spilled
// registers (tests/install/test_cuda_binary.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/visit.h"
#include "ops/attention.h"

namespace onepass::cuda {

struct AttentionTile {
  int queries;
  int keys;
  int warps;

  constexpr int threads() const { return 32 * warps; }
  constexpr int rows_per_warp() const { return queries / warps; }
};

inline constexpr int kBuckets[] = {64, 128, 256};

constexpr int bucket_of(int64_t dim) { return dim <= 64 ? 64 : dim <= 128 ? 128 : 256; }

inline int bucket_of(const Attention& args) {
  return bucket_of(args.head_dim > args.value_dim ? args.head_dim : args.value_dim);
}

// f<T, kBucket>() of a call.
template <class F>
void visit_bucket(const Attention& args, F&& f) {
  visit_bool(args.dtype == DType::kBFloat16, [&]<bool kBFloat16>() {
    using T = std::conditional_t<kBFloat16, BFloat16, Float16>;
    const int bucket = bucket_of(args);
    if (bucket == 64) return f.template operator()<T, 64>();
    if (bucket == 128) return f.template operator()<T, 128>();
    f.template operator()<T, 256>();
  });
}

// Instances of the forward; a call takes the first one that can serve it.
//
// kPart and kTerms, and the backward, decide in their loops which pieces rows have. When this was
// settled, an iteration compiled for pieces of 16 bytes alone (sm_90, bfloat16) issued fewer
// instructions, at 64, 128 and 256 columns (kPart and the backward have 8 to 43 fewer now):
//   kPart      1,156 -> 1,122   1,139 -> 1,091   1,147 -> 1,075
//   kTerms     2,491 -> 2,460   1,634 -> 1,611   2,361 -> 2,338
//   backward   1,325 -> 1,300   1,163 -> 1,134     887 -> 865; wide 1,190 -> 1,176
// The products of an iteration keep a quarter of a multiprocessor busy for 1,536 or 2,048 clocks on
// the A100 (8 each), so that instances of their own would not be faster.
enum class ForwardKind {
  kWhole,  // rows as long as the bucket, in pieces of 16 bytes
  kPaged,  // the same, with keys in pages
  kPart,   // rows of any length, in pieces of any size, with keys in pages or not
  kTerms,  // as kPart, and there is more to a score than the product of query and key
};

// Forward. With 32 rows a warp reads each fragment of K and V once for two products; at 256 columns
// the sums alone are 128 registers for 16 rows. Terms of scores need registers for their addresses.
// `narrow`: see is_narrow().
//
// The sizes may depend on nothing else: they decide the order of additions, and with it the bits of
// a result, which must not depend on strides, alignment or pages.
constexpr AttentionTile forward_tile(int bucket, bool terms, bool narrow) {
  if (bucket == 64 && !terms) return {.queries = 128, .keys = 96, .warps = 4};
  if (bucket == 128 && (terms || narrow)) return {.queries = 128, .keys = 32, .warps = 4};
  if (bucket <= 128) return {.queries = 128, .keys = 64, .warps = 4};
  return {.queries = 64, .keys = 64, .warps = 4};
}

// Q, K and V (the output overwrites Q), BlockFacts, and the listed addresses, if any: of the rows
// of one tile of keys and of two tiles of values.
constexpr int kForwardSmallBytes = 160;

constexpr int forward_shared_bytes(int bucket, const AttentionTile& tile, bool listed) {
  return (tile.queries + 2 * tile.keys) * bucket * 2 + kForwardSmallBytes +
         (listed ? 3 * tile.keys * static_cast<int>(sizeof(void*)) : 0);
}

// Whether two blocks of so many bytes fit on a multiprocessor, so that one multiplies during the
// softmax of the other. Each block takes 1 KiB more than it asks for; `shared` is the most that a
// single block may ask for. Registers: a block of 128 threads with 255 registers each, which are
// given out by eights, takes half of the 65,536 of a multiprocessor, so two always fit, and three
// with 168. Held to 240 (__maxnreg__, sm_90, 128 columns), whole rows take 36 instructions more.
constexpr bool two_fit(size_t bytes, size_t shared) { return 2 * (bytes + 1024) <= shared + 1024; }

// Whether a call takes the narrow tile: if two blocks with the other would not fit. So it is at 128
// columns without terms in the 100 KiB of compute capability 8.6, 8.9 and 12.0. The A100 (164 KiB)
// and the H100 (228 KiB) have room for two, and there 64 keys read Q half as often. At 256 columns
// a block takes 98 KiB, and only the H100 has room for two. With 32 keys it would take 65 KiB, and
// two would fit the A100, with 10 fragments for 16 products in place of 9; with 16 keys 49 KiB, and
// two would fit 100 KiB. There are no such instances: both dtypes would need one, and attention
// has 74.
//
// The number of keys changes the order of additions, so the last bits of a result may differ from
// one kind of device to another. On one device they depend on the row alone.
constexpr bool has_narrow_tile(int bucket, bool terms) { return bucket == 128 && !terms; }

// Whether there is an instance of a kind; without one, kPart serves. At 256 columns shared memory
// bounds the products, and a few more instructions do not matter. Narrow tiles have none for pages,
// which keeps attention below 75 instances.
constexpr bool has_instance(int bucket, ForwardKind kind, bool narrow) {
  if (kind == ForwardKind::kWhole) return bucket <= 128;
  if (kind == ForwardKind::kPaged) return bucket <= 128 && !narrow;
  return true;
}

constexpr bool is_narrow(int bucket, bool terms, size_t shared) {
  const int bytes = forward_shared_bytes(bucket, forward_tile(bucket, terms, false), true);
  return has_narrow_tile(bucket, terms) && !two_fit(static_cast<size_t>(bytes), shared);
}
static_assert(two_fit(forward_shared_bytes(128, forward_tile(128, false, true), true), 99 * 1024));
static_assert(is_narrow(128, false, 99 * 1024) && !is_narrow(128, false, 163 * 1024));

// ---- backward -----------------------------------------------------------------------------------

// Eight warps. A warp has the scores of 16 keys, transposed: the tensor cores leave them as factors
// of dK and dV, so that P stays in registers and dS goes to shared memory once, for dQ. At 256
// columns two warps share 16 keys, with the scores of half of the queries each. There P goes to
// shared memory too, and a warp has dK and dV of 32 keys and two slabs.
//
// Many keys (128) mean few tiles of keys, and with them few additions to dQ and reads of Q and dO.
// Their sums are 128 registers of each thread at 128 columns; 256 columns leave room for 64 keys.
// The number of queries follows from the registers left for scores, and from the 99 KiB of shared
// memory of compute capability 8.6, 8.9 and 12.0. There one tile of queries is in shared memory;
// elsewhere (163 KiB and more) the next one is loaded beside it: the same additions in the same
// order, so results do not depend on it.
//
// At 128 columns a block has one of two layouts, which add the same products in the same order. A
// warp reads so many fragments by ldmatrix for the products of a tile of queries, 64 of each kind:
//                                            S    dP   dV   dK   dQ   all   eight warps
//   16 keys by 64 queries, P in registers    40   40   32   32   32   176   5,632 clocks
//   32 keys by 32 queries, P shared (wide)   32   32   24   24   32   144   4,608 clocks
// Shared memory serves one in 4 clocks. The tensor cores of an A100 need 5,120 clocks for the
// 5 x 64 x 128 x 128 multiply-adds (1,024 per clock), those of an H100 about 4,060: the first
// layout would wait for shared memory. Both devices have the 163 KiB that P beside dS and two tiles
// of queries take.
//
// In 99 KiB the wide layout does not fit. K, V, Q and dO take 96 KiB, the rest 3 KiB; dS lies in
// the place of dO. P needs 16 KiB before dO is used for the last time, and half of them for 32
// queries, which would read 96 fragments for 160 products: more than 176 for 320. But these devices
// multiply at most 512 per clock, in 10,240 clocks, so that shared memory is not their bound.
//
// Calls with terms of scores have the first layout everywhere, with 32 queries at a time, so that K
// and V are read twice: 192 fragments. Memory would do for the wide layout (163 KiB, as without
// terms), registers would not: S, dP and the derivatives of 32 keys by 32 queries are 96, dK and dV
// 128, dS 16. That leaves 15 of 255 for fragments and addresses, of which the first layout has 63.
// With 16 queries at a time it has these too, and 176 fragments (48 each for S and dP), 6 % less of
// shared memory's time. Both dtypes would need an instance more, and attention has 74: fewer than
// 75 keep the build short.
constexpr AttentionTile backward_tile(int bucket) {
  if (bucket == 64) return {.queries = 128, .keys = 128, .warps = 8};
  if (bucket == 128) return {.queries = 64, .keys = 128, .warps = 8};
  return {.queries = 32, .keys = 64, .warps = 8};
}

// Queries whose scores a warp computes at a time: S and dP of 64 are 64 registers. Terms of scores
// need registers too.
constexpr int backward_strip(int bucket, bool terms, bool wide) {
  return bucket == 256 ? 16 : terms || wide ? 32 : 64;
}

constexpr bool has_wide_layout(int bucket, bool terms) { return bucket == 128 && !terms; }

// A warp has the scores of 16 times so many keys.
constexpr int backward_score_rows(bool wide) { return wide ? 2 : 1; }

// Columns of V that stay in registers as factors; the others stay in shared memory.
constexpr int backward_kept_columns(int bucket) { return bucket == 64 ? 64 : bucket - 128; }

// Whether dS overwrites dO, which is no longer needed by then: only where both do not fit.
constexpr bool backward_shares_place(int bucket, int stages) {
  return bucket == 128 && stages == 1;
}

// Columns of a row of dS, transposed; at 256 columns and in the wide layout P has half of them.
constexpr int backward_score_columns(int bucket, bool wide) {
  return bucket == 64 || wide ? 128 : 64;
}

constexpr int kQueryNumbers = 5;  // QueryNumbers of backward_scores.cuh
constexpr int kSmallBytes = 512;  // BlockConstants, TurnFacts, scratch of all warps

// K and V; Q and dO; dS and P; numbers of the queries of two tiles.
constexpr size_t backward_shared_bytes(int bucket, int stages, bool wide = false) {
  const AttentionTile tile = backward_tile(bucket);
  const int columns = 2 * bucket - backward_kept_columns(bucket);
  const int scores =
      backward_shares_place(bucket, stages) ? 0 : tile.keys * backward_score_columns(bucket, wide);
  const int elements = columns * tile.keys + 2 * stages * tile.queries * bucket + scores;
  return elements * size_t{2} + 2 * kQueryNumbers * tile.queries * sizeof(float) + kSmallBytes;
}

// dbias: two blocks share a multiprocessor, with 128 registers for each thread, so strips of few
// queries.
constexpr int kBiasStrip = 16;

constexpr AttentionTile bias_tile(int bucket) {
  if (bucket <= 128) return {.queries = 64, .keys = 128, .warps = 8};
  return {.queries = 32, .keys = 64, .warps = 8};
}

// K, V, Q, dO; numbers of the queries; BiasBlock and BiasIteration.
constexpr size_t bias_shared_bytes(int bucket) {
  const AttentionTile tile = bias_tile(bucket);
  return 2 * (tile.keys + tile.queries) * bucket * size_t{2} +
         kQueryNumbers * tile.queries * sizeof(float) + 128;
}

constexpr int kBackwardStages = 2;  // at most
static_assert(backward_shared_bytes(64, 1) <= 99 * 1024);
static_assert(backward_shared_bytes(128, 1) <= 99 * 1024);
static_assert(backward_shared_bytes(256, 1) <= 99 * 1024);
static_assert(bias_shared_bytes(128) <= 99 * 1024 && bias_shared_bytes(256) <= 99 * 1024);
static_assert(backward_shared_bytes(64, kBackwardStages) <= 163 * 1024);
static_assert(backward_shared_bytes(128, kBackwardStages, true) <= 163 * 1024);
static_assert(backward_shared_bytes(256, kBackwardStages) <= 163 * 1024);

}  // namespace onepass::cuda
