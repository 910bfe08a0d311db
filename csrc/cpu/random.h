// Dropout's Philox stream, a vector of blocks at a time. core/philox.h is the definition; this file
// computes the same words in SIMD lanes and lays them out in element order.
#pragma once

#include "core/philox.h"
#include "cpu/vec.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

inline constexpr int kPhiloxLanes = kVectorBytes / 4;  // blocks per vector
inline constexpr int kElementsPerBlock = 8;            // 16-bit values per block
inline constexpr int kElementsPerDraw = kPhiloxLanes * kElementsPerBlock;

struct WordPair {
  WordBits low;
  WordBits high;
};

// Lane-wise 32 x 32 -> 64 bit product, split into its words.
ONEPASS_INLINE WordPair multiply(WordBits a, uint32_t factor) {
#if defined(__AVX512F__)
  const __m512i f = _mm512_set1_epi32(static_cast<int>(factor));
  const __m512i even = _mm512_mul_epu32((__m512i)a, f);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), f);
  return {(WordBits)_mm512_mask_shuffle_epi32(even, 0xaaaa, odd, _MM_PERM_CCAA),
          (WordBits)_mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_DDBB)};
#elif defined(__AVX2__)
  const __m256i f = _mm256_set1_epi32(static_cast<int>(factor));
  const __m256i even = _mm256_mul_epu32((__m256i)a, f);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), f);
  return {(WordBits)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa),
          (WordBits)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa)};
#else
  WordPair product;
  for (int i = 0; i < kPhiloxLanes; ++i) {
    const uint64_t wide = static_cast<uint64_t>(a[i]) * factor;
    product.low[i] = static_cast<uint32_t>(wide);
    product.high[i] = static_cast<uint32_t>(wide >> 32);
  }
  return product;
#endif
}

struct PhiloxWords {
  WordBits word[4];

  WordBits operator[](int64_t i) const { return word[i]; }
};

// core/philox.h's function, a counter per lane.
ONEPASS_INLINE PhiloxWords philox4x32(PhiloxKey key, PhiloxWords counter) {
  auto [c0, c1, c2, c3] = counter.word;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const WordPair product0 = multiply(c0, kPhiloxMultiplier0);
    const WordPair product1 = multiply(c2, kPhiloxMultiplier1);
    c0 = product1.high ^ c1 ^ key.low;
    c1 = product1.low;
    c2 = product0.high ^ c3 ^ key.high;
    c3 = product0.low;
    key.low += kPhiloxWeyl0;
    key.high += kPhiloxWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

ONEPASS_INLINE WordBits broadcast_word(uint32_t value) { return value - WordBits{}; }

// Which of kPhiloxLanes consecutive blocks each lane has to draw for write_in_order: lane 4k + j
// has block j * (lanes / 4) + k. After a 4 x 4 transpose of words within each 128-bit group, vector
// j then holds lanes / 4 whole consecutive blocks, in memory order.
ONEPASS_INLINE WordBits block_of_lane() {
  WordBits block;
  for (int lane = 0; lane < kPhiloxLanes; ++lane) {
    block[lane] = static_cast<uint32_t>((lane % 4) * (kPhiloxLanes / 4) + lane / 4);
  }
  return block;
}

// values: (kElementsPerDraw,) the 16-bit values of kPhiloxLanes consecutive blocks, element by
// element.
ONEPASS_INLINE void write_in_order(const PhiloxWords& drawn, uint16_t* values) {
  const auto [c0, c1, c2, c3] = drawn.word;
#if defined(__AVX512F__)
  const __m512i t0 = _mm512_unpacklo_epi32((__m512i)c0, (__m512i)c1);
  const __m512i t1 = _mm512_unpackhi_epi32((__m512i)c0, (__m512i)c1);
  const __m512i t2 = _mm512_unpacklo_epi32((__m512i)c2, (__m512i)c3);
  const __m512i t3 = _mm512_unpackhi_epi32((__m512i)c2, (__m512i)c3);
  _mm512_storeu_si512(values, _mm512_unpacklo_epi64(t0, t2));
  _mm512_storeu_si512(values + 32, _mm512_unpackhi_epi64(t0, t2));
  _mm512_storeu_si512(values + 64, _mm512_unpacklo_epi64(t1, t3));
  _mm512_storeu_si512(values + 96, _mm512_unpackhi_epi64(t1, t3));
#elif defined(__AVX2__)
  const __m256i t0 = _mm256_unpacklo_epi32((__m256i)c0, (__m256i)c1);
  const __m256i t1 = _mm256_unpackhi_epi32((__m256i)c0, (__m256i)c1);
  const __m256i t2 = _mm256_unpacklo_epi32((__m256i)c2, (__m256i)c3);
  const __m256i t3 = _mm256_unpackhi_epi32((__m256i)c2, (__m256i)c3);
  __m256i* out = reinterpret_cast<__m256i*>(values);
  _mm256_storeu_si256(out, _mm256_unpacklo_epi64(t0, t2));
  _mm256_storeu_si256(out + 1, _mm256_unpackhi_epi64(t0, t2));
  _mm256_storeu_si256(out + 2, _mm256_unpacklo_epi64(t1, t3));
  _mm256_storeu_si256(out + 3, _mm256_unpackhi_epi64(t1, t3));
#else
  const WordBits words[4] = {c0, c1, c2, c3};
  for (int lane = 0; lane < kPhiloxLanes; ++lane) {
    const uint32_t block = block_of_lane()[lane];
    for (int k = 0; k < 4; ++k) {
      values[block * 8 + 2 * k] = static_cast<uint16_t>(words[k][lane]);
      values[block * 8 + 2 * k + 1] = static_cast<uint16_t>(words[k][lane] >> 16);
    }
  }
#endif
}

// values: (kElementsPerDraw,) the 16-bit values of kPhiloxLanes consecutive blocks from
// first_block.
inline void draw(const Dropout& dropout, uint64_t first_block, uint16_t* values,
                 uint32_t stream = kDropoutStream) {
  const uint32_t low = static_cast<uint32_t>(first_block);
  const WordBits c0 = block_of_lane() + low;
  const uint32_t high = static_cast<uint32_t>(first_block >> 32);
  const WordBits c1 = high + (WordBits)((WordBits)(c0 < low) & 1u);  // a carry out of the low word
  const WordBits c2 = broadcast_word(stream), c3 = broadcast_word(dropout.offset);
  write_in_order(philox4x32(dropout.key, {{c0, c1, c2, c3}}), values);
}

// The columns that a tile of random values covers: its generation stays in L1.
inline constexpr int64_t kDropoutTile = 512;

struct KeepTile {
  alignas(64) uint16_t values[kDropoutTile + 2 * kElementsPerDraw];
  const uint16_t* first;  // the value of the tile's first element

  // Draws the values of elements [element, element + count), count <= kDropoutTile.
  void fill(const Dropout& dropout, int64_t element, int64_t count,
            uint32_t stream = kDropoutStream) {
    const int64_t first_block = element / kElementsPerBlock;
    const int64_t last_block = (element + count - 1) / kElementsPerBlock;
    for (int64_t block = first_block; block <= last_block; block += kPhiloxLanes) {
      draw(dropout, static_cast<uint64_t>(block),
           values + (block - first_block) * kElementsPerBlock, stream);
    }
    first = values + (element - first_block * kElementsPerBlock);
  }

  // 0 or the scale for the lanes from `column` of the tile. Multiplying rather than selecting lets
  // NaN and infinity pass through dropped elements, as in torch.
  template <class A>
  ONEPASS_INLINE Vec<A> scale(const Dropout& dropout, int64_t column) const {
    if constexpr (sizeof(A) == 4) {
      typedef int32_t Signed __attribute__((vector_size(kVectorBytes)));
      const HalfBits drawn = *reinterpret_cast<const HalfBitsUnaligned*>(first + column);
      const Signed value = (Signed)widen_bits(drawn);
      const Vec<float> kept = broadcast<float>(dropout.scale);
      return value < static_cast<int32_t>(dropout.threshold) ? Vec<float>{} : kept;
    } else {
      const double kept = 65536.0 / (65536.0 - dropout.threshold);
      Vec<double> factor;
      for (int i = 0; i < kLanes<double>; ++i) {
        factor[i] = first[column + i] < dropout.threshold ? 0.0 : kept;
      }
      return factor;
    }
  }

  // Numbers from [0, 1), of 16 bits, for the lanes from `column` of the tile.
  ONEPASS_INLINE Vec<float> uniform(int64_t column) const {
    const HalfBits drawn = *reinterpret_cast<const HalfBitsUnaligned*>(first + column);
    return __builtin_convertvector((SignedWords)widen_bits(drawn), Vec<float>) * 0x1p-16f;
  }

  // to[i] = from[i] times the factor of element `element` + i, count <= kDropoutTile; from may be
  // to.
  template <class A>
  void drop(const Dropout& dropout, int64_t element, int64_t count, const A* from, A* to) {
    fill(dropout, element, count);
    for_each_vector<A>(0, count, [&](int64_t i, auto lanes) {
      store<A>(to + i, load<A>(from + i, lanes) * scale<A>(dropout, i), lanes);
    });
  }
};

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
