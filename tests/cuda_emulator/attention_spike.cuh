// A spike that does not ship: attention forward and backward on mma, small and plain, to prove
// before the schemas are final that they say all a kernel needs and that the Philox layout costs
// a tile kernel nothing twice.
//
//   score = scale * query key^T + bias, masked    P = softmax(score)    output = drop(P) value
//   delta = sum(doutput * output) - dlse    dP = drop(doutput value^T)    dscore = P * (dP - delta)
//   dvalue = drop(P)^T doutput    dkey = scale * dscore^T query    dquery = scale * dscore key
//
// What it confirmed:
//   - The C fragment of a score tile is the A fragment of the next product as it lies.
//   - A Philox call has the fates of 8 keys of one query: one row of an n8 tile, and its word t is
//     the two keys of lane t of a quad. With four n8 tiles a lane makes the call of one, and four
//     shuffles hand out the words: no call is made twice, in either direction.
//   - The gradient of the LSE is one subtraction from delta.
//   - Any key_offset works at that price if tiles begin at multiples of 8 of the whole sequence, so
//     that the first tile of a call may begin before its first key.
//   - One interval of keys per query row says causal, window, alignment, offsets and odd ends.
//   - Counters need the head count of the whole model beside head_offset: see total_heads.
//
// What a kernel that ships must do differently: load Q once for several key tiles of the backward
// (here it is read again for each), spread the backward over more blocks than kv_heads and order
// the sums of dquery and dbias among them, overlap its loads, store through shared memory in 16
// bytes, peel the tiles that need no mask, read rows that are not 16-byte aligned, sum dbias over
// broadcast heads and queries. Where it computes the scores transposed, as on sm_90, the fates of a
// lane's elements lie in other words: a call then spans eight quads.
#pragma once

#include "core/philox.h"
#include "cuda/ptx.cuh"
#include "cuda/reduce.cuh"
#include "cuda_emulator/attention_spike.h"

namespace onepass::cuda::attention_spike {

// ---- tiles --------------------------------------------------------------------------------------

inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * kLanes;
inline constexpr int kWarpRows = 16;  // the height of an mma
inline constexpr int kQueries = kWarps * kWarpRows;
template <int kHeadDim>
inline constexpr int kForwardKeys = kHeadDim == 32 ? 64 : 32;
inline constexpr int kBackwardKeys = kWarps * kWarpRows;  // a warp has 16 keys of dkey and dvalue
inline constexpr int kCallKeys = 8;                       // that one Philox call has the fates of
inline constexpr float kLog2e = 1.44269504088896340736f;

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kLanes; }
__device__ __forceinline__ int warp_row() {
  return static_cast<int>(threadIdx.x) / kLanes * kWarpRows;
}

struct Range {
  int begin;
  int end;
  __device__ __forceinline__ bool has(int i) const { return begin <= i && i < end; }
  __device__ __forceinline__ bool meets(Range other) const {
    return begin < end && begin < other.end && other.begin < end;
  }
};

// The rows of one (batch, head) in global memory.
template <class T>
struct Rows {
  T* base;
  int64_t stride;
  __device__ __forceinline__ T* at(int row, int col) const { return base + row * stride + col; }
};

template <class T>
__device__ __forceinline__ Rows<T> rows_of(const Tensor& tensor, int64_t batch, int64_t head) {
  T* data = static_cast<T*>(tensor.data);
  return {data + batch * tensor.batch_stride + head * tensor.head_stride, tensor.row_stride};
}

// Rows in shared memory, an odd number of 16 bytes apart: so the eight rows of an 8 x 8 matrix lie
// in different banks.
template <class T, int kCols>
struct Tile {
  static constexpr int kStride = kCols + 8;
  static_assert(kStride / 8 % 2 == 1 && kStride % 8 == 0);
  T* data;

  static constexpr int bytes(int rows) { return rows * kStride * static_cast<int>(sizeof(T)); }
  static __device__ __forceinline__ Tile take(SharedMemory& shared, int rows) {
    return {shared.take<T>(rows * kStride)};
  }
  __device__ __forceinline__ T* at(int row, int col) const { return data + row * kStride + col; }
};

// Starts copying kRows rows from row `first`; those that are not in `valid` are zero and not read.
template <int kRows, class T, int kCols>
__device__ __forceinline__ void load_tile(const Tile<T, kCols>& tile, const Rows<T>& rows,
                                          int first, Range valid) {
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kCols / 8; i += kThreads) {
    const int row = i / (kCols / 8), col = i % (kCols / 8) * 8;
    const bool has = valid.has(first + row);
    cp_async_16(tile.at(row, col), has ? rows.at(first + row, col) : rows.base, has);
  }
}

// The 16 x 16 fragment at (m, k) of a matrix whose tile holds it, or its transpose.
template <bool kTransposed, class T, int kCols>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const Tile<T, kCols>& tile, int m, int k) {
  const int within = lane() % 8, second = lane() / 8 % 2 * 8, fourth = lane() / 16 * 8;
  if constexpr (kTransposed) {
    ldmatrix<4, true>(a, tile.at(k + fourth + within, m + second));
  } else {
    ldmatrix<4, false>(a, tile.at(m + second + within, k + fourth));
  }
}

// All of a warp's rows.
template <int kSteps, class T, int kCols>
__device__ __forceinline__ void load_all_a(uint32_t (&a)[kSteps][4], const Tile<T, kCols>& tile) {
  ONEPASS_UNROLL
  for (int step = 0; step < kSteps; ++step) load_a<false>(a[step], tile, warp_row(), 16 * step);
}

// sum (16 x 8 kTiles) += a (16 x 16) b, where b is rows [k, k + 16) of a matrix that the tile
// holds, or of one whose transpose it holds.
template <bool kTransposed, int kTiles, class T, int kCols>
__device__ __forceinline__ void add_product(float (&sum)[kTiles][4], const uint32_t (&a)[4],
                                            const Tile<T, kCols>& tile, int k) {
  const int within = lane() % 8, second = lane() / 8 % 2 * 8, fourth = lane() / 16 * 8;
  ONEPASS_UNROLL
  for (int n = 0; n < kTiles; n += 2) {
    uint32_t b[4];
    if constexpr (kTransposed) {
      ldmatrix<4, false>(b, tile.at(8 * n + fourth + within, k + second));
    } else {
      ldmatrix<4, true>(b, tile.at(k + second + within, 8 * n + fourth));
    }
    mma_m16n8k16<T>(sum[n], a, {b[0], b[1]});
    mma_m16n8k16<T>(sum[n + 1], a, {b[2], b[3]});
  }
}

// The C fragments of columns [16 step, 16 step + 16) as an A fragment.
template <class T, int kTiles>
__device__ __forceinline__ void as_a(uint32_t (&a)[4], const float (&c)[kTiles][4], int step) {
  a[0] = narrow_pair<T>(c[2 * step][0], c[2 * step][1]);
  a[1] = narrow_pair<T>(c[2 * step][2], c[2 * step][3]);
  a[2] = narrow_pair<T>(c[2 * step + 1][0], c[2 * step + 1][1]);
  a[3] = narrow_pair<T>(c[2 * step + 1][2], c[2 * step + 1][3]);
}

// An A fragment of a warp's rows to where load_a finds it again.
template <class T, int kCols>
__device__ __forceinline__ void put_a(const Tile<T, kCols>& tile, const uint32_t (&a)[4],
                                      int step) {
  ONEPASS_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int row = warp_row() + lane() / 4 + i % 2 * 8;
    const int col = 16 * step + i / 2 * 8 + lane() % 4 * 2;
    *reinterpret_cast<uint32_t*>(tile.at(row, col)) = a[i];
  }
}

// A lane's two rows of an accumulator, times a factor each, where `valid` has them.
template <class T, int kTiles>
__device__ __forceinline__ void store_rows(const Rows<T>& rows, int first, Range valid,
                                           const float (&c)[kTiles][4], const float (&factor)[2]) {
  ONEPASS_UNROLL
  for (int i = 0; i < 2 * kTiles; ++i) {
    const int n = i / 2, r = i % 2, row = first + warp_row() + lane() / 4 + 8 * r;
    if (!valid.has(row)) continue;
    store_global(reinterpret_cast<uint32_t*>(rows.at(row, 8 * n + lane() % 4 * 2)),
                 narrow_pair<T>(c[n][2 * r] * factor[r], c[n][2 * r + 1] * factor[r]));
  }
}

// ---- masks and scores ---------------------------------------------------------------------------

// The keys that a query row may see, counted as this call counts them.
__device__ __forceinline__ Range allowed_keys(const Attention& args, int64_t row) {
  const int64_t position =
      row + args.query_offset - args.key_offset + (args.bottom_right ? args.seq_k - args.seq_q : 0);
  const auto within = [&](int64_t key) {
    return static_cast<int>(key < 0 ? 0 : key > args.seq_k ? args.seq_k : key);
  };
  return {within(args.window_left < 0 ? 0 : position - args.window_left),
          within(args.window_right < 0 ? args.seq_k : position + args.window_right + 1)};
}

// Those that any row of a block of queries sees: both ends of a row's keys only ever grow.
__device__ __forceinline__ Range allowed_keys_of_block(const Attention& args, int first) {
  const int64_t last = first + kQueries < args.seq_q ? first + kQueries - 1 : args.seq_q - 1;
  return {allowed_keys(args, first).begin, allowed_keys(args, last).end};
}

// How far before the first key the first tile begins.
__device__ __forceinline__ int tile_shift(const Attention& args) {
  return static_cast<int>(args.key_offset % kCallKeys);
}

// A lane's two query rows of one (batch, head): those of its C fragments.
struct LaneRows {
  int64_t batch;
  int64_t head;
  int row[2];
  Range keys[2];         // none beyond the sequence
  const float* bias[2];  // of the row's first key
};

__device__ __forceinline__ LaneRows lane_rows(const Attention& args, int64_t batch, int64_t head,
                                              int first) {
  LaneRows rows{.batch = batch, .head = head, .row = {}, .keys = {}, .bias = {}};
  ONEPASS_UNROLL
  for (int r = 0; r < 2; ++r) {
    rows.row[r] = first + warp_row() + lane() / 4 + 8 * r;
    if (rows.row[r] >= args.seq_q) continue;
    rows.keys[r] = allowed_keys(args, rows.row[r]);
    if (!args.bias.data) continue;
    rows.bias[r] = rows_of<float>(args.bias, batch, head).at(rows.row[r], 0);
  }
  return rows;
}

// The key, of this call, that element e of a lane's C fragment n belongs to.
__device__ __forceinline__ int key_of(int first_key, int n, int e) {
  return first_key + 8 * n + lane() % 4 * 2 + e % 2;
}

// scalar: score[i][j] += log2(e) * (scale * dot(query[i], key[j]) + bias[i][j]), -inf where masked
template <int kTiles, int kSteps, class T, int kCols>
__device__ __forceinline__ void add_scores(float (&score)[kTiles][4], const Attention& args,
                                           const uint32_t (&query)[kSteps][4],
                                           const Tile<T, kCols>& key, const LaneRows& rows,
                                           int first_key) {
  ONEPASS_UNROLL
  for (int step = 0; step < kSteps; ++step) add_product<true>(score, query[step], key, 16 * step);
  ONEPASS_UNROLL
  for (int i = 0; i < 4 * kTiles; ++i) {
    const int n = i / 4, e = i % 4, r = e / 2, j = key_of(first_key, n, e);
    if (!rows.keys[r].has(j)) {
      score[n][e] = -INFINITY;
    } else {
      score[n][e] *= static_cast<float>(args.scale) * kLog2e;
      if (args.bias.data) score[n][e] += kLog2e * load_global(rows.bias[r] + j);
    }
  }
}

// ---- dropout ------------------------------------------------------------------------------------

#ifdef ONEPASS_EMULATE
inline uint64_t philox_calls = 0;
inline void count_philox_call() { __atomic_fetch_add(&philox_calls, 1, __ATOMIC_RELAXED); }
#else
__device__ __forceinline__ void count_philox_call() {}
#endif

// word[i] of a quad's lane t becomes word[t] of its lane i.
__device__ __forceinline__ void transpose_in_quad(std::array<uint32_t, 4>& word) {
  ONEPASS_UNROLL
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = lane() & step;
    ONEPASS_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t other = __shfl_xor_sync(kAllLanes, upper ? word[i] : word[i + step], step);
      (upper ? word[i] : word[i + step]) = other;
    }
  }
}

// scalar: keeps(i, j) = 16 bits number j % 8 of philox(seed; query i, j / 8, batch * heads + head)
//                       >= threshold
//
// Bit 4 n + e is element e of a lane's C fragment n. One call has a row of an n8 tile; a lane makes
// that of one tile in four.
template <int kTiles>
__device__ __forceinline__ uint32_t draw(const Dropout& dropout, const Attention& args,
                                         const LaneRows& rows, int first_key) {
  static_assert(kTiles % 4 == 0 && 4 * kTiles <= 32);
  const auto call = static_cast<uint32_t>((args.key_offset + first_key) / kCallKeys);
  const auto sequence = static_cast<uint32_t>((rows.batch + args.batch_offset) * args.total_heads +
                                              rows.head + args.head_offset);
  uint32_t kept = 0;
  ONEPASS_UNROLL
  for (int i = 0; i < kTiles / 4 * 2; ++i) {
    const int n = i / 2 * 4, r = i % 2;
    const auto query = static_cast<uint32_t>(args.query_offset + rows.row[r]);
    auto word = philox4x32(dropout.key, {query, call + n + lane() % 4, sequence, dropout.offset});
    count_philox_call();
    transpose_in_quad(word);
    ONEPASS_UNROLL
    for (int k = 0; k < 8; ++k) {
      const bool keeps = (word[k / 2] >> k % 2 * 16 & 0xffffu) >= dropout.threshold;
      kept |= static_cast<uint32_t>(keeps) << (4 * (n + k / 2) + 2 * r + k % 2);
    }
  }
  return kept;
}

__device__ __forceinline__ Dropout dropout_of(const Attention& args) {
  if (args.seed) return make_dropout(args.seed, args.dropout_p);
  return {.key = {}, .offset = 0, .threshold = 0, .scale = 1.0f};
}

// ---- forward ------------------------------------------------------------------------------------

// scalar: with m the largest score of the row so far, p = exp2(score - m); what was summed with an
//         older m is shrunk by exp2(older - m)
template <int kTiles, int kDims>
__device__ __forceinline__ void softmax(float (&p)[kTiles][4], float (&largest)[2],
                                        float (&total)[2], float (&sum)[kDims][4]) {
  ONEPASS_UNROLL
  for (int r = 0; r < 2; ++r) {
    float now = largest[r];
    ONEPASS_UNROLL
    for (int n = 0; n < kTiles; ++n) now = fmaxf(now, fmaxf(p[n][2 * r], p[n][2 * r + 1]));
    now = fmaxf(now, __shfl_xor_sync(kAllLanes, now, 1));
    now = fmaxf(now, __shfl_xor_sync(kAllLanes, now, 2));
    const float base = now == -INFINITY ? 0.0f : now;  // the row has seen no key yet
    const float shrink = exp2_approximate(largest[r] - base);
    largest[r] = now;
    total[r] *= shrink;
    ONEPASS_UNROLL
    for (int i = 0; i < 2 * kDims; ++i) sum[i / 2][2 * r + i % 2] *= shrink;
    ONEPASS_UNROLL
    for (int i = 0; i < 2 * kTiles; ++i) {
      float& score = p[i / 2][2 * r + i % 2];
      score = exp2_approximate(score - base);
      total[r] += score;
    }
  }
}

// One block per 64 queries of a (batch, head). K and V come in two stages of 32 or 64 keys, of
// which the next is on its way while this one is used; the softmax runs along with them. Q, O and,
// for this block, the keys that it sees cross the bus once.
template <class T, int kHeadDim>
__global__ void __launch_bounds__(kThreads) attention_forward_kernel(const AttentionForward args) {
  constexpr int kKeys = kForwardKeys<kHeadDim>, kTiles = kKeys / 8, kSteps = kHeadDim / 16;
  using RowTile = Tile<T, kHeadDim>;
  SharedMemory shared;
  const RowTile query = RowTile::take(shared, kQueries);
  const RowTile keys = RowTile::take(shared, 2 * kKeys), values = RowTile::take(shared, 2 * kKeys);
  const auto stage = [](const RowTile& stages, int block) {
    return RowTile{stages.at(block % 2 * kKeys, 0)};
  };

  const int64_t query_blocks = (args.seq_q + kQueries - 1) / kQueries;
  const int64_t batch = blockIdx.x / query_blocks / args.heads;
  const int64_t head = blockIdx.x / query_blocks % args.heads;
  const int64_t kv_head = head / (args.heads / args.kv_heads);
  const int first = static_cast<int>(blockIdx.x % query_blocks) * kQueries;
  const Range queries = {0, static_cast<int>(args.seq_q)};
  const LaneRows rows = lane_rows(args, batch, head, first);
  const Dropout dropout = dropout_of(args);

  const Range visible = allowed_keys_of_block(args, first);
  const int shift = tile_shift(args), begin = (visible.begin + shift) / kKeys;
  const int end = visible.begin < visible.end ? (visible.end + shift - 1) / kKeys + 1 : begin;
  const auto load_keys = [&](int block) {
    const int first_key = block * kKeys - shift;
    load_tile<kKeys>(stage(keys, block), rows_of<T>(args.key, batch, kv_head), first_key, visible);
    load_tile<kKeys>(stage(values, block), rows_of<T>(args.value, batch, kv_head), first_key,
                     visible);
  };
  if (begin < end) {
    load_tile<kQueries>(query, rows_of<T>(args.query, batch, head), first, queries);
    load_keys(begin);
  }
  cp_async_commit();

  uint32_t query_a[kSteps][4] = {};
  float sum[kHeadDim / 8][4] = {};
  float largest[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
  for (int block = begin; block < end; ++block) {
    if (block + 1 < end) load_keys(block + 1);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    if (block == begin) load_all_a(query_a, query);
    const int first_key = block * kKeys - shift;
    float p[kTiles][4] = {};
    add_scores(p, args, query_a, stage(keys, block), rows, first_key);
    softmax(p, largest, total, sum);
    if (args.seed) {
      // Kept ones are scaled at the end, with the sum.
      const uint32_t kept = draw<kTiles>(dropout, args, rows, first_key);
      ONEPASS_UNROLL
      for (int i = 0; i < 4 * kTiles; ++i) {
        if (!(kept >> i & 1)) p[i / 4][i % 4] = 0.0f;
      }
    }
    ONEPASS_UNROLL
    for (int step = 0; step < kKeys / 16; ++step) {
      uint32_t p_a[4];
      as_a<T>(p_a, p, step);
      add_product<false>(sum, p_a, stage(values, block), 16 * step);
    }
    __syncthreads();  // the next turn asks for keys into the stage that was read here
  }

  float factor[2];
  ONEPASS_UNROLL
  for (int r = 0; r < 2; ++r) {
    total[r] += __shfl_xor_sync(kAllLanes, total[r], 1);
    total[r] += __shfl_xor_sync(kAllLanes, total[r], 2);
    factor[r] = total[r] == 0.0f ? 0.0f : dropout.scale / total[r];
    if (lane() % 4 == 0 && rows.row[r] < args.seq_q) {
      store_global(args.lse + (batch * args.heads + head) * args.seq_q + rows.row[r],
                   total[r] == 0.0f ? -INFINITY : largest[r] / kLog2e + logf(total[r]));
    }
  }
  store_rows(rows_of<T>(args.output, batch, head), first, queries, sum, factor);
}

// ---- backward -----------------------------------------------------------------------------------

// scalar: delta[i] = sum over d of doutput[i][d] * output[i][d] - dlse[i]
//
// One warp per row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    attention_delta_kernel(const AttentionBackward args, float* delta) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  if (index >= args.batch * args.heads * args.seq_q) return;
  const int64_t batch = index / args.seq_q / args.heads, head = index / args.seq_q % args.heads;
  const int row = static_cast<int>(index % args.seq_q);
  const auto doutput = rows_of<const T>(args.doutput, batch, head);
  const auto output = rows_of<const T>(args.output, batch, head);
  float sum[1] = {0.0f};
  for (int d = lane(); d < args.head_dim; d += kLanes) {
    sum[0] += widen(load_global(doutput.at(row, d))) * widen(load_global(output.at(row, d)));
  }
  reduce_row(sum, kLanes, static_cast<float*>(nullptr));
  if (args.dlse) sum[0] -= load_global(args.dlse + index);
  if (lane() == 0) store_global(delta + index, sum[0]);
}

// dbias[i][j] += dscore[i][j]: a tile is the same thread's for every batch, and batches come in
// order, so a broadcast one needs no atomics.
template <int kTiles>
__device__ __forceinline__ void add_to_dbias(const AttentionBackward& args, const LaneRows& rows,
                                             int first_key, const float (&dscore)[kTiles][4]) {
  const bool is_first = args.dbias.batch_stride != 0 || rows.batch == 0;
  const auto dbias = rows_of<float>(args.dbias, rows.batch, rows.head);
  ONEPASS_UNROLL
  for (int i = 0; i < 4 * kTiles; ++i) {
    const int row = rows.row[i % 4 / 2], j = key_of(first_key, i / 4, i % 4);
    if (row >= args.seq_q || j < 0 || j >= args.seq_k) continue;
    float* target = dbias.at(row, j);
    store_global(target, (is_first ? 0.0f : load_global(target)) + dscore[i / 4][i % 4]);
  }
}

// One block per kv_head, which no other shares a sum with: dkey and dvalue of a group of query
// heads stay in registers, dquery in `dquery_sums` (batch, heads, seq_q, head_dim), zero at first,
// of which a thread only ever touches its own elements.
template <class T, int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    attention_backward_kernel(const AttentionBackward args, const float* delta,
                              float* dquery_sums) {
  constexpr int kTiles = kBackwardKeys / 8, kSteps = kHeadDim / 16, kDims = kHeadDim / 8;
  using RowTile = Tile<T, kHeadDim>;
  using ScoreTile = Tile<T, kBackwardKeys>;
  SharedMemory shared;
  const RowTile query = RowTile::take(shared, kQueries), doutput = RowTile::take(shared, kQueries);
  const RowTile key = RowTile::take(shared, kBackwardKeys);
  const RowTile value = RowTile::take(shared, kBackwardKeys);
  const ScoreTile p_tile = ScoreTile::take(shared, kQueries);
  const ScoreTile dscore_tile = ScoreTile::take(shared, kQueries);

  const int64_t kv_head = blockIdx.x, group = args.heads / args.kv_heads;
  const int64_t query_blocks = (args.seq_q + kQueries - 1) / kQueries;
  const Range queries = {0, static_cast<int>(args.seq_q)}, keys = {0, static_cast<int>(args.seq_k)};
  const Dropout dropout = dropout_of(args);
  const float scale = static_cast<float>(args.scale);
  const Tensor all_sums = {dquery_sums, args.heads * args.seq_q * kHeadDim, args.seq_q * kHeadDim,
                           kHeadDim};

  for (int64_t batch = 0; batch < args.batch; ++batch) {
    for (int first_key = -tile_shift(args); first_key < args.seq_k; first_key += kBackwardKeys) {
      float dkey[kDims][4] = {}, dvalue[kDims][4] = {};
      bool has_keys = false;  // they come with the first block of queries that sees any
      for (int64_t turn = 0; turn < group * query_blocks; ++turn) {
        const int64_t head = kv_head * group + turn / query_blocks;
        const int first = static_cast<int>(turn % query_blocks) * kQueries;
        const LaneRows rows = lane_rows(args, batch, head, first);
        const Range visible = allowed_keys_of_block(args, first);
        float p[kTiles][4] = {}, dscore[kTiles][4] = {};
        if (!visible.meets({first_key, first_key + kBackwardKeys})) {
          if (args.dbias.data) add_to_dbias(args, rows, first_key, dscore);
          continue;
        }
        if (!has_keys) {
          load_tile<kBackwardKeys>(key, rows_of<T>(args.key, batch, kv_head), first_key, keys);
          load_tile<kBackwardKeys>(value, rows_of<T>(args.value, batch, kv_head), first_key, keys);
          has_keys = true;
        }
        load_tile<kQueries>(query, rows_of<T>(args.query, batch, head), first, queries);
        load_tile<kQueries>(doutput, rows_of<T>(args.doutput, batch, head), first, queries);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();

        uint32_t a[kSteps][4];
        load_all_a(a, query);
        add_scores(p, args, a, key, rows, first_key);
        load_all_a(a, doutput);
        ONEPASS_UNROLL
        for (int step = 0; step < kSteps; ++step) {
          add_product<true>(dscore, a[step], value, 16 * step);
        }

        float lse[2], row_delta[2];
        ONEPASS_UNROLL
        for (int r = 0; r < 2; ++r) {
          const bool has = queries.has(rows.row[r]);
          const int64_t index = (batch * args.heads + head) * args.seq_q + rows.row[r];
          lse[r] = has ? load_global(args.lse + index) * kLog2e : -INFINITY;
          if (lse[r] == -INFINITY) lse[r] = INFINITY;  // P of a row without keys is 0, not NaN
          row_delta[r] = has ? load_global(delta + index) : 0.0f;
        }
        const uint32_t kept = args.seed ? draw<kTiles>(dropout, args, rows, first_key) : ~0u;
        ONEPASS_UNROLL
        for (int i = 0; i < 4 * kTiles; ++i) {
          const int n = i / 4, e = i % 4;
          const bool keeps = kept >> i & 1;
          const float dp = keeps ? dropout.scale * dscore[n][e] : 0.0f;
          p[n][e] = exp2_approximate(p[n][e] - lse[e / 2]);
          dscore[n][e] = p[n][e] * (dp - row_delta[e / 2]);
          if (!keeps) p[n][e] = 0.0f;
        }
        if (args.dbias.data) add_to_dbias(args, rows, first_key, dscore);

        float dquery[kDims][4] = {};
        ONEPASS_UNROLL
        for (int step = 0; step < kBackwardKeys / 16; ++step) {
          uint32_t p_a[4], dscore_a[4];
          as_a<T>(p_a, p, step);
          put_a(p_tile, p_a, step);
          as_a<T>(dscore_a, dscore, step);
          put_a(dscore_tile, dscore_a, step);
          add_product<false>(dquery, dscore_a, key, 16 * step);
        }
        const auto sums = rows_of<float>(all_sums, batch, head);
        ONEPASS_UNROLL
        for (int i = 0; i < 4 * kDims; ++i) {
          const int row = rows.row[i % 4 / 2];
          if (!queries.has(row)) continue;
          float* target = sums.at(row, key_of(0, i / 4, i % 4));
          store_global(target, load_global(target) + dquery[i / 4][i % 4]);
        }
        __syncthreads();
        ONEPASS_UNROLL
        for (int step = 0; step < kQueries / 16; ++step) {
          uint32_t p_a[4], dscore_a[4];
          load_a<true>(p_a, p_tile, warp_row(), 16 * step);
          add_product<false>(dvalue, p_a, doutput, 16 * step);
          load_a<true>(dscore_a, dscore_tile, warp_row(), 16 * step);
          add_product<false>(dkey, dscore_a, query, 16 * step);
        }
        __syncthreads();  // the next turn loads into the tiles that were read here
      }
      store_rows(rows_of<T>(args.dkey, batch, kv_head), first_key, keys, dkey, {scale, scale});
      store_rows(rows_of<T>(args.dvalue, batch, kv_head), first_key, keys, dvalue,
                 {dropout.scale, dropout.scale});
    }
    for (int64_t turn = 0; turn < group * query_blocks; ++turn) {
      const int64_t head = kv_head * group + turn / query_blocks;
      const int first = static_cast<int>(turn % query_blocks) * kQueries;
      const auto sums = rows_of<float>(all_sums, batch, head);
      float dquery[kDims][4] = {};
      ONEPASS_UNROLL
      for (int i = 0; i < 4 * kDims; ++i) {
        const int row = first + warp_row() + lane() / 4 + i % 4 / 2 * 8;
        if (!queries.has(row)) continue;
        dquery[i / 4][i % 4] = load_global(sums.at(row, key_of(0, i / 4, i % 4)));
      }
      store_rows(rows_of<T>(args.dquery, batch, head), first, queries, dquery, {scale, scale});
    }
  }
}

}  // namespace onepass::cuda::attention_spike
