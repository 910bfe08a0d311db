// Attention of few queries against a KV cache on CUDA.
//
//   output = softmax(terms(scale * query key^T)) value,   lse = log(sum(exp(score)))
//
// The limit is the time to read keys and values. So all query heads that share a kv head, times a
// few queries, form one tile of 16 rows (fewer if rows are very long) that reads each key and value
// once; and a sequence is divided into chunks, so that a single sequence keeps a whole device busy:
// Dao, Haziza, Massa, Sizov, Flash-Decoding, 2023. decode.h says how, and why nothing but a
// sequence's own length can change its result by a bit.
//
//   attention_decode_append_kernel   rotates the new keys and writes the new rows, if there are
//                                    many or a kv head has several tiles. Otherwise each chunk is
//                                    read by a single block, which writes the chunk's new rows.
//   attention_decode_kernel          a block takes chunks of a tile; its warps take turns of 16
//                                    keys (8 with multiply-adds), each with its own running
//                                    softmax, and join their states at the end of the chunk.
//   attention_decode_join_kernel     joins the states of chunks or runs, if there are several. A
//                                    launch, and not work for the last block of a tile: finding the
//                                    last block takes tickets, which a launch would have to zero
//                                    too, and one block would read all that many blocks read here.
//
// Bytes: K and V once per tile, Q once per block, the output once; and states (decode.h), which are
// read soon after they are written and stay in the L2. By its data sheet an H100 reads 3.35 TB/s
// with 132 multiprocessors, 25 bytes per nanosecond each. With a latency of a microsecond, 25 KB
// must be in flight per multiprocessor all the time. A block has queues of 64 KB, all of which are
// in flight except the part that its four warps are using (DecodeBlock::go_through), and two or
// three blocks fit a multiprocessor. For 16 keys of 128 columns (8 KB, 330 ns at that speed) a warp
// issues 32 tensor core products and some hundreds of other instructions. Done when it reads as
// fast as a copy does; no device has timed it yet.
#include "core/visit.h"
#include "cuda/attention/attention.h"
#include "cuda/attention/decode.h"
#include "cuda/attention/decode_rows.cuh"
#include "cuda/attention/decode_states.cuh"
#include "cuda/attention/decode_warp.cuh"
#include "cuda/backend.h"
#include "cuda/launch.cuh"

namespace onepass::cuda {
namespace {

// ---- a block ------------------------------------------------------------------------------------

// The factors with which a row's values of the warps, of the run and of earlier runs are added.
template <int kWarps>
struct RowScales {
  float of_warp[kWarps];
  Joined run;
  Joined all;
  float normalise;
};

// Facts that all threads of a block use. In shared memory, because registers are needed for sums.
template <class T>
struct BlockFacts {
  RowTile tile;
  CachedKeys all;
  Pieces pieces;
  CacheRows<const T> keys;
  CacheRows<const T> values;

  __device__ __forceinline__ BlockFacts(const AttentionDecode& args, const DecodeShape& shape,
                                        unsigned tile_index)
      : tile(args, shape, tile_index),
        all(keys_within_cache(args, tile.batch)),
        pieces(tile.pieces(args, shape, all)),
        keys(args, args.key, tile.batch, tile.kv_head, args.head_dim),
        values(args, args.value, tile.batch, tile.kv_head, args.value_dim) {}
};

// Where a chunk lies in its run and its piece.
struct ChunkAt {
  bool opens_run;
  bool closes_run;
  bool in_first_run;
  bool is_last;
  bool is_all;  // the piece is the only one
};

template <class Tile>
class DecodeBlock {
  using T = typename Tile::Element;
  using Facts = BlockFacts<T>;
  using Scales = RowScales<Tile::kWarps>;
  static constexpr int kKeysPerIteration = Tile::kWarps * Tile::kKeys;  // keys
  static constexpr int kThreads = Tile::kWarps * kLanes;
  static constexpr int kRowValues = Tile::kDims / 4;
  static_assert(kChunkUnit % kKeysPerIteration == 0);
  static_assert(Tile::kWarps * Tile::kRows * Tile::kDims * 4 <= kQueueBytes);

 public:
  static constexpr int shared_bytes(bool has_runs) {
    const int row = Tile::kWarps * static_cast<int>(sizeof(State)) + sizeof(Scales);
    const int run_row = Tile::kDims * 4 + static_cast<int>(sizeof(State));
    return kQueueBytes + Tile::kQueryBytes + Tile::kWarps * Tile::kWeightFloats * 4 +
           Tile::kRows * (row + (has_runs ? run_row : 0)) + static_cast<int>(sizeof(Facts)) + 64;
  }

  __device__ __forceinline__ DecodeBlock(const AttentionDecode& args,
                                         const ScoreNumbers<float>& numbers,
                                         const DecodeShape& shape, const StoredStates& stored)
      : args_(args), numbers_(numbers), shape_(shape), stored_(stored) {
    SharedMemory shared;
    queue_ = shared.take<Words>(kQueueBytes / 16);
    queries_ = shared.take<unsigned char>(Tile::kQueryBytes);
    facts_ = shared.take<Facts>(1);
    warp_states_ = shared.take<State>(Tile::kWarps * Tile::kRows);
    scales_ = shared.take<Scales>(Tile::kRows);
    weights_ = shared.take<float>(Tile::kWarps * Tile::kWeightFloats);
    if (shape.per_piece == 1) return;
    run_states_ = shared.take<State>(Tile::kRows);
    run_values_ = shared.take<Values>(Tile::kRows * kRowValues);
  }

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) *facts_ = Facts(args_, shape_, tile_index());
    __syncthreads();
    const auto pieces = static_cast<int>(facts_->pieces.count());
    bool has_queries = false;
    const auto splits = static_cast<int>(shape_.splits);
    const auto split = static_cast<int>(blockIdx.x / static_cast<unsigned>(shape_.tiles));
    for (int p = split; p < pieces; p += splits) {
      const auto first = static_cast<int>(facts_->pieces.first(p));
      const auto last = static_cast<int>(facts_->pieces.last(p));
      for (int chunk = first; chunk < last; ++chunk) {
        if (has_queries) __syncthreads();  // before the results of the last chunk are overwritten
        attend(chunk, has_queries);
        has_queries = true;
        constexpr int kRun = kRunChunks;
        const ChunkAt at = {.opens_run = chunk == first || chunk % kRun == 0,
                            .closes_run = chunk + 1 == last || (chunk + 1) % kRun == 0,
                            .in_first_run = chunk / kRun == first / kRun,
                            .is_last = chunk + 1 == last,
                            .is_all = pieces == 1};
        if (at.is_last && p + splits >= pieces) start_kernel_after();
        finish_statistics(at, p);
        __syncthreads();
        finish_values(at, p);
      }
    }
  }

 private:
  __device__ __forceinline__ unsigned tile_index() const {
    return blockIdx.x % static_cast<unsigned>(shape_.tiles);
  }

  // ---- a chunk, by warps ------------------------------------------------------------------------

  __device__ __forceinline__ void attend(int chunk, bool has_queries) {
    if (args_.new_rows > 0 && shape_.writes_own) write_new(chunk);
    WarpState<Tile> state;
    go_through(state, chunk, has_queries);
    __syncthreads();  // the values reuse the memory of the queues
    const int warp = warp_index();
    state.put(warp_states_ + warp * Tile::kRows,
              reinterpret_cast<Values*>(queue_) + warp * Tile::kRows * kRowValues,
              facts_->tile.rows, static_cast<int>(args_.value_dim));
    __syncthreads();
  }

  // Writes the new rows of a chunk. The first and the last chunk also write the new rows that lie
  // outside all chunks.
  __device__ __forceinline__ void write_new(int chunk) {
    const Chunks& chunks = facts_->pieces.chunks;
    const CachedKeys& all = facts_->all;
    const int64_t first = all.first + chunk * chunks.keys, last = first + chunks.keys;
    const int64_t begin = chunk == chunks.first || all.old > first ? all.old : first;
    const int64_t end = chunk + 1 == chunks.last || all.last < last ? all.last : last;
    if (begin >= end) return;
    write_new_rows<T>(args_, all, facts_->tile.batch, facts_->tile.kv_head, begin, end);
    __syncthreads();
  }

  // Goes through the keys of a chunk that any row sees; each warp takes every kWarps-th group of
  // kKeys keys.
  __device__ __forceinline__ void go_through(WarpState<Tile>& state, int chunk, bool has_queries) {
    constexpr int kStages = cuda::kStages<Tile>, kPieces = Tile::kPieces;
    const RowTile& tile = facts_->tile;
    const CachedKeys& all = facts_->all;
    const auto count = static_cast<int>(facts_->pieces.chunks.keys);
    const auto first_key = static_cast<int>(all.first + chunk * int64_t{count});
    const KeysThere seen = {
        keys_within(cached_keys_of(args_, all, tile.query(shape_, 0)).first - first_key, count),
        keys_within(cached_keys_of(args_, all, tile.query(shape_, tile.rows - 1)).last - first_key,
                    count)};
    Words* const own = queue_ + warp_index() * (kQueueBytes / 16 / Tile::kWarps) + lane_index();
    const auto queue = [&](int iteration, int which) {
      return own + (iteration % kStages * 2 + which) * kPieces * kLanes;
    };
    // The seen keys, counted from `key`.
    const auto there = [&](int key) { return KeysThere{seen.first - key, seen.last - key}; };
    const auto key_of = [&](int iteration) {
      return iteration * kKeysPerIteration + warp_index() * Tile::kKeys;
    };
    const int first_iteration = seen.first / kKeysPerIteration;
    const int last_iteration = seen.first < seen.last
                                   ? (seen.last + kKeysPerIteration - 1) / kKeysPerIteration
                                   : first_iteration;
    const auto load_keys = [&](int iteration) {
      const int key = key_of(iteration);
      if (iteration < last_iteration) {
        const CacheRows<const T> rows = facts_->keys;  // one read of shared memory
        Tile::load_keys(queue(iteration, 0), rows, first_key + key, there(key));
      }
      cp_async_commit();
    };
    const auto load_values = [&](int iteration) {
      const int key = key_of(iteration);
      if (iteration < last_iteration) {
        const CacheRows<const T> rows = facts_->values;
        Tile::load_values(queue(iteration, 1), rows, first_key + key, there(key));
      }
      cp_async_commit();
    };
    ONEPASS_ROLL
    for (int i = 0; i < kStages; ++i) {
      load_keys(first_iteration + i);
      load_values(first_iteration + i);
    }
    if (!has_queries) {
      put_queries();
      __syncthreads();
    }
    const OwnRows<Tile> rows(args_, shape_, tile, all, first_key, count);
    ONEPASS_ROLL
    for (int iteration = first_iteration; iteration < last_iteration; ++iteration) {
      // The group that is waited for is older than the last 2 kStages - 1.
      cp_async_wait<2 * kStages - 1>();
      float score[Tile::kOwnRows][Tile::kOwnScores], shrink[Tile::kOwnRows];
      Tile::multiply(score, queries_, queue(iteration, 0), static_cast<int>(args_.head_dim),
                     tile.rows);
      load_keys(iteration + kStages);
      add_terms(score, args_, numbers_, rows, key_of(iteration));
      state.weigh(score, shrink);
      cp_async_wait<2 * kStages - 1>();
      state.tile.add(score, shrink, queue(iteration, 1), static_cast<int>(args_.value_dim),
                     tile.rows, weights_ + warp_index() * Tile::kWeightFloats);
      load_values(iteration + kStages);
    }
    cp_async_wait<0>();
  }

  __device__ __forceinline__ void put_queries() {
    const RowTile& tile = facts_->tile;
    constexpr int kPacks = Tile::kDims / kPack;
    for (int i = static_cast<int>(threadIdx.x); i < Tile::kRows * kPacks; i += kThreads) {
      const int row = i / kPacks, col = i % kPacks * kPack;
      T elements[kPack] = {};
      if (row < tile.rows) {
        const int64_t query = tile.query(shape_, row);
        const T* const from =
            static_cast<const T*>(args_.query.data) + tile.batch * args_.query.batch_stride +
            tile.head(shape_, row) * args_.query.head_stride + query * args_.query.row_stride;
        const int64_t position = facts_->all.old + (args_.rotary_by_row ? query : 0);
        ONEPASS_UNROLL
        for (int e = 0; e < kPack; ++e) {
          if (col + e < args_.head_dim) elements[e] = rotated(args_, from, position, col + e);
        }
      }
      Tile::put_query(queries_, row, col, elements);
    }
  }

  // ---- the end of a chunk, by rows --------------------------------------------------------------

  // One thread per row: joins the states of the warps into the chunk's, that into the run's, and
  // that into the state of all runs. Keeps the factors of their values for finish_values().
  __device__ __forceinline__ void finish_statistics(const ChunkAt& at, int piece) {
    const auto row = static_cast<int>(threadIdx.x);
    if (row >= facts_->tile.rows) return;
    Scales scales{};
    State state;
    ONEPASS_UNROLL
    for (int w = 0; w < Tile::kWarps; ++w) {
      state.maximum = fmaxf(state.maximum, warp_states_[w * Tile::kRows + row].maximum);
    }
    const float low = subtrahend(state.maximum);
    ONEPASS_UNROLL
    for (int w = 0; w < Tile::kWarps; ++w) {
      const State& of_warp = warp_states_[w * Tile::kRows + row];
      scales.of_warp[w] = std::exp(of_warp.maximum - low);
      state.sum = multiply_add(scales.of_warp[w], of_warp.sum, state.sum);
    }
    if (!at.opens_run) {
      State run = run_states_[row];
      scales.run = join(run, state);
      state = run;
    }
    if (!at.closes_run) {
      run_states_[row] = state;
    } else {
      State* const stored = stored_.states + StoredStates::index(shape_, tile_index(), piece, row);
      if (!at.in_first_run) {
        State all = load_global(stored);
        scales.all = join(all, state);
        state = all;
      }
      if (at.is_last && at.is_all) {
        const int64_t head = facts_->tile.head(shape_, row);
        const Finished finished = finish(args_, head, state);
        store_lse(args_, facts_->tile.batch, head, facts_->tile.query(shape_, row), finished.lse);
        scales.normalise = finished.normalise;
      } else {
        store_global(stored, state);
      }
    }
    scales_[row] = scales;
  }

  // Joins the values in the same way, four columns at a time. A thread reads back only values of
  // earlier chunks that it wrote itself.
  __device__ __forceinline__ void finish_values(const ChunkAt& at, int piece) {
    const auto cols = static_cast<int>(shape_.value_cols / 4);
    for (int i = static_cast<int>(threadIdx.x); i < facts_->tile.rows * cols; i += kThreads) {
      const int row = i / cols, col = i % cols;
      const Scales& scales = scales_[row];
      Values values{};
      ONEPASS_UNROLL
      for (int w = 0; w < Tile::kWarps; ++w) {
        const Values of_warp =  // in one load: loads of single elements would conflict in banks
            reinterpret_cast<const Values*>(queue_)[(w * Tile::kRows + row) * kRowValues + col];
        ONEPASS_UNROLL
        for (int e = 0; e < 4; ++e) {
          values.of[e] = multiply_add(scales.of_warp[w], of_warp.of[e], values.of[e]);
        }
      }
      if (!at.opens_run) values = join(scales.run, run_values_[row * kRowValues + col], values);
      if (!at.closes_run) {
        run_values_[row * kRowValues + col] = values;
        continue;
      }
      Values* const stored =
          stored_.values + StoredStates::index(shape_, tile_index(), piece, row) * cols + col;
      if (!at.in_first_run) values = join(scales.all, load_global(stored), values);
      if (at.is_last && at.is_all) {
        store_output<T>(args_, facts_->tile.batch, facts_->tile.head(shape_, row),
                        facts_->tile.query(shape_, row), 4 * col, values, scales.normalise);
      } else {
        store_global(stored, values);
      }
    }
  }

  const AttentionDecode& args_;
  const ScoreNumbers<float>& numbers_;
  const DecodeShape& shape_;
  const StoredStates& stored_;
  Words* queue_;   // (kWarps, stages, key or value, pieces, lanes); then the warps' values
  void* queries_;  // (kRows, kDims) in the layout of the tile
  Facts* facts_;
  State* warp_states_;  // (kWarps, kRows)
  Scales* scales_;      // (kRows,)
  float* weights_;      // of each warp
  State* run_states_;   // (kRows,)
  Values* run_values_;  // (kRows, kDims)
};

// Because the host converts `numbers`, instances have up to 1.2 % fewer instructions. At 256
// columns ptxas then uses 248 registers instead of 242 for sm_90 (tests/install/nvcc.py): the same
// allocation, because registers are allocated in eights.
template <class Tile>
__global__ void __launch_bounds__(Tile::kWarps* kLanes, Tile::kBlocks)
    attention_decode_kernel(const AttentionDecode __grid_constant__ args,
                            const ScoreNumbers<float> __grid_constant__ numbers,
                            const DecodeShape __grid_constant__ shape,
                            const StoredStates __grid_constant__ stored) {
  DecodeBlock<Tile>(args, numbers, shape, stored).run();
}

// ---- the kernels before and after ---------------------------------------------------------------

constexpr int kAppendThreads = 256;
constexpr int64_t kAppendRows = 16;

// A block per kAppendRows new rows of a (batch, kv head).
__global__ void __launch_bounds__(kAppendThreads)
    attention_decode_append_kernel(const AttentionDecode __grid_constant__ args) {
  const int64_t blocks = ceil_div(args.new_rows, kAppendRows);
  const int64_t batch = blockIdx.x / blocks / args.kv_heads;
  const int64_t kv_head = blockIdx.x / blocks % args.kv_heads;
  const CachedKeys keys = keys_within_cache(args, batch);
  const int64_t begin = keys.old + blockIdx.x % blocks * kAppendRows;
  const int64_t end = begin + kAppendRows < keys.last ? begin + kAppendRows : keys.last;
  visit_dtype_up_to_float32(
      args.dtype, [&]<class T>() { write_new_rows<T>(args, keys, batch, kv_head, begin, end); });
}

constexpr int kJoinWarps = 8;
constexpr int kJoinAhead = 8;  // states whose values a lane loads before it uses the first
static_assert(kRunChunks <= kLanes && kMostRuns <= kLanes);

int64_t join_bytes(const DecodeShape& shape) {
  return kMostRuns * (shape.value_cols * 4 + static_cast<int64_t>(sizeof(State))) + 16;
}

// A block per query row: a warp joins the states of a run's pieces, then all warps those of the
// runs.
__global__ void __launch_bounds__(kJoinWarps* kLanes)
    attention_decode_join_kernel(const AttentionDecode __grid_constant__ args,
                                 const DecodeShape __grid_constant__ shape,
                                 const StoredStates __grid_constant__ stored) {
  wait_for_kernel_before();
  const unsigned tile_index = blockIdx.x / static_cast<unsigned>(shape.tile_rows);
  const auto row = static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.tile_rows));
  const RowTile tile(args, shape, tile_index);
  if (row >= tile.rows) return;
  const Pieces pieces = tile.pieces(args, shape, keys_within_cache(args, tile.batch));
  if (pieces.count() == 1) return;
  const auto cols = static_cast<int>(shape.value_cols / 4);
  SharedMemory shared;
  State* const run_states = shared.take<State>(kMostRuns);
  Values* const run_values = shared.take<Values>(kMostRuns * cols);

  // The pieces of a run are its chunks, or the run itself.
  const Pieces of_runs = {pieces.chunks, kRunChunks};
  const auto runs = static_cast<int>(of_runs.count());
  for (int run = warp_index(); run < runs; run += kJoinWarps) {
    const bool is_piece = shape.per_piece > 1;
    const int64_t first = is_piece ? run : of_runs.first(run) - pieces.chunks.first;
    const auto count = is_piece ? 1 : static_cast<int>(of_runs.last(run) - of_runs.first(run));
    const int64_t index = StoredStates::index(shape, tile_index, first, row);
    const auto of_piece = [&](int i) { return index + i * shape.tile_rows; };
    State own;
    if (lane_index() < count) own = load_global(stored.states + of_piece(lane_index()));
    const WarpJoin join(own, count);
    if (lane_index() == 0) run_states[run] = join.state;
    for (int first_col = 0; first_col < cols; first_col += kLanes) {
      const int col = first_col + lane_index();
      Values values{};
      for (int base = 0; base < count; base += kJoinAhead) {
        Values ahead[kJoinAhead] = {};
        ONEPASS_UNROLL
        for (int i = 0; i < kJoinAhead; ++i) {
          if (base + i >= count || col >= cols) continue;
          ahead[i] = load_global(stored.values + of_piece(base + i) * cols + col);
        }
        ONEPASS_UNROLL
        for (int i = 0; i < kJoinAhead; ++i) {
          if (base + i < count) values = join.add(values, ahead[i], base + i);
        }
      }
      if (col < cols) run_values[run * cols + col] = values;
    }
  }
  __syncthreads();
  if (warp_index() * kLanes >= cols) return;  // only whole warps leave
  State own;
  if (lane_index() < runs) own = run_states[lane_index()];
  const WarpJoin join(own, runs);
  const auto col = static_cast<int>(threadIdx.x);
  Values values{};
  for (int run = 0; run < runs; ++run) {
    const Values of_run = col < cols ? run_values[run * cols + col] : Values{};
    values = join.add(values, of_run, run);
  }
  if (col >= cols) return;
  const int64_t head = tile.head(shape, row), query = tile.query(shape, row);
  const Finished finished = finish(args, head, join.state);
  if (col == 0) store_lse(args, tile.batch, head, query, finished.lse);
  visit_dtype_up_to_float32(args.dtype, [&]<class T>() {
    store_output<T>(args, tile.batch, head, query, 4 * col, values, finished.normalise);
  });
}

// ---- plan and run -------------------------------------------------------------------------------

// Calls f<Tile>() with the tile of the call.
template <class F>
decltype(auto) visit_tile(const AttentionDecode& args, F&& f) {
  const int64_t dims = std::max(args.head_dim, args.value_dim);
  if (args.dtype == DType::kFloat32) {
    if (dims <= 128) return f.template operator()<PlainTile<float, 128>>();
    if (dims <= 256) return f.template operator()<PlainTile<float, 256>>();
    return f.template operator()<PlainTile<float, 512>>();
  }
  return visit_bool(args.dtype == DType::kBFloat16, [&]<bool kBFloat16>() -> decltype(auto) {
    using T = std::conditional_t<kBFloat16, BFloat16, Float16>;
    if (dims <= 64) return f.template operator()<TensorTile<T, 64>>();
    if (dims <= 128) return f.template operator()<TensorTile<T, 128>>();
    if (dims <= kMaxTiledDim) return f.template operator()<TensorTile<T, 256>>();
    return f.template operator()<PlainTile<T, 512>>();
  });
}

DecodeShape shape_of(const AttentionDecode& args) {
  return visit_tile(args, [&]<class Tile>() { return decode_shape(args, Tile::kRows); });
}

int64_t state_bytes(const DecodeShape& shape) {
  return ceil_div(shape.states() * static_cast<int64_t>(sizeof(State)), 16) * 16;
}

bool appends_first(const AttentionDecode& args, const DecodeShape& shape) {
  return args.new_rows > 0 && !shape.writes_own;
}

Plan plan_decode(const AttentionDecode& args, const Machine&, DecodeShape& shape) {
  shape = shape_of(args);
  Plan plan{};
  plan.workspace_bytes = state_bytes(shape) + shape.states() * shape.value_cols * 4;
  plan.kernel_name = shape.rows > 0 ? "attention_decode_kernel" : "attention_decode_append_kernel";
  plan.rows_per_tile = shape.tile_rows;
  plan.splits = shape.tiles * shape.splits;
  plan.reason = is_tiled(args)                  ? "16 query rows on tensor cores"
                : args.dtype == DType::kFloat32 ? "float32 multiply-adds"
                                                : "rows beyond 256 columns: multiply-adds";
  return plan;
}

void run_decode(const AttentionDecode& args, const Plan&, const DecodeShape& shape, void* workspace,
                const Context& context) {
  if (appends_first(args, shape)) {
    launch<attention_decode_append_kernel>(
        {.blocks = args.batch * args.kv_heads * ceil_div(args.new_rows, kAppendRows),
         .threads = kAppendThreads},
        context.stream, args);
  }
  if (shape.rows == 0) return;
  const StoredStates stored = {
      static_cast<State*>(workspace),
      reinterpret_cast<Values*>(static_cast<char*>(workspace) + state_bytes(shape))};
  visit_tile(args, [&]<class Tile>() {
    const bool has_runs = shape.per_piece > 1;
    launch<attention_decode_kernel<Tile>>(
        {.blocks = shape.tiles * shape.splits,
         .threads = Tile::kWarps * kLanes,
         .shared_bytes = static_cast<size_t>(DecodeBlock<Tile>::shared_bytes(has_runs))},
        context.stream, args, ScoreNumbers<float>(args), shape, stored);
  });
  if (shape.slots <= 1) return;
  launch<attention_decode_join_kernel, kFollows>(
      {.blocks = shape.tiles * shape.tile_rows,
       .threads = kJoinWarps * kLanes,
       .shared_bytes = static_cast<size_t>(join_bytes(shape))},
      context.stream, args, shape, stored);
}

}  // namespace

Operator<AttentionDecode> attention_decode() {
  return operator_of<AttentionDecode, DecodeShape, plan_decode, run_decode>();
}

}  // namespace onepass::cuda
