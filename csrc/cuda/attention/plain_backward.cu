// Attention backward of float32 and float64, and of head dimensions beyond those of the 16-bit
// tiles.
//
//   S = Q K^T;  P = exp(score(S) - lse);  dP = drop(dO V^T);  dS = P (dP - delta) score'(S)
//   dV = drop(P)^T dO;  dK = scale dS^T Q;  dQ = scale dS K;  dbias = P (dP - delta), summed
//
// Each gradient has its own kernel (dK and dV share one). A block owns a tile of the gradient and
// goes through all tiles of scores that it is summed over, in order: sums stay in registers, blocks
// add nothing to each other, and results are the same bits in any order of blocks. Each kernel
// recomputes S and dP: seven products instead of five, and two more for dbias. All rows are loaded
// in slabs of kDepth columns or rows. A block has kOutCols columns of its gradient; wider heads
// take several blocks. Done when products bound its time.
#include <algorithm>

#include "cuda/attention/attention.h"
#include "cuda/attention/backward_ends.cuh"
#include "cuda/attention/order.h"
#include "cuda/attention/plain.cuh"
#include "cuda/launch.cuh"

namespace onepass::cuda {
namespace plain {
namespace {

constexpr int kThreads = 256;

// The gradients that are computed from the probability of a score.
template <class A>
struct Gradient {
  A dropped;   // drop(P)
  A ds;        // of the score
  A dproduct;  // of scale * query key^T
};

// A block that goes through tiles of scores and computes S and dP of each.
template <class Kind>
struct Backward {
  using A = typename Kind::Accumulator;
  using Scores = Tile<Kind, kThreads>;
  static constexpr int kRows = Scores::kRows;
  static constexpr int kScoreCols = Scores::kCols;
  static_assert(kDepth<A> == kDeltaChain<A>);

  __device__ __forceinline__ Backward(const AttentionBackward& call, const ScoreNumbers<A>& numbers,
                                      SharedMemory& shared, int out)
      : args(call), tile(call, numbers, shared, out), ring(shared) {}

  static constexpr size_t shared_bytes(int tiles) {
    return (Ring<A, 2>::kElements + tiles * kTileElements<Kind>)*sizeof(A) + Scores::kSharedBytes;
  }

  // Rows of the tile's (batch, head).
  __device__ __forceinline__ Rows of_queries(const Strided& tensor, int64_t cols) const {
    return rows_of(args, tensor, cols, tile->batch, tile->head, tile->sequence.first_q);
  }
  __device__ __forceinline__ Rows of_keys(const Strided& tensor, int64_t cols) const {
    return rows_of(args, tensor, cols, tile->batch, tile->kv_head, tile->sequence.first_k);
  }

  // Loads slab i of the tile's queries and keys: columns for S or dP.
  __device__ __forceinline__ void load_dots(A* stage, int i, const Rows& queries,
                                            const Rows& keys) const {
    load_slab<kKeys, kDepth<A>, kThreads>(stage, keys, tile->first_key, i * kDepth<A>, tile->keys);
    load_slab<kQueries<A>, kDepth<A>, kThreads>(stage + kSlabElements<A>, queries,
                                                tile->first_query, i * kDepth<A>, tile.queries());
  }
  __device__ __forceinline__ void load_s(A* stage, int i) const {
    load_dots(stage, i, of_queries(args.query, args.head_dim), of_keys(args.key, args.head_dim));
  }
  __device__ __forceinline__ void load_dp(A* stage, int i) const {
    load_dots(stage, i, of_queries(args.doutput, args.value_dim),
              of_keys(args.value, args.value_dim));
  }

  // sum += products of rows, over all `cols` columns; the first slab is in flight already.
  template <class Load, class Next>
  __device__ __forceinline__ void dots(A (&sum)[kRows][kScoreCols], int64_t cols, Load&& load,
                                       Next&& next) {
    ring.run(
        ceil_div(cols, kDepth<A>), load,
        [&](A* stage, int i) {
          const int depth = static_cast<int>(cols) - i * kDepth<A>;
          Kind::template add_dots<kThreads>(sum, stage + kSlabElements<A>, stage,
                                            depth < kDepth<A> ? depth : kDepth<A>);
        },
        next);
  }

  // Calls body(r, c, gradient, place) for the tile's scores; place() returns a ScorePlace.
  // load_s(stage, 0) must have been called; next(stage) starts the loads after the two products.
  template <class Next, class Body>
  __device__ __forceinline__ void gradients(const BackwardEnds& ends, Next&& next, Body&& body) {
    A s[kRows][kScoreCols] = {}, dp[kRows][kScoreCols] = {};
    dots(
        s, args.head_dim, [&](A* stage, int i) { load_s(stage, i); },
        [&](A* stage) { load_dp(stage, 0); });
    dots(dp, args.value_dim, [&](A* stage, int i) { load_dp(stage, i); }, next);

    const A keep_scale = tile.keep_scale();
    ONEPASS_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const RowScores<A> of_row = tile.row_scores(r);
      RowLse<A> lse = {static_cast<A>(INFINITY), A(0)};  // beyond the sequence
      A delta = 0;
      if (tile.query(r) < tile->sequence.queries) {
        const int64_t row = lse_row(args, tile->sequence, tile->batch, tile->head, tile.query(r));
        lse = load_lse<A>(args, row);
        delta = load_global(static_cast<const A*>(ends.delta) + row);
      }
      ONEPASS_UNROLL
      for (int c = 0; c < kScoreCols; ++c) {
        const Score<A> score = tile.score(of_row, r, c, s[r][c]);
        Gradient<A> gradient{};
        if (score.value != -static_cast<A>(INFINITY)) {
          const A keep = tile.keeps(r, c) ? keep_scale : A(0);
          A probability = lse.probability(score.value);
          // TF32 scores may differ from the forward's. The probability of a large score would then
          // have no bound.
          if (args.allow_tf32 && probability > A(1)) probability = A(1);
          gradient.dropped = probability * keep;
          gradient.ds = probability * (dp[r][c] * keep - delta);
          gradient.dproduct = gradient.ds * score.derivative;
        }
        body(r, c, gradient, [&] { return of_row.place(tile.key(c)); });
      }
    }
  }

  const AttentionBackward& args;
  Scores tile;
  Ring<A, 2> ring;  // slabs of keys and of queries
};
static_assert(Backward<MultiplyAdds<double>>::shared_bytes(2) <= kSharedOfAll);
static_assert(Backward<MultiplyAdds<float>>::shared_bytes(2) <= kSharedOfAll);
static_assert(Backward<Tf32>::shared_bytes(2) <= kSharedOfAll);

// scalar: dquery[i] = scale * sum over keys j of dproduct[i][j] * key[j]
//         and the gradient of HeadNumbers, see add_head_gradient()
//
// One block per tile of queries of a (batch, head), and kOutCols columns of dquery.
template <class Kind>
__global__ void __launch_bounds__(kThreads, sizeof(typename Kind::Accumulator) == 8 ? 1 : 2)
    attention_dquery_plain_kernel(const AttentionBackward __grid_constant__ args,
                                  const NumbersOf<Kind> __grid_constant__ numbers,
                                  const BackwardEnds ends, const BlockOrder order) {
  using A = typename Kind::Accumulator;
  using Block = Backward<Kind>;
  using Results = typename Kind::template QueryResults<kThreads>;
  constexpr int kParts = kKeys / kDepth<A>;
  SharedMemory shared;
  const int outs = static_cast<int>(gridDim.x / (args.batch * args.heads * ends.head_parts));
  const int index = static_cast<int>(blockIdx.x);
  Block block(args, numbers, shared, index % outs);
  auto& tile = block.tile;
  A* const ds = shared.take<A>(kTileElements<Kind>);

  // The last queries have the most to do under a diagonal.
  const auto [batch, kv_head, head, turn] = order.place(blockIdx.x / outs);
  const int first_query = (static_cast<int>(order.tiles) - 1 - turn) * kQueries<A>;
  tile.go_to(batch, head, first_query);
  const Sequence& sequence = tile->sequence;
  int first_key = tile.first_seen();

  const auto load_keys = [&](A* stage, int group, int part) {
    load_slab<kDepth<A>, kCols, kThreads>(
        stage, block.of_keys(args.key, args.head_dim), tile->first_key + part * kDepth<A>,
        tile->first_out + group * kCols, tile->keys >> part * kDepth<A>);
  };
  const auto load_next_tile = [&](A* stage) {
    while (first_key < tile.last_seen() && !tile.enter(first_key)) first_key += kKeys;
    if (first_key < tile.last_seen()) block.load_s(stage, 0);
  };

  A dquery[kGroups<A>][Results::kRows][Results::kCols] = {};
  A head_sum = 0;
  const auto add_keys = [&]<int kGroup>(auto&& next) {
    block.ring.run(
        kParts, [&](A* stage, int part) { load_keys(stage, kGroup, part); },
        [&](A* stage, int part) {
          Kind::template add_rows<kThreads>(dquery[kGroup], ds, part, stage);
        },
        next);
  };
  const auto leave_tile = [&](A* stage) {
    first_key += kKeys;
    load_next_tile(stage);
  };
  block.ring.begin(load_next_tile);
  while (first_key < tile.last_seen()) {
    block.gradients(
        ends, [&](A* stage) { load_keys(stage, 0, 0); },
        [&](int r, int c, const Gradient<A>& of, auto&& place) {
          ds[tile.row(r) * Kind::kFactorStride + tile.col(c)] = of.dproduct;
          if (head_gradient(args)) add_head_gradient<ExactTerms>(head_sum, of.ds, place());
        });
    const bool two = kGroups<A> > 1 && tile->first_out + kCols < args.head_dim;
    add_keys.template operator()<0>(
        [&](A* stage) { two ? load_keys(stage, 1, 0) : leave_tile(stage); });
    if constexpr (kGroups<A> > 1) {
      if (two) add_keys.template operator()<1>(leave_tile);
    }
  }

  ONEPASS_UNROLL
  for (int r = 0; r < Results::kRows; ++r) {
    const int query = tile->first_query + Results::row(r);
    if (!args.dquery.data || query >= sequence.queries) continue;
    const int64_t row = block.of_queries(args.dquery, args.head_dim).offset(query);
    ONEPASS_UNROLL
    for (int g = 0; g < kGroups<A>; ++g) {
      store_row<Results>(args.dquery, args.dtype, row, tile->first_out + g * kCols, args.head_dim,
                         dquery[g][r], numbers.scale);
    }
  }
  if (!head_gradient(args) || tile->first_out != 0) return;
  __syncthreads();  // all threads are done with ds
  store_partial(
      head_sum, static_cast<A*>(ends.head_sums),
      (tile->batch * args.heads + tile->head) * ends.head_parts + tile->first_query / kQueries<A>,
      ds);
}

// scalar: dvalue[j] = sum over queries i of drop(P)[i][j] * doutput[i]
//         dkey[j] = scale * sum over i of dproduct[i][j] * query[i]
//
// One block per tile of keys of a (batch, kv_head) and kOutCols columns of both gradients; it sums
// over all heads that read the tile.
template <class Kind>
__global__ void __launch_bounds__(kThreads, 1)
    attention_backward_plain_kernel(const AttentionBackward __grid_constant__ args,
                                    const NumbersOf<Kind> __grid_constant__ numbers,
                                    const BackwardEnds ends, const BlockOrder order) {
  using A = typename Kind::Accumulator;
  using Block = Backward<Kind>;
  using Results = typename Kind::template KeyResults<kThreads>;
  constexpr int kParts = kQueries<A> / kDepth<A>;
  SharedMemory shared;
  const int key_tiles = ceil_div(args.seq_k, kKeys);
  const int outs = static_cast<int>(gridDim.x / (args.batch * args.kv_heads * key_tiles));
  const int index = static_cast<int>(blockIdx.x);
  Block block(args, numbers, shared, index % outs);
  auto& tile = block.tile;
  A* const p = shared.take<A>(kTileElements<Kind>);
  A* const ds = shared.take<A>(kTileElements<Kind>);

  // Under a diagonal the first keys are seen by the most queries.
  const auto [batch, kv_head, head, turn] = order.place(blockIdx.x / outs);
  const int first_key = turn * kKeys;
  const int group = static_cast<int>(args.heads / args.kv_heads);
  tile.go_to(batch, kv_head * group, 0);
  const Sequence& sequence = tile->sequence;
  if (first_key >= sequence.keys) return;
  const int64_t last_key = first_key + kKeys < sequence.keys ? first_key + kKeys : sequence.keys;
  const KeyRange seeing = seeing_queries(args, sequence, first_key, last_key);
  const bool seen = seeing.first < seeing.last;
  const int first_tile = seen ? static_cast<int>(seeing.first / kQueries<A>) : 0;
  const int tiles = seen ? ceil_div(seeing.last, kQueries<A>) - first_tile : 0;
  const int64_t steps = static_cast<int64_t>(group) * tiles;

  const auto load_rows = [&](A* stage, const Rows& rows, int group, int part) {
    load_slab<kDepth<A>, kCols, kThreads>(stage, rows, tile->first_query + part * kDepth<A>,
                                          tile->first_out + group * kCols,
                                          tile.queries() >> part * kDepth<A>);
  };
  const auto load_doutput = [&](A* stage, int group, int part) {
    load_rows(stage, block.of_queries(args.doutput, args.value_dim), group, part);
  };
  const auto load_query = [&](A* stage, int group, int part) {
    load_rows(stage, block.of_queries(args.query, args.head_dim), group, part);
  };
  int64_t step = 0;
  const auto enter = [&] {
    tile.go_to(batch, kv_head * group + static_cast<int>(step / tiles),
               (first_tile + static_cast<int>(step % tiles)) * kQueries<A>);
    return tile.enter(first_key);
  };
  const auto load_next_tile = [&](A* stage) {
    while (step < steps && !enter()) ++step;
    if (step < steps) block.load_s(stage, 0);
  };
  // If only one of the gradients has a group of columns, the other's sums of that group are zero.
  A dkey[kGroups<A>][Results::kRows][Results::kCols] = {};
  A dvalue[kGroups<A>][Results::kRows][Results::kCols] = {};
  const auto add_queries = [&]<int kGroup>(auto&& next) {
    const auto at = [](int part) { return part * kDepth<A> * Kind::kTransposedStride; };
    block.ring.run(
        kParts, [&](A* stage, int part) { load_doutput(stage, kGroup, part); },
        [&](A* stage, int part) {
          Kind::template add_rows_of_queries<kThreads>(dvalue[kGroup], p + at(part), stage);
        },
        [&](A* stage) { load_query(stage, kGroup, 0); });
    block.ring.run(
        kParts, [&](A* stage, int part) { load_query(stage, kGroup, part); },
        [&](A* stage, int part) {
          Kind::template add_rows_of_queries<kThreads>(dkey[kGroup], ds + at(part), stage);
        },
        next);
  };
  const auto leave_tile = [&](A* stage) {
    ++step;
    load_next_tile(stage);
  };
  const int64_t cols = args.head_dim > args.value_dim ? args.head_dim : args.value_dim;
  const bool two = kGroups<A> > 1 && tile->first_out + kCols < cols;
  block.ring.begin(load_next_tile);
  while (step < steps) {
    block.gradients(
        ends, [&](A* stage) { load_doutput(stage, 0, 0); },
        [&](int r, int c, const Gradient<A>& of, auto&&) {
          const int at = tile.row(r) * Kind::kTransposedStride + tile.col(c);
          p[at] = of.dropped;
          ds[at] = of.dproduct;
        });
    add_queries.template operator()<0>(
        [&](A* stage) { two ? load_doutput(stage, 1, 0) : leave_tile(stage); });
    if constexpr (kGroups<A> > 1) {
      if (two) add_queries.template operator()<1>(leave_tile);
    }
  }

  const auto store = [&](const Strided& gradient, int64_t cols, A factor,
                         const A(&sums)[kGroups<A>][Results::kRows][Results::kCols]) {
    if (!gradient.data) return;
    ONEPASS_UNROLL
    for (int k = 0; k < Results::kRows; ++k) {
      const int key = first_key + Results::row(k);
      if (key >= sequence.keys) continue;
      const int64_t row =
          rows_of(args, gradient, cols, batch, kv_head, sequence.first_k).offset(key);
      ONEPASS_UNROLL
      for (int g = 0; g < kGroups<A>; ++g) {
        store_row<Results>(gradient, args.dtype, row, tile->first_out + g * kCols, cols, sums[g][k],
                           factor);
      }
    }
  };
  store(args.dvalue, args.value_dim, A(1), dvalue);
  store(args.dkey, args.head_dim, numbers.scale, dkey);
}

// scalar: dbias[b][h][i][j] = sum of ds[i][j] over the dimensions that the bias broadcasts
//
// One block per tile of dbias, or per tile of keys if all queries share a row. It uses
// multiply-adds even where TF32 is allowed, which saves an instance; in P = exp(S - lse) then only
// the lse has TF32's rounding.
template <class A>
__global__ void __launch_bounds__(kThreads, 1)
    attention_dbias_plain_kernel(const AttentionBackward __grid_constant__ args,
                                 const ScoreNumbers<A> __grid_constant__ numbers,
                                 const BackwardEnds ends) {
  using Block = Backward<MultiplyAdds<A>>;
  using Own = typename Block::Scores::Own;
  constexpr int kRows = Own::kRows, kThreadRows = Own::kThreadRows;
  SharedMemory shared;
  Block block(args, numbers, shared, 0);
  auto& tile = block.tile;
  A* const of_rows = shared.take<A>(kThreadRows * kKeys);

  // The size of a dimension of dbias, and how many of the call's share one of its elements.
  struct Size {
    __device__ Size(int64_t stride, int64_t count)
        : own(stride == 0 ? 1 : count), each(stride == 0 ? count : 1) {}
    int64_t own;
    int64_t each;
  };
  const int64_t key_tiles = ceil_div(args.seq_k, kKeys);
  const Size batches(args.dbias.batch_stride, args.batch),
      heads(args.dbias.head_stride, args.heads);
  const Size tiles(args.dbias.row_stride, ceil_div(args.seq_q, kQueries<A>));
  const int first_key = static_cast<int>(blockIdx.x % key_tiles) * kKeys;
  const int64_t first_tile = blockIdx.x / key_tiles % tiles.own;
  const int64_t first_head = blockIdx.x / key_tiles / tiles.own % heads.own;
  const int64_t first_batch = blockIdx.x / key_tiles / tiles.own / heads.own;

  const int64_t steps = batches.each * heads.each * tiles.each;
  int64_t step = 0;
  const auto enter = [&] {
    tile.go_to(static_cast<int>(first_batch + step / tiles.each / heads.each),
               static_cast<int>(first_head + step / tiles.each % heads.each),
               static_cast<int>(first_tile + step % tiles.each) * kQueries<A>);
    return tile.enter(first_key);
  };
  const auto load_next_tile = [&](A* stage) {
    while (step < steps && !enter()) ++step;
    if (step < steps) block.load_s(stage, 0);
  };
  A sum[kRows][4] = {};
  block.ring.begin(load_next_tile);
  while (step < steps) {
    block.gradients(
        ends, [](A*) {},
        [&](int r, int c, const Gradient<A>& gradient, auto&&) { sum[r][c] += gradient.ds; });
    ++step;
    block.ring.begin(load_next_tile);
  }

  const int64_t row = first_batch * args.dbias.batch_stride + first_head * args.dbias.head_stride;
  if (args.dbias.row_stride != 0) {
    ONEPASS_UNROLL
    for (int i = 0; i < 4 * kRows; ++i) {
      const int64_t query = first_tile * kQueries<A> + tile.row(i / 4);
      const int64_t key = first_key + tile.col(i % 4);
      if (query >= args.seq_q || key >= args.seq_k) continue;
      store_as(args.dbias.data, args.bias_dtype, row + query * args.dbias.row_stride + key,
               sum[i / 4][i % 4]);
    }
    return;
  }
  ONEPASS_UNROLL
  for (int c = 0; c < 4; ++c) {
    A of_row = 0;
    ONEPASS_UNROLL
    for (int r = 0; r < kRows; ++r) of_row += sum[r][c];
    of_rows[Own::thread_row() * kKeys + tile.col(c)] = of_row;
  }
  __syncthreads();
  const int key = static_cast<int>(threadIdx.x);
  if (key >= kKeys || first_key + key >= args.seq_k) return;
  A total = 0;
  for (int r = 0; r < kThreadRows; ++r) total += of_rows[r * kKeys + key];
  store_as(args.dbias.data, args.bias_dtype, row + first_key + key, total);
}

// ---- plan and run -------------------------------------------------------------------------------

// Number of blocks of each kernel; 0: the kernel is not needed.
struct Blocks {
  int64_t query_tiles;
  int64_t dquery;
  int64_t dkey;
  int64_t dbias;
};

template <class A>
Blocks blocks_of(const AttentionBackward& args) {
  const auto outs = [](int64_t cols) { return ceil_div(cols, kOutCols<A>); };
  const int64_t key_tiles = ceil_div(args.seq_k, kKeys);
  Blocks blocks{};
  blocks.query_tiles = ceil_div(args.seq_q, kQueries<A>);
  if (args.dquery.data || head_gradient(args)) {
    blocks.dquery =
        args.batch * args.heads * blocks.query_tiles * (args.dquery.data ? outs(args.head_dim) : 1);
  }
  if (args.dkey.data || args.dvalue.data) {
    const int64_t cols =
        std::max(args.dkey.data ? args.head_dim : 1, args.dvalue.data ? args.value_dim : 1);
    blocks.dkey = args.batch * args.kv_heads * key_tiles * outs(cols);
  }
  if (args.dbias.data) {
    blocks.dbias = (args.dbias.batch_stride ? args.batch : 1) *
                   (args.dbias.head_stride ? args.heads : 1) *
                   (args.dbias.row_stride ? blocks.query_tiles : 1) * key_tiles;
  }
  return blocks;
}

// The order of the tiles of each head; of each kv head if one block serves its query heads. Blocks
// of a pair share its K, V, Q and dO.
BlockOrder order_of(const AttentionBackward& args, int64_t heads, int64_t tiles) {
  const int64_t rows = args.seq_k + args.heads / args.kv_heads * args.seq_q;
  const int64_t bytes = rows * (args.head_dim + args.value_dim) * size_of(args.dtype);
  return order_of_blocks(args.batch, args.kv_heads, heads, tiles, bytes,
                         {l2_bytes(), multiprocessors()});
}

Plan plan_backward(const AttentionBackward& args, const Machine&, Blocks& blocks) {
  Plan plan{};
  plan.kernel_name = "attention_backward_plain_kernel";
  plan.reason = reason_of(args);
  visit_kind(args, [&]<class Kind>() {
    using A = typename Kind::Accumulator;
    blocks = blocks_of<A>(args);
    plan.workspace_bytes = ends_bytes(args, blocks.query_tiles);
    plan.rows_per_tile = kQueries<A>;
    plan.splits = blocks.dkey;
  });
  return plan;
}

void run_backward(const AttentionBackward& args, const Plan&, const Blocks& blocks, void* workspace,
                  const Context& context) {
  visit_kind(args, [&]<class Kind>() {
    using A = typename Kind::Accumulator;
    const BackwardEnds ends = ends_in(workspace, args, blocks.query_tiles);
    begin_backward(args, ends, context.stream);
    const auto start = [&]<auto kKernel>(int64_t count, size_t shared_bytes, auto... order) {
      if (count == 0) return;
      launch<kKernel>({.blocks = count, .threads = kThreads, .shared_bytes = shared_bytes},
                      context.stream, args, ScoreNumbers<A>(args), ends, order...);
    };
    start.template operator()<attention_backward_plain_kernel<Kind>>(
        blocks.dkey, Backward<Kind>::shared_bytes(2),
        order_of(args, 1, ceil_div(args.seq_k, kKeys)));
    start.template operator()<attention_dquery_plain_kernel<Kind>>(
        blocks.dquery, Backward<Kind>::shared_bytes(1),
        order_of(args, args.heads / args.kv_heads, blocks.query_tiles));
    using OfBias = Backward<MultiplyAdds<A>>;
    start.template operator()<attention_dbias_plain_kernel<A>>(
        blocks.dbias,
        OfBias::shared_bytes(0) + OfBias::Scores::Own::kThreadRows * kKeys * sizeof(A));
    finish_backward(args, ends, context.stream);
  });
}

}  // namespace
}  // namespace plain

Operator<AttentionBackward> plain_attention_backward() {
  return operator_of<AttentionBackward, plain::Blocks, plain::plan_backward, plain::run_backward>();
}

}  // namespace onepass::cuda
