// Attention in scalar code, one score at a time: the meaning of ops/attention.h in as few lines as
// it takes, and the kernel of float64.
//
// Every score is recomputed wherever it is needed. The forward computes it twice, for the sum and
// for the output; the backward once for every gradient that the score belongs to: rows of queries,
// rows of keys and elements of dbias are each one thread's own sum, so nothing is added up across
// threads and results do not depend on their number. Done when it is right.
#include <algorithm>
#include <cmath>

#include "cpu/attention/attention.h"
#include "cpu/attention/scores.h"
#include "cpu/attention/work.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

double dot(const double* a, const double* b, int64_t count) {
  constexpr int kSums = 8;  // independent sums
  double sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (int k = 0; k < kSums; ++k) sums[k] += a[i + k] * b[i + k];
  }
  for (; i < count; ++i) sums[0] += a[i] * b[i];
  double sum = 0.0;
  for (double part : sums) sum += part;
  return sum;
}

void add(double* sum, double factor, const double* row, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] += factor * row[i];
}

// The maximum and sum that normalise a row's scores in the forward: P = exp(score - max) / sum. A
// row without a key has sum 0.
struct Normalizer {
  double max = kMinusInfinity<double>;
  double sum = 0.0;

  void take(double score) {
    if (score == kMinusInfinity<double>) return;
    if (score > max) {
      sum *= std::exp(max - score);
      max = score;
    }
    sum += std::exp(score - max);
  }
  double probability(double score) const { return std::exp(score - max) / sum; }
};

// One (batch, head) of a call.
struct Head {
  Head(const Attention& call, int64_t batch_index, int64_t head_index)
      : args(call),
        batch(batch_index),
        head(head_index),
        kv_head(head_index / (call.heads / call.kv_heads)),
        sequence(sequence_of(call, batch_index)),
        terms(call, batch_index, head_index),
        dropout(call) {}

  double* query_row(const Strided& rows, int64_t i) const {
    return Rows<double>(rows, batch, head, sequence.first_q)(i);
  }
  double* key_row(const Strided& rows, int64_t j) const {
    return KeyRows<double>(args, rows, batch, kv_head, sequence.first_k)(j);
  }

  // The index of row i's statistics.
  int64_t statistic(int64_t i) const { return lse_row(args, sequence, batch, head, i); }

  bool sees(int64_t i, int64_t j) const {
    const KeyRange range = keys_of(args, sequence, i);
    return j >= range.first && j < range.last && (!is_masked(args) || allows(i, j));
  }

  // Whether the mask allows it.
  bool allows(int64_t i, int64_t j) const {
    if (!args.blocks.data) return mask_row(args, batch, head, i)[j];
    const int32_t block = block_row(args, batch, head, i)[j / args.block_k];
    if (block < kFirstTile) return block == kAllKeys;
    return tile_row(args, block, i)[j % args.block_k];
  }

  // body(j) for every key that query i sees.
  template <class F>
  void for_each_key(int64_t i, F&& body) const {
    const KeyRange range = keys_of(args, sequence, i);
    for (int64_t j = range.first; j < range.last; ++j) {
      if (sees(i, j)) body(j);
    }
  }

  // The score of a key that the query sees.
  double score(int64_t i, int64_t j, ScoreDerivative<double>* derivative = nullptr) const {
    const double scaled =
        args.scale * dot(query_row(args.query, i), key_row(args.key, j), args.head_dim);
    const auto bias = [&] { return Rows<const double>(args.bias, batch, head, 0)(i)[j]; };
    return terms(scaled, static_cast<double>(i + sequence.alignment - j), bias, derivative);
  }

  Normalizer normalizer(int64_t i) const {
    Normalizer row;
    row.take(sink_of<double>(args, head));
    for_each_key(i, [&](int64_t j) { row.take(score(i, j)); });
    return row;
  }

  // The factor of dropout: 0, or 1 / (1 - p).
  double keep(int64_t i, int64_t j) const {
    if (!dropout) return 1.0;
    const int64_t key = args.key_offset + j;
    const auto words = dropout.words(batch, head, static_cast<uint32_t>(args.query_offset + i),
                                     static_cast<uint32_t>(key / 8));
    return dropout.factor(drawn_for(words, key % 8), dropout.scale<double>());
  }

  const Attention& args;
  int64_t batch;
  int64_t head;
  int64_t kv_head;
  Sequence sequence;
  ScoreTerms<double> terms;
  ScoreDropout dropout;
};

// ---- forward ------------------------------------------------------------------------------------

// output (value_dim,) and lse of query i.
void forward_row(const AttentionForward& args, const Head& head, int64_t i) {
  const Normalizer row = head.normalizer(i);
  const double logarithm = std::log(row.sum);
  double output[kMaxHeadDim] = {};
  if (row.sum != 0.0) {
    head.for_each_key(i, [&](int64_t j) {
      const double p = row.probability(head.score(i, j));
      add(output, p * head.keep(i, j), head.key_row(args.value, j), args.value_dim);
    });
  }
  std::copy(output, output + args.value_dim, head.query_row(args.output, i));
  static_cast<double*>(args.lse)[head.statistic(i)] = row.max + logarithm;
  static_cast<double*>(args.lse_rest)[head.statistic(i)] =
      row.sum == 0.0 ? 0.0 : lost_in_sum(row.max, logarithm);
}

// ---- backward -----------------------------------------------------------------------------------

// A row's numbers, known before the backward looks at single scores. P is normalised over all keys
// that lse covers, also where this call has only some of them.
struct Row {
  double lse;  // -inf: no key
  double lse_rest;
  double delta;   // doutput * output - dlse, summed
  double dslope;  // the row's share of the gradient of its slope

  bool has_keys() const { return lse != kMinusInfinity<double>; }
  double probability(double score) const { return std::exp((score - lse) - lse_rest); }
};

Row row_of(const AttentionBackward& args, const Head& head, int64_t i) {
  double delta =
      dot(head.query_row(args.doutput, i), head.query_row(args.output, i), args.value_dim);
  const int64_t at = head.statistic(i);
  if (args.dlse) delta -= static_cast<const double*>(args.dlse)[at];
  const double rest = args.lse_rest ? static_cast<const double*>(args.lse_rest)[at] : 0.0;
  return {static_cast<const double*>(args.lse)[at], rest, delta, 0.0};
}

// The gradients that one score contributes.
struct ScoreGradient {
  double dropped;   // drop(P)
  double ds;        // of the score
  double dproduct;  // of scale * query key^T
  double dslope;
};

ScoreGradient score_gradient(const AttentionBackward& args, const Head& head, int64_t i, int64_t j,
                             const Row* rows) {
  const Row& row = rows[head.statistic(i)];
  if (!row.has_keys()) return {};
  ScoreDerivative<double> derivative{};
  const double p = row.probability(head.score(i, j, &derivative));
  const double keep = head.keep(i, j);
  const double dp =
      keep * dot(head.query_row(args.doutput, i), head.key_row(args.value, j), args.value_dim);
  const double ds = p * (dp - row.delta);
  return {p * keep, ds, head.terms.of_product(ds, derivative, true),
          slope_gradient(ds, derivative)};
}

// dquery (head_dim,) of query i, and its share of dslopes.
void backward_query(const AttentionBackward& args, const Head& head, int64_t i, Row* rows) {
  double dquery[kMaxHeadDim] = {};
  double dslope = 0.0;
  head.for_each_key(i, [&](int64_t j) {
    const ScoreGradient gradient = score_gradient(args, head, i, j, rows);
    add(dquery, args.scale * gradient.dproduct, head.key_row(args.key, j), args.head_dim);
    dslope += gradient.dslope;
  });
  if (args.dquery.data) {
    std::copy(dquery, dquery + args.head_dim, head.query_row(args.dquery, i));
  }
  rows[head.statistic(i)].dslope = dslope;
}

// dkey (head_dim,) and dvalue (value_dim,) of key j, from all queries of all heads that read it.
void backward_key(const AttentionBackward& args, int64_t batch, int64_t kv_head, int64_t j,
                  const Row* rows) {
  double dkey[kMaxHeadDim] = {};
  double dvalue[kMaxHeadDim] = {};
  const int64_t group = args.heads / args.kv_heads;
  const int64_t first = kv_head * group;
  for (int64_t h = first; h < first + group; ++h) {
    const Head head(args, batch, h);
    for (int64_t i = 0; i < head.sequence.queries; ++i) {
      if (!head.sees(i, j)) continue;
      const ScoreGradient gradient = score_gradient(args, head, i, j, rows);
      add(dkey, args.scale * gradient.dproduct, head.query_row(args.query, i), args.head_dim);
      add(dvalue, gradient.dropped, head.query_row(args.doutput, i), args.value_dim);
    }
  }
  const Head head(args, batch, first);
  if (args.dkey.data) std::copy(dkey, dkey + args.head_dim, head.key_row(args.dkey, j));
  if (args.dvalue.data) std::copy(dvalue, dvalue + args.value_dim, head.key_row(args.dvalue, j));
}

// An element of dbias, from all scores that the element of bias was added to.
void backward_bias(const AttentionBackward& args, int64_t index, const Row* rows) {
  struct Range {  // the indices of a dimension that share an element of bias
    Range(int64_t stride, int64_t size, int64_t& rest)
        : first(stride == 0 ? 0 : rest % size), last(stride == 0 ? size : first + 1) {
      if (stride != 0) rest /= size;
    }
    int64_t first;
    int64_t last;
  };
  int64_t rest = index;
  const Range keys(1, args.seq_k, rest);
  const Range queries(args.dbias.row_stride, args.seq_q, rest);
  const Range heads(args.dbias.head_stride, args.heads, rest);
  const Range batches(args.dbias.batch_stride, args.batch, rest);
  double sum = 0.0;
  for (int64_t b = batches.first; b < batches.last; ++b) {
    for (int64_t h = heads.first; h < heads.last; ++h) {
      const Head head(args, b, h);
      for (int64_t i = queries.first; i < std::min(queries.last, head.sequence.queries); ++i) {
        if (head.sees(i, keys.first)) sum += score_gradient(args, head, i, keys.first, rows).ds;
      }
    }
  }
  static_cast<double*>(args.dbias.data)[index] = sum;
}

// dsinks and dslopes: sums over the rows.
void backward_heads(const AttentionBackward& args, const Row* rows) {
  write_head_gradients(args, [&](int64_t batch, int64_t h, HeadGradients& sums) {
    const Head head(args, batch, h);
    for (int64_t i = 0; i < head.sequence.queries; ++i) {
      const Row& row = rows[head.statistic(i)];
      if (args.dsinks && row.has_keys()) {
        sums.sink -= row.probability(sink_of<double>(args, h)) * row.delta;
      }
      sums.slope += row.dslope;
    }
  });
}

// ---- plans and runs -----------------------------------------------------------------------------

// body(head, i) for every query of every head.
template <class F>
void for_each_query(const Attention& args, const Plan& plan, const Context& context, F&& body) {
  const int64_t rows = args.batch * args.heads * args.seq_q;
  for_each_piece(context, plan.threads, rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t of_all = row / args.seq_q;
      const Head head(args, of_all / args.heads, of_all % args.heads);
      if (row % args.seq_q < head.sequence.queries) body(head, row % args.seq_q);
    }
  });
}

Plan plan_of(const Attention& args, const Machine& machine, const char* kernel_name) {
  const int64_t rows = args.batch * args.heads * args.seq_q;
  const int64_t work =
      score_nanoseconds(args, args.head_dim + args.value_dim) * kMultiplyAdds / kPlainMultiplyAdds;
  return {.workspace_bytes = 0,
          .kernel_name = kernel_name,
          .rows_per_tile = 1,
          .splits = rows,
          .reason = "float64 is computed score by score",
          .threads = threads_for(work, rows, machine)};
}

Plan plan_forward(const AttentionForward& args, const Machine& machine) {
  return plan_of(args, machine, "attention_forward_plain_kernel");
}

void run_forward(const AttentionForward& args, const Plan& plan, void*, const Context& context) {
  for_each_query(args, plan, context,
                 [&](const Head& head, int64_t i) { forward_row(args, head, i); });
}

Plan plan_backward(const AttentionBackward& args, const Machine& machine) {
  Plan plan = plan_of(args, machine, "attention_backward_plain_kernel");
  plan.workspace_bytes = args.heads * args.total_q * static_cast<int64_t>(sizeof(Row));
  return plan;
}

void run_backward(const AttentionBackward& args, const Plan& plan, void* workspace,
                  const Context& context) {
  Row* const rows = static_cast<Row*>(workspace);  // like lse
  for_each_query(args, plan, context, [&](const Head& head, int64_t i) {
    rows[head.statistic(i)] = row_of(args, head, i);
  });
  if (args.dquery.data || args.dslopes) {
    for_each_query(args, plan, context,
                   [&](const Head& head, int64_t i) { backward_query(args, head, i, rows); });
  }
  if (args.dkey.data || args.dvalue.data) {
    const int64_t keys = args.batch * args.kv_heads * args.seq_k;
    for_each_piece(context, plan.threads, keys, [&](int64_t begin, int64_t end) {
      for (int64_t key = begin; key < end; ++key) {
        const int64_t of_all = key / args.seq_k;
        const int64_t batch = of_all / args.kv_heads;
        const int64_t j = key % args.seq_k;
        if (j < sequence_of(args, batch).keys) {
          backward_key(args, batch, of_all % args.kv_heads, j, rows);
        }
      }
    });
  }
  if (args.dbias.data) {
    for_each_piece(context, plan.threads, args.dbias_numel, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) backward_bias(args, index, rows);
    });
  }
  if (args.dsinks || args.dslopes) backward_heads(args, rows);
}

}  // namespace

Operator<AttentionForward> plain_attention_forward() { return {plan_forward, run_forward}; }
Operator<AttentionBackward> plain_attention_backward() { return {plan_backward, run_backward}; }

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
