// The products of a decoding warp: its query rows times kKeys keys, and weights times as many
// values. On tensor cores (TensorTile) and with multiply-adds (PlainTile).
//
// In both, a lane needs the same 16-byte columns of every key's row, and these are read from global
// memory in whole sectors. So each lane copies exactly the pieces that it alone reads later: shared
// memory is a private queue of the lane, and there is no barrier between copies and products, not
// even one of the warp.
#pragma once

#include <cmath>

#include "cuda/attention/decode_rows.cuh"
#include "cuda/attention/fragments.cuh"
#include "cuda/ptx.cuh"
#include "cuda/vec.cuh"

namespace onepass::cuda {

// Bytes of K and V in flight, per block.
inline constexpr int kQueueBytes = 64 * 1024;
inline constexpr int kLanePieces = kLanes * 16;  // bytes: one piece for each lane of a warp

// Loads a piece of an unaligned row, element by element.
template <class T>
__device__ __forceinline__ Words gather_piece(const T* row, int col, int cols) {
  Words words{};
  ONEPASS_UNROLL
  for (int e = 0; e < static_cast<int>(16 / sizeof(T)); ++e) {
    if (col + e >= cols) continue;
    const T element = load_global(row + col + e);
    if constexpr (sizeof(T) == 4) {
      words.word[e] = std::bit_cast<uint32_t>(element);
    } else {
      words.word[e / 2] |= static_cast<uint32_t>(element.bits) << e % 2 * 16;
    }
  }
  return words;
}

// Starts to copy a lane's pieces of a row: kPieces pieces from column `col` on, kStep columns
// apart, to every kQueueStep-th place of the lane. Pieces after the end of the row, and all pieces
// unless `has`, are zero and not read. Pieces that no lane has are skipped.
template <int kPieces, int kStep, int kQueueStep, class T>
__device__ __forceinline__ void load_pieces(Words* queue, const CacheRows<const T>& rows,
                                            const T* row, int col, bool has) {
  if (rows.aligned) {
    ONEPASS_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      if (i * kStep >= rows.cols) continue;
      const int at = i * kStep + col;
      cp_async_16(queue + i * kQueueStep * kLanes, row + at, has && at < rows.cols);
    }
  } else {
    ONEPASS_ROLL
    for (int i = 0; i < kPieces; ++i) {
      if (i * kStep >= rows.cols) continue;
      queue[i * kQueueStep * kLanes] =
          has ? gather_piece(row, i * kStep + col, rows.cols) : Words{};
    }
  }
}

// Of the keys that a warp takes together, those that exist: [first, last).
struct KeysThere {
  int first;
  int last;
  __device__ __forceinline__ bool has(int key) const { return first <= key && key < last; }
};

// The rows of the keys that a warp takes together. If they are in pages, each is looked up by one
// lane.
template <int kKeys, class T>
class IterationRows {
 public:
  __device__ __forceinline__ IterationRows(const CacheRows<const T>& rows, int first,
                                           const KeysThere& there)
      : rows_(rows), there_(there), first_(first), own_offset_(0) {
    const int key = lane_index();
    if (rows.pages && key < kKeys && there.has(key)) own_offset_ = rows.offset(first + key);
  }

  // load_pieces() for a key's row; called by all lanes of the warp together.
  template <int kPieces, int kStep, int kQueueStep>
  __device__ __forceinline__ void load(Words* queue, int key, int col) const {
    int64_t offset = (first_ + key) * rows_.stride;
    if (rows_.pages) offset = __shfl_sync(kAllLanes, own_offset_, key);
    const bool has = there_.has(key);
    load_pieces<kPieces, kStep, kQueueStep>(queue, rows_, rows_.base + (has ? offset : 0), col,
                                            has);
  }

 private:
  const CacheRows<const T>& rows_;
  const KeysThere& there_;
  int first_;
  int64_t own_offset_;
};

// 16 query rows, bfloat16 or float16.
//
// Fragments of mma.m16n8k16, with g = lane / 4 and t = lane % 4. The order of the k of a product is
// free if both factors use the same one. For scores it is chosen so that a lane's two fragments of
// 32 columns are the 16 bytes from column 8 t of the row of key g. The columns of V are ordered so
// that a lane's eight are those from 8 g, of keys 2 t and 2 t + 1 (and 8 further). So no lane
// passes anything to another: two keys are combined from halves of words.
template <class T, int kDims_>
struct TensorTile {
  using Element = T;
  static constexpr int kDims = kDims_;
  static constexpr int kRows = 16;
  static constexpr int kKeys = 16;
  static constexpr int kWarps = 4;
  static constexpr int kOwnRows = 2;          // rows of which a lane has scores
  static constexpr int kOwnScores = 4;        // scores per such row
  static constexpr int kSharing = 4;          // lanes that share the scores of a row,
  static constexpr int kApart = 1;            // and their distance in lanes
  static constexpr int kSlices = kDims / 32;  // of K
  static constexpr int kGroups = kDims / 64;  // of columns of V
  static constexpr int kPieces = kKeys * kDims / 8 / kLanes;  // per lane, of K or of V
  static constexpr int kQueryBytes = kRows * kDims * 2;
  static constexpr int kWeightFloats = 0;               // per warp, in shared memory
  static constexpr int kBlocks = kDims <= 128 ? 3 : 2;  // per multiprocessor, limited by registers
  static constexpr bool kExact = false;

  float sum[kGroups][8][4] = {};

  static __device__ __forceinline__ int own_row(int i) { return lane_index() / 4 + 8 * i; }
  static __device__ __forceinline__ int own_key(int j) {
    return j / 2 * 8 + lane_index() % 4 * 2 + j % 2;
  }

  // Stores eight columns of a query in fragment order: (slice, row / 8, lane), 16 bytes each.
  static __device__ __forceinline__ void put_query(void* queries, int row, int col,
                                                   const T (&elements)[kPack]) {
    const int lane = row % 8 * 4 + col % 32 / 8;
    Words words{};
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      words.word[e / 2] |= static_cast<uint32_t>(elements[e].bits) << e % 2 * 16;
    }
    static_cast<Words*>(queries)[(col / 32 * 2 + row / 8) * kLanes + lane] = words;
  }

  // Pieces (key / 8, slice).
  static __device__ __forceinline__ void load_keys(Words* queue, const CacheRows<const T>& rows,
                                                   int first, const KeysThere& there) {
    const IterationRows<kKeys, T> keys(rows, first, there);
    ONEPASS_UNROLL
    for (int n = 0; n < 2; ++n) {
      keys.template load<kSlices, 32, 1>(queue + n * kSlices * kLanes, 8 * n + lane_index() / 4,
                                         lane_index() % 4 * 8);
    }
  }

  // Pieces (group of columns, which of the lane's four keys).
  static __device__ __forceinline__ void load_values(Words* queue, const CacheRows<const T>& rows,
                                                     int first, const KeysThere& there) {
    const IterationRows<kKeys, T> keys(rows, first, there);
    ONEPASS_UNROLL
    for (int i = 0; i < 4; ++i) {
      keys.template load<kGroups, 64, 4>(queue + i * kLanes, own_key(i), lane_index() / 4 * 8);
    }
  }

  // scalar: product[i][j] = sum over d of query[own_row(i)][d] * key[own_key(j)][d]
  static __device__ __forceinline__ void multiply(float (&product)[kOwnRows][kOwnScores],
                                                  const void* queries, const Words* queue,
                                                  int head_dim, int /*rows*/) {
    const Words* const query = static_cast<const Words*>(queries) + lane_index();
    float scores[2][4] = {};
    ONEPASS_UNROLL
    for (int s = 0; s < kSlices; ++s) {
      if (32 * s >= head_dim) continue;
      const Words top = query[2 * s * kLanes], bottom = query[(2 * s + 1) * kLanes];
      ONEPASS_UNROLL
      for (int n = 0; n < 2; ++n) {
        const Words key = queue[(n * kSlices + s) * kLanes];
        ONEPASS_UNROLL
        for (int k = 0; k < 4; k += 2) {
          mma_m16n8k16<T>(scores[n],
                          {top.word[k], bottom.word[k], top.word[k + 1], bottom.word[k + 1]},
                          {key.word[k], key.word[k + 1]});
        }
      }
    }
    ONEPASS_UNROLL
    for (int i = 0; i < 8; ++i) product[i % 4 / 2][i / 4 * 2 + i % 2] = scores[i / 4][i % 4];
  }

  // scalar: sum[r][d] = shrink[r] * sum[r][d] + sum over keys j of weight[r][j] * value[j][d]
  __device__ __forceinline__ void add(const float (&weight)[kOwnRows][kOwnScores],
                                      const float (&shrink)[kOwnRows], const Words* queue,
                                      int value_dim, int /*rows*/, float* /*weights*/) {
    uint32_t a[4];
    ONEPASS_UNROLL
    for (int i = 0; i < 4; ++i) {
      a[i] = narrow_pair<T>(weight[i % 2][i / 2 * 2], weight[i % 2][i / 2 * 2 + 1]);
    }
    ONEPASS_UNROLL
    for (int n = 0; n < kGroups; ++n) {
      if (64 * n >= value_dim) continue;
      ONEPASS_UNROLL
      for (int i = 0; i < 32; ++i) sum[n][i / 4][i % 4] *= shrink[i % 4 / 2];
      Words value[4];
      ONEPASS_UNROLL
      for (int i = 0; i < 4; ++i) value[i] = queue[(n * 4 + i) * kLanes];
      ONEPASS_UNROLL
      for (int w = 0; w < 4; ++w) {
        const auto low = [&](int i) {
          return (value[i].word[w] & 0xffffu) | value[i + 1].word[w] << 16;
        };
        const auto high = [&](int i) {
          return value[i].word[w] >> 16 | (value[i + 1].word[w] & 0xffff0000u);
        };
        mma_m16n8k16<T>(sum[n][2 * w], a, {low(0), low(2)});
        mma_m16n8k16<T>(sum[n][2 * w + 1], a, {high(0), high(2)});
      }
    }
  }

  // Stores the sums as rows of kDims columns.
  __device__ __forceinline__ void put(Values* rows, int count, int value_dim) const {
    ONEPASS_UNROLL
    for (int n = 0; n < kGroups; ++n) {
      if (64 * n >= value_dim) continue;
      ONEPASS_UNROLL
      for (int i = 0; i < 8; ++i) {  // four columns each
        const int half = i / 4, c = i / 2 % 2, first = i % 2 * 4;
        if (own_row(half) >= count) continue;
        const int col = 64 * n + lane_index() % 4 * 16 + 8 * c + first;
        Values values;
        ONEPASS_UNROLL
        for (int e = 0; e < 4; ++e) values.of[e] = sum[n][first + e][2 * half + c];
        rows[own_row(half) * (kDims / 4) + col / 4] = values;
      }
    }
  }
};

// float32, and 16-bit rows too long for the sums of 16 query rows: as many query rows as fit 64
// registers.
//
// A lane has kElements neighbouring columns of every 32 kElements. For eight keys and four query
// rows it has partial sums of 32 scores; the lanes add these by halves, so that each ends with one
// score (31 exchanges for 32 sums, instead of five for each). The sums of values are split over the
// lanes in the same way, and their weights come back through shared memory.
template <class T, int kDims_>
struct PlainTile {
  using Element = T;
  static constexpr int kDims = kDims_;
  static constexpr int kRows = 2048 / kDims;
  static constexpr int kKeys = 8;
  static constexpr int kWarps = kDims * sizeof(T) == 2048 ? 2 : 4;
  static constexpr int kOwnRows = kRows / 4;
  static constexpr int kOwnScores = 1;
  static constexpr int kSharing = 8;
  static constexpr int kApart = 4;
  static constexpr int kElements = 16 / sizeof(T);
  static constexpr int kSlice = kLanes * kElements;  // columns of one piece of each lane
  static constexpr int kSlices = kDims / kSlice;
  static constexpr int kPieces = kKeys * kSlices;
  static constexpr int kQueryBytes = kRows * kDims * 4;
  static constexpr int kGroupFloats = kLanes + 4;  // weights of four rows, and their shrink factors
  static constexpr int kWeightFloats = kOwnRows * kGroupFloats;
  static constexpr int kBlocks = 2;
  static constexpr bool kExact = true;

  float sum[kRows][kSlices][kElements] = {};

  static __device__ __forceinline__ int own_row(int i) { return 4 * i + lane_index() % 4; }
  static __device__ __forceinline__ int own_key(int) { return lane_index() / 4; }

  static __device__ __forceinline__ float element(const Words& words, int e) {
    if constexpr (sizeof(T) == 4) {
      return std::bit_cast<float>(words.word[e]);
    } else {
      return cuda::element<T>(Raw<T>{{words}}, e);
    }
  }

  // Where widened queries lie: (row, slice, four elements of a lane, lane).
  static __device__ __forceinline__ int query_index(int row, int slice, int quarter, int lane) {
    return ((row * kSlices + slice) * (kElements / 4) + quarter) * kLanes + lane;
  }
  static __device__ __forceinline__ void put_query(void* queries, int row, int col,
                                                   const T (&elements)[kPack]) {
    ONEPASS_UNROLL
    for (int half = 0; half < kPack; half += 4) {
      const int within = (col + half) % kSlice, e = within % kElements;
      Values values;
      ONEPASS_UNROLL
      for (int k = 0; k < 4; ++k) values.of[k] = widen(elements[half + k]);
      static_cast<Values*>(queries)[query_index(row, col / kSlice, e / 4, within / kElements)] =
          values;
    }
  }

  // Pieces (key, slice).
  static __device__ __forceinline__ void load_rows(Words* queue, const CacheRows<const T>& rows,
                                                   int first, const KeysThere& there) {
    const IterationRows<kKeys, T> keys(rows, first, there);
    ONEPASS_UNROLL
    for (int key = 0; key < kKeys; ++key) {
      keys.template load<kSlices, kSlice, 1>(queue + key * kSlices * kLanes, key,
                                             lane_index() * kElements);
    }
  }
  static __device__ __forceinline__ void load_keys(Words* queue, const CacheRows<const T>& rows,
                                                   int first, const KeysThere& there) {
    load_rows(queue, rows, first, there);
  }
  static __device__ __forceinline__ void load_values(Words* queue, const CacheRows<const T>& rows,
                                                     int first, const KeysThere& there) {
    load_rows(queue, rows, first, there);
  }

  static __device__ __forceinline__ void multiply(float (&product)[kOwnRows][kOwnScores],
                                                  const void* queries, const Words* queue,
                                                  int head_dim, int rows) {
    const Values* const query = static_cast<const Values*>(queries);
    ONEPASS_UNROLL
    for (int i = 0; i < kOwnRows; ++i) {
      product[i][0] = 0.0f;
      if (4 * i >= rows) continue;
      float part[kLanes] = {};  // (key, row % 4)
      ONEPASS_UNROLL
      for (int s = 0; s < kSlices; ++s) {
        if (s * kSlice >= head_dim) continue;
        ONEPASS_UNROLL
        for (int quarter = 0; quarter < kElements / 4; ++quarter) {
          Values q[4];
          ONEPASS_UNROLL
          for (int r = 0; r < 4; ++r) {
            q[r] = query[query_index(4 * i + r, s, quarter, lane_index())];
          }
          ONEPASS_UNROLL
          for (int key = 0; key < kKeys; ++key) {
            const Words words = queue[(key * kSlices + s) * kLanes];
            ONEPASS_UNROLL
            for (int e = 0; e < 16; ++e) {
              float& to = part[key * 4 + e % 4];
              to = multiply_add(q[e % 4].of[e / 4], element(words, quarter * 4 + e / 4), to);
            }
          }
        }
      }
      product[i][0] = sum_of_lanes(part);
    }
  }

  // The sum of part[lane] over all lanes. Lanes kHalf apart exchange halves of their parts and add
  // them; then the same with half as many.
  template <int kHalf = kLanes / 2>
  static __device__ __forceinline__ float sum_of_lanes(float (&part)[kLanes]) {
    const bool upper = lane_index() & kHalf;
    ONEPASS_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      const float other = __shfl_xor_sync(kAllLanes, upper ? part[i] : part[i + kHalf], kHalf);
      part[i] = (upper ? part[i + kHalf] : part[i]) + other;
    }
    if constexpr (kHalf > 1) return sum_of_lanes<kHalf / 2>(part);
    return part[0];
  }

  __device__ __forceinline__ void add(const float (&weight)[kOwnRows][kOwnScores],
                                      const float (&shrink)[kOwnRows], const Words* queue,
                                      int value_dim, int rows, float* weights) {
    const auto four = [&](int i, int key) {
      return *reinterpret_cast<const Values*>(weights + i * kGroupFloats + 4 * key);
    };
    ONEPASS_UNROLL
    for (int i = 0; i < kOwnRows; ++i) {
      weights[i * kGroupFloats + lane_index()] = weight[i][0];
      if (lane_index() < 4) weights[i * kGroupFloats + kLanes + lane_index()] = shrink[i];
    }
    __syncwarp();
    ONEPASS_UNROLL
    for (int i = 0; i < kOwnRows; ++i) {
      const Values by = four(i, kKeys);
      ONEPASS_UNROLL
      for (int e = 0; e < 4 * kSlices * kElements; ++e) {
        sum[4 * i + e % 4][e / 4 / kElements][e / 4 % kElements] *= by.of[e % 4];
      }
    }
    ONEPASS_UNROLL
    for (int key = 0; key < kKeys; ++key) {
      Words words[kSlices];
      ONEPASS_UNROLL
      for (int s = 0; s < kSlices; ++s) {
        words[s] = s * kSlice < value_dim ? queue[(key * kSlices + s) * kLanes] : Words{};
      }
      ONEPASS_UNROLL
      for (int i = 0; i < kOwnRows; ++i) {
        if (4 * i >= rows) continue;
        const Values by = four(i, key);
        ONEPASS_UNROLL
        for (int e = 0; e < 4 * kSlices * kElements; ++e) {
          const int s = e / 4 / kElements, column = e / 4 % kElements;
          float& to = sum[4 * i + e % 4][s][column];
          to = multiply_add(by.of[e % 4], element(words[s], column), to);
        }
      }
    }
    __syncwarp();  // before the next iteration overwrites the weights
  }

  __device__ __forceinline__ void put(Values* rows, int count, int value_dim) const {
    ONEPASS_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (r >= count) continue;
      ONEPASS_UNROLL
      for (int i = 0; i < kSlices * kElements / 4; ++i) {
        const int s = i / (kElements / 4), first = i % (kElements / 4) * 4;
        const int col = s * kSlice + lane_index() * kElements + first;
        if (col >= value_dim) continue;
        Values values;
        ONEPASS_UNROLL
        for (int e = 0; e < 4; ++e) values.of[e] = sum[r][s][first + e];
        rows[r * (kDims / 4) + col / 4] = values;
      }
    }
  }
};

// Iterations of a warp whose keys and values fit the queue.
template <class Tile>
inline constexpr int kStages = kQueueBytes / (2 * Tile::kWarps * Tile::kPieces * kLanePieces);

}  // namespace onepass::cuda
