// The operands of AdamW with the usual betas, converted between memory and registers: in bfloat16,
// where tiles would cost twice as many instructions (with 18 bytes per parameter the limit is
// instructions, not memory; `onepass bench optimizer`), and with moments in 8 bits. Other
// algorithms and dtypes use tiles.
#pragma once

#include "cpu/optimizer/tiles.h"
#include "cpu/optimizer/update.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

ONEPASS_INLINE WordBits load_words(const void* from) {
  return *static_cast<const WordBitsUnaligned*>(from);
}
ONEPASS_INLINE void store_words(void* to, WordBits words) {
  *static_cast<WordBitsUnaligned*>(to) = words;
}

// Two vectors' worth of consecutive elements, the even ones and the odd ones.
struct Pair {
  Vec<float> even;
  Vec<float> odd;

  ONEPASS_INLINE explicit Pair(const BFloat16* from) {
    const WordBits words = load_words(from);
    even = (Vec<float>)(words << 16);
    odd = (Vec<float>)(words & 0xffff0000u);
  }
  // Rounded after adding these bits. A NaN that arithmetic made of bfloat16 numbers is safe from
  // them, the half of it that is cut off being zero; others (kAnyNan) are left as they are.
  template <bool kAnyNan = false>
  ONEPASS_INLINE void store(BFloat16* to, WordBits even_bits, WordBits odd_bits) const {
    const auto sum = [](Vec<float> v, WordBits bits) {
      return kAnyNan ? round_bits(v, bits) : (WordBits)v + bits;
    };
    store_words(to, blend_halves(sum(even, even_bits) >> 16, sum(odd, odd_bits)));
  }
};

template <Master kMaster, bool kWideGradient, MomentType kMomentType>
struct FusedOperands {
  static constexpr bool kNoisy =
      kMaster == Master::kStochastic || kMomentType == MomentType::kBFloat16Stochastic;

  BFloat16* param;
  void* master;
  const void* gradient;
  void* moments[2];
  WordBits noise_start;  // of the first vector's lanes
  uint32_t noise_stride;

  template <class Count>
  ONEPASS_INLINE Vec<float> load_param(int64_t i, Count lanes) const {
    if constexpr (kMaster == Master::kFloat32) {
      return load<float>(static_cast<const float*>(master) + i, lanes);
    } else if constexpr (kMaster == Master::kRemainder) {
      const WordBits high = widen_bits(load_half_bits(&param[i].bits, lanes)) << 16;
      const HalfBits low = load_half_bits(static_cast<const uint16_t*>(master) + i, lanes);
      return (Vec<float>)(high + widen_signed_bits(low));
    } else {
      return load<float>(param + i, lanes);
    }
  }

  template <class Count>
  ONEPASS_INLINE Vec<float> load_gradient(int64_t i, Count lanes) const {
    if constexpr (kWideGradient) {
      return load<float>(static_cast<const float*>(gradient) + i, lanes);
    } else {
      return load<float>(static_cast<const BFloat16*>(gradient) + i, lanes);
    }
  }

  template <int kWhich, class Count>
  ONEPASS_INLINE Vec<float> load_moment(int64_t i, Count lanes) const {
    if constexpr (kMomentType == MomentType::kFloat32) {
      return load<float>(static_cast<const float*>(moments[kWhich]) + i, lanes);
    } else {
      return load<float>(static_cast<const BFloat16*>(moments[kWhich]) + i, lanes);
    }
  }

  template <class Count>
  ONEPASS_INLINE void store_param(int64_t i, Vec<float> v, Count lanes) const {
    if constexpr (kMaster == Master::kFloat32) {
      store<float>(static_cast<float*>(master) + i, v, lanes);
      store_rounded(param + i, v, TiesAway{}(i), lanes);
    } else if constexpr (kMaster == Master::kRemainder) {
      store_split(v, param + i, static_cast<uint16_t*>(master) + i, lanes);
    } else if constexpr (kMaster == Master::kStochastic) {
      store_rounded(param + i, v, noise(i) & 0xffffu, lanes);
    } else {
      store_rounded(param + i, v, ties_to_even(v), lanes);
    }
  }

  template <int kWhich, class Count>
  ONEPASS_INLINE void store_moment(int64_t i, Vec<float> v, Count lanes) const {
    if constexpr (kMomentType == MomentType::kFloat32) {
      store<float>(static_cast<float*>(moments[kWhich]) + i, v, lanes);
    } else {
      BFloat16* const to = static_cast<BFloat16*>(moments[kWhich]) + i;
      if constexpr (kMomentType == MomentType::kBFloat16Stochastic && kWhich == 1) {
        store_rounded(to, v, noise(i) >> 16, lanes);
      } else {
        store_rounded(to, v, ties_to_even(v), lanes);
      }
    }
  }

 private:
  ONEPASS_INLINE WordBits noise(int64_t i) const {
    return mix_bits(noise_start + static_cast<uint32_t>(i) * noise_stride);
  }
};

// Where every operand has 16 bits: two vectors at a time, the even elements and the odd ones, for
// which a shift or a mask widens and a blend narrows, without a shuffle.
template <Master kMaster, MomentType kMomentType>
int64_t adam_pairs(const FusedOperands<kMaster, false, kMomentType> on, int64_t count,
                   const Noise& noise, const StepScalars& s, float gradient_factor) {
  constexpr int64_t kPair = 2 * kLanes<float>;
  const AdamStep<float, false, false, true> step(s, gradient_factor);
  WordBits even_noise = noise_lanes(noise, 0, 2);
  WordBits odd_noise = noise_lanes(noise, 1, 2);
  int64_t i = 0;
  for (; i + kPair <= count; i += kPair) {
    Pair p(on.param + i);
    if constexpr (kMaster == Master::kRemainder) {
      const WordBits low = load_words(static_cast<const uint16_t*>(on.master) + i);
      p.even = (Vec<float>)((WordBits)p.even + (WordBits)((SignedWords)(low << 16) >> 16));
      p.odd = (Vec<float>)((WordBits)p.odd + (WordBits)((SignedWords)low >> 16));
    }
    const Pair g(static_cast<const BFloat16*>(on.gradient) + i);
    BFloat16* const first = static_cast<BFloat16*>(on.moments[0]) + i;
    BFloat16* const second = static_cast<BFloat16*>(on.moments[1]) + i;
    Pair m(first), v(second);
    Vec<float> top;
    step(p.even, g.even, m.even, v.even, top);
    step(p.odd, g.odd, m.odd, v.odd, top);
    WordBits even_bits, odd_bits;
    if constexpr (on.kNoisy) {
      constexpr bool kLow = kMaster == Master::kStochastic;
      even_bits = kLow ? mix_bits(even_noise) : mix_high_bits(even_noise);
      odd_bits = kLow ? mix_bits(odd_noise) : mix_high_bits(odd_noise);
      even_noise += static_cast<uint32_t>(kPair) * noise.stride;
      odd_noise += static_cast<uint32_t>(kPair) * noise.stride;
    }
    m.store(first, ties_to_even(m.even), ties_to_even(m.odd));
    if constexpr (kMomentType == MomentType::kBFloat16Stochastic) {
      v.store(second, even_bits >> 16, odd_bits >> 16);
    } else {
      v.store(second, ties_to_even(v.even), ties_to_even(v.odd));
    }
    if constexpr (kMaster == Master::kStochastic) {
      p.store(on.param + i, even_bits & 0xffffu, odd_bits & 0xffffu);
    } else if constexpr (kMaster == Master::kRemainder) {
      p.template store<true>(on.param + i, TiesAway{}(0), TiesAway{}(0));
      store_words(static_cast<uint16_t*>(on.master) + i,
                  blend_halves((WordBits)p.even, (WordBits)p.odd << 16));
    } else {
      p.store(on.param + i, ties_to_even(p.even), ties_to_even(p.odd));
    }
  }
  return i;
}

// AdamW with the usual betas on a block of moments in 8 bits: they are decoded in registers, and
// kept in float32 until the block's largest is known.
struct CodedOperands : Operands<float> {
  const uint8_t* codes[2];
  Vec<float> scales[2];
  const MomentCodes& tables;
  Largest largest[2];

  template <int kWhich, class Count>
  ONEPASS_INLINE Vec<float> load_moment(int64_t i, Count) const {
    return decode_bytes<kWhich == 0>(tables, codes[kWhich] + i) * scales[kWhich];
  }
  template <int kWhich, class Count>
  ONEPASS_INLINE void store_moment(int64_t i, Vec<float> v, Count) {
    largest[kWhich].add(v);
    store<float>(moments[kWhich] + i, v);
  }
};

// Calls body.operator()<kMaster, kWideGradient, kMomentType>() if the tensor is one of the fused
// kinds; returns false if it is not.
template <class Body>
bool visit_fused(const StepTensor& t, Body&& body) {
  if (t.param_dtype != DType::kBFloat16) return false;
  const bool wide = t.gradient_dtype == DType::kFloat32;
  if (!wide && t.gradient_dtype != DType::kBFloat16) return false;
  const auto with_moments = [&]<MomentType kMomentType>() {
    visit_bool(wide, [&]<bool kWideGradient>() {
      switch (t.master_kind) {
        case Master::kNone:
          body.template operator()<Master::kNone, kWideGradient, kMomentType>();
          break;
        case Master::kFloat32:
          body.template operator()<Master::kFloat32, kWideGradient, kMomentType>();
          break;
        case Master::kRemainder:
          body.template operator()<Master::kRemainder, kWideGradient, kMomentType>();
          break;
        case Master::kStochastic:
          body.template operator()<Master::kStochastic, kWideGradient, kMomentType>();
      }
    });
    return true;
  };
  switch (t.moment_type) {
    case MomentType::kFloat32:
      return with_moments.template operator()<MomentType::kFloat32>();
    case MomentType::kBFloat16:
      return with_moments.template operator()<MomentType::kBFloat16>();
    case MomentType::kBFloat16Stochastic:
      return with_moments.template operator()<MomentType::kBFloat16Stochastic>();
    default:
      return false;
  }
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
