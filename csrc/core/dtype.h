// Element types of both back ends, and their exact scalar conversions. The 16-bit types are plain
// bit containers: arithmetic happens in float32 after widening, and every result is rounded once.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#ifdef __CUDACC__
#define ONEPASS_HOST_DEVICE __host__ __device__
#else
#define ONEPASS_HOST_DEVICE
#endif

namespace onepass {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16, kFloat64 };

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

ONEPASS_HOST_DEVICE constexpr int64_t size_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

constexpr const char* name_of(DType dtype) {
  constexpr const char* names[] = {"float32", "bfloat16", "float16", "float64"};
  return names[static_cast<int>(dtype)];
}

// The type in which elements of a type are summed.
template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

ONEPASS_HOST_DEVICE constexpr float widen(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

// Adding 0x7fff plus the lowest kept bit carries into the kept half exactly when the dropped half
// is above one half, or equal to it with an odd kept half: round to nearest, ties to even. A NaN
// could carry into infinity, so it is made a quiet NaN instead.
ONEPASS_HOST_DEVICE constexpr BFloat16 narrow_to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  }
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

ONEPASS_HOST_DEVICE constexpr float widen(Float16 value) {
#ifdef __CUDA_ARCH__
  if (!std::is_constant_evaluated()) {  // one instruction, without branches that loads wait for
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
  }
#endif
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const uint32_t mantissa = value.bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in float32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  const uint32_t wide = exponent == 31 ? 0xffu : exponent + 112u;
  const uint32_t quiet = exponent == 31 && mantissa != 0 ? 0x400000u : 0u;
  return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13) | quiet);
}

ONEPASS_HOST_DEVICE constexpr Float16 narrow_to_float16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return {static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
  }
  if (magnitude >= 0x477ff000u) {  // 65520 and above rounds to infinity
    return {static_cast<uint16_t>(sign | 0x7c00u)};
  }
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the result is subnormal: adding 0.5 aligns the 2^-24 grid with the float's ulp,
    // and the addition itself rounds to nearest even.
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(aligned) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | (rounded >> 13))};
}

// For code over any element type up to float32.
ONEPASS_HOST_DEVICE constexpr float widen(float value) { return value; }

template <class T>
ONEPASS_HOST_DEVICE constexpr T narrow(float value) {
  if constexpr (__is_same(T, BFloat16)) {
    return narrow_to_bfloat16(value);
  } else if constexpr (__is_same(T, Float16)) {
    return narrow_to_float16(value);
  } else {
    static_assert(__is_same(T, float));
    return value;
  }
}

}  // namespace onepass
