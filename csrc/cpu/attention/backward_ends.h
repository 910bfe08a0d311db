// The first and the last step of a backward: delta of every query, before any block of keys can
// begin, and the sums that remain when all blocks are done.
#pragma once

#include "cpu/attention/backward_shape.h"
#include "cpu/attention/scores.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// The scalar products of `count` pairs of rows, a pair per lane, summed like the products of dP, by
// the same instruction in the same order (multiply_in_chains). So if a row has all its weight on
// one key, the output is that key's value and dP - delta is exactly 0.
template <class M, class Left, class Right>
Vec<float> row_dots(Left&& left, Right&& right, int64_t count, int64_t value_dim) {
  constexpr int n = kLanes<float>;
  Vec<float> total = {};
  for (int64_t first = 0; first < value_dim; first += M::kChain) {
    const int64_t size = std::min(M::kChain, value_dim - first);
    alignas(64) typename M::Element panels[2][M::kChain * n];
    pack_panel<M>([&](int64_t i) { return left(i) + first; }, count, size, n, panels[0]);
    pack_panel<M>([&](int64_t i) { return right(i) + first; }, count, size, n, panels[1]);
    Vec<float> sum = {};
    for (int64_t cell = 0; cell < ceil_div(size, M::kPerCell); ++cell) {
      const int64_t at = cell * n * M::kPerCell;
      sum = M::multiply_add(M::load_cells(panels[0] + at), M::load_cells(panels[1] + at), sum);
    }
    total += sum;
  }
  return total;
}

// The share in delta of what rounding to bfloat16 takes from an output in float32; doutput is
// rounded, as it is a factor of dP. Without it dbias has errors of bfloat16, and no product of it.
inline float dot_of_rest(const float* doutput, const float* output, int64_t size) {
  const auto rounded = [](Vec<float> x) { return (Vec<float>)(pairs_of(x, x) & 0xffff0000u); };
  Vec<float> sum = {};
  for_each_vector<float>(0, size, [&](int64_t d, auto count) {
    const Vec<float> of_output = load<float>(output + d, count);
    const Vec<float> factor = rounded(load<float>(doutput + d, count));
    sum = fma<float>(factor, of_output - rounded(of_output), sum);
  });
  return sum_of_lanes<float>(sum);
}

template <class T, class M>
void write_delta(const AttentionBackward& args, const BackwardSums& sums, int64_t batch,
                 int64_t head, int64_t first) {
  const Sequence sequence = sequence_of(args, batch);
  const Rows<const T> outputs(args.output, batch, head, sequence.first_q);
  const Rows<const T> doutputs(args.doutput, batch, head, sequence.first_q);
  const int64_t last = std::min(first + kRowsAtOnce, sequence.queries);
  for (int64_t query = first; query < last; query += kLanes<float>) {
    const int64_t count = std::min<int64_t>(kLanes<float>, last - query);
    const Vec<float> dots =
        row_dots<M>([&](int64_t i) { return doutputs(query + i); },
                    [&](int64_t i) { return outputs(query + i); }, count, args.value_dim);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = lse_row(args, sequence, batch, head, query + i);
      const float dlse = args.dlse ? static_cast<const float*>(args.dlse)[row] : 0.0f;
      float rest = -dlse;
      if constexpr (M::kPerCell == 2 && std::is_same_v<T, float>) {
        rest += dot_of_rest(doutputs(query + i), outputs(query + i), args.value_dim);
      }
      sums.delta[row] = dots[i] + rest;
    }
  }
}

// Adds up the splits' dquery, and rounds the sums of the workspace.
template <class T>
void finish_dquery(const AttentionBackward& args, const BackwardShape& shape,
                   const BackwardSums& sums, int64_t batch, int64_t head, int64_t first) {
  const Sequence sequence = sequence_of(args, batch);
  const int64_t last = std::min(first + kRowsAtOnce, sequence.queries);
  const Rows<T> rows(args.dquery, batch, head, sequence.first_q);
  const float scale = static_cast<float>(args.scale);
  for (int64_t query = first; query < last; ++query) {
    const float* parts = dquery_sums(args, shape, sums, sequence, 0, batch, head, query);
    T* row = rows(query);
    for_each_vector<float>(0, args.head_dim, [&](int64_t d, auto count) {
      Vec<float> sum = load<float>(parts + d);
      for (int64_t split = 1; split < shape.splits; ++split) {
        sum += load<float>(parts + split * args.heads * args.total_q * shape.query_columns + d);
      }
      store<float>(row + d, sum * scale, count);
    });
  }
}

inline void finish_dbias(const AttentionBackward& args, const BackwardSums& sums, int64_t first,
                         int64_t last) {
  visit_dtype_up_to_float32(args.bias_dtype, [&]<class B>() {
    B* dbias = static_cast<B*>(args.dbias.data);
    for_each_vector<float>(first, last, [&](int64_t i, auto count) {
      store<float>(dbias + i, load<float>(sums.dbias + i, count), count);
    });
  });
}

inline void finish_sums(const AttentionBackward& args, const BackwardShape& shape,
                        const BackwardSums& sums) {
  write_head_gradients(args, [&](int64_t batch, int64_t head, HeadGradients& gradients) {
    const int64_t at = batch * args.heads + head;
    if (args.dsinks) gradients.sink += sums.dsinks[at];
    if (args.dslopes == nullptr) return;
    for (int64_t split = 0; split < shape.splits; ++split) {
      gradients.slope += sums.dslopes[split * args.batch * args.heads + at];
    }
  });
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
