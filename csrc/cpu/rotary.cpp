// Rotary embedding of query and key: output[a] = input[a] * cos[a] - input[b] * sin[a] and
// output[b] = input[b] * cos[b] + input[a] * sin[b] of pairs (a, b) of columns, or transposed.
//
// Threads take blocks of tokens. cos and sin of a token are read once, for all heads of query and
// key, into two lines of numbers: a factor for each column, and one for its partner, with its sign.
// Position, width, pairing and direction are in these lines; a row is input * own + partner *
// other. Traffic: one read and one write of query and key, one read of cos and sin. Done when it
// runs at the speed of a copy of query and key.
//
// With an RMS norm before the rotation, a row is read for its sum of squares first, and is in L1
// when it is rotated. The backward rotates the gradient of a row into a line, then computes a
// norm's backward of that line; rstd is recomputed from x, which it reads anyway, so that only x is
// saved. Traffic of the backward: one read of gradient and x, one write. Its threads take chunks of
// blocks, whose number depends on the shape alone; the weights' gradients are summed by runs and
// chunks, as in a norm.
#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/lines.h"
#include "cpu/normed_rows_backward.h"
#include "cpu/parallel.h"
#include "cpu/pieces.h"
#include "cpu/row_sums.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

// Bytes of the lines of a block, which stay in cache while all heads are rotated.
constexpr int64_t kBlockBytes = 32 << 10;

template <class A>
struct Lines {
  A* own;    // (tokens, rotary_dim)
  A* other;  // (tokens, rotary_dim)
};

// line[j] = the number of column j.
template <class A>
void widen_columns(const RotaryForward& args, const RotaryTable& table, int64_t first, A* line) {
  const int64_t pairs = args.rotary_dim / 2;
  if (!args.half_width) {
    widen_line<A>(table.data, args.table_dtype, first, args.rotary_dim, line);
  } else if (!args.interleaved) {
    widen_line<A>(table.data, args.table_dtype, first, pairs, line);
    std::copy_n(line, pairs, line + pairs);
  } else {
    widen_line<A>(table.data, args.table_dtype, first, pairs, line);
    for (int64_t i = pairs - 1; i >= 0; --i) line[2 * i] = line[2 * i + 1] = line[i];
  }
}

// (s[a], s[b]) of each pair becomes (-s[a], s[b]); transposed it becomes (s[b], -s[a]).
template <class A>
void turn(const RotaryForward& args, A* line) {
  const int64_t pairs = args.rotary_dim / 2;
  if (args.interleaved) {
    Vec<A> sign;
    for (int i = 0; i < kLanes<A>; ++i) sign[i] = (i % 2 == 1) == args.transposed ? A(-1) : A(1);
    for_each_vector<A>(0, args.rotary_dim, [&](int64_t j, auto lanes) {
      const Vec<A> s = load<A>(line + j, lanes);
      store<A>(line + j, (args.transposed ? swap_neighbours<A>(s) : s) * sign, lanes);
    });
    return;
  }
  for_each_vector<A>(0, pairs, [&](int64_t i, auto lanes) {
    const Vec<A> first = -load<A>(line + i, lanes);
    const Vec<A> second = load<A>(line + pairs + i, lanes);
    store<A>(line + i, args.transposed ? second : first, lanes);
    store<A>(line + pairs + i, args.transposed ? first : second, lanes);
  });
}

template <class A>
void fill(const RotaryForward& args, int64_t batch, int64_t begin, int64_t end, Lines<A> lines) {
  for (int64_t token = begin; token < end; ++token) {
    const int64_t row = rotary_row(args, batch, token);
    const auto widened = [&](const RotaryTable& table, A* line) {
      widen_columns<A>(args, table, batch * table.batch_stride + row * table.row_stride, line);
    };
    widened(args.cos, lines.own);
    widened(args.sin, lines.other);
    turn<A>(args, lines.other);
    lines.own += args.rotary_dim;
    lines.other += args.rotary_dim;
  }
}

// A row without a norm; `ahead` is the row that is prefetched meanwhile.
template <class A, class T>
struct PlainRow {
  static constexpr bool kPlain = true;
  const T* x;
  const T* ahead;

  ONEPASS_INLINE Vec<A> operator()(int64_t j, auto lanes) const {
    __builtin_prefetch(ahead + j);
    return load<A>(x + j, lanes);
  }
};

// A row after its norm: x * rstd * weight.
template <class A, class T>
struct NormedRow {
  static constexpr bool kPlain = false;
  const T* x;
  const T* ahead;
  const A* weight;
  Vec<A> rstd;

  ONEPASS_INLINE Vec<A> operator()(int64_t j, auto lanes) const {
    __builtin_prefetch(ahead + j);
    return load<A>(x + j, lanes) * rstd * load<A>(weight + j, lanes);
  }
};

template <class A, bool kInterleaved, class Row, class Y>
ONEPASS_INLINE void rotate_row(const RotaryForward& args, const Row& row, const A* own,
                               const A* other, Y* y) {
  const int64_t pairs = args.rotary_dim / 2;
  if constexpr (kInterleaved) {
    // scalar: y[j] = x[j] * own[j] + x[j ^ 1] * other[j]
    for_each_vector<A>(0, args.rotary_dim, [&](int64_t j, auto lanes) {
      const Vec<A> v = row(j, lanes);
      const Vec<A> turned = swap_neighbours<A>(v) * load<A>(other + j, lanes);
      store<A>(y + j, fma<A>(v, load<A>(own + j, lanes), turned), lanes);
    });
  } else {
    // scalar: y[i] = x[i] * own[i] + x[pairs + i] * other[i], and likewise y[pairs + i]
    for_each_vector<A>(0, pairs, [&](int64_t i, auto lanes) {
      const int64_t k = pairs + i;
      const Vec<A> a = row(i, lanes);
      const Vec<A> b = row(k, lanes);
      const Vec<A> first = b * load<A>(other + i, lanes);
      const Vec<A> second = a * load<A>(other + k, lanes);
      store<A>(y + i, fma<A>(a, load<A>(own + i, lanes), first), lanes);
      store<A>(y + k, fma<A>(b, load<A>(own + k, lanes), second), lanes);
    });
  }
  if constexpr (Row::kPlain && __is_same(decltype(row.x), const Y*)) {
    if (args.in_place) return;
    std::copy_n(row.x + args.rotary_dim, args.head_dim - args.rotary_dim, y + args.rotary_dim);
  } else {
    for_each_vector<A>(args.rotary_dim, args.head_dim,
                       [&](int64_t j, auto lanes) { store<A>(y + j, row(j, lanes), lanes); });
  }
}

bool has_tokens_outside(const HeadStride& stride) { return stride.token > stride.head; }

// Distance in elements to the row that is prefetched while a row of a head is read.
template <class T>
int64_t distance_ahead(const HeadStride& stride, int64_t head, int64_t heads) {
  if (has_tokens_outside(stride)) return kPrefetchBytes / sizeof(T);
  return head + 1 < heads ? stride.head : 0;
}

// Rotates all heads of one tensor at the tokens [begin, end), in the order of memory; `weight`,
// (head_dim,), if kNormed.
template <class A, class T, bool kInterleaved, bool kNormed>
void rotate_heads(const RotaryForward& args, const RotatedHeads& heads, const A* weight,
                  int64_t batch, int64_t begin, int64_t end, Lines<A> lines) {
  const HeadStride& from = heads.input_stride;
  const HeadStride& to = heads.output_stride;
  const T* input = static_cast<const T*>(heads.input) + batch * from.batch;
  T* output = static_cast<T*>(heads.output) + batch * to.batch;
  const auto rotate = [&](int64_t head, int64_t token, int64_t ahead) {
    const int64_t line = (token - begin) * args.rotary_dim;
    const T* x = input + head * from.head + token * from.token;
    T* y = output + head * to.head + token * to.token;
    const auto turn = [&](const auto& row) {
      rotate_row<A, kInterleaved>(args, row, lines.own + line, lines.other + line, y);
    };
    if constexpr (kNormed) {
      const A rstd = rms_rstd<A>(x, args.head_dim, args.eps);
      turn(NormedRow<A, T>{x, x + ahead, weight, broadcast<A>(rstd)});
    } else {
      turn(PlainRow<A, T>{x, x + ahead});
    }
  };
  if (has_tokens_outside(from)) {
    const int64_t ahead = distance_ahead<T>(from, 0, heads.heads);
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t head = 0; head < heads.heads; ++head) rotate(head, token, ahead);
    }
  } else {
    for (int64_t head = 0; head < heads.heads; ++head) {
      const int64_t ahead = distance_ahead<T>(from, head, heads.heads);
      for (int64_t token = begin; token < end; ++token) rotate(head, token, ahead);
    }
  }
}

// The scratch of a thread in the backward.
template <class A>
struct Scratch {
  Lines<A> lines;
  A* gradient;  // (sum_size,) of a row before its rotation
  A* run;       // (sum_size,) of the weight's gradient
  A* unwanted;  // (head_dim,) for gradients of rows that no caller wants
};

// Accumulators of a row, a multiple of a vector.
template <class A>
int64_t sum_size(const RotaryForward& args) {
  return padded_bytes(args.head_dim, sizeof(A)) / sizeof(A);
}

// The backward of rotate_heads with kNormed; adds the weight's gradient to `total`, (sum_size,).
template <class A, class T, bool kInterleaved>
void unrotate_heads(const RotaryBackward& args, const RotatedHeads& heads, const NormedHeads& norm,
                    const A* weight, int64_t batch, int64_t begin, int64_t end,
                    const Scratch<A>& scratch, A* total) {
  const int64_t tokens = end - begin;
  const int64_t size = sum_size<A>(args);
  const bool tokens_outside = has_tokens_outside(norm.x_stride);
  BackwardRows<A> rows{};
  rows.weight = weight;
  rows.dweight = scratch.run;
  rows.cols = args.head_dim;
  const auto unrotate = [&](int64_t row) {
    const int64_t head = tokens_outside ? row % heads.heads : row / tokens;
    const int64_t token = begin + (tokens_outside ? row / heads.heads : row % tokens);
    const auto at = [&](const HeadStride& stride) {
      return batch * stride.batch + head * stride.head + token * stride.token;
    };
    const auto ahead = [&](const HeadStride& stride) {
      return distance_ahead<T>(stride, head, heads.heads);
    };
    const T* d = static_cast<const T*>(heads.input) + at(heads.input_stride);
    const T* x = static_cast<const T*>(norm.x) + at(norm.x_stride);
    A* u = scratch.gradient;
    const int64_t line = (token - begin) * args.rotary_dim;
    rotate_row<A, kInterleaved>(args, PlainRow<A, T>{d, d + ahead(heads.input_stride)},
                                scratch.lines.own + line, scratch.lines.other + line, u);
    const T* next = x + ahead(norm.x_stride);
    // scalar: squares += x[j] * x[j]; products += u[j] * weight[j] * x[j]
    const auto [squares, products] =
        sum_columns<A, 2>(args.head_dim, [&](Vec<A>* sum, int64_t j, auto lanes) {
          __builtin_prefetch(next + j);
          const Vec<A> v = load<A>(x + j, lanes);
          sum[0] = fma<A>(v, v, sum[0]);
          sum[1] = fma<A>(load<A>(u + j, lanes) * load<A>(weight + j, lanes), v, sum[1]);
        });
    rows.rstd[0] = rstd_of<A>(squares, args.head_dim, args.eps);
    rows.mean_gh[0] = products * rows.rstd[0] / static_cast<A>(args.head_dim);
    rows.doutput[0] = u;
    rows.x[0] = x;
    rows.dx[0] = heads.output ? static_cast<T*>(heads.output) + at(heads.output_stride)
                              : static_cast<void*>(scratch.unwanted);
    norm_backward_kernel<A, A, T, T, true, false, false, 1>(rows, 0, args.head_dim);
  };
  for_each_run(0, heads.heads * tokens, kRunRows, total, scratch.run, size,
               [&](int64_t row, int64_t last) {
                 for (; row < last; ++row) unrotate(row);
               });
}

int64_t bytes_of_lines(const RotaryForward& args) {  // of one token
  return 2 * args.rotary_dim * std::max<int64_t>(size_of(args.dtype), sizeof(float));
}

// Tokens of a block, and blocks of a sequence.
struct Blocks {
  int64_t tokens;
  int64_t of_sequence;
};

Blocks blocks_of(const RotaryForward& args) {
  const int64_t tokens =
      std::clamp<int64_t>(kBlockBytes / std::max<int64_t>(bytes_of_lines(args), 1), 1, args.tokens);
  return {tokens, ceil_div(args.tokens, tokens)};
}

// Fills the lines of blocks [begin, end) of all sequences, and calls body(batch, first token, last)
// for each block.
template <class A, class Body>
void for_each_block(const RotaryForward& args, const Blocks& blocks, int64_t begin, int64_t end,
                    Lines<A> lines, Body&& body) {
  for (int64_t block = begin; block < end; ++block) {
    const int64_t batch = block / blocks.of_sequence;
    const int64_t first = block % blocks.of_sequence * blocks.tokens;
    const int64_t last = std::min(first + blocks.tokens, args.tokens);
    fill<A>(args, batch, first, last, lines);
    body(batch, first, last);
  }
}

// As accumulators, each (head_dim,); null where there is none.
template <class A>
struct Weights {
  const A* query;
  const A* key;
};

int64_t bytes_of_weights(const RotaryForward& args) {
  return 2 * padded_bytes(args.head_dim, std::max<int64_t>(size_of(args.dtype), sizeof(float)));
}

template <class A>
Weights<A> widen_weights(const RotaryForward& args, void* workspace) {
  A* buffer = static_cast<A*>(workspace);
  const auto wide = [&](const RotatedHeads& heads, A* to) {
    return heads.weight ? widened<A>(heads.weight, heads.weight_dtype, args.weight_offset, 1.0,
                                     args.head_dim, to)
                        : nullptr;
  };
  return {wide(args.query, buffer), wide(args.key, buffer + sum_size<A>(args))};
}

template <class T, bool kInterleaved>
void rotary_forward_kernel(const RotaryForward& args, const Weights<Accumulator<T>>& weights,
                           const Blocks& blocks, int64_t begin, int64_t end, void* scratch) {
  using A = Accumulator<T>;
  const Lines<A> lines{static_cast<A*>(scratch),
                       static_cast<A*>(scratch) + blocks.tokens * args.rotary_dim};
  for_each_block(args, blocks, begin, end, lines, [&](int64_t batch, int64_t first, int64_t last) {
    const auto rotate = [&](const RotatedHeads& heads, const A* weight) {
      visit_bool(weight != nullptr, [&]<bool kNormed>() {
        rotate_heads<A, T, kInterleaved, kNormed>(args, heads, weight, batch, first, last, lines);
      });
    };
    rotate(args.query, weights.query);
    rotate(args.key, weights.key);
  });
}

// A forward's plan.
struct ForwardLayout {
  Blocks blocks;
  Slots slots;  // lines of each thread
};

Plan plan_forward(const RotaryForward& args, const Machine& machine, ForwardLayout& layout) {
  const Blocks& blocks = layout.blocks = blocks_of(args);
  const bool has_weights = args.query.weight || args.key.weight;
  layout.slots = {.begin = has_weights ? bytes_of_weights(args) : 0,
                  .bytes = blocks.tokens * bytes_of_lines(args)};
  const int64_t pieces = args.batch * blocks.of_sequence;
  const int64_t heads = args.query.heads + args.key.heads;
  const int64_t bytes = 2 * args.batch * heads * args.tokens * args.head_dim * size_of(args.dtype);
  const int64_t threads = threads_for(bytes / kBytes, pieces, machine);
  return {.workspace_bytes = layout.slots.end(threads),
          .kernel_name = "rotary_forward_kernel",
          .rows_per_tile = blocks.tokens,
          .splits = pieces,
          .reason = threads > 1 ? "one parallel region" : "too small for a parallel region",
          .threads = threads};
}

void run_forward(const RotaryForward& args, const Plan& plan, const ForwardLayout& layout,
                 void* workspace, const Context& context) {
  // Each thread has one run of pieces, whose first one gives the number of its lines.
  const int64_t each = ceil_div(plan.splits, plan.threads);
  visit_dtype(args.dtype, [&]<class T>() {
    const auto weights = widen_weights<Accumulator<T>>(args, workspace);
    visit_bool(args.interleaved, [&]<bool kInterleaved>() {
      for_each_piece(context, plan.threads, plan.splits, [&](int64_t begin, int64_t end) {
        rotary_forward_kernel<T, kInterleaved>(args, weights, layout.blocks, begin, end,
                                               layout.slots.of(workspace, begin / each));
      });
    });
  });
}

// A backward's plan.
struct BackwardLayout {
  Blocks blocks;
  int64_t count;     // of blocks, of all sequences
  int64_t partials;  // begin of (chunks, query and key, sum_size)
  Slots slots;       // Scratch of each thread
};

// Lines first, then the rows of a Scratch.
constexpr int64_t kScratchRows = 3;

Plan plan_backward(const RotaryBackward& args, const Machine& machine, BackwardLayout& layout) {
  const Blocks& blocks = layout.blocks = blocks_of(args);
  layout.count = args.batch * blocks.of_sequence;
  const int64_t rows = args.batch * (args.query.heads + args.key.heads) * args.tokens;
  const int64_t most = chunks_of(rows, args.head_dim);
  const int64_t chunks =
      static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::min(most, layout.count))));
  const int64_t bytes = 3 * rows * args.head_dim * size_of(args.dtype);
  const int64_t threads = threads_for(bytes / kBytes, chunks, machine);
  const int64_t row_bytes = bytes_of_weights(args) / 2;
  const int64_t line_bytes = round_up(blocks.tokens * bytes_of_lines(args), 64);
  layout.partials = 2 * row_bytes;
  layout.slots = {.begin = layout.partials + 2 * chunks * row_bytes,
                  .bytes = line_bytes + kScratchRows * row_bytes};
  return {.workspace_bytes = layout.slots.end(threads),
          .kernel_name = "rotary_backward_kernel",
          .rows_per_tile = blocks.tokens,
          .splits = chunks,
          .reason = threads > 1   ? "chunks of blocks spread over threads"
                    : chunks == 1 ? "too few rows to cut into chunks"
                                  : "too small for a parallel region",
          .threads = threads};
}

// The backward of blocks [begin, end); `totals`, (2, sum_size), get the sums for the weights.
template <class T, bool kInterleaved>
void rotary_backward_kernel(const RotaryBackward& args, const Weights<Accumulator<T>>& weights,
                            const Blocks& blocks, int64_t begin, int64_t end,
                            const Scratch<Accumulator<T>>& scratch, Accumulator<T>* totals) {
  using A = Accumulator<T>;
  const int64_t size = sum_size<A>(args);
  std::fill(totals, totals + 2 * size, A(0));
  for_each_block(args, blocks, begin, end, scratch.lines,
                 [&](int64_t batch, int64_t first, int64_t last) {
                   const auto unrotate = [&](const RotatedHeads& heads, const NormedHeads& norm,
                                             const A* weight, A* total) {
                     if (weight) {
                       unrotate_heads<A, T, kInterleaved>(args, heads, norm, weight, batch, first,
                                                          last, scratch, total);
                     } else {
                       rotate_heads<A, T, kInterleaved, false>(args, heads, weight, batch, first,
                                                               last, scratch.lines);
                     }
                   };
                   unrotate(args.query, args.query_norm, weights.query, totals);
                   unrotate(args.key, args.key_norm, weights.key, totals + size);
                 });
}

void run_backward(const RotaryBackward& args, const Plan& plan, const BackwardLayout& layout,
                  void* workspace, const Context& context) {
  const Blocks& blocks = layout.blocks;
  const int64_t each = ceil_div(plan.splits, plan.threads);
  visit_dtype(args.dtype, [&]<class T>() {
    using A = Accumulator<T>;
    const int64_t size = sum_size<A>(args);
    const auto weights = widen_weights<A>(args, workspace);
    A* const partials = reinterpret_cast<A*>(static_cast<char*>(workspace) + layout.partials);
    visit_bool(args.interleaved, [&]<bool kInterleaved>() {
      for_each_piece(context, plan.threads, plan.splits, [&](int64_t begin, int64_t end) {
        Arena arena(layout.slots.of(workspace, begin / each));
        Scratch<A> scratch;
        A* const lines = arena.take<A>(2 * blocks.tokens * args.rotary_dim);
        scratch.lines = {lines, lines + blocks.tokens * args.rotary_dim};
        scratch.gradient = arena.take<A>(size);
        scratch.run = arena.take<A>(size);
        scratch.unwanted = arena.take<A>(size);
        for (int64_t chunk = begin; chunk < end; ++chunk) {
          rotary_backward_kernel<T, kInterleaved>(
              args, weights, blocks, layout.count * chunk / plan.splits,
              layout.count * (chunk + 1) / plan.splits, scratch, partials + 2 * chunk * size);
        }
      });
    });
    const auto reduce = [&](const RotatedHeads& heads, const NormedHeads& norm, const A* of) {
      if (!norm.dweight) return;
      reduce_partials<A>(of, plan.splits, 2 * size, 0, args.head_dim, norm.dweight,
                         heads.weight_dtype);
    };
    reduce(args.query, args.query_norm, partials);
    reduce(args.key, args.key_norm, partials + size);
  });
}

}  // namespace

Operator<RotaryForward> rotary_forward() {
  return operator_of<RotaryForward, ForwardLayout, plan_forward, run_forward>();
}
Operator<RotaryBackward> rotary_backward() {
  return operator_of<RotaryBackward, BackwardLayout, plan_backward, run_backward>();
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
