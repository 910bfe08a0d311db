// Attention of a few queries against a KV cache. What binds is reading the keys and values, so each
// is read once, by one thread, for all query heads that share it:
//
// A piece of work is a chunk of one kv head's keys. It first writes the new rows that fall into it,
// then S = scale Q K^T, P = exp(S - max) and P V as they lie in the cache, and leaves (max, sum,
// P V) per query row. Whoever finishes the last chunk of a kv head merges them, in the order of the
// keys: one parallel region, no waiting, and no bit depends on who does what when.
//
// Chunks are counted from the sequence's first key and are as long as its own length says, so that
// a sequence comes out the same in any batch, behind any padding, in any pages.
#include <atomic>
#include <cmath>

#include "cpu/attention/attention.h"
#include "cpu/attention/elementary.h"
#include "cpu/attention/rows.h"
#include "cpu/attention/work.h"
#include "cpu/parallel.h"
#include "ops/attention_decode.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

constexpr int64_t kLeastChunk = 128;
constexpr int64_t kMostChunk = kScoreStride;
constexpr int64_t kChunks = 32;   // that a sequence is cut into, between those limits
constexpr int64_t kSumKeys = 32;  // values that are summed in one chain
// How far ahead rows are asked for. Twice what a plain pass over memory takes: between scores and
// sums no row is read at all.
constexpr int64_t kAheadBytes = 2 * kPrefetchBytes;
constexpr int64_t kMostAhead = 64;  // in rows
constexpr int64_t kRowBlock = 64;   // query rows that have their scores at a time
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// The chunks of a sequence that its queries see, at least one.
struct Chunks {
  int64_t keys;   // of each but the last
  int64_t first;  // number of the first one
  int64_t count;
};

Chunks chunks_of(const AttentionDecode& args, const CachedKeys& keys) {
  const int64_t size = std::max<int64_t>(keys.last - keys.first, 0);
  Chunks chunks{};
  chunks.keys = std::clamp(round_up(ceil_div(size, kChunks), kLeastChunk), kLeastChunk, kMostChunk);
  chunks.count = 1;
  if (args.seq_q == 0) return chunks;
  const int64_t first = cached_keys_of(args, keys, 0).first - keys.first;
  const int64_t last = cached_keys_of(args, keys, args.seq_q - 1).last - keys.first;
  if (first >= last) return chunks;
  chunks.first = first / chunks.keys;
  chunks.count = ceil_div(last, chunks.keys) - chunks.first;
  return chunks;
}

// Sizes of a call.
struct Shape {
  int64_t group;   // query heads of a kv head
  int64_t rows;    // queries of a kv head: row h * seq_q + i
  int64_t block;   // of them at a time
  int64_t pieces;  // chunks of all kv heads
  int64_t value_columns;
};

Shape shape_of(const AttentionDecode& args) {
  Shape shape{};
  shape.group = args.heads / args.kv_heads;
  shape.rows = shape.group * args.seq_q;
  shape.block = std::min(shape.rows, kRowBlock);
  shape.value_columns = round_up(args.value_dim, kLanes<float>);
  for (int64_t b = 0; b < args.batch; ++b) {
    shape.pieces += args.kv_heads * chunks_of(args, cached_keys(args, b)).count;
  }
  return shape;
}

// What pieces leave for the merge.
struct Partials {
  int64_t* first_piece;        // (batch,)
  std::atomic<int32_t>* left;  // (batch, kv_heads) pieces that are not done
  float* maximum;              // (pieces, rows)
  float* sum;                  // (pieces, rows) of exp(score - maximum)
  float* output;               // (pieces, rows, value_columns) likewise weighted
};

Partials partials_of(const AttentionDecode& args, const Shape& shape, Arena& arena) {
  Partials p;
  p.first_piece = arena.take<int64_t>(args.batch);
  p.left = arena.take<std::atomic<int32_t>>(args.batch * args.kv_heads);
  p.maximum = arena.take<float>(shape.pieces * shape.rows);
  p.sum = arena.take<float>(shape.pieces * shape.rows);
  p.output = arena.take<float>(shape.pieces * shape.rows * shape.value_columns);
  return p;
}

template <class M, class T>
struct Scratch {
  typename M::Element* queries;  // (block, query_columns)
  float* scores;                 // (block, kMostChunk)
  const T** rows;                // (2 * kMostChunk + kMostAhead,) keys of the chunk, then values
};

template <class M>
int64_t query_columns(const AttentionDecode& args) {
  return round_up(args.head_dim, kLanes<float> * M::kPerCell);
}

template <class M, class T>
Scratch<M, T> scratch_of(const AttentionDecode& args, const Shape& shape, Arena& arena) {
  Scratch<M, T> s;
  s.queries = arena.take<typename M::Element>(shape.block * query_columns<M>(args));
  s.scores = arena.take<float>(shape.block * kMostChunk);
  s.rows = arena.take<const T*>(2 * kMostChunk + kMostAhead);
  return s;
}

template <class T>
class Decode {
  using M = MultiplierOf<T>;

 public:
  Decode(const AttentionDecode& args, const Shape& shape, const Partials& partials,
         const Scratch<M, T>& scratch)
      : args_(args),
        shape_(shape),
        p_(partials),
        s_(scratch),
        ahead_(std::clamp<int64_t>(kAheadBytes / (args.head_dim * int64_t{sizeof(T)}), 4,
                                   kMostAhead)) {}

  void piece(int64_t index) {
    // The last sequence that begins at or before it.
    const int64_t* behind = std::upper_bound(p_.first_piece, p_.first_piece + args_.batch, index);
    batch_ = behind - p_.first_piece - 1;
    keys_ = cached_keys(args_, batch_);
    const Chunks chunks = chunks_of(args_, keys_);
    const int64_t within = index - p_.first_piece[batch_];
    kv_head_ = within / chunks.count;
    const int64_t chunk = within % chunks.count;
    const int64_t begin = keys_.first + (chunks.first + chunk) * chunks.keys;
    const int64_t end = std::min(begin + chunks.keys, keys_.last);

    const int64_t cache = args_.cache_batch_idx ? args_.cache_batch_idx[batch_] : batch_;
    const KeyRows<T> keys(args_, args_.key, cache, kv_head_, 0);
    const KeyRows<T> values(args_, args_.value, cache, kv_head_, 0);
    // New rows that no chunk covers are the outer ones' business.
    write_new(keys, values, chunk == 0 ? keys_.old : std::max(keys_.old, begin),
              chunk == chunks.count - 1 ? keys_.last : std::min(keys_.last, end));
    for (int64_t row = 0; row < shape_.rows; row += shape_.block) {
      attend(keys, values, begin, end, row, std::min(row + shape_.block, shape_.rows),
             index * shape_.rows + row);
    }
    std::atomic<int32_t>& left = p_.left[batch_ * args_.kv_heads + kv_head_];
    if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      merge(index - chunk, chunks.count);
    }
  }

 private:
  // ---- rotation and new rows -------------------------------------------------------------------

  void write_new(const KeyRows<T>& keys, const KeyRows<T>& values, int64_t begin, int64_t end) {
    const Rows<const T> new_keys(args_.new_key, batch_, kv_head_, 0);
    const Rows<const T> new_values(args_.new_value, batch_, kv_head_, 0);
    for (int64_t row = begin; row < end; ++row) {
      copy_rotated(new_keys(row - keys_.old), row, keys(row));
      std::copy_n(new_values(row - keys_.old), args_.value_dim, values(row));
    }
  }

  void copy_rotated(const T* from, int64_t position, T* to) const {
    std::copy_n(from, args_.head_dim, to);
    if (args_.rotary_cos == nullptr) return;
    visit_dtype_up_to_float32(args_.rotary_dtype, [&]<class R>() {
      const int64_t pairs = args_.rotary_dim / 2;
      const R* cos = static_cast<const R*>(args_.rotary_cos) + position * pairs;
      const R* sin = static_cast<const R*>(args_.rotary_sin) + position * pairs;
      const int64_t step = args_.rotary_interleaved ? 2 : 1;
      const int64_t apart = args_.rotary_interleaved ? 1 : pairs;
      for (int64_t i = 0; i < pairs; ++i) {
        const float x1 = widen(from[i * step]);
        const float x2 = widen(from[i * step + apart]);
        const float c = widen(cos[i]);
        const float s = widen(sin[i]);
        to[i * step] = narrow<T>(x1 * c - x2 * s);
        to[i * step + apart] = narrow<T>(x1 * s + x2 * c);
      }
    });
  }

  // ---- a chunk ---------------------------------------------------------------------------------

  int64_t head_of(int64_t row) const { return kv_head_ * shape_.group + row / args_.seq_q; }

  void pack_queries(int64_t first, int64_t last) {
    const int64_t columns = query_columns<M>(args_);
    for (int64_t row = first; row < last; ++row) {
      const int64_t query = row % args_.seq_q;
      const T* from = Rows<const T>(args_.query, batch_, head_of(row), 0)(query);
      T rotated[kMaxHeadDim];
      if (args_.rotary_cos != nullptr) {
        copy_rotated(from, keys_.old + (args_.rotary_by_row ? query : 0), rotated);
        from = rotated;
      }
      pack_rows<M>([&](int64_t) { return from; }, 1, args_.head_dim, columns,
                   s_.queries + (row - first) * columns);
    }
  }

  // Query rows [first, last) and the keys of [begin, end) that any of them sees.
  void attend(const KeyRows<T>& keys, const KeyRows<T>& values, int64_t begin, int64_t end,
              int64_t first, int64_t last, int64_t partial) {
    float* output = p_.output + partial * shape_.value_columns;
    std::fill_n(output, (last - first) * shape_.value_columns, 0.0f);
    begin = std::max(begin, cached_keys_of(args_, keys_, 0).first);
    end = std::min(end, cached_keys_of(args_, keys_, args_.seq_q - 1).last);
    const int64_t count = end - begin;
    if (count <= 0) {
      std::fill_n(p_.maximum + partial, last - first, kMinusInfinity);
      std::fill_n(p_.sum + partial, last - first, 0.0f);
      return;
    }
    for (int64_t j = 0; j < count; ++j) {
      s_.rows[j] = keys(begin + j);
      s_.rows[count + j] = values(begin + j);
    }
    // The next chunk's keys, which this thread is likely to read next.
    for (int64_t j = 0; j < ahead_; ++j) {
      s_.rows[2 * count + j] = keys(std::min(end + j, keys_.last - 1));
    }
    pack_queries(first, last);
    const int64_t columns = query_columns<M>(args_);
    const float scale = static_cast<float>(args_.scale);
    score_rows<M>(s_.queries, columns, last - first, s_.rows, s_.rows + ahead_, count,
                  args_.head_dim, scale, s_.scores);
    for (int64_t row = first; row < last; ++row) {
      softmax(row, begin, count, s_.scores + (row - first) * kMostChunk, partial + row - first);
    }
    for (int64_t j = 0; j < count; j += kSumKeys) {
      const T** values = s_.rows + count + j;
      add_rows(s_.scores + j, last - first, values, values + ahead_, std::min(count - j, kSumKeys),
               args_.value_dim, output, shape_.value_columns);
    }
  }

  // The scores of a row become exp(score - maximum).
  void softmax(int64_t row, int64_t begin, int64_t count, float* scores, int64_t partial) {
    constexpr int n = kLanes<float>;
    const int64_t whole = round_up(count, n);
    std::fill(scores + count, scores + whole, kMinusInfinity);
    change(row, begin, scores, count, whole);
    Vec<float> highest = broadcast<float>(kMinusInfinity);
    for (int64_t j = 0; j < whole; j += n) {
      const Vec<float> score = load<float>(scores + j);
      highest = score > highest ? score : highest;
    }
    float maximum = kMinusInfinity;
    for (int i = 0; i < n; ++i) maximum = std::max(maximum, highest[i]);
    // Rows that see nothing have no maximum to subtract: exp(-inf - 0) is 0 as well.
    const Vec<float> low = broadcast<float>(maximum == kMinusInfinity ? 0.0f : maximum);
    Vec<float> sum = {};
    for (int64_t j = 0; j < whole; j += n) {
      const Vec<float> p = exp(load<float>(scores + j) - low);
      sum += p;
      store<float>(scores + j, p);
    }
    p_.maximum[partial] = maximum;
    p_.sum[partial] = sum_of_lanes<float>(sum);
  }

  // Softcap, ALiBi and what the row does not see.
  void change(int64_t row, int64_t begin, float* scores, int64_t count, int64_t whole) {
    constexpr int n = kLanes<float>;
    const int64_t query = row % args_.seq_q;
    const KeyRange seen = cached_keys_of(args_, keys_, query);
    if (args_.softcap != 0 || args_.alibi_slopes) {
      const float softcap = static_cast<float>(args_.softcap);
      const float slope = args_.alibi_slopes
                              ? args_.alibi_slopes[batch_ * args_.alibi_batch_stride + head_of(row)]
                              : 0.0f;
      Vec<float> ahead;  // of the query's position
      for (int i = 0; i < n; ++i) ahead[i] = static_cast<float>(i);
      ahead += static_cast<float>(begin - (keys_.last - args_.seq_q + query));
      for (int64_t j = 0; j < whole; j += n, ahead += static_cast<float>(n)) {
        Vec<float> score = load<float>(scores + j);
        if (softcap != 0.0f) score = softcap * tanh(score / softcap);
        if (args_.alibi_slopes) score -= slope * (ahead < Vec<float>{} ? -ahead : ahead);
        store<float>(scores + j, score);
      }
      std::fill(scores + count, scores + whole, kMinusInfinity);
    }
    const int64_t from = std::clamp<int64_t>(seen.first - begin, 0, count);
    const int64_t to = std::clamp<int64_t>(seen.last - begin, from, count);
    std::fill(scores, scores + from, kMinusInfinity);
    std::fill(scores + to, scores + count, kMinusInfinity);
  }

  // ---- all chunks of a kv head -----------------------------------------------------------------

  void merge(int64_t first_piece, int64_t count) {
    const auto partial = [&](int64_t chunk, int64_t row) {
      return (first_piece + chunk) * shape_.rows + row;
    };
    for (int64_t row = 0; row < shape_.rows; ++row) {
      const int64_t head = head_of(row);
      const int64_t query = row % args_.seq_q;
      const float sink = args_.sinks ? sink_of(args_, head) : kMinusInfinity;
      float maximum = sink;
      for (int64_t c = 0; c < count; ++c) maximum = std::max(maximum, p_.maximum[partial(c, row)]);
      const float low = maximum == kMinusInfinity ? 0.0f : maximum;
      float* merged = p_.output + partial(0, row) * shape_.value_columns;
      float sum = 0.0f;
      for (int64_t c = 0; c < count; ++c) {
        const float factor = std::exp(p_.maximum[partial(c, row)] - low);
        sum += factor * p_.sum[partial(c, row)];
        const float* output = p_.output + partial(c, row) * shape_.value_columns;
        for (int64_t d = 0; d < shape_.value_columns; d += kLanes<float>) {
          const Vec<float> scaled = factor * load<float>(output + d);
          store<float>(merged + d, c == 0 ? scaled : load<float>(merged + d) + scaled);
        }
      }
      if (args_.sinks) sum += std::exp(sink - low);
      args_.lse[(batch_ * args_.heads + head) * args_.seq_q + query] = maximum + std::log(sum);
      const float normalise = sum == 0.0f ? 0.0f : 1.0f / sum;
      T* to = Rows<T>(args_.output, batch_, head, 0)(query);
      for_each_vector<float>(0, args_.value_dim, [&](int64_t d, auto lanes) {
        store<float>(to + d, load<float>(merged + d) * normalise, lanes);
      });
    }
  }

  const AttentionDecode& args_;
  const Shape& shape_;
  const Partials& p_;
  const Scratch<M, T>& s_;
  const int64_t ahead_;
  int64_t batch_ = 0;  // of the current piece
  int64_t kv_head_ = 0;
  CachedKeys keys_{};
};

int64_t bytes_read(const AttentionDecode& args) {
  int64_t rows = 0;
  for (int64_t b = 0; b < args.batch; ++b) {
    const Chunks chunks = chunks_of(args, cached_keys(args, b));
    rows += chunks.count * chunks.keys;
  }
  return rows * args.kv_heads * (args.head_dim + args.value_dim) * size_of(args.dtype);
}

Plan plan_decode(const AttentionDecode& args, const Machine& machine) {
  const Shape shape = shape_of(args);
  Plan plan{};
  plan.kernel_name = "attention_decode_kernel";
  plan.rows_per_tile = shape.block;
  plan.splits = shape.pieces;
  plan.parallel = shape.pieces > 1 && bytes_read(args) > kSerialBytes;
  plan.slots = plan.parallel ? std::min<int64_t>(shape.pieces, machine.threads) : 1;
  visit_dtype_up_to_float32(args.dtype, [&]<class T>() {
    Arena arena(nullptr);
    partials_of(args, shape, arena);
    Arena scratch(nullptr);
    scratch_of<MultiplierOf<T>, T>(args, shape, scratch);
    plan.workspace_bytes = arena.used() + scratch.used() * plan.slots;
    plan.reason = multiplier_text<T>();
  });
  return plan;
}

template <class T>
void attention_decode_kernel(const AttentionDecode& args, const Plan& plan, void* workspace,
                             const Context& context) {
  using M = MultiplierOf<T>;
  const Shape shape = shape_of(args);
  Arena arena(workspace);
  const Partials partials = partials_of(args, shape, arena);
  int64_t pieces = 0;
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t chunks = chunks_of(args, cached_keys(args, b)).count;
    partials.first_piece[b] = pieces;
    for (int64_t head = 0; head < args.kv_heads; ++head) {
      new (&partials.left[b * args.kv_heads + head])
          std::atomic<int32_t>(static_cast<int32_t>(chunks));
    }
    pieces += chunks * args.kv_heads;
  }
  Arena sizes(nullptr);
  scratch_of<M, T>(args, shape, sizes);
  char* slots = static_cast<char*>(workspace) + arena.used();
  for_each_piece_in_order(context, plan.slots, pieces, [&](int64_t piece, int64_t slot) {
    Arena own(slots + slot * sizes.used());
    const auto scratch = scratch_of<M, T>(args, shape, own);
    Decode<T>(args, shape, partials, scratch).piece(piece);
  });
}

void run_decode(const AttentionDecode& args, const Plan& plan, void* workspace,
                const Context& context) {
  visit_dtype_up_to_float32(
      args.dtype, [&]<class T>() { attention_decode_kernel<T>(args, plan, workspace, context); });
}

}  // namespace

Operator<AttentionDecode> attention_decode() { return {plan_decode, run_decode}; }

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
