// Attention backward in one pass over the scores: a piece of work owns blocks of keys, and for each
// goes over the queries that see it in tiles, five products each:
//
//   S = Q K^T;  P = exp(scale S - lse);  dP = dO V^T;  dS = P (dP - delta)
//   dV += P^T dO;  dK += dS^T Q;  dQ += dS K
//
// Keys lie in vector lanes, so that only K and V are transposed, once per block; P and dS stay in
// L2. dK and dV of a block are summed in scratch over all the heads that share it and written once.
// dQ gathers contributions of all blocks: each split of the blocks has float32 sums of its own,
// which are added up in order at the end. Splits, like everything that decides an order of
// additions, follow from the shape alone: the result is the same for any number of threads.
#include <cmath>

#include "core/philox.h"
#include "cpu/attention/attention.h"
#include "cpu/attention/elementary.h"
#include "cpu/attention/visible.h"
#include "cpu/attention/work.h"
#include "cpu/random.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

constexpr int64_t kTileQueries = 64;
constexpr int64_t kPieces = 16;      // that a call should have at least, if splits can give them
constexpr int64_t kMaxSplits = 8;    // copies of dquery in float32
constexpr int64_t kRowsAtOnce = 64;  // of the last region

// How a call is cut up: of the shape alone.
struct Shape {
  int64_t keys;           // of a block, a multiple of the lanes
  int64_t blocks;         // of the longest sequence
  int64_t query_columns;  // head_dim and value_dim, whole vectors
  int64_t value_columns;
  bool all_batches;  // dbias is summed over batches, so a piece has them all
  bool all_heads;
  int64_t units;  // (batch, kv head) or what stands for several
  int64_t splits;
  bool wide_bias;  // dbias is summed in float32 in the workspace
};

Shape shape_of(const AttentionBackward& args) {
  const int64_t dim = std::max(args.head_dim, args.value_dim);
  Shape shape{};
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

// Of the whole call.
struct Shared {
  float* delta;     // (batch, heads, seq_q) or (heads, total_q), as the LSE lies
  float* dquery;    // (splits, heads, total_q, query_columns)
  float* dbias;     // (dbias_numel,) if wide_bias
  double* dslopes;  // (splits, batch, heads)
  double* dsinks;   // (batch, heads)
};

Shared shared_of(const AttentionBackward& args, const Shape& shape, Arena& arena) {
  Shared s;
  s.delta = arena.take<float>(args.heads * args.total_q);
  s.dquery = arena.take<float>(
      args.dquery.data ? shape.splits * args.heads * args.total_q * shape.query_columns : 0);
  s.dbias = arena.take<float>(shape.wide_bias ? args.dbias_numel : 0);
  s.dslopes = arena.take<double>(args.dslopes ? shape.splits * args.batch * args.heads : 0);
  s.dsinks = arena.take<double>(args.dsinks ? args.batch * args.heads : 0);
  return s;
}

template <class M>
struct Scratch {
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
  E* p_cells;      // (kTileQueries / kPerCell, keys) cells, if those are not the numbers themselves
  E* ds_cells;
  E* ds_rows;     // (kTileQueries, keys)
  float* dkey;    // (keys, query_columns)
  float* dvalue;  // (keys, value_columns)
};

template <class M>
Scratch<M> scratch_of(const AttentionBackward& args, const Shape& shape, Arena& arena) {
  using E = typename M::Element;
  const int64_t head_dim = round_up(args.head_dim, M::kPerCell);
  const int64_t value_dim = round_up(args.value_dim, M::kPerCell);
  const int64_t cells = M::kPerCell == 1 ? 0 : kTileQueries * shape.keys;
  Scratch<M> s;
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

// ---- before all blocks --------------------------------------------------------------------------

// The scalar products of `count` pairs of rows, a pair per lane, added up in the order of the
// products that dP is made of: where a row has all its weight on one key, output is that value
// and dP - delta is exactly 0.
template <class Left, class Right>
Vec<float> row_dots(Left&& left, Right&& right, int64_t count, int64_t value_dim) {
  constexpr int n = kLanes<float>;
  Vec<float> total = {};
  for (int64_t first = 0; first < value_dim; first += kChain) {
    const int64_t size = std::min(kChain, value_dim - first);
    alignas(64) float panels[2][kChain * n];
    pack_panel<Fma>([&](int64_t i) { return left(i) + first; }, count, size, n, panels[0]);
    pack_panel<Fma>([&](int64_t i) { return right(i) + first; }, count, size, n, panels[1]);
    Vec<float> sum = {};
    for (int64_t d = 0; d < size; ++d) {
      sum = fma<float>(load<float>(panels[0] + d * n), load<float>(panels[1] + d * n), sum);
    }
    total += sum;
  }
  return total;
}

template <class T>
void write_delta(const AttentionBackward& args, const Shared& shared, int64_t batch, int64_t head,
                 int64_t first) {
  const Sequence sequence = sequence_of(args, batch);
  const Rows<const T> outputs(args.output, batch, head, sequence.first_q);
  const Rows<const T> doutputs(args.doutput, batch, head, sequence.first_q);
  const int64_t last = std::min(first + kRowsAtOnce, sequence.queries);
  for (int64_t query = first; query < last; query += kLanes<float>) {
    const int64_t count = std::min<int64_t>(kLanes<float>, last - query);
    const Vec<float> dots =
        row_dots([&](int64_t i) { return outputs(query + i); },
                 [&](int64_t i) { return doutputs(query + i); }, count, args.value_dim);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = lse_row(args, sequence, batch, head, query + i);
      const float dlse = args.dlse ? static_cast<const float*>(args.dlse)[row] : 0.0f;
      shared.delta[row] = dots[i] - dlse;
    }
  }
}

// ---- a piece of work ----------------------------------------------------------------------------

// Rows as the first factor of a product (element by element) and as the second (cells of rows).
template <class M>
struct Operand {
  const typename M::Element* rows;
  int64_t row_stride;
  const typename M::Element* cells;
  int64_t cell_step;
};

template <class T>
class Backward {
  using M = MultiplierOf<T>;
  using E = typename M::Element;
  static constexpr int n = kLanes<float>;

 public:
  Backward(const AttentionBackward& args, const Shape& shape, const Shared& shared,
           const Scratch<M>& scratch)
      : args_(args), shape_(shape), shared_(shared), s_(scratch) {
    if (args.seed) dropout_ = make_dropout(args.seed, args.dropout_p);
    dbias_ = shape.wide_bias ? shared.dbias : static_cast<float*>(args.dbias.data);
  }

  void piece(int64_t index) {
    split_ = index % shape_.splits;
    const int64_t unit = index / shape_.splits;
    const int64_t heads = shape_.all_heads ? 1 : args_.kv_heads;
    const int64_t first_batch = shape_.all_batches ? 0 : unit / heads;
    const int64_t last_batch = shape_.all_batches ? args_.batch : first_batch + 1;
    const int64_t first_head = shape_.all_heads ? 0 : unit % heads;
    const int64_t last_head = shape_.all_heads ? args_.kv_heads : first_head + 1;
    if (dbias_) zero_dbias(first_batch, first_head);
    for (int64_t batch = first_batch; batch < last_batch; ++batch) {
      for (int64_t kv_head = first_head; kv_head < last_head; ++kv_head) {
        keys_of_head(batch, kv_head);
      }
    }
  }

 private:
  // ---- a (batch, kv head)
  // ------------------------------------------------------------------------

  void keys_of_head(int64_t batch, int64_t kv_head) {
    sequence_ = sequence_of(args_, batch);
    const int64_t group = args_.heads / args_.kv_heads;
    for (int64_t g = 0; g < group; ++g) begin_head(batch, kv_head * group + g);
    for (int64_t k0 = split_ * shape_.keys; k0 < sequence_.keys;
         k0 += shape_.splits * shape_.keys) {
      const int64_t count = std::min(shape_.keys, sequence_.keys - k0);
      std::fill_n(s_.dkey, count * shape_.query_columns, 0.0f);
      std::fill_n(s_.dvalue, count * shape_.value_columns, 0.0f);
      block(batch, kv_head, k0, count);
      write(args_.dkey, batch, kv_head, k0, count, s_.dkey, shape_.query_columns, args_.head_dim,
            static_cast<float>(args_.scale));
      write(args_.dvalue, batch, kv_head, k0, count, s_.dvalue, shape_.value_columns,
            args_.value_dim, 1.0f);
    }
  }

  void write(const Strided& to, int64_t batch, int64_t kv_head, int64_t k0, int64_t count,
             const float* sums, int64_t columns, int64_t dim, float factor) const {
    if (to.data == nullptr) return;
    const Rows<T> rows(to, batch, kv_head, sequence_.first_k);
    for (int64_t i = 0; i < count; ++i) {
      T* row = rows(k0 + i);
      for_each_vector<float>(0, dim, [&](int64_t d, auto lanes) {
        store<float>(row + d, load<float>(sums + i * columns + d) * factor, lanes);
      });
    }
  }

  // Zero sums, and what a sink gets.
  void begin_head(int64_t batch, int64_t head) {
    if (args_.dquery.data) {
      std::fill_n(dquery_sums(split_, batch, head, 0), sequence_.queries * shape_.query_columns,
                  0.0f);
    }
    if (args_.dslopes) {
      shared_.dslopes[(split_ * args_.batch + batch) * args_.heads + head] = 0.0;
    }
    if (args_.dsinks && split_ == 0) {
      const double sink = sink_of(args_, head);
      double sum = 0.0;
      for (int64_t query = 0; query < sequence_.queries; ++query) {
        sum -= std::exp(sink - lse(batch, head, query)) * delta(batch, head, query);
      }
      shared_.dsinks[batch * args_.heads + head] = sum;
    }
  }

  float lse(int64_t batch, int64_t head, int64_t query) const {
    return static_cast<const float*>(args_.lse)[lse_row(args_, sequence_, batch, head, query)];
  }
  float lse_rest(int64_t batch, int64_t head, int64_t query) const {
    const float* rest = static_cast<const float*>(args_.lse_rest);
    return rest ? rest[lse_row(args_, sequence_, batch, head, query)] : 0.0f;
  }
  float delta(int64_t batch, int64_t head, int64_t query) const {
    return shared_.delta[lse_row(args_, sequence_, batch, head, query)];
  }
  float* dquery_sums(int64_t split, int64_t batch, int64_t head, int64_t query) const {
    const int64_t row = (args_.cu_seq_q ? sequence_.first_q : batch * args_.seq_q) + query;
    return shared_.dquery +
           ((split * args_.heads + head) * args_.total_q + row) * shape_.query_columns;
  }

  // The columns of dbias that belong to this split's blocks.
  void zero_dbias(int64_t batch, int64_t kv_head) {
    const int64_t group = args_.heads / args_.kv_heads;
    const int64_t heads = args_.dbias.head_stride != 0 ? group : 1;
    const int64_t rows = args_.dbias.row_stride != 0 ? args_.seq_q : 1;
    for (int64_t g = 0; g < heads; ++g) {
      const Rows<float> dbias(
          {dbias_, args_.dbias.batch_stride, args_.dbias.head_stride, args_.dbias.row_stride},
          batch, kv_head * group + g, 0);
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t k0 = split_ * shape_.keys; k0 < args_.seq_k;
             k0 += shape_.splits * shape_.keys) {
          std::fill_n(dbias(row) + k0, std::min(shape_.keys, args_.seq_k - k0), 0.0f);
        }
      }
    }
  }

  // ---- a block of keys
  // ---------------------------------------------------------------------------

  void block(int64_t batch, int64_t kv_head, int64_t k0, int64_t count) {
    const KeyRows<T> keys(args_, args_.key, batch, kv_head, sequence_.first_k);
    const KeyRows<T> values(args_, args_.value, batch, kv_head, sequence_.first_k);
    const auto key = [&](int64_t i) { return keys(k0 + i); };
    pack_panel<M>(key, count, args_.head_dim, shape_.keys, s_.key_panel);
    pack_panel<M>([&](int64_t i) { return values(k0 + i); }, count, args_.value_dim, shape_.keys,
                  s_.value_panel);
    if (args_.dquery.data) {
      pack_cells_of_rows<M>(key, count, args_.head_dim, shape_.query_columns, s_.key_cells);
    }
    const int64_t group = args_.heads / args_.kv_heads;
    const KeyRange queries = seeing_queries(args_, sequence_, k0, k0 + count);
    for (int64_t g = 0; g < group; ++g) {
      for (int64_t q0 = queries.first / kTileQueries * kTileQueries; q0 < queries.last;
           q0 += kTileQueries) {
        const int64_t first = std::max<int64_t>(queries.first - q0, 0);
        tile({batch, kv_head * group + g, q0, first / M::kPerCell * M::kPerCell,
              std::min(queries.last - q0, kTileQueries), k0, count});
      }
    }
  }

  // Queries q0 + [first, last) of a head and `keys` keys from k0 on.
  struct TileOf {
    int64_t batch;
    int64_t head;
    int64_t q0;
    int64_t first;
    int64_t last;
    int64_t k0;
    int64_t keys;
  };

  void tile(const TileOf& t) {
    const SeenKeys seen = seen_keys(args_, sequence_, t.q0 + t.first, t.q0 + t.last);
    const bool whole = seen.all_first <= t.k0 && seen.all_last >= t.k0 + t.keys;
    const bool changed = args_.softcap != 0 || args_.alibi_slopes || args_.bias.data ||
                         args_.mask.data || args_.seed;
    if (args_.mask.data && !read_mask(t)) return;
    if (dbias_) std::fill_n(dbias_row_, t.keys, 0.0f);

    const Operand<M> query = operand(args_.query, t, args_.head_dim, shape_.query_columns,
                                     s_.query_rows, s_.query_cells);
    const Operand<M> doutput = operand(args_.doutput, t, args_.value_dim, shape_.value_columns,
                                       s_.doutput_rows, s_.doutput_cells);
    const int64_t vectors = ceil_div(t.keys, n);
    const float one = 1.0f;
    // Keys behind the diagonal of a strip of queries, and queries before that of a strip of keys.
    const auto last_key = [&](int64_t row) {
      const KeyRange range = keys_of(args_, sequence_, t.q0 + t.first + row);
      return std::clamp<int64_t>(range.last - t.k0, 0, t.keys);
    };
    const auto scores = [&](const Operand<M>& a, int64_t dim, const E* panel, float factor,
                            float* c) {
      multiply_in_chains<M>({.a = a.rows,
                             .a_row = a.row_stride,
                             .a_step = M::kPerCell,
                             .b = panel,
                             .b_step = shape_.keys * M::kPerCell,
                             .steps = 0,
                             .c = c + t.first * shape_.keys,
                             .c_row = shape_.keys,
                             .update = Update::kStore,
                             .factor = &factor},
                            dim, t.last - t.first, vectors, [&](int64_t, int64_t end) {
                              return Part{0, kAllSteps, ceil_div(last_key(end - 1), n)};
                            });
    };
    // Scores come out as the forward's did, bit for bit where that multiplied float32.
    scores(query, args_.head_dim, s_.key_panel, static_cast<float>(args_.scale), s_.scores);
    scores(doutput, args_.value_dim, s_.value_panel, one, s_.dscores);

    if (whole && !changed) {
      sweep<false>(t);
    } else {
      sweep<true>(t);
    }

    const int64_t first_cell = t.first / M::kPerCell;
    const int64_t cells = ceil_div(t.last, M::kPerCell) - first_cell;
    const auto by_key = [&](const float* floats, const E* halves, const Operand<M>& b, float* c,
                            int64_t columns) {
      const E* a = M::kPerCell == 1 ? reinterpret_cast<const E*>(floats) : halves;
      multiply<M>({.a = a + first_cell * shape_.keys * M::kPerCell,
                   .a_row = M::kPerCell,
                   .a_step = shape_.keys * M::kPerCell,
                   .b = b.cells,
                   .b_step = b.cell_step,
                   .steps = cells,
                   .c = c,
                   .c_row = columns,
                   .update = Update::kAdd,
                   .factor = &one},
                  t.keys, columns / n, [&](int64_t key, int64_t end) {
                    const KeyRange range = seeing_queries(args_, sequence_, t.k0 + key, t.k0 + end);
                    const int64_t from = std::clamp<int64_t>(range.first - t.q0, t.first, t.last);
                    const int64_t to = std::clamp<int64_t>(range.last - t.q0, from, t.last);
                    return Part{from / M::kPerCell - first_cell,
                                ceil_div(to, M::kPerCell) - first_cell, columns / n};
                  });
    };
    if (args_.dvalue.data) {
      by_key(s_.scores, s_.p_cells, doutput, s_.dvalue, shape_.value_columns);
    }
    if (args_.dkey.data) by_key(s_.dscores, s_.ds_cells, query, s_.dkey, shape_.query_columns);
    if (args_.dquery.data) {
      const E* a = M::kPerCell == 1 ? reinterpret_cast<const E*>(s_.dscores) : s_.ds_rows;
      multiply<M>({.a = a + t.first * shape_.keys,
                   .a_row = shape_.keys,
                   .a_step = M::kPerCell,
                   .b = s_.key_cells,
                   .b_step = shape_.query_columns * M::kPerCell,
                   .steps = ceil_div(t.keys, M::kPerCell),
                   .c = dquery_sums(split_, t.batch, t.head, t.q0 + t.first),
                   .c_row = shape_.query_columns,
                   .update = Update::kAdd,
                   .factor = &one},
                  t.last - t.first, shape_.query_columns / n, [&](int64_t, int64_t end) {
                    return Part{0, ceil_div(last_key(end - 1), M::kPerCell),
                                shape_.query_columns / n};
                  });
    }
  }

  // Rows [first, last) of a tile in both forms, in place where they lie so already.
  Operand<M> operand(const Strided& tensor, const TileOf& t, int64_t dim, int64_t columns,
                     E* rows_scratch, E* cells_scratch) {
    const Rows<const T> all(tensor, t.batch, t.head, sequence_.first_q + t.q0);
    const auto row = [&](int64_t i) { return all(t.first + i); };
    const int64_t count = t.last - t.first;
    Operand<M> result{};
    if constexpr (M::kPerCell == 1) {
      // Rows that do not follow one another share cache sets: a copy pays.
      if (std::is_same_v<T, E> && all.stride() == dim && dim == columns) {
        result.cells = reinterpret_cast<const E*>(row(0));
      } else {
        pack_rows<M>(row, count, dim, columns, cells_scratch);
        result.cells = cells_scratch;
      }
      result.rows = result.cells;
      result.row_stride = result.cell_step = columns;
    } else {
      pack_cells_of_rows<M>(row, count, dim, columns, cells_scratch);
      result.cells = cells_scratch;
      result.cell_step = columns * M::kPerCell;
      if (dim % M::kPerCell == 0 && all.stride() == dim) {
        result.rows = reinterpret_cast<const E*>(row(0));
        result.row_stride = dim;
      } else {
        result.row_stride = round_up(dim, M::kPerCell);
        pack_rows<M>(row, count, dim, result.row_stride, rows_scratch);
        result.rows = rows_scratch;
      }
    }
    return result;
  }

  // Whether the mask lets anything through.
  bool read_mask(const TileOf& t) {
    uint32_t any = 0;
    for (int64_t row = t.first; row < t.last; ++row) {
      mask_bits(mask_row(args_, t.batch, t.head, t.q0 + row) + t.k0, t.keys, mask_[row]);
      for (const uint32_t word : mask_[row]) any |= word;
    }
    return any != 0;
  }

  // ---- from S and dP to P and dS
  // -----------------------------------------------------------------

  struct Both {
    Vec<float> p;
    Vec<float> ds;
  };

  // What a row of the tile needs beside its scores.
  struct RowOf {
    float lse;
    float lse_rest;  // what rounding took from it
    float delta;
    float position;  // of the query, minus that of the tile's first key
    int32_t first;   // keys that it sees
    int32_t last;
    const uint32_t* mask;
    const uint16_t* drawn;
    int64_t query;
  };

  template <bool kChanged>
  void sweep(const TileOf& t) {
    const int64_t vectors = ceil_div(t.keys, n);
    double dslope = 0.0;
    for (int64_t row = t.first; row < t.last; row += M::kPerCell) {
      RowOf rows[M::kPerCell];
      int64_t needed = vectors;  // behind them no query of the rows sees a key
      const int64_t here = std::min<int64_t>(M::kPerCell, t.last - row);
      for (int64_t i = 0; i < here; ++i) rows[i] = row_of<kChanged>(t, row + i, i);
      if constexpr (kChanged) {
        int32_t last = 0;
        for (int64_t i = 0; i < here; ++i) last = std::max(last, rows[i].last);
        needed = ceil_div(last, n);
      }
      for (int64_t v = 0; v < vectors; ++v) {
        Both result[M::kPerCell] = {};
        if (v < needed) {
          for (int64_t i = 0; i < here; ++i) {
            result[i] = one_vector<kChanged>(t, rows[i], row + i, v, dslope);
          }
        }
        const int64_t at = row * shape_.keys + v * n;
        if constexpr (M::kPerCell == 1) {
          store<float>(s_.scores + at, result[0].p);
          store<float>(s_.dscores + at, result[0].ds);
        } else {
          const Vec<float> p = M::cells_of(result[0].p, result[1].p);
          const Vec<float> ds = M::cells_of(result[0].ds, result[1].ds);
          const int64_t cell = row * shape_.keys + v * n * M::kPerCell;
          std::memcpy(s_.p_cells + cell, &p, sizeof(p));
          std::memcpy(s_.ds_cells + cell, &ds, sizeof(ds));
          for (int64_t i = 0; i < M::kPerCell; ++i) {
            store<float>(s_.ds_rows + at + i * shape_.keys, result[i].ds);
          }
        }
      }
    }
    if (dbias_ && args_.dbias.row_stride == 0) {
      float* dbias = dbias_at(t, 0);
      for (int64_t key = 0; key < t.keys; ++key) dbias[key] += dbias_row_[key];
    }
    if (args_.dslopes) {
      shared_.dslopes[(split_ * args_.batch + t.batch) * args_.heads + t.head] += dslope;
    }
  }

  template <bool kChanged>
  RowOf row_of(const TileOf& t, int64_t row, int64_t slot) {
    const int64_t query = t.q0 + row;
    RowOf of{};
    of.query = query;
    const float lse = this->lse(t.batch, t.head, query);
    // A row that saw nothing has no probabilities: exp(-inf) is 0.
    of.lse = lse == -std::numeric_limits<float>::infinity() ? -lse : lse;
    of.lse_rest = lse_rest(t.batch, t.head, query);
    of.delta = delta(t.batch, t.head, query);
    if constexpr (kChanged) {
      const KeyRange range = keys_of(args_, sequence_, query);
      of.first = static_cast<int32_t>(std::clamp<int64_t>(range.first - t.k0, 0, t.keys));
      of.last = static_cast<int32_t>(std::clamp<int64_t>(range.last - t.k0, 0, t.keys));
      of.position = static_cast<float>(query + sequence_.alignment - t.k0);
      of.mask = args_.mask.data ? mask_[row] : nullptr;
      if (args_.seed) of.drawn = draw_row(t, query, slot);
    }
    return of;
  }

  // The 16-bit values of a row, from the tile's first key on.
  const uint16_t* draw_row(const TileOf& t, int64_t query, int64_t slot) {
    const int64_t key = args_.key_offset + t.k0;
    const uint32_t head = static_cast<uint32_t>((args_.batch_offset + t.batch) * args_.total_heads +
                                                args_.head_offset + t.head);
    uint16_t* values = drawn_[slot];
    for (int64_t block = key / 8; block <= (key + t.keys - 1) / 8; block += kPhiloxLanes) {
      write_in_order(philox4x32(dropout_.key,
                                {{broadcast_word(static_cast<uint32_t>(args_.query_offset + query)),
                                  block_of_lane() + static_cast<uint32_t>(block),
                                  broadcast_word(head), broadcast_word(dropout_.offset)}}),
                     values + (block - key / 8) * kElementsPerBlock);
    }
    return values + key % 8;
  }

  template <bool kChanged>
  ONEPASS_INLINE Both one_vector(const TileOf& t, const RowOf& of, int64_t row, int64_t v,
                                 double& dslope) {
    const int64_t at = row * shape_.keys + v * n;
    Vec<float> score = load<float>(s_.scores + at);
    Vec<float> dp = load<float>(s_.dscores + at);
    if constexpr (!kChanged) {
      const Vec<float> p = exp((score - of.lse) - of.lse_rest);
      return {p, p * (dp - of.delta)};
    } else {
      SignedWords key;
      for (int i = 0; i < n; ++i) key[i] = i;
      key += static_cast<int32_t>(v * n);
      const int64_t left = t.keys - v * n;
      const float softcap = static_cast<float>(args_.softcap);
      Vec<float> tangent = broadcast<float>(1.0f);  // of softcap
      if (softcap != 0.0f) {
        const Vec<float> bent = tanh(score / softcap);
        tangent = fma<float>(-bent, bent, tangent);
        score = softcap * bent;
      }
      Vec<float> distance = {};
      if (args_.alibi_slopes) {
        const float slope = args_.alibi_slopes[t.batch * args_.alibi_batch_stride + t.head];
        const Vec<float> ahead = of.position - __builtin_convertvector(key, Vec<float>);
        distance = ahead < Vec<float>{} ? -ahead : ahead;
        score -= slope * distance;
      }
      if (args_.bias.data) score += bias_of(t, of.query, v, left);
      SignedWords seen = (key >= of.first) & (key < of.last);
      if (of.mask) {
        WordBits bit;
        for (int i = 0; i < n; ++i) bit[i] = 1u << (i % 32);
        const uint32_t word = of.mask[v * n / 32] >> (v * n % 32);
        seen &= (SignedWords)((word & bit) != 0u);
      }
      const Vec<float> exponent = seen ? (score - of.lse) - of.lse_rest
                                       : broadcast<float>(-std::numeric_limits<float>::infinity());
      const Vec<float> p = exp(exponent);
      Vec<float> kept = p;
      if (args_.seed) {
        const HalfBits values = *reinterpret_cast<const HalfBitsUnaligned*>(of.drawn + v * n);
        const Vec<float> factor =
            (SignedWords)widen_bits(values) < static_cast<int32_t>(dropout_.threshold)
                ? Vec<float>{}
                : broadcast<float>(dropout_.scale);
        kept = p * factor;
        dp = dp * factor;
      }
      Vec<float> ds = seen ? p * (dp - of.delta) : Vec<float>{};
      if (dbias_) add_dbias(t, of.query, v, left, ds);
      if (args_.dslopes) dslope -= sum_of_lanes<float>(ds * distance);
      if (softcap != 0.0f) ds *= tangent;
      return {kept, ds};
    }
  }

  Vec<float> bias_of(const TileOf& t, int64_t query, int64_t v, int64_t left) const {
    return visit_dtype_up_to_float32(args_.bias_dtype, [&]<class B>() -> Vec<float> {
      const B* bias = Rows<const B>(args_.bias, t.batch, t.head, 0)(query) + t.k0 + v * n;
      return left >= n ? load<float>(bias) : load_partial<float>(bias, left);
    });
  }

  float* dbias_at(const TileOf& t, int64_t query) const {
    return dbias_ + t.batch * args_.dbias.batch_stride + t.head * args_.dbias.head_stride +
           query * args_.dbias.row_stride + t.k0;
  }

  void add_dbias(const TileOf& t, int64_t query, int64_t v, int64_t left, Vec<float> ds) {
    // What is summed over queries is summed by tiles first: shorter chains lose fewer bits.
    float* dbias = (args_.dbias.row_stride != 0 ? dbias_at(t, query) : dbias_row_) + v * n;
    if (left >= n) {
      store<float>(dbias, load<float>(dbias) + ds);
    } else {
      store_partial<float>(dbias, load_partial<float>(dbias, left) + ds, left);
    }
  }

  const AttentionBackward& args_;
  const Shape& shape_;
  const Shared& shared_;
  const Scratch<M>& s_;
  Dropout dropout_{};
  Sequence sequence_{};
  float* dbias_ = nullptr;
  int64_t split_ = 0;
  float dbias_row_[kTileKeys];
  uint32_t mask_[kTileQueries][kTileWords];
  uint16_t drawn_[2][kTileKeys + 2 * kElementsPerDraw];
};

// ---- after all blocks ---------------------------------------------------------------------------

// Adds up the splits' dquery, and rounds what was summed in the workspace.
template <class T>
void finish_dquery(const AttentionBackward& args, const Shape& shape, const Shared& shared,
                   int64_t batch, int64_t head, int64_t first) {
  const Sequence sequence = sequence_of(args, batch);
  const int64_t last = std::min(first + kRowsAtOnce, sequence.queries);
  const int64_t first_row = args.cu_seq_q ? sequence.first_q : batch * args.seq_q;
  const Rows<T> rows(args.dquery, batch, head, sequence.first_q);
  const float scale = static_cast<float>(args.scale);
  for (int64_t query = first; query < last; ++query) {
    const float* sums =
        shared.dquery + (head * args.total_q + first_row + query) * shape.query_columns;
    T* row = rows(query);
    for_each_vector<float>(0, args.head_dim, [&](int64_t d, auto count) {
      Vec<float> sum = load<float>(sums + d);
      for (int64_t split = 1; split < shape.splits; ++split) {
        sum += load<float>(sums + split * args.heads * args.total_q * shape.query_columns + d);
      }
      store<float>(row + d, sum * scale, count);
    });
  }
}

void finish_dbias(const AttentionBackward& args, const Shared& shared, int64_t first,
                  int64_t last) {
  visit_dtype_up_to_float32(args.bias_dtype, [&]<class B>() {
    B* dbias = static_cast<B*>(args.dbias.data);
    for_each_vector<float>(first, last, [&](int64_t i, auto count) {
      store<float>(dbias + i, load<float>(shared.dbias + i, count), count);
    });
  });
}

void finish_sums(const AttentionBackward& args, const Shape& shape, const Shared& shared) {
  for (int64_t head = 0; head < args.heads; ++head) {
    double dsink = 0.0;
    double dslope = 0.0;
    for (int64_t batch = 0; batch < args.batch; ++batch) {
      const int64_t at = batch * args.heads + head;
      if (args.dsinks) dsink += shared.dsinks[at];
      if (args.dslopes == nullptr) continue;
      if (args.alibi_batch_stride != 0) dslope = 0.0;
      for (int64_t split = 0; split < shape.splits; ++split) {
        dslope += shared.dslopes[split * args.batch * args.heads + at];
      }
      args.dslopes[batch * args.alibi_batch_stride + head] = static_cast<float>(dslope);
    }
    if (args.dsinks) {
      visit_dtype_up_to_float32(args.sinks_dtype, [&]<class S>() {
        S* to = static_cast<S*>(args.dsinks) + head;
        if constexpr (std::is_same_v<S, float>) {
          *to = static_cast<float>(dsink);
        } else if constexpr (std::is_same_v<S, BFloat16>) {
          *to = narrow_to_bfloat16(static_cast<float>(dsink));
        } else {
          *to = narrow_to_float16(static_cast<float>(dsink));
        }
      });
    }
  }
}

Plan plan_backward(const AttentionBackward& args, const Machine& machine) {
  const Shape shape = shape_of(args);
  Plan plan{};
  plan.kernel_name = "attention_backward_kernel";
  plan.rows_per_tile = kTileQueries;
  plan.splits = shape.splits;
  plan.parallel = shape.units * shape.splits > 1;
  plan.slots = plan.parallel ? machine.threads : 1;
  visit_dtype_up_to_float32(args.dtype, [&]<class T>() {
    Arena arena(nullptr);
    shared_of(args, shape, arena);
    Arena scratch(nullptr);
    scratch_of<MultiplierOf<T>>(args, shape, scratch);
    plan.workspace_bytes = arena.used() + scratch.used() * plan.slots;
    plan.reason = MultiplierOf<T>::kPerCell == 2 ? "bfloat16 dot products"
                  : std::is_same_v<T, float>     ? "float32 multiply-adds"
                                                 : "converted to float32 while packing";
  });
  return plan;
}

template <class T>
void attention_backward_kernel(const AttentionBackward& args, const Plan& plan, void* workspace,
                               const Context& context) {
  using M = MultiplierOf<T>;
  const Shape shape = shape_of(args);
  Arena arena(workspace);
  const Shared shared = shared_of(args, shape, arena);
  Arena sizes(nullptr);
  scratch_of<M>(args, shape, sizes);
  char* slots = static_cast<char*>(workspace) + arena.used();
  const int64_t chunks = ceil_div(args.seq_q, kRowsAtOnce);
  const int64_t chunks_of_heads = args.batch * args.heads * chunks;
  for_each_piece_in_order(context, plan.slots, chunks_of_heads, [&](int64_t piece, int64_t) {
    write_delta<T>(args, shared, piece / chunks / args.heads, piece / chunks % args.heads,
                   piece % chunks * kRowsAtOnce);
  });
  for_each_piece_in_order(context, plan.slots, shape.units * shape.splits,
                          [&](int64_t piece, int64_t slot) {
                            Arena own(slots + slot * sizes.used());
                            const auto scratch = scratch_of<M>(args, shape, own);
                            Backward<T>(args, shape, shared, scratch).piece(piece);
                          });

  const int64_t queries = args.dquery.data ? chunks_of_heads : 0;
  const int64_t numbers = shape.wide_bias ? args.dbias_numel : 0;
  constexpr int64_t kNumbersAtOnce = 1 << 14;
  for_each_piece_in_order(
      context, plan.slots, queries + ceil_div(numbers, kNumbersAtOnce),
      [&](int64_t piece, int64_t) {
        if (piece < queries) {
          const int64_t batch = piece / chunks / args.heads;
          const int64_t first = piece % chunks * kRowsAtOnce;
          finish_dquery<T>(args, shape, shared, batch, piece / chunks % args.heads, first);
        } else {
          const int64_t first = (piece - queries) * kNumbersAtOnce;
          finish_dbias(args, shared, first, std::min(first + kNumbersAtOnce, numbers));
        }
      });
  finish_sums(args, shape, shared);
}

void run_backward(const AttentionBackward& args, const Plan& plan, void* workspace,
                  const Context& context) {
  visit_dtype_up_to_float32(
      args.dtype, [&]<class T>() { attention_backward_kernel<T>(args, plan, workspace, context); });
}

}  // namespace

Operator<AttentionBackward> tiled_attention_backward() { return {plan_backward, run_backward}; }

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
