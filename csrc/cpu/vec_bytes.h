// The SIMD layer's part for codes: words as bytes and back, a division, sums of products of whole
// numbers, and numbers looked up by codes of 4 bits.
#pragma once

#include "cpu/vec.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

typedef uint8_t Bytes __attribute__((vector_size(kVectorBytes)));
typedef uint8_t BytesUnaligned __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));

// The words of four vectors as consecutive bytes. A word outside a byte's range becomes the nearest
// byte.
template <bool kSigned>
ONEPASS_INLINE Bytes saturate_to_bytes(const SignedWords (&words)[4]) {
#if defined(__AVX2__)
  WordBits order;  // of groups of four bytes: each 128-bit part has one group of every vector
  for (uint32_t i = 0; i < kLanes<float>; ++i) order[i] = i % kParts * 4 + i / kParts;
#endif
#if defined(__AVX512F__)
  const __m512i low = _mm512_packs_epi32((__m512i)words[0], (__m512i)words[1]);
  const __m512i high = _mm512_packs_epi32((__m512i)words[2], (__m512i)words[3]);
  const __m512i bytes = kSigned ? _mm512_packs_epi16(low, high) : _mm512_packus_epi16(low, high);
  return (Bytes)_mm512_permutexvar_epi32((__m512i)order, bytes);
#elif defined(__AVX2__)
  const __m256i low = _mm256_packs_epi32((__m256i)words[0], (__m256i)words[1]);
  const __m256i high = _mm256_packs_epi32((__m256i)words[2], (__m256i)words[3]);
  const __m256i bytes = kSigned ? _mm256_packs_epi16(low, high) : _mm256_packus_epi16(low, high);
  return (Bytes)_mm256_permutevar8x32_epi32(bytes, (__m256i)order);
#else
  Bytes bytes;
  for (int i = 0; i < kVectorBytes; ++i) {
    const int32_t word = words[i / kLanes<float>][i % kLanes<float>];
    constexpr int32_t kLeast = kSigned ? -128 : 0;
    constexpr int32_t kMost = kSigned ? 127 : 255;
    bytes[i] = static_cast<uint8_t>(word < kLeast ? kLeast : word > kMost ? kMost : word);
  }
  return bytes;
#endif
}

// Sixteen numbers, looked up by four bits of each lane's word.
#if defined(__AVX512F__)
inline constexpr bool kLooksUpSixteen = true;  // by one instruction
#else
inline constexpr bool kLooksUpSixteen = false;
#endif
class SixteenNumbers {
 public:
  ONEPASS_INLINE explicit SixteenNumbers(const float (&numbers)[16]) {
    std::memcpy(&numbers_, numbers, sizeof(numbers_));
#if defined(__AVX512BF16__)
    const HalfBits halves = narrow_bfloat16((Vec<float>)numbers_);
    std::memcpy(&halves_, &halves, sizeof(halves));
    std::memcpy(reinterpret_cast<char*>(&halves_) + sizeof(halves), &halves, sizeof(halves));
#endif
  }

  // By the bits from `bit` on.
  ONEPASS_INLINE Vec<float> at(WordBits words, int bit) const {
#if defined(__AVX512F__)
    return (Vec<float>)_mm512_permutexvar_ps((__m512i)(words >> bit), (__m512)numbers_);
#elif defined(__AVX2__)
    __m256 half[2];
    std::memcpy(half, &numbers_, sizeof(half));
    const __m256i index = (__m256i)(words >> bit);
    return (Vec<float>)_mm256_blendv_ps(_mm256_permutevar8x32_ps(half[0], index),
                                        _mm256_permutevar8x32_ps(half[1], index),
                                        (__m256)(words << (28 - bit)));
#else
    Vec<float> found;
    for (int i = 0; i < kLanes<float>; ++i) found[i] = numbers_[words[i] >> bit & 15];
    return found;
#endif
  }

  // Of each half of a word, in bfloat16.
  ONEPASS_INLINE WordBits pairs_at(WordBits words, int bit) const {
#if defined(__AVX512BF16__)  // of an index the lowest five bits count: numbers stand there twice
    return (WordBits)_mm512_permutexvar_epi16((__m512i)(words >> bit), (__m512i)halves_);
#else
    return pairs_of(at(words, bit), at(words, bit + 16));
#endif
  }

 private:
  float numbers_ __attribute__((vector_size(64)));
#if defined(__AVX512BF16__)
  WordBits halves_;
#endif
};

// The high halves of words, as pairs.
ONEPASS_INLINE WordBits high_halves(Vec<float> low, Vec<float> high) {
  return (WordBits)low >> 16 | ((WordBits)high & 0xffff0000u);
}

// (kFrom - word) / 3, rounded down; 0 where that is negative. Words must be below 65536.
template <uint32_t kFrom>
ONEPASS_INLINE WordBits third_of_rest(WordBits word) {
  static_assert(kFrom < 32768, "where 21846 / 65536 is near enough to a third");
#if defined(__AVX512F__)
  const __m512i rest = _mm512_subs_epu16(_mm512_set1_epi32(kFrom), (__m512i)word);
  return (WordBits)_mm512_mulhi_epu16(rest, _mm512_set1_epi32(21846));
#elif defined(__AVX2__)
  const __m256i rest = _mm256_subs_epu16(_mm256_set1_epi32(kFrom), (__m256i)word);
  return (WordBits)_mm256_mulhi_epu16(rest, _mm256_set1_epi32(21846));
#else
  return (kFrom > word ? kFrom - word : WordBits{}) * 21846u >> 16;
#endif
}

// The nearest whole number, of two the even one. |x| below 2^22.
ONEPASS_INLINE SignedWords nearest_word(Vec<float> x) {
#if defined(__AVX512F__)
  return (SignedWords)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (SignedWords)_mm256_cvtps_epi32((__m256)x);
#else
  const Vec<float> magic = broadcast<float>(12582912.0f);  // 1.5 * 2^23: rounds to a whole number
  return (SignedWords)(x + magic) - (SignedWords)magic;
#endif
}

// Whether there is an instruction for multiply_add_bytes that CPUs of this level may have.
#if defined(__AVX2__)
inline constexpr bool kMayMultiplyBytes = true;
#else
inline constexpr bool kMayMultiplyBytes = false;
#endif

// sum + the four products of an unsigned byte of a and a signed byte of b. In assembler, because
// the flags of a level do not name the instruction: only for a CPU that has it.
ONEPASS_INLINE SignedWords multiply_add_bytes(WordBits a, WordBits b, SignedWords sum) {
#if defined(__AVX512F__)
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#elif defined(__AVX2__)
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
  for (int i = 0; i < 32; i += 8) {
    sum += (SignedWords)((a >> i) & 0xffu) * ((SignedWords)(b << (24 - i)) >> 24);
  }
#endif
  return sum;
}

// sum + a.low * b.low + a.high * b.high, of signed halves.
ONEPASS_INLINE SignedWords multiply_add_halves(WordBits a, WordBits b, SignedWords sum) {
#if defined(__AVX512F__)
  return sum + (SignedWords)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sum + (SignedWords)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return sum + (SignedWords)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  sum += ((SignedWords)(a << 16) >> 16) * ((SignedWords)(b << 16) >> 16);
  return sum + ((SignedWords)a >> 16) * ((SignedWords)b >> 16);
#endif
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
