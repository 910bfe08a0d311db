// The parts of the plain kernels of attention, for any dtype and head dimension: loads of rows into
// slabs in shared memory, and tiles of scores. A Kind defines the products of slabs and which
// thread has which score: plain_products.cuh.
//
// A is the type of sums, float or double; every element is widened to it when it is loaded.
//
// Why float32 uses tensor cores only where torch allows TF32: with each factor split into two TF32
// numbers, three products miss the numerics rule (at head_dim 8; and a weight of 1 does not return
// V exactly). Four products hold it. By peak rates that is 2 times the multiply-adds of the A100
// but a quarter of those of compute capability 8.6, 8.9 and 12.0, and the backward would then need
// the forward's scores bit for bit.
#pragma once

#include "cuda/attention/plain_products.cuh"
#include "cuda/attention/plain_tf32.cuh"
#include "cuda/attention/scores.cuh"

namespace onepass::cuda::plain {

template <class Kind>
inline constexpr int kTileElements = kQueries<typename Kind::Accumulator> * Kind::kFactorStride;

template <class Kind>
using NumbersOf = ScoreNumbers<typename Kind::Accumulator>;

inline constexpr size_t kSharedOfAll = 99 * 1024;  // bytes that a block may use on every device

constexpr int ceil_div(int64_t value, int64_t by) {
  return static_cast<int>((value + by - 1) / by);
}

inline bool is_tf32(const Attention& args) {
  return args.dtype == DType::kFloat32 && args.allow_tf32;
}

// Calls f<Kind>() with the kind of products of the call.
template <class F>
void visit_kind(const Attention& args, F&& f) {
  if (is_tf32(args)) {
    f.template operator()<Tf32>();
  } else if (args.dtype == DType::kFloat64) {
    f.template operator()<MultiplyAdds<double>>();
  } else {
    f.template operator()<MultiplyAdds<float>>();
  }
}

inline const char* reason_of(const Attention& args) {
  return is_tf32(args)                   ? "float32: TF32, as torch allows"
         : args.dtype == DType::kFloat64 ? "float64: multiply-adds"
         : args.dtype == DType::kFloat32 ? "float32: multiply-adds"
                                         : "a head dimension beyond the tiles of tensor cores";
}

// The lowest `count` of 64 bits.
__device__ __forceinline__ uint64_t first_bits(int64_t count) {
  return count <= 0 ? 0 : count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
}

// ---- rows in global memory ----------------------------------------------------------------------

template <class A>
inline constexpr DType kDType = sizeof(A) == 8 ? DType::kFloat64 : DType::kFloat32;

// The rows of one (batch, head), from `first` on.
struct Rows {
  const void* data;
  DType dtype;
  int cols;
  int64_t first;         // element with which row 0 begins; with pages: in a page
  int64_t stride;        // from row to row
  const int32_t* pages;  // null: not paged
  int64_t page_stride;
  int page_size;

  __device__ __forceinline__ int64_t offset(int row) const {
    if (!pages) return first + row * stride;
    const int page = row / page_size;
    return first + load_global(pages + page) * page_stride + (row - page * page_size) * stride;
  }
};

__device__ __forceinline__ Rows rows_of(const Attention& args, const Strided& tensor, int64_t cols,
                                        int64_t batch, int64_t head, int64_t first) {
  return {tensor.data,
          args.dtype,
          static_cast<int>(cols),
          batch * tensor.batch_stride + head * tensor.head_stride + first * tensor.row_stride,
          tensor.row_stride,
          nullptr,
          0,
          0};
}

// Keys and values, whose rows may lie in pages.
__device__ __forceinline__ Rows key_rows_of(const Attention& args, const Strided& tensor,
                                            int64_t cols, int64_t batch, int64_t kv_head,
                                            int64_t first) {
  Rows rows = rows_of(args, tensor, cols, args.block_table ? 0 : batch, kv_head, first);
  if (args.block_table) {
    rows.pages = args.block_table + batch * args.block_table_stride;
    rows.page_stride = tensor.batch_stride;
    rows.page_size = static_cast<int>(args.page_size);
  }
  return rows;
}

// Rounds once, to nearest even, unless A is the dtype already.
template <class A>
__device__ __forceinline__ void store_as(void* base, DType dtype, int64_t i, A value) {
  if (dtype == DType::kFloat64) {
    store_global(static_cast<double*>(base) + i, static_cast<double>(value));
  } else {
    visit_dtype_up_to_float32(dtype, [&]<class T>() {
      store_global(static_cast<T*>(base) + i, narrow<T>(static_cast<float>(value)));
    });
  }
}

template <class A>
__device__ __forceinline__ bool is_aligned(const A* address) {
  return reinterpret_cast<uintptr_t>(address) % 16 == 0;
}

// Loads 16 bytes of a slab; elements from `count` on are zero. The data is there after the thread's
// next cp_async_wait and a barrier.
template <class A>
__device__ __forceinline__ void load_chunk(A* target, const Rows& rows, int64_t offset, int count) {
  const A* const source = static_cast<const A*>(rows.data) + offset;  // if it has A's dtype
  if (count >= kChunk<A> && rows.dtype == kDType<A> && is_aligned(source)) {
    cp_async_16(target, source);
    return;
  }
  ONEPASS_ROLL
  for (int e = 0; e < kChunk<A>; ++e) {
    target[e] = e < count ? load_as<A>(rows.data, rows.dtype, offset + e) : A(0);
  }
}

// Loads kRows x kWidth elements from (row, col) on; rows without a bit in `has` are zero and not
// read.
template <int kRows, int kWidth, int kThreads, class A>
__device__ __forceinline__ void load_slab(A* slab, const Rows& rows, int row, int col,
                                          uint64_t has) {
  constexpr int kChunks = kWidth / kChunk<A>,
                kIterations = (kRows * kChunks + kThreads - 1) / kThreads;
  ONEPASS_ROLL
  for (int iteration = 0; iteration < kIterations; ++iteration) {
    const int index = iteration * kThreads + static_cast<int>(threadIdx.x);
    if (kRows * kChunks % kThreads != 0 && index >= kRows * kChunks) return;
    const int r = index / kChunks, c = col + index % kChunks * kChunk<A>;
    const bool some = (has >> r & 1) && c < rows.cols;
    load_chunk(slab + r * kStride<A, kWidth> + c - col, rows, some ? rows.offset(row + r) + c : 0,
               some ? rows.cols - c : 0);
  }
}

// Stores columns col .. col + 3 of a row, those before `cols`.
template <class A>
__device__ __forceinline__ void store_columns(const Strided& tensor, DType dtype, int64_t offset,
                                              int col, int64_t cols, const A (&value)[4]) {
  A* const target = static_cast<A*>(tensor.data) + offset + col;  // if it has A's dtype
  if (col + 4 <= cols && dtype == kDType<A> && is_aligned(target)) {
    struct alignas(16) Chunk {
      A element[kChunk<A>];
    };
    ONEPASS_UNROLL
    for (int i = 0; i < 4; i += kChunk<A>) {
      Chunk chunk;
      ONEPASS_UNROLL
      for (int e = 0; e < kChunk<A>; ++e) chunk.element[e] = value[i + e];
      store_global(reinterpret_cast<Chunk*>(target + i), chunk);
    }
    return;
  }
  ONEPASS_UNROLL
  for (int e = 0; e < 4; ++e) {
    if (col + e < cols) store_as(tensor.data, dtype, offset + col + e, value[e]);
  }
}

// Stores factor * sums to a thread's columns of a row of results; `first` is the group's first
// column.
template <class Results, class A>
__device__ __forceinline__ void store_row(const Strided& tensor, DType dtype, int64_t offset,
                                          int first, int64_t cols, const A (&sums)[Results::kCols],
                                          A factor) {
  ONEPASS_UNROLL
  for (int c = 0; c < Results::kCols; c += 4) {
    A value[4];
    ONEPASS_UNROLL
    for (int e = 0; e < 4; ++e) value[e] = sums[c + e] * factor;
    store_columns(tensor, dtype, offset, first + Results::col(c), cols, value);
  }
}

// The rounding error of sum = a + b (Knuth's two-sum); 0 for infinities and NaN.
template <class A>
__device__ __forceinline__ A lost_in_sum(A a, A b, A sum) {
  const A taken = sum - a;
  const A lost = (a - (sum - taken)) + (b - taken);
  return lost == lost ? lost : A(0);
}

// ---- slabs in flight ----------------------------------------------------------------------------

// Two stages of kSlabs slabs: while one is used the other is filled, also from one product to the
// next.
template <class A, int kSlabs>
class Ring {
 public:
  static constexpr int kElements = 2 * kSlabs * kSlabElements<A>;

  __device__ __forceinline__ explicit Ring(SharedMemory& shared)
      : stages_(shared.take<A>(kElements)) {}

  // load(stage) starts to fill the first stage.
  template <class Load>
  __device__ __forceinline__ void begin(Load&& load) {
    load(stage());
    cp_async_commit();
  }

  // Calls use(stage, i) for each slab i of a product; slab 0 is in flight already. load(stage, i)
  // starts to fill a stage with slab i, next(stage) with the first slab after the product.
  template <class Load, class Use, class Next>
  __device__ __forceinline__ void run(int count, Load&& load, Use&& use, Next&& next) {
    for (int i = 0; i < count; ++i) {
      cp_async_wait<0>();
      __syncthreads();  // the whole stage is there, and no thread still uses the other one
      A* const full = stage();
      odd_ = !odd_;
      if (i + 1 < count) {
        load(stage(), i + 1);
      } else {
        next(stage());
      }
      cp_async_commit();
      use(full, i);
    }
  }

 private:
  __device__ __forceinline__ A* stage() const {
    return stages_ + (odd_ ? kSlabs * kSlabElements<A> : 0);
  }

  A* stages_;
  bool odd_ = false;
};

// ---- scores -------------------------------------------------------------------------------------

template <class A>
struct Score {
  A value;       // -inf where the query does not see the key
  A derivative;  // of value by scale * product
};

// Scores of a query row of one (batch, head); a row beyond the sequence has none.
template <class A>
class RowScores {
 public:
  __device__ __forceinline__ RowScores(const Attention& args, const ScoreNumbers<A>& numbers,
                                       const Sequence& sequence, int64_t batch, int64_t head,
                                       int64_t query)
      : args_(args), numbers_(numbers), position_(query + sequence.alignment) {
    if (query >= sequence.queries) return;
    if (args.bias.data) {
      bias_ = batch * args.bias.batch_stride + head * args.bias.head_stride +
              query * args.bias.row_stride;
    }
    head_ = load_head_numbers(args, batch, head);
  }

  __device__ __forceinline__ ScorePlace<A> place(int64_t key) const {
    const int64_t distance = position_ - key;
    return {head_, static_cast<A>(distance < 0 ? -distance : distance)};
  }

  // The score of a key that the row sees, from its product with the query.
  __device__ __forceinline__ Score<A> score(A product, int64_t key) const {
    Score<A> score = {product, A(1)};
    apply_terms<ExactTerms>(
        args_, numbers_, [&](auto&& body) { body(score.value, key, score.derivative); },
        [&](int64_t i) { return place(i); });
    if (args_.bias.data) score.value += load_as<A>(args_.bias.data, args_.bias_dtype, bias_ + key);
    return score;
  }

 private:
  const Attention& args_;
  const ScoreNumbers<A>& numbers_;
  int64_t position_;  // of the row, in the numbering of keys
  int64_t bias_ = 0;
  HeadNumbers head_{};
};

// ---- tiles of scores ----------------------------------------------------------------------------

// Facts of a tile that every thread of a block uses, in shared memory because registers are scarce.
struct TileState {
  int first_out;  // the block's first column of the results
  Dropout dropout;
  Sequence sequence;
  int batch;
  int head;
  int kv_head;
  int first_query;
  int rows;  // queries that exist; 0 or less beyond the sequence
  SeenKeys seen;
  int first_key;
  uint64_t keys;  // a bit per key: whether any of the queries sees it
  bool whole;     // each query of the tile sees each key
};

// Scores of kQueries queries and kKeys keys of a (batch, head). A block goes from tile to tile.
template <class Kind, int kThreads>
class Tile {
 public:
  using A = typename Kind::Accumulator;
  using Own = typename Kind::template Scores<kThreads>;
  static constexpr int kRows = Own::kRows;  // per thread
  static constexpr int kCols = Own::kCols;
  static constexpr int kWarps = kThreads / kLanes;
  static constexpr int kSharedWords = 4 * kQueries<A> + 2 * kWarps;
  static constexpr int kSharedBytes = (sizeof(TileState) + 15) / 16 * 16 + kSharedWords * 4;

  __device__ __forceinline__ Tile(const Attention& args, const ScoreNumbers<A>& numbers,
                                  SharedMemory& shared, int out)
      : args_(args),
        numbers_(numbers),
        state_(shared.take<TileState>(1)),
        allowed_(shared.take<uint32_t>(kSharedWords)),
        kept_(allowed_ + 2 * kQueries<A>),
        any_(kept_ + 2 * kQueries<A>) {
    if (threadIdx.x == 0) {
      state_->first_out = out * kOutCols<A>;
      state_->dropout = dropout_of(args);
      state_->batch = -1;
    }
  }

  // Moves to queries first_query .. of a (batch, head).
  __device__ __forceinline__ void go_to(int batch, int head, int first_query) {
    __syncthreads();  // all threads are done with the old place
    if (threadIdx.x == 0) {
      if (state_->batch != batch) {
        state_->sequence = sequence_of(args_, batch);
        state_->batch = batch;
        state_->head = -1;
      }
      if (state_->head != head) {
        state_->head = head;
        state_->kv_head = static_cast<int>(head / (args_.heads / args_.kv_heads));
      }
      state_->first_query = first_query;
      const int64_t rest = state_->sequence.queries - first_query;
      const int rows = rest < kQueries<A> ? static_cast<int>(rest) : kQueries<A>;
      state_->rows = rows;
      state_->seen = {0, 0, 0, 0};
      if (rows > 0) {
        state_->seen = seen_keys(args_, state_->sequence, first_query, int64_t{first_query} + rows);
      }
    }
    __syncthreads();
  }

  // The keys that any query of the tile sees: where their first tile begins, and where they end.
  __device__ __forceinline__ int first_seen() const {
    return has_keys() ? static_cast<int>(state_->seen.first / kKeys * kKeys) : 0;
  }
  __device__ __forceinline__ int last_seen() const {
    return has_keys() ? static_cast<int>(state_->seen.last) : 0;
  }

  // Moves to keys first_key .. and returns true. Returns false if no query sees any of them; scores
  // must not be read then. Every thread must be done with the facts of the last keys.
  __device__ __forceinline__ bool enter(int first_key) {
    const SeenKeys& seen = state_->seen;
    uint64_t keys = first_bits(seen.last - first_key) & ~first_bits(seen.first - first_key);
    if (keys == 0) return false;
    const bool whole = !args_.mask.data && state_->rows == kQueries<A> &&
                       seen.all_first <= first_key && seen.all_last >= first_key + kKeys;
    if (!whole) look(first_key, keys);
    if (keys == 0) return false;
    if (args_.seed) draw(first_key);
    if (threadIdx.x == 0) {
      state_->first_key = first_key;
      state_->keys = keys;
      state_->whole = whole;
    }
    __syncthreads();
    return true;
  }

  __device__ __forceinline__ const TileState* operator->() const { return state_; }

  // Position in the tile of the thread's row r and key c.
  static __device__ __forceinline__ int row(int r) { return Own::row(r); }
  static __device__ __forceinline__ int col(int c) { return Own::col(c); }

  __device__ __forceinline__ bool keeps(int r, int c) const {
    return !args_.seed || bit(kept_, r, c);
  }
  __device__ __forceinline__ A keep_scale() const {
    if constexpr (sizeof(A) == 8) {
      const uint32_t threshold = state_->dropout.threshold;
      return threshold >= 65536u ? 0.0 : 65536.0 / (65536.0 - threshold);
    } else {
      return state_->dropout.scale;
    }
  }

  // A bit per query that exists.
  __device__ __forceinline__ uint64_t queries() const { return first_bits(state_->rows); }
  __device__ __forceinline__ int query(int r) const { return state_->first_query + row(r); }
  __device__ __forceinline__ int key(int c) const { return state_->first_key + col(c); }

  __device__ __forceinline__ RowScores<A> row_scores(int r) const {
    return {args_, numbers_, state_->sequence, state_->batch, state_->head, query(r)};
  }

  // The score of the thread's row r and key c, from their product; -inf if the key is not seen.
  __device__ __forceinline__ Score<A> score(const RowScores<A>& of_row, int r, int c,
                                            A product) const {
    if (!sees(r, c)) return {-static_cast<A>(INFINITY), A(0)};
    return changes_scores(args_) ? of_row.score(product, key(c))
                                 : Score<A>{product * numbers_.scale, A(1)};
  }

  // Turns products into scores. With terms it goes row by row through the thread's elements of
  // `scratch` (kTileElements): code unrolled for all of them would not fit the instruction cache.
  __device__ __forceinline__ void to_scores(A (&score)[kRows][kCols], A* scratch) const {
    if (!changes_scores(args_)) {
      ONEPASS_UNROLL
      for (int i = 0; i < kRows * kCols; ++i) {
        const int r = i / kCols, c = i % kCols;
        const A scaled = score[r][c] * numbers_.scale;
        score[r][c] = sees(r, c) ? scaled : -static_cast<A>(INFINITY);
      }
      return;
    }
    const auto element = [&](int r, int c) -> A& {
      return scratch[row(r) * Kind::kFactorStride + col(c)];
    };
    ONEPASS_UNROLL
    for (int i = 0; i < kRows * kCols; ++i) {
      element(i / kCols, i % kCols) = score[i / kCols][i % kCols];
    }
    ONEPASS_ROLL
    for (int r = 0; r < kRows; ++r) {
      const RowScores<A> of_row = row_scores(r);
      ONEPASS_ROLL
      for (int c = 0; c < kCols; ++c) {
        element(r, c) =
            sees(r, c) ? of_row.score(element(r, c), key(c)).value : -static_cast<A>(INFINITY);
      }
    }
    ONEPASS_UNROLL
    for (int i = 0; i < kRows * kCols; ++i) {
      score[i / kCols][i % kCols] = element(i / kCols, i % kCols);
    }
  }

 private:
  __device__ __forceinline__ bool sees(int r, int c) const {
    return state_->whole || bit(allowed_, r, c);
  }

  // Reads a bit; each row has two words, a bit per key.
  static __device__ __forceinline__ bool bit(const uint32_t* words, int r, int c) {
    return words[2 * row(r) + Own::half(c)] >> Own::in_half(c) & 1;
  }

  __device__ __forceinline__ bool has_keys() const {
    return state_->seen.first < state_->seen.last;
  }

  // Writes which keys each row sees. Clears the bits of `keys` that a mask hides from all rows.
  __device__ __forceinline__ void look(int first_key, uint64_t& keys) {
    const int warp = static_cast<int>(threadIdx.x) / kLanes;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    uint32_t any[2] = {0, 0};
    ONEPASS_ROLL
    for (int r = warp; r < kQueries<A>; r += kWarps) {
      const int query = state_->first_query + r;
      const KeyRange range =
          r < state_->rows ? keys_of(args_, state_->sequence, query) : KeyRange{0, 0};
      ONEPASS_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int key = first_key + half * kLanes + lane;
        bool sees = range.first <= key && key < range.last;
        if (sees && args_.mask.data) {
          sees = load_global(mask_row(args_, state_->batch, state_->head, query) + key) != 0;
        }
        const uint32_t word = __ballot_sync(kAllLanes, sees);
        if (lane == 0) allowed_[2 * r + half] = word;
        any[half] |= word;
      }
    }
    if (!args_.mask.data) return;
    if (lane == 0) any_[2 * warp] = any[0], any_[2 * warp + 1] = any[1];
    __syncthreads();
    uint32_t low = 0, high = 0;
    ONEPASS_ROLL
    for (int w = 0; w < kWarps; ++w) low |= any_[2 * w], high |= any_[2 * w + 1];
    keys = static_cast<uint64_t>(high) << 32 | low;
    __syncthreads();  // the next call may overwrite any_ at once
  }

  // Writes which keys dropout keeps for each row. A thread makes the Philox calls of half a row.
  __device__ __forceinline__ void draw(int first_key) {
    const uint32_t sequence = random_head(args_, state_->batch, state_->head);
    ONEPASS_ROLL
    for (int i = static_cast<int>(threadIdx.x); i < 2 * state_->rows; i += kThreads) {
      const int64_t key = args_.key_offset + first_key + i % 2 * (kKeys / 2);
      const int shift = static_cast<int>(key % kCallKeys);
      uint64_t kept = 0;
      ONEPASS_ROLL
      for (int call = 0; call < (shift ? 5 : 4); ++call) {
        const auto words = dropout_words(state_->dropout, args_, sequence,
                                         state_->first_query + i / 2, key / kCallKeys + call);
        uint32_t eight = 0;
        ONEPASS_UNROLL
        for (int k = 0; k < kCallKeys; ++k) {
          eight |= static_cast<uint32_t>(cuda::keeps(state_->dropout, words, k)) << k;
        }
        kept |= static_cast<uint64_t>(eight) << 8 * call;
      }
      kept_[i] = static_cast<uint32_t>(kept >> shift);
    }
  }

  const Attention& args_;
  const ScoreNumbers<A>& numbers_;
  TileState* state_;
  uint32_t* allowed_;
  uint32_t* kept_;
  uint32_t* any_;  // (warps, 2) bits of keys that any row of a warp sees
};

}  // namespace onepass::cuda::plain
