// How a backward is divided into pieces, and where its sums and its scratch lie.
#pragma once

#include "cpu/attention/scores.h"
#include "cpu/attention/work.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

inline constexpr int64_t kTileQueries = 64;
inline constexpr int64_t kPieces = 16;  // that a call should have at least, if splits can give them
inline constexpr int64_t kMaxSplits = 8;    // copies of dquery in float32
inline constexpr int64_t kRowsAtOnce = 64;  // of the last region

// How a call is divided; it depends on the shape alone.
struct BackwardShape {
  int64_t keys;           // of a block, a multiple of the lanes
  int64_t blocks;         // of the longest sequence
  int64_t query_columns;  // head_dim and value_dim, whole vectors
  int64_t value_columns;
  bool all_batches;  // dbias is summed over batches, so a piece has them all
  bool all_heads;
  int64_t units;  // pairs of (batch, kv head), or groups of them
  int64_t splits;
  bool wide_bias;  // dbias is summed in float32 in the workspace
  Slots slots;
};

inline BackwardShape backward_shape_of(const AttentionBackward& args) {
  const int64_t dim = std::max(args.head_dim, args.value_dim);
  BackwardShape shape{};
  shape.keys = dim <= 128 ? kTileKeys : dim <= 256 ? kTileKeys / 2 : kTileKeys / 4;
  shape.blocks = ceil_div(args.seq_k, shape.keys);
  shape.query_columns = round_up(args.head_dim, kLanes<float>);
  shape.value_columns = round_up(args.value_dim, kLanes<float>);
  const bool dbias = args.dbias.data != nullptr;
  shape.all_batches = dbias && args.dbias.batch_stride == 0;
  shape.all_heads = dbias && args.dbias.head_stride == 0;
  shape.units = (shape.all_batches ? 1 : args.batch) * (shape.all_heads ? 1 : args.kv_heads);
  shape.splits = std::clamp<int64_t>(ceil_div(kPieces, std::max<int64_t>(shape.units, 1)), 1,
                                     std::clamp<int64_t>(shape.blocks, 1, kMaxSplits));
  shape.wide_bias = dbias && args.bias_dtype != DType::kFloat32;
  return shape;
}

// The memory that all pieces of work share.
struct BackwardSums {
  int32_t* batches;  // (batch,) in the order in which they are taken
  float* delta;      // (batch, heads, seq_q) or (heads, total_q), laid out like the LSE
  float* dquery;     // (splits, heads, total_q, query_columns)
  float* dbias;      // (dbias_numel,) if wide_bias
  double* dslopes;   // (splits, batch, heads)
  double* dsinks;    // (batch, heads)
};

inline BackwardSums backward_sums_of(const AttentionBackward& args, const BackwardShape& shape,
                                     Arena& arena) {
  BackwardSums s;
  s.batches = arena.take<int32_t>(args.batch);
  s.delta = arena.take<float>(args.heads * args.total_q);
  s.dquery = arena.take<float>(
      args.dquery.data ? shape.splits * args.heads * args.total_q * shape.query_columns : 0);
  s.dbias = arena.take<float>(shape.wide_bias ? args.dbias_numel : 0);
  s.dslopes = arena.take<double>(args.dslopes ? shape.splits * args.batch * args.heads : 0);
  s.dsinks = arena.take<double>(args.dsinks ? args.batch * args.heads : 0);
  return s;
}

// The sums of dquery for a query of a sequence.
inline float* dquery_sums(const AttentionBackward& args, const BackwardShape& shape,
                          const BackwardSums& sums, const Sequence& sequence, int64_t split,
                          int64_t batch, int64_t head, int64_t query) {
  const int64_t row = (args.cu_seq_q ? sequence.first_q : batch * args.seq_q) + query;
  return sums.dquery + ((split * args.heads + head) * args.total_q + row) * shape.query_columns;
}

// The scratch of a thread.
template <class M>
struct BackwardScratch {
  using E = typename M::Element;
  E* key_panel;     // (cells of head_dim, keys)
  E* value_panel;   // (cells of value_dim, keys)
  E* key_cells;     // (keys / kPerCell, query_columns) cells
  E* query_rows;    // (kTileQueries, head_dim)
  E* query_cells;   // (kTileQueries / kPerCell, query_columns) cells
  E* doutput_rows;  // (kTileQueries, value_dim)
  E* doutput_cells;
  float* scores;   // (kTileQueries, keys), then P
  float* dscores;  // (kTileQueries, keys) dP, then dS
  E* p_cells;      // (kTileQueries / kPerCell, keys) cells, unless a cell is a float
  E* ds_cells;
  E* ds_rows;     // (kTileQueries, keys)
  float* dkey;    // (keys, query_columns)
  float* dvalue;  // (keys, value_columns)
};

template <class M>
BackwardScratch<M> backward_scratch_of(const AttentionBackward& args, const BackwardShape& shape,
                                       Arena& arena) {
  using E = typename M::Element;
  const int64_t head_dim = round_up(args.head_dim, M::kPerCell);
  const int64_t value_dim = round_up(args.value_dim, M::kPerCell);
  const int64_t cells = M::kPerCell == 1 ? 0 : kTileQueries * shape.keys;
  BackwardScratch<M> s;
  s.key_panel = arena.take<E>(head_dim * shape.keys);
  s.value_panel = arena.take<E>(value_dim * shape.keys);
  s.key_cells = arena.take<E>(shape.keys * shape.query_columns);
  s.query_rows = arena.take<E>(M::kPerCell == 1 ? 0 : kTileQueries * head_dim);
  s.query_cells = arena.take<E>(kTileQueries * shape.query_columns);
  s.doutput_rows = arena.take<E>(M::kPerCell == 1 ? 0 : kTileQueries * value_dim);
  s.doutput_cells = arena.take<E>(kTileQueries * shape.value_columns);
  s.scores = arena.take<float>(kTileQueries * shape.keys);
  s.dscores = arena.take<float>(kTileQueries * shape.keys);
  s.p_cells = arena.take<E>(cells);
  s.ds_cells = arena.take<E>(cells);
  s.ds_rows = arena.take<E>(cells);
  s.dkey = arena.take<float>(shape.keys * shape.query_columns);
  s.dvalue = arena.take<float>(shape.keys * shape.value_columns);
  return s;
}

// A tile of scores of a head: queries q0 + [first, last), `keys` keys from k0 on.
struct BackwardTile {
  int64_t batch;
  int64_t head;
  int64_t q0;
  int64_t first;
  int64_t last;
  int64_t k0;
  int64_t keys;
};

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
