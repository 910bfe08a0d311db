// Attention on tensor cores, backward: bfloat16 and float16, head dimensions up to 256.
//
//   S = Q K^T;  P = exp(terms(scale S) - lse);  dP = dO V^T;  dS = P (drop(dP) - delta)
//   dV = drop(P)^T dO;   dK = scale dS^T Q;   dQ = scale dS K
//
// One block per tile of keys of a key head: K and V are read once. The block iterates over the
// tiles of queries of all heads that share them; the next tile is loaded while one is used. dK and
// dV stay in registers for all of them and are written once, also for a group of heads: there is no
// copy per head. dQ is added up over the tiles of keys in float32, in the workspace; a last kernel
// scales and rounds it. The scores are never stored.
//
// Scores are computed transposed (backward_scores.cuh). Up to 128 columns P^T and dS^T are used as
// factors of dV and dK in the registers where they were computed; only dQ needs dS of other warps,
// through shared memory. At 256 columns and in the wide layout of 128 columns (table.h) P goes
// through shared memory too. Per tile of queries a warp multiplies
//                 to 128 columns        wide                  256 columns
//   S^T, dP^T     16 keys, all queries  32 keys, half         16 keys, half
//   dV, dK        16 keys, all columns  32 keys, two slabs    32 keys, two slabs of 32 columns
//   dQ            32 queries by 32 columns, over all keys of the block
// Each sum adds the same products in the same order in both layouts.
//
// dQ is added by red.global, in any order of the blocks. If deterministic, blocks wait for one
// another to add in the order of the tiles of keys. They take their work by tickets, so that a
// block waits only for blocks that have begun; neighbouring tickets are of different heads, which
// do not wait for each other.
//
// Bytes: Q, dO and dQ (float32, in the L2) once for every tile of keys that they see; K, V, dK, dV
// once. The bound is the tensor cores: five products for one exponential per score.
#include "cuda/attention/attention.h"
#include "cuda/attention/backward_bias.h"
#include "cuda/attention/backward_query.cuh"
#include "cuda/attention/backward_scores.cuh"
#include "cuda/attention/backward_terms.cuh"
#include "cuda/launch.cuh"

namespace onepass::cuda {
namespace {

// ---- pieces of the kernel -----------------------------------------------------------------------

// Copies columns kFirst .. of a tile to a narrower one.
template <int kFirst, int kRows, int kThreads, class T, int kTo, int kFrom>
__device__ __forceinline__ void move_columns(const Tile<T, kTo>& to, const Tile<T, kFrom>& from) {
  constexpr int kChunks = Tile<T, kTo>::kChunks;
  ONEPASS_UNROLL
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    *reinterpret_cast<Words*>(to.chunk(row, chunk)) =
        *reinterpret_cast<const Words*>(from.chunk(row, kFirst / kChunk + chunk));
  }
}

// Which of a step's keys no query of the tile sees, as drop_unseen() takes it. words: for rows g
// and g + 8 of the warps that have those keys, which lanes saw a query.
template <int kParts>
__device__ __forceinline__ uint32_t unseen_of_step(const uint32_t* words, int step, int groups) {
  const int first = lane_index() % 4 * 8;  // bits of four lanes for key 2 t, then for 2 t + 1
  uint32_t unseen = 0;
  ONEPASS_UNROLL
  for (int r = 0; r < 2; ++r) {
    uint32_t seen = words[2 * step + r];
    if constexpr (kParts > 1) seen |= words[2 * (step + groups) + r];
    unseen |= static_cast<uint32_t>((seen >> first & 0xfu) == 0) << 2 * r;
    unseen |= static_cast<uint32_t>((seen >> (first + 4) & 0xfu) == 0) << (2 * r + 1);
  }
  return unseen;
}

// sum (16 kRowTiles x own columns) += left (16 kRowTiles x 16 kSteps) right (rows from `first` on).
// A warp's own slabs are part, part + kParts and so on.
template <int kParts, class T, int kRowTiles, int kTiles, int kSteps, int kCols>
__device__ __forceinline__ void add_gradient(float (&sum)[kRowTiles][kTiles][4],
                                             const uint32_t (&left)[kRowTiles][kSteps][4],
                                             const Tile<T, kCols>& right,
                                             const FragmentLanes<kCols>& lanes, int first,
                                             int slabs, int part) {
  ONEPASS_UNROLL
  for (int i = 0; i < kTiles / 4; ++i) {
    const int slab = i * kParts + part;
    if (slab > 0 && slab >= slabs) continue;  // there is always a first one
    ONEPASS_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      ONEPASS_UNROLL
      for (int n = 4 * i; n < 4 * i + 4; n += 2) {
        uint32_t b[4];
        load_b<false>(b, right, lanes, first + 16 * step, slab * kSlab + 8 * (n % 4));
        ONEPASS_UNROLL
        for (int m = 0; m < kRowTiles; ++m) {
          add_product<T>(sum[m][n], sum[m][n + 1], left[m][step], b);
        }
      }
    }
  }
}

// ---- the kernel ---------------------------------------------------------------------------------

template <class T, int kBucket, bool kTerms, bool kWide>
__global__ void __launch_bounds__(backward_tile(kBucket).threads(), 1)
    attention_backward_kernel(const AttentionBackward __grid_constant__ args,
                              const BackwardWork __grid_constant__ work) {
  wait_for_kernel_before();
  constexpr AttentionTile kTile = backward_tile(kBucket);
  constexpr int kQueries = kTile.queries, kKeys = kTile.keys, kThreads = kTile.threads();
  // A warp has scores of 16 kScoreRows keys and one of kParts shares of the queries.
  constexpr int kScoreRows = backward_score_rows(kWide);
  constexpr int kGroups = kKeys / (16 * kScoreRows), kParts = kTile.warps / kGroups;
  constexpr int kStrip = backward_strip(kBucket, kTerms, kWide);
  constexpr int kStrips = kQueries / kParts / kStrip;
  constexpr int kTiles = kStrip / 8, kSteps = kStrip / 16;
  // A warp has dK and dV of 16 kRowTiles keys and one of kOwnParts shares of the slabs.
  constexpr int kRowTiles = kParts == 1 ? 1 : 2, kOwnGroups = kKeys / (16 * kRowTiles);
  constexpr int kOwnParts = kTile.warps / kOwnGroups;
  constexpr int kSlabs = kBucket / kSlab, kOwnTiles = kSlabs / kOwnParts * kSlab / 8;
  constexpr int kKept = backward_kept_columns(kBucket);
  constexpr int kFacts = 4;  // three iterations' from this one on, rounded up to a power of two
  constexpr int kGradients = kParts == 1 ? 0 : kQueries;  // the column of dS, after P
  using RowTile = Tile<T, kBucket>;
  using ValueTile = Tile<T, 128>;  // the columns of V that are not kept in registers
  using ScoreTile = Tile<T, backward_score_columns(kBucket, kWide)>;
  static_assert(kQueries / kQueryRows * kSlabs == kTile.warps && kThreads > kQueries);
  SharedMemory shared;
  const RowTile key = RowTile::take(shared, kKeys);
  const ValueTile value = kKept == kBucket ? ValueTile{nullptr} : ValueTile::take(shared, kKeys);
  float* const numbers = shared.take<float>(2 * kQueryNumbers * kQueries);
  uint32_t* const seen_words = shared.take<uint32_t>(2 * kTile.warps);
  float* const scratch = shared.take<float>(2 * kReduceScratch<1>);
  auto* const block = shared.take<BlockConstants>(1);
  auto* const facts = shared.take<IterationFacts>(kFacts);
  // Where a device has room for two stages, there is the wide layout.
  const auto stages = [&] {
    return kWide ? kBackwardStages : has_wide_layout(kBucket, kTerms) ? 1 : work.stages;
  };
  const RowTile rows = RowTile::take(shared, 2 * kQueries * stages());
  const bool shares_place = backward_shares_place(kBucket, stages());
  const ScoreTile scores =
      shares_place ? ScoreTile{rows.data + kQueries * kBucket} : ScoreTile::take(shared, kKeys);
  const auto query_tile = [&](int stage) {
    return RowTile{rows.data + 2 * stage * kQueries * kBucket};
  };
  const auto doutput_tile = [&](int stage) {
    return RowTile{rows.data + (2 * stage + 1) * kQueries * kBucket};
  };
  const auto numbers_of = [&](int i) {
    return QueryTile<kQueries>{numbers + (i & 1) * kQueryNumbers * kQueries};
  };

  if (threadIdx.x == 0) *block = BlockConstants(args, work, kTile, kTerms);
  __syncthreads();

  // ---- loads
  const auto load_keys = [&](const auto& target, const Strided& tensor, int64_t cols) {
    const auto from =
        rows_of<const T>(tensor, block->batch, block->kv_head, block->sequence.first_k, cols);
    load_tile<kKeys, kThreads>(target, from, block->first_key, block->seen_first, block->seen_last);
  };
  // The address is computed each time, not kept in a register.
  const auto facts_of = [&](int number) -> IterationFacts& {
    return facts[opaque(number) & (kFacts - 1)];
  };
  const auto load_query = [&](int number, int stage) {
    const IterationFacts& of = facts_of(number);
    const Rows<const T> from = {static_cast<const T*>(of.query), args.query.row_stride,
                                static_cast<int>(args.head_dim), of.query_piece};
    load_tile<kQueries, kThreads>(query_tile(stage), from, 0, 0, of.queries);
  };
  const auto load_doutput = [&](int number, int stage) {
    const IterationFacts& of = facts_of(number);
    const Rows<const T> from = {static_cast<const T*>(of.doutput), args.doutput.row_stride,
                                static_cast<int>(args.value_dim), of.doutput_piece};
    load_tile<kQueries, kThreads>(doutput_tile(stage), from, 0, 0, of.queries);
  };
  const auto load_statistics = [&](const Iteration& iteration) {
    const int i = thread_index();
    if (i >= kQueries) return RowStatistics{};
    return load_row_statistics(args, work.ends, block->sequence, block->batch, iteration.head,
                               iteration.first + i);
  };
  const auto put_numbers = [&](int number, const RowStatistics& statistics) {
    const int i = thread_index();
    if (i >= kQueries) return;
    numbers_of(number).put(
        i, query_numbers<kTerms>(args, block->sequence, statistics,
                                 facts_of(number).iteration.first + i, block->first_key, kKeys));
  };
  // Done by a thread of a warp that stores no numbers.
  const auto put_facts = [&](int number, const Iteration& iteration) {
    if (thread_index() != kThreads - kLanes || number >= block->iterations) return;
    const auto first = [&](const Strided& tensor, int64_t cols) {
      auto rows =
          rows_of<const T>(tensor, block->batch, iteration.head, block->sequence.first_q, cols);
      rows.base = rows.row(iteration.first);
      return rows;
    };
    const auto query = first(args.query, args.head_dim);
    const auto doutput = first(args.doutput, args.value_dim);
    facts_of(number) = {.iteration = iteration,
                        .queries = block->queries - iteration.first,
                        .is_whole = !kTerms && block->is_whole(args, iteration, kTile),
                        .sums = sums_of_iteration(args, work, *block, iteration),
                        .query = query.base,
                        .doutput = doutput.base,
                        .query_piece = query.piece,
                        .doutput_piece = doutput.piece};
  };

  // The warp's place, computed from the thread's index each time, not kept in registers: its keys
  // and queries of scores, then its keys and columns of dK and dV.
  const auto top_key = [] { return thread_index() / kLanes % kGroups * (16 * kScoreRows); };
  const auto part = [] { return kParts == 1 ? 0 : thread_index() / kLanes / kGroups; };
  const auto own_key = [] { return thread_index() / kLanes % kOwnGroups * (16 * kRowTiles); };
  const auto own_part = [] { return kParts == 1 ? 0 : thread_index() / kLanes / kOwnGroups; };

  float dkey[kRowTiles][kOwnTiles][4] = {}, dvalue[kRowTiles][kOwnTiles][4] = {};
  uint32_t value_a[kKept == 0 ? 1 : kKept / 16][4] = {};
  float head_sum = 0.0f;  // add_head_gradients(): the lane's share of the head so far

  if (block->iterations > 0) {
    put_facts(0, block->first_iteration());
    put_facts(1, block->after(block->first_iteration(), kTile));
    // The part of V that registers keep is loaded through the memory of the last tiles of queries.
    const RowTile passing = query_tile(stages() - 1);
    const bool has_place = kKept == 0 || stages() > 1;
    load_keys(key, args.key, args.head_dim);
    if constexpr (kKept == 0) load_keys(value, args.value, args.value_dim);
    if constexpr (kKept > 0) load_keys(passing, args.value, args.value_dim);
    __syncthreads();  // the facts are stored
    if (has_place) load_query(0, 0), load_doutput(0, 0);
    cp_async_commit();
    put_numbers(0, load_statistics(facts_of(0).iteration));
    if constexpr (kKept > 0) {
      cp_async_wait<0>();
      __syncthreads();
      ONEPASS_UNROLL
      for (int k = 0; k < kKept; k += 16) {
        if (k / kSlab >= work.value_slabs) continue;
        load_a<false>(value_a[k / 16], passing, FragmentLanes<kBucket>(), top_key(), k);
      }
      if constexpr (kKept < kBucket) move_columns<kKept, kKeys, kThreads>(value, passing);
      __syncthreads();
      if (!has_place) load_query(0, 0), load_doutput(0, 0);
      cp_async_commit();
    }
  }

  ONEPASS_ROLL
  for (int i = 0; i < block->iterations; ++i) {
    const auto stage = [&] { return opaque(i) & (stages() - 1); };  // of one or two
    const auto now = [&]() -> const IterationFacts& { return facts_of(i); };
    const bool is_last = i + 1 == block->iterations;
    cp_async_wait<0>();
    __syncthreads();  // this iteration's queries are loaded, the previous one's no longer needed
    if (!is_last && stages() > 1) {
      load_query(i + 1, 1 - stage()), load_doutput(i + 1, 1 - stage());
    }
    cp_async_commit();

    // ---- S, dP, and dV where P stays in the warp
    uint32_t seen_by_any = 0;  // bit r: key g + 8 r of the warp
    uint32_t ds_a[kScoreRows][kStrips * kSteps][4];
    ONEPASS_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) {
      const int left = part() * (kQueries / kParts) + strip * kStrip;
      const auto place = [&](int m = 0) {
        const int row = top_key() + 16 * m;
        return Strip<kQueries>{numbers_of(i), thread_index() % kLanes,      left,
                               row,           now().iteration.first + left, block->first_key + row};
      };
      float p[kScoreRows][kTiles][4] = {}, ds[kScoreRows][kTiles][4] = {};
      const FragmentLanes<kBucket> lanes(thread_index() % kLanes);
      const FragmentLanes<kBucket> top_lanes = lanes.from_row(top_key());
      const auto multiply_keys = [&] {
        add_scores<T, !kTerms>(
            p, query_tile(stage()), lanes, left, work.head_slabs,
            [&](uint32_t (&a)[4], int m, int k) { load_a<false>(a, key, top_lanes, 16 * m, k); });
      };
      const auto multiply_values = [&] {
        const auto value_lanes = FragmentLanes<128>(thread_index() % kLanes).from_row(top_key());
        add_scores<T, !kTerms>(ds, doutput_tile(stage()), lanes, left, work.value_slabs,
                               [&](uint32_t (&a)[4], int m, int k) {
                                 if (k >= kKept) {
                                   return load_a<false>(a, value, value_lanes, 16 * m, k - kKept);
                                 }
                                 ONEPASS_UNROLL
                                 for (int j = 0; j < 4; ++j) a[j] = value_a[k / 16][j];
                               });
      };
      if constexpr (kTerms) {
        static_assert(kScoreRows == 1);
        const auto terms = [&] {
          return HeadTerms(args, block->sequence, block->batch, now().iteration.head);
        };
        uint32_t kept = ~0u;
        if (args.seed) {
          kept = draw_transposed<kTiles>(
              block->dropout, args, random_head(args, block->batch, now().iteration.head), place());
        }
        const StripTerms<kTiles> from_memory(args, terms(), place());
        const auto settled = [&] { return from_memory.counts(args, thread_index() % kLanes); };
        // At 128 columns there are no registers to load a mask and a bias at the same time.
        constexpr bool kMaskWaits = kBucket == 128;
        uint32_t counts = kMaskWaits ? settled() : 0;
        multiply_keys();
        float derivative[kTiles][4];
        if constexpr (!kMaskWaits) counts = settled();
        add_terms(p[0], derivative, args, work.numbers, terms(), place());
        from_memory.add_bias(p[0], args);
        term_probabilities(p[0], counts, place());
        multiply_values();
        term_gradients(p[0], ds[0], counts, kept, block->dropout.scale, place());
        add_head_gradients(head_sum, ds[0], args, terms(), place());
        apply_derivatives(ds[0], derivative, counts, work.numbers);
        ONEPASS_UNROLL
        for (int j = 0; j < 4 * kTiles; ++j) seen_by_any |= (counts >> j & 1) << j % 4 / 2;
      } else {
        multiply_keys();
        multiply_values();
        ONEPASS_UNROLL
        for (int m = 0; m < kScoreRows; ++m) {
          plain_gradients(p[m], ds[m], place(m), work.numbers.unit, now().is_whole);
        }
      }
      uint32_t p_a[kScoreRows][kSteps][4];
      ONEPASS_UNROLL
      for (int j = 0; j < kScoreRows * kSteps; ++j) {
        const int m = j / kSteps, step = j % kSteps;
        as_a<T>(p_a[m][step], p[m], step);
        as_a<T>(ds_a[m][strip * kSteps + step], ds[m], step);
        if constexpr (kParts > 1) {
          put_a(scores, p_a[m][step], top_key() + 16 * m, left + 16 * step);
        }
      }
      if constexpr (kParts == 1) {
        if (args.dvalue.data) {
          add_gradient<1>(dvalue, p_a, doutput_tile(stage()), lanes, left, work.value_slabs, 0);
        }
      }
    }

    // ---- dK, and dV where two warps have the same keys
    RowStatistics statistics{};
    if (!is_last) statistics = load_statistics(facts_of(i + 1).iteration);
    if (shares_place) __syncthreads();  // dO is no longer needed
    ONEPASS_UNROLL
    for (int j = 0; j < kScoreRows * kStrips * kSteps; ++j) {
      const int m = j / (kStrips * kSteps), step = j % (kStrips * kSteps);
      put_a(scores, ds_a[m][step], top_key() + 16 * m,
            kGradients + part() * (kQueries / kParts) + 16 * step);
    }
    if (kTerms && args.mask.data) {
      ONEPASS_UNROLL
      for (int r = 0; r < 2; ++r) {
        const unsigned lanes_that_see = __ballot_sync(kAllLanes, seen_by_any >> r & 1);
        if (lane_index() == 0) seen_words[2 * warp_index() + r] = lanes_that_see;
      }
    }
    const FragmentLanes<kBucket> lanes(thread_index() % kLanes);
    if constexpr (kParts == 1) {
      if (args.dkey.data) {
        add_gradient<1>(dkey, ds_a, query_tile(stage()), lanes, 0, work.head_slabs, 0);
      }
    }
    __syncthreads();  // dS of all keys is stored
    const FragmentLanes<ScoreTile::kChunks * kChunk> score_lanes(thread_index() % kLanes);
    if constexpr (kParts > 1) {
      uint32_t a[kRowTiles][kQueries / 16][4];
      const auto own_lanes = score_lanes.from_row(own_key());
      const auto load_own = [&](int col) {
        ONEPASS_UNROLL
        for (int i = 0; i < kRowTiles * kQueries / 16; ++i) {
          const int m = i % kRowTiles, step = i / kRowTiles;
          load_a<false>(a[m][step], scores, own_lanes, 16 * m, col + 16 * step);
        }
      };
      if (args.dvalue.data) {
        load_own(0);
        add_gradient<kOwnParts>(dvalue, a, doutput_tile(stage()), lanes, 0, work.value_slabs,
                                own_part());
      }
      if (args.dkey.data) {
        load_own(kGradients);
        add_gradient<kOwnParts>(dkey, a, query_tile(stage()), lanes, 0, work.head_slabs,
                                own_part());
      }
    } else if (!is_last && stages() == 1) {
      load_query(i + 1, 0);
      if (!shares_place) load_doutput(i + 1, 0);
      cp_async_commit();
    }

    // ---- dQ
    if (work.dquery) {
      const int warp = thread_index() / kLanes, slab = warp / (kQueries / kQueryRows);
      const int top = warp % (kQueries / kQueryRows) * kQueryRows;
      float sum[2][4][4] = {};
      if (slab < work.head_slabs) {
        ONEPASS_UNROLL
        for (int step = 0; step < kKeys / 16; ++step) {
          uint32_t a[2][4];
          load_a<true>(a[0], scores, score_lanes, kGradients + top, 16 * step);
          load_a<true>(a[1], scores, score_lanes, kGradients + top + 16, 16 * step);
          ONEPASS_UNROLL
          for (int n = 0; n < 4; n += 2) {
            uint32_t b[4];
            load_b<false>(b, key, lanes, 16 * step, slab * kSlab + 8 * n);
            if (kTerms && args.mask.data) {
              drop_unseen(b, unseen_of_step<kParts>(seen_words, step, kGroups), 0);
            }
            add_product<T>(sum[0][n], sum[0][n + 1], a[0], b);
            add_product<T>(sum[1][n], sum[1][n + 1], a[1], b);
          }
        }
      }
      const QueryOrder order(args, work, *block, now().iteration, kTile);
      order.wait();
      if (slab < work.head_slabs) {
        add_query_gradient(sum, now().sums, work.head_slabs, now().queries, top, slab);
      }
      order.pass_on();
    }

    // ---- the next iteration
    if (kTerms && head_gradient(args) &&
        (is_last || facts_of(i + 1).iteration.head != now().iteration.head)) {
      store_partial(head_sum, static_cast<float*>(work.ends.head_sums),
                    block->head_partial(args, work, now().iteration.head),
                    scratch + now().iteration.head % 2 * kReduceScratch<1>);
      head_sum = 0.0f;
    }
    if (is_last) continue;
    put_numbers(i + 1, statistics);
    put_facts(i + 2, block->after(facts_of(i + 1).iteration, kTile));
    if (stages() == 1 && (kParts > 1 || shares_place)) {
      __syncthreads();  // the memory of the next queries is no longer used
      if (kParts > 1) load_query(i + 1, 0);
      load_doutput(i + 1, 0);
      cp_async_commit();
    }
  }

  if (head_gradient(args) && block->iterations == 0 && thread_index() < block->group_size) {
    const int head = block->first_iteration().head + thread_index();
    store_global(static_cast<float*>(work.ends.head_sums) + block->head_partial(args, work, head),
                 0.0f);
  }
  start_kernel_after();
  if (block->first_key >= block->keys) return;
  // Both are stored through the memory of K; each warp stores an eighth of the rows.
  const auto store = [&](const Strided& tensor, const float (&sum)[kRowTiles][kOwnTiles][4],
                         int64_t cols, float factor) {
    if (!tensor.data) return;
    __syncthreads();
    ONEPASS_UNROLL
    for (int i = 0; i < kRowTiles * kOwnTiles; ++i) {
      const int m = i / kOwnTiles, n = i % kOwnTiles;
      const int col = (n / 4 * kOwnParts + own_part()) * kSlab + n % 4 * 8 + lane_index() % 4 * 2;
      ONEPASS_UNROLL
      for (int r = 0; r < 2; ++r) {
        *key.pair(own_key() + 16 * m + lane_index() / 4 + 8 * r, col) =
            narrow_pair<T>(sum[m][n][2 * r] * factor, sum[m][n][2 * r + 1] * factor);
      }
    }
    __syncthreads();
    constexpr int kRows = kKeys / kTile.warps;
    const auto to = rows_of<T>(tensor, block->batch, block->kv_head, block->sequence.first_k, cols);
    store_tile<kRows>(key, to, warp_index() * kRows, block->first_key, block->keys);
  };
  store(args.dkey, dkey, args.head_dim, work.numbers.scale);
  store(args.dvalue, dvalue, args.value_dim, kTerms ? block->dropout.scale : 1.0f);
}

// ---- plan and run -------------------------------------------------------------------------------

// How a call is divided, and its workspace: the sums of dQ and the counters of blocks, which begin
// at zero; the ends; the part of dbias. Linear in the rows of query:
//   4 heads (total_q + up to 7 of each sequence) 32 ceil(head_dim / 32)       if dquery is wanted
// + 4 (1 + batch heads query tiles)                                           if deterministic
// + ends_bytes() + dbias_bytes()
struct BackwardShape {
  int64_t key_tiles;
  int64_t query_tiles;
  int64_t sums;      // floats
  int64_t counters;  // the ticket, then `added`
  int64_t ends;      // bytes

  int64_t zeroed_bytes() const { return (sums + counters) * 4; }

  BackwardShape() = default;
  explicit BackwardShape(const AttentionBackward& args) {
    const AttentionTile tile = backward_tile(bucket_of(args));
    key_tiles = (args.seq_k + tile_shift(args) + tile.keys - 1) / tile.keys;
    query_tiles = (args.seq_q + tile.queries - 1) / tile.queries;
    const int64_t units = args.heads * units_of_head(args) * slabs_of(args.head_dim);
    sums = args.dquery.data ? units * kUnit : 0;
    const bool in_order = args.dquery.data && args.deterministic;
    counters = in_order ? (1 + args.batch * args.heads * query_tiles + 3) / 4 * 4 : 0;
    ends = ends_bytes(args, key_tiles);
  }
};

Plan plan_backward(const AttentionBackward& args, const Machine&, BackwardShape& shape) {
  shape = BackwardShape(args);
  Plan plan{};
  plan.kernel_name = "attention_backward_kernel";
  plan.rows_per_tile = backward_tile(bucket_of(args)).queries;
  plan.splits = args.batch * args.kv_heads * shape.key_tiles;
  plan.reason = has_terms(args) ? "tensor cores, scores with terms" : "tensor cores";
  plan.workspace_bytes = shape.zeroed_bytes() + shape.ends;
  if (args.dbias.data) plan.workspace_bytes += dbias_bytes(args);
  return plan;
}

// Blocks of a pair share its Q, dO and dQ. If they wait for one another to add to dQ, the order
// goes through all pairs in turn: blocks of different pairs never wait for one another.
BlockOrder order_of(const AttentionBackward& args, const BackwardShape& shape) {
  const int64_t row_bytes = (args.head_dim + args.value_dim) * size_of(args.dtype) +
                            (shape.sums > 0 ? args.head_dim * 4 : 0);
  const int64_t bytes = args.heads / args.kv_heads * args.seq_q * row_bytes;
  BlockOrder order = order_of_blocks(args.batch, args.kv_heads, 1, shape.key_tiles, bytes,
                                     {l2_bytes(), multiprocessors()});
  if (shape.counters > 0) order.group = order.pairs;
  return order;
}

void run_backward(const AttentionBackward& args, const Plan& plan, const BackwardShape& shape,
                  void* workspace, const Context& context) {
  auto* const sums = static_cast<float*>(workspace);
  auto* const counters = reinterpret_cast<uint32_t*>(sums + shape.sums);
  auto* const rest = reinterpret_cast<char*>(counters + shape.counters);
  BackwardWork work{.ends = ends_in(rest, args, shape.key_tiles),
                    .numbers = ScoreNumbers<float>(args),
                    .order = order_of(args, shape),
                    .dquery = args.dquery.data ? sums : nullptr,
                    .ticket = shape.counters > 0 ? counters : nullptr,
                    .added = counters + 1,
                    .query_tiles = shape.query_tiles,
                    .head_slabs = slabs_of(args.head_dim),
                    .value_slabs = slabs_of(args.value_dim),
                    .stages = kBackwardStages};
  if (shape.zeroed_bytes() > 0) {
    zero(workspace, static_cast<size_t>(shape.zeroed_bytes()), context.stream);
  }
  begin_backward(args, work.ends, context.stream);
  visit_bucket(args, [&]<class T, int kBucket>() {
    visit_bool(has_terms(args), [&]<bool kTerms>() {
      constexpr bool kHasWide = has_wide_layout(kBucket, kTerms);
      if (max_shared_bytes() < backward_shared_bytes(kBucket, kBackwardStages, kHasWide)) {
        work.stages = 1;
      }
      visit_bool(kHasWide && work.stages > 1, [&]<bool kWide>() {
        if constexpr (kHasWide || !kWide) {
          if (plan.splits == 0) return;
          launch<attention_backward_kernel<T, kBucket, kTerms, kWide>, kFollows>(
              {.blocks = plan.splits,
               .threads = backward_tile(kBucket).threads(),
               .shared_bytes = backward_shared_bytes(kBucket, work.stages, kWide)},
              context.stream, args, work);
        }
      });
    });
  });
  if (args.dquery.data) launch_dquery(args, work, context.stream);
  if (args.dbias.data) {
    launch_dbias(args, work.ends, rest + shape.ends, context.stream);
  }
  finish_backward(args, work.ends, context.stream);
}

}  // namespace

Operator<AttentionBackward> tiled_attention_backward() {
  return operator_of<AttentionBackward, BackwardShape, plan_backward, run_backward>();
}

}  // namespace onepass::cuda
