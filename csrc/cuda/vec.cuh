// Packs of eight elements, by which every kernel on rows reads and writes global memory. A pack of
// a 16-bit type is one 16-byte access, of float32 two, of float64 four.
#pragma once

#include "core/philox.h"
#include "core/visit.h"
#include "cuda/ptx.cuh"

namespace onepass::cuda {

inline constexpr int kPack = 8;

struct alignas(16) Words {
  uint32_t word[4];
};

// The bits of kPack elements of T, as in memory. For 16-bit types they take half the registers of
// the float32 values, so kernels keep them between two passes.
template <class T>
struct Raw {
  Words words[kPack * sizeof(T) / 16];
};

// Called between two passes over a pack. Without it the compiler keeps the widened values as well.
template <class T>
__device__ __forceinline__ void forget(Raw<T>& raw) {
  ONEPASS_UNROLL
  for (Words& words : raw.words) {
    ONEPASS_UNROLL
    for (uint32_t& word : words.word) forget(word);
  }
}

template <class T>
__device__ __forceinline__ Accumulator<T> element(const Raw<T>& raw, int e) {
  if constexpr (sizeof(T) == 8) {
    const Words& words = raw.words[e / 2];
    const uint64_t low = words.word[e % 2 * 2], high = words.word[e % 2 * 2 + 1];
    return std::bit_cast<double>(high << 32 | low);
  } else if constexpr (sizeof(T) == 4) {
    return std::bit_cast<float>(raw.words[e / 4].word[e % 4]);
  } else {
    const uint32_t pair = raw.words[0].word[e / 2];
    if constexpr (__is_same(T, BFloat16)) {
      return std::bit_cast<float>(e % 2 ? pair & 0xffff0000u : pair << 16);
    } else {
      return widen_half(static_cast<uint16_t>(e % 2 ? pair >> 16 : pair));
    }
  }
}

// Sets an element of a pack of zeros.
template <class T>
__device__ __forceinline__ void set_element(Raw<T>& raw, int e, const T& element) {
  if constexpr (sizeof(T) == 8) {
    const uint64_t bits = std::bit_cast<uint64_t>(element);
    raw.words[e / 2].word[e % 2 * 2] = static_cast<uint32_t>(bits);
    raw.words[e / 2].word[e % 2 * 2 + 1] = static_cast<uint32_t>(bits >> 32);
  } else if constexpr (sizeof(T) == 4) {
    raw.words[e / 4].word[e % 4] = std::bit_cast<uint32_t>(element);
  } else {
    raw.words[0].word[e / 2] |= static_cast<uint32_t>(element.bits) << e % 2 * 16;
  }
}

// Rounds once, to nearest even.
template <class T>
__device__ __forceinline__ Raw<T> narrow(const Accumulator<T> (&value)[kPack]) {
  Raw<T> raw{};
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    if constexpr (sizeof(T) >= 4) {
      set_element(raw, e, value[e]);
    } else if (e % 2 == 0) {
      raw.words[0].word[e / 2] = narrow_pair<T>(value[e], value[e + 1]);
    }
  }
  return raw;
}

// The columns of a row that a thread has: packs if kAligned, where cols is a multiple of kPack,
// else single elements. Neighbouring threads of a row touch neighbouring memory. Consecutive packs
// of a row belong to consecutive threads.
template <bool kAligned_>
struct StridedColumns {
  static constexpr bool kAligned = kAligned_;
  int threads;  // that share the row
  int thread;
  int64_t cols;

  // In the type of pack, so that a kernel whose rows are short computes in 32 bits.
  __device__ __forceinline__ auto of(auto pack, int e) const {
    return kAligned ? (pack * threads + thread) * kPack + e : (pack * kPack + e) * threads + thread;
  }
  __device__ __forceinline__ bool has(auto pack, int e) const {
    return of(pack, kAligned ? 0 : e) < cols;
  }
  // Whether any thread has something in this pack.
  __device__ __forceinline__ bool reaches(auto pack) const { return pack * kPack * threads < cols; }
  template <class T>
  __device__ __forceinline__ T* in(T* row, auto pack, int e) const {
    return row + of(pack, e);
  }
};

// The same interface; here the elements of a warp are contiguous, with kPacks packs for each
// thread. A thread's elements lie at constant distances from its first one.
template <bool kAligned_, int kPacks>
struct WarpColumns {
  static constexpr bool kAligned = kAligned_;
  int warp;  // of those that share the row
  int lane;
  int cols;  // few enough to be kept in registers

  // The thread's index is read again, so that objects made before, inside and after a loop keep no
  // common register alive.
  __device__ __forceinline__ WarpColumns(int threads_per_row, int64_t columns)
      : cols(static_cast<int>(columns)) {
    uint32_t index = thread_index();
    forget(index);  // hides that it is not negative: with that the backward spills on sm_80
    const int thread = static_cast<int>(index);
    warp = threads_per_row > kLanes ? thread / kLanes : 0;
    lane = thread % kLanes;
  }

  __device__ __forceinline__ int of(int pack, int e) const {
    return static_cast<int>(first()) + distance(pack, e);
  }
  __device__ __forceinline__ bool has(int pack, int e) const {
    return of(pack, kAligned ? 0 : e) < cols;
  }
  // Whether any thread of the warp has something in this pack.
  __device__ __forceinline__ bool reaches(int pack) const {
    return warp * kWarpElements + pack * kLanes * kPack < cols;
  }
  template <class T>
  __device__ __forceinline__ T* in(T* row, int pack, int e) const {
    if constexpr (!kAligned) return row + first() + distance(pack, e);
    uint32_t column = first() + static_cast<uint32_t>(distance(pack, e));
    forget(column);  // else a loop over rows keeps address + distance of every tensor
    return row + column;
  }
  // The index of an element in shared memory, without bank conflicts.
  __device__ __forceinline__ int slot(int pack, int e) const {
    return warp * kWarpElements + lane + (pack * kPack + e) * kLanes;
  }

 private:
  static constexpr int kWarpElements = kPacks * kPack * kLanes;

  // Unsigned: the upper half of an address then needs no register.
  __device__ __forceinline__ uint32_t first() const {
    return static_cast<uint32_t>(warp * kWarpElements + (kAligned ? lane * kPack : lane));
  }
  static __device__ __forceinline__ int distance(int pack, int e) {
    return kAligned ? pack * kLanes * kPack + e : (pack * kPack + e) * kLanes;
  }
};

// Loads a pack; missing elements are zero.
template <class T, class Columns>
__device__ __forceinline__ Raw<T> load_pack(const T* row, const Columns& columns, auto pack) {
  Raw<T> raw{};
  if constexpr (Columns::kAligned) {
    if (!columns.has(pack, 0)) return raw;
    const Words* source = reinterpret_cast<const Words*>(columns.in(row, pack, 0));
    for (int i = 0; i < static_cast<int>(kPack * sizeof(T) / 16); ++i) {
      raw.words[i] = load_global(source + i);
    }
  } else {
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      if (columns.has(pack, e)) set_element(raw, e, load_global(columns.in(row, pack, e)));
    }
  }
  return raw;
}

template <class T, class Columns>
__device__ __forceinline__ void store_pack(T* row, const Columns& columns, auto pack,
                                           const Raw<T>& raw) {
  if constexpr (Columns::kAligned) {
    if (!columns.has(pack, 0)) return;
    Words* target = reinterpret_cast<Words*>(columns.in(row, pack, 0));
    for (int i = 0; i < static_cast<int>(kPack * sizeof(T) / 16); ++i) {
      store_global(target + i, raw.words[i]);
    }
  } else {
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      if (!columns.has(pack, e)) continue;
      if constexpr (sizeof(T) == 2) {
        const uint32_t pair = raw.words[0].word[e / 2];
        store_global(columns.in(row, pack, e), T{static_cast<uint16_t>(e % 2 ? pair >> 16 : pair)});
      } else {
        store_global(columns.in(row, pack, e), element<T>(raw, e));
      }
    }
  }
}

// All tensors of rows have dtype T.
template <class T>
struct Same {
  using A = Accumulator<T>;
  using Kept = Raw<T>;

  template <class Columns>
  static __device__ __forceinline__ Kept load(const void* base, DType, int64_t offset,
                                              const Columns& columns, auto pack) {
    return load_pack(static_cast<const T*>(base) + offset, columns, pack);
  }
  static __device__ __forceinline__ A value(const Kept& kept, int e) { return element<T>(kept, e); }
  static __device__ __forceinline__ void forget(Kept& kept) { cuda::forget(kept); }
  static __device__ __forceinline__ Kept round(const A (&value)[kPack], DType) {
    return narrow<T>(value);
  }
  template <class Columns>
  static __device__ __forceinline__ void store(void* base, DType, int64_t offset,
                                               const Columns& columns, auto pack,
                                               const Kept& kept) {
    store_pack(static_cast<T*>(base) + offset, columns, pack, kept);
  }
};

// Any mix of float32 and 16-bit types. The dtype is a branch that all threads take alike.
struct Mixed {
  using A = float;
  struct Kept {
    float element[kPack];
  };

  template <class Columns>
  static __device__ __forceinline__ Kept load(const void* base, DType dtype, int64_t offset,
                                              const Columns& columns, auto pack) {
    Kept kept;
    visit_dtype_up_to_float32(dtype, [&]<class T>() {
      const Raw<T> raw = load_pack(static_cast<const T*>(base) + offset, columns, pack);
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) kept.element[e] = cuda::element<T>(raw, e);
    });
    return kept;
  }
  static __device__ __forceinline__ float value(const Kept& kept, int e) { return kept.element[e]; }
  static __device__ __forceinline__ void forget(Kept&) {}  // kept as values
  static __device__ __forceinline__ Kept round(const float (&value)[kPack], DType dtype) {
    Kept kept;
    visit_dtype_up_to_float32(dtype, [&]<class T>() {
      const Raw<T> raw = narrow<T>(value);
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) kept.element[e] = cuda::element<T>(raw, e);
    });
    return kept;
  }
  template <class Columns>
  static __device__ __forceinline__ void store(void* base, DType dtype, int64_t offset,
                                               const Columns& columns, auto pack,
                                               const Kept& kept) {
    visit_dtype_up_to_float32(dtype, [&]<class T>() {
      store_pack(static_cast<T*>(base) + offset, columns, pack, narrow<T>(kept.element));
    });
  }
};

// Loads a pack of weight or bias as values of type A, from any dtype that is accumulated in A.
template <class A, class Columns>
__device__ __forceinline__ void load_values(const void* base, DType dtype, const A& missing,
                                            const Columns& columns, auto pack, A (&value)[kPack]) {
  if (!base) {
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) value[e] = missing;
  } else if constexpr (sizeof(A) == 8) {
    const auto kept = Same<double>::load(base, dtype, 0, columns, pack);
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) value[e] = Same<double>::value(kept, e);
  } else {
    const auto kept = Mixed::load(base, dtype, 0, columns, pack);
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) value[e] = Mixed::value(kept, e);
  }
}

__device__ __forceinline__ Dropout load_dropout(const int64_t* seed, double p) {
  if (!seed) return {};
  const int64_t drawn[2] = {load_global(seed), load_global(seed + 1)};
  return make_dropout(drawn, p);
}

// The elements of a pack that dropout keeps, as bits; the row begins at `first_element`.
template <class Columns>
__device__ __forceinline__ uint32_t keep_bits(const Dropout& dropout, int64_t first_element,
                                              const Columns& columns, auto pack) {
  const auto is_kept = [&](uint32_t word, int half) {
    return static_cast<uint32_t>((word >> half * 16 & 0xffffu) >= dropout.threshold);
  };
  uint32_t kept = 0;
  if constexpr (Columns::kAligned) {
    const auto words =
        dropout_block(dropout, static_cast<uint64_t>(first_element + columns.of(pack, 0)) / 8);
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) kept |= is_kept(words[e / 2], e % 2) << e;
  } else {
    // One after the other: eight generators side by side would need all registers.
    ONEPASS_ROLL
    for (int e = 0; e < kPack; ++e) {
      const uint64_t index = static_cast<uint64_t>(first_element + columns.of(pack, e));
      const auto words = dropout_block(dropout, index / 8);
      const int lane = static_cast<int>(index % 8);
      // Selected by conditions: an array with a computed index would not stay in registers.
      const uint32_t low = lane & 2 ? words[1] : words[0], high = lane & 2 ? words[3] : words[2];
      kept |= is_kept(lane & 4 ? high : low, lane % 2) << e;
    }
  }
  return kept;
}

// value *= scale where kept, else 0.
template <class A>
__device__ __forceinline__ void drop(const Dropout& dropout, uint32_t kept, A (&value)[kPack]) {
  const A scale =
      sizeof(A) == 8 ? A(65536.0 / (65536.0 - dropout.threshold)) : static_cast<A>(dropout.scale);
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) value[e] *= kept >> e & 1 ? scale : A(0);
}

}  // namespace onepass::cuda
