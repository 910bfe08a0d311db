// Converts a block of a parameter, its gradient and its states to float32 and back. Operands that
// are float32 in memory are updated in place; all others go through a tile in L1, so that the
// arithmetic of a step (update.h) is written once for all dtypes.
#pragma once

#include <algorithm>
#include <cstring>

#include "core/code8.h"
#include "core/noise.h"
#include "cpu/vec.h"
#include "cpu/vec_bytes.h"
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

typedef uint32_t WordBitsUnaligned
    __attribute__((vector_size(kVectorBytes), aligned(2), may_alias));

// The 16 of 32 bits of noise that round one operand.
enum class NoiseHalf { kLow, kHigh };

// The inputs of mix_bits for a vector of elements, every one or every second.
ONEPASS_INLINE WordBits noise_lanes(const Noise& noise, uint32_t element, uint32_t step = 1) {
  WordBits word;
  for (int lane = 0; lane < kLanes<float>; ++lane) {
    word[lane] = noise.start + (element + step * static_cast<uint32_t>(lane)) * noise.stride;
  }
  return word;
}

struct alignas(64) NoiseTile {
  uint32_t words[kTile];

  // Of the elements [element, element + count) of a stretch.
  void fill(const Noise& noise, uint32_t element, int64_t count) {
    WordBits word = noise_lanes(noise, element);
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

// Infinities are kept. A NaN could wrap around, so nothing is added to it: NaNs that come from
// arithmetic have a bit in the half that is kept.
ONEPASS_INLINE WordBits round_bits(Vec<float> v, WordBits bits) {
  return (WordBits)v + (bits & (WordBits)(v == v));
}

ONEPASS_INLINE HalfBits round_by(Vec<float> v, WordBits bits, BFloat16) {
  return narrow_bits(round_bits(v, bits) >> 16);
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

template <class T, class Count>
ONEPASS_INLINE void store_rounded(T* to, Vec<float> v, WordBits bits, Count lanes) {
  store_half_bits(&to->bits, round_by(v, bits, T{}), lanes);
}

// Rounds to nearest, ties to even. store<float> does too, but flushes subnormals to zero on some
// levels, and a small parameter would stay at zero.
ONEPASS_INLINE WordBits ties_to_even(Vec<float> v) { return 0x7fffu + (((WordBits)v >> 16) & 1u); }

// The parameter is rounded to nearest, ties away; the remainder is the difference, negative if the
// parameter was rounded up.
template <class Count>
ONEPASS_INLINE void store_split(Vec<float> v, BFloat16* param, uint16_t* remainder, Count lanes) {
  store_rounded(param, v, TiesAway{}(0), lanes);
  store_half_bits(remainder, narrow_bits((WordBits)v & 0xffffu), lanes);
}

// ---- blocks of one dtype ------------------------------------------------------------------------

template <class A, class T>
void widen_block(const T* from, A* to, int64_t count) {
  for_each_vector<A>(
      0, count, [&](int64_t i, auto lanes) { store<A>(to + i, load<A>(from + i, lanes), lanes); });
}

// To nearest, ties to even.
inline void narrow_block(const float* from, BFloat16* to, int64_t count) {
  for_each_vector<float>(0, count, [&](int64_t i, auto lanes) {
    const Vec<float> v = load<float>(from + i, lanes);
    store_rounded(to + i, v, ties_to_even(v), lanes);
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
    store_rounded(to + i, load<float>(from + i, lanes), rounding(i), lanes);
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

inline void split_block(const float* from, BFloat16* param, uint16_t* remainder, int64_t count) {
  for_each_vector<float>(0, count, [&](int64_t i, auto lanes) {
    store_split(load<float>(from + i, lanes), param + i, remainder + i, lanes);
  });
}

// ---- codes of 8 bits (core/code8.h), a vector at a time; count is a multiple of kCodeBlock ------

// Within an octave, value and code are linear in each other, and each has eight octaves at most:
// the slopes and intercepts of both directions lie in registers.
template <int kBits>
class Codes {
 public:
  static constexpr int kLast = kBits - 1;

  Codes() : Codes(Tables()) {}

  // The octave follows from the code's leading one, that is from its exponent as a number. That of
  // code 0 is code 1's, whose line goes through 0.
  ONEPASS_INLINE Vec<float> decode(WordBits code) const {
    const Vec<float> number = __builtin_convertvector((SignedWords)code, Vec<float>);
    constexpr uint32_t kOne = 0x3f800000;  // and numbers that are not negative compare as bits
    const WordBits least_one = (WordBits)number > kOne ? (WordBits)number : WordBits{} + kOne;
    const WordBits exponent = least_one >> 23;
    return fma<float>(number, value_slope_[exponent], value_intercept_[exponent]);
  }

  // As encode8 (where fma() is fused), but without its limits: values that are too large are not
  // clamped here, and a NaN becomes the least of all words.
  ONEPASS_INLINE SignedWords encode(Vec<float> x, Vec<float> rounding) const {
    const SignedWords third = (SignedWords)third_of_rest<126>((WordBits)x >> 23);
    const WordBits octave = (WordBits)(third > kLast ? SignedWords{} + kLast : third);
    const Vec<float> place = fma<float>(x, code_slope_[octave], code_intercept_[octave]);
    return __builtin_convertvector(place + rounding, SignedWords);
  }

 private:
  struct Tables {
    float value_slope[8] = {};
    float value_intercept[8] = {};
    float code_slope[8] = {};
    float code_intercept[8] = {};

    Tables() {
      for (int octave = 0; octave <= kLast; ++octave) {
        const int slot = (127 + kLast - octave) % 8;  // of the code's exponent
        value_slope[slot] = value_line<kBits>(octave).slope;
        value_intercept[slot] = value_line<kBits>(octave).intercept;
        code_slope[octave] = code_line<kBits>(octave).slope;
        code_intercept[octave] = code_line<kBits>(octave).intercept;
      }
    }
  };

  explicit Codes(const Tables& tables)
      : value_slope_(tables.value_slope),
        value_intercept_(tables.value_intercept),
        code_slope_(tables.code_slope),
        code_intercept_(tables.code_intercept) {}

  EightNumbers value_slope_;
  EightNumbers value_intercept_;
  EightNumbers code_slope_;
  EightNumbers code_intercept_;
};

// kSigned: seven bits and a sign, of first moments; else eight, of those that are never negative.
struct MomentCodes {
  Codes<7> with_sign;
  Codes<8> without;

  template <bool kSigned>
  ONEPASS_INLINE const auto& of() const {
    if constexpr (kSigned) {
      return with_sign;
    } else {
      return without;
    }
  }
};

// The values of a vector of codes, without the scale.
template <bool kSigned>
ONEPASS_INLINE Vec<float> decode_bytes(const MomentCodes& tables, const uint8_t* codes) {
  const WordBits code = load_bytes<kSigned>(codes);
  if constexpr (!kSigned) return tables.without.decode(code);
  return (Vec<float>)((WordBits)tables.with_sign.decode(code & 0x7fu) | (code & 0x80000000u));
}

template <bool kSigned>
void decode_blocks(const MomentCodes& tables, const uint8_t* codes, const float* scales, float* to,
                   int64_t count) {
  for (int64_t block = 0; block < count; block += kCodeBlock) {
    const float scale = scales[block / kCodeBlock];
    for (int64_t i = block; i < block + kCodeBlock; i += kLanes<float>) {
      store<float>(to + i, decode_bytes<kSigned>(tables, codes + i) * scale);
    }
  }
}

// The largest magnitude of a block. Magnitudes compare like their bits, NaN above infinity.
class Largest {
 public:
  ONEPASS_INLINE void add(Vec<float> v) {
    const SignedWords magnitude = (SignedWords)v & 0x7fffffff;
    bits_ = magnitude > bits_ ? magnitude : bits_;
  }

  float value() const {
    int32_t top = 0;
    for (int lane = 0; lane < kLanes<float>; ++lane) top = std::max(top, bits_[lane]);
    return std::bit_cast<float>(top);
  }

 private:
  SignedWords bits_{};
};

// The rounding of codes; called once per vector, in order.
struct NearestCode {
  ONEPASS_INLINE Vec<float> next() { return broadcast<float>(kNearestCode); }
};

class StochasticCode {
 public:
  // From this element of a stretch on.
  StochasticCode(const Noise& noise, uint32_t element)
      : word_(noise_lanes(noise, element)), step_(noise.stride * kLanes<float>) {}

  ONEPASS_INLINE Vec<float> next() {
    const SignedWords bits = (SignedWords)(mix_high_bits(word_) >> 16);
    word_ += step_;
    return fma<float>(__builtin_convertvector(bits, Vec<float>), broadcast<float>(kCodeNoise),
                      broadcast<float>(kCodeSlack));
  }

 private:
  WordBits word_;
  uint32_t step_;
};

// The codes of one block, whose scale is its largest magnitude. If that is NaN or infinity, no
// element of the block stays finite.
template <bool kSigned, class Rounding>
ONEPASS_INLINE void encode_block(const MomentCodes& tables, const float* from, uint8_t* codes,
                                 float scale, Rounding& rounding) {
  const auto table = tables.of<kSigned>();
  const Vec<float> inverse = broadcast<float>(inverse_scale(scale));
  for (int64_t i = 0; i < kCodeBlock; i += kVectorBytes) {
    SignedWords code[4], about[4];  // of each value its sign, or else whether it is one at all
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const WordBits bits = (WordBits)load<float>(from + i + k * kLanes<float>);
      const Vec<float> x = (Vec<float>)(bits & 0x7fffffffu) * inverse;
      code[k] = table.encode(x, rounding.next());
      about[k] = kSigned ? (SignedWords)bits : (SignedWords)(x > 0.0f);
    }
    const Bytes number = saturate_to_bytes<kSigned>(code);
    const Bytes fact = saturate_to_bytes<true>(about);
    const Bytes least = fact & 1;
    *reinterpret_cast<BytesUnaligned*>(codes + i) =
        kSigned ? (number & 0x7f) | (fact & 0x80) : (number > least ? number : least);
  }
}

template <bool kSigned, class Rounding>
void encode_blocks(const MomentCodes& tables, const float* from, uint8_t* codes, float* scales,
                   int64_t count, Rounding rounding) {
  for (int64_t block = 0; block < count; block += kCodeBlock) {
    Largest largest;
    for (int64_t i = 0; i < kCodeBlock; i += kLanes<float>) {
      largest.add(load<float>(from + block + i));
    }
    const float scale = largest.value();
    scales[block / kCodeBlock] = scale;
    encode_block<kSigned>(tables, from + block, codes + block, scale, rounding);
  }
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
