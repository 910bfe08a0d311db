// How a block of a parameter, its gradient and its states gets into float32 and back. What is
// float32 in memory is worked on in place; everything else passes through a tile in L1, so that the
// arithmetic of a step (update.h) is written once for all dtypes.
#pragma once

#include <algorithm>
#include <cstring>

#include "core/code8.h"
#include "core/noise.h"
#include "cpu/vec.h"
#include "ops/optimizer.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// Elements that are worked on together: whole blocks of codes, and tiles that leave room in L1.
inline constexpr int64_t kTile = 512;
static_assert(kTile % kCodeBlock == 0 && kPieceElements % kTile == 0 &&
              kPieceElements == kNoiseStretch);

template <class A>
struct alignas(64) Tile {
  A values[kTile];
};

typedef WordBits WordBitsUnaligned __attribute__((aligned(4), may_alias));
typedef int32_t SignedWords __attribute__((vector_size(kVectorBytes)));

// The 16 of 32 bits of noise that round one operand.
enum class NoiseHalf { kLow, kHigh };

struct alignas(64) NoiseTile {
  uint32_t words[kTile];

  // Of the elements [element, element + count) of a stretch.
  void fill(const Noise& noise, uint32_t element, int64_t count) {
    WordBits word;
    for (int lane = 0; lane < kLanes<float>; ++lane) {
      word[lane] = noise.start + (element + static_cast<uint32_t>(lane)) * noise.stride;
    }
    const uint32_t step = noise.stride * kLanes<float>;
    for (int64_t i = 0; i < count; i += kLanes<float>, word += step) {
      *reinterpret_cast<WordBits*>(words + i) = mix_bits(word);
    }
  }

  // 16 bits per element from element i on.
  template <NoiseHalf kHalf>
  ONEPASS_INLINE WordBits bits(int64_t i) const {
    const WordBits word = *reinterpret_cast<const WordBits*>(words + i);
    return kHalf == NoiseHalf::kLow ? word & 0xffffu : word >> 16;
  }
};

// Half a unit in the last place: rounds to nearest, ties away from zero.
struct TiesAway {
  ONEPASS_INLINE WordBits operator()(int64_t) const { return WordBits{} + 0x8000u; }
};

template <NoiseHalf kHalf>
struct Stochastic {
  const NoiseTile& noise;
  ONEPASS_INLINE WordBits operator()(int64_t i) const { return noise.bits<kHalf>(i); }
};

// ---- rounding to 16 bits after adding `bits` / 65536 of a unit in the last place ----------------

// Infinities stay what they are; a NaN would wrap, so it is made the quiet one.
ONEPASS_INLINE HalfBits round_by(Vec<float> v, WordBits bits, BFloat16) {
  const WordBits word = (WordBits)v;
  return narrow_bits(v != v ? (word >> 16) | 0x40u : (word + bits) >> 16);
}

// float16 leaves 13 bits out; below 2^-14 its unit is 2^-24 throughout.
ONEPASS_INLINE HalfBits round_by(Vec<float> v, WordBits bits, Float16) {
  const WordBits sign = (WordBits)v & 0x80000000u;
  const WordBits magnitude = (WordBits)v & 0x7fffffffu;
  const WordBits normal = (magnitude + (bits >> 3)) & ~0x1fffu;
  const Vec<float> units = (Vec<float>)magnitude * 0x1p24f;  // below 1024 where it is used
  const Vec<float> small = units < 1024.0f ? units : Vec<float>{};
  const Vec<float> share = __builtin_convertvector((SignedWords)bits, Vec<float>) * 0x1p-16f;
  const Vec<float> whole =
      __builtin_convertvector(__builtin_convertvector(small + share, SignedWords), Vec<float>);
  const WordBits subnormal = (WordBits)(whole * 0x1p-24f);
  WordBits rounded = magnitude < 0x38800000u ? subnormal : normal;
  rounded = magnitude >= 0x7f800000u ? magnitude : rounded;
  return narrow_float16((Vec<float>)(rounded | sign));  // exact
}

// ---- blocks of one dtype ------------------------------------------------------------------------

template <class A, class T>
void widen_block(const T* from, A* to, int64_t count) {
  for_each_vector<A>(
      0, count, [&](int64_t i, auto lanes) { store<A>(to + i, load<A>(from + i, lanes), lanes); });
}

template <class A, class T>
void narrow_block(const A* from, T* to, int64_t count) {
  for_each_vector<A>(
      0, count, [&](int64_t i, auto lanes) { store<A>(to + i, load<A>(from + i, lanes), lanes); });
}

template <class Count>
ONEPASS_INLINE void store_half_bits(uint16_t* to, HalfBits bits, Count lanes) {
  if constexpr (Count::kWhole) {
    *reinterpret_cast<HalfBitsUnaligned*>(to) = bits;
  } else {
    std::memcpy(to, &bits, static_cast<size_t>(lanes) * sizeof(uint16_t));
  }
}

template <class Count>
ONEPASS_INLINE HalfBits load_half_bits(const uint16_t* from, Count lanes) {
  HalfBits bits{};
  if constexpr (Count::kWhole) {
    bits = *reinterpret_cast<const HalfBitsUnaligned*>(from);
  } else {
    std::memcpy(&bits, from, static_cast<size_t>(lanes) * sizeof(uint16_t));
  }
  return bits;
}

// To nearest, ties to even. Not narrow_bfloat16: a level's instruction may flush subnormals to
// zero, and a parameter would stop there.
inline void narrow_block(const float* from, BFloat16* to, int64_t count) {
  for_each_vector<float>(0, count, [&](int64_t i, auto lanes) {
    const Vec<float> v = load<float>(from + i, lanes);
    const WordBits even = 0x7fffu + (((WordBits)v >> 16) & 1u);
    store_half_bits(&to[i].bits, round_by(v, even, BFloat16{}), lanes);
  });
}
inline void narrow_block(const float* from, Float16* to, int64_t count) {
  for_each_vector<float>(0, count, [&](int64_t i, auto lanes) {
    store<float>(to + i, load<float>(from + i, lanes), lanes);
  });
}

template <class T, class Rounding>
void round_block(const float* from, T* to, int64_t count, Rounding&& rounding) {
  for_each_vector<float>(0, count, [&](int64_t i, auto lanes) {
    store_half_bits(&to[i].bits, round_by(load<float>(from + i, lanes), rounding(i), T{}), lanes);
  });
}

// float32 bits = parameter's bits * 65536 + remainder.
inline void join_block(const BFloat16* param, const uint16_t* remainder, float* to, int64_t count) {
  for_each_vector<float>(0, count, [&](int64_t i, auto lanes) {
    const WordBits high = widen_bits(load_half_bits(&param[i].bits, lanes)) << 16;
    const WordBits low = widen_signed_bits(load_half_bits(remainder + i, lanes));
    store<float>(to + i, (Vec<float>)(high + low), lanes);
  });
}

// The parameter is rounded to nearest, ties away; the remainder is what that leaves, negative where
// it went up. A NaN leaves none, so that it is the same NaN again.
inline void split_block(const float* from, BFloat16* param, uint16_t* remainder, int64_t count) {
  for_each_vector<float>(0, count, [&](int64_t i, auto lanes) {
    const Vec<float> v = load<float>(from + i, lanes);
    const WordBits word = v != v ? ((WordBits)v & 0xffff0000u) | 0x400000u : (WordBits)v;
    store_half_bits(&param[i].bits, narrow_bits(((word + 0x8000u) >> 16) & 0xffffu), lanes);
    store_half_bits(remainder + i, narrow_bits(word & 0xffffu), lanes);
  });
}

// ---- codes of 8 bits (core/code8.h), a vector at a time; count is a multiple of kCodeBlock ------

template <int kBits>
ONEPASS_INLINE Vec<float> decode_vector(WordBits code) {
  const WordBits bits =
      (WordBits) __builtin_convertvector((SignedWords)code, Vec<float>);  // exact; zero is zero
  const WordBits exponent = bits >> 23;                                   // 127 + leading
  const Vec<float> step = (Vec<float>)((254u - exponent) << 23);
  const Vec<float> octave =
      (Vec<float>)((127u - 3u * (kBits - 1 + 127) + 3u * exponent) << 23);  // 8^-octave
  const Vec<float> fraction = (Vec<float>)((bits & 0x7fffffu) | 0x3f800000u) - 1.0f + step;
  const Vec<float> value = octave * (0.125f + 0.875f * fraction);
  const Vec<float> lowest = Vec<float>{} + static_cast<float>(decode8<kBits>(1));
  return code > 1u ? value : (code == 0u ? Vec<float>{} : lowest);
}

template <int kBits>
ONEPASS_INLINE WordBits encode_vector(Vec<float> x, Vec<float> rounding) {
  constexpr uint32_t kLast = kBits - 1;
  // halvings / 3 by a multiplication; zero halvings, and less than that, in the first octave.
  const SignedWords halvings = 126 - (SignedWords)((WordBits)x >> 23);
  const WordBits third = (WordBits)((halvings > 0 ? halvings : SignedWords{}) * 171 >> 9);
  const WordBits octave = third < kLast ? third : WordBits{} + kLast;
  const Vec<float> scaled = x * (Vec<float>)((127u + 3u * octave) << 23);
  const WordBits levels = (WordBits{} + (1u << kLast)) >> octave;
  const Vec<float> gain = (Vec<float>)((127u + kLast - octave) << 23) * (8.0f / 7.0f);
  const Vec<float> place = octave == kLast ? scaled : (scaled - 0.125f) * gain;
  const SignedWords code =
      (SignedWords)levels - 1 + __builtin_convertvector(place + rounding, SignedWords);
  // Only a NaN leaves the range.
  return (WordBits)code & ((1u << kBits) - 1u);
}

// kSigned: seven bits and a sign; else eight.
template <bool kSigned>
void decode_block(const uint8_t* codes, const float* scales, float* to, int64_t count) {
  for (int64_t block = 0; block < count; block += kCodeBlock) {
    const float scale = scales[block / kCodeBlock];
    for (int64_t i = block; i < block + kCodeBlock; i += kLanes<float>) {
      const WordBits code = load_bytes(codes + i);
      Vec<float> value;
      if constexpr (kSigned) {
        value = (Vec<float>)((WordBits)decode_vector<7>(code & 0x7fu) | (code & 0x80u) << 24);
      } else {
        value = decode_vector<8>(code);
      }
      *reinterpret_cast<typename VecOf<float>::unaligned*>(to + i) = value * scale;
    }
  }
}

// A NaN or an infinity becomes the scale, and nothing of the block stays finite.
template <bool kSigned, class Rounding>
void encode_block(const float* from, uint8_t* codes, float* scales, int64_t count,
                  Rounding&& rounding) {
  for (int64_t block = 0; block < count; block += kCodeBlock) {
    WordBits largest{};  // magnitudes compare like their bits, NaN above infinity
    for (int64_t i = block; i < block + kCodeBlock; i += kLanes<float>) {
      const WordBits magnitude = (WordBits)load<float>(from + i) & 0x7fffffffu;
      largest = magnitude > largest ? magnitude : largest;
    }
    uint32_t top = 0;
    for (int lane = 0; lane < kLanes<float>; ++lane) top = std::max(top, largest[lane]);
    const float scale = std::bit_cast<float>(top);
    scales[block / kCodeBlock] = scale;
    const Vec<float> divisor = broadcast<float>(scale == 0.0f ? 1.0f : scale);
    for (int64_t i = block; i < block + kCodeBlock; i += kLanes<float>) {
      const WordBits bits = (WordBits)load<float>(from + i);
      const Vec<float> x = (Vec<float>)(bits & 0x7fffffffu) / divisor;
      WordBits code;
      if constexpr (kSigned) {
        code = encode_vector<7>(x, rounding(i)) | (bits >> 31) << 7;
      } else {
        code = encode_vector<8>(x, rounding(i));
      }
      store_bytes(codes + i, code);
    }
  }
}

struct NearestCode {
  ONEPASS_INLINE Vec<float> operator()(int64_t) const { return Vec<float>{} + 0.5f; }
};

struct StochasticCode {
  const NoiseTile& noise;
  ONEPASS_INLINE Vec<float> operator()(int64_t i) const {
    const SignedWords bits = (SignedWords)noise.bits<NoiseHalf::kHigh>(i);
    return __builtin_convertvector(bits, Vec<float>) * 0x1p-16f;
  }
};

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
