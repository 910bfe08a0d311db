// Attention forward of float32 and float64, and of head dimensions beyond those of the 16-bit
// tiles.
//
//   scalar: with m the largest score of the row so far, p = exp(score - m), summed in l; sums made
//           with an older m are multiplied by exp(older - m)
//
// One block per tile of queries of a (batch, head) and kOutCols columns of the output. It goes
// through the tiles of keys once: their scores are computed in registers (kDepth columns of Q and K
// at a time), P stays there (Tf32) or goes through shared memory (MultiplyAdds), and the output
// stays in registers. Q stays in shared memory if it has at most kResidentSlabs slabs; otherwise it
// is read again for every tile of keys. Bytes per block: O and the keys and values that it sees
// once, and Q once if it is resident. Done when products bound its time.
#include "cuda/attention/attention.h"
#include "cuda/attention/order.h"
#include "cuda/attention/plain.cuh"
#include "cuda/launch.cuh"

namespace onepass::cuda {
namespace plain {
namespace {

constexpr int kThreads = 128;
constexpr int kResidentSlabs = 6;  // of Q

template <class A>
int resident_slabs(const Attention& args) {
  const int slabs = ceil_div(args.head_dim, kDepth<A>);
  return slabs <= kResidentSlabs ? slabs : 0;
}

template <class Kind>
constexpr size_t shared_bytes(int resident) {
  using A = typename Kind::Accumulator;
  const int of_queries = (resident ? resident : 2) * kSlabElements<A>;
  return (kTileElements<Kind> + Ring<A, 1>::kElements + of_queries) * sizeof(A) +
         Tile<Kind, kThreads>::kSharedBytes;
}
static_assert(shared_bytes<MultiplyAdds<double>>(kResidentSlabs) <= kSharedOfAll);
static_assert(shared_bytes<MultiplyAdds<float>>(kResidentSlabs) <= kSharedOfAll);
static_assert(shared_bytes<Tf32>(kResidentSlabs) <= kSharedOfAll);

template <class Kind>
__global__ void __launch_bounds__(kThreads, sizeof(typename Kind::Accumulator) == 8 ? 1 : 3)
    attention_forward_plain_kernel(const AttentionForward __grid_constant__ args,
                                   const NumbersOf<Kind> __grid_constant__ numbers,
                                   const int resident, const BlockOrder order) {
  using A = typename Kind::Accumulator;
  using Own = typename Kind::template Scores<kThreads>;
  using Results = typename Kind::template QueryResults<kThreads>;
  constexpr int kRows = Own::kRows, kParts = kKeys / kDepth<A>;
  static_assert(Results::kRows == kRows);
  SharedMemory shared;
  const int outs = ceil_div(args.value_dim, kOutCols<A>);
  Tile<Kind, kThreads> tile(args, numbers, shared, static_cast<int>(blockIdx.x) % outs);
  A* const p = shared.take<A>(kTileElements<Kind>);  // or scratch for scores
  Ring<A, 1> ring(shared);
  A* const queries = shared.take<A>((resident ? resident : 2) * kSlabElements<A>);

  // Under a diagonal the last queries have the most work.
  const auto [batch, kv_head, head, turn] = order.place(blockIdx.x / outs);
  const int first_query = (static_cast<int>(order.tiles) - 1 - turn) * kQueries<A>;
  tile.go_to(batch, head, first_query);
  const Sequence& sequence = tile->sequence;
  if (first_query >= sequence.queries) return;
  int first_key = tile.first_seen();

  bool has_queries = false;
  const int slabs = ceil_div(args.head_dim, kDepth<A>);
  const auto query_slab = [&](int i) {
    return queries + (resident ? i : i % 2) * kSlabElements<A>;
  };
  const auto load_scores = [&](A* stage, int i) {
    const int col = i * kDepth<A>;
    load_slab<kKeys, kDepth<A>, kThreads>(
        stage,
        key_rows_of(args, args.key, args.head_dim, tile->batch, tile->kv_head, sequence.first_k),
        tile->first_key, col, tile->keys);
    if (resident && has_queries) return;
    load_slab<kQueries<A>, kDepth<A>, kThreads>(
        query_slab(i),
        rows_of(args, args.query, args.head_dim, tile->batch, tile->head, sequence.first_q),
        tile->first_query, col, tile.queries());
  };
  const auto load_values = [&](A* stage, int group, int part) {
    load_slab<kDepth<A>, kCols, kThreads>(
        stage,
        key_rows_of(args, args.value, args.value_dim, tile->batch, tile->kv_head, sequence.first_k),
        tile->first_key + part * kDepth<A>, tile->first_out + group * kCols,
        tile->keys >> part * kDepth<A>);
  };
  const auto load_next_tile = [&](A* stage) {
    while (first_key < tile.last_seen() && !tile.enter(first_key)) first_key += kKeys;
    if (first_key < tile.last_seen()) load_scores(stage, 0);
  };

  // The largest score and the sum of a row, kept in shared memory next to its P.
  struct Normalizer {
    A largest;
    A total;
  };
  const auto normalizer = [&](int r) {
    return reinterpret_cast<Normalizer*>(p + tile.row(r) * Kind::kFactorStride + kKeys);
  };
  if (Own::row_lane() == 0) {
    const A none = -static_cast<A>(INFINITY);
    const A sink = args.sinks ? load_as<A>(args.sinks, args.sinks_dtype, head) : none;
    for (int r = 0; r < kRows; ++r) *normalizer(r) = {sink, sink == none ? A(0) : A(1)};
  }
  A out[kGroups<A>][kRows][Results::kCols] = {};
  const auto add_values = [&]<int kGroup>(const auto& score, auto&& next) {
    ring.run(
        kParts, [&](A* stage, int part) { load_values(stage, kGroup, part); },
        [&](A* stage, int part) {
          if constexpr (Kind::kScoresAreFactors) {
            Kind::template add_rows<kThreads>(out[kGroup], score, part, stage);
          } else {
            Kind::template add_rows<kThreads>(out[kGroup], p, part, stage);
          }
        },
        next);
  };
  const auto leave_tile = [&](A* stage) {
    has_queries = true;
    first_key += kKeys;
    load_next_tile(stage);
  };
  ring.begin(load_next_tile);
  while (first_key < tile.last_seen()) {
    A score[kRows][Own::kCols] = {};
    ring.run(
        slabs, load_scores,
        [&](A* stage, int i) {
          const int depth = static_cast<int>(args.head_dim) - i * kDepth<A>;
          Kind::template add_dots<kThreads>(score, query_slab(i), stage,
                                            depth < kDepth<A> ? depth : kDepth<A>);
        },
        [&](A* stage) { load_values(stage, 0, 0); });

    tile.to_scores(score, p);
    ONEPASS_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Normalizer older = *normalizer(r);
      A largest = older.largest, sum = 0;
      ONEPASS_UNROLL
      for (int c = 0; c < Own::kCols; ++c) largest = std::fmax(largest, score[r][c]);
      ONEPASS_UNROLL
      for (int lanes = Own::kRowLanes / 2; lanes > 0; lanes /= 2) {
        largest = std::fmax(largest, __shfl_xor_sync(kAllLanes, largest, lanes));
      }
      // The row may have seen no key yet.
      const A base = largest == -static_cast<A>(INFINITY) ? A(0) : largest;
      ONEPASS_UNROLL
      for (int c = 0; c < Own::kCols; ++c) {
        const A weight = std::exp(score[r][c] - base);
        sum += weight;
        const A kept = tile.keeps(r, c) ? weight : A(0);
        if constexpr (Kind::kScoresAreFactors) {
          score[r][c] = kept;
        } else {
          p[tile.row(r) * Kind::kFactorStride + tile.col(c)] = kept;
        }
      }
      ONEPASS_UNROLL
      for (int lanes = Own::kRowLanes / 2; lanes > 0; lanes /= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, lanes);
      }
      const A shrink = std::exp(older.largest - base);
      ONEPASS_UNROLL
      for (int g = 0; g < kGroups<A>; ++g) {
        ONEPASS_UNROLL
        for (int c = 0; c < Results::kCols; ++c) out[g][r][c] *= shrink;
      }
      __syncwarp();  // all lanes have read the older one
      if (Own::row_lane() == 0) *normalizer(r) = {largest, multiply_add(older.total, shrink, sum)};
    }

    const bool two = kGroups<A> > 1 && tile->first_out + kCols < args.value_dim;
    add_values.template operator()<0>(
        score, [&](A* stage) { two ? load_values(stage, 1, 0) : leave_tile(stage); });
    if constexpr (kGroups<A> > 1) {
      if (two) add_values.template operator()<1>(score, leave_tile);
    }
  }

  __syncthreads();  // the normalizers are written, also if there was no tile
  ONEPASS_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const int query = tile.query(r);
    if (query >= sequence.queries) continue;
    const auto [largest, total] = *normalizer(r);
    if (tile->first_out == 0 && Own::row_lane() == 0) {
      const int64_t row = lse_row(args, sequence, tile->batch, tile->head, query);
      const A log = std::log(total), lse = largest + log;
      store_global(static_cast<A*>(args.lse) + row, lse);
      store_global(static_cast<A*>(args.lse_rest) + row, lost_in_sum(largest, log, lse));
    }
    const A factor = total == A(0) ? A(0) : tile.keep_scale() / total;
    ONEPASS_UNROLL
    for (int g = 0; g < kGroups<A>; ++g) {
      store_row<Results>(
          args.output, args.dtype,
          rows_of(args, args.output, args.value_dim, tile->batch, tile->head, sequence.first_q)
              .offset(query),
          tile->first_out + g * kCols, args.value_dim, out[g][r], factor);
    }
  }
}

Plan plan_forward(const AttentionForward& args, const Machine&) {
  Plan plan{};
  plan.kernel_name = "attention_forward_plain_kernel";
  plan.reason = reason_of(args);
  visit_kind(args, [&]<class Kind>() {
    using A = typename Kind::Accumulator;
    plan.rows_per_tile = kQueries<A>;
    plan.splits = args.batch * args.heads * ceil_div(args.seq_q, kQueries<A>) *
                  ceil_div(args.value_dim, kOutCols<A>);
  });
  return plan;
}

void run_forward(const AttentionForward& args, const Plan& plan, void*, const Context& context) {
  if (plan.splits == 0) return;
  visit_kind(args, [&]<class Kind>() {
    using A = typename Kind::Accumulator;
    const int resident = resident_slabs<A>(args);
    const BlockOrder order = order_of_blocks(
        args.batch, args.kv_heads, args.heads / args.kv_heads, ceil_div(args.seq_q, kQueries<A>),
        args.seq_k * (args.head_dim + args.value_dim) * size_of(args.dtype),
        {l2_bytes(), multiprocessors()});
    launch<attention_forward_plain_kernel<Kind>>(
        {.blocks = plan.splits, .threads = kThreads, .shared_bytes = shared_bytes<Kind>(resident)},
        context.stream, args, NumbersOf<Kind>(args), resident, order);
  });
}

}  // namespace
}  // namespace plain

Operator<AttentionForward> plain_attention_forward() {
  return {plain::plan_forward, plain::run_forward};
}

}  // namespace onepass::cuda
