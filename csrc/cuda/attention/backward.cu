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
  int head_slabs;
  int value_slabs;
  int stages;  // tiles of queries in shared memory
};

// A tile of queries of a head.
struct Turn {
  int head;
  int first;
};

// What every thread of a block would hold, kept in shared memory because registers are short.
struct BlockConstants {
  Sequence sequence;
  Dropout dropout;
  int batch;
  int kv_head;
  int group_size;  // heads that share the keys
  int tile;
  int shift;  // of the first tile, in front of the first key
  int first_key;
  int keys;
  int queries;
  int seen_first;  // keys that any query sees: seen_first .. seen_last - 1
  int seen_last;
  int begin;  // queries that see any of the tile's keys, from a multiple of a tile of queries on
  int end;
  int turns;

  __device__ __forceinline__ BlockConstants(const AttentionBackward& args, const BackwardWork& work,
                                            const AttentionTile& shape, bool terms)
      : dropout(dropout_of(args)),
        group_size(static_cast<int>(args.heads / args.kv_heads)),
        shift(terms ? tile_shift(args) : 0) {
    // In any order: tiles of a head are neighbours, which share its Q and dO in the L2; the first
    // keys, which the most queries see under a diagonal, first. By tickets: heads are neighbours.
    int64_t index = blockIdx.x;
    if (work.ticket) {
      const int64_t number = atomic_add_acq_rel(work.ticket, 1), heads = args.batch * args.kv_heads;
      index = number % heads * work.key_tiles + number / heads;
    }
    tile = static_cast<int>(index % work.key_tiles);
    batch = static_cast<int>(index / work.key_tiles / args.kv_heads);
    kv_head = static_cast<int>(index / work.key_tiles % args.kv_heads);
    sequence = sequence_of(args, batch);
    keys = static_cast<int>(sequence.keys);
    queries = static_cast<int>(sequence.queries);
    first_key = tile * shape.keys - shift;
    seen_first = seen_last = begin = end = turns = 0;
    const int last_key = first_key + shape.keys < keys ? first_key + shape.keys : keys;
    if (first_key >= last_key) return;
    const KeyRange range = seeing_queries(args, sequence, first_key > 0 ? first_key : 0, last_key);
    if (range.first >= range.last) return;
    const SeenKeys seen = seen_keys(args, sequence, range.first, range.last);
    seen_first = static_cast<int>(seen.first);
    seen_last = static_cast<int>(seen.last);
    begin = static_cast<int>(range.first) / shape.queries * shape.queries;
    end = static_cast<int>(range.last);
    turns = group_size * ((end - begin + shape.queries - 1) / shape.queries);
  }
};

// The keys that the queries of a turn see.
__device__ __forceinline__ SeenKeys keys_of_turn(const AttentionBackward& args,
                                                 const BlockConstants& block, const Turn& turn,
                                                 const AttentionTile& shape) {
  const int last = turn.first + shape.queries;
  return seen_keys(args, block.sequence, turn.first, last < block.queries ? last : block.queries);
}

// Whether all of them see all keys of the block.
__device__ __forceinline__ bool is_whole(const AttentionBackward& args, const BlockConstants& block,
                                         const Turn& turn, const AttentionTile& shape) {
  const SeenKeys seen = keys_of_turn(args, block, turn, shape);
  return seen.all_first <= block.first_key && block.first_key + shape.keys <= seen.all_last;
}

__device__ __forceinline__ int64_t slope_partial(const AttentionBackward& args,
                                                 const BackwardWork& work,
                                                 const BlockConstants& block, int head) {
  return (block.batch * args.heads + head) * work.ends.slope_parts + block.tile;
}

// Columns kFirst .. of a tile to a narrower one.
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

// When a block may add to the dQ of a turn: when all tiles of keys before its own have. For all
// threads of the block.
class DqueryTurn {
 public:
  __device__ __forceinline__ DqueryTurn(const AttentionBackward& args, const BackwardWork& work,
                                        const BlockConstants& block, const Turn& turn,
                                        const AttentionTile& shape) {
    if (!work.ticket) return;
    added_ = work.turns + (block.batch * args.heads + turn.head) * work.query_tiles +
             turn.first / shape.queries;
    const SeenKeys seen = keys_of_turn(args, block, turn, shape);
    before_ = static_cast<uint32_t>(block.tile -
                                    (static_cast<int>(seen.first) + block.shift) / shape.keys);
  }
  __device__ __forceinline__ void wait() const {
    if (!added_) return;
    if (threadIdx.x == 0) {
      while (load_acquire(added_) != before_) spin();
    }
    __syncthreads();
  }
  __device__ __forceinline__ void pass_on() const {
    if (!added_) return;
    __syncthreads();
    if (threadIdx.x == 0) store_release(added_, before_ + 1);
  }

 private:
  uint32_t* added_ = nullptr;  // tiles of keys that have been
  uint32_t before_ = 0;        // those before this one
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
  constexpr int kKept = backward_kept_columns(kBucket);
  constexpr int kGradients = kParts == 1 ? 0 : kQueries;  // the column of dS behind P
  // As registers allow: 16 rows of dQ at a time; terms of 8 queries, behind all products.
  constexpr int kRowTiles = 2;
  constexpr int kTermTiles = kTiles;
  using RowTile = Tile<T, kBucket>;
  using ScoreTile = Tile<T, backward_score_columns(kBucket)>;
  static_assert(kQueries / 32 * kSlabs == kTile.warps && kThreads >= kQueries);
  SharedMemory shared;
  const RowTile key = RowTile::take(shared, kKeys);
  using ValueTile = Tile<T, 128>;  // of the columns that no registers keep
  const ValueTile value = kKept == kBucket ? ValueTile{nullptr} : ValueTile::take(shared, kKeys);
  float* const numbers = shared.take<float>(2 * kQueryNumbers * kQueries);
  uint32_t* const seen_words = shared.take<uint32_t>(2 * kTile.warps);
  float* const scratch = shared.take<float>(2 * kReduceScratch<1>);
  auto* const block = shared.take<BlockConstants>(1);
  auto* const places = shared.take<Turn>(2);  // of this turn and the next
  const RowTile rows = RowTile::take(shared, 2 * kQueries * work.stages);
  const bool shares_place = backward_shares_place(kBucket, work.stages);
  const ScoreTile scores =
      shares_place ? ScoreTile{rows.data + kQueries * kBucket} : ScoreTile::take(shared, kKeys);
  const auto query_tile = [&](int stage) {
    return RowTile{rows.data + 2 * stage * kQueries * kBucket};
  };
  const auto doutput_tile = [&](int stage) {
    return RowTile{rows.data + (2 * stage + 1) * kQueries * kBucket};
  };
  const auto numbers_of = [&](int turn) {
    return QueryTile<kQueries>{numbers + turn % 2 * kQueryNumbers * kQueries};
  };

  if (threadIdx.x == 0) *block = BlockConstants(args, work, kTile, kTerms);
  __syncthreads();

  const auto load_keys = [&](const auto& target, const Strided& tensor, int64_t cols) {
    const auto from =
        rows_of<const T>(tensor, block->batch, block->kv_head, block->sequence.first_k, cols);
    load_tile<kKeys, kThreads>(target, from, block->first_key, block->seen_first, block->seen_last);
  };
  const auto load_queries = [&](const RowTile& target, const Strided& tensor, int64_t cols,
                                const Turn& turn) {
    const auto from =
        rows_of<const T>(tensor, block->batch, turn.head, block->sequence.first_q, cols);
    load_tile<kQueries, kThreads>(target, from, turn.first, turn.first, block->queries);
  };
  const auto load_query = [&](const Turn& turn, int stage) {
    load_queries(query_tile(stage), args.query, args.head_dim, turn);
  };
  const auto load_doutput = [&](const Turn& turn, int stage) {
    load_queries(doutput_tile(stage), args.doutput, args.value_dim, turn);
  };
  const auto load_memory = [&](const Turn& turn) {
    const int i = thread_index();
    if (i >= kQueries) return QueryMemory{};
    return load_query_memory(args, work.ends, block->sequence, block->batch, turn.head,
                             turn.first + i);
  };
  const auto put_turn = [&](int turn_index, const Turn& turn, const QueryMemory& memory) {
    const int i = thread_index();
    if (i == 0) places[turn_index % 2] = turn;
    if (i >= kQueries) return;
    numbers_of(turn_index)
        .put(i, query_numbers<kTerms>(args, block->sequence, memory, turn.first + i,
                                      block->first_key, kKeys));
  };
  const auto next_of = [&](const Turn& turn) {
    return turn.first + kQueries < block->end ? Turn{turn.head, turn.first + kQueries}
                                              : Turn{turn.head + 1, block->begin};
  };
  // Of the warp: its keys are top_key(), top_key() + 1 .. of the tile.
  const auto top_key = [] { return thread_index() / kLanes % kGroups * 16; };
  const auto part = [] { return kParts == 1 ? 0 : thread_index() / kLanes / kGroups; };

  float dkey[kOwnTiles][4] = {}, dvalue[kOwnTiles][4] = {};
  uint32_t value_a[kKept == 0 ? 1 : kKept / 16][4] = {};
  float dslope = 0.0f;  // of the head so far, the lane's share

  if (block->turns > 0) {
    const Turn turn = {block->kv_head * block->group_size, block->begin};
    load_keys(key, args.key, args.head_dim);
    if constexpr (kKept == 0) load_keys(value, args.value, args.value_dim);
    // Else V passes through the place of the last tiles of queries.
    const RowTile passing = query_tile(work.stages - 1);
    if constexpr (kKept > 0) load_keys(passing, args.value, args.value_dim);
    const bool has_place = kKept == 0 || work.stages > 1;
    if (has_place) load_query(turn, 0), load_doutput(turn, 0);
    cp_async_commit();
    put_turn(0, turn, load_memory(turn));
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
      if (!has_place) load_query(turn, 0), load_doutput(turn, 0);
      cp_async_commit();
    }
  }

  ONEPASS_ROLL
  for (int i = 0; i < block->turns; ++i) {
    const auto stage = [&] { return work.stages > 1 ? afresh(i) % 2 : 0; };
    const Turn* const turn = places + i % 2;
    cp_async_wait<0>();
    __syncthreads();  // this turn's queries have come, the last one's have been used
    const bool is_last = i + 1 == block->turns;
    if (!is_last && work.stages > 1) {
      const Turn next = next_of(*turn);
      load_query(next, 1 - stage()), load_doutput(next, 1 - stage());
    }
    cp_async_commit();

    uint32_t seen_by_any = 0;  // bit r: key g + 8 r of the warp
    uint32_t ds_a[kStrips * kSteps][4];
    ONEPASS_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) {
      const int left = part() * (kQueries / kParts) + strip * kStrip;
      const auto strip_at = [&](int n) {
        return Strip<kQueries>{
            numbers_of(i), thread_index() % kLanes,    left + 8 * n,
            top_key(),     turn->first + left + 8 * n, block->first_key + top_key()};
      };
      float p[kTiles][4] = {}, ds[kTiles][4] = {};
      const FragmentLanes<kBucket> lanes(thread_index() % kLanes);
      const int top = top_key();
      const auto multiply_keys = [&] {
        add_scores<T>(p, query_tile(stage()), lanes, left, work.head_slabs,
                      [&](uint32_t (&a)[4], int k) { load_a<false>(a, key, lanes, top, k); });
      };
      const auto multiply_values = [&] {
        const FragmentLanes<128> value_lanes(thread_index() % kLanes);
        add_scores<T>(ds, doutput_tile(stage()), lanes, left, work.value_slabs,
                      [&](uint32_t (&a)[4], int k) {
                        if (k >= kKept) return load_a<false>(a, value, value_lanes, top, k - kKept);
                        ONEPASS_UNROLL
                        for (int j = 0; j < 4; ++j) a[j] = value_a[k / 16][j];
                      });
      };
      if constexpr (kTerms) {
        uint32_t kept = ~0u;
        if (args.seed) {
          kept = draw_transposed<kTiles>(block->dropout, args,
                                         random_head(args, block->batch, turn->head), strip_at(0));
        }
        multiply_keys();
        if (kTermTiles < kTiles) multiply_values();
        ONEPASS_UNROLL
        for (int n = 0; n < kTiles; n += kTermTiles) {
          float (&part_of_p)[kTermTiles][4] = *reinterpret_cast<float (*)[kTermTiles][4]>(p + n);
          float (&part_of_ds)[kTermTiles][4] = *reinterpret_cast<float (*)[kTermTiles][4]>(ds + n);
          const HeadTerms terms(args, block->sequence, block->batch, turn->head);
          float tangent[kTermTiles][4];
          const uint32_t counts = counting_scores<kTermTiles>(args, terms, strip_at(n));
          bend_scores(part_of_p, tangent, args, terms, strip_at(n));
          for_each_bias<kTermTiles>(args, terms, counts, strip_at(n),
                                    [&](int j, float bias) { part_of_p[j / 4][j % 4] += bias; });
          term_probabilities(part_of_p, counts, strip_at(n));
          if (kTermTiles == kTiles) multiply_values();
          term_gradients<false>(part_of_p, part_of_ds, dslope, tangent, counts, kept >> 4 * n,
                                block->dropout.scale, args, terms, strip_at(n));
          ONEPASS_UNROLL
          for (int j = 0; j < 4 * kTermTiles; ++j) seen_by_any |= (counts >> j & 1) << j % 4 / 2;
        }
      } else {
        multiply_keys();
        multiply_values();
        plain_gradients(p, ds, strip_at(0), static_cast<float>(args.scale) * kLog2e,
                        is_whole(args, *block, *turn, kTile));
      }
      uint32_t p_a[kSteps][4];
      ONEPASS_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        as_a<T>(p_a[step], p, step);
        as_a<T>(ds_a[strip * kSteps + step], ds, step);
        if constexpr (kParts > 1) put_a(scores, p_a[step], top_key(), left + 16 * step);
      }
      if (kParts == 1 && args.dvalue.data) {
        add_gradient<1>(dvalue, p_a, doutput_tile(stage()), lanes, left, work.value_slabs, 0);
      }
    }

    QueryMemory memory{};
    if (!is_last) memory = load_memory(next_of(*turn));
    if (shares_place) __syncthreads();  // dO has been used
    ONEPASS_UNROLL
    for (int step = 0; step < kStrips * kSteps; ++step) {
      put_a(scores, ds_a[step], top_key(), kGradients + part() * (kQueries / kParts) + 16 * step);
    }
    if (kTerms && args.mask.data) {
      ONEPASS_UNROLL
      for (int r = 0; r < 2; ++r) {
        const unsigned lanes_that_see = __ballot_sync(kAllLanes, seen_by_any >> r & 1);
        if (lane_index() == 0) seen_words[2 * warp_index() + r] = lanes_that_see;
      }
    }
    const FragmentLanes<kBucket> lanes(thread_index() % kLanes);
    if (kParts == 1 && args.dkey.data) {
      add_gradient<1>(dkey, ds_a, query_tile(stage()), lanes, 0, work.head_slabs, 0);
    }
    __syncthreads();  // dS of all keys is there
    const FragmentLanes<backward_score_columns(kBucket)> score_lanes(thread_index() % kLanes);
    if constexpr (kParts > 1) {
      uint32_t a[kQueries / 16][4];
      const auto load_own = [&](int col) {
        ONEPASS_UNROLL
        for (int step = 0; step < kQueries / 16; ++step) {
          load_a<false>(a[step], scores, score_lanes, top_key(), col + 16 * step);
        }
      };
      load_own(0);
      if (args.dvalue.data) {
        add_gradient<kParts>(dvalue, a, doutput_tile(stage()), lanes, 0, work.value_slabs, part());
      }
      load_own(kGradients);
      if (args.dkey.data)
        add_gradient<kParts>(dkey, a, query_tile(stage()), lanes, 0, work.head_slabs, part());
    } else if (!is_last && work.stages == 1) {
      load_query(next_of(*turn), 0);
      if (!shares_place) load_doutput(next_of(*turn), 0);
      cp_async_commit();
    }

    if (work.dquery) {
      const int warp = thread_index() / kLanes, slab = warp / (kQueries / 32);
      const int top = warp % (kQueries / 32) * 32;
      const DqueryTurn order(args, work, *block, *turn, kTile);
      ONEPASS_UNROLL
      for (int m = 0; m < 2; m += kRowTiles) {
        float sum[kRowTiles][4][4] = {};
        if (slab < work.head_slabs) {
          ONEPASS_UNROLL
          for (int step = 0; step < kGroups; ++step) {
            uint32_t a[kRowTiles][4];
            ONEPASS_UNROLL
            for (int j = 0; j < kRowTiles; ++j) {
              load_a<true>(a[j], scores, score_lanes, kGradients + top + 16 * (m + j), 16 * step);
            }
            ONEPASS_UNROLL
            for (int n = 0; n < 4; n += 2) {
              uint32_t b[4];
              load_b<false>(b, key, lanes, 16 * step, slab * kSlab + 8 * n);
              if (kTerms && args.mask.data) {
                drop_unseen(b, unseen_of_step<kParts>(seen_words, step, kGroups), 0);
              }
              ONEPASS_UNROLL
              for (int j = 0; j < kRowTiles; ++j) {
                add_product<T>(sum[j][n], sum[j][n + 1], a[j], b);
              }
            }
          }
        }
        if (m == 0) order.wait();
        if (slab >= work.head_slabs) continue;
        const int first = turn->first + top + 16 * m;
        const int64_t unit =
            first_unit(args, block->sequence, block->batch, turn->head) + first / kUnitRows;
        ONEPASS_UNROLL
        for (int r = 0; r < 2 * kRowTiles; ++r) {
          if (first + kUnitRows * r >= block->queries) continue;
          float* const half = work.dquery + ((unit + r) * work.head_slabs + slab) * kUnit;
          ONEPASS_UNROLL
          for (int n = 0; n < 4; n += 2) {
            const auto& left = sum[r / 2][n];
            const auto& right = sum[r / 2][n + 1];
            const int c = r % 2 * 2;
            add_to_half(half + n / 2 * (kUnit / 2), {left[c], left[c + 1], right[c], right[c + 1]});
          }
        }
      }
      order.pass_on();
    }

    if (kTerms && args.dslopes && (is_last || next_of(*turn).head != turn->head)) {
      store_partial(dslope, static_cast<float*>(work.ends.dslopes),
                    slope_partial(args, work, *block, turn->head),
                    scratch + turn->head % 2 * kReduceScratch<1>);
      dslope = 0.0f;
    }
    if (is_last) continue;
    const Turn next = next_of(*turn);
    put_turn(i + 1, next, memory);
    if (work.stages == 1 && (kParts > 1 || shares_place)) {
      __syncthreads();  // what lies in the place of the next queries has been used
      if (kParts > 1) load_query(next, 0);
      load_doutput(next, 0);
      cp_async_commit();
    }
  }

  if (args.dslopes && block->turns == 0 && thread_index() == 0) {
    for (int i = 0; i < block->group_size; ++i) {
      const int head = block->kv_head * block->group_size + i;
      store_global(static_cast<float*>(work.ends.dslopes) + slope_partial(args, work, *block, head),
                   0.0f);
    }
  }
  if (block->first_key >= block->keys) return;
  // Both leave through the place of K, of which a warp stores an eighth.
  const auto store = [&](const Strided& tensor, const float (&sum)[kOwnTiles][4], int64_t cols,
                         float factor) {
    if (!tensor.data) return;
    __syncthreads();
    ONEPASS_UNROLL
    for (int n = 0; n < kOwnTiles; ++n) {
      const int col = (n / 4 * kParts + part()) * kSlab + n % 4 * 8 + lane_index() % 4 * 2;
      ONEPASS_UNROLL
      for (int r = 0; r < 2; ++r) {
        *key.pair(top_key() + lane_index() / 4 + 8 * r, col) =
            narrow_pair<T>(sum[n][2 * r] * factor, sum[n][2 * r + 1] * factor);
      }
    }
    __syncthreads();
    constexpr int kRows = kKeys / kTile.warps;
    store_tile<kRows>(
        key, rows_of<T>(tensor, block->batch, block->kv_head, block->sequence.first_k, cols),
        warp_index() * kRows, block->first_key, block->keys);
  };
  store(args.dkey, dkey, args.head_dim, static_cast<float>(args.scale));
  store(args.dvalue, dvalue, args.value_dim, kTerms ? block->dropout.scale : 1.0f);
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
                    .head_slabs = slabs_of(args.head_dim),
                    .value_slabs = slabs_of(args.value_dim),
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
