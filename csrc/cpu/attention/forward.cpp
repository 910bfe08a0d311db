// Attention forward: output = drop(softmax(scores)) value, lse = log(sum(exp(scores))), for a block
// of queries at a time that goes over the keys it sees in tiles, so that scores live in L1 and L2
// alone and memory is O(S).
//
// Queries lie in vector lanes: with a tile of keys K, the panel Q^T of a group of queries and the
// running output O^T,
//   S^T = K Q^T;  m' = max(m, S);  P^T = exp(S^T - m');  O^T = O^T exp(m - m') + V^T P^T
// every maximum, sum and rescaling is vertical, and K and V are broadcast directly from memory.
// Only Q and O are transposed, once per block.
//
// Rounding: each tile's sums start at zero and join the running ones afterwards, so that errors
// grow with the number of tiles, not of keys. A query's result depends on its own group of lanes
// and on the grid of tiles: not on its block, on threads, or on the rest of the batch.
#include <cmath>

#include "cpu/attention/attention.h"
#include "cpu/attention/scores.h"
#include "cpu/attention/work.h"
#include "cpu/vec_squares.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

constexpr int kGroup = kTileVectors * kLanes<float>;  // queries whose tile fills the registers
constexpr int64_t kBlock = 128;                       // queries that share the packing of a key
constexpr int64_t kBlockLanes = 256;                  // of all heads that share it

// How a call is divided. Speed may depend on the threads, a result may not.
struct Shape {
  int64_t block;   // queries, a multiple of kGroup
  int64_t blocks;  // of the longest sequence
  int64_t heads;   // of one kv head that a piece of work takes
  int64_t head_chunks;
  int64_t pieces;
  Slots slots;
};

Shape shape_of(const AttentionForward& args, int64_t threads) {
  const int64_t group = args.heads / args.kv_heads;
  Shape shape{};
  shape.block = std::max<int64_t>(std::min(kBlock, round_up(args.seq_q, kGroup)), kGroup);
  shape.heads = std::clamp<int64_t>(kBlockLanes / shape.block, 1, group);
  const auto count = [&] {
    shape.blocks = ceil_div(args.seq_q, shape.block);
    shape.head_chunks = ceil_div(group, shape.heads);
    shape.pieces = args.batch * args.kv_heads * shape.head_chunks * shape.blocks;
  };
  count();
  // Enough pieces for the threads to end together, at the price of packing keys more often.
  while (shape.pieces < 4 * threads && shape.heads > 1) shape.heads = shape.heads / 2, count();
  while (shape.pieces < 4 * threads && shape.block / 2 >= kGroup && shape.block / 2 % kGroup == 0) {
    shape.block /= 2, count();
  }
  return shape;
}

template <class M>
struct Scratch {
  typename M::Element* queries;  // (groups, cells of head_dim, kGroup) panels
  typename M::Element* keys;     // (kTileKeys, head_dim)
  typename M::Element* values;   // (kTileKeys / kPerCell, value_dim) cells
  float* scores;                 // (kTileKeys, kGroup), then P, or cells of P
  float* bias;                   // (kTileKeys, kGroup)
  uint32_t* mask;                // (kTileWords, kGroup) bits
  float* output;                 // (groups, value_dim, kGroup)
  float* maximum;                // (groups, kGroup)
  float* sum;                    // (groups, kGroup)
};

template <class M>
int64_t key_columns(const Attention& args) {
  return round_up(args.head_dim, M::kPerCell);
}

template <class M>
int64_t value_columns(const Attention& args) {
  return M::kPerCell == 1 ? args.value_dim : round_up(args.value_dim, kLanes<float>);
}

template <class M>
Scratch<M> scratch_of(const AttentionForward& args, const Shape& shape, Arena& arena) {
  const int64_t groups = shape.heads * (shape.block / kGroup);
  Scratch<M> s;
  s.queries = arena.take<typename M::Element>(groups * key_columns<M>(args) * kGroup);
  s.keys = arena.take<typename M::Element>(kTileKeys * key_columns<M>(args));
  s.values = arena.take<typename M::Element>(kTileKeys * value_columns<M>(args));
  s.scores = arena.take<float>(kTileKeys * kGroup);
  s.bias = arena.take<float>(args.bias.data ? kTileKeys * kGroup : 0);
  s.mask = arena.take<uint32_t>(is_masked(args) ? kTileWords * kGroup : 0);
  s.output = arena.take<float>(groups * args.value_dim * kGroup);
  s.maximum = arena.take<float>(groups * kGroup);
  s.sum = arena.take<float>(groups * kGroup);
  return s;
}

// A tile of keys, ready for products; null if not prepared yet.
template <class M>
struct Tile {
  const typename M::Element* keys;
  int64_t key_stride;
  const typename M::Element* values;
  int64_t value_step;  // between cells of neighbouring keys
  KeySet zeros;        // keys whose values are taken as zeros
  KeySet looked_at;    // keys whose values have been checked for being finite
  KeySet not_finite;   // keys among these whose values are not
};

// The queries of one head that lie in the lanes of a group.
struct Group {
  int64_t batch;
  int64_t head;
  int64_t query;  // of lane 0
  int64_t count;  // lanes in use
};

template <class T, class M>
class Forward {
 public:
  Forward(const AttentionForward& args, const Shape& shape, const int32_t* batches,
          const Scratch<M>& scratch)
      : args_(args), shape_(shape), batches_(batches), s_(scratch), dropout_(args) {}

  void piece(int64_t index) {
    const int64_t block = shape_.blocks - 1 - index % shape_.blocks;  // causal: longest first
    index /= shape_.blocks;
    const int64_t chunk = index % shape_.head_chunks;
    index /= shape_.head_chunks;
    const int64_t kv_head = index % args_.kv_heads;
    const int64_t batch = batches_[index / args_.kv_heads];

    const int64_t group = args_.heads / args_.kv_heads;
    const int64_t first_head = kv_head * group + chunk * shape_.heads;
    const int64_t heads = std::min(shape_.heads, group - chunk * shape_.heads);
    sequence_ = sequence_of(args_, batch);
    const int64_t first = block * shape_.block;
    const int64_t last = std::min(first + shape_.block, sequence_.queries);
    if (first >= last) return;

    const int64_t per_head = ceil_div(last - first, kGroup);
    const auto for_each_group = [&](auto&& body) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t g = 0; g < per_head; ++g) {
          const int64_t query = first + g * kGroup;
          state_ = h * per_head + g;
          body(Group{batch, first_head + h, query, std::min<int64_t>(kGroup, last - query)});
        }
      }
    };
    for_each_group([&](const Group& group) { begin(group); });
    const SeenKeys seen = seen_keys(args_, sequence_, first, last);
    const KeyRows<const T> keys(args_, args_.key, batch, kv_head, sequence_.first_k);
    const KeyRows<const T> values(args_, args_.value, batch, kv_head, sequence_.first_k);
    for (int64_t k0 = seen.first / kTileKeys * kTileKeys; k0 < seen.last; k0 += kTileKeys) {
      const int64_t begin = std::max(seen.first - k0, int64_t{0});
      const int64_t end = std::min(seen.last - k0, kTileKeys);
      Tile<M> tile{};
      for_each_group([&](const Group& group) {
        const KeySet own = seen_by(group, k0);
        if (own.empty()) return;
        if (tile.keys == nullptr) load_keys(tile, keys, k0, begin, end);
        load_values_for(group, own, tile, values, k0, begin, end);
        attend(group, tile, k0, end);
      });
    }
    for_each_group([&](const Group& group) { finish(group); });
  }

 private:
  // ---- of a group ------------------------------------------------------------------------------

  typename M::Element* queries() const {
    return s_.queries + state_ * key_columns<M>(args_) * kGroup;
  }
  float* output() const { return s_.output + state_ * args_.value_dim * kGroup; }
  float* maximum() const { return s_.maximum + state_ * kGroup; }
  float* sum() const { return s_.sum + state_ * kGroup; }

  void begin(const Group& group) {
    const Rows<const T> rows(args_.query, group.batch, group.head, sequence_.first_q + group.query);
    pack_panel<M>(rows, group.count, args_.head_dim, kGroup, queries());
    std::fill_n(output(), args_.value_dim * kGroup, 0.0f);
    std::fill_n(maximum(), kGroup, kMinusInfinity<float>);
    std::fill_n(sum(), kGroup, 0.0f);
  }

  void finish(const Group& group) {
    float factor[kGroup];
    const int64_t row = lse_row(args_, sequence_, group.batch, group.head, group.query);
    float* lse = static_cast<float*>(args_.lse) + row;
    float* lse_rest = static_cast<float*>(args_.lse_rest) + row;
    const float keep = dropout_.scale<float>();
    const float sink = sink_of<float>(args_, group.head);
    for (int64_t i = 0; i < group.count; ++i) {
      float maximum = this->maximum()[i];
      float sum = this->sum()[i];
      const float numerator = keep * join_sink(sink, maximum, sum);
      const float logarithm = std::log(sum);
      lse[i] = maximum + logarithm;
      lse_rest[i] = sum == 0.0f ? 0.0f : lost_in_sum(maximum, logarithm);
      factor[i] = sum == 0.0f ? 0.0f : numerator / sum;
    }
    std::fill(factor + group.count, factor + kGroup, 0.0f);
    constexpr int n = kLanes<float>;
    const Rows<T> rows(args_.output, group.batch, group.head, sequence_.first_q + group.query);
    for (int64_t first = 0; first < group.count; first += n) {
      const Vec<float> scale = cpu::load<float>(factor + first);
      for (int64_t d = 0; d < args_.value_dim; d += n) {
        const int64_t left = args_.value_dim - d;
        Vec<float> square[n];
        for (int i = 0; i < n; ++i) {
          square[i] = i < left ? cpu::load<float>(output() + (d + i) * kGroup + first) * scale
                               : Vec<float>{};
        }
        transpose(square);
        for (int i = 0; i < n && first + i < group.count; ++i) {
          T* to = rows(first + i) + d;
          left >= n ? store<float>(to, square[i]) : store_partial<float>(to, square[i], left);
        }
      }
    }
  }

  // ---- of a tile -------------------------------------------------------------------------------

  // Keys [begin, end) from k0 on; no query sees those before `begin`. Contiguous rows are read in
  // place; rows with a stride may share cache sets, and a copy pays.
  void load_keys(Tile<M>& tile, const KeyRows<const T>& keys, int64_t k0, int64_t begin,
                 int64_t end) {
    if (std::is_same_v<T, typename M::Element> && keys.stride() == args_.head_dim &&
        args_.head_dim % M::kPerCell == 0) {
      tile.keys = reinterpret_cast<const typename M::Element*>(keys(k0));
      tile.key_stride = args_.head_dim;
    } else {
      tile.key_stride = key_columns<M>(args_);
      pack_rows<M>([&](int64_t i) { return keys(k0 + begin + i); }, end - begin, args_.head_dim,
                   tile.key_stride, s_.keys + begin * tile.key_stride);
      tile.keys = s_.keys;
    }
  }

  // Likewise; those of tile.zeros are zeros.
  void load_values(Tile<M>& tile, const KeyRows<const T>& values, int64_t k0, int64_t begin,
                   int64_t end) {
    if (std::is_same_v<M, Fma> && std::is_same_v<T, float> && values.stride() == args_.value_dim &&
        tile.zeros.empty()) {
      tile.values = reinterpret_cast<const typename M::Element*>(values(k0));
      tile.value_step = args_.value_dim;
    } else {
      const int64_t columns = value_columns<M>(args_);
      const int64_t even = begin / M::kPerCell * M::kPerCell;
      const auto row = [&](int64_t i) {
        const int64_t key = even + i;
        return key < begin || tile.zeros.has(key) ? nullptr : values(k0 + key);
      };
      pack_cells_of_rows<M>(row, end - even, args_.value_dim, columns, s_.values + even * columns);
      tile.values = s_.values;
      tile.value_step = columns * M::kPerCell;
    }
  }

  // Values for a group that sees keys `seen`: the same for all groups, unless some groups must take
  // rows as zeros that others see. They are checked after they have been read in order.
  void load_values_for(const Group& group, const KeySet& seen, Tile<M>& tile,
                       const KeyRows<const T>& values, int64_t k0, int64_t begin, int64_t end) {
    if (tile.values == nullptr) load_values(tile, values, k0, begin, end);
    const SeenKeys range = seen_keys(args_, sequence_, group.query, group.query + group.count);
    const int64_t first = std::max(range.first - k0, begin) / M::kPerCell * M::kPerCell;
    const int64_t last = std::min(round_up(range.last - k0, M::kPerCell), end);
    // Of keys that the group's products go over.
    const KeySet unseen = key_interval(std::max(first, begin), last).without(seen);
    const KeySet unknown = unseen.without(tile.looked_at);
    if (!unknown.empty()) {
      const auto row = [&](int64_t key) { return values(k0 + key); };
      tile.not_finite = tile.not_finite | not_finite(unknown, args_.value_dim, row);
      tile.looked_at = tile.looked_at | unknown;
    }
    const KeySet zeros = unseen & tile.not_finite;
    if (tile.zeros == zeros) return;
    tile.zeros = zeros;
    load_values(tile, values, k0, begin, end);
  }

  // The keys of the tile that the group sees; reads the mask's bits.
  KeySet seen_by(const Group& group, int64_t k0) {
    const SeenKeys seen = seen_keys(args_, sequence_, group.query, group.query + group.count);
    const KeySet near = key_interval(seen.first - k0, seen.last - k0);
    forbids_ = false;
    if (!is_masked(args_) || near.empty()) return near;
    const MaskedKeys keys =
        mask_panel<kGroup>(args_, sequence_, group.batch, group.head, group.query, group.count, k0,
                           std::min(kTileKeys, sequence_.keys - k0), s_.mask);
    forbids_ = keys.forbids;
    return keys.seen;
  }

  void attend(const Group& group, const Tile<M>& tile, int64_t k0, int64_t end) {
    const bool changed = changes_scores(args_) || forbids_;
    const SeenKeys seen = seen_keys(args_, sequence_, group.query, group.query + group.count);
    const int64_t first = std::max(seen.first - k0, int64_t{0});
    const int64_t last = std::min(seen.last - k0, end);
    if (args_.bias.data) {
      load_bias<kGroup>(args_, group.batch, group.head, group.query, group.count, k0 + first,
                        last - first, s_.bias + first * kGroup);
    }
    if (!changed && seen.all_first <= k0 + first && seen.all_last >= k0 + last &&
        group.count > 2 * kLanes<float>) {
      columns<kTileVectors, kPlain>(group, tile, k0, 0, first, last);
      return;
    }
    // Two vectors at a time, each pair with the keys that it sees itself.
    for (int64_t lane = 0; lane < group.count; lane += 2 * kLanes<float>) {
      const int64_t count = std::min<int64_t>(2 * kLanes<float>, group.count - lane);
      const SeenKeys pair =
          seen_keys(args_, sequence_, group.query + lane, group.query + lane + count);
      int64_t begin = std::max(pair.first - k0, int64_t{0});
      const int64_t end_of_pair = std::min(pair.last - k0, end);
      if (begin >= end_of_pair) continue;
      begin = begin / M::kPerCell * M::kPerCell;
      const int64_t up_to = std::min(round_up(end_of_pair, M::kPerCell), end);
      const bool plain = !changed && pair.all_first <= k0 + begin && pair.all_last >= k0 + up_to;
      if (count <= kLanes<float>) {
        columns<1, kGeneral>(group, tile, k0, lane, begin, up_to);
      } else if (plain) {
        columns<2, kPlain>(group, tile, k0, lane, begin, up_to);
      } else if (!changed) {
        columns<2, kRange>(group, tile, k0, lane, begin, up_to);
      } else {
        columns<2, kGeneral>(group, tile, k0, lane, begin, up_to);
      }
    }
  }

  // The terms that may change a score besides its scale.
  enum Kind {
    kPlain,    // nothing
    kRange,    // the diagonal or the window crosses the tile
    kGeneral,  // every term
  };

  // kVectors vectors of lanes from `lane` on attend to keys [first, last) of the tile.
  template <int kVectors, Kind kKind>
  void columns(const Group& group, const Tile<M>& tile, int64_t k0, int64_t lane, int64_t first,
               int64_t last) {
    constexpr int n = kLanes<float>;
    float* scores = s_.scores + lane;  // row j is key j
    const float scale = static_cast<float>(args_.scale);
    multiply_in_chains<M>({.a = tile.keys + first * tile.key_stride,
                           .a_row = tile.key_stride,
                           .a_step = M::kPerCell,
                           .b = queries() + lane * M::kPerCell,
                           .b_step = kGroup * M::kPerCell,
                           .steps = 0,
                           .c = scores + first * kGroup,
                           .c_row = kGroup,
                           .update = Update::kStore,
                           .factor = &scale},
                          args_.head_dim, last - first, kVectors,
                          [](int64_t, int64_t) { return Part{0, kAllSteps, 0, kVectors}; });
    if constexpr (kKind != kPlain) {
      change<kVectors, kKind>(group, k0, lane, first, last);
    }

    float* old_maximum = maximum() + lane;
    Vec<float> highest[kVectors], low[kVectors], total[kVectors];
    for (int v = 0; v < kVectors; ++v) highest[v] = cpu::load<float>(old_maximum + v * n);
    for (int64_t j = first; j < last; ++j) {
      for (int v = 0; v < kVectors; ++v) {
        const Vec<float> score = cpu::load<float>(scores + j * kGroup + v * n);
        highest[v] = score > highest[v] ? score : highest[v];
      }
    }
    float rescale[kVectors * n];
    for (int v = 0; v < kVectors; ++v) {
      // Rows that saw nothing yet have no maximum to subtract: exp(-inf - 0) is 0 as well.
      low[v] = highest[v] == broadcast<float>(kMinusInfinity<float>) ? Vec<float>{} : highest[v];
      store<float>(rescale + v * n, exp(cpu::load<float>(old_maximum + v * n) - low[v]));
      store<float>(old_maximum + v * n, highest[v]);
      total[v] = Vec<float>{};
    }
    const bool drops{dropout_};
    if (M::kPerCell == 1 || drops) {
      for (int64_t j = first; j < last; ++j) {
        for (int v = 0; v < kVectors; ++v) {
          float* at = scores + j * kGroup + v * n;
          const Vec<float> p = exp(cpu::load<float>(at) - low[v]);
          total[v] += p;
          store<float>(at, p);
        }
      }
      if (drops) drop<kVectors>(group, k0, lane, first, last);
    }
    if constexpr (M::kPerCell == 2) {
      // Packs two keys into the cells of one row, in place: over scores that are already consumed.
      for (int64_t j = first; j < last; j += 2) {
        for (int v = 0; v < kVectors; ++v) {
          const float* at = scores + j * kGroup + v * n;
          Vec<float> low_p = cpu::load<float>(at);
          Vec<float> high_p = {};
          if (j + 1 < last) high_p = cpu::load<float>(at + kGroup);
          if (!drops) {
            low_p = exp(low_p - low[v]);
            total[v] += low_p;
            if (j + 1 < last) {
              high_p = exp(high_p - low[v]);
              total[v] += high_p;
            }
          }
          store<float>(scores + j / 2 * kGroup + v * n, (Vec<float>)pairs_of(low_p, high_p));
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      float* sums = sum() + lane + v * n;
      store<float>(sums,
                   fma<float>(cpu::load<float>(sums), cpu::load<float>(rescale + v * n), total[v]));
    }
    const int64_t first_cell = first / M::kPerCell;
    multiply<M>({.a = tile.values + first_cell * tile.value_step,
                 .a_row = M::kPerCell,
                 .a_step = tile.value_step,
                 .b = reinterpret_cast<const typename M::Element*>(scores + first_cell * kGroup),
                 .b_step = kGroup * M::kPerCell,
                 .steps = ceil_div(last, M::kPerCell) - first_cell,
                 .c = output() + lane,
                 .c_row = kGroup,
                 .update = Update::kRescale,
                 .factor = rescale},
                args_.value_dim, kVectors);
  }

  // Scaled scores become those of the softmax: -inf where a query does not see the key.
  template <int kVectors, Kind kKind>
  void change(const Group& group, int64_t k0, int64_t lane, int64_t first, int64_t last) {
    constexpr int n = kLanes<float>;
    const int64_t position = group.query + lane + sequence_.alignment - k0;  // of the first lane
    const ScoreTerms<Vec<float>> terms(args_, group.batch, group.head);
    for (int v = 0; v < kVectors; ++v) {
      const QueriesInLanes queries(args_, position + v * n);
      for (int64_t j = first; j < last; ++j) {
        const int64_t at = j * kGroup + lane + v * n;
        Vec<float> score = cpu::load<float>(s_.scores + at);
        SignedWords seen = queries.see(j);
        if constexpr (kKind == kGeneral) {
          score = terms(score, queries.ahead_of(j), [&] { return cpu::load<float>(s_.bias + at); });
          if (forbids_) {
            seen &= QueriesInLanes::masked(s_.mask + j / 32 * kGroup + lane + v * n, j);
          }
        }
        store<float>(s_.scores + at, seen ? score : broadcast<float>(kMinusInfinity<float>));
      }
    }
  }

  // Sets dropped probabilities to zero; kept ones are scaled at the end. One draw decides eight
  // keys for a vector of queries.
  template <int kVectors>
  void drop(const Group& group, int64_t k0, int64_t lane, int64_t first, int64_t last) {
    constexpr int n = kLanes<float>;
    const int64_t offset = args_.key_offset + k0;
    WordBits lanes;
    for (int i = 0; i < n; ++i) lanes[i] = static_cast<uint32_t>(i);
    for (int64_t block = (offset + first) / 8; block <= (offset + last - 1) / 8; ++block) {
      for (int v = 0; v < kVectors; ++v) {
        const uint32_t query =
            static_cast<uint32_t>(args_.query_offset + group.query + lane + v * n);
        const PhiloxWords words = dropout_.words(group.batch, group.head, lanes + query,
                                                 broadcast_word(static_cast<uint32_t>(block)));
        for (int i = 0; i < 8; ++i) {
          const int64_t j = block * 8 + i - offset;
          if (j < first || j >= last) continue;
          float* at = s_.scores + j * kGroup + lane + v * n;
          // Multiplied rather than selected: NaN shows, as in torch.
          store<float>(at, cpu::load<float>(at) * dropout_.factor(drawn_for(words, i), 1.0f));
        }
      }
    }
  }

  const AttentionForward& args_;
  const Shape& shape_;
  const int32_t* batches_;  // in the order in which they are taken
  const Scratch<M>& s_;
  const ScoreDropout dropout_;
  Sequence sequence_{};
  int64_t state_ = 0;     // index of the current group within the piece
  bool forbids_ = false;  // whether the mask takes a key of the tile from the group
};

Plan plan_forward(const AttentionForward& args, const Machine& machine, Shape& shape) {
  const int64_t work = score_nanoseconds(args, args.head_dim + args.value_dim);
  shape = shape_of(args, threads_for(work, machine.threads, machine));
  Plan plan{};
  plan.kernel_name = "attention_forward_kernel";
  plan.rows_per_tile = shape.block;
  plan.splits = shape.pieces;
  plan.threads = threads_for(work, shape.pieces, machine);
  visit_multiplier(args, [&]<class T, class M>() {
    Arena arena(nullptr);
    arena.take<int32_t>(args.batch);
    Arena scratch(nullptr);
    scratch_of<M>(args, shape, scratch);
    shape.slots = {arena.used(), scratch.used()};
    plan.workspace_bytes = shape.slots.end(plan.threads);
    plan.reason = multiplier_text<T, M>();
  });
  return plan;
}

template <class T, class M>
void attention_forward_kernel(const AttentionForward& args, const Plan& plan, const Shape& shape,
                              void* workspace, const Context& context) {
  Arena arena(workspace);
  int32_t* batches = arena.take<int32_t>(args.batch);
  order_by_work(args, batches);
  for_each_piece_in_order(context, plan.threads, shape.pieces, [&](int64_t piece, int64_t slot) {
    Arena own(shape.slots.of(workspace, slot));
    const auto scratch = scratch_of<M>(args, shape, own);
    Forward<T, M>(args, shape, batches, scratch).piece(piece);
  });
}

void run_forward(const AttentionForward& args, const Plan& plan, const Shape& shape,
                 void* workspace, const Context& context) {
  visit_multiplier(args, [&]<class T, class M>() {
    attention_forward_kernel<T, M>(args, plan, shape, workspace, context);
  });
}

}  // namespace

Operator<AttentionForward> tiled_attention_forward() {
  return operator_of<AttentionForward, Shape, plan_forward, run_forward>();
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
