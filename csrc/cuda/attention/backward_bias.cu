// The gradient of a bias on tensor cores: dbias = dS, summed over the dimensions that the bias
// broadcasts.
//
// One block per tile of dbias. It recomputes dS of the tile (two products) for all batches, heads
// and queries that share the tile, in order, and sums in registers: no atomics, no buffer as large
// as the scores, the same bits in every run. If all queries share one row of the bias, there are
// few tiles. Then each block takes a part of the queries, and a last kernel sums their partial
// results.
//
// Bytes: Q, K, V and dO for every tile, dbias once. Two blocks share a multiprocessor and hide each
// other's loads.
#include "cuda/attention/backward_bias.h"
#include "cuda/attention/backward_scores.cuh"
#include "cuda/attention/backward_terms.cuh"
#include "cuda/launch.cuh"

namespace onepass::cuda {
namespace {

// ---- how dbias is divided into blocks -----------------------------------------------------------

struct BiasWork {
  BackwardEnds ends;
  ScoreNumbers<float> numbers;
  float* partials;  // (parts, dbias_numel); null if each element is summed by one block
  int64_t batches;  // of dbias: 1 where they are summed
  int64_t heads;
  int64_t parts;  // of the queries: tiles, or the partial sums that the last kernel adds
  int64_t query_tiles;
  int64_t key_tiles;

  BiasWork(const AttentionBackward& args, const AttentionTile& tile)
      : ends{},
        numbers(args),
        partials(nullptr),
        batches(args.dbias.batch_stride != 0 ? args.batch : 1),
        heads(args.dbias.head_stride != 0 ? args.heads : 1),
        query_tiles((args.seq_q + tile.queries - 1) / tile.queries),
        key_tiles((args.seq_k + tile_shift(args) + tile.keys - 1) / tile.keys) {
    parts = query_tiles;
    if (args.dbias.row_stride != 0) return;
    // Enough blocks to keep a device busy. The number depends on the shape alone; there are at most
    // kMaxParts copies of dbias.
    constexpr int64_t kFewBlocks = 256, kMaxParts = 16;
    const int64_t tiles = batches * heads * key_tiles;
    parts = tiles > 0 ? (kFewBlocks + tiles - 1) / tiles : 1;
    if (parts > kMaxParts) parts = kMaxParts;
    if (parts > query_tiles) parts = query_tiles;
  }
  int64_t blocks() const { return batches * heads * parts * key_tiles; }
  bool adds_up(const AttentionBackward& args) const {
    return args.dbias.row_stride == 0 && parts > 1;
  }
};

template <class B>
__device__ __forceinline__ void store_bias(const AttentionBackward& args, const BiasWork& work,
                                           int64_t part, int64_t i, float value) {
  if (work.partials) {
    store_global(work.partials + part * args.dbias_numel + i, value);
  } else {
    store_global(static_cast<B*>(args.dbias.data) + i, onepass::narrow<B>(value));
  }
}

// ---- the kernels --------------------------------------------------------------------------------

// A block's tile of dbias, and the scores that are summed into it: those of `heads` heads of each
// batch, and of `tiles` tiles of queries. In shared memory, because registers are scarce and
// divisions slow.
struct BiasBlock {
  Dropout dropout;
  int first_key;
  int batch;
  int head;
  int part;
  int heads;
  int first_tile;
  int tiles;
  int iterations;

  __device__ __forceinline__ BiasBlock(const AttentionBackward& args, const BiasWork& work,
                                       const AttentionTile& tile)
      : dropout(dropout_of(args)), heads(static_cast<int>(args.heads / work.heads)) {
    int64_t rest = blockIdx.x;
    const auto take = [&](int64_t count) {
      const auto index = static_cast<int>(rest % count);
      rest /= count;
      return index;
    };
    first_key = take(work.key_tiles) * tile.keys - tile_shift(args);
    part = take(work.parts);
    head = take(work.heads);
    batch = static_cast<int>(rest);
    const bool sums_rows = args.dbias.row_stride == 0;
    const auto begin = [&](int64_t index) {
      return static_cast<int>(sums_rows ? work.query_tiles * index / work.parts : index);
    };
    first_tile = begin(part);
    tiles = begin(part + 1) - first_tile;
    iterations = static_cast<int>(args.batch / work.batches) * heads * tiles;
  }
};

// One tile of queries of a head, whose dS the block adds to its sums. Also in shared memory.
struct BiasIteration {
  Sequence sequence;
  int batch;
  int head;
  int first;
};

template <class T, int kBucket>
__global__ void __launch_bounds__(bias_tile(kBucket).threads(), 2)
    attention_dbias_kernel(const AttentionBackward __grid_constant__ args,
                           const BiasWork __grid_constant__ work) {
  constexpr AttentionTile kTile = bias_tile(kBucket);
  constexpr int kQueries = kTile.queries, kKeys = kTile.keys, kThreads = kTile.threads();
  constexpr int kGroups = kKeys / 16, kParts = kTile.warps / kGroups;
  constexpr int kStrips = kQueries / kParts / kBiasStrip, kTiles = kBiasStrip / 8;
  using RowTile = Tile<T, kBucket>;
  SharedMemory shared;
  const RowTile key = RowTile::take(shared, kKeys), value = RowTile::take(shared, kKeys);
  const RowTile query = RowTile::take(shared, kQueries), doutput = RowTile::take(shared, kQueries);
  const QueryTile<kQueries> numbers = {shared.take<float>(kQueryNumbers * kQueries)};
  auto* const block = shared.take<BiasBlock>(1);
  auto* const iteration = shared.take<BiasIteration>(1);
  if (thread_index() == 0) *block = BiasBlock(args, work, kTile);
  __syncthreads();

  // The first key and the first query of the warp. Each use reads the thread's index again, so that
  // no register is held for it.
  const auto top = [] { return thread_index() / kLanes % kGroups * 16; };
  const auto left = [] { return thread_index() / kLanes / kGroups * (kQueries / kParts); };

  float sum[kStrips * kTiles][4] = {};
  ONEPASS_ROLL
  for (int i = 0; i < block->iterations; ++i) {
    BiasIteration next{};
    next.batch = block->batch + i / block->tiles / block->heads;
    next.head = block->head + i / block->tiles % block->heads;
    next.first = (block->first_tile + i % block->tiles) * kQueries;
    next.sequence = sequence_of(args, next.batch);
    const auto queries = static_cast<int>(next.sequence.queries);
    if (next.first >= queries || block->first_key >= next.sequence.keys) continue;
    const int last = next.first + kQueries < queries ? next.first + kQueries : queries;
    const SeenKeys seen = seen_keys(args, next.sequence, next.first, last);
    if (seen.first >= block->first_key + kKeys || seen.last <= block->first_key) continue;
    __syncthreads();  // all threads are done with the tiles of the last iteration
    const auto load_keys = [&](const RowTile& target, const Strided& tensor, int64_t cols) {
      const auto kv_head = next.head / static_cast<int>(args.heads / args.kv_heads);
      const auto from = rows_of<const T>(tensor, next.batch, kv_head, next.sequence.first_k, cols);
      load_tile<kKeys, kThreads>(target, from, block->first_key, static_cast<int>(seen.first),
                                 static_cast<int>(seen.last));
    };
    const auto load_queries = [&](const RowTile& target, const Strided& tensor, int64_t cols) {
      const auto from =
          rows_of<const T>(tensor, next.batch, next.head, next.sequence.first_q, cols);
      load_tile<kQueries, kThreads>(target, from, next.first, next.first, queries);
    };
    load_keys(key, args.key, args.head_dim), load_keys(value, args.value, args.value_dim);
    load_queries(query, args.query, args.head_dim);
    load_queries(doutput, args.doutput, args.value_dim);
    cp_async_commit();
    if (const int q = thread_index(); q < kQueries) {
      const RowStatistics statistics = load_row_statistics(args, work.ends, next.sequence,
                                                           next.batch, next.head, next.first + q);
      numbers.put(q, query_numbers<true>(args, next.sequence, statistics, next.first + q,
                                         block->first_key, kKeys));
    }
    if (thread_index() == 0) *iteration = next;
    cp_async_wait<0>();
    __syncthreads();

    ONEPASS_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) {
      const auto column = [&] { return left() + strip * kBiasStrip; };
      const auto place = [&] {
        return Strip<kQueries>{numbers, thread_index() % kLanes,     column(),
                               top(),   iteration->first + column(), block->first_key + top()};
      };
      const auto terms = [&] {
        return HeadTerms(args, iteration->sequence, iteration->batch, iteration->head);
      };
      uint32_t kept = ~0u;
      if (args.seed) {
        kept = draw_transposed<kTiles>(
            block->dropout, args, random_head(args, iteration->batch, iteration->head), place());
      }
      const StripTerms<kTiles> from_memory(args, terms(), place());
      float products[1][kTiles][4] = {}, gradients[1][kTiles][4] = {}, derivative[kTiles][4];
      auto &p = products[0], &ds = gradients[0];
      const FragmentLanes<kBucket> lanes(thread_index() % kLanes);
      const int row = top();
      add_scores<T>(products, query, lanes, column(), slabs_of(args.head_dim),
                    [&](uint32_t (&a)[4], int, int k) { load_a<false>(a, key, lanes, row, k); });
      const uint32_t counts = from_memory.counts(args, thread_index() % kLanes);
      add_terms(p, derivative, args, work.numbers, terms(), place());
      from_memory.add_bias(p, args);
      term_probabilities(p, counts, place());
      add_scores<T>(gradients, doutput, lanes, column(), slabs_of(args.value_dim),
                    [&](uint32_t (&a)[4], int, int k) { load_a<false>(a, value, lanes, row, k); });
      term_gradients(p, ds, counts, kept, block->dropout.scale, place());
      ONEPASS_UNROLL
      for (int j = 0; j < 4 * kTiles; ++j) sum[strip * kTiles + j / 4][j % 4] += ds[j / 4][j % 4];
    }
  }

  const bool sums_rows = args.dbias.row_stride == 0;
  const int64_t base =
      block->batch * args.dbias.batch_stride + block->head * args.dbias.head_stride;
  const int t = lane_index() % 4;
  const auto key_of = [&](int r) { return block->first_key + top() + lane_index() / 4 + 8 * r; };
  const auto has = [&](int j) { return 0 <= j && j < args.seq_k; };
  visit_dtype_up_to_float32(args.bias_dtype, [&]<class B>() {
    if (!sums_rows) {
      ONEPASS_UNROLL
      for (int j = 0; j < 4 * kStrips * kTiles; ++j) {
        const int64_t i = block->part * kQueries + left() + j / 4 * 8 + 2 * t + j % 2;
        if (i >= args.seq_q || !has(key_of(j % 4 / 2))) continue;
        store_bias<B>(args, work, 0, base + i * args.dbias.row_stride + key_of(j % 4 / 2),
                      sum[j / 4][j % 4]);
      }
      return;
    }
    // The queries of a key are spread over four lanes, and over two warps if these share keys.
    float of_key[2] = {};
    ONEPASS_UNROLL
    for (int j = 0; j < 4 * kStrips * kTiles; ++j) of_key[j % 4 / 2] += sum[j / 4][j % 4];
    ONEPASS_UNROLL
    for (int r = 0; r < 2; ++r) {
      of_key[r] += __shfl_xor_sync(kAllLanes, of_key[r], 1);
      of_key[r] += __shfl_xor_sync(kAllLanes, of_key[r], 2);
    }
    if constexpr (kParts > 1) {
      __syncthreads();  // all threads are done with the numbers of the queries
      float* const other = numbers.data + top() + lane_index() / 4;
      if (left() > 0 && t == 0) other[0] = of_key[0], other[8] = of_key[1];
      __syncthreads();
      if (left() > 0) return;
      of_key[0] += other[0], of_key[1] += other[8];
    }
    ONEPASS_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (t == 0 && has(key_of(r))) {
        store_bias<B>(args, work, block->part, base + key_of(r), of_key[r]);
      }
    }
  });
}

constexpr int kSumThreads = 256;

__global__ void __launch_bounds__(kSumThreads)
    attention_dbias_sums_kernel(const AttentionBackward args, const float* partials,
                                const int64_t parts) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  if (i >= args.dbias_numel) return;
  float sum = 0.0f;
  for (int64_t part = 0; part < parts; ++part) {
    sum += load_global(partials + part * args.dbias_numel + i);
  }
  visit_dtype_up_to_float32(args.bias_dtype, [&]<class B>() {
    store_global(static_cast<B*>(args.dbias.data) + i, onepass::narrow<B>(sum));
  });
}

}  // namespace

int64_t dbias_bytes(const AttentionBackward& args) {
  const BiasWork work(args, bias_tile(bucket_of(args)));
  return work.adds_up(args) ? (work.parts * args.dbias_numel + 3) / 4 * 16 : 0;
}

void launch_dbias(const AttentionBackward& args, const BackwardEnds& ends, void* workspace,
                  void* stream) {
  visit_bucket(args, [&]<class T, int kBucket>() {
    constexpr AttentionTile kTile = bias_tile(kBucket);
    BiasWork work(args, kTile);
    work.ends = ends;
    if (work.adds_up(args)) work.partials = static_cast<float*>(workspace);
    if (work.blocks() == 0) return;
    launch<attention_dbias_kernel<T, kBucket>>({.blocks = work.blocks(),
                                                .threads = kTile.threads(),
                                                .shared_bytes = bias_shared_bytes(kBucket)},
                                               stream, args, work);
    if (!work.partials) return;
    launch<attention_dbias_sums_kernel>(
        {.blocks = (args.dbias_numel + kSumThreads - 1) / kSumThreads, .threads = kSumThreads},
        stream, args, static_cast<const float*>(work.partials), work.parts);
  });
}

}  // namespace onepass::cuda
