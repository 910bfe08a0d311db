// Attention of a few queries against a KV cache. The limit is the time to read keys and values, so
// each is read once, by one thread, for all query heads that share it:
//
// A piece of work is a chunk of one kv head's keys. It first writes the new rows that fall into it,
// then computes S = scale Q K^T, P = exp(S - max) and P V from rows in the cache, and stores the
// state (max, sum, P V) of each query row. The thread that finishes the last chunk of a kv head
// joins the states, in the order of the keys: one parallel region, no waiting, and no bit depends
// on the threads or their order.
//
// With many queries the limit is arithmetic, and the chunks' states would outgrow the cache. Then a
// piece is a block of query rows that goes through all chunks, after a region that writes the new
// rows.
//
// Chunks are counted from the sequence's first key, and their length depends on the sequence's
// length alone, so that a sequence has the same result in any batch, after any padding, in any
// pages.
//
// A cache may hold codes of 8 bits, with a scale for each row. A row's scale is that of all its
// products, so codes are multiplied as they are: the scale of a key is applied to its scores, that
// of a value to its probabilities.
#include <atomic>
#include <cmath>

#include "cpu/attention/attention.h"
#include "cpu/attention/rows.h"
#include "cpu/attention/scores.h"
#include "cpu/attention/work.h"
#include "cpu/parallel.h"
#include "ops/attention_decode.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

// Fewer chunks interrupt the reading less often. But no more threads can take part than there are
// chunks, times kv heads, times batch. Timed with two threads.
constexpr int64_t kLeastChunk = 256;
constexpr int64_t kMostChunk = kScoreStride;
constexpr int64_t kChunks = 16;   // per sequence, within those limits
constexpr int64_t kSumKeys = 32;  // values that are summed in one chain
// The distance at which rows are prefetched. It is twice that of a plain pass over memory, because
// no row is read between the scores and the sums.
constexpr int64_t kAheadBytes = 2 * kPrefetchBytes;
constexpr int64_t kMostAhead = 64;    // in rows
constexpr int64_t kRowBlock = 64;     // query rows whose scores are computed at a time
constexpr int64_t kMostRows = 128;    // of a kv head with chunks as pieces; with more: row blocks
constexpr int64_t kPageBytes = 4096;  // of memory; this finds larger pages as well

// The chunks of a sequence that its queries see, at least one.
struct Chunks {
  int64_t keys;   // of each except the last
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
  int64_t blocks;  // where these are the pieces, else 0
  int64_t pieces;
  int64_t value_columns;
  Slots slots;
};

Shape shape_of(const AttentionDecode& args) {
  Shape shape{};
  shape.group = args.heads / args.kv_heads;
  shape.rows = shape.group * args.seq_q;
  shape.block = std::min(shape.rows, kRowBlock);
  shape.value_columns = round_up(args.value_dim, kLanes<float>);
  if (shape.rows > kMostRows) {
    shape.blocks = ceil_div(shape.rows, shape.block);
    shape.pieces = args.batch * args.kv_heads * shape.blocks;
    return shape;
  }
  for (int64_t b = 0; b < args.batch; ++b) {
    shape.pieces += args.kv_heads * chunks_of(args, cached_keys(args, b)).count;
  }
  return shape;
}

// Attention of query rows to some of the keys.
struct State {
  float* maximum;  // (rows,)
  float* sum;      // (rows,) of exp(score - maximum)
  float* output;   // (rows, value_columns) values, likewise weighted
  int64_t columns;

  State from(int64_t row) const {
    return {maximum + row, sum + row, output + row * columns, columns};
  }
};

State take_state(const Shape& shape, int64_t rows, Arena& arena) {
  return {arena.take<float>(rows), arena.take<float>(rows),
          arena.take<float>(rows * shape.value_columns), shape.value_columns};
}

// Joins row 0 of `count` states, whose rows lie `apart`, into row 0 of the first; those of earlier
// keys come first.
void join(const State& to, int64_t count, int64_t apart) {
  if (count == 1) return;
  float maximum = *to.maximum;
  for (int64_t i = 1; i < count; ++i) maximum = std::max(maximum, to.maximum[i * apart]);
  // A row without keys has no maximum to subtract: exp(-inf - 0) is 0 as well.
  const float low = maximum == kMinusInfinity<float> ? 0.0f : maximum;
  float sum = 0.0f;
  float* scales = to.maximum;  // in the maxima's places
  for (int64_t i = 0; i < count; ++i) {
    const float scale = std::exp(to.maximum[i * apart] - low);
    sum += scale * to.sum[i * apart];
    scales[i * apart] = scale;
  }
  for (int64_t d = 0; d < to.columns; d += kLanes<float>) {
    Vec<float> output = {};
    for (int64_t i = 0; i < count; ++i) {
      output += scales[i * apart] * load<float>(to.output + i * apart * to.columns + d);
    }
    store<float>(to.output + d, output);
  }
  *to.maximum = maximum;
  *to.sum = sum;
}

// The memory that threads share if chunks are the pieces.
struct Partials {
  int64_t* first_piece;        // (batch + 1,) of each sequence, and the end
  std::atomic<int32_t>* left;  // (batch, kv_heads) pieces that are not done
  State states;                // (pieces, rows)

  // The sequence of a piece: the last one that begins at or before it.
  int64_t batch_of(int64_t piece, int64_t batch) const {
    return std::upper_bound(first_piece, first_piece + batch, piece) - first_piece - 1;
  }
};

Partials partials_of(const AttentionDecode& args, const Shape& shape, Arena& arena) {
  const bool chunks = shape.blocks == 0;
  return {arena.take<int64_t>(chunks ? args.batch + 1 : 0),
          arena.take<std::atomic<int32_t>>(chunks ? args.batch * args.kv_heads : 0),
          take_state(shape, chunks ? shape.pieces * shape.rows : 0, arena)};
}

// C: the element type of the caches.
template <class M, class C>
struct Scratch {
  typename M::Element* queries;  // (block, query_columns)
  float* scores;                 // (block, kMostChunk)
  const C** rows;                // (2 * kMostChunk + kMostAhead,) keys of the chunk, then values
  float* scales;                 // (2, kMostChunk) of keys, then of values, which hold codes
  State states;  // (2, block) of all chunks so far, where blocks are the pieces, and of one more
};

template <class C>
inline constexpr bool kIsCode = std::is_same_v<C, int8_t>;

template <class M>
int64_t query_columns(const AttentionDecode& args) {
  return round_up(args.head_dim, kLanes<float> * M::kPerCell);
}

template <class M, class C>
Scratch<M, C> scratch_of(const AttentionDecode& args, const Shape& shape, Arena& arena) {
  const int64_t rows = shape.blocks == 0 ? 0 : shape.block;
  return {arena.take<typename M::Element>(shape.block * query_columns<M>(args)),
          arena.take<float>(shape.block * kMostChunk),
          arena.take<const C*>(2 * kMostChunk + kMostAhead),
          arena.take<float>(kIsCode<C> ? 2 * kMostChunk : 0), take_state(shape, 2 * rows, arena)};
}

template <class T, class C>
class Decode {
  using M = MultiplierOf<C>;  // codes are multiplied in float32

 public:
  Decode(const AttentionDecode& args, const Shape& shape, const Partials& partials,
         const Scratch<M, C>& scratch)
      : args_(args),
        shape_(shape),
        p_(partials),
        s_(scratch),
        ahead_(std::clamp<int64_t>(kAheadBytes / (args.head_dim * int64_t{sizeof(C)}), 4,
                                   kMostAhead)) {}

  // A chunk of keys, where shape.blocks is 0.
  void chunk(int64_t index) {
    batch_ = p_.batch_of(index, args_.batch);
    keys_ = cached_keys(args_, batch_);
    const Chunks chunks = chunks_of(args_, keys_);
    const int64_t within = index - p_.first_piece[batch_];
    kv_head_ = within / chunks.count;
    const int64_t chunk = within % chunks.count;
    const int64_t begin = keys_.first + (chunks.first + chunk) * chunks.keys;
    const int64_t end = std::min(begin + chunks.keys, keys_.last);
    // The first and the last chunk also write the new rows that no chunk covers.
    write_new(chunk == 0 ? keys_.old : std::max(keys_.old, begin),
              chunk == chunks.count - 1 ? keys_.last : std::min(keys_.last, end));
    const State state = p_.states.from(index * shape_.rows);
    for (int64_t row = 0; row < shape_.rows; row += shape_.block) {
      attend(begin, end, row, std::min(row + shape_.block, shape_.rows), state.from(row));
    }
    std::atomic<int32_t>& left = p_.left[batch_ * args_.kv_heads + kv_head_];
    if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    const State first = p_.states.from((index - chunk) * shape_.rows);
    for (int64_t row = 0; row < shape_.rows; ++row) {
      join(first.from(row), chunks.count, shape_.rows);
      finish(row, first.from(row));
    }
  }

  // A block of query rows; the new rows are written already.
  void block(int64_t index) {
    const int64_t first = index % shape_.blocks * shape_.block;
    const int64_t last = std::min(first + shape_.block, shape_.rows);
    index /= shape_.blocks;
    kv_head_ = index % args_.kv_heads;
    batch_ = index / args_.kv_heads;
    keys_ = cached_keys(args_, batch_);
    const State all = s_.states, one = s_.states.from(shape_.block);
    std::fill_n(all.maximum, last - first, kMinusInfinity<float>);
    std::fill_n(all.sum, last - first, 0.0f);
    std::fill_n(all.output, (last - first) * all.columns, 0.0f);
    const Chunks chunks = chunks_of(args_, keys_);
    for (int64_t c = 0; c < chunks.count; ++c) {
      const int64_t begin = keys_.first + (chunks.first + c) * chunks.keys;
      const int64_t end = std::min(begin + chunks.keys, keys_.last);
      if (!attend(begin, end, first, last, one)) continue;  // after the diagonal, for one
      for (int64_t row = 0; row < last - first; ++row) join(all.from(row), 2, shape_.block);
    }
    for (int64_t row = first; row < last; ++row) finish(row, all.from(row - first));
  }

  // All new rows of a kv head.
  void write(int64_t index) {
    kv_head_ = index % args_.kv_heads;
    batch_ = index / args_.kv_heads;
    keys_ = cached_keys(args_, batch_);
    write_new(keys_.old, keys_.last);
  }

 private:
  // ---- rotation and new rows -------------------------------------------------------------------

  template <class E = C>
  KeyRows<E> rows_in(const Strided& tensor) const {
    const int64_t cache = args_.cache_batch_idx ? args_.cache_batch_idx[batch_] : batch_;
    return {args_, tensor, cache, kv_head_, 0};
  }

  void write_new(int64_t begin, int64_t end) {
    if (begin >= end) return;
    const KeyRows<C> keys = rows_in(args_.key);
    const KeyRows<C> values = rows_in(args_.value);
    const KeyRows<float> key_scales = rows_in<float>(args_.key_scale);
    const KeyRows<float> value_scales = rows_in<float>(args_.value_scale);
    const Rows<const T> new_keys(args_.new_key, batch_, kv_head_, 0);
    const Rows<const T> new_values(args_.new_value, batch_, kv_head_, 0);
    for (int64_t row = begin; row < end; ++row) {
      const T* key = new_keys(row - keys_.old);
      const T* value = new_values(row - keys_.old);
      if constexpr (kIsCode<C>) {
        T rotated[kMaxHeadDim];
        copy_rotated(key, row, rotated);
        *key_scales(row) = quantise_row(rotated, args_.head_dim, keys(row));
        *value_scales(row) = quantise_row(value, args_.value_dim, values(row));
      } else {
        copy_rotated(key, row, keys(row));
        std::copy_n(value, args_.value_dim, values(row));
      }
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

  // Attention of query rows [first, last) to the keys of [begin, end) that any of them sees.
  // Returns false if there are none.
  bool attend(int64_t begin, int64_t end, int64_t first, int64_t last, const State& state) {
    std::fill_n(state.output, (last - first) * state.columns, 0.0f);
    // Later rows of a head see later keys, so its first and last row bound the range. Rows of
    // several heads may be any queries.
    const bool one_head = first / args_.seq_q == (last - 1) / args_.seq_q;
    const int64_t first_query = one_head ? first % args_.seq_q : 0;
    const int64_t last_query = one_head ? (last - 1) % args_.seq_q : args_.seq_q - 1;
    begin = std::max(begin, cached_keys_of(args_, keys_, first_query).first);
    end = std::min(end, cached_keys_of(args_, keys_, last_query).last);
    const int64_t count = end - begin;
    if (count <= 0) {
      std::fill_n(state.maximum, last - first, kMinusInfinity<float>);
      std::fill_n(state.sum, last - first, 0.0f);
      return false;
    }
    const KeyRows<C> keys = rows_in(args_.key);
    keys.list(begin, count, s_.rows);
    rows_in(args_.value).list(begin, count, s_.rows + count);
    // The next chunk's keys are prefetched too, because a thread takes neighbouring chunks.
    const int64_t after = std::clamp<int64_t>(keys_.last - end, 0, ahead_);
    keys.list(end, after, s_.rows + 2 * count);
    std::fill_n(s_.rows + 2 * count + after, ahead_ - after, s_.rows[2 * count - 1]);
    prefetch_pages(args_.key, s_.rows, count);
    prefetch_pages(args_.value, s_.rows + count, count);
    prefetch_pages(args_.key, s_.rows + 2 * count, ahead_);
    pack_queries(first, last);
    const int64_t columns = query_columns<M>(args_);
    const float scale = static_cast<float>(args_.scale);
    score_rows<M>(s_.queries, columns, last - first, s_.rows, s_.rows + ahead_, count,
                  args_.head_dim, scale, s_.scores);
    if constexpr (kIsCode<C>) {
      const auto list_scales = [&](const Strided& tensor, float* to) {
        rows_in<float>(tensor).for_each(begin, count,
                                        [&](int64_t i, const float* at) { to[i] = *at; });
      };
      list_scales(args_.key_scale, s_.scales);
      list_scales(args_.value_scale, s_.scales + kMostChunk);
    }
    for (int64_t row = first; row < last; ++row) {
      float* scores = s_.scores + (row - first) * kMostChunk;
      if constexpr (kIsCode<C>) multiply_each(scores, s_.scales, count);
      softmax(row, begin, count, scores, state.from(row - first));
      if constexpr (kIsCode<C>) multiply_each(scores, s_.scales + kMostChunk, count);
    }
    for (int64_t j = 0; j < count; j += kSumKeys) {
      const C** values = s_.rows + count + j;
      add_rows(s_.scores + j, last - first, values, values + ahead_, std::min(count - j, kSumKeys),
               args_.value_dim, state.output, state.columns);
    }
    return true;
  }

  // Prefetches a line of each page that holds rows, several pages at a time. A load or a prefetch
  // from a page that is not in the TLB delays all later ones until the page is found. A plain pass
  // over memory has loads of the next page in flight by then; here the arithmetic between loads is
  // too long for that. Always inline: g++ drops calls of a function that only prefetches.
  ONEPASS_INLINE void prefetch_pages(const Strided& tensor, const C* const* rows,
                                     int64_t count) const {
    const int64_t row_bytes = std::abs(tensor.row_stride) * int64_t{sizeof(C)};
    int64_t step = std::max<int64_t>(kPageBytes / std::max<int64_t>(row_bytes, 1), 1);
    if (args_.block_table) step = std::min(step, args_.page_size);
    for (int64_t i = 0; i < count; i += step) __builtin_prefetch(rows[i]);
    __builtin_prefetch(rows[count - 1]);
  }

  // The scores of a row become exp(score - maximum).
  void softmax(int64_t row, int64_t begin, int64_t count, float* scores, const State& state) {
    constexpr int n = kLanes<float>;
    const int64_t whole = round_up(count, n);
    std::fill(scores + count, scores + whole, kMinusInfinity<float>);
    change(row, begin, scores, count, whole);
    Vec<float> highest = broadcast<float>(kMinusInfinity<float>);
    for (int64_t j = 0; j < whole; j += n) {
      const Vec<float> score = load<float>(scores + j);
      highest = score > highest ? score : highest;
    }
    float maximum = kMinusInfinity<float>;
    for (int i = 0; i < n; ++i) maximum = std::max(maximum, highest[i]);
    // Rows that see nothing have no maximum to subtract: exp(-inf - 0) is 0 as well.
    const Vec<float> low = broadcast<float>(maximum == kMinusInfinity<float> ? 0.0f : maximum);
    Vec<float> sum = {};
    for (int64_t j = 0; j < whole; j += n) {
      const Vec<float> p = exp(load<float>(scores + j) - low);
      sum += p;
      store<float>(scores + j, p);
    }
    *state.maximum = maximum;
    *state.sum = sum_of_lanes<float>(sum);
  }

  // Adds the terms to scaled scores; -inf where the row does not see the key.
  void change(int64_t row, int64_t begin, float* scores, int64_t count, int64_t whole) {
    const int64_t query = row % args_.seq_q;
    if (changes_scores(args_)) {
      add_terms(row, begin - (keys_.last - args_.seq_q + query), scores, whole);
      std::fill(scores + count, scores + whole, kMinusInfinity<float>);
    }
    const KeyRange seen = cached_keys_of(args_, keys_, query);
    const int64_t from = std::clamp<int64_t>(seen.first - begin, 0, count);
    const int64_t to = std::clamp<int64_t>(seen.last - begin, from, count);
    std::fill(scores, scores + from, kMinusInfinity<float>);
    std::fill(scores + to, scores + count, kMinusInfinity<float>);
  }

  // Not inline, because g++ makes a loop for each combination of terms.
  [[gnu::noinline]] void add_terms(int64_t row, int64_t first, float* scores, int64_t whole) const {
    constexpr int n = kLanes<float>;
    const ScoreTerms<Vec<float>> terms(args_, batch_, head_of(row));
    Vec<float> ahead;  // relative to the query's position
    for (int i = 0; i < n; ++i) ahead[i] = static_cast<float>(i);
    ahead += static_cast<float>(first);
    for (int64_t j = 0; j < whole; j += n, ahead += static_cast<float>(n)) {
      store<float>(scores + j, terms(load<float>(scores + j), ahead, NoBias{}));
    }
  }

  // ---- all keys --------------------------------------------------------------------------------

  void finish(int64_t row, const State& state) {
    const int64_t head = head_of(row);
    const int64_t query = row % args_.seq_q;
    float maximum = *state.maximum;
    float sum = *state.sum;
    const float scale = join_sink(sink_of<float>(args_, head), maximum, sum);
    args_.lse[(batch_ * args_.heads + head) * args_.seq_q + query] = maximum + std::log(sum);
    const float normalise = sum == 0.0f ? 0.0f : scale / sum;
    T* to = Rows<T>(args_.output, batch_, head, 0)(query);
    for_each_vector<float>(0, args_.value_dim, [&](int64_t d, auto lanes) {
      store<float>(to + d, load<float>(state.output + d) * normalise, lanes);
    });
  }

  const AttentionDecode& args_;
  const Shape& shape_;
  const Partials& p_;
  const Scratch<M, C>& s_;
  const int64_t ahead_;
  int64_t batch_ = 0;  // of the current piece
  int64_t kv_head_ = 0;
  CachedKeys keys_{};
};

// Elements of keys and values.
int64_t elements_read(const AttentionDecode& args, const Shape& shape) {
  int64_t rows = 0;
  for (int64_t b = 0; b < args.batch; ++b) {
    const CachedKeys keys = cached_keys(args, b);
    const Chunks chunks = chunks_of(args, keys);
    rows += std::min(chunks.count * chunks.keys, std::max<int64_t>(keys.last - keys.first, 0));
  }
  return rows * args.kv_heads * (args.head_dim + args.value_dim) *
         std::max<int64_t>(shape.blocks, 1);
}

// Calls f<T, C>() with the element types of a call and of its caches.
template <class F>
void visit_cache(const AttentionDecode& args, F&& f) {
  visit_dtype_up_to_float32(args.dtype, [&]<class T>() {
    holds_codes(args) ? f.template operator()<T, int8_t>() : f.template operator()<T, T>();
  });
}

Plan plan_decode(const AttentionDecode& args, const Machine& machine, Shape& shape) {
  shape = shape_of(args);
  Plan plan{};
  plan.kernel_name = "attention_decode_kernel";
  plan.rows_per_tile = shape.block;
  plan.splits = shape.pieces;
  const int64_t elements = elements_read(args, shape);
  const int64_t bytes = elements * (holds_codes(args) ? 1 : size_of(args.dtype));
  const int64_t work = std::max(bytes / kBytes, elements * shape.block / kMultiplyAdds);
  plan.threads = threads_for(work, shape.pieces, machine);
  visit_cache(args, [&]<class T, class C>() {
    Arena arena(nullptr);
    partials_of(args, shape, arena);
    Arena scratch(nullptr);
    scratch_of<MultiplierOf<C>, C>(args, shape, scratch);
    shape.slots = {arena.used(), scratch.used()};
    plan.workspace_bytes = shape.slots.end(plan.threads);
    plan.reason = kIsCode<C> ? "float32 multiply-adds of codes" : multiplier_text<T>();
  });
  return plan;
}

void count_chunks(const AttentionDecode& args, const Partials& partials) {
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
  partials.first_piece[args.batch] = pieces;
}

template <class T, class C>
void attention_decode_kernel(const AttentionDecode& args, const Plan& plan, const Shape& shape,
                             void* workspace, const Context& context) {
  using M = MultiplierOf<C>;
  using D = Decode<T, C>;
  Arena arena(workspace);
  const Partials partials = partials_of(args, shape, arena);
  if (shape.blocks == 0) count_chunks(args, partials);
  // Calls body with a D that has its own scratch.
  const auto decoding = [&](auto&& body) {
    return [&](int64_t piece, int64_t slot) {
      Arena own(shape.slots.of(workspace, slot));
      const auto scratch = scratch_of<M, C>(args, shape, own);
      D decode(args, shape, partials, scratch);
      body(decode, piece);
    };
  };
  if (shape.blocks == 0) {
    // No thread takes more of a sequence than its share, however short the others are.
    const auto most = [&](int64_t piece) {
      const int64_t* first = partials.first_piece + partials.batch_of(piece, args.batch);
      return (first[1] - first[0]) / plan.threads;
    };
    for_each_run_of_pieces(context, plan.threads, shape.pieces, most,
                           decoding([](D& decode, int64_t piece) { decode.chunk(piece); }));
    return;
  }
  if (args.new_rows > 0) {
    for_each_piece_in_order(context, plan.threads, args.batch * args.kv_heads,
                            decoding([](D& decode, int64_t piece) { decode.write(piece); }));
  }
  for_each_piece_in_order(context, plan.threads, shape.pieces,
                          decoding([](D& decode, int64_t piece) { decode.block(piece); }));
}

void run_decode(const AttentionDecode& args, const Plan& plan, const Shape& shape, void* workspace,
                const Context& context) {
  visit_cache(args, [&]<class T, class C>() {
    attention_decode_kernel<T, C>(args, plan, shape, workspace, context);
  });
}

}  // namespace

Operator<AttentionDecode> attention_decode() {
  return operator_of<AttentionDecode, Shape, plan_decode, run_decode>();
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
