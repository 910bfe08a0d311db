// The thin SIMD layer. This folder is compiled once per CPU level, so a vector is as wide as the
// level's registers and code above this header never names an instruction set.
//
// Arithmetic is the compiler's own on vector types (+, -, *, comparisons); this header adds
// conversion while loading and storing, partial vectors for row tails, fused multiply-add, and
// reductions. The build sets -ffp-contract=off: a multiply-add is fused exactly where
// fma() is written, so a row comes out the same bit for bit in a block of rows and alone.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/dtype.h"

#if defined(__x86_64__)
// g++ 12 warns of the deliberately undefined vectors inside its own AVX-512 intrinsics.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define ONEPASS_INLINE inline __attribute__((always_inline))

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kVectorRegisters = 32;
#else
inline constexpr int kVectorRegisters = 16;
#endif

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

template <class A>
struct VecOf {
  static constexpr int kLanes = kVectorBytes / sizeof(A);
  typedef A type __attribute__((vector_size(kVectorBytes)));
  typedef A unaligned __attribute__((vector_size(kVectorBytes), aligned(alignof(A)), may_alias));
};
template <class A>
using Vec = typename VecOf<A>::type;  // A is float or double
template <class A>
inline constexpr int kLanes = VecOf<A>::kLanes;

typedef uint16_t HalfBits __attribute__((vector_size(kVectorBytes / 2)));
typedef uint16_t HalfBitsUnaligned
    __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));
typedef uint32_t WordBits __attribute__((vector_size(kVectorBytes)));
typedef int32_t SignedWords __attribute__((vector_size(kVectorBytes)));

template <class A>
ONEPASS_INLINE Vec<A> broadcast(A value) {
  return value - Vec<A>{};
}

// Whether fma() rounds once.
#if defined(__FMA__) || defined(__aarch64__)
inline constexpr bool kFusesMultiplyAdd = true;
#else
inline constexpr bool kFusesMultiplyAdd = false;
#endif

template <class A>
ONEPASS_INLINE Vec<A> fma(Vec<A> a, Vec<A> b, Vec<A> c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(A) == 4) {
    return (Vec<A>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  } else {
    return (Vec<A>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
  }
#elif defined(__FMA__)
  if constexpr (sizeof(A) == 4) {
    return (Vec<A>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  } else {
    return (Vec<A>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
  }
#elif defined(__aarch64__)
  if constexpr (sizeof(A) == 4) {
    return (Vec<A>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
  } else {
    return (Vec<A>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
  }
#else
  return a * b + c;
#endif
}

template <class A>
ONEPASS_INLINE Vec<A> square_root(Vec<A> v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(A) == 4) {
    return (Vec<A>)_mm512_sqrt_ps((__m512)v);
  } else {
    return (Vec<A>)_mm512_sqrt_pd((__m512d)v);
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(A) == 4) {
    return (Vec<A>)_mm256_sqrt_ps((__m256)v);
  } else {
    return (Vec<A>)_mm256_sqrt_pd((__m256d)v);
  }
#else
  for (int i = 0; i < kLanes<A>; ++i) v[i] = std::sqrt(v[i]);
  return v;
#endif
}

// x between two bounds, by two instructions: g++ makes a comparison and a blend of each. NaN stays.
ONEPASS_INLINE Vec<float> clamp(Vec<float> x, Vec<float> lower, Vec<float> upper) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_min_ps((__m512)upper, _mm512_max_ps((__m512)lower, (__m512)x));
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_min_ps((__m256)upper, _mm256_max_ps((__m256)lower, (__m256)x));
#else
  x = x < lower ? lower : x;
  return x > upper ? upper : x;
#endif
}

// The larger of two by one instruction; b where either is NaN.
ONEPASS_INLINE Vec<float> larger(Vec<float> a, Vec<float> b) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// The smaller of two by one instruction; b where either is NaN.
ONEPASS_INLINE Vec<float> smaller(Vec<float> a, Vec<float> b) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

// Whether a choice between two vectors by a comparison costs the comparison alone. Elsewhere it is
// up to three instructions more.
#if defined(__AVX512F__)
inline constexpr bool kChoosesByMask = true;
#else
inline constexpr bool kChoosesByMask = false;
#endif

// Keeps a value in a register: otherwise g++ loads it again for every use, and loads limit the
// products of tiles.
template <class V>
ONEPASS_INLINE void keep_in_register(V& value) {
#if defined(__AVX512F__)
  asm("" : "+v"(value));
#elif defined(__x86_64__)
  asm("" : "+x"(value));
#else
  asm("" : "+w"(value));
#endif
}

// Keeps a value in memory: otherwise g++ keeps all of it in registers, and spills them.
template <class V>
ONEPASS_INLINE void keep_in_memory(V& value) {
  asm("" : "+m"(value));
}

// Keeps an address as one number: otherwise g++ uses a register for every constant offset.
template <class T>
ONEPASS_INLINE const T* as_one_address(const T* address) {
  asm("" : "+r"(address));
  return address;
}

// v * 2^n for whole n. Results too small for normal numbers are right where kScalesToSubnormals;
// elsewhere n must be at least -126, and a result as small is 0 or not, as the product comes out.
#if defined(__AVX512F__)
inline constexpr bool kScalesToSubnormals = true;
#else
inline constexpr bool kScalesToSubnormals = false;
#endif
ONEPASS_INLINE Vec<float> scale_by_power_of_two(Vec<float> v, Vec<float> n) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_scalef_ps((__m512)v, (__m512)n);
#else
  return v * (Vec<float>)((__builtin_convertvector(n, SignedWords) + 127) << 23);
#endif
}

// Eight numbers in a register, looked up by the low three bits of each lane's index.
class EightNumbers {
 public:
  ONEPASS_INLINE explicit EightNumbers(const float (&numbers)[8]) {
    for (int i = 0; i < kSlots; ++i) numbers_[i] = numbers[i % 8];
  }

  ONEPASS_INLINE Vec<float> operator[](WordBits index) const {
#if defined(__AVX512F__)
    return (Vec<float>)_mm512_permutexvar_ps((__m512i)index, (__m512)numbers_);
#elif defined(__AVX2__)
    return (Vec<float>)_mm256_permutevar8x32_ps((__m256)numbers_, (__m256i)index);
#else
    Vec<float> found;
    for (int i = 0; i < kLanes<float>; ++i) found[i] = numbers_[index[i] % 8];
    return found;
#endif
  }

 private:
  static constexpr int kSlots = kLanes<float> > 8 ? kLanes<float> : 8;
  float numbers_ __attribute__((vector_size(kSlots * sizeof(float))));
};

// Lanes 2i and 2i + 1 exchanged.
template <class A>
ONEPASS_INLINE Vec<A> swap_neighbours(Vec<A> v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(A) == 4) {
    return (Vec<A>)_mm512_permute_ps((__m512)v, 0xb1);
  } else {
    return (Vec<A>)_mm512_permute_pd((__m512d)v, 0x55);
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(A) == 4) {
    return (Vec<A>)_mm256_permute_ps((__m256)v, 0xb1);
  } else {
    return (Vec<A>)_mm256_permute_pd((__m256d)v, 0x5);
  }
#else
  Vec<A> swapped;
  for (int i = 0; i < kLanes<A>; ++i) swapped[i] = v[i ^ 1];
  return swapped;
#endif
}

// Sum of the lanes by halving: lane i + lane i + half, and so on. A fixed tree.
template <class A>
ONEPASS_INLINE A sum_of_lanes(Vec<A> v) {
#if defined(__AVX2__)
  if constexpr (sizeof(A) == 4) {
#if defined(__AVX512F__)
    const __m256 half =
        _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
    const __m256 half = (__m256)v;
#endif
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
#endif
  A lane[kLanes<A>];
  std::memcpy(lane, &v, sizeof(v));
  for (int width = kLanes<A> / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  }
  return lane[0];
}

// The 128-bit parts of a vector of float32.
inline constexpr int kParts = kVectorBytes / 16;

// ---- conversion of one vector of 16-bit elements ------------------------------------------------

// Zero-extended. (g++ 12 makes four instructions of the conversion that AVX2 has one for.)
ONEPASS_INLINE WordBits widen_bits(HalfBits bits) {
#if defined(__AVX512F__)
  return (WordBits)_mm512_cvtepu16_epi32((__m256i)bits);
#elif defined(__AVX2__)
  return (WordBits)_mm256_cvtepu16_epi32((__m128i)bits);
#else
  return __builtin_convertvector(bits, WordBits);
#endif
}

// Sign-extended.
ONEPASS_INLINE WordBits widen_signed_bits(HalfBits bits) {
#if defined(__AVX512F__)
  return (WordBits)_mm512_cvtepi16_epi32((__m256i)bits);
#elif defined(__AVX2__)
  return (WordBits)_mm256_cvtepi16_epi32((__m128i)bits);
#else
  return (widen_bits(bits) ^ 0x8000u) - 0x8000u;
#endif
}

// The low halves, of words below 65536 (AVX2 would saturate others).
ONEPASS_INLINE HalfBits narrow_bits(WordBits word) {
#if defined(__AVX512F__)
  return (HalfBits)_mm512_cvtepi32_epi16((__m512i)word);
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)word, (__m256i)word);
  return (HalfBits)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
  return __builtin_convertvector(word, HalfBits);
#endif
}

// The low halves of one and the high halves of the other.
ONEPASS_INLINE WordBits blend_halves(WordBits low, WordBits high) {
#if defined(__AVX512F__)
  return (WordBits)_mm512_mask_blend_epi16(0xaaaaaaaau, (__m512i)low, (__m512i)high);
#elif defined(__AVX2__)
  return (WordBits)_mm256_blend_epi16((__m256i)low, (__m256i)high, 0xaa);
#else
  return (low & 0xffffu) | (high & 0xffff0000u);
#endif
}

ONEPASS_INLINE Vec<float> widen_bfloat16(HalfBits bits) {
  return (Vec<float>)(widen_bits(bits) << 16);
}

ONEPASS_INLINE HalfBits narrow_bfloat16(Vec<float> v) {
#if defined(__AVX512BF16__)
  return (HalfBits)_mm512_cvtneps_pbh((__m512)v);  // nearest even; flushes subnormals to zero
#else
  const WordBits bits = (WordBits)v;
  const WordBits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const WordBits quiet = (bits >> 16) | 0x40u;
  return narrow_bits(v != v ? quiet : rounded);
#endif
}

ONEPASS_INLINE Vec<float> widen_float16(HalfBits bits) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__)
  return (Vec<float>)_mm256_cvtph_ps((__m128i)bits);
#elif defined(__aarch64__)
  return (Vec<float>)vcvt_f32_f16((float16x4_t)bits);
#else
  Vec<float> v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = widen(Float16{bits[i]});
  return v;
#endif
}

ONEPASS_INLINE HalfBits narrow_float16(Vec<float> v) {
#if defined(__AVX512F__)
  return (HalfBits)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
  return (HalfBits)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  return (HalfBits)vcvt_f16_f32((float32x4_t)v);
#else
  HalfBits bits;
  for (int i = 0; i < kLanes<float>; ++i) bits[i] = narrow_to_float16(v[i]).bits;
  return bits;
#endif
}

// ---- pairs of bfloat16: low halves of words first -----------------------------------------------

// Whether multiply_add_pairs is one instruction.
#if defined(__AVX512BF16__)
inline constexpr bool kHasPairProducts = true;
#else
inline constexpr bool kHasPairProducts = false;
#endif

// sum + a.low * b.low + a.high * b.high. The instruction takes subnormals as zero and rounds each
// of its two additions to nearest even.
ONEPASS_INLINE Vec<float> multiply_add_pairs(WordBits a, WordBits b, Vec<float> sum) {
#if defined(__AVX512BF16__)
  return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  sum = fma<float>((Vec<float>)(a << 16), (Vec<float>)(b << 16), sum);
  return fma<float>((Vec<float>)(a & 0xffff0000u), (Vec<float>)(b & 0xffff0000u), sum);
#endif
}

// Lane by lane, rounded.
ONEPASS_INLINE WordBits pairs_of(Vec<float> low, Vec<float> high) {
#if defined(__AVX512BF16__)
  WordBits order;  // of 16-bit elements: 0, 16, 1, 17, ...
  for (uint32_t i = 0; i < kLanes<float>; ++i) order[i] = i | (i + kLanes<float>) << 16;
  return (WordBits)_mm512_permutexvar_epi16(
      (__m512i)order, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
  return widen_bits(narrow_bfloat16(low)) | widen_bits(narrow_bfloat16(high)) << 16;
#endif
}

// Bit i of the result: byte i of the `count` is not zero; of the first 32.
inline uint32_t bits_of_bytes(const uint8_t* bytes, int64_t count) {
#if defined(__AVX2__)
  if (count >= 32) {
    const __m256i loaded = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
    return ~static_cast<uint32_t>(
        _mm256_movemask_epi8(_mm256_cmpeq_epi8(loaded, _mm256_setzero_si256())));
  }
#endif
  uint32_t bits = 0;
  for (int64_t i = 0; i < count && i < 32; ++i) bits |= static_cast<uint32_t>(bytes[i] != 0) << i;
  return bits;
}

// How far ahead of a first pass over memory its lines are prefetched: the hardware's prefetchers
// stop at the end of a page. A layer norm forward that finds nothing in the cache runs at 77 % of
// the speed of a copy with it and at 44 % without (`onepass bench norm --case "*/cold"`, AVX-512);
// one that finds everything there loses 4 % (512x768).
inline constexpr int64_t kPrefetchBytes = 4096;

// ---- loads and stores: kLanes<A> elements of type T, as accumulators ----------------------------

// One byte per word, zero-extended or, with kSigned, sign-extended.
template <bool kSigned>
ONEPASS_INLINE WordBits load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (WordBits)(kSigned ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return (WordBits)(kSigned ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  SignedWords words;
  for (int i = 0; i < kLanes<float>; ++i) {
    words[i] = kSigned ? static_cast<int8_t>(from[i]) : from[i];
  }
  return (WordBits)words;
#endif
}

template <class A, class T>
ONEPASS_INLINE Vec<A> load(const T* p) {
  if constexpr (__is_same(T, int8_t)) {
    const WordBits words = load_bytes<true>(reinterpret_cast<const uint8_t*>(p));
    return __builtin_convertvector((SignedWords)words, Vec<A>);
  } else if constexpr (sizeof(T) == 2) {
    const HalfBits bits = *reinterpret_cast<const HalfBitsUnaligned*>(p);
    if constexpr (__is_same(T, BFloat16)) {
      return widen_bfloat16(bits);
    } else {
      return widen_float16(bits);
    }
  } else {
    static_assert(__is_same(T, A), "an accumulator is never narrower than its elements");
    return *reinterpret_cast<const typename VecOf<A>::unaligned*>(p);
  }
}

template <class A, class T>
ONEPASS_INLINE void store(T* p, Vec<A> v) {
  if constexpr (__is_same(T, BFloat16)) {
    *reinterpret_cast<HalfBitsUnaligned*>(p) = narrow_bfloat16(v);
  } else if constexpr (__is_same(T, Float16)) {
    *reinterpret_cast<HalfBitsUnaligned*>(p) = narrow_float16(v);
  } else {
    static_assert(__is_same(T, A), "an accumulator is never narrower than its elements");
    *reinterpret_cast<typename VecOf<A>::unaligned*>(p) = v;
  }
}

// Prefetches the cache line kPrefetchBytes after p, which need not exist.
template <class T>
ONEPASS_INLINE void prefetch_ahead(const T* p) {
  __builtin_prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes);
}

// The first `count` lanes (1 <= count < kLanes); the others load as zero and are not stored. Memory
// beyond them is not touched.
template <class A, class T>
ONEPASS_INLINE Vec<A> load_partial(const T* p, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 1) {
    T lane[kLanes<A>] = {};
    std::memcpy(lane, p, static_cast<size_t>(count));
    return load<A>(lane);
  } else if constexpr (sizeof(T) == 4) {
    return (Vec<A>)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p);
  } else if constexpr (sizeof(T) == 8) {
    return (Vec<A>)_mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << count) - 1), p);
  } else {
    const HalfBits bits =
        (HalfBits)_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), p);
    if constexpr (__is_same(T, BFloat16)) {
      return widen_bfloat16(bits);
    } else {
      return widen_float16(bits);
    }
  }
#else
  T lane[kLanes<A>] = {};
  for (int64_t i = 0; i < count; ++i) lane[i] = p[i];
  return load<A>(lane);
#endif
}

template <class A, class T>
ONEPASS_INLINE void store_partial(T* p, Vec<A> v, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), (__m512)v);
  } else if constexpr (sizeof(T) == 8) {
    _mm512_mask_storeu_pd(p, static_cast<__mmask8>((1u << count) - 1), (__m512d)v);
  } else {
    HalfBits bits;
    if constexpr (__is_same(T, BFloat16)) {
      bits = narrow_bfloat16(v);
    } else {
      bits = narrow_float16(v);
    }
    _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << count) - 1), (__m256i)bits);
  }
#else
  T lane[kLanes<A>];
  store<A>(lane, v);
  for (int64_t i = 0; i < count; ++i) p[i] = lane[i];
#endif
}

// Sets lanes from `count` on to zero: for sums over a tail whose padding is no longer zero.
template <class A, class Count>
ONEPASS_INLINE Vec<A> keep_lanes(Vec<A> v, Count count) {
  if constexpr (Count::kWhole) {
    return v;
  } else {
    typedef decltype(v < v) Index;  // signed integers of the lanes' width
    Index lane;
    for (int i = 0; i < kLanes<A>; ++i) lane[i] = i;
    using Element = __typeof__(lane[0] + lane[0]);
    return lane < static_cast<Element>(count.count) ? v : Vec<A>{};
  }
}

// Calls body(column, count) over [begin, end) for a vector at a time: count is a compile-time
// kLanes for whole vectors (std::integral_constant-like) and a run-time value for the tail.
template <class A>
struct WholeVector {
  static constexpr bool kWhole = true;
  constexpr operator int64_t() const { return kLanes<A>; }
};
struct Tail {
  static constexpr bool kWhole = false;
  int64_t count;
  constexpr operator int64_t() const { return count; }
};

template <class A, class Body>
ONEPASS_INLINE void for_each_vector(int64_t begin, int64_t end, Body&& body) {
  int64_t j = begin;
  for (; j + kLanes<A> <= end; j += kLanes<A>) body(j, WholeVector<A>{});
  if (j < end) body(j, Tail{end - j});
}

template <class A, class T, class Count>
ONEPASS_INLINE Vec<A> load(const T* p, Count count) {
  if constexpr (Count::kWhole) {
    return load<A>(p);
  } else {
    return load_partial<A>(p, count);
  }
}

template <class A, class T, class Count>
ONEPASS_INLINE void store(T* p, Vec<A> v, Count count) {
  if constexpr (Count::kWhole) {
    store<A>(p, v);
  } else {
    store_partial<A>(p, v, count);
  }
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
