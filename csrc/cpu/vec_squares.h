// Squares of a matrix, transposed in registers, sums of lanes of several vectors, and rows as
// pairs.
#pragma once

#include "cpu/vec.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// sum_of_lanes of 4 * kParts vectors at once, bit for bit: part p of the result has those of v[p].
ONEPASS_INLINE Vec<float> sums_of_lanes(const Vec<float> (&v)[kParts][4]) {
#if defined(__AVX2__)
  Vec<float> folded[4];  // part p has the sums of v[p][i] in four lanes
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#if defined(__AVX512F__)
    const auto fold = [](__m512 a, __m512 b) {
      return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    };
    const __m512 low = fold((__m512)v[0][i], (__m512)v[1][i]);
    const __m512 high = fold((__m512)v[2][i], (__m512)v[3][i]);
    folded[i] = (Vec<float>)_mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88),
                                          _mm512_shuffle_f32x4(low, high, 0xdd));
#else
    const __m256 a = (__m256)v[0][i];
    const __m256 b = (__m256)v[1][i];
    folded[i] = (Vec<float>)_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20),
                                          _mm256_permute2f128_ps(a, b, 0x31));
#endif
  }
#if defined(__AVX512F__)
  const auto pair = [](Vec<float> a, Vec<float> b) {
    return _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b),
                         _mm512_unpackhi_ps((__m512)a, (__m512)b));
  };
  const __m512d low = (__m512d)pair(folded[0], folded[1]);
  const __m512d high = (__m512d)pair(folded[2], folded[3]);
  return (Vec<float>)_mm512_add_ps((__m512)_mm512_unpacklo_pd(low, high),
                                   (__m512)_mm512_unpackhi_pd(low, high));
#else
  const auto pair = [](Vec<float> a, Vec<float> b) {
    return _mm256_add_ps(_mm256_unpacklo_ps((__m256)a, (__m256)b),
                         _mm256_unpackhi_ps((__m256)a, (__m256)b));
  };
  const __m256d low = (__m256d)pair(folded[0], folded[1]);
  const __m256d high = (__m256d)pair(folded[2], folded[3]);
  return (Vec<float>)_mm256_add_ps((__m256)_mm256_unpacklo_pd(low, high),
                                   (__m256)_mm256_unpackhi_pd(low, high));
#endif
#else
  Vec<float> sums{};
  for (int i = 0; i < kLanes<float>; ++i) sums[i] = sum_of_lanes<float>(v[i / 4][i % 4]);
  return sums;
#endif
}

// Elements of two vectors in order, rounded: word i has elements 2 i and 2 i + 1.
ONEPASS_INLINE WordBits neighbours_of(Vec<float> first, Vec<float> second) {
#if defined(__AVX512BF16__)
  return (WordBits)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#else
  const HalfBits halves[] = {narrow_bfloat16(first), narrow_bfloat16(second)};
  WordBits words;
  std::memcpy(&words, halves, sizeof(words));
  return words;
#endif
}

// Row i, lane j becomes row j, lane i.
ONEPASS_INLINE void transpose(Vec<float> (&rows)[kLanes<float>]) {
#if defined(__AVX2__)
  // First squares of four within the 128-bit parts, then the parts are exchanged between rows.
  constexpr int n = kLanes<float>;
  Vec<float> t[n];
#pragma GCC unroll 4
  for (int i = 0; i < n; i += 4) {
#if defined(__AVX512F__)
    const __m512* r = reinterpret_cast<const __m512*>(rows + i);
    const __m512d a = (__m512d)_mm512_unpacklo_ps(r[0], r[1]);
    const __m512d b = (__m512d)_mm512_unpackhi_ps(r[0], r[1]);
    const __m512d c = (__m512d)_mm512_unpacklo_ps(r[2], r[3]);
    const __m512d d = (__m512d)_mm512_unpackhi_ps(r[2], r[3]);
    t[i] = (Vec<float>)_mm512_unpacklo_pd(a, c);
    t[i + 1] = (Vec<float>)_mm512_unpackhi_pd(a, c);
    t[i + 2] = (Vec<float>)_mm512_unpacklo_pd(b, d);
    t[i + 3] = (Vec<float>)_mm512_unpackhi_pd(b, d);
#else
    const __m256* r = reinterpret_cast<const __m256*>(rows + i);
    const __m256d a = (__m256d)_mm256_unpacklo_ps(r[0], r[1]);
    const __m256d b = (__m256d)_mm256_unpackhi_ps(r[0], r[1]);
    const __m256d c = (__m256d)_mm256_unpacklo_ps(r[2], r[3]);
    const __m256d d = (__m256d)_mm256_unpackhi_ps(r[2], r[3]);
    t[i] = (Vec<float>)_mm256_unpacklo_pd(a, c);
    t[i + 1] = (Vec<float>)_mm256_unpackhi_pd(a, c);
    t[i + 2] = (Vec<float>)_mm256_unpacklo_pd(b, d);
    t[i + 3] = (Vec<float>)_mm256_unpackhi_pd(b, d);
#endif
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
#if defined(__AVX512F__)
    const auto parts = [](Vec<float> x, Vec<float> y, auto which) {
      return (__m512)_mm512_shuffle_f32x4((__m512)x, (__m512)y, decltype(which)::value);
    };
    const std::integral_constant<int, 0x88> even;
    const std::integral_constant<int, 0xdd> odd;
    const __m512 a = parts(t[j], t[4 + j], even), b = parts(t[8 + j], t[12 + j], even);
    const __m512 c = parts(t[j], t[4 + j], odd), d = parts(t[8 + j], t[12 + j], odd);
    rows[j] = (Vec<float>)parts((Vec<float>)a, (Vec<float>)b, even);
    rows[4 + j] = (Vec<float>)parts((Vec<float>)c, (Vec<float>)d, even);
    rows[8 + j] = (Vec<float>)parts((Vec<float>)a, (Vec<float>)b, odd);
    rows[12 + j] = (Vec<float>)parts((Vec<float>)c, (Vec<float>)d, odd);
#else
    rows[j] = (Vec<float>)_mm256_permute2f128_ps((__m256)t[j], (__m256)t[4 + j], 0x20);
    rows[4 + j] = (Vec<float>)_mm256_permute2f128_ps((__m256)t[j], (__m256)t[4 + j], 0x31);
#endif
  }
#else
  static_assert(kLanes<float> == 4);
  Vec<float> t[4];
  for (int j = 0; j < 4; ++j) t[j] = Vec<float>{rows[0][j], rows[1][j], rows[2][j], rows[3][j]};
  for (int j = 0; j < 4; ++j) rows[j] = t[j];
#endif
}

// Transposes 16-bit elements: kHalvesCells of them, from number `at` on, of each of kLanes rows.
// The elements of cell c are then in to[slot_of_halves(c)].
inline constexpr int kHalvesCells = 16;
ONEPASS_INLINE constexpr int slot_of_halves(int c) { return c % 8 * 2 + c / 8; }

template <class T>
ONEPASS_INLINE void transpose_halves(const T* const (&rows)[kLanes<float>], int64_t at,
                                     HalfBits* to) {
  static_assert(sizeof(T) == 2);
#if defined(__AVX2__)
  // Squares of eight within the 128-bit parts. These hold cells 0 to 7 and 8 to 15 of rows 0 to 7,
  // and then of rows 8 to 15.
  WordBits v[8], t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + at));
#if defined(__AVX512F__)
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[8 + i] + at));
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    v[i] = (WordBits)_mm512_shuffle_i64x2(both, both, 0xd8);
#else
    v[i] = (WordBits)low;
#endif
  }
#if defined(__AVX512F__)
#define ONEPASS_UNPACK(half, bits, a, b) \
  (WordBits) _mm512_unpack##half##_epi##bits((__m512i)(a), (__m512i)(b))
#else
#define ONEPASS_UNPACK(half, bits, a, b) \
  (WordBits) _mm256_unpack##half##_epi##bits((__m256i)(a), (__m256i)(b))
#endif
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = ONEPASS_UNPACK(lo, 16, v[i], v[i + 1]);
    t[i + 1] = ONEPASS_UNPACK(hi, 16, v[i], v[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    v[i] = ONEPASS_UNPACK(lo, 32, t[i], t[i + 2]);
    v[i + 1] = ONEPASS_UNPACK(hi, 32, t[i], t[i + 2]);
    v[i + 2] = ONEPASS_UNPACK(lo, 32, t[i + 1], t[i + 3]);
    v[i + 3] = ONEPASS_UNPACK(hi, 32, t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = ONEPASS_UNPACK(lo, 64, v[i], v[4 + i]);
    t[2 * i + 1] = ONEPASS_UNPACK(hi, 64, v[i], v[4 + i]);
  }
#undef ONEPASS_UNPACK
  std::memcpy(to, t, sizeof(t));
#else
  for (int c = 0; c < kHalvesCells; ++c) {
    for (int j = 0; j < kLanes<float>; ++j) to[slot_of_halves(c)][j] = rows[j][at + c].bits;
  }
#endif
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
