// The elements of a piece that a warp takes together, and their conversion to float32 and back. The
// bits of all operands of a row are loaded first; they are converted later, so that no load waits
// for another.
#pragma once

#include "core/code8.h"
#include "core/noise.h"
#include "cuda/vec.cuh"
#include "ops/optimizer.h"

namespace onepass::cuda {

// kElements per lane. In whole rows they are neighbours and are loaded 16 bytes at a time; else
// they lie one warp apart. In both cases neighbouring lanes touch neighbouring memory. The choice
// is a branch of the whole warp, around loads and stores only.
template <int kElements>
struct Row {
  static constexpr int kLength = kLanes * kElements;

  int64_t first;  // element of the tensor
  int count;      // kLength if it is whole
  int lane;
  bool whole;

  __device__ __forceinline__ int of(int e) const {
    return whole ? lane * kElements + e : e * kLanes + lane;
  }
  __device__ __forceinline__ bool has(int e) const { return of(e) < count; }
};

// A row of 8-bit codes is one block with a common scale.
inline constexpr int kRowElements = kLanes * kPack;
static_assert(kRowElements == kCodeBlock && kPieceElements % kRowElements == 0);

// Calls body(row) for the warp's rows of a piece. The last one may be incomplete; in unaligned
// tensors none counts as whole.
template <int kElements, class Body>
__device__ __forceinline__ void for_each_row(int64_t first, int64_t numel, bool aligned, int warps,
                                             Body&& body) {
  constexpr int kLength = Row<kElements>::kLength;
  const int64_t left = numel - first;
  const int count = static_cast<int>(left < kPieceElements ? left : kPieceElements);
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  ONEPASS_ROLL
  for (int at = warp * kLength; at < count; at += warps * kLength) {
    const int here = count - at < kLength ? count - at : kLength;
    body(Row<kElements>{first + at, here, lane, aligned && here == kLength});
  }
}

// ---- bits ---------------------------------------------------------------------------------------

// kPack elements of 1, 2 or 4 bytes as they lie in memory.
struct Bits {
  uint32_t word[kPack];
};

struct alignas(8) CodeWords {
  uint32_t word[2];
};

__device__ __forceinline__ void load_bits(const void* base, int bytes, const Row<kPack>& row,
                                          Bits& bits) {
  const char* const start = static_cast<const char*>(base) + row.first * bytes;
  if (row.whole) {
    const char* const from = start + row.lane * kPack * bytes;
    if (bytes == 1) {
      const CodeWords words = load_global(reinterpret_cast<const CodeWords*>(from));
      bits.word[0] = words.word[0], bits.word[1] = words.word[1];
      return;
    }
    const Words low = load_global(reinterpret_cast<const Words*>(from));
    ONEPASS_UNROLL
    for (int i = 0; i < 4; ++i) bits.word[i] = low.word[i];
    if (bytes == 4) {
      const Words high = load_global(reinterpret_cast<const Words*>(from) + 1);
      ONEPASS_UNROLL
      for (int i = 0; i < 4; ++i) bits.word[4 + i] = high.word[i];
    }
  } else {
    bits = {};
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      if (!row.has(e)) continue;
      if (bytes == 4) {
        bits.word[e] = load_global(reinterpret_cast<const uint32_t*>(start) + row.of(e));
      } else if (bytes == 2) {
        const uint32_t half = load_global(reinterpret_cast<const uint16_t*>(start) + row.of(e));
        bits.word[e / 2] |= half << e % 2 * 16;
      } else {
        const uint32_t code = load_global(reinterpret_cast<const uint8_t*>(start) + row.of(e));
        bits.word[e / 4] |= code << e % 4 * 8;
      }
    }
  }
}

__device__ __forceinline__ void store_bits(void* base, int bytes, const Row<kPack>& row,
                                           const Bits& bits) {
  char* const start = static_cast<char*>(base) + row.first * bytes;
  const auto& word = bits.word;
  if (row.whole) {
    char* const to = start + row.lane * kPack * bytes;
    if (bytes == 1) {
      store_global(reinterpret_cast<CodeWords*>(to), CodeWords{{word[0], word[1]}});
      return;
    }
    store_global(reinterpret_cast<Words*>(to), Words{{word[0], word[1], word[2], word[3]}});
    if (bytes == 4) {
      store_global(reinterpret_cast<Words*>(to) + 1, Words{{word[4], word[5], word[6], word[7]}});
    }
  } else {
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      if (!row.has(e)) continue;
      if (bytes == 4) {
        store_global(reinterpret_cast<uint32_t*>(start) + row.of(e), word[e]);
      } else if (bytes == 2) {
        store_global(reinterpret_cast<uint16_t*>(start) + row.of(e),
                     static_cast<uint16_t>(word[e / 2] >> e % 2 * 16));
      } else {
        store_global(reinterpret_cast<uint8_t*>(start) + row.of(e),
                     static_cast<uint8_t>(word[e / 4] >> e % 4 * 8));
      }
    }
  }
}

__device__ __forceinline__ uint32_t half_of(const Bits& bits, int e) {
  return e % 2 ? bits.word[e / 2] >> 16 : bits.word[e / 2] & 0xffffu;
}

__device__ __forceinline__ void widen_bits(const Bits& bits, DType dtype, float (&value)[kPack]) {
  visit_dtype_up_to_float32(dtype, [&]<class T>() {
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      if constexpr (__is_same(T, float)) {
        value[e] = std::bit_cast<float>(bits.word[e]);
      } else if constexpr (__is_same(T, BFloat16)) {
        value[e] = std::bit_cast<float>(half_of(bits, e) << 16);
      } else {
        value[e] = widen_half(static_cast<uint16_t>(half_of(bits, e)));
      }
    }
  });
}

// Rounds once, to nearest even.
__device__ __forceinline__ Bits narrow_bits(const float (&value)[kPack], DType dtype) {
  Bits bits;
  visit_dtype_up_to_float32(dtype, [&]<class T>() {
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      if constexpr (__is_same(T, float)) {
        bits.word[e] = std::bit_cast<uint32_t>(value[e]);
      } else if (e % 2 == 0) {
        bits.word[e / 2] = narrow_pair<T>(value[e], value[e + 1]);
      }
    }
  });
  return bits;
}

// ---- rounding to 16 bits after adding `share` / 65536 of a unit in the last place ---------------

inline constexpr uint32_t kTiesAway = 0x8000u;

// Infinities are kept; a NaN could wrap around, so it becomes the quiet NaN.
__device__ __forceinline__ uint32_t round_by(float v, uint32_t share, BFloat16) {
  const uint32_t word = std::bit_cast<uint32_t>(v);
  return v != v ? word >> 16 | 0x40u : (word + share) >> 16;
}

// float16 leaves 13 bits out; below 2^-14 its unit is 2^-24 throughout.
__device__ __forceinline__ uint32_t round_by(float v, uint32_t share, Float16) {
  const uint32_t word = std::bit_cast<uint32_t>(v);
  const uint32_t magnitude = word & 0x7fffffffu;
  uint32_t rounded = (magnitude + (share >> 3)) & ~0x1fffu;
  if (magnitude < 0x38800000u) {
    const float units = std::bit_cast<float>(magnitude) * 0x1p24f;  // below 1024
    const int whole = static_cast<int>(units + static_cast<float>(share) * 0x1p-16f);
    rounded = std::bit_cast<uint32_t>(static_cast<float>(whole) * 0x1p-24f);
  } else if (magnitude >= 0x7f800000u) {
    rounded = magnitude;
  }
  const float exact = std::bit_cast<float>(rounded | (word & 0x80000000u));
  return narrow_pair<Float16>(exact, 0.0f) & 0xffffu;
}

// share_of(e): the share of element e.
template <class ShareOf>
__device__ __forceinline__ Bits round_bits(const float (&value)[kPack], DType dtype,
                                           ShareOf&& share_of) {
  Bits bits{};
  const auto round = [&]<class T>() {
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      bits.word[e / 2] |= round_by(value[e], share_of(e), T{}) << e % 2 * 16;
    }
  };
  if (dtype == DType::kBFloat16) {
    round.template operator()<BFloat16>();
  } else {
    round.template operator()<Float16>();
  }
  return bits;
}

// ---- a float32 as a bfloat16 and a 16-bit remainder ---------------------------------------------

// float32 bits = parameter's bits * 65536 + remainder, which is signed.
__device__ __forceinline__ void join(const Bits& param, const Bits& remainder,
                                     float (&value)[kPack]) {
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    const uint32_t low = half_of(remainder, e);
    value[e] = std::bit_cast<float>((half_of(param, e) << 16) + (low ^ 0x8000u) - 0x8000u);
  }
}

// The parameter is rounded to nearest, ties away; the remainder is negative where it was rounded
// up. A NaN has remainder 0, so that join() gives the same NaN.
__device__ __forceinline__ void split(const float (&value)[kPack], Bits& param, Bits& remainder) {
  param = remainder = {};
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    const uint32_t bits = std::bit_cast<uint32_t>(value[e]);
    const uint32_t word = value[e] != value[e] ? (bits & 0xffff0000u) | 0x400000u : bits;
    param.word[e / 2] |= (word + kTiesAway) >> 16 << e % 2 * 16;
    remainder.word[e / 2] |= (word & 0xffffu) << e % 2 * 16;
  }
}

// ---- codes of 8 bits (core/code8.h) -------------------------------------------------------------

// kSigned: seven bits and a sign; else eight.
template <bool kSigned>
__device__ __forceinline__ void decode(const Bits& bits, float scale, float (&value)[kPack]) {
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    const uint32_t code = bits.word[e / 4] >> e % 4 * 8 & 0xffu;
    if constexpr (kSigned) {
      const uint32_t magnitude = std::bit_cast<uint32_t>(decode8<7>(code & 0x7fu));
      value[e] = std::bit_cast<float>(magnitude | (code & 0x80u) << 24) * scale;
    } else {
      value[e] = decode8<8>(code) * scale;
    }
  }
}

// NaN has code 0, as on the CPU, because encode8 leaves the range for it.
template <int kBits>
__device__ __forceinline__ uint32_t encode_or_nan(float x, float rounding) {
  return x != x ? 0u : encode8<kBits>(x, rounding);
}

// Encodes the row of a whole warp. A NaN or an infinity becomes the scale, so no decoded value of
// the block is finite.
template <bool kSigned, class RoundingOf>
__device__ __forceinline__ Bits encode(const float (&value)[kPack], float& scale,
                                       RoundingOf&& rounding_of) {
  uint32_t largest = 0;  // magnitudes compare like their bits, NaN above infinity
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(value[e]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  ONEPASS_UNROLL
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, largest, lanes);
    largest = other > largest ? other : largest;
  }
  scale = std::bit_cast<float>(largest);
  const float inverse = inverse_scale(scale);
  Bits bits{};
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    const uint32_t word = std::bit_cast<uint32_t>(value[e]);
    const float x = std::bit_cast<float>(word & 0x7fffffffu) * inverse;
    const uint32_t code = kSigned ? encode_or_nan<7>(x, rounding_of(e)) | word >> 31 << 7
                                  : encode_or_nan<8>(x, rounding_of(e));
    bits.word[e / 4] |= code << e % 4 * 8;
  }
  return bits;
}

// ---- single numbers -----------------------------------------------------------------------------

__device__ __forceinline__ void store_number(void* target, DType dtype, double value) {
  const float narrow = static_cast<float>(value);
  switch (dtype) {
    case DType::kFloat64:
      return store_global(static_cast<double*>(target), value);
    case DType::kFloat32:
      return store_global(static_cast<float*>(target), narrow);
    case DType::kBFloat16:
      return store_global(static_cast<BFloat16*>(target), narrow_to_bfloat16(narrow));
    default:
      return store_global(static_cast<Float16*>(target), narrow_to_float16(narrow));
  }
}

// ---- float64 ------------------------------------------------------------------------------------

inline constexpr int kWidePack = 2;

struct alignas(16) Doubles {
  double element[kWidePack];
};

__device__ __forceinline__ void load_wide(const void* base, const Row<kWidePack>& row,
                                          double (&value)[kWidePack]) {
  const double* const from = static_cast<const double*>(base) + row.first;
  if (row.whole) {
    const Doubles pair = load_global(reinterpret_cast<const Doubles*>(from) + row.lane);
    value[0] = pair.element[0], value[1] = pair.element[1];
  } else {
    ONEPASS_UNROLL
    for (int e = 0; e < kWidePack; ++e) value[e] = row.has(e) ? load_global(from + row.of(e)) : 0.0;
  }
}

__device__ __forceinline__ void store_wide(void* base, const Row<kWidePack>& row,
                                           const double (&value)[kWidePack]) {
  double* const to = static_cast<double*>(base) + row.first;
  if (row.whole) {
    store_global(reinterpret_cast<Doubles*>(to) + row.lane, Doubles{{value[0], value[1]}});
  } else {
    ONEPASS_UNROLL
    for (int e = 0; e < kWidePack; ++e) {
      if (row.has(e)) store_global(to + row.of(e), value[e]);
    }
  }
}

}  // namespace onepass::cuda
