// The terms of a score, once for all of the CPU's kernels: all that ops/attention.h says of a score
// but its product and the softmax, and the way back. The tiles compute vectors of scores in
// float32, the plain loops one at a time in float64, both through these templates.
//
// A term that the formula gets is added here: to ScoreTerms (its parameters, value and derivative),
// changes_scores, and for a parameter of a head HeadGradients. The scale is none of them: it is the
// factor of a product (multiply.h), which multiplies scores as they leave the registers.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/visit.h"
#include "cpu/attention/work.h"
#include "cpu/elementary.h"
#include "cpu/random.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

inline constexpr int64_t kTileKeys = 128;  // that are attended to at a time, at most
inline constexpr int64_t kTileWords = kTileKeys / 32;

template <class A>
inline constexpr A kMinusInfinity = -std::numeric_limits<A>::infinity();

// ---- of vectors and of numbers ------------------------------------------------------------------

ONEPASS_INLINE Vec<float> absolute(Vec<float> x) { return x < Vec<float>{} ? -x : x; }
ONEPASS_INLINE double absolute(double x) { return std::abs(x); }

ONEPASS_INLINE double tanh(double x) { return std::tanh(x); }

ONEPASS_INLINE Vec<float> one_minus_square(Vec<float> x) {
  return fma<float>(-x, x, broadcast<float>(1.0f));
}
ONEPASS_INLINE double one_minus_square(double x) { return 1.0 - x * x; }

ONEPASS_INLINE double sum_of_scores(Vec<float> x) { return sum_of_lanes<float>(x); }
ONEPASS_INLINE double sum_of_scores(double x) { return x; }

template <class V>
struct ScoreNumber {
  using Type = float;
};
template <>
struct ScoreNumber<double> {
  using Type = double;
};

// ---- the terms ----------------------------------------------------------------------------------

// Whether anything happens to a scaled score that a query sees.
inline bool changes_scores(const Attention& args) {
  return args.softcap != 0 || args.alibi_slopes || args.bias.data;
}

// The derivatives of a score by the terms in ScoreTerms.
template <class V>
struct ScoreDerivative {
  V softcap;   // of the softcapped score by the scaled one
  V distance;  // |position - key|, minus the derivative by the slope
};

// In place of bias(), of an operator that has none.
struct NoBias {};

// Of one (batch, head). V: Vec<float> or double.
template <class V>
class ScoreTerms {
  using A = typename ScoreNumber<V>::Type;

 public:
  ScoreTerms(const Attention& args, int64_t batch, int64_t head)
      : softcap_(static_cast<A>(args.softcap)),
        slope_(args.alibi_slopes ? args.alibi_slopes[batch * args.alibi_batch_stride + head] : A{}),
        has_slope_(args.alibi_slopes != nullptr),
        has_bias_(args.bias.data != nullptr) {}

  // The score of scaled products. ahead: the query's position minus the key's, or the reverse;
  // bias(): the bias of this score, called where there is one.
  template <class Bias>
  ONEPASS_INLINE V operator()(V score, V ahead, Bias bias,
                              ScoreDerivative<V>* derivative = nullptr) const {
    if (softcap_ != A{}) {
      const V capped = tanh(score / softcap_);
      if (derivative) derivative->softcap = one_minus_square(capped);
      score = softcap_ * capped;
    }
    if (has_slope_) {
      const V distance = absolute(ahead);
      if (derivative) derivative->distance = distance;
      score -= slope_ * distance;
    }
    if constexpr (!std::is_same_v<Bias, NoBias>) {
      if (has_bias_) score += bias();
    }
    return score;
  }

  // From the gradient of the score to that of the scaled product. Of a key that is not seen the
  // score may be anything, and so may the derivative.
  template <class Seen>
  ONEPASS_INLINE V of_product(V ds, const ScoreDerivative<V>& derivative, Seen seen) const {
    return softcap_ != A{} ? (seen ? ds * derivative.softcap : V{}) : ds;
  }

 private:
  A softcap_;
  A slope_;
  bool has_slope_;
  bool has_bias_;
};

// The part of a slope's gradient that scores have.
template <class V>
ONEPASS_INLINE double slope_gradient(V ds, const ScoreDerivative<V>& derivative) {
  return -sum_of_scores(ds * derivative.distance);
}

// ---- bias ---------------------------------------------------------------------------------------

// Of keys [key, key + left) of a query, in the first lanes.
ONEPASS_INLINE Vec<float> bias_of_keys(const Attention& args, int64_t batch, int64_t head,
                                       int64_t query, int64_t key, int64_t left) {
  return visit_dtype_up_to_float32(args.bias_dtype, [&]<class B>() -> Vec<float> {
    const B* bias = Rows<const B>(args.bias, batch, head, 0)(query) + key;
    return left >= kLanes<float> ? load<float>(bias) : load_partial<float>(bias, left);
  });
}

// panel: (count, kQueries) bias[key][lane] of keys [key, key + count) and the `queries` from
// `query` on.
template <int kQueries>
void load_bias(const Attention& args, int64_t batch, int64_t head, int64_t query, int64_t queries,
               int64_t key, int64_t count, float* panel) {
  visit_dtype_up_to_float32(args.bias_dtype, [&]<class B>() {
    const Rows<const B> rows(args.bias, batch, head, query);
    if (rows.stride() == 0) {
      float row[kTileKeys];
      pack_rows<Fma>([&](int64_t) { return rows(0) + key; }, 1, count, count, row);
      for (int64_t j = 0; j < count; ++j) std::fill_n(panel + j * kQueries, kQueries, row[j]);
    } else {
      pack_panel<Fma>([&](int64_t i) { return rows(i) + key; }, queries, count, kQueries, panel);
    }
  });
}

// ---- which keys a query sees: the window and the diagonal as an interval, a mask as bits --------

// Keys of a tile: key j is bit j % 64 of word j / 64.
struct KeySet {
  static constexpr int kWords = kTileKeys / 64;
  uint64_t words[kWords];

  bool empty() const {
    uint64_t any = 0;
    for (uint64_t word : words) any |= word;
    return any == 0;
  }
  bool has(int64_t key) const { return (words[key / 64] >> (key % 64) & 1u) != 0; }
  // The bits from `key` on, which must be a multiple of the word's bits.
  template <class Word>
  Word from(int64_t key) const {
    return static_cast<Word>(words[key / 64] >> (key % 64));
  }
  bool operator==(const KeySet&) const = default;
  // f of each pair of words.
  template <class F>
  KeySet with(const KeySet& other, F&& f) const {
    KeySet result;
    for (int w = 0; w < kWords; ++w) result.words[w] = f(words[w], other.words[w]);
    return result;
  }
  KeySet operator|(const KeySet& other) const {
    return with(other, [](uint64_t a, uint64_t b) { return a | b; });
  }
  KeySet operator&(const KeySet& other) const {
    return with(other, [](uint64_t a, uint64_t b) { return a & b; });
  }
  KeySet without(const KeySet& other) const {
    return with(other, [](uint64_t a, uint64_t b) { return a & ~b; });
  }
  // Key j becomes key j + keys, below the number of a tile's.
  KeySet later_by(int64_t keys) const {
    KeySet result{};
    for (int w = static_cast<int>(keys / 64), from = 0; w < kWords; ++w, ++from) {
      result.words[w] = words[from] << (keys % 64);
      if (from > 0 && keys % 64 != 0) result.words[w] |= words[from - 1] >> (64 - keys % 64);
    }
    return result;
  }
};

// The keys [first, last).
inline KeySet key_interval(int64_t first, int64_t last) {
  KeySet keys;
#pragma GCC unroll 2
  for (int w = 0; w < KeySet::kWords; ++w) {
    const int64_t from = std::clamp<int64_t>(first - 64 * w, 0, 64);
    const int64_t to = std::clamp<int64_t>(last - 64 * w, 0, 64);
    keys.words[w] = from < to ? ~uint64_t{0} >> (64 - (to - from)) << from : 0;
  }
  return keys;
}

// The keys that a mask's row allows among the first `count`. Unrolled, so that the words stay in
// registers: written in parts and read as a whole, they would have to wait for memory.
inline KeySet allowed_keys(const uint8_t* row, int64_t count) {
  KeySet keys;
#pragma GCC unroll 2
  for (int w = 0; w < KeySet::kWords; ++w) {
    const auto bits = [&](int64_t first) -> uint64_t {
      return first < count ? bits_of_bytes(row + first, count - first) : 0;
    };
    keys.words[w] = bits(64 * w) | bits(64 * w + 32) << 32;
  }
  return keys;
}

// The keys that the mask allows a query among the `count` keys from `key` on.
inline KeySet allowed_keys(const Attention& args, int64_t batch, int64_t head, int64_t query,
                           int64_t key, int64_t count) {
  if (!args.blocks.data) return allowed_keys(mask_row(args, batch, head, query) + key, count);
  const int32_t* blocks = block_row(args, batch, head, query);
  KeySet keys{};
  for (int64_t done = 0; done < count;) {
    const int32_t block = blocks[(key + done) / args.block_k];
    const int64_t within = (key + done) % args.block_k;
    const int64_t end = std::min(done + args.block_k - within, count);
    if (block == kAllKeys) {
      keys = keys | key_interval(done, end);
    } else if (block != kNoKeys) {
      keys = keys | allowed_keys(tile_row(args, block, query) + within, end - done).later_by(done);
    }
    done = end;
  }
  return keys;
}

// The number that all blocks of these queries and keys have, kNoKeys or kAllKeys; kFirstTile if
// they differ, if one has a tile, or if the mask has no blocks.
inline int32_t common_block(const Attention& args, int64_t batch, int64_t head, int64_t query,
                            int64_t queries, int64_t key, int64_t count) {
  if (!args.blocks.data) return kFirstTile;
  const int64_t first = key / args.block_k;
  const int64_t last = (key + count - 1) / args.block_k;
  const int64_t last_row = (query + queries - 1) / args.block_q;
  const int32_t common = block_row(args, batch, head, query)[first];
  for (int64_t row = query / args.block_q; row <= last_row; ++row) {
    const int32_t* blocks = block_row(args, batch, head, row * args.block_q);
    for (int64_t block = first; block <= last; ++block) {
      if (blocks[block] != common || common >= kFirstTile) return kFirstTile;
    }
  }
  return common;
}

// The effect of a mask on some queries and keys.
struct MaskedKeys {
  KeySet seen;   // keys that any of the queries sees, by the mask and by position
  bool forbids;  // whether the mask takes a key from a query
};

// For `queries` queries from `query` on and the `count` keys from `key` on. each(i, keys) gets the
// keys that the mask allows query i of them; if it forbids none or all, it may not be called.
template <class Each>
MaskedKeys read_mask(const Attention& args, const Sequence& sequence, int64_t batch, int64_t head,
                     int64_t query, int64_t queries, int64_t key, int64_t count, Each&& each) {
  const int32_t common = common_block(args, batch, head, query, queries, key, count);
  if (common == kNoKeys) return {{}, true};
  const SeenKeys all = seen_keys(args, sequence, query, query + queries);
  const KeySet near = key_interval(all.first - key, all.last - key);
  const KeySet every = key_interval(0, count);
  if (common == kAllKeys) return {near & every, false};
  const bool whole = all.all_first <= key && all.all_last >= key + count;
  const bool one_row = !args.blocks.data && args.mask.row_stride == 0;
  KeySet allowed{}, seen{}, forbidden{};
  for (int64_t i = 0; i < queries; ++i) {
    if (i == 0 || !one_row) allowed = allowed_keys(args, batch, head, query + i, key, count);
    each(i, allowed);
    forbidden = forbidden | every.without(allowed);
    if (whole || one_row) {
      seen = seen | allowed;
    } else {
      const KeyRange range = keys_of(args, sequence, query + i);
      seen = seen | (allowed & key_interval(range.first - key, range.last - key));
    }
  }
  return {seen & near, !forbidden.empty()};
}

// The same; panel: (kTileWords, kQueries) the keys that the mask allows each query, key j as bit
// j % 32 of word j / 32. Written where it forbids some.
template <int kQueries>
MaskedKeys mask_panel(const Attention& args, const Sequence& sequence, int64_t batch, int64_t head,
                      int64_t query, int64_t queries, int64_t key, int64_t count, uint32_t* panel) {
  const auto write = [&](int64_t lane, const KeySet& keys) {
    for (int64_t w = 0; w < kTileWords; ++w) {
      panel[w * kQueries + lane] = keys.from<uint32_t>(32 * w);
    }
  };
  const MaskedKeys keys = read_mask(args, sequence, batch, head, query, queries, key, count, write);
  for (int64_t lane = queries; lane < kQueries; ++lane) write(lane, {});
  return keys;
}

// ---- keys that no query sees --------------------------------------------------------------------

// A key that a query does not see has the weight 0, and 0 times infinity or NaN is NaN. So where a
// product sums over keys, the row of a key that none of its queries sees is read as zeros if it is
// not finite; a finite row comes to 0 by itself.

template <class Body>
ONEPASS_INLINE void for_each_key(const KeySet& keys, Body&& body) {
  for (int w = 0; w < KeySet::kWords; ++w) {
    for (uint64_t left = keys.words[w]; left != 0; left &= left - 1) {
      body(64 * w + std::countr_zero(left));
    }
  }
}

// Those of a tile's keys whose rows of `size` elements are not finite. row(j) is where key j's is.
template <class Row>
KeySet not_finite(const KeySet& keys, int64_t size, Row&& row) {
  // x - x is 0 of a number and NaN of the others.
  const auto differences = [&](int64_t key) {
    WordBits any = {};
    const auto* from = row(key);
    for_each_vector<float>(0, size, [&](int64_t d, auto count) {
      const Vec<float> x = load<float>(from + d, count);
      any |= (WordBits)(x - x);
    });
    return any;
  };
  const auto is_any = [](WordBits bits) {
    uint32_t any = 0;
    for (int i = 0; i < kLanes<float>; ++i) any |= bits[i];
    return any != 0;
  };
  KeySet found{};
  WordBits any = {};
  for_each_key(keys, [&](int64_t key) { any |= differences(key); });
  if (!is_any(any)) return found;  // as a rule
  for_each_key(keys, [&](int64_t key) {
    if (is_any(differences(key))) found.words[key / 64] |= uint64_t{1} << (key % 64);
  });
  return found;
}

// A key and as many queries as there are lanes, for the terms.
class QueriesInLanes {
 public:
  // position: of lane 0, minus that of the tile's first key.
  QueriesInLanes(const Attention& args, int64_t position) {
    SignedWords lanes;
    for (int i = 0; i < kLanes<float>; ++i) lanes[i] = i;
    const auto clamped = [](int64_t value) {
      return static_cast<int32_t>(std::clamp<int64_t>(value, -(1 << 30), 1 << 30));
    };
    from_ = lanes + clamped(position - args.window_left);
    to_ = lanes + clamped(position + args.window_right);
    here_ = __builtin_convertvector(lanes, Vec<float>) + static_cast<float>(position);
  }

  ONEPASS_INLINE Vec<float> ahead_of(int64_t key) const { return here_ - static_cast<float>(key); }
  ONEPASS_INLINE SignedWords see(int64_t key) const {
    const int32_t j = static_cast<int32_t>(key);
    return (from_ <= j) & (to_ >= j);
  }
  // words: those of the key and of these lanes in a mask_panel.
  ONEPASS_INLINE static SignedWords masked(const uint32_t* words, int64_t key) {
    return (SignedWords)(*reinterpret_cast<const WordBits*>(words) << (31 - key % 32)) < 0;
  }

 private:
  SignedWords from_;  // keys that they see
  SignedWords to_;
  Vec<float> here_;
};

// A query and a vector of a tile's keys.
class KeysInLanes {
 public:
  explicit KeysInLanes(int64_t first) : first_(first) {
    for (int i = 0; i < kLanes<float>; ++i) keys_[i] = i;
    keys_ += static_cast<int32_t>(first);
  }

  // position: of the query, minus that of the tile's first key.
  ONEPASS_INLINE Vec<float> ahead(float position) const {
    return position - __builtin_convertvector(keys_, Vec<float>);
  }
  // Those of [first, last) that the mask, if there is one, allows.
  ONEPASS_INLINE SignedWords seen(int32_t first, int32_t last, const KeySet* allowed) const {
    SignedWords seen = (keys_ >= first) & (keys_ < last);
    if (allowed) {
      WordBits bit;
      for (int i = 0; i < kLanes<float>; ++i) bit[i] = 1u << (i % 32);
      seen &= (SignedWords)((allowed->from<uint32_t>(first_) & bit) != 0u);
    }
    return seen;
  }

 private:
  int64_t first_;
  SignedWords keys_;
};

// ---- dropout ------------------------------------------------------------------------------------

// Which scores dropout drops. Without dropout the scale is 1, and nothing may be drawn.
class ScoreDropout {
 public:
  explicit ScoreDropout(const Attention& args) : args_(args), drops_(args.seed != nullptr) {
    if (drops_) dropout_ = make_dropout(args.seed, args.dropout_p);
  }

  explicit operator bool() const { return drops_; }

  // The random words of 8 keys, whose number over 8 is `block`, and a query: of one or of a vector
  // of either. Key i of them has 16 bits, below.
  ONEPASS_INLINE std::array<uint32_t, 4> words(int64_t batch, int64_t head, uint32_t query,
                                               uint32_t block) const {
    return philox4x32(
        dropout_.key,
        std::array<uint32_t, 4>{query, block, random_head(args_, batch, head), dropout_.offset});
  }
  ONEPASS_INLINE PhiloxWords words(int64_t batch, int64_t head, WordBits query,
                                   WordBits block) const {
    return philox4x32(dropout_.key, {{query, block, broadcast_word(random_head(args_, batch, head)),
                                      broadcast_word(dropout_.offset)}});
  }

  // A probability's factor, of its 16 drawn bits: 0 or `scale`.
  ONEPASS_INLINE double factor(uint32_t drawn, double scale) const {
    return drawn < dropout_.threshold ? 0.0 : scale;
  }
  ONEPASS_INLINE Vec<float> factor(WordBits drawn, float scale) const {
    return (SignedWords)drawn < static_cast<int32_t>(dropout_.threshold) ? Vec<float>{}
                                                                         : broadcast<float>(scale);
  }

  // The inverse of the probability to be kept; 1 without dropout.
  template <class A>
  A scale() const {
    if (!drops_) return A{1};
    if constexpr (std::is_same_v<A, float>) return dropout_.scale;
    return A{65536} / (A{65536} - dropout_.threshold);
  }

 private:
  const Attention& args_;
  Dropout dropout_{};
  bool drops_;
};

// The bits of key `i` among 8.
ONEPASS_INLINE auto drawn_for(const auto& words, int64_t i) {
  const auto word = words[i / 2];
  return i % 2 ? word >> 16 : word & 0xffffu;
}

// ---- sinks --------------------------------------------------------------------------------------

// -inf without one.
template <class A>
A sink_of(const Attention& args, int64_t head) {
  if (args.sinks == nullptr) return kMinusInfinity<A>;
  return visit_dtype(args.sinks_dtype, [&]<class S>() -> A {
    const S sink = static_cast<const S*>(args.sinks)[head];
    if constexpr (std::is_same_v<S, double>)
      return static_cast<A>(sink);
    else
      return widen(sink);
  });
}

// A sink joins `maximum` and the `sum` of exp(score - maximum), as a key without a value. Returns
// the factor for the sum of values.
inline float join_sink(float sink, float& maximum, float& sum) {
  if (sink == kMinusInfinity<float>) return 1.0f;
  const float larger = std::max(maximum, sink);
  const float scale = std::exp(maximum - larger);
  sum = sum * scale + std::exp(sink - larger);
  maximum = larger;
  return scale;
}

// ---- gradients of slopes and sinks, which each head has -----------------------------------------

struct HeadGradients {
  double slope;
  double sink;
};

// add(batch, head, sums) adds those of a (batch, head) to their total.
template <class Add>
void write_head_gradients(const AttentionBackward& args, Add&& add) {
  for (int64_t head = 0; head < args.heads; ++head) {
    HeadGradients sums{};
    for (int64_t batch = 0; batch < args.batch; ++batch) {
      if (args.alibi_batch_stride != 0) sums.slope = 0.0;
      add(batch, head, sums);
      if (args.dslopes == nullptr) continue;
      args.dslopes[batch * args.alibi_batch_stride + head] = static_cast<float>(sums.slope);
    }
    if (args.dsinks == nullptr) continue;
    visit_dtype(args.sinks_dtype, [&]<class S>() {
      S& dsink = static_cast<S*>(args.dsinks)[head];
      if constexpr (std::is_same_v<S, double>)
        dsink = sums.sink;
      else
        dsink = narrow<S>(static_cast<float>(sums.sink));
    });
  }
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
