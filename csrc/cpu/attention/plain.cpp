// Attention in scalar code and double arithmetic, one score at a time: the meaning of
// ops/attention.h in as few lines as it takes.
//
// Nothing is stored but what the contract asks for. The forward computes a row's scores twice, for
// the maximum and for the sums; the backward computes each once for every gradient that it belongs
// to: rows of queries, rows of keys and elements of dbias are each one thread's own sum, so nothing
// is added up across threads and results do not depend on their number. Done when it is right.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/philox.h"
#include "core/visit.h"
#include "cpu/attention/attention.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class T>
double widened(T value) {
  if constexpr (sizeof(T) == 2) {
    return widen(value);
  } else {
    return value;
  }
}

template <class T>
void assign(T& to, double value) {
  if constexpr (__is_same(T, BFloat16)) {
    to = narrow_to_bfloat16(static_cast<float>(value));
  } else if constexpr (__is_same(T, Float16)) {
    to = narrow_to_float16(static_cast<float>(value));
  } else {
    to = static_cast<T>(value);
  }
}

double element(const void* data, DType dtype, int64_t index) {
  return visit_dtype(dtype, [&]<class T>() { return widened(static_cast<const T*>(data)[index]); });
}

void assign_element(void* data, DType dtype, int64_t index, double value) {
  visit_dtype(dtype, [&]<class T>() { assign(static_cast<T*>(data)[index], value); });
}

template <class T>
double dot(const T* a, const T* b, int64_t count) {
  constexpr int kSums = 8;  // that do not wait for one another
  double sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (int k = 0; k < kSums; ++k) sums[k] += widened(a[i + k]) * widened(b[i + k]);
  }
  for (; i < count; ++i) sums[0] += widened(a[i]) * widened(b[i]);
  double sum = 0.0;
  for (double part : sums) sum += part;
  return sum;
}

template <class T>
void add(double* sum, double factor, const T* row, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] += factor * widened(row[i]);
}

template <class T>
void assign_row(T* to, const double* row, double factor, int64_t count) {
  for (int64_t i = 0; i < count; ++i) assign(to[i], factor * row[i]);
}

// One (batch, head) of a call.
template <class T>
struct Head {
  Head(const Attention& call, int64_t batch_index, int64_t head_index)
      : args(call),
        batch(batch_index),
        head(head_index),
        kv_head(head_index / (call.heads / call.kv_heads)),
        sequence(sequence_of(call, batch_index)) {}

  T* row(const Strided& rows, int64_t of_head, int64_t first, int64_t i) const {
    return static_cast<T*>(rows.data) + batch * rows.batch_stride + of_head * rows.head_stride +
           (first + i) * rows.row_stride;
  }
  T* query_row(const Strided& rows, int64_t i) const {
    return row(rows, head, sequence.first_q, i);
  }
  T* key_row(const Strided& rows, int64_t j) const {
    if (!args.block_table) return row(rows, kv_head, sequence.first_k, j);
    const int64_t page = args.block_table[batch * args.block_table_stride + j / args.page_size];
    return static_cast<T*>(rows.data) + page * rows.batch_stride + kv_head * rows.head_stride +
           j % args.page_size * rows.row_stride;
  }

  // Where the statistics of row i are.
  int64_t statistic(int64_t i) const {
    return args.cu_seq_q ? head * args.total_q + sequence.first_q + i
                         : (batch * args.heads + head) * args.seq_q + i;
  }

  int64_t at(const Strided& terms, int64_t i, int64_t j) const {
    return batch * terms.batch_stride + head * terms.head_stride + i * terms.row_stride + j;
  }

  bool sees(int64_t i, int64_t j) const {
    const KeyRange range = keys_of(args, sequence, i);
    return j >= range.first && j < range.last &&
           (!args.mask.data || static_cast<const uint8_t*>(args.mask.data)[at(args.mask, i, j)]);
  }

  int64_t distance(int64_t i, int64_t j) const { return std::abs(i + sequence.alignment - j); }

  // Of a key that the query sees. slope: what softcap's derivative is there.
  double score(int64_t i, int64_t j, double* slope = nullptr) const {
    double s = args.scale * dot(query_row(args.query, i), key_row(args.key, j), args.head_dim);
    if (args.softcap != 0.0) {
      const double tanh = std::tanh(s / args.softcap);
      s = args.softcap * tanh;
      if (slope) *slope = 1.0 - tanh * tanh;
    } else if (slope) {
      *slope = 1.0;
    }
    if (args.alibi_slopes) {
      s -= static_cast<double>(args.alibi_slopes[batch * args.alibi_batch_stride + head]) *
           static_cast<double>(distance(i, j));
    }
    if (args.bias.data) s += element(args.bias.data, args.bias_dtype, at(args.bias, i, j));
    return s;
  }

  double sink() const { return element(args.sinks, args.sinks_dtype, head); }

  // What dropout multiplies a probability by.
  double keep(int64_t i, int64_t j) const {
    if (!args.seed) return 1.0;
    const Dropout dropout = make_dropout(args.seed, args.dropout_p);
    const int64_t key = args.key_offset + j;
    const int64_t global_head =
        (args.batch_offset + batch) * args.total_heads + args.head_offset + head;
    const std::array<uint32_t, 4> words = philox4x32(
        dropout.key, {static_cast<uint32_t>(args.query_offset + i), static_cast<uint32_t>(key / 8),
                      static_cast<uint32_t>(global_head), dropout.offset});
    const uint32_t drawn = words[key % 8 / 2] >> (key % 2 * 16) & 0xffffu;
    return drawn < dropout.threshold ? 0.0 : 65536.0 / (65536.0 - dropout.threshold);
  }

  const Attention& args;
  int64_t batch;
  int64_t head;
  int64_t kv_head;
  Sequence sequence;
};

// ---- forward ------------------------------------------------------------------------------------

// output (value_dim,) and lse of query i.
template <class T>
void forward_row(const AttentionForward& args, const Head<T>& head, int64_t i) {
  const KeyRange range = keys_of(args, head.sequence, i);
  double max = args.sinks ? head.sink() : -kInfinity;
  for (int64_t j = range.first; j < range.last; ++j) {
    if (head.sees(i, j)) max = std::max(max, head.score(i, j));
  }
  if (max == -kInfinity) max = 0.0;  // there is nothing to sum, or a NaN

  double sum = args.sinks ? std::exp(head.sink() - max) : 0.0;
  double output[kMaxHeadDim] = {};
  for (int64_t j = range.first; j < range.last; ++j) {
    if (!head.sees(i, j)) continue;
    const double p = std::exp(head.score(i, j) - max);
    sum += p;
    add(output, p * head.keep(i, j), head.key_row(args.value, j), args.value_dim);
  }
  assign_row(head.query_row(args.output, i), output, sum == 0.0 ? 0.0 : 1.0 / sum, args.value_dim);
  static_cast<Accumulator<T>*>(args.lse)[head.statistic(i)] =
      static_cast<Accumulator<T>>(max + std::log(sum));
}

// ---- backward -----------------------------------------------------------------------------------

// The rows' statistics that the backward needs for every score, (batch, heads, seq_q) or (heads,
// total_q) like lse.
struct RowSums {
  double* delta;    // doutput * output - dlse, summed
  double* dslopes;  // the row's share of the gradient of its slope
};

template <class T>
double lse_of(const AttentionBackward& args, const Head<T>& head, int64_t i) {
  return static_cast<const Accumulator<T>*>(args.lse)[head.statistic(i)];
}

// What one score adds to gradients.
struct ScoreGradient {
  double dropped;   // drop(P)
  double ds;        // of the score behind softcap
  double dproduct;  // of scale * query key^T
};

template <class T>
ScoreGradient score_gradient(const AttentionBackward& args, const Head<T>& head, int64_t i,
                             int64_t j, const RowSums& sums) {
  const double lse = lse_of(args, head, i);
  if (lse == -kInfinity) return {};  // a row without a key
  double slope;
  const double p = std::exp(head.score(i, j, &slope) - lse);
  const double keep = head.keep(i, j);
  const double dp =
      keep * dot<T>(head.query_row(args.doutput, i), head.key_row(args.value, j), args.value_dim);
  const double ds = p * (dp - sums.delta[head.statistic(i)]);
  return {p * keep, ds, ds * slope};
}

template <class T>
void row_delta(const AttentionBackward& args, const Head<T>& head, int64_t i, const RowSums& sums) {
  double delta =
      dot<T>(head.query_row(args.doutput, i), head.query_row(args.output, i), args.value_dim);
  if (args.dlse) delta -= static_cast<const Accumulator<T>*>(args.dlse)[head.statistic(i)];
  sums.delta[head.statistic(i)] = delta;
}

// dquery (head_dim,) of query i, and its share of dslopes.
template <class T>
void backward_query(const AttentionBackward& args, const Head<T>& head, int64_t i,
                    const RowSums& sums) {
  double dquery[kMaxHeadDim] = {};
  double dslope = 0.0;
  const KeyRange range = keys_of(args, head.sequence, i);
  for (int64_t j = range.first; j < range.last; ++j) {
    if (!head.sees(i, j)) continue;
    const ScoreGradient gradient = score_gradient(args, head, i, j, sums);
    add(dquery, gradient.dproduct, head.key_row(args.key, j), args.head_dim);
    dslope -= gradient.ds * static_cast<double>(head.distance(i, j));
  }
  if (args.dquery.data) {
    assign_row(head.query_row(args.dquery, i), dquery, args.scale, args.head_dim);
  }
  if (args.dslopes) sums.dslopes[head.statistic(i)] = dslope;
}

// dkey (head_dim,) and dvalue (value_dim,) of key j, from all queries of all heads that read it.
template <class T>
void backward_key(const AttentionBackward& args, int64_t batch, int64_t kv_head, int64_t j,
                  const RowSums& sums) {
  double dkey[kMaxHeadDim] = {};
  double dvalue[kMaxHeadDim] = {};
  const int64_t group = args.heads / args.kv_heads;
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    const Head<T> head(args, batch, h);
    for (int64_t i = 0; i < head.sequence.queries; ++i) {
      if (!head.sees(i, j)) continue;
      const ScoreGradient gradient = score_gradient(args, head, i, j, sums);
      add(dkey, gradient.dproduct, head.query_row(args.query, i), args.head_dim);
      add(dvalue, gradient.dropped, head.query_row(args.doutput, i), args.value_dim);
    }
  }
  const Head<T> head(args, batch, kv_head * group);
  if (args.dkey.data) assign_row(head.key_row(args.dkey, j), dkey, args.scale, args.head_dim);
  if (args.dvalue.data) assign_row(head.key_row(args.dvalue, j), dvalue, 1.0, args.value_dim);
}

// An element of dbias, from all scores that the element of bias was added to.
template <class T>
double backward_bias(const AttentionBackward& args, int64_t index, const RowSums& sums) {
  const Strided& dbias = args.dbias;
  const auto sizes = [](int64_t stride, int64_t size) { return stride == 0 ? 1 : size; };
  const int64_t rows = sizes(dbias.row_stride, args.seq_q);
  const int64_t heads = sizes(dbias.head_stride, args.heads);
  const int64_t j = index % args.seq_k;
  const int64_t i = index / args.seq_k % rows;
  const int64_t h = index / args.seq_k / rows % heads;
  const int64_t b = index / args.seq_k / rows / heads;
  const auto last = [](int64_t stride, int64_t at, int64_t size) {
    return stride == 0 ? size : at + 1;
  };
  double sum = 0.0;
  for (int64_t batch = b; batch < last(dbias.batch_stride, b, args.batch); ++batch) {
    for (int64_t head_index = h; head_index < last(dbias.head_stride, h, args.heads);
         ++head_index) {
      const Head<T> head(args, batch, head_index);
      const int64_t end = std::min(last(dbias.row_stride, i, args.seq_q), head.sequence.queries);
      for (int64_t row = i; row < end; ++row) {
        if (head.sees(row, j)) sum += score_gradient(args, head, row, j, sums).ds;
      }
    }
  }
  return sum;
}

// dsinks and dslopes: what is left to add up of the rows' statistics.
template <class T>
void backward_heads(const AttentionBackward& args, const RowSums& sums) {
  for (int64_t h = 0; h < args.heads; ++h) {
    double dsink = 0.0;
    double dslope = 0.0;
    for (int64_t b = 0; b < args.batch; ++b) {
      const Head<T> head(args, b, h);
      for (int64_t i = 0; i < head.sequence.queries; ++i) {
        const double lse = lse_of(args, head, i);
        if (args.dsinks && lse != -kInfinity) {
          dsink -= std::exp(head.sink() - lse) * sums.delta[head.statistic(i)];
        }
        if (args.dslopes) dslope += sums.dslopes[head.statistic(i)];
      }
      if (args.dslopes && args.alibi_batch_stride != 0) {
        args.dslopes[b * args.heads + h] = static_cast<float>(dslope);
        dslope = 0.0;
      }
    }
    if (args.dslopes && args.alibi_batch_stride == 0) args.dslopes[h] = static_cast<float>(dslope);
    if (args.dsinks) assign_element(args.dsinks, args.sinks_dtype, h, dsink);
  }
}

// ---- plans and runs -----------------------------------------------------------------------------

// Below about a microsecond of multiply-adds a parallel region costs more than it brings.
constexpr int64_t kSerialWork = 4096;

int64_t row_work(const Attention& args) {
  return std::max<int64_t>(1, args.seq_k * (args.head_dim + args.value_dim));
}

// body(head, i) for every query of every head.
template <class T, class F>
void for_each_query(const Attention& args, const Context& context, F&& body) {
  const int64_t grain = std::max<int64_t>(1, kSerialWork / row_work(args));
  context.for_each(args.batch * args.heads * args.seq_q, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t head_index = row / args.seq_q;
      const Head<T> head(args, head_index / args.heads, head_index % args.heads);
      if (row % args.seq_q < head.sequence.queries) body(head, row % args.seq_q);
    }
  });
}

Plan plan_of(const Attention& args, const Machine& machine, const char* kernel_name) {
  const int64_t rows = args.batch * args.heads * args.seq_q;
  const bool parallel = machine.threads > 1 && rows * row_work(args) > kSerialWork;
  return {.workspace_bytes = 0,
          .zeroed_bytes = 0,
          .kernel_name = kernel_name,
          .rows_per_tile = 1,
          .splits = rows,
          .parallel = parallel,
          .reason = "scalar, in float64"};
}

Plan plan_forward(const AttentionForward& args, const Machine& machine) {
  return plan_of(args, machine, "attention_forward_plain_kernel");
}

void run_forward(const AttentionForward& args, const Plan&, void*, const Context& context) {
  for_each_query<double>(args, context,
                         [&](const Head<double>& head, int64_t i) { forward_row(args, head, i); });
}

Plan plan_backward(const AttentionBackward& args, const Machine& machine) {
  Plan plan = plan_of(args, machine, "attention_backward_plain_kernel");
  plan.workspace_bytes = 2 * args.heads * args.total_q * static_cast<int64_t>(sizeof(double));
  return plan;
}

template <class T>
void backward(const AttentionBackward& args, void* workspace, const Context& context) {
  double* const delta = static_cast<double*>(workspace);
  const RowSums sums{delta, delta + args.heads * args.total_q};
  for_each_query<T>(args, context,
                    [&](const Head<T>& head, int64_t i) { row_delta(args, head, i, sums); });
  if (args.dquery.data || args.dslopes) {
    for_each_query<T>(args, context,
                      [&](const Head<T>& head, int64_t i) { backward_query(args, head, i, sums); });
  }
  if (args.dkey.data || args.dvalue.data) {
    const auto keys = [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t kv_head = row / args.seq_k % args.kv_heads;
        const int64_t batch = row / args.seq_k / args.kv_heads;
        const int64_t j = row % args.seq_k;
        if (j < sequence_of(args, batch).keys) backward_key<T>(args, batch, kv_head, j, sums);
      }
    };
    context.for_each(args.batch * args.kv_heads * args.seq_k, 1, keys);
  }
  if (args.dbias.data) {
    context.for_each(args.dbias_numel, 1, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        assign_element(args.dbias.data, args.bias_dtype, index,
                       backward_bias<T>(args, index, sums));
      }
    });
  }
  if (args.dsinks || args.dslopes) backward_heads<T>(args, sums);
}

void run_backward(const AttentionBackward& args, const Plan&, void* workspace,
                  const Context& context) {
  backward<double>(args, workspace, context);
}

}  // namespace

Operator<AttentionForward> plain_attention_forward() { return {plan_forward, run_forward}; }
Operator<AttentionBackward> plain_attention_backward() { return {plan_backward, run_backward}; }

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
