// Attention forward by multiply-adds: float32 and float64, and head dimensions beyond those of the
// tensor-core tiles.
//
//   scalar: with m the largest score of the row so far, p = exp(score - m), summed in l; what was
//           summed with an older m is shrunk by exp(older - m)
//
// One block per tile of queries of a (batch, head) and kOutCols columns of the output. Tiles of
// keys come by once: their scores are made in registers (kDepth columns of Q and K at a time), P
// goes through shared memory, the output stays in registers. Q stays in shared memory up to
// kResidentSlabs, and is read again for every tile of keys beyond. Per block Q, O and the keys and
// values that it sees cross the bus once. Done when multiply-adds are what it waits for.
#include "cuda/attention/attention.h"
#include "cuda/attention/plain.cuh"
#include "cuda/launch.cuh"

namespace onepass::cuda {
namespace plain {
namespace {

constexpr int kThreads = 128;
constexpr int kResidentSlabs = 6;  // of Q: with all else 93 KB, what every architecture has

template <class A>
using ForwardTile = Tile<A, kThreads>;

template <class A>
int resident_slabs(const Attention& args) {
  const int slabs = ceil_div(args.head_dim, kDepth<A>);
  return slabs <= kResidentSlabs ? slabs : 0;
}

template <class A>
size_t shared_bytes(int resident) {
  const int slabs = resident ? resident + 2 : 4;
  return (slabs * kSlabElements<A> + kTileElements<A>)*sizeof(A) + ForwardTile<A>::kSharedBytes;
}

template <class A>
__global__ void __launch_bounds__(kThreads)
    attention_forward_plain_kernel(const AttentionForward __grid_constant__ args,
                                   const int resident) {
  using Scores = ForwardTile<A>;
  constexpr int kRows = Scores::kRows, kThreadRows = Scores::kThreadRows;
  constexpr int kGroups = kOutCols<A> / kCols, kParts = kKeys / kDepth<A>;
  SharedMemory shared;
  A* const queries = shared.take<A>(resident * kSlabElements<A>);
  Ring<A> ring(shared, resident ? 1 : 2);
  A* const p = shared.take<A>(kTileElements<A>);
  Scores tile(args, shared);

  // The last queries first: behind a diagonal they have the most to do.
  const int outs = ceil_div(args.value_dim, kOutCols<A>);
  const int tiles = ceil_div(args.seq_q, kQueries<A>);
  const int block = static_cast<int>(blockIdx.x);
  const int first_out = block % outs * kOutCols<A>;
  const int first_query = (tiles - 1 - block / outs % tiles) * kQueries<A>;
  const int head = static_cast<int>(block / outs / tiles % args.heads);
  const int batch = static_cast<int>(block / outs / tiles / args.heads);
  tile.go_to(batch, head, first_query);
  const Sequence& sequence = tile->sequence;
  if (first_query >= sequence.queries) return;
  const KeySpan seen = tile.keys();
  int first_key = seen.first;

  bool has_queries = false;
  const int slabs = ceil_div(args.head_dim, kDepth<A>);
  const auto query_slab = [&](A* stage, int i) {
    return resident ? queries + i * kSlabElements<A> : stage + kSlabElements<A>;
  };
  const auto load_scores = [&](A* stage, int i) {
    const int col = i * kDepth<A>;
    load_slab<kKeys, kDepth<A>, kThreads>(
        stage,
        key_rows_of(args, args.key, args.head_dim, tile->batch, tile->kv_head, sequence.first_k),
        tile->first_key, col, tile->keys);
    if (has_queries) return;
    load_slab<kQueries<A>, kDepth<A>, kThreads>(
        query_slab(stage, i),
        rows_of(args, args.query, args.head_dim, tile->batch, tile->head, sequence.first_q),
        tile->first_query, col, tile->queries);
    has_queries = resident && i + 1 == slabs;
  };
  const auto load_values = [&](A* stage, int group, int part) {
    load_slab<kDepth<A>, kCols, kThreads>(
        stage,
        key_rows_of(args, args.value, args.value_dim, tile->batch, tile->kv_head, sequence.first_k),
        tile->first_key + part * kDepth<A>, first_out + group * kCols,
        tile->keys >> part * kDepth<A>);
  };
  const auto load_next_tile = [&](A* stage) {
    while (first_key < seen.last && !tile.enter(first_key)) first_key += kKeys;
    if (first_key < seen.last) load_scores(stage, 0);
  };

  A out[kGroups][kRows][4] = {};
  A largest[kRows], total[kRows];  // total: of the thread's own keys
  ONEPASS_UNROLL
  for (int r = 0; r < kRows; ++r) largest[r] = -static_cast<A>(INFINITY), total[r] = 0;
  if (args.sinks) {
    const A sink = load_as<A>(args.sinks, args.sinks_dtype, head);
    ONEPASS_UNROLL
    for (int r = 0; r < kRows; ++r) {
      largest[r] = sink;
      total[r] = thread_col() == 0 && sink != -static_cast<A>(INFINITY) ? A(1) : A(0);
    }
  }
  ring.begin(load_next_tile);
  while (first_key < seen.last) {
    A score[kRows][4] = {};
    ring.run(
        slabs, load_scores,
        [&](A* stage, int i) {
          const int depth = static_cast<int>(args.head_dim) - i * kDepth<A>;
          add_dots<kThreadRows>(score, query_slab(stage, i), stage,
                                depth < kDepth<A> ? depth : kDepth<A>);
        },
        [&](A* stage) { load_values(stage, 0, 0); });

    tile.for_each_score(score, [&](int r, int c, const Score<A>& of, const RowScores<A>&, int) {
      score[r][c] = of.value;
    });
    ONEPASS_UNROLL
    for (int r = 0; r < kRows; ++r) {
      A now = largest[r];
      ONEPASS_UNROLL
      for (int c = 0; c < 4; ++c) now = std::fmax(now, score[r][c]);
      ONEPASS_UNROLL
      for (int lanes = kColumnThreads / 2; lanes > 0; lanes /= 2) {
        now = std::fmax(now, __shfl_xor_sync(kAllLanes, now, lanes));
      }
      const A base = now == -static_cast<A>(INFINITY) ? A(0) : now;  // the row has seen no key yet
      const A shrink = std::exp(largest[r] - base);
      largest[r] = now;
      total[r] *= shrink;
      ONEPASS_UNROLL
      for (int i = 0; i < 4 * kGroups; ++i) out[i / 4][r][i % 4] *= shrink;
      ONEPASS_UNROLL
      for (int c = 0; c < 4; ++c) {
        const A weight = std::exp(score[r][c] - base);
        total[r] += weight;
        p[tile.row(r) * kStride<A, kKeys> + tile.col(c)] = tile.keeps(r, c) ? weight : A(0);
      }
    }

    ONEPASS_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      if (first_out + g * kCols >= args.value_dim) continue;
      ring.run(
          kParts, [&](A* stage, int part) { load_values(stage, g, part); },
          [&](A* stage, int part) { add_rows<kThreadRows>(out[g], p + part * kDepth<A>, stage); },
          [&](A* stage) {
            if (g + 1 < kGroups && first_out + (g + 1) * kCols < args.value_dim) {
              load_values(stage, g + 1, 0);
            } else {
              first_key += kKeys;
              load_next_tile(stage);
            }
          });
    }
  }

  ONEPASS_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ONEPASS_UNROLL
    for (int lanes = kColumnThreads / 2; lanes > 0; lanes /= 2) {
      total[r] += __shfl_xor_sync(kAllLanes, total[r], lanes);
    }
    const int query = tile->first_query + tile.row(r);
    if (query >= sequence.queries) continue;
    if (first_out == 0 && thread_col() == 0) {
      const int64_t row = lse_row(args, sequence, tile->batch, tile->head, query);
      const A log = std::log(total[r]), lse = largest[r] + log;
      const A rest = total[r] == A(0) ? A(0) : lost_in_sum(largest[r], log, lse);
      store_global(static_cast<A*>(args.lse) + row, lse);
      store_global(static_cast<A*>(args.lse_rest) + row, rest);
    }
    const A factor = total[r] == A(0) ? A(0) : tile.keep_scale() / total[r];
    ONEPASS_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      A value[4];
      ONEPASS_UNROLL
      for (int c = 0; c < 4; ++c) value[c] = out[g][r][c] * factor;
      store_columns(
          args.output, args.dtype,
          rows_of(args, args.output, args.value_dim, tile->batch, tile->head, sequence.first_q)
              .offset(query),
          first_out + g * kCols + 4 * thread_col(), args.value_dim, value);
    }
  }
}

Plan plan_forward(const AttentionForward& args, const Machine&) {
  Plan plan{};
  plan.kernel_name = "attention_forward_plain_kernel";
  plan.parallel = true;
  plan.reason = reason_of(args);
  visit_accumulator(args.dtype, [&]<class A>() {
    plan.rows_per_tile = kQueries<A>;
    plan.splits = args.batch * args.heads * ceil_div(args.seq_q, kQueries<A>) *
                  ceil_div(args.value_dim, kOutCols<A>);
  });
  return plan;
}

void run_forward(const AttentionForward& args, const Plan& plan, void*, const Context& context) {
  visit_accumulator(args.dtype, [&]<class A>() {
    const int resident = resident_slabs<A>(args);
    launch<attention_forward_plain_kernel<A>>(
        {.blocks = plan.splits, .threads = kThreads, .shared_bytes = shared_bytes<A>(resident)},
        context.stream, args, resident);
  });
}

}  // namespace
}  // namespace plain

Operator<AttentionForward> plain_attention_forward() {
  return {plain::plan_forward, plain::run_forward};
}

}  // namespace onepass::cuda
