// Attention on tensor cores, forward: bfloat16 and float16, head dimensions up to 256.
//
//   output = drop(softmax(terms(scale * query key^T))) value,   lse = log(sum(exp(score)))
//
// One block per tile of queries of a head. Q stays in shared memory, a tile of K and one of V take
// turns there, and the softmax runs along with them: Dao, FlashAttention-2, 2023. Q, O and the LSE
// cross the bus once, K and V once for every tile of queries that sees them; nothing has the size
// of the scores.
//
// A warp has 16 or 32 whole rows: scores, probabilities and sums never leave its registers. V is on
// its way while Q K^T is multiplied, and the next K while the softmax and P V run. Tiles of keys
// come from the last to the first, so that those which need a mask are met first; the others skip
// that code on one uniform branch. Done when the tensor cores are busy: two products of 2 * queries
// * keys * head_dim operations for one exponential per score.
#include "cuda/attention/attention.h"
#include "cuda/attention/fragments.cuh"
#include "cuda/attention/order.h"
#include "cuda/attention/table.h"
#include "cuda/launch.cuh"

namespace onepass::cuda {
namespace {

// A maximum is only followed when scores exceed it by this much, in powers of two: until then
// probabilities are at most 2^8 instead of 1, no less exact, and the sums need no new scale.
constexpr float kSlack = 8.0f;

// The running softmax of one row: of exp2(score * factor - base).
struct RunningRow {
  float max = -INFINITY;
  float total = 0.0f;  // the lane's own share
};

// scalar: p = exp2((score - max) * unit), with max the largest score of the row so far or one that
//         is not much below; what was summed with an older max is shrunk by exp2((older - max) *
//         unit)
//
// Not as one multiply-add with max * unit, whose rounding makes the largest P something else than 1
// where scores are huge: rounded to 16 bit, it would no longer be what the total has of it.
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
    if ((now - rows[r].max) * unit > kSlack) {  // also from the first key on, which is inf more
      shrink[r] = exp2_approximate((rows[r].max - now) * unit);
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
  ONEPASS_UNROLL
  for (int r = 0; r < 2; ++r) {
    const float base = rows[r].max == -INFINITY ? 0.0f : rows[r].max;  // no key seen yet
    ONEPASS_UNROLL
    for (int i = 0; i < 2 * kTiles; ++i) {
      float& score = p[i / 2][2 * r + i % 2];
      score = exp2_approximate((score - base) * unit);
      rows[r].total += score;
    }
  }
}

// Zeroes the probabilities that dropout takes; those it keeps are scaled at the end, with the sum.
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

// kTerms: there is more to a score than the product of query and key, or keys are in pages.
template <class T, int kBucket, bool kTerms, bool kNarrow>
__global__ void __launch_bounds__(forward_tile(kBucket, kTerms, kNarrow).threads())
    attention_forward_kernel(const AttentionForward args, const ScoreNumbers<float> numbers,
                             const BlockOrder order) {
  constexpr AttentionTile kTile = forward_tile(kBucket, kTerms, kNarrow);
  constexpr int kQueries = kTile.queries, kKeys = kTile.keys, kThreads = kTile.threads();
  constexpr int kWarpTiles = kTile.rows_per_warp() / 16, kTiles = kKeys / 8;
  constexpr int kDimTiles = kBucket / 8, kSlabs = kBucket / kSlab;
  using RowTile = Tile<T, kBucket>;
  SharedMemory shared;
  const RowTile query = RowTile::take(shared, kQueries);
  const RowTile key = RowTile::take(shared, kKeys), value = RowTile::take(shared, kKeys);

  const auto [batch, kv_head, head, turn] = order.place(blockIdx.x);
  // The last queries see the most keys under a diagonal.
  const auto first_of = [&](int of_turn) {
    return (static_cast<int>(order.tiles) - 1 - of_turn) * kQueries;
  };
  const int first = first_of(turn);
  const Sequence sequence = sequence_of(args, batch);
  if (first >= sequence.queries) return;
  const int queries = static_cast<int>(sequence.queries);
  const int last = queries - first < kQueries ? queries : first + kQueries;
  const SeenKeys seen = seen_keys(args, sequence, first, last);
  const int shift = kTerms ? tile_shift(args) : 0;
  const auto begin = static_cast<int>(seen.first < sequence.keys ? seen.first : sequence.keys);
  const auto end = static_cast<int>(seen.last > 0 ? seen.last : 0);
  // Of tiles that begin here no row needs a mask; none, if it ends in front.
  const auto all_begin = static_cast<int>(seen.all_first < end ? seen.all_first : end);
  const auto all_end = static_cast<int>(seen.all_last > 0 ? seen.all_last : 0) - kKeys;
  const int first_tile = (begin + shift) / kKeys;
  const int last_tile = begin < end ? (end - 1 + shift) / kKeys : first_tile - 1;

  const auto head_dim = static_cast<int>(args.head_dim);
  const auto value_dim = static_cast<int>(args.value_dim);
  const int head_slabs = slabs_of(head_dim), value_slabs = slabs_of(value_dim);
  const auto query_rows = rows_of<const T>(args.query, batch, head, sequence.first_q, head_dim);
  // A tile of keys or values, whose rows are looked up each time.
  const auto load_rows = [&](const RowTile& tile, const Strided& tensor, int cols, int index) {
    const int of_batch = opaque(batch), first_key = index * kKeys - shift;
    const auto rows = rows_of<const T>(tensor, kTerms && args.block_table ? 0 : of_batch, kv_head,
                                       sequence_of(args, of_batch).first_k, cols);
    if (kTerms && args.block_table) {
      const PagedRows<const T> paged = {rows, tensor.batch_stride,
                                        args.block_table + of_batch * args.block_table_stride,
                                        static_cast<int>(args.page_size)};
      load_tile<kKeys, kThreads>(tile, paged, first_key, begin, end);
    } else {
      load_tile<kKeys, kThreads>(tile, rows, first_key, begin, end);
    }
    cp_async_commit();
  };
  if (first_tile <= last_tile) {
    load_tile<kQueries, kThreads>(query, query_rows, first, first, last);
    load_rows(key, args.key, head_dim, last_tile);
  }

  const int warp_row = warp_index() * kTile.rows_per_warp();
  const HeadTerms terms(args, sequence, batch, head);
  const Dropout dropout = kTerms ? dropout_of(args) : Dropout{{}, 0, 0, 1.0f};
  // With terms, scores are in natural units: a bias of finfo.min leaves no room for a factor.
  const float unit = kTerms ? kLog2e : numbers.unit;
  FragmentLanes<kBucket> lanes;
  RunningRow running[kWarpTiles][2];
  float sum[kWarpTiles][kDimTiles][4] = {};
  for (int tile = last_tile; tile >= first_tile; --tile) {
    const int first_key = tile * kKeys - shift;
    cp_async_wait<0>();
    __syncthreads();  // K (and Q) have come, V of the last turn has been used
    load_rows(value, args.value, value_dim, tile);

    lanes.refresh();
    float p[kWarpTiles][kTiles][4] = {};
    ONEPASS_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      if (slab >= head_slabs) continue;
      ONEPASS_UNROLL
      for (int k = slab * kSlab; k < (slab + 1) * kSlab; k += 16) {
        uint32_t a[kWarpTiles][4];
        ONEPASS_UNROLL
        for (int m = 0; m < kWarpTiles; ++m)
          load_a<false>(a[m], query, lanes, warp_row + 16 * m, k);
        ONEPASS_UNROLL
        for (int n = 0; n < kTiles; n += 2) {
          uint32_t b[4];
          load_b<true>(b, key, lanes, k, 8 * n);
          ONEPASS_UNROLL
          for (int m = 0; m < kWarpTiles; ++m) add_product<T>(p[m][n], p[m][n + 1], a[m], b);
        }
      }
    }

    uint32_t unseen[kWarpTiles];
    ONEPASS_UNROLL
    for (int m = 0; m < kWarpTiles; ++m) {
      unseen[m] = 0;
      LaneRow rows[2];
      if constexpr (kTerms) {
        lane_rows(args, sequence, first + warp_row + 16 * m, rows);
        add_terms(p[m], args, numbers, terms, rows, first_key);
        if (args.mask.data) unseen[m] = unseen_keys(p[m]);
      } else if (first_key < all_begin || first_key > all_end) {
        lane_rows(args, sequence_of(args, opaque(batch)), first + warp_row + 16 * m, rows);
        ONEPASS_UNROLL
        for (int i = 0; i < 4 * kTiles; ++i) {
          const int j = key_of(first_key, i / 4, i % 4);
          const LaneRow& row = rows[i % 4 / 2];
          if (j < row.first || j >= row.last) p[m][i / 4][i % 4] = -INFINITY;
        }
      }
    }

    cp_async_wait<0>();
    __syncthreads();  // V has come, K has been used
    if (tile > first_tile) load_rows(key, args.key, head_dim, tile - 1);

    uint32_t p_a[kWarpTiles][kKeys / 16][4];
    ONEPASS_UNROLL
    for (int m = 0; m < kWarpTiles; ++m) {
      softmax(p[m], running[m], sum[m], unit);
      if (kTerms && args.seed) {
        drop(p[m], dropout, args, random_head(args, batch, head), first + warp_row + 16 * m,
             first_key);
      }
      ONEPASS_UNROLL
      for (int step = 0; step < kKeys / 16; ++step) as_a<T>(p_a[m][step], p[m], step);
    }
    uint32_t unseen_by_all = unseen[0];
    ONEPASS_UNROLL
    for (int m = 1; m < kWarpTiles; ++m) unseen_by_all &= unseen[m];
    ONEPASS_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      if (slab >= value_slabs) continue;
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

  // The output takes the place of the warp's own rows of Q, which nobody else has read.
  // Where it goes is found out anew, instead of kept in registers through the loop.
  const BlockPlace own = order.place(static_cast<unsigned>(opaque(static_cast<int>(blockIdx.x))));
  const int top = first_of(own.turn);
  const Sequence whole = sequence_of(args, own.batch);
  const auto output_rows = rows_of<T>(args.output, own.batch, own.head, whole.first_q, value_dim);
  ONEPASS_UNROLL
  for (int m = 0; m < kWarpTiles; ++m) {
    ONEPASS_UNROLL
    for (int r = 0; r < 2; ++r) {
      float total = running[m][r].total;
      total += __shfl_xor_sync(kAllLanes, total, 1);
      total += __shfl_xor_sync(kAllLanes, total, 2);
      float max = kTerms ? running[m][r].max : running[m][r].max * numbers.scale;
      float shrink = 1.0f;
      if (args.sinks) {
        const float sink = load_as<float>(args.sinks, args.sinks_dtype, own.head);
        const float with_sink = fmaxf(max, sink);
        if (sink != -INFINITY) {  // which is none, also for a row without keys
          shrink = max == -INFINITY ? 0.0f : exp2_approximate((max - with_sink) * kLog2e);
          total = total * shrink + exp2_approximate((sink - with_sink) * kLog2e);
          max = with_sink;
        }
      }
      const bool none = total == 0.0f || shrink == 0.0f;
      const float factor = shrink * dropout.scale / total;
      ONEPASS_UNROLL
      for (int n = 0; n < kDimTiles; ++n) {
        const float left = none ? 0.0f : sum[m][n][2 * r] * factor;
        const float right = none ? 0.0f : sum[m][n][2 * r + 1] * factor;
        *query.pair(warp_row + 16 * m + lane_index() / 4 + 8 * r, 8 * n + lane_index() % 4 * 2) =
            narrow_pair<T>(left, right);
      }
      const int i = top + warp_row + 16 * m + lane_index() / 4 + 8 * r;
      if (lane_index() % 4 != 0 || i >= last) continue;
      const int64_t at = lse_row(args, whole, own.batch, own.head, i);
      const float log_total = logf(total);
      const float lse = total == 0.0f ? -INFINITY : max + log_total;
      const float rest = (max - lse) + log_total;
      store_global(static_cast<float*>(args.lse) + at, lse);
      store_global(static_cast<float*>(args.lse_rest) + at, fabsf(rest) < INFINITY ? rest : 0.0f);
    }
  }
  __syncwarp();
  store_tile<kTile.rows_per_warp()>(query, output_rows, warp_row, top, last);
}

// ---- plan and run -------------------------------------------------------------------------------

Plan plan_forward(const AttentionForward& args, const Machine&) {
  Plan plan{};
  plan.kernel_name = "attention_forward_kernel";
  plan.reason = has_terms(args) ? "tensor cores, scores with terms" : "tensor cores";
  // Of a narrow tile too: a plan does not depend on the device.
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

template <class T, int kBucket, bool kTerms, bool kNarrow>
void launch_forward(const AttentionForward& args, int64_t blocks, void* stream) {
  constexpr AttentionTile kTile = forward_tile(kBucket, kTerms, kNarrow);
  static_assert(kTile.queries == forward_tile(kBucket, kTerms, false).queries);
  launch<attention_forward_kernel<T, kBucket, kTerms, kNarrow>>(
      {.blocks = blocks,
       .threads = kTile.threads(),
       .shared_bytes = forward_shared_bytes(kBucket, kTile)},
      stream, args, ScoreNumbers<float>(args), order_of(args, blocks));
}

void run_forward(const AttentionForward& args, const Plan& plan, void*, const Context& context) {
  if (plan.splits == 0) return;
  visit_bucket(args, [&]<class T, int kBucket>() {
    visit_bool(has_terms(args), [&]<bool kTerms>() {
      if constexpr (has_narrow_tile(kBucket, kTerms)) {
        if (is_narrow(kBucket, kTerms, max_shared_bytes())) {
          return launch_forward<T, kBucket, kTerms, true>(args, plan.splits, context.stream);
        }
      }
      launch_forward<T, kBucket, kTerms, false>(args, plan.splits, context.stream);
    });
  });
}

}  // namespace

Operator<AttentionForward> tiled_attention_forward() { return {plan_forward, run_forward}; }

}  // namespace onepass::cuda
