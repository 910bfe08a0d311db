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
// single block may ask for.
constexpr bool two_fit(size_t bytes, size_t shared) { return 2 * (bytes + 1024) <= shared + 1024; }

// Whether a call takes the narrow tile: if two blocks with the other would not fit. So it is at 128
// columns without terms in the 100 KiB of compute capability 8.6, 8.9 and 12.0. The A100 (164 KiB)
// and the H100 (228 KiB) have room for two, and there 64 keys read Q half as often. At 256 columns
// only the H100 has room: two would fit 164 KiB with 32 keys and 100 KiB with 16 keys, but there
// are no such instances.
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
// At 128 columns too, 32 keys by half of the queries would need 144 reads of fragments instead of
// 176, but 16 KiB more for P: 99 KiB has no room for it, 163 KiB has.
constexpr AttentionTile backward_tile(int bucket) {
  if (bucket == 64) return {.queries = 128, .keys = 128, .warps = 8};
  if (bucket == 128) return {.queries = 64, .keys = 128, .warps = 8};
  return {.queries = 32, .keys = 64, .warps = 8};
}

// Queries whose scores a warp computes at a time: S and dP of 64 are 64 registers. Terms of scores
// need registers too.
constexpr int backward_strip(int bucket, bool terms) {
  return bucket == 256 ? 16 : terms ? 32 : 64;
}

// Columns of V that stay in registers as factors; the others stay in shared memory.
constexpr int backward_kept_columns(int bucket) { return bucket == 64 ? 64 : bucket - 128; }

// Whether dS overwrites dO, which is no longer needed by then: only where both do not fit.
constexpr bool backward_shares_place(int bucket, int stages) {
  return bucket == 128 && stages == 1;
}

// Columns of a row of dS, transposed; at 256 columns P has half of them.
constexpr int backward_score_columns(int bucket) { return bucket == 64 ? 128 : 64; }

constexpr int kQueryNumbers = 5;  // QueryNumbers of backward_scores.cuh
constexpr int kSmallBytes = 512;  // BlockConstants, TurnFacts, scratch of all warps

// K and V; Q and dO; dS; numbers of the queries of two tiles.
constexpr size_t backward_shared_bytes(int bucket, int stages) {
  const AttentionTile tile = backward_tile(bucket);
  const int columns = 2 * bucket - backward_kept_columns(bucket);
  const int scores =
      backward_shares_place(bucket, stages) ? 0 : tile.keys * backward_score_columns(bucket);
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

// K, V, Q, dO; numbers of the queries; BiasBlock and BiasTurn.
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
static_assert(backward_shared_bytes(128, kBackwardStages) <= 163 * 1024);
static_assert(backward_shared_bytes(256, kBackwardStages) <= 163 * 1024);

}  // namespace onepass::cuda
