// Eight elements at a time: how every kernel of rows reads and writes global memory. A pack of a
// 16-bit type is one 16-byte access, of float32 two, of float64 four.
#pragma once

#include "core/philox.h"
#include "core/visit.h"
#include "cuda/ptx.cuh"

namespace onepass::cuda {

inline constexpr int kPack = 8;

struct alignas(16) Words {
  uint32_t word[4];
};

// The bits of kPack elements of T as they lie in memory: half the registers of their float32 values
// where T has 16 bits, so this is what a kernel keeps between two passes.
template <class T>
struct Raw {
  Words words[kPack * sizeof(T) / 16];
};

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

// Rounds once, to nearest even.
template <class T>
__device__ __forceinline__ Raw<T> narrow(const Accumulator<T> (&value)[kPack]) {
  Raw<T> raw;
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    if constexpr (sizeof(T) == 8) {
      const uint64_t bits = std::bit_cast<uint64_t>(value[e]);
      raw.words[e / 2].word[e % 2 * 2] = static_cast<uint32_t>(bits);
      raw.words[e / 2].word[e % 2 * 2 + 1] = static_cast<uint32_t>(bits >> 32);
    } else if constexpr (sizeof(T) == 4) {
      raw.words[e / 4].word[e % 4] = std::bit_cast<uint32_t>(value[e]);
    } else if (e % 2 == 0) {
      raw.words[0].word[e / 2] = narrow_pair<T>(value[e], value[e + 1]);
    }
  }
  return raw;
}

// Which columns of a row a thread has: packs side by side where rows are aligned, else single
// elements side by side, so that neighbouring threads always touch neighbouring memory.
template <bool kAligned>
struct Columns {
  int threads;  // that share the row
  int thread;
  int64_t cols;  // a multiple of kPack if kAligned

  // In the type of pack, so that a kernel whose rows are short computes in 32 bits.
  __device__ __forceinline__ auto of(auto pack, int e) const {
    return kAligned ? (pack * threads + thread) * kPack + e : (pack * kPack + e) * threads + thread;
  }
  __device__ __forceinline__ bool has(auto pack, int e) const {
    return of(pack, kAligned ? 0 : e) < cols;
  }
  // Whether any thread has something in this pack.
  __device__ __forceinline__ bool reaches(auto pack) const { return pack * kPack * threads < cols; }
};

// Elements that are not there are zero.
template <class T, bool kAligned>
__device__ __forceinline__ Raw<T> load_pack(const T* row, const Columns<kAligned>& columns,
                                            auto pack) {
  if constexpr (kAligned) {
    Raw<T> raw{};
    if (columns.has(pack, 0)) {
      const Words* source = reinterpret_cast<const Words*>(row + columns.of(pack, 0));
      for (int i = 0; i < static_cast<int>(kPack * sizeof(T) / 16); ++i) {
        raw.words[i] = load_global(source + i);
      }
    }
    return raw;
  } else {
    Accumulator<T> value[kPack];
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      value[e] = 0;
      if (columns.has(pack, e)) {
        const T one = load_global(row + columns.of(pack, e));
        if constexpr (sizeof(T) == 2) {
          value[e] = widen(one);
        } else {
          value[e] = one;
        }
      }
    }
    return narrow<T>(value);
  }
}

template <class T, bool kAligned>
__device__ __forceinline__ void store_pack(T* row, const Columns<kAligned>& columns, auto pack,
                                           const Raw<T>& raw) {
  if constexpr (kAligned) {
    if (!columns.has(pack, 0)) return;
    Words* target = reinterpret_cast<Words*>(row + columns.of(pack, 0));
    for (int i = 0; i < static_cast<int>(kPack * sizeof(T) / 16); ++i) {
      store_global(target + i, raw.words[i]);
    }
  } else {
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      if (!columns.has(pack, e)) continue;
      if constexpr (sizeof(T) == 2) {
        const uint32_t pair = raw.words[0].word[e / 2];
        store_global(row + columns.of(pack, e),
                     T{static_cast<uint16_t>(e % 2 ? pair >> 16 : pair)});
      } else {
        store_global(row + columns.of(pack, e), element<T>(raw, e));
      }
    }
  }
}

// All tensors of rows have dtype T.
template <class T>
struct Same {
  using A = Accumulator<T>;
  using Kept = Raw<T>;

  template <bool kAligned>
  static __device__ __forceinline__ Kept load(const void* base, DType, int64_t offset,
                                              const Columns<kAligned>& columns, auto pack) {
    return load_pack(static_cast<const T*>(base) + offset, columns, pack);
  }
  static __device__ __forceinline__ A value(const Kept& kept, int e) { return element<T>(kept, e); }
  static __device__ __forceinline__ Kept round(const A (&value)[kPack], DType) {
    return narrow<T>(value);
  }
  template <bool kAligned>
  static __device__ __forceinline__ void store(void* base, DType, int64_t offset,
                                               const Columns<kAligned>& columns, auto pack,
                                               const Kept& kept) {
    store_pack(static_cast<T*>(base) + offset, columns, pack, kept);
  }
};

// Any mix of float32 and the 16-bit types, decided by a branch that is the same for all threads.
struct Mixed {
  using A = float;
  struct Kept {
    float element[kPack];
  };

  template <bool kAligned>
  static __device__ __forceinline__ Kept load(const void* base, DType dtype, int64_t offset,
                                              const Columns<kAligned>& columns, auto pack) {
    Kept kept;
    visit_dtype_up_to_float32(dtype, [&]<class T>() {
      const Raw<T> raw = load_pack(static_cast<const T*>(base) + offset, columns, pack);
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) kept.element[e] = cuda::element<T>(raw, e);
    });
    return kept;
  }
  static __device__ __forceinline__ float value(const Kept& kept, int e) { return kept.element[e]; }
  static __device__ __forceinline__ Kept round(const float (&value)[kPack], DType dtype) {
    Kept kept;
    visit_dtype_up_to_float32(dtype, [&]<class T>() {
      const Raw<T> raw = narrow<T>(value);
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) kept.element[e] = cuda::element<T>(raw, e);
    });
    return kept;
  }
  template <bool kAligned>
  static __device__ __forceinline__ void store(void* base, DType dtype, int64_t offset,
                                               const Columns<kAligned>& columns, auto pack,
                                               const Kept& kept) {
    visit_dtype_up_to_float32(dtype, [&]<class T>() {
      store_pack(static_cast<T*>(base) + offset, columns, pack, narrow<T>(kept.element));
    });
  }
};

// A pack of a tensor of any dtype that is accumulated in A, as values; for weight and bias.
template <class A, bool kAligned>
__device__ __forceinline__ void load_values(const void* base, DType dtype, const A& missing,
                                            const Columns<kAligned>& columns, auto pack,
                                            A (&value)[kPack]) {
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

// Dropout's factors, 0 or the scale, of a pack of the row that begins at `first_element`.
template <class A, bool kAligned>
__device__ __forceinline__ void keep_factors(const Dropout& dropout, int64_t first_element,
                                             const Columns<kAligned>& columns, auto pack,
                                             A (&factor)[kPack]) {
  const A scale =
      sizeof(A) == 8 ? A(65536.0 / (65536.0 - dropout.threshold)) : static_cast<A>(dropout.scale);
  std::array<uint32_t, 4> words{};
  if (kAligned) {
    words = dropout_block(dropout, static_cast<uint64_t>(first_element + columns.of(pack, 0)) / 8);
  }
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    int lane = e;
    if (!kAligned) {
      const uint64_t index = static_cast<uint64_t>(first_element + columns.of(pack, e));
      words = dropout_block(dropout, index / 8);
      lane = static_cast<int>(index % 8);
    }
    // Selected: an array with a computed index would leave the registers.
    const uint32_t low = lane & 2 ? words[1] : words[0], high = lane & 2 ? words[3] : words[2];
    const uint32_t drawn = (lane & 4 ? high : low) >> (lane % 2 * 16) & 0xffffu;
    factor[e] = drawn < dropout.threshold ? A(0) : scale;
  }
}

}  // namespace onepass::cuda
