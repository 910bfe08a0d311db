// Two vectors at a time, for work in which the order of elements does not matter, and stores that
// go past the caches.
//
// Of bfloat16, the elements with even numbers are one vector and those with odd numbers the other:
// halves of words, which take one instruction each to unpack and are packed by a blend. Where no
// instruction rounds to bfloat16, a sum of two rows in L1 takes 0.10 ns per element instead of 0.15
// with AVX-512, and 0.15 instead of 0.26 with AVX2.
#pragma once

#include <algorithm>
#include <utility>

#include "cpu/vec.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// Elements 0 to 2 kLanes - 1 in memory: halves of words, or one vector after the other.
template <class A>
struct Two {
  Vec<A> first;
  Vec<A> second;
};

// f of a vector, or of each of two: one step of work for both before the next, so that a processor
// has two chains of dependent instructions at hand. (One after the other, the chains of silu' are
// too long for the scheduler of a Xeon.)
template <class A, class F, class... More>
ONEPASS_INLINE Vec<A> each(F&& f, Vec<A> v, More... more) {
  return f(v, more...);
}
template <class A, class F, class... More>
ONEPASS_INLINE Two<A> each(F&& f, const Two<A>& v, const More&... more) {
  return {f(v.first, more.first...), f(v.second, more.second...)};
}

// exp(x) is p(rest) * 2^whole, where p is the exponential on [0, ln 2].
struct Exponent {
  Vec<float> whole, rest;
};

#if defined(__AVX512F__)
inline constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
#endif

// |x| below 2^10. ln 2 as float32 alone is off by 2e-9, so the result by 4 ulp at exp(87).
ONEPASS_INLINE Exponent exponent_of(Vec<float> x) {
  const Vec<float> t = x * broadcast<float>(1.44269504088896341f);
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const auto whole = (Vec<float>)_mm512_roundscale_ps((__m512)t, kDown);
#else
  const auto whole = (Vec<float>)_mm256_floor_ps((__m256)t);
#endif
  return {whole, fma<float>(whole, broadcast<float>(-0.693147180559945309f), x)};
#else
  const Vec<float> magic = broadcast<float>(12582912.0f);  // 1.5 * 2^23: rounds to a whole number
  const Vec<float> whole = (t - broadcast<float>(0.5f)) + magic - magic;
  // Without fused multiply-adds the product with 12 of the digits of ln 2 is exact.
  const Vec<float> high = whole * broadcast<float>(0x1.62ep-1f);
  const Vec<float> low = whole * broadcast<float>(0x1.0bfbe8p-15f);
  return {whole, x - high - low};
#endif
}

// 2^t is p(rest) * 2^whole, where p is 2^r on [0, 1]; scale_by_power_of_two rounds `whole` down
// where it is not. |t| below 2^10, or where kSplitsEveryNumber any.
#if defined(__AVX512F__)
inline constexpr bool kSplitsEveryNumber = true;
#else
inline constexpr bool kSplitsEveryNumber = false;
#endif
ONEPASS_INLINE Exponent binary_exponent_of(Vec<float> t) {
#if defined(__AVX512F__)
  return {t, (Vec<float>)_mm512_reduce_ps((__m512)t, kDown)};
#elif defined(__AVX2__)
  const auto whole = (Vec<float>)_mm256_floor_ps((__m256)t);
  return {whole, t - whole};
#else
  const Vec<float> magic = broadcast<float>(12582912.0f);  // 1.5 * 2^23: rounds to a whole number
  const Vec<float> whole = (t - broadcast<float>(0.5f)) + magic - magic;
  return {whole, t - whole};
#endif
}

// Whether elements of both types are in the same order.
template <class T, class U>
inline constexpr bool kSameOrder = __is_same(T, BFloat16) == __is_same(U, BFloat16);

// Prefetches as many elements kPrefetchBytes further on if kAhead.
template <bool kAhead, class A, class T>
ONEPASS_INLINE Two<A> load_two(const T* p) {
  if constexpr (kAhead) {
    for (size_t i = 0; i < 2 * kLanes<A>; i += 64 / sizeof(T)) prefetch_ahead(p + i);
  }
  if constexpr (__is_same(T, BFloat16)) {
    WordBits words;
    std::memcpy(&words, p, sizeof(words));
    return {(Vec<float>)(words << 16), (Vec<float>)(words & 0xffff0000u)};
  } else {
    return {load<A>(p), load<A>(p + kLanes<A>)};
  }
}

// Rounded to bfloat16, even-numbered elements in the low halves. NaNs must be quiet, as results of
// arithmetic are.
ONEPASS_INLINE WordBits round_two(const Two<float>& v) {
#if defined(__AVX512BF16__)
  return pairs_of(v.first, v.second);
#elif defined(__AVX512F__)
  // Both at once: the halves that stay, and those that are rounded off. A number is rounded up if
  // the latter is more than a half, or a half and the former is odd.
  const __m512i one = _mm512_set1_epi16(1);
  const auto high = (__m512i)blend_halves((WordBits)v.first >> 16, (WordBits)v.second);
  const auto low = (__m512i)blend_halves((WordBits)v.first, (WordBits)v.second << 16);
  constexpr int kLowOrOdd = 0xf8;  // low | (high & one)
  const __mmask32 up = _mm512_cmpgt_epu16_mask(_mm512_ternarylogic_epi32(low, high, one, kLowOrOdd),
                                               _mm512_set1_epi16(static_cast<int16_t>(0x8000)));
  // Of a NaN 0x7fff the sum stays as it is, of a NaN 0xffff the maximum.
  return (WordBits)_mm512_mask_max_epu16(high, up, high, _mm512_adds_epi16(high, one));
#else
  const auto rounded = [](Vec<float> x) {
    const WordBits bits = (WordBits)x;
    const WordBits half = 0x7fffu + ((bits >> 16) & 1u);
    // The carry would make another number of a NaN.
    return bits + (half & (WordBits)(x == x));
  };
  return blend_halves(rounded(v.first) >> 16, rounded(v.second));
#endif
}

// Lane i is lane lane_of(i) of a, or of b from kLanes<float> on. lane_of captures nothing.
template <class LaneOf>
ONEPASS_INLINE Vec<float> choose_lanes(Vec<float> a, Vec<float> b, LaneOf) {
  return [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    return (Vec<float>)__builtin_shufflevector(a, b, LaneOf{}(i)...);
  }(std::make_integer_sequence<int, kLanes<float>>());
}

// Lines of float32 in the order in which load_two unpacks bfloat16: of every two vectors the
// columns with even numbers, then those with odd ones. What is left after the last two whole
// vectors keeps its order. `to` may be `from`.
inline void to_halves_order(const float* from, int64_t cols, float* to) {
  constexpr int kCount = kLanes<float>;
  for (int64_t j = 0; j < cols; j += 2 * kCount) {
    if (j + 2 * kCount > cols) {
      if (to != from) std::copy(from + j, from + cols, to + j);
      return;
    }
    const Vec<float> low = load<float>(from + j), high = load<float>(from + j + kCount);
    store<float>(to + j, choose_lanes(low, high, [](int i) { return 2 * i; }));
    store<float>(to + j + kCount, choose_lanes(low, high, [](int i) { return 2 * i + 1; }));
  }
}

inline void from_halves_order(float* line, int64_t cols) {
  constexpr int kCount = kLanes<float>;
  for (int64_t j = 0; j + 2 * kCount <= cols; j += 2 * kCount) {
    const Vec<float> even = load<float>(line + j), odd = load<float>(line + j + kCount);
    store<float>(line + j, choose_lanes(even, odd, [](int i) { return i / 2 + i % 2 * kCount; }));
    store<float>(line + j + kCount, choose_lanes(even, odd, [](int i) {
                   return kCount / 2 + i / 2 + i % 2 * kCount;
                 }));
  }
}

// Whether a store can go past the caches; its address must be a multiple of kVectorBytes.
#if defined(__x86_64__)
inline constexpr bool kStreams = true;
#else
inline constexpr bool kStreams = false;
#endif

// Writes a vector to memory without reading the line there into the cache first. Other threads see
// it after fence_streams() alone.
ONEPASS_INLINE void stream(void* p, WordBits v) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(p), (__m512i)v);
#elif defined(__AVX2__)
  _mm256_stream_si256(static_cast<__m256i*>(p), (__m256i)v);
#elif defined(__x86_64__)
  _mm_stream_si128(static_cast<__m128i*>(p), (__m128i)v);
#else
  std::memcpy(p, &v, sizeof(v));
#endif
}

ONEPASS_INLINE void fence_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// 2 kLanes elements. Of bfloat16, NaNs must be quiet. Past the caches if kStream, with p a
// multiple of kVectorBytes.
template <bool kStream, class A, class T>
ONEPASS_INLINE void store_two(T* p, const Two<A>& v) {
  if constexpr (sizeof(T) == 2) {
    WordBits words;
    if constexpr (__is_same(T, BFloat16)) {
      words = round_two(v);
    } else {
      const HalfBits halves[2] = {narrow_float16(v.first), narrow_float16(v.second)};
      std::memcpy(&words, halves, sizeof(words));
    }
    if constexpr (kStream) {
      stream(p, words);
    } else {
      std::memcpy(p, &words, sizeof(words));
    }
  } else if constexpr (kStream) {
    stream(p, (WordBits)v.first);
    stream(p + kLanes<A>, (WordBits)v.second);
  } else {
    store<A>(p, v.first);
    store<A>(p + kLanes<A>, v.second);
  }
}

// Calls two(element) for 2 kLanes elements at a time, then one(element, lanes) as for_each_vector
// for the rest and for float64, which is computed lane by lane.
template <class A, class Both, class One>
ONEPASS_INLINE void for_each_two(int64_t count, Both&& two, One&& one) {
  constexpr int64_t kStep = 2 * kLanes<A>;
  const int64_t end = sizeof(A) == 4 ? count - count % kStep : 0;
  for (int64_t i = 0; i < end; i += kStep) two(i);
  for_each_vector<A>(end, count, one);
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
