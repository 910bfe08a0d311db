// Rotary embedding of query and key: output[a] = input[a] * cos[a] - input[b] * sin[a] and
// output[b] = input[b] * cos[b] + input[a] * sin[b] of pairs (a, b) of columns, or transposed.
//
// Threads take blocks of tokens. Of each token cos and sin are read once, for all heads of query
// and key, into two lines of numbers with a factor for every column: that of the column itself, and
// that of its partner with its sign. Position, width, pairing and direction are in these lines; a
// row is input * own + partner * other. Traffic: one read and one write of query and key, one read
// of cos and sin. Done when it runs at the speed of a copy of query and key.
#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/lines.h"
#include "cpu/parallel.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

// Of the lines of a block, which stay in cache while all heads pass.
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

// `ahead` is the row that is asked for meanwhile.
template <class A, class T, bool kInterleaved>
ONEPASS_INLINE void rotate_row(const RotaryForward& args, const T* x, const T* ahead, const A* own,
                               const A* other, T* y) {
  const int64_t pairs = args.rotary_dim / 2;
  if constexpr (kInterleaved) {
    // scalar: y[j] = x[j] * own[j] + x[j ^ 1] * other[j]
    for_each_vector<A>(0, args.rotary_dim, [&](int64_t j, auto lanes) {
      __builtin_prefetch(ahead + j);
      const Vec<A> v = load<A>(x + j, lanes);
      const Vec<A> turned = swap_neighbours<A>(v) * load<A>(other + j, lanes);
      store<A>(y + j, fma<A>(v, load<A>(own + j, lanes), turned), lanes);
    });
  } else {
    // scalar: y[i] = x[i] * own[i] + x[pairs + i] * other[i], and likewise y[pairs + i]
    for_each_vector<A>(0, pairs, [&](int64_t i, auto lanes) {
      const int64_t k = pairs + i;
      __builtin_prefetch(ahead + i);
      __builtin_prefetch(ahead + k);
      const Vec<A> a = load<A>(x + i, lanes);
      const Vec<A> b = load<A>(x + k, lanes);
      const Vec<A> first = b * load<A>(other + i, lanes);
      const Vec<A> second = a * load<A>(other + k, lanes);
      store<A>(y + i, fma<A>(a, load<A>(own + i, lanes), first), lanes);
      store<A>(y + k, fma<A>(b, load<A>(own + k, lanes), second), lanes);
    });
  }
  std::copy_n(x + args.rotary_dim, args.head_dim - args.rotary_dim, y + args.rotary_dim);
}

// All heads of one tensor at the tokens [begin, end), in the order in which they lie in memory.
template <class A, class T, bool kInterleaved>
void rotate_heads(const RotaryForward& args, const RotatedHeads& heads, int64_t batch,
                  int64_t begin, int64_t end, Lines<A> lines) {
  const HeadStride& from = heads.input_stride;
  const HeadStride& to = heads.output_stride;
  const T* input = static_cast<const T*>(heads.input) + batch * from.batch;
  T* output = static_cast<T*>(heads.output) + batch * to.batch;
  const auto rotate = [&](int64_t head, int64_t token, int64_t ahead) {
    const int64_t line = (token - begin) * args.rotary_dim;
    const T* row = input + head * from.head + token * from.token;
    rotate_row<A, T, kInterleaved>(args, row, row + ahead, lines.own + line, lines.other + line,
                                   output + head * to.head + token * to.token);
  };
  if (from.token > from.head) {
    const int64_t ahead = kPrefetchBytes / sizeof(T);
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t head = 0; head < heads.heads; ++head) rotate(head, token, ahead);
    }
  } else {
    for (int64_t head = 0; head < heads.heads; ++head) {
      const int64_t ahead = head + 1 < heads.heads ? from.head : 0;
      for (int64_t token = begin; token < end; ++token) rotate(head, token, ahead);
    }
  }
}

int64_t bytes_of_lines(const RotaryForward& args) {  // of one token
  return 2 * args.rotary_dim * std::max<int64_t>(size_of(args.dtype), sizeof(float));
}

template <class T, bool kInterleaved>
void rotary_forward_kernel(const RotaryForward& args, int64_t tokens, int64_t begin, int64_t end,
                           void* scratch) {
  using A = Accumulator<T>;
  const Lines<A> lines{static_cast<A*>(scratch),
                       static_cast<A*>(scratch) + tokens * args.rotary_dim};
  const int64_t blocks = (args.tokens + tokens - 1) / tokens;  // of a sequence
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t batch = piece / blocks;
    const int64_t first = piece % blocks * tokens;
    const int64_t last = std::min(first + tokens, args.tokens);
    fill<A>(args, batch, first, last, lines);
    rotate_heads<A, T, kInterleaved>(args, args.query, batch, first, last, lines);
    rotate_heads<A, T, kInterleaved>(args, args.key, batch, first, last, lines);
  }
}

Plan plan_forward(const RotaryForward& args, const Machine& machine) {
  const int64_t line = bytes_of_lines(args);
  const int64_t tokens =
      std::clamp<int64_t>(kBlockBytes / std::max<int64_t>(line, 1), 1, args.tokens);
  const int64_t pieces = args.batch * ((args.tokens + tokens - 1) / tokens);
  const int64_t heads = args.query.heads + args.key.heads;
  const int64_t bytes = 2 * args.batch * heads * args.tokens * args.head_dim * size_of(args.dtype);
  const int64_t threads = threads_for(bytes / kBytes, pieces, machine);
  return {.workspace_bytes = threads * tokens * line,
          .kernel_name = "rotary_forward_kernel",
          .rows_per_tile = tokens,
          .splits = pieces,
          .reason = threads > 1 ? "one parallel region" : "too small for a parallel region",
          .threads = threads};
}

void run_forward(const RotaryForward& args, const Plan& plan, void* workspace,
                 const Context& context) {
  // Each thread has one run of pieces: its first one says which lines are its own.
  const int64_t each = (plan.splits + plan.threads - 1) / plan.threads;
  const int64_t bytes = plan.rows_per_tile * bytes_of_lines(args);
  visit_dtype(args.dtype, [&]<class T>() {
    visit_bool(args.interleaved, [&]<bool kInterleaved>() {
      for_each_piece(context, plan.threads, plan.splits, [&](int64_t begin, int64_t end) {
        rotary_forward_kernel<T, kInterleaved>(
            args, plan.rows_per_tile, begin, end,
            static_cast<char*>(workspace) + begin / each * bytes);
      });
    });
  });
}

}  // namespace

Operator<RotaryForward> rotary_forward() { return {plan_forward, run_forward}; }

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
