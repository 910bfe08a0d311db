// Shared by the kernels of the rotary family: the columns of a thread, and the factors from cos and
// sin for a token's columns.
#pragma once

#include <bit>

#include "cuda/row_sums.cuh"
#include "cuda/vec.cuh"
#include "ops/rotary.h"

namespace onepass::cuda {

inline constexpr int kRotaryThreads = 256;
inline constexpr int64_t kMostHeads = 8;         // of a thread
inline constexpr int64_t kFewThreads = 1 << 17;  // below this number a thread has fewer heads

// The heads of a thread; groups(heads) is the number of groups of that many heads.
template <class Groups>
int64_t heads_of_thread(int64_t threads_of_group, Groups&& groups) {
  int64_t each = kMostHeads;
  while (each > 1 && groups(each) * threads_of_group < kFewThreads) each /= 2;
  return each;
}

// A thread has two runs of kWidth neighbouring columns: two packs if kAligned, else one pair.
template <bool kAligned>
inline constexpr int kWidth = kAligned ? kPack : 1;

template <bool kAligned>
__device__ __forceinline__ StridedColumns<kAligned> neighbours() {
  return {1, 0, kWidth<kAligned>};
}

// The values of kWidth neighbouring elements.
template <class T, bool kAligned>
struct Few {
  Accumulator<T> value[kWidth<kAligned>];

  __device__ __forceinline__ void load(const T* from) {
    const Raw<T> raw = load_pack(from, neighbours<kAligned>(), 0);
    ONEPASS_UNROLL
    for (int e = 0; e < kWidth<kAligned>; ++e) value[e] = element<T>(raw, e);
  }

  __device__ __forceinline__ void store(T* to) const {
    Accumulator<T> pack[kPack] = {};
    ONEPASS_UNROLL
    for (int e = 0; e < kWidth<kAligned>; ++e) pack[e] = value[e];
    store_pack(to, neighbours<kAligned>(), 0, narrow<T>(pack));
  }
};

// Numbers of a pack's four pairs, as stored in a table with one number for each pair.
template <class T>
struct alignas(sizeof(T) == 2 ? 8 : 16) Pairs {
  T number[kPack / 2];
};

// Loads cos or sin of a thread's columns, whose two runs begin at `first` and `second`.
template <class A, bool kInterleaved, bool kAligned>
__device__ __forceinline__ void load_table(const RotaryForward& args, const RotaryTable& table,
                                           int64_t row, int64_t first, int64_t second,
                                           A (&value)[2][kWidth<kAligned>]) {
  constexpr int kWide = kWidth<kAligned>;
  const auto load = [&]<class C>() {
    const C* numbers = static_cast<const C*>(table.data) + row;
    Few<C, kAligned> few;
    if (!args.half_width) {
      few.load(numbers + first);
      ONEPASS_UNROLL
      for (int e = 0; e < kWide; ++e) value[0][e] = few.value[e];
      few.load(numbers + second);
      ONEPASS_UNROLL
      for (int e = 0; e < kWide; ++e) value[1][e] = few.value[e];
    } else if constexpr (kInterleaved && kAligned) {
      const auto load_pairs = [&](int64_t column, A(&to)[kWide]) {
        const Pairs<C> pairs = load_global(reinterpret_cast<const Pairs<C>*>(numbers + column / 2));
        Raw<C> raw{};
        ONEPASS_UNROLL
        for (int e = 0; e < kWide; ++e) set_element(raw, e, pairs.number[e / 2]);
        ONEPASS_UNROLL
        for (int e = 0; e < kWide; ++e) to[e] = element<C>(raw, e);
      };
      load_pairs(first, value[0]);
      load_pairs(second, value[1]);
    } else {
      few.load(numbers + (kInterleaved ? first / 2 : first));
      ONEPASS_UNROLL
      for (int e = 0; e < kWide; ++e) value[0][e] = value[1][e] = few.value[e];
    }
  };
  if constexpr (sizeof(A) == 8) {
    load.template operator()<double>();
  } else {
    visit_dtype_up_to_float32(args.table_dtype, load);
  }
}

// A token's row of the tables, or -1 if its position has no row.
__device__ __forceinline__ int64_t row_of(const RotaryForward& args, int64_t batch, int64_t token) {
  if (!args.positions) return token;
  const int64_t at = batch * args.positions_batch_stride + token * args.positions_stride;
  const int64_t row = args.wide_positions
                          ? load_global(static_cast<const int64_t*>(args.positions) + at)
                          : load_global(static_cast<const int32_t*>(args.positions) + at);
  return row < args.rows ? row : -1;
}

// Whether both columns of a pair are in the same pack.
template <bool kInterleaved, bool kAligned>
inline constexpr bool kInPack = kInterleaved && kAligned;

// The first columns of a thread's two runs of rotated columns. Neighbouring threads have
// neighbouring packs.
struct Halves {
  int64_t first;
  int64_t second;
};
template <bool kInterleaved, bool kAligned>
__device__ __forceinline__ Halves halves_of(const RotaryForward& args, int64_t place) {
  if constexpr (kInterleaved && !kAligned) return {2 * place, 2 * place + 1};
  return {kWidth<kAligned> * place, args.rotary_dim / 2 + kWidth<kAligned> * place};
}

// Factors for the columns of a thread: y[h][e] = x[h][e] * own[h][e] + partner * other[h][e].
template <class A, bool kInterleaved, bool kAligned>
struct Factors {
  static constexpr int kWide = kWidth<kAligned>;
  A own[2][kWide], other[2][kWide];

  // A negative row of the tables gives NaN.
  __device__ __forceinline__ Factors(const RotaryForward& args, int64_t batch, int64_t row,
                                     const Halves& halves) {
    A sine[2][kWide];
    const auto table = [&](const RotaryTable& of, A(&value)[2][kWide]) {
      if (row >= 0) {
        load_table<A, kInterleaved, kAligned>(args, of,
                                              batch * of.batch_stride + row * of.row_stride,
                                              halves.first, halves.second, value);
        return;
      }
      ONEPASS_UNROLL
      for (int e = 0; e < kWide; ++e) {
        value[0][e] = value[1][e] = std::bit_cast<float>(0x7fc00000u);
      }
    };
    table(args.cos, own);
    table(args.sin, sine);
    // For a pair (a, b): other[a] = -sin[a] and other[b] = sin[b]; transposed: sin[b] and -sin[a].
    constexpr bool kNeighbours = kInPack<kInterleaved, kAligned>;
    ONEPASS_UNROLL
    for (int h = 0; h < 2; ++h) {
      ONEPASS_UNROLL
      for (int e = 0; e < kWide; ++e) {
        const bool is_first = kNeighbours ? e % 2 == 0 : h == 0;
        const A partners = kNeighbours ? sine[h][e ^ 1] : sine[1 - h][e];
        const A number = args.transposed ? partners : sine[h][e];
        other[h][e] = is_first == args.transposed ? number : -number;
      }
    }
  }
};

// Whether all packs of all tensors begin at multiples of 16 bytes.
inline bool has_aligned_base(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0;
}
inline bool has_aligned_strides(const HeadStride& stride) {
  return (stride.batch | stride.head | stride.token) % kPack == 0;
}
inline bool is_aligned(const RotaryForward& args) {
  const auto heads = [&](const RotatedHeads& heads) {
    return has_aligned_base(heads.input) && has_aligned_base(heads.output) &&
           has_aligned_base(heads.weight) && has_aligned_strides(heads.input_stride) &&
           has_aligned_strides(heads.output_stride);
  };
  const auto table = [&](const RotaryTable& table) {
    return has_aligned_base(table.data) && (table.batch_stride | table.row_stride) % kPack == 0;
  };
  return args.rotary_dim % (2 * kPack) == 0 && args.head_dim % kPack == 0 && heads(args.query) &&
         heads(args.key) && table(args.cos) && table(args.sin);
}

}  // namespace onepass::cuda
