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

#include "cpu/attention/attention.h"
#include "cpu/attention/backward_ends.h"
#include "cpu/attention/backward_scores.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

// Rows as the first factor of a product (element by element) and as the second (cells of rows).
template <class M>
struct Operand {
  const typename M::Element* rows;
  int64_t row_stride;
  const typename M::Element* cells;
  int64_t cell_step;
};

template <class T, class M>
class Backward {
  using E = typename M::Element;
  static constexpr int n = kLanes<float>;

 public:
  Backward(const AttentionBackward& args, const BackwardShape& shape, const BackwardSums& sums,
           const BackwardScratch<M>& scratch)
      : args_(args),
        shape_(shape),
        sums_(sums),
        s_(scratch),
        score_gradients_(args, shape, sums, scratch) {}

  void piece(int64_t index) {
    split_ = index % shape_.splits;
    const int64_t unit = index / shape_.splits;
    const int64_t heads = shape_.all_heads ? 1 : args_.kv_heads;
    const int64_t first_batch = shape_.all_batches ? 0 : sums_.batches[unit / heads];
    const int64_t last_batch = shape_.all_batches ? args_.batch : first_batch + 1;
    const int64_t first_head = shape_.all_heads ? 0 : unit % heads;
    const int64_t last_head = shape_.all_heads ? args_.kv_heads : first_head + 1;
    if (args_.dbias.data) zero_dbias(first_batch, first_head);
    for (int64_t batch = first_batch; batch < last_batch; ++batch) {
      for (int64_t kv_head = first_head; kv_head < last_head; ++kv_head) {
        keys_of_head(batch, kv_head);
      }
    }
  }

 private:
  // ---- a (batch, kv head) --------------------------------------------------------------------

  void keys_of_head(int64_t batch, int64_t kv_head) {
    sequence_ = sequence_of(args_, batch);
    score_gradients_.begin(sequence_, split_);
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

  // Sets the head's sums to zero, and adds the sink's share.
  void begin_head(int64_t batch, int64_t head) {
    if (args_.dquery.data) {
      std::fill_n(sums_of_query(batch, head, 0), sequence_.queries * shape_.query_columns, 0.0f);
    }
    if (args_.dslopes) {
      sums_.dslopes[(split_ * args_.batch + batch) * args_.heads + head] = 0.0;
    }
    if (args_.dsinks && split_ == 0) {
      const double sink = sink_of<float>(args_, head);
      double sum = 0.0;
      const int64_t first = lse_row(args_, sequence_, batch, head, 0);
      for (int64_t row = first; row < first + sequence_.queries; ++row) {
        const float lse = static_cast<const float*>(args_.lse)[row];
        if (lse == kMinusInfinity<float>) continue;
        const double rest = args_.lse_rest ? static_cast<const float*>(args_.lse_rest)[row] : 0.0;
        sum -= std::exp(sink - lse - rest) * sums_.delta[row];
      }
      sums_.dsinks[batch * args_.heads + head] = sum;
    }
  }

  float* sums_of_query(int64_t batch, int64_t head, int64_t query) const {
    return dquery_sums(args_, shape_, sums_, sequence_, split_, batch, head, query);
  }

  // The columns of dbias that belong to this split's blocks.
  void zero_dbias(int64_t batch, int64_t kv_head) {
    const int64_t group = args_.heads / args_.kv_heads;
    const int64_t heads = args_.dbias.head_stride != 0 ? group : 1;
    const int64_t rows = args_.dbias.row_stride != 0 ? args_.seq_q : 1;
    for (int64_t g = 0; g < heads; ++g) {
      float* base = shape_.wide_bias ? sums_.dbias : static_cast<float*>(args_.dbias.data);
      const Rows<float> dbias(
          {base, args_.dbias.batch_stride, args_.dbias.head_stride, args_.dbias.row_stride}, batch,
          kv_head * group + g, 0);
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t k0 = split_ * shape_.keys; k0 < args_.seq_k;
             k0 += shape_.splits * shape_.keys) {
          std::fill_n(dbias(row) + k0, std::min(shape_.keys, args_.seq_k - k0), 0.0f);
        }
      }
    }
  }

  // ---- a block of keys -----------------------------------------------------------------------

  void block(int64_t batch, int64_t kv_head, int64_t k0, int64_t count) {
    const KeyRange queries = seeing_queries(args_, sequence_, k0, k0 + count);
    if (queries.first >= queries.last) return;
    const KeyRows<const T> keys(args_, args_.key, batch, kv_head, sequence_.first_k);
    const KeyRows<const T> values(args_, args_.value, batch, kv_head, sequence_.first_k);
    const auto key = [&](int64_t i) { return keys(k0 + i); };
    pack_panel<M>(key, count, args_.head_dim, shape_.keys, s_.key_panel);
    pack_panel<M>([&](int64_t i) { return values(k0 + i); }, count, args_.value_dim, shape_.keys,
                  s_.value_panel);
    if (args_.dquery.data) {
      const KeySet seen = keys_to_sum(batch, kv_head, k0, count, key);
      pack_cells_of_rows<M>([&](int64_t i) { return seen.has(i) ? key(i) : nullptr; }, count,
                            args_.head_dim, shape_.query_columns, s_.key_cells);
    }
    const int64_t group = args_.heads / args_.kv_heads;
    for (int64_t g = 0; g < group; ++g) {
      for (int64_t q0 = queries.first / kTileQueries * kTileQueries; q0 < queries.last;
           q0 += kTileQueries) {
        const int64_t first = std::max<int64_t>(queries.first - q0, 0);
        tile({batch, kv_head * group + g, q0, first / M::kPerCell * M::kPerCell,
              std::min(queries.last - q0, kTileQueries), k0, count});
      }
    }
  }

  // The keys of a block, except those that no query sees and that would make dquery NaN.
  template <class Key>
  KeySet keys_to_sum(int64_t batch, int64_t kv_head, int64_t k0, int64_t count, Key&& key) const {
    const SeenKeys range = seen_keys(args_, sequence_, 0, sequence_.queries);
    const KeySet near = key_interval(range.first - k0, std::min(range.last - k0, count));
    if (!is_masked(args_)) return near;
    const KeySet doubtful = not_finite(near, args_.head_dim, key);
    if (doubtful.empty()) return near;
    const int64_t group = args_.heads / args_.kv_heads;
    KeySet seen{};
    for (int64_t g = 0; g < group; ++g) {
      seen = seen | read_mask(args_, sequence_, batch, kv_head * group + g, 0, sequence_.queries,
                              k0, count, [](int64_t, const KeySet&) {})
                        .seen;
    }
    return near.without(doubtful.without(seen));
  }

  void tile(const BackwardTile& t) {
    if (!score_gradients_.read_mask(t)) return;
    const Operand<M> query = operand(args_.query, t, args_.head_dim, shape_.query_columns,
                                     s_.query_rows, s_.query_cells);
    const Operand<M> doutput = operand(args_.doutput, t, args_.value_dim, shape_.value_columns,
                                       s_.doutput_rows, s_.doutput_cells);
    const int64_t vectors = ceil_div(t.keys, n);
    const float one = 1.0f;
    // The keys that a strip of queries sees, and below the queries that see a strip of keys: where
    // the diagonal or a window crosses the tile, a part.
    const auto keys_of_strip = [&](int64_t row, int64_t end) {
      const SeenKeys seen = seen_keys(args_, sequence_, t.q0 + t.first + row, t.q0 + t.first + end);
      return KeyRange{std::clamp<int64_t>(seen.first - t.k0, 0, t.keys),
                      std::clamp<int64_t>(seen.last - t.k0, 0, t.keys)};
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
                            dim, t.last - t.first, vectors, [&](int64_t row, int64_t end) {
                              const KeyRange seen = keys_of_strip(row, end);
                              return Part{0, kAllSteps, seen.first / n, ceil_div(seen.last, n)};
                            });
    };
    // Scores come out as the forward's did, bit for bit where that multiplied float32.
    scores(query, args_.head_dim, s_.key_panel, static_cast<float>(args_.scale), s_.scores);
    scores(doutput, args_.value_dim, s_.value_panel, one, s_.dscores);

    score_gradients_(t);

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
                                ceil_div(to, M::kPerCell) - first_cell, 0, columns / n};
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
                   .c = sums_of_query(t.batch, t.head, t.q0 + t.first),
                   .c_row = shape_.query_columns,
                   .update = Update::kAdd,
                   .factor = &one},
                  t.last - t.first, shape_.query_columns / n, [&](int64_t row, int64_t end) {
                    const KeyRange seen = keys_of_strip(row, end);
                    return Part{seen.first / M::kPerCell, ceil_div(seen.last, M::kPerCell), 0,
                                shape_.query_columns / n};
                  });
    }
  }

  // Rows [first, last) of a tile in both forms, in place where they lie so already.
  Operand<M> operand(const Strided& tensor, const BackwardTile& t, int64_t dim, int64_t columns,
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
      if (sizeof(T) == sizeof(E) && dim % M::kPerCell == 0 && all.stride() == dim) {
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

  const AttentionBackward& args_;
  const BackwardShape& shape_;
  const BackwardSums& sums_;
  const BackwardScratch<M>& s_;
  ScoreGradients<T, M> score_gradients_;
  Sequence sequence_{};
  int64_t split_ = 0;
};

Plan plan_backward(const AttentionBackward& args, const Machine& machine, BackwardShape& shape) {
  shape = backward_shape_of(args);
  Plan plan{};
  plan.kernel_name = "attention_backward_kernel";
  plan.rows_per_tile = kTileQueries;
  plan.splits = shape.splits;
  const int64_t work = score_nanoseconds(args, 3 * args.head_dim + 2 * args.value_dim);
  plan.threads = threads_for(work, shape.units * shape.splits, machine);
  visit_multiplier(args, [&]<class T, class M>() {
    Arena arena(nullptr);
    backward_sums_of(args, shape, arena);
    Arena scratch(nullptr);
    backward_scratch_of<M>(args, shape, scratch);
    shape.slots = {arena.used(), scratch.used()};
    plan.workspace_bytes = shape.slots.end(plan.threads);
    plan.reason = multiplier_text<T, M>();
  });
  return plan;
}

template <class T, class M>
void attention_backward_kernel(const AttentionBackward& args, const Plan& plan,
                               const BackwardShape& shape, void* workspace,
                               const Context& context) {
  Arena arena(workspace);
  const BackwardSums sums = backward_sums_of(args, shape, arena);
  const int64_t chunks = ceil_div(args.seq_q, kRowsAtOnce);
  const int64_t chunks_of_heads = args.batch * args.heads * chunks;
  order_by_work(args, sums.batches);
  const Machine machine{.threads = static_cast<int32_t>(plan.threads)};
  const int64_t rows = args.heads * args.total_q;
  const int64_t row_bytes = 2 * args.value_dim * size_of(args.dtype);
  const int64_t delta_threads = threads_for(rows * row_bytes / kBytes, chunks_of_heads, machine);
  for_each_piece_in_order(context, delta_threads, chunks_of_heads, [&](int64_t piece, int64_t) {
    write_delta<T, M>(args, sums, piece / chunks / args.heads, piece / chunks % args.heads,
                      piece % chunks * kRowsAtOnce);
  });
  for_each_piece_in_order(context, plan.threads, shape.units * shape.splits,
                          [&](int64_t piece, int64_t slot) {
                            Arena own(shape.slots.of(workspace, slot));
                            const auto scratch = backward_scratch_of<M>(args, shape, own);
                            Backward<T, M>(args, shape, sums, scratch).piece(piece);
                          });

  const int64_t queries = args.dquery.data ? chunks_of_heads : 0;
  const int64_t numbers = shape.wide_bias ? args.dbias_numel : 0;
  constexpr int64_t kNumbersAtOnce = 1 << 14;
  const int64_t last_pieces = queries + ceil_div(numbers, kNumbersAtOnce);
  const int64_t last_bytes =
      (args.dquery.data ? rows * shape.query_columns * (4 * shape.splits + 4) : 0) + 6 * numbers;
  for_each_piece_in_order(
      context, threads_for(last_bytes / kBytes, last_pieces, machine), last_pieces,
      [&](int64_t piece, int64_t) {
        if (piece < queries) {
          const int64_t batch = piece / chunks / args.heads;
          const int64_t first = piece % chunks * kRowsAtOnce;
          finish_dquery<T>(args, shape, sums, batch, piece / chunks % args.heads, first);
        } else {
          const int64_t first = (piece - queries) * kNumbersAtOnce;
          finish_dbias(args, sums, first, std::min(first + kNumbersAtOnce, numbers));
        }
      });
  finish_sums(args, shape, sums);
}

void run_backward(const AttentionBackward& args, const Plan& plan, const BackwardShape& shape,
                  void* workspace, const Context& context) {
  visit_multiplier(args, [&]<class T, class M>() {
    attention_backward_kernel<T, M>(args, plan, shape, workspace, context);
  });
}

}  // namespace

Operator<AttentionBackward> tiled_attention_backward() {
  return operator_of<AttentionBackward, BackwardShape, plan_backward, run_backward>();
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
