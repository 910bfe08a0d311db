// Attention on tensor cores, backward: bfloat16 and float16, head dimensions up to 256.
//
//   S = Q K^T;  P = exp(terms(scale S) - lse);  dP = dO V^T;  dS = P (drop(dP) - delta)
//   dV = drop(P)^T dO;   dK = scale dS^T Q;   dQ = scale dS K
//
// One block per tile of keys of a head of keys: K and V are read once, and the queries of all heads
// that share them pass by in tiles, the next one on its way while one is used. dK and dV stay in
// registers over all of them and are written once, also those of a group of heads: there is no
// copy of them per head. dQ gathers what all tiles of keys add to it in float32, in the workspace,
// which a last kernel scales and rounds. Nothing has the size of the scores.
//
// Scores are computed transposed (backward_scores.cuh): P^T and dS^T are factors of dV and dK as
// they leave the tensor cores, and only dQ wants dS from other warps, through shared memory.
// Per tile a warp multiplies
//   S^T, dP^T   its 16 keys by all queries (a half of them where two warps share 16 keys)
//   dV, dK      its 16 keys by all columns (every other slab of 32)
//   dQ          32 queries by 32 columns, over all keys of the block
//
// dQ is added by red.global in whatever order blocks come; deterministic: in that of the tiles of
// keys, for which blocks wait for one another. They take their work by tickets, so that whoever is
// waited for has begun, and neighbouring tickets are of different heads, which do not wait.
//
// Bytes: Q, dO once for every tile of keys that is seen, dQ likewise (float32, in the L2); K, V,
// dK, dV once. Done when the tensor cores are busy: five products for one exponential per score.
#include "cuda/attention/attention.h"
#include "cuda/attention/backward_scores.cuh"
#include "cuda/attention/table.h"
#include "cuda/launch.cuh"

namespace onepass::cuda {
namespace {

// ---- the sums of dQ in the workspace ------------------------------------------------------------

// In units of 8 rows by a slab, as the C fragments of a warp have them: kUnit floats, of which a
// lane has four neighbours in each half. Rows of a sequence begin with a unit of their own.
constexpr int kUnitRows = 8;
constexpr int kUnit = kUnitRows * kSlab;

ONEPASS_HOST_DEVICE inline int64_t units_of_rows(int64_t rows) {
  return (rows + kUnitRows - 1) / kUnitRows;
}

// Of rows, in all: linear in the number of queries.
ONEPASS_HOST_DEVICE inline int64_t units_of_head(const Attention& args) {
  return args.cu_seq_q ? args.total_q / kUnitRows + args.batch
                       : args.batch * units_of_rows(args.seq_q);
}

// Packed: sequence b has units first_q / 8 + b up to where that of b + 1 begins, enough for its
// rows.
__device__ __forceinline__ int64_t first_unit(const Attention& args, const Sequence& sequence,
                                              int64_t batch, int64_t head) {
  const int64_t of_batch =
      args.cu_seq_q ? sequence.first_q / kUnitRows + batch : batch * units_of_rows(args.seq_q);
  return head * units_of_head(args) + of_batch;
}

// Where value i of a lane lies in half a unit: four neighbours where those are added at once, else
// so that lanes are neighbours.
__device__ __forceinline__ int place_in_half(int i) {
  return kAddsFour ? lane_index() * 4 + i : i * kLanes + lane_index();
}

__device__ __forceinline__ void add_to_half(float* half, const float (&value)[4]) {
  if constexpr (kAddsFour) {
    add_global_4(half + place_in_half(0), value);
  } else {
    ONEPASS_UNROLL
    for (int i = 0; i < 4; ++i) add_global(half + place_in_half(i), value[i]);
  }
}

constexpr int kQueryThreads = 128;

// dquery = scale * sums; a warp has a unit of rows.
template <class T>
__global__ void __launch_bounds__(kQueryThreads)
    attention_dquery_kernel(const AttentionBackward args, const float* sums) {
  constexpr int kWarps = kQueryThreads / kLanes;
  const int64_t blocks = (units_of_rows(args.seq_q) + kWarps - 1) / kWarps;
  const int64_t batch = blockIdx.x / blocks / args.heads;
  const int64_t head = blockIdx.x / blocks % args.heads;
  const int64_t unit = blockIdx.x % blocks * kWarps + warp_index();
  const Sequence sequence = sequence_of(args, batch);
  if (unit * kUnitRows >= sequence.queries) return;
  const int64_t query = unit * kUnitRows + lane_index() / 4;
  const auto rows = rows_of<T>(args.dquery, batch, head, sequence.first_q, args.head_dim);
  const int slabs = slabs_of(args.head_dim);
  const auto scale = static_cast<float>(args.scale);
  for (int slab = 0; slab < slabs; ++slab) {
    const float* const half =
        sums + ((first_unit(args, sequence, batch, head) + unit) * slabs + slab) * kUnit;
    std::array<uint32_t, 4> word;  // of the row: columns 8 n + 2 t and the next
    ONEPASS_UNROLL
    for (int n = 0; n < 4; ++n) {
      float pair[2];
      ONEPASS_UNROLL
      for (int e = 0; e < 2; ++e) {
        pair[e] = load_global(half + n / 2 * (kUnit / 2) + place_in_half(n % 2 * 2 + e)) * scale;
      }
      word[n] = narrow_pair<T>(pair[0], pair[1]);
    }
    transpose_in_quad(word);
    const int col = slab * kSlab + lane_index() % 4 * kChunk;
    if (query >= sequence.queries || col >= rows.cols) continue;
    store_chunk(rows, query, col, {{word[0], word[1], word[2], word[3]}});
  }
}

// ---- the kernel ---------------------------------------------------------------------------------

// Beside the arguments.
struct BackwardWork {
  BackwardEnds ends;
  float* dquery;     // sums, units_of_head() of each head; null if not wanted
  uint32_t* ticket;  // null: in any order
  uint32_t* turns;   // (batch, heads, query_tiles) tiles of keys that have been added
  int64_t key_tiles;
  int64_t query_tiles;
  int stages;  // tiles of queries in shared memory
};

// A tile of queries of a head.
struct Turn {
  int head;
  int first;
};

// Which of a step's keys no query of the tile sees, as drop_unseen() has it. words: what lanes of
// the warps that have those keys saw of their rows g and g + 8.
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

// sum (16 x 8 kTiles) += left (16 x columns) right^T, by slabs of columns; factor(a, k) gives
// columns k .. k + 15 of the left one, rows of `right` begin at `first`.
template <class T, int kTiles, int kCols, class Factor>
__device__ __forceinline__ void add_scores(float (&sum)[kTiles][4], const Tile<T, kCols>& right,
                                           const FragmentLanes<kCols>& lanes, int first, int slabs,
                                           Factor&& factor) {
  ONEPASS_UNROLL
  for (int slab = 0; slab < kCols / kSlab; ++slab) {
    if (slab >= slabs) continue;
    ONEPASS_UNROLL
    for (int k = slab * kSlab; k < (slab + 1) * kSlab; k += 16) {
      uint32_t a[4];
      factor(a, k);
      ONEPASS_UNROLL
      for (int n = 0; n < kTiles; n += 2) {
        uint32_t b[4];
        load_b<true>(b, right, lanes, k, first + 8 * n);
        add_product<T>(sum[n], sum[n + 1], a, b);
      }
    }
  }
}

// sum (16 x own columns) += left (16 x 16 kSteps) right (rows from `first` on). Own are the slabs
// part, part + kParts and so on.
template <int kParts, class T, int kTiles, int kSteps, int kCols>
__device__ __forceinline__ void add_gradient(float (&sum)[kTiles][4],
                                             const uint32_t (&left)[kSteps][4],
                                             const Tile<T, kCols>& right,
                                             const FragmentLanes<kCols>& lanes, int first,
                                             int slabs, int part) {
  ONEPASS_UNROLL
  for (int i = 0; i < kTiles / 4; ++i) {
    const int slab = i * kParts + part;
    if (slab >= slabs) continue;
    ONEPASS_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      ONEPASS_UNROLL
      for (int n = 4 * i; n < 4 * i + 4; n += 2) {
        uint32_t b[4];
        load_b<false>(b, right, lanes, first + 16 * step, slab * kSlab + 8 * (n % 4));
        add_product<T>(sum[n], sum[n + 1], left[step], b);
      }
    }
  }
}

template <class T, int kBucket, bool kTerms>
__global__ void __launch_bounds__(backward_tile(kBucket).threads(), 1)
    attention_backward_kernel(const AttentionBackward __grid_constant__ args,
                              const BackwardWork __grid_constant__ work) {
  constexpr AttentionTile kTile = backward_tile(kBucket);
  constexpr int kQueries = kTile.queries, kKeys = kTile.keys, kThreads = kTile.threads();
  constexpr int kGroups = kKeys / 16, kParts = kTile.warps / kGroups;
  constexpr int kStrip = backward_strip(kBucket, kTerms), kStrips = kQueries / kParts / kStrip;
  constexpr int kTiles = kStrip / 8, kSteps = kStrip / 16;
  constexpr int kSlabs = kBucket / kSlab, kOwnTiles = kSlabs / kParts * kSlab / 8;
  constexpr bool kKeepsValue = backward_keeps_value(kBucket);
  constexpr int kGradients = kParts == 1 ? 0 : kQueries;  // the column of dS behind P
  using RowTile = Tile<T, kBucket>;
  using ScoreTile = Tile<T, backward_score_columns(kBucket)>;
  static_assert(kQueries / 32 * kSlabs == kTile.warps && kThreads >= kQueries);
  SharedMemory shared;
  const RowTile key = RowTile::take(shared, kKeys);
  const RowTile value = kKeepsValue ? RowTile{nullptr} : RowTile::take(shared, kKeys);
  const RowTile rows = RowTile::take(shared, 2 * kQueries * work.stages);
  const auto query_tile = [&](int stage) {
    return RowTile{rows.data + 2 * stage * kQueries * kBucket};
  };
  const auto doutput_tile = [&](int stage) {
    return RowTile{rows.data + (2 * stage + 1) * kQueries * kBucket};
  };
  const bool shares_place = backward_shares_place(kBucket, work.stages);
  const ScoreTile scores =
      shares_place ? ScoreTile{doutput_tile(0).data} : ScoreTile::take(shared, kKeys);
  float* const numbers = shared.take<float>(2 * kQueryNumbers * kQueries);
  const auto numbers_of = [&](int turn) {
    return QueryTile<kQueries>{numbers + turn % 2 * kQueryNumbers * kQueries};
  };
  uint32_t* const seen_words = shared.take<uint32_t>(2 * kTile.warps);
  uint32_t* const ticket = shared.take<uint32_t>(1);
  float* const scratch = shared.take<float>(2 * kReduceScratch<1>);

  // In any order: tiles of a head are neighbours, which share its Q and dO in the L2; the first
  // keys, which the most queries see under a diagonal, first. By tickets: heads are neighbours.
  int64_t index = blockIdx.x;
  if (work.ticket) {
    if (threadIdx.x == 0) *ticket = atomic_add_acq_rel(work.ticket, 1);
    __syncthreads();
    const int64_t heads = args.batch * args.kv_heads;
    index = *ticket % heads * work.key_tiles + *ticket / heads;
  }
  const auto tile = static_cast<int>(index % work.key_tiles);
  const auto batch = static_cast<int>(index / work.key_tiles / args.kv_heads);
  const auto kv_head = static_cast<int>(index / work.key_tiles % args.kv_heads);
  const int group_size = static_cast<int>(args.heads / args.kv_heads);
  const Sequence sequence = sequence_of(args, batch);
  const auto keys = static_cast<int>(sequence.keys), queries = static_cast<int>(sequence.queries);
  const int shift = kTerms ? tile_shift(args) : 0, first_key = tile * kKeys - shift;
  const int last_key = first_key + kKeys < keys ? first_key + kKeys : keys;
  const KeyRange seeing = seeing_queries(args, sequence, first_key > 0 ? first_key : 0, last_key);
  const bool is_seen = first_key < keys && seeing.first < seeing.last;
  const int begin = is_seen ? static_cast<int>(seeing.first) / kQueries * kQueries : 0;
  const int end = is_seen ? static_cast<int>(seeing.last) : 0;
  const int turns = group_size * ((end - begin + kQueries - 1) / kQueries);

  const auto head_dim = static_cast<int>(args.head_dim);
  const auto value_dim = static_cast<int>(args.value_dim);
  const int head_slabs = slabs_of(head_dim), value_slabs = slabs_of(value_dim);
  const auto load_keys = [&](const RowTile& target, const Strided& tensor, int cols) {
    const SeenKeys seen = seen_keys(args, sequence, seeing.first, seeing.last);
    load_tile<kKeys, kThreads>(
        target, rows_of<const T>(tensor, batch, kv_head, sequence.first_k, cols), first_key,
        static_cast<int>(seen.first), static_cast<int>(seen.last));
  };
  const auto load_queries = [&](const RowTile& target, const Strided& tensor, int cols,
                                const Turn& turn) {
    load_tile<kQueries, kThreads>(
        target, rows_of<const T>(tensor, batch, turn.head, sequence.first_q, cols), turn.first,
        turn.first, queries);
  };
  const auto load_query = [&](const Turn& turn, int stage) {
    load_queries(query_tile(stage), args.query, head_dim, turn);
  };
  const auto load_doutput = [&](const Turn& turn, int stage) {
    load_queries(doutput_tile(stage), args.doutput, value_dim, turn);
  };
  const auto load_memory = [&](const Turn& turn) {
    const auto i = static_cast<int>(threadIdx.x);
    return i < kQueries
               ? load_query_memory(args, work.ends, sequence, batch, turn.head, turn.first + i)
               : QueryMemory{};
  };
  const auto put_numbers = [&](int index_of_turn, const Turn& turn, const QueryMemory& memory) {
    const auto i = static_cast<int>(threadIdx.x);
    if (i >= kQueries) return;
    numbers_of(index_of_turn)
        .put(i, query_numbers<kTerms>(args, sequence, memory, turn.first + i, first_key, kKeys));
  };

  const int group = warp_index() % kGroups, part = warp_index() / kGroups;
  FragmentLanes<kBucket> lanes;
  FragmentLanes<backward_score_columns(kBucket)> score_lanes;
  const Dropout dropout = kTerms ? dropout_of(args) : Dropout{{}, 0, 0, 1.0f};
  TermGradients terms(args, dropout);
  float dkey[kOwnTiles][4] = {}, dvalue[kOwnTiles][4] = {};
  uint32_t value_a[kKeepsValue ? 2 * kSlabs : 1][4];

  Turn turn = {kv_head * group_size, begin};
  if (turns > 0) {
    load_keys(key, args.key, head_dim);
    // On its way to registers, if it goes there, in the place of the last tiles of queries.
    const RowTile passing = kKeepsValue ? query_tile(work.stages - 1) : value;
    load_keys(passing, args.value, value_dim);
    const bool has_place = !kKeepsValue || work.stages > 1;
    if (has_place) load_query(turn, 0), load_doutput(turn, 0);
    cp_async_commit();
    put_numbers(0, turn, load_memory(turn));
    if constexpr (kKeepsValue) {
      cp_async_wait<0>();
      __syncthreads();
      ONEPASS_UNROLL
      for (int step = 0; step < 2 * kSlabs; ++step) {
        if (step / 2 < value_slabs)
          load_a<false>(value_a[step], passing, lanes, 16 * group, 16 * step);
      }
      __syncthreads();
      if (!has_place) load_query(turn, 0), load_doutput(turn, 0);
      cp_async_commit();
    }
  }

  for (int i = 0; i < turns; ++i) {
    const bool is_last = i + 1 == turns;
    Turn next = {turn.head, turn.first + kQueries};
    if (next.first >= end) next = {turn.head + 1, begin};
    const int stage = work.stages > 1 ? i % 2 : 0;
    const RowTile query = query_tile(stage), doutput = doutput_tile(stage);
    cp_async_wait<0>();
    __syncthreads();  // this turn's queries have come, the last one's have been used
    if (!is_last && work.stages > 1) load_query(next, 1 - stage), load_doutput(next, 1 - stage);
    cp_async_commit();
    QueryMemory memory{};
    if (!is_last) memory = load_memory(next);
    lanes.refresh();

    const int last_query = turn.first + kQueries < queries ? turn.first + kQueries : queries;
    const SeenKeys seen = seen_keys(args, sequence, turn.first, last_query);
    const bool whole = seen.all_first <= first_key && first_key + kKeys <= seen.all_last;
    const HeadTerms head_terms(args, sequence, batch, turn.head);
    terms.slope = head_terms.slope;
    uint32_t seen_by_any = 0;  // bit r: key g + 8 r
    uint32_t ds_a[kStrips * kSteps][4];
    ONEPASS_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) {
      const int left = part * (kQueries / kParts) + strip * kStrip;
      float bias[kTiles][4];
      uint32_t counts = 0;
      if constexpr (kTerms) {
        counts = load_terms(bias, args, head_terms, numbers_of(i), left, 16 * group,
                            turn.first + left, first_key + 16 * group);
      }
      float p[kTiles][4] = {}, ds[kTiles][4] = {};
      add_scores<T>(p, query, lanes, left, head_slabs,
                    [&](uint32_t (&a)[4], int k) { load_a<false>(a, key, lanes, 16 * group, k); });
      add_scores<T>(ds, doutput, lanes, left, value_slabs, [&](uint32_t (&a)[4], int k) {
        if constexpr (kKeepsValue) {
          ONEPASS_UNROLL
          for (int j = 0; j < 4; ++j) a[j] = value_a[k / 16][j];
        } else {
          load_a<false>(a, value, lanes, 16 * group, k);
        }
      });
      if constexpr (kTerms) {
        uint32_t kept = ~0u;
        if (args.seed) {
          kept = draw_transposed<kTiles>(dropout, args, random_head(args, batch, turn.head),
                                         turn.first + left, first_key + 16 * group);
        }
        const int64_t distance = turn.first + left + sequence.alignment - first_key;
        terms.template apply<false>(p, ds, bias, counts, kept, numbers_of(i), left, 16 * group,
                                    static_cast<float>(distance));
        ONEPASS_UNROLL
        for (int j = 0; j < 4 * kTiles; ++j) seen_by_any |= (counts >> j & 1) << j % 4 / 2;
      } else {
        plain_gradients(p, ds, numbers_of(i), left, 16 * group,
                        static_cast<float>(args.scale) * kLog2e, whole);
      }
      uint32_t p_a[kSteps][4];
      ONEPASS_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        as_a<T>(p_a[step], p, step);
        as_a<T>(ds_a[strip * kSteps + step], ds, step);
        if constexpr (kParts > 1) put_a(scores, p_a[step], 16 * group, left + 16 * step);
      }
      if constexpr (kParts == 1) {
        if (args.dvalue.data) add_gradient<1>(dvalue, p_a, doutput, lanes, left, value_slabs, 0);
      }
    }

    if (shares_place) __syncthreads();  // dO has been used
    ONEPASS_UNROLL
    for (int step = 0; step < kStrips * kSteps; ++step) {
      put_a(scores, ds_a[step], 16 * group, kGradients + part * (kQueries / kParts) + 16 * step);
    }
    if (kTerms && args.mask.data) {
      ONEPASS_UNROLL
      for (int r = 0; r < 2; ++r) {
        const unsigned lanes_that_see = __ballot_sync(kAllLanes, seen_by_any >> r & 1);
        if (lane_index() == 0) seen_words[2 * warp_index() + r] = lanes_that_see;
      }
    }
    if constexpr (kParts == 1) {
      if (args.dkey.data) add_gradient<1>(dkey, ds_a, query, lanes, 0, head_slabs, 0);
    }
    __syncthreads();  // dS of all keys is there
    if constexpr (kParts > 1) {
      uint32_t a[kQueries / 16][4];
      ONEPASS_UNROLL
      for (int step = 0; step < kQueries / 16; ++step) {
        load_a<false>(a[step], scores, score_lanes, 16 * group, 16 * step);
      }
      if (args.dvalue.data) add_gradient<kParts>(dvalue, a, doutput, lanes, 0, value_slabs, part);
      ONEPASS_UNROLL
      for (int step = 0; step < kQueries / 16; ++step) {
        load_a<false>(a[step], scores, score_lanes, 16 * group, kGradients + 16 * step);
      }
      if (args.dkey.data) add_gradient<kParts>(dkey, a, query, lanes, 0, head_slabs, part);
    } else if (!is_last && work.stages == 1) {
      load_query(next, 0);
      if (!shares_place) load_doutput(next, 0);
      cp_async_commit();
    }

    if (work.dquery) {
      const int top = warp_index() % (kQueries / 32) * 32, slab = warp_index() / (kQueries / 32);
      float sum[2][4][4] = {};
      if (slab < head_slabs) {
        ONEPASS_UNROLL
        for (int step = 0; step < kGroups; ++step) {
          uint32_t a[2][4];
          ONEPASS_UNROLL
          for (int m = 0; m < 2; ++m) {
            load_a<true>(a[m], scores, score_lanes, kGradients + top + 16 * m, 16 * step);
          }
          const uint32_t unseen =
              kTerms && args.mask.data ? unseen_of_step<kParts>(seen_words, step, kGroups) : 0;
          ONEPASS_UNROLL
          for (int n = 0; n < 4; n += 2) {
            uint32_t b[4];
            load_b<false>(b, key, lanes, 16 * step, slab * kSlab + 8 * n);
            if (unseen != 0) drop_unseen(b, unseen, 0);
            ONEPASS_UNROLL
            for (int m = 0; m < 2; ++m) add_product<T>(sum[m][n], sum[m][n + 1], a[m], b);
          }
        }
      }
      uint32_t* const added =
          work.ticket ? work.turns + (batch * args.heads + turn.head) * work.query_tiles +
                            turn.first / kQueries
                      : nullptr;
      // How many tiles of keys come before this one, of those that the tile of queries sees.
      const auto before =
          static_cast<uint32_t>(tile - (static_cast<int>(seen.first) + shift) / kKeys);
      if (added) {
        if (threadIdx.x == 0) {
          while (load_acquire(added) != before) spin();
        }
        __syncthreads();
      }
      if (slab < head_slabs) {
        float* const unit =
            work.dquery +
            ((first_unit(args, sequence, batch, turn.head) + (turn.first + top) / kUnitRows) *
                 head_slabs +
             slab) *
                kUnit;
        ONEPASS_UNROLL
        for (int r = 0; r < 4; ++r) {
          if (turn.first + top + kUnitRows * r >= queries) continue;
          ONEPASS_UNROLL
          for (int n = 0; n < 4; n += 2) {
            const auto& left = sum[r / 2][n];
            const auto& right = sum[r / 2][n + 1];
            const int c = r % 2 * 2;
            add_to_half(unit + r * head_slabs * kUnit + n / 2 * (kUnit / 2),
                        {left[c], left[c + 1], right[c], right[c + 1]});
          }
        }
      }
      if (added) {
        __syncthreads();
        if (threadIdx.x == 0) store_release(added, before + 1);
      }
    }

    if (kTerms && args.dslopes && (is_last || next.head != turn.head)) {
      store_partial(terms.dslope, static_cast<float*>(work.ends.dslopes),
                    (batch * args.heads + turn.head) * work.ends.slope_parts + tile,
                    scratch + turn.head % 2 * kReduceScratch<1>);
      terms.dslope = 0.0f;
    }
    if (!is_last) put_numbers(i + 1, next, memory);
    if (!is_last && work.stages == 1 && (kParts > 1 || shares_place)) {
      __syncthreads();  // what lies in the place of the next queries has been used
      if (kParts > 1) load_query(next, 0);
      load_doutput(next, 0);
      cp_async_commit();
    }
    turn = next;
  }

  if (const auto i = static_cast<int>(threadIdx.x); turns == 0 && args.dslopes && i < group_size) {
    const int64_t head = kv_head * group_size + i;
    store_global(static_cast<float*>(work.ends.dslopes) +
                     (batch * args.heads + head) * work.ends.slope_parts + tile,
                 0.0f);
  }
  if (first_key >= keys) return;
  // Both leave through the place of K, of which a warp stores an eighth.
  const auto store = [&](const Strided& tensor, const float (&sum)[kOwnTiles][4], int cols,
                         float factor) {
    if (!tensor.data) return;
    __syncthreads();
    ONEPASS_UNROLL
    for (int n = 0; n < kOwnTiles; ++n) {
      const int col = (n / 4 * kParts + part) * kSlab + n % 4 * 8 + lane_index() % 4 * 2;
      ONEPASS_UNROLL
      for (int r = 0; r < 2; ++r) {
        *key.pair(16 * group + lane_index() / 4 + 8 * r, col) =
            narrow_pair<T>(sum[n][2 * r] * factor, sum[n][2 * r + 1] * factor);
      }
    }
    __syncthreads();
    store_tile<kKeys / kTile.warps>(key, rows_of<T>(tensor, batch, kv_head, sequence.first_k, cols),
                                    warp_index() * (kKeys / kTile.warps), first_key, keys);
  };
  store(args.dkey, dkey, head_dim, static_cast<float>(args.scale));
  store(args.dvalue, dvalue, value_dim, dropout.scale);
}

// ---- plan and run -------------------------------------------------------------------------------

bool has_terms(const AttentionBackward& args) {
  return args.bias.data || args.mask.data || args.alibi_slopes || args.seed ||
         args.softcap != 0.0 || !(args.scale > 0.0);
}

// f<T, kBucket, kTerms>() of the call.
template <class F>
void visit_backward(const AttentionBackward& args, F&& f) {
  const int bucket = bucket_of(args.head_dim > args.value_dim ? args.head_dim : args.value_dim);
  visit_bool(args.dtype == DType::kBFloat16, [&]<bool kBFloat16>() {
    using T = std::conditional_t<kBFloat16, BFloat16, Float16>;
    visit_bool(has_terms(args), [&]<bool kTerms>() {
      if (bucket == 64) return f.template operator()<T, 64, kTerms>();
      if (bucket == 128) return f.template operator()<T, 128, kTerms>();
      f.template operator()<T, 256, kTerms>();
    });
  });
}

// How a call is cut up, and what the workspace has: first the sums of dQ and the counters, which
// begin at zero, then the ends.
struct BackwardShape {
  int64_t key_tiles;
  int64_t query_tiles;
  int64_t sums;      // floats
  int64_t counters;  // the ticket, then turns

  explicit BackwardShape(const AttentionBackward& args) {
    const AttentionTile tile =
        backward_tile(bucket_of(args.head_dim > args.value_dim ? args.head_dim : args.value_dim));
    key_tiles = (args.seq_k + tile_shift(args) + tile.keys - 1) / tile.keys;
    query_tiles = (args.seq_q + tile.queries - 1) / tile.queries;
    sums =
        args.dquery.data ? args.heads * units_of_head(args) * slabs_of(args.head_dim) * kUnit : 0;
    counters = args.dquery.data && args.deterministic
                   ? (1 + args.batch * args.heads * query_tiles + 3) / 4 * 4
                   : 0;
  }
};

Plan plan_backward(const AttentionBackward& args, const Machine&) {
  const BackwardShape shape(args);
  Plan plan{};
  plan.kernel_name = "attention_backward_kernel";
  plan.parallel = true;
  plan.reason = has_terms(args) ? "tensor cores, scores with terms" : "tensor cores";
  plan.splits = args.batch * args.kv_heads * shape.key_tiles;
  plan.rows_per_tile =
      backward_tile(bucket_of(args.head_dim > args.value_dim ? args.head_dim : args.value_dim))
          .queries;
  plan.zeroed_bytes = (shape.sums + shape.counters) * 4;
  plan.workspace_bytes = plan.zeroed_bytes + ends_bytes(args, shape.key_tiles);
  return plan;
}

void run_backward(const AttentionBackward& args, const Plan& plan, void* workspace,
                  const Context& context) {
  const BackwardShape shape(args);
  float* const sums = static_cast<float*>(workspace);
  auto* const counters = reinterpret_cast<uint32_t*>(sums + shape.sums);
  BackwardWork work{.ends = ends_in(counters + shape.counters, args, shape.key_tiles),
                    .dquery = args.dquery.data ? sums : nullptr,
                    .ticket = shape.counters > 0 ? counters : nullptr,
                    .turns = counters + 1,
                    .key_tiles = shape.key_tiles,
                    .query_tiles = shape.query_tiles,
                    .stages = kBackwardStages};
  begin_backward(args, work.ends, context.stream);
  visit_backward(args, [&]<class T, int kBucket, bool kTerms>() {
    if (max_shared_bytes() < backward_shared_bytes(kBucket, kBackwardStages)) work.stages = 1;
    if (plan.splits > 0) {
      launch<attention_backward_kernel<T, kBucket, kTerms>>(
          {.blocks = plan.splits,
           .threads = backward_tile(kBucket).threads(),
           .shared_bytes = static_cast<size_t>(backward_shared_bytes(kBucket, work.stages))},
          context.stream, args, work);
    }
  });
  if (args.dquery.data) {
    visit_bool(args.dtype == DType::kBFloat16, [&]<bool kBFloat16>() {
      using T = std::conditional_t<kBFloat16, BFloat16, Float16>;
      constexpr int kWarps = kQueryThreads / kLanes;
      launch<attention_dquery_kernel<T>>(
          {.blocks = args.batch * args.heads * ((units_of_rows(args.seq_q) + kWarps - 1) / kWarps),
           .threads = kQueryThreads},
          context.stream, args, static_cast<const float*>(sums));
    });
  }
  finish_backward(args, work.ends, context.stream);
}

}  // namespace

Operator<AttentionBackward> tiled_attention_backward() { return {plan_backward, run_backward}; }

}  // namespace onepass::cuda
