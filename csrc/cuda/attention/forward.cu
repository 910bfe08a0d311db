// Attention on tensor cores, forward: bfloat16 and float16, head dimensions up to 256.
//
//   output = drop(softmax(terms(scale * query key^T))) value,   lse = log(sum(exp(score)))
//
// One block per tile of queries of a head. Q stays in shared memory; tiles of K and V are loaded
// one after the other, and the softmax is updated with each (Dao, FlashAttention-2, 2023). Q, O and
// the LSE cross the bus once, K and V once for every tile of queries that sees them. The scores are
// never stored.
//
// A warp owns 16 or 32 whole rows: scores, probabilities and sums never leave its registers. V is
// loaded while Q K^T is multiplied, the next K during the softmax and P V. The loop over keys runs
// from the last tile to the first, so that tiles which need a mask come first; the others skip that
// code by one uniform branch. The bound is the tensor cores: two products of 2 * queries * keys *
// head_dim operations for one exponential per score.
#include "cuda/attention/attention.h"
#include "cuda/attention/fragments.cuh"
#include "cuda/attention/order.h"
#include "cuda/attention/table.h"
#include "cuda/launch.cuh"

namespace onepass::cuda {
namespace {

// The running maximum is updated only when scores exceed it by this much, in powers of two. Until
// then probabilities are at most 2^8 instead of 1, which is as exact, and sums are not rescaled.
constexpr float kSlack = 8.0f;

// The running softmax of one row: of exp2(score * unit - base).
struct RunningRow {
  float max = -INFINITY;
  float total = 0.0f;  // the lane's own share
};

// Up to this size of max * unit (a power of two), its rounding error is at most 2^-18.
constexpr float kFusedRange = 64.0f;

// Whether a row's exponents are computed by one multiply-add: see softmax().
__device__ __forceinline__ bool is_fused(float max, float unit) {
  return fabsf(max * unit) <= kFusedRange;  // false for a NaN
}

// scalar: p = exp2((score - max) * unit), with max the largest score of the row so far, or less by
//         at most kSlack; sums made with an older max are scaled by exp2((older - max) * unit)
//
// Where max * unit is within kFusedRange, the exponent is one multiply-add: score * unit - max *
// unit. Its rounding error is a factor of the row's P and total alike; it moves P = 1 by less than
// a hundredth of a unit in the last place of 16 bits, and unrounded() removes it from the results.
// Beyond the range the largest P would differ from its share of the total, so max is subtracted
// first. The row's own maximum alone decides between the two.
template <int kTiles, int kDimTiles>
__device__ __forceinline__ void softmax(float (&p)[kTiles][4], RunningRow (&rows)[2],
                                        float (&sum)[kDimTiles][4], float unit) {
  float shrink[2];
  bool shrinks = false;
  ONEPASS_UNROLL
  for (int r = 0; r < 2; ++r) {
    float now = rows[r].max;
    ONEPASS_UNROLL
    for (int n = 0; n < kTiles; ++n) now = fmaxf(now, fmaxf(p[n][2 * r], p[n][2 * r + 1]));
    now = fmaxf(now, __shfl_xor_sync(kAllLanes, now, 1));
    now = fmaxf(now, __shfl_xor_sync(kAllLanes, now, 2));
    shrink[r] = 1.0f;
    if ((now - rows[r].max) * unit > kSlack) {  // true for the first key: max is -inf
      const bool both = is_fused(rows[r].max, unit) && is_fused(now, unit);
      shrink[r] =
          exp2_approximate(both ? rows[r].max * unit - now * unit : (rows[r].max - now) * unit);
      rows[r].max = now;
      shrinks = true;
    }
  }
  if (__ballot_sync(kAllLanes, shrinks) != 0) {
    ONEPASS_UNROLL
    for (int r = 0; r < 2; ++r) {
      rows[r].total *= shrink[r];
      ONEPASS_UNROLL
      for (int i = 0; i < 2 * kDimTiles; ++i) sum[i / 2][2 * r + i % 2] *= shrink[r];
    }
  }
  float base[2];
  bool is_huge[2];
  ONEPASS_UNROLL
  for (int r = 0; r < 2; ++r) {
    base[r] = rows[r].max == -INFINITY ? 0.0f : rows[r].max;  // no key seen yet
    is_huge[r] = !is_fused(base[r], unit);
  }
  if (__ballot_sync(kAllLanes, is_huge[0] || is_huge[1]) != 0) {
    ONEPASS_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float first = is_huge[r] ? base[r] : 0.0f;
      ONEPASS_UNROLL
      for (int i = 0; i < 2 * kTiles; ++i) p[i / 2][2 * r + i % 2] -= first;
      if (is_huge[r]) base[r] = 0.0f;
    }
  }
  ONEPASS_UNROLL
  for (int r = 0; r < 2; ++r) {
    const float low = -base[r] * unit;
    ONEPASS_UNROLL
    for (int i = 0; i < 2 * kTiles; ++i) {
      float& score = p[i / 2][2 * r + i % 2];
      score = exp2_approximate(multiply_add(score, unit, low));
      rows[r].total += score;
    }
  }
}

// The factor that removes the rounding error of max * unit from a row's sums.
__device__ __forceinline__ float unrounded(float max, float unit) {
  constexpr float kLn2 = 0.693147180559945309f;
  return is_fused(max, unit) ? 1.0f - kLn2 * multiply_add(max, unit, -(max * unit)) : 1.0f;
}

// Zeroes the probabilities that are dropped; the others are scaled at the end, with the sum.
template <int kTiles>
__device__ __forceinline__ void drop(float (&p)[kTiles][4], const Dropout& dropout,
                                     const Attention& args, uint32_t random_head, int first_query,
                                     int first_key) {
  constexpr int kAtATime = kTiles < 8 ? kTiles : 8;
  ONEPASS_UNROLL
  for (int n = 0; n < kTiles; n += kAtATime) {
    const uint32_t kept =
        draw<kAtATime>(dropout, args, random_head, first_query, first_key + 8 * n);
    ONEPASS_UNROLL
    for (int i = 0; i < 4 * kAtATime; ++i) {
      if (!(kept >> i & 1)) p[n + i / 4][i % 4] = 0.0f;
    }
  }
}

// Where a key is: a row of a page. A sequence without pages is page 0.
struct PagePlace {
  int page;
  int row;
};

// Facts that all threads of a block share: in shared memory, because registers are scarce.
template <class T>
struct BlockFacts {
  Rows<const T> key;  // of page 0 where there are pages
  Rows<const T> value;
  Sequence sequence;
  int batch;
  int head;
  int kv_head;
  int first;  // query of the tile
  int last;   // after the last one
  int shift;  // keys by which the first tile begins before the first key
  int begin;  // keys that any of the queries sees: begin .. end - 1
  int end;
  // Tiles whose first key is in all_begin .. all_end need no mask in any row; may be empty.
  int all_begin;
  int all_end;
  // Without terms, row i of the tile sees keys low + i .. high + i - 1, as far as they exist.
  int low;
  int high;
  int first_tile;
  int last_tile;     // less than first_tile where no key is seen
  uint32_t nothing;  // 0, unknown to the compiler: see refresh()

  __device__ __forceinline__ BlockFacts(const AttentionForward& args, const BlockOrder& order,
                                        const AttentionTile& shape, bool terms) {
    nothing = 0;
    const BlockPlace place = order.place(blockIdx.x);
    batch = place.batch, head = place.head, kv_head = place.kv_head;
    // The last queries see the most keys under a diagonal.
    first = (static_cast<int>(order.tiles) - 1 - place.turn) * shape.queries;
    sequence = sequence_of(args, batch);
    const int queries = static_cast<int>(sequence.queries);
    last = queries - first < shape.queries ? queries : first + shape.queries;
    shift = terms ? tile_shift(args) : 0;
    const SeenKeys seen = seen_keys(args, sequence, first, last);
    begin = static_cast<int>(seen.first < sequence.keys ? seen.first : sequence.keys);
    end = static_cast<int>(seen.last > 0 ? seen.last : 0);
    all_begin = static_cast<int>(seen.all_first < end ? seen.all_first : end);
    all_end = static_cast<int>(seen.all_last > 0 ? seen.all_last : 0) - shape.keys;
    const auto within = [&](int64_t key) {  // clamped to int, with the same keys for all rows
      const int64_t least = key > -shape.queries ? key : -shape.queries;
      return static_cast<int>(least < sequence.keys ? least : sequence.keys);
    };
    const int64_t position = first + sequence.alignment;
    low = within(position - args.window_left);
    high = within(position + args.window_right + 1);
    first_tile = (begin + shift) / shape.keys;
    last_tile = begin < end ? (end - 1 + shift) / shape.keys : first_tile - 1;
    const int of = args.block_table ? 0 : batch;
    key = rows_of<const T>(args.key, of, kv_head, sequence.first_k, args.head_dim);
    value = rows_of<const T>(args.value, of, kv_head, sequence.first_k, args.value_dim);
    if (args.block_table) {
      key.piece = common_piece(key.piece, args.key.batch_stride * sizeof(T));
      value.piece = common_piece(value.piece, args.value.batch_stride * sizeof(T));
    }
  }
};

template <class T, int kBucket, ForwardKind kKind, bool kNarrow>
__global__ void __launch_bounds__(
    forward_tile(kBucket, kKind == ForwardKind::kTerms, kNarrow).threads())
    attention_forward_kernel(const AttentionForward args, const ScoreNumbers<float> numbers,
                             const BlockOrder order) {
  constexpr bool kTerms = kKind == ForwardKind::kTerms;
  constexpr bool kWhole = kKind == ForwardKind::kWhole || kKind == ForwardKind::kPaged;
  constexpr bool kListed = kKind != ForwardKind::kWhole;
  constexpr AttentionTile kTile = forward_tile(kBucket, kTerms, kNarrow);
  constexpr int kQueries = kTile.queries, kKeys = kTile.keys, kThreads = kTile.threads();
  constexpr int kWarpTiles = kTile.rows_per_warp() / 16, kTiles = kKeys / 8;
  constexpr int kDimTiles = kBucket / 8, kSlabs = kBucket / kSlab;
  using RowTile = Tile<T, kBucket>;
  using Facts = BlockFacts<T>;
  SharedMemory shared;
  const RowTile query = RowTile::take(shared, kQueries);
  const RowTile key = RowTile::take(shared, kKeys), value = RowTile::take(shared, kKeys);
  Facts* const block = shared.take<Facts>(1);
  const T** const key_rows = kListed ? shared.take<const T*>(3 * kKeys) : nullptr;
  const T** const value_rows = key_rows + (kListed ? kKeys : 0);
  static_assert(sizeof(Facts) <= kForwardSmallBytes);

  if (threadIdx.x == 0) *block = Facts(args, order, kTile, kTerms);
  __syncthreads();
  if (block->first >= block->sequence.queries) return;

  // The place of the thread's key of a tile. Unseen keys get a valid place, which is not read.
  const auto find_place = [&](int tile) {
    const int i = tile * kKeys - block->shift + thread_index();
    if (!kListed || thread_index() >= kKeys || i < block->begin || i >= block->end) {
      return PagePlace{};
    }
    if (kKind != ForwardKind::kPaged && !args.block_table) return PagePlace{0, i};
    const auto size = static_cast<int>(args.page_size);
    const int32_t* const pages = args.block_table + block->batch * args.block_table_stride;
    return PagePlace{load_global(pages + i / size), i % size};
  };
  // Listed while the values of the previous tile are still being loaded, so there are two lists.
  const auto value_rows_of = [&](int tile) {
    return value_rows + (kListed ? (tile & 1) * kKeys : 0);
  };
  // Each thread writes the addresses of one key and its value.
  const auto list_rows = [&](int tile, const PagePlace& place) {
    if (!kListed || thread_index() >= kKeys) return;
    const auto list = [&](const T** rows, const Rows<const T>& of, int64_t page_stride) {
      rows[thread_index()] = of.row(place.row) + place.page * page_stride;
    };
    list(key_rows, block->key, args.key.batch_stride);
    list(value_rows_of(tile), block->value, args.value.batch_stride);
  };
  // A tile of keys or values.
  const auto load_rows = [&](const RowTile& tile, const Rows<const T>& rows, const T* const* listed,
                             int index) {
    const int first_key = index * kKeys - block->shift;
    const auto load = [&](const auto& from) {
      load_tile<kKeys, kThreads, kWhole>(tile, from, first_key, block->begin, block->end);
    };
    if constexpr (kListed) {
      load(ListedRows<const T>{listed, first_key, rows.cols, rows.piece});
    } else {
      load(Rows<const T>(rows));  // in registers
    }
    cp_async_commit();
  };
  const auto load_keys = [&](int tile) { load_rows(key, block->key, key_rows, tile); };
  const auto load_values = [&](int tile) {
    load_rows(value, block->value, value_rows_of(tile), tile);
  };
  if (block->first_tile <= block->last_tile) {
    const auto query_rows = rows_of<const T>(args.query, block->batch, block->head,
                                             block->sequence.first_q, args.head_dim);
    load_tile<kQueries, kThreads, kWhole>(query, query_rows, block->first, block->first,
                                          block->last);
    if (kListed) {
      list_rows(block->last_tile, find_place(block->last_tile));
      __syncthreads();
    }
    load_keys(block->last_tile);
  }

  const int warp_row = warp_index() * kTile.rows_per_warp();
  const HeadTerms terms(args, block->sequence, block->batch, block->head);
  const Dropout dropout = kTerms ? dropout_of(args) : Dropout{{}, 0, 0, 1.0f};
  // With terms, scores are in natural units: a bias of finfo.min leaves no room for a factor.
  const float unit = kTerms ? kLog2e : numbers.unit;
  FragmentLanes<kBucket, kKind == ForwardKind::kPart> lanes, query_lanes = lanes.from_row(warp_row);
  RunningRow running[kWarpTiles][2];
  float sum[kWarpTiles][kDimTiles][4] = {};
  PagePlace next = find_place(block->last_tile - 1);
  ONEPASS_ROLL
  for (int tile = block->last_tile; tile >= block->first_tile; --tile) {
    cp_async_wait<0>();
    __syncthreads();  // K (and Q) are loaded, V of the last iteration is used
    load_values(tile);
    list_rows(tile - 1, next);

    lanes.refresh(block->nothing);
    query_lanes.refresh(block->nothing);
    float p[kWarpTiles][kTiles][4] = {};
    ONEPASS_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      if (!kWhole && slab >= slabs_of(args.head_dim)) continue;
      ONEPASS_UNROLL
      for (int k = slab * kSlab; k < (slab + 1) * kSlab; k += 16) {
        uint32_t a[kWarpTiles][4];
        ONEPASS_UNROLL
        for (int m = 0; m < kWarpTiles; ++m) load_a<false>(a[m], query, query_lanes, 16 * m, k);
        ONEPASS_UNROLL
        for (int n = 0; n < kTiles; n += 2) {
          uint32_t b[4];
          load_b<true>(b, key, lanes, k, 8 * n);
          ONEPASS_UNROLL
          for (int m = 0; m < kWarpTiles; ++m) add_product<T>(p[m][n], p[m][n + 1], a[m], b);
        }
      }
    }

    const int first_key = tile * kKeys - (kTerms ? block->shift : 0);
    uint32_t unseen[kWarpTiles];
    ONEPASS_UNROLL
    for (int m = 0; m < kWarpTiles; ++m) {
      unseen[m] = 0;
      if constexpr (kTerms) {
        LaneRow rows[2];
        lane_rows(args, block->sequence, block->first + warp_row + 16 * m, rows);
        add_terms(p[m], args, numbers, terms, rows, first_key);
        if (args.mask.data) unseen[m] = unseen_keys(p[m]);
      } else if (first_key < block->all_begin || first_key > block->all_end) {
        // Keys are counted from the lane's first. Rows beyond the queries are computed too.
        const int own = warp_row + 16 * m + lane_index() / 4 - key_of(first_key, 0, 0);
        ONEPASS_UNROLL
        for (int r = 0; r < 2; ++r) {
          const int low = block->low + own + 8 * r, high = block->high + own + 8 * r;
          const int end = block->end - key_of(first_key, 0, 0), all = high < end ? high : end;
          ONEPASS_UNROLL
          for (int i = 0; i < 2 * kTiles; ++i) {
            const int j = 8 * (i / 2) + i % 2;
            if (j < low || j >= all) p[m][i / 2][2 * r + i % 2] = -INFINITY;
          }
        }
      }
    }

    cp_async_wait<0>();
    __syncthreads();  // V is loaded, K is used, the next keys are listed
    if (tile > block->first_tile) load_keys(tile - 1);

    uint32_t p_a[kWarpTiles][kKeys / 16][4];
    ONEPASS_UNROLL
    for (int m = 0; m < kWarpTiles; ++m) {
      softmax(p[m], running[m], sum[m], unit);
      if (kTerms && args.seed) {
        drop(p[m], dropout, args, random_head(args, block->batch, block->head),
             block->first + warp_row + 16 * m, first_key);
      }
      ONEPASS_UNROLL
      for (int step = 0; step < kKeys / 16; ++step) as_a<T>(p_a[m][step], p[m], step);
    }
    next = find_place(tile - 2);  // a page's number arrives during the product
    uint32_t unseen_by_all = unseen[0];
    ONEPASS_UNROLL
    for (int m = 1; m < kWarpTiles; ++m) unseen_by_all &= unseen[m];
    ONEPASS_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      if (!kWhole && slab >= slabs_of(args.value_dim)) continue;
      ONEPASS_UNROLL
      for (int step = 0; step < kKeys / 16; ++step) {
        ONEPASS_UNROLL
        for (int n = slab * kSlab / 8; n < (slab + 1) * kSlab / 8; n += 2) {
          uint32_t b[4];
          load_b<false>(b, value, lanes, 16 * step, 8 * n);
          if (kTerms && unseen_by_all != 0) drop_unseen(b, unseen_by_all, step);
          ONEPASS_UNROLL
          for (int m = 0; m < kWarpTiles; ++m) {
            add_product<T>(sum[m][n], sum[m][n + 1], p_a[m][step], b);
          }
        }
      }
    }
  }

  // The output overwrites the warp's own rows of Q, which no other warp reads.
  const auto output_rows =
      rows_of<T>(args.output, block->batch, block->head, block->sequence.first_q, args.value_dim);
  ONEPASS_UNROLL
  for (int m = 0; m < kWarpTiles; ++m) {
    ONEPASS_UNROLL
    for (int r = 0; r < 2; ++r) {
      float total = running[m][r].total;
      total += __shfl_xor_sync(kAllLanes, total, 1);
      total += __shfl_xor_sync(kAllLanes, total, 2);
      float max = kTerms ? running[m][r].max : running[m][r].max * numbers.scale;
      const float correction = unrounded(running[m][r].max, unit);
      total *= correction;
      float shrink = 1.0f;
      if (args.sinks) {
        const float sink = load_as<float>(args.sinks, args.sinks_dtype, block->head);
        const float with_sink = fmaxf(max, sink);
        if (sink != -INFINITY) {  // a sink of -inf counts as none, also for a row without keys
          shrink = max == -INFINITY ? 0.0f : exp2_approximate((max - with_sink) * kLog2e);
          total = total * shrink + exp2_approximate((sink - with_sink) * kLog2e);
          max = with_sink;
        }
      }
      const bool none = total == 0.0f || shrink == 0.0f;
      const float factor = shrink * correction * dropout.scale / total;
      ONEPASS_UNROLL
      for (int n = 0; n < kDimTiles; ++n) {
        const float left = none ? 0.0f : sum[m][n][2 * r] * factor;
        const float right = none ? 0.0f : sum[m][n][2 * r + 1] * factor;
        *query.pair(warp_row + 16 * m + lane_index() / 4 + 8 * r, 8 * n + lane_index() % 4 * 2) =
            narrow_pair<T>(left, right);
      }
      const int i = block->first + warp_row + 16 * m + lane_index() / 4 + 8 * r;
      if (lane_index() % 4 != 0 || i >= block->last) continue;
      const int64_t at = lse_row(args, block->sequence, block->batch, block->head, i);
      const float log_total = logf(total);
      const float lse = total == 0.0f ? -INFINITY : max + log_total;
      const float rest = (max - lse) + log_total;
      store_global(static_cast<float*>(args.lse) + at, lse);
      store_global(static_cast<float*>(args.lse_rest) + at, fabsf(rest) < INFINITY ? rest : 0.0f);
    }
  }
  __syncwarp();
  store_tile<kTile.rows_per_warp()>(query, output_rows, warp_row, block->first, block->last);
}

// ---- plan and run -------------------------------------------------------------------------------

Plan plan_forward(const AttentionForward& args, const Machine&) {
  Plan plan{};
  plan.kernel_name = "attention_forward_kernel";
  plan.reason = has_terms(args) ? "tensor cores, scores with terms" : "tensor cores";
  // The same for a narrow tile: a plan does not depend on the device.
  plan.rows_per_tile = forward_tile(bucket_of(args), has_terms(args), false).queries;
  plan.splits =
      args.batch * args.heads * ((args.seq_q + plan.rows_per_tile - 1) / plan.rows_per_tile);
  return plan;
}

// Blocks of a pair share its keys and values.
BlockOrder order_of(const AttentionForward& args, int64_t blocks) {
  const int64_t bytes = args.seq_k * (args.head_dim + args.value_dim) * size_of(args.dtype);
  return order_of_blocks(args.batch, args.kv_heads, args.heads / args.kv_heads,
                         blocks / (args.batch * args.heads), bytes,
                         {l2_bytes(), multiprocessors()});
}

template <class T, int kBucket, ForwardKind kKind, bool kNarrow>
void launch_forward(const AttentionForward& args, int64_t blocks, void* stream) {
  constexpr bool kTerms = kKind == ForwardKind::kTerms;
  constexpr bool kListed = kKind != ForwardKind::kWhole;
  constexpr AttentionTile kTile = forward_tile(kBucket, kTerms, kNarrow);
  static_assert(kTile.queries == forward_tile(kBucket, kTerms, false).queries);
  launch<attention_forward_kernel<T, kBucket, kKind, kNarrow>>(
      {.blocks = blocks,
       .threads = kTile.threads(),
       .shared_bytes = forward_shared_bytes(kBucket, kTile, kListed)},
      stream, args, ScoreNumbers<float>(args), order_of(args, blocks));
}

// The instance that serves a call best. Tiles and the order of arithmetic follow from the bucket,
// the terms and the device alone, never from where rows lie: kinds without terms give the same
// bits.
ForwardKind kind_of(const AttentionForward& args, int bucket, bool narrow) {
  if (has_terms(args)) return ForwardKind::kTerms;
  const auto is_whole = [&](const Strided& rows, int64_t cols) {
    return cols == bucket && has_whole_pieces(rows, args.dtype, cols);
  };
  const auto kind = args.block_table ? ForwardKind::kPaged : ForwardKind::kWhole;
  return has_instance(bucket, kind, narrow) && is_whole(args.query, args.head_dim) &&
                 is_whole(args.key, args.head_dim) && is_whole(args.value, args.value_dim)
             ? kind
             : ForwardKind::kPart;
}

// f<kKind>() of a call.
template <int kBucket, bool kNarrow, class F>
void visit_kind(ForwardKind kind, F&& f) {
  const auto visit = [&]<ForwardKind kKind>() {
    if constexpr (has_instance(kBucket, kKind, kNarrow)) f.template operator()<kKind>();
  };
  switch (kind) {
    case ForwardKind::kWhole:
      return visit.template operator()<ForwardKind::kWhole>();
    case ForwardKind::kPaged:
      return visit.template operator()<ForwardKind::kPaged>();
    case ForwardKind::kPart:
      return visit.template operator()<ForwardKind::kPart>();
    case ForwardKind::kTerms:
      return visit.template operator()<ForwardKind::kTerms>();
  }
}

void run_forward(const AttentionForward& args, const Plan& plan, void*, const Context& context) {
  if (plan.splits == 0) return;
  const bool terms = has_terms(args);
  visit_bucket(args, [&]<class T, int kBucket>() {
    visit_bool(is_narrow(kBucket, terms, max_shared_bytes()), [&]<bool kNarrow>() {
      visit_kind<kBucket, kNarrow>(kind_of(args, kBucket, kNarrow), [&]<ForwardKind kKind>() {
        constexpr bool kTerms = kKind == ForwardKind::kTerms;
        if constexpr (!kNarrow || has_narrow_tile(kBucket, kTerms)) {
          launch_forward<T, kBucket, kKind, kNarrow>(args, plan.splits, context.stream);
        }
      });
    });
  });
}

}  // namespace

Operator<AttentionForward> tiled_attention_forward() { return {plan_forward, run_forward}; }

}  // namespace onepass::cuda
