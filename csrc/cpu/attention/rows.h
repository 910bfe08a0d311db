// Products of a few rows with many rows that are not packed: each of these is read once, through
// its own pointer, and converted in registers. Decoding consists of such products: the many rows
// are keys and values in a cache, the few are the queries that share them.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/pack.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// Calls body.template operator()<kRows>(row) for rows in blocks of kMost, and for the rest.
template <int kMost, class Body>
ONEPASS_INLINE void for_each_row_block(int64_t rows, Body&& body) {
  static_assert(kMost <= 6);
  int64_t row = 0;
  for (; row + kMost <= rows; row += kMost) body.template operator()<kMost>(row);
  const auto rest = [&]<int kRows>() {
    if constexpr (kRows < kMost) body.template operator()<kRows>(row);
  };
  switch (rows - row) {
    case 1:
      return rest.template operator()<1>();
    case 2:
      return rest.template operator()<2>();
    case 3:
      return rest.template operator()<3>();
    case 4:
      return rest.template operator()<4>();
    case 5:
      return rest.template operator()<5>();
  }
}

// Stride of rows of scores and weights; as a constant it takes no register.
inline constexpr int64_t kScoreStride = 512;

// ---- scores: lanes along the head's dimensions --------------------------------------------------

// Sums of kScoreRows x kScoreKeys products stay in registers beside the keys and a query, and are
// summed across lanes together. The first rows take fewer keys at a time, so that there is room for
// more of them, and a key is converted once for these.
inline constexpr int kScoreRows = kParts;
inline constexpr int kFirstRows = 4;
inline constexpr int kScoreKeys = 4;
static_assert(kFirstRows % kScoreRows == 0);

template <class M, class T>
ONEPASS_INLINE typename M::Cells whole_cells(const T* row) {
  if constexpr (M::kPerCell == 1) {
    return load<float>(row);
  } else {
    return M::load_cells(row);
  }
}

// The first `count` elements, others zero.
template <class M, class T>
ONEPASS_INLINE typename M::Cells partial_cells(const T* row, int64_t count) {
  if constexpr (M::kPerCell == 1) {
    return load_partial<float>(row, count);
  } else {
    return (typename M::Cells)load_row_cells<M>(row, 0, count);
  }
}

// scalar: scores[r][j] = scale * sum over d of queries[r][d] * keys[j][d]
// queries: rows `query_stride` apart with zeros from `size` up to a whole vector.
// kFirst: the keys come from memory, and the lines of `next` are prefetched meanwhile. They are
// read one after the other, in the order of addresses, because reading several side by side stops
// the hardware's prefetchers. Only if elements are converted, so that arithmetic takes as long as
// reading, do two keys share the loads of a query: on AVX2 that took a tenth off bfloat16 and added
// as much to float32 (the grouped cases of `onepass bench decode`, in a loop over 200 MB of
// caches). With codes of 8 bits four keys do, for one or two rows: two chains of sums are too few
// to hide the latency of an addition. Later rows find the keys in L1, and load them once for all
// rows.
template <class M, int kRows, int kKeys, bool kFirst, class T>
ONEPASS_INLINE void score_tile(const typename M::Element* queries, int64_t query_stride,
                               const T* const* keys, const T* const* next, int64_t size,
                               float scale, float* scores) {
  constexpr int64_t kElements = kLanes<float> * M::kPerCell;
  constexpr bool kConverted = !std::is_same_v<T, typename M::Element>;
  constexpr int kMostAbreast = sizeof(T) == 1 && kRows <= 2 ? 4 : kConverted ? 2 : 1;
  constexpr int kAbreast = kFirst ? std::min(kKeys, kMostAbreast) : kKeys;
  constexpr int kGroups = (kRows + kParts - 1) / kParts;
  Vec<float> sum[kGroups][kParts][kScoreKeys] = {};  // rows that are missing add zeros
#pragma GCC unroll 8
  for (int first = 0; first < kKeys; first += kAbreast) {
    Vec<float> part[kRows][kAbreast] = {};
    const auto step = [&](int64_t d, auto&& load_key, bool is_line) {
      typename M::Cells key[kAbreast];
#pragma GCC unroll 8
      for (int j = 0; j < kAbreast; ++j) key[j] = load_key(keys[first + j] + d);
      if (kFirst && is_line) {
#pragma GCC unroll 8
        for (int j = 0; j < kAbreast; ++j) __builtin_prefetch(next[first + j] + d);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        // The query is the second factor, which an instruction can take from memory.
        typename M::Cells query = M::load_cells(queries + r * query_stride + d);
        if constexpr (kAbreast > 1) keep_in_register(query);
#pragma GCC unroll 8
        for (int j = 0; j < kAbreast; ++j) {
          part[r][j] = M::multiply_add(key[j], query, part[r][j]);
        }
      }
    };
    const auto whole = [](const T* key) { return whole_cells<M>(key); };
    constexpr int64_t kLine = 64 / int64_t{sizeof(T)};
    int64_t d = 0;
    if constexpr (kFirst && kLine > 2 * kElements) {
      for (; d + kLine <= size; d += kLine) {
#pragma GCC unroll 8
        for (int64_t i = 0; i < kLine; i += kElements) step(d + i, whole, i == 0);
      }
    }
    for (; d + kElements <= size; d += kElements) step(d, whole, true);
    if (d < size) {
      step(d, [&](const T* key) { return partial_cells<M>(key, size - d); }, true);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int j = 0; j < kAbreast; ++j) sum[r / kParts][r % kParts][first + j] = part[r][j];
    }
  }
  if constexpr (kKeys == 4) {
#pragma GCC unroll 4
    for (int group = 0; group < kGroups; ++group) {
      float sums[kParts][4];
      const Vec<float> scaled = scale * sums_of_lanes(sum[group]);
      std::memcpy(sums, &scaled, sizeof(sums));
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        const int r = group * kParts + part;
        if (r < kRows) std::memcpy(scores + r * kScoreStride, sums[part], sizeof(sums[part]));
      }
    }
  } else {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int j = 0; j < kKeys; ++j) {
        scores[r * kScoreStride + j] = scale * sum_of_lanes<float>(sum[r / kParts][r % kParts][j]);
      }
    }
  }
}

// All rows of queries with `count` keys; prefetches the rows in `next`, one for each key,
// meanwhile.
template <class M, class T>
[[gnu::noinline]] void score_rows(const typename M::Element* queries, int64_t query_stride,
                                  int64_t rows, const T* const* keys, const T* const* next,
                                  int64_t count, int64_t size, float scale, float* scores) {
  const auto score = [&]<int kKeys>(int64_t j) {
    const auto tile = [&]<int kRows, bool kFirst>(int64_t row) {
      score_tile<M, kRows, kKeys, kFirst>(queries + row * query_stride, query_stride, keys + j,
                                          next + j, size, scale, scores + row * kScoreStride + j);
    };
    int64_t first = 0;
    if (rows >= kFirstRows) {
      tile.template operator()<kFirstRows, true>(0);
      first = kFirstRows;
    }
    for_each_row_block<kScoreRows>(rows - first, [&]<int kRows>(int64_t row) {
      row += first;
      row == 0 ? tile.template operator()<kRows, true>(row)
               : tile.template operator()<kRows, false>(row);
    });
  };
  int64_t j = 0;
  for (; j + kScoreKeys <= count; j += kScoreKeys) score.template operator()<kScoreKeys>(j);
  for (; j < count; ++j) score.template operator()<1>(j);
}

// ---- weighted sums: lanes along the value's dimensions ------------------------------------------

// Rows to be prefetched, line by line in the order in which they lie. By value, for registers.
template <class T>
struct Prefetch {
  const T* const* rows;
  int64_t size;  // of each
  int64_t at;

  template <int64_t kElements>
  ONEPASS_INLINE void lines() {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
    const T* line = *rows + at;
#pragma GCC unroll 8
    for (int64_t d = 0; d < kElements; d += kLine) __builtin_prefetch(line + d);
    at += kElements;
    const bool over = at >= size;
    at = over ? 0 : at;
    rows += over;
  }
};

// scalar: output[r][d] += sum over j of weights[r][j] * values[j][d], from d = column on
template <int kRows, int kVectors, bool kPrefetch, class T, class Count>
ONEPASS_INLINE Prefetch<T> add_tile(const float* weights, const T* const* values, int64_t count,
                                    int64_t column, Count lanes, float* output,
                                    int64_t output_stride, Prefetch<T> prefetch) {
  Vec<float> sum[kRows][kVectors] = {};
  const auto step = [&](int64_t j) {
    const T* from = as_one_address(values[j] + column);
    Vec<float> value[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      Vec<float> loaded = load<float>(from + v * kLanes<float>, lanes);
      keep_in_register(loaded);
      value[v] = loaded;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec<float> weight = broadcast<float>(weights[r * kScoreStride + j]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] = fma<float>(weight, value[v], sum[r][v]);
    }
  };
  // Whole lines are prefetched.
  constexpr int64_t kElements = kVectors * kLanes<float>;
  constexpr int64_t kSteps = std::max<int64_t>(64 / (kElements * int64_t{sizeof(T)}), 1);
  int64_t j = 0;
  for (; j + kSteps <= count; j += kSteps) {
    if constexpr (kPrefetch) prefetch.template lines<kSteps * kElements>();
#pragma GCC unroll 8
    for (int64_t i = 0; i < kSteps; ++i) step(j + i);
  }
  for (; j < count; ++j) {
    if constexpr (kPrefetch) prefetch.template lines<kElements>();
    step(j);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* to = output + r * output_stride + column + v * kLanes<float>;
      store<float>(to, load<float>(to) + sum[r][v]);
    }
  }
  return prefetch;
}

// The same for all rows of weights with `count` values. Output rows have room for whole vectors.
template <class T>
[[gnu::noinline]] void add_rows(const float* weights, int64_t rows, const T* const* values,
                                const T* const* next, int64_t count, int64_t size, float* output,
                                int64_t output_stride) {
  constexpr int64_t n = kLanes<float>;
  // Values are read a strip of columns at a time; whole rows are prefetched.
  Prefetch<T> prefetch{next, size, 0};
  for_each_row_block<kTileRows>(rows, [&]<int kRows>(int64_t row) {
    const auto add = [&]<int kVectors>(int64_t column, auto lanes) {
      const auto tile = [&]<bool kPrefetch>() {
        prefetch = add_tile<kRows, kVectors, kPrefetch>(weights + row * kScoreStride, values, count,
                                                        column, lanes, output + row * output_stride,
                                                        output_stride, prefetch);
      };
      row == 0 ? tile.template operator()<true>() : tile.template operator()<false>();
    };
    // A few rows have too few sums in a tile to hide the latency of an addition.
    constexpr int64_t kVectors = sizeof(T) == 1 && kRows <= 2 ? 4 : kTileVectors;
    int64_t d = 0;
    for (; d + kVectors * n <= size; d += kVectors * n) {
      add.template operator()<kVectors>(d, WholeVector<float>{});
    }
    for_each_vector<float>(
        d, size, [&](int64_t column, auto lanes) { add.template operator()<1>(column, lanes); });
  });
}

// ---- rows of codes of 8 bits
// ---------------------------------------------------------------------

inline constexpr float kMostCode = 127.0f;

// Returns the scale, as ops/attention_decode.h states it.
template <class T>
float quantise_row(const T* from, int64_t size, int8_t* codes) {
  float largest = 0.0f;
  bool is_finite = true;
  for (int64_t d = 0; d < size; ++d) {
    const float magnitude = std::abs(widen(from[d]));
    is_finite = is_finite && std::isfinite(magnitude);
    largest = std::max(largest, magnitude);
  }
  const float scale = is_finite ? largest / kMostCode : std::numeric_limits<float>::quiet_NaN();
  if (!(scale > 0.0f)) {
    std::fill_n(codes, size, int8_t{0});
    return scale;
  }
  for (int64_t d = 0; d < size; ++d) {
    // A subnormal scale may be rounded down by so much that its codes are above the limit.
    const float code = std::nearbyint(widen(from[d]) / scale);
    codes[d] = static_cast<int8_t>(std::clamp(code, -kMostCode, kMostCode));
  }
  return scale;
}

inline void multiply_each(float* numbers, const float* by, int64_t count) {
  for (int64_t j = 0; j < count; ++j) numbers[j] *= by[j];
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
