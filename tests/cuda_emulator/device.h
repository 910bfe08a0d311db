// The emulator's side of csrc/cuda/ptx.cuh: the same functions, with the fragment layouts of the
// PTX ISA. They are compiled with the sanitizers, because a kernel's reads and writes through them
// are accesses of the calling thread.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "emulator.h"

namespace onepass::cuda {

// ---- matrix multiply-accumulate -----------------------------------------------------------------

namespace detail {

// An access of several bytes must begin at a multiple of their number.
template <class T>
void check_alignment(const T* address, const char* what) {
  if (reinterpret_cast<uintptr_t>(address) % alignof(T) != 0)
    emulator::fail_misaligned(what, sizeof(T));
}

// Bytes read from global memory must not be a guard band's.
template <class T>
void check_inside(const T* address, const T& value, const char* what) {
  const auto* const bytes = reinterpret_cast<const unsigned char*>(&value);
  if (bytes[0] != emulator::kPoison && bytes[sizeof(T) - 1] != emulator::kPoison) return;
  emulator::check_beside(address, sizeof(T), what);
}

inline constexpr unsigned kAllLanes = 0xffffffffu;

template <class T>
float element(uint32_t pair, int which) {
  return widen(T{static_cast<uint16_t>(which ? pair >> 16 : pair)});
}

inline float tf32(uint32_t bits) { return std::bit_cast<float>(bits & 0xffffe000u); }

}  // namespace detail

// The registers of a lane.
struct Fragments {
  uint32_t a[4];
  uint32_t b[2];
};
struct AddedFragments : Fragments {
  float d[4];
};

namespace detail {

// Rounds to float32, towards zero.
inline float truncated(double sum) {
  const auto nearest = static_cast<float>(sum);
  const bool beyond = std::fabs(static_cast<double>(nearest)) > std::fabs(sum);
  if (!beyond || std::isinf(nearest)) return nearest;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(nearest) - 1);
}

// Vectors of eight columns.
using Floats = float __attribute__((vector_size(32)));
using Doubles = double __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(32)));
using Unsigned = uint32_t __attribute__((vector_size(32)));
using Bits = uint64_t __attribute__((vector_size(64)));

// Factors of sixteen products, and their exponents.
struct Left {
  alignas(Floats) float value[16];
  alignas(Ints) int32_t exponent[16];
};
struct Right {
  Floats value[16];
  Ints exponent[16];
};

// The exponents of factors; a zero has none. `most` becomes the maximum of itself and the largest.
inline void find_exponents(const Floats& factors, Ints& exponents, Ints& most) {
  constexpr int kNone = -1000;
  exponents = (reinterpret_cast<Ints>(factors) >> 23 & 0xff) - 127;
  most = exponents > most ? exponents : most;
  exponents = factors == Floats{} ? kNone - Ints{} : exponents;
}

// d += sum of a[k] * b[k], in order, rounded to nearest.
inline void add_rounded(Floats& d, const Left& a, const Right& b) {
  Floats sum{};
  for (int k = 0; k < 16; ++k) sum += a.value[k] * b.value[k];
  d += sum;
}

// Adds kDepth products from `first` as tensor cores do. Products are exact, and their exponent is
// the sum of their factors' exponents. Every addend is truncated, towards zero, kExtra bits below
// the last bit that float32 has at the largest exponent (or at kLeast, if that is larger). The rest
// is added exactly and truncated to float32. So found M. Fasi, N. Higham, M. Mikaitis and S.
// Pranesh (Numerical behavior of NVIDIA tensor cores, 2021): eight products at once and one extra
// bit on the A100. For the H100 later work has sixteen and two. `holds` is cleared for columns
// whose sums may overflow or are not finite: their results are not valid.
constexpr int kLeast = -100, kMost = 126;
template <int kDepth, int kExtra>
void add_truncated(Floats& d, const Left& a, const Right& b, int first, Ints& holds) {
  Ints largest = (reinterpret_cast<Ints>(d) >> 23 & 0xff) - 127;
  largest = largest > kLeast ? largest : kLeast - Ints{};
  for (int k = first; k < first + kDepth; ++k) {
    const Ints of_product = b.exponent[k] + a.exponent[k];
    largest = of_product > largest ? of_product : largest;
  }
  holds &= largest <= kMost;
  largest = largest <= kMost ? largest : kMost - Ints{};
  const Ints unit = largest - 23 - kExtra;
  const auto scale = reinterpret_cast<Floats>((127 - unit) << 23);
  const Ints of_d = __builtin_convertvector(d * scale, Ints);  // towards zero, as below
  Doubles sum = __builtin_convertvector(of_d, Doubles);
  constexpr int kChain = 8;  // products that fit 32 bits: each is less than 2 ** 27 units
  for (int begin = first; begin < first + kDepth; begin += kChain) {
    Unsigned units{};  // they wrap around where a sum is not finite
    for (int k = begin; k < begin + kChain; ++k) {
      const Ints of_product = __builtin_convertvector(a.value[k] * b.value[k] * scale, Ints);
      units += reinterpret_cast<Unsigned>(of_product);
    }
    sum += __builtin_convertvector(reinterpret_cast<Ints>(units), Doubles);
  }
  constexpr uint64_t kBitsOfFloat = ~((uint64_t{1} << (52 - 23)) - 1);
  const auto cut = reinterpret_cast<Doubles>(reinterpret_cast<Bits>(sum) & kBitsOfFloat);
  d = __builtin_convertvector(cut, Floats) * reinterpret_cast<Floats>((127 + unit) << 23);
}

}  // namespace detail

// Register r of a holds rows g (+ 8 for odd r), columns 2t, 2t + 1 (+ 8 for r >= 2); register r of
// b rows 2t, 2t + 1 (+ 8 for r = 1), column g; d[r] row g (+ 8 for r >= 2), column 2t + r % 2.
template <class T>
void multiply_16x8x16(emulator::Exchange& all) {
  detail::Left a[16];
  detail::Right b;
  detail::Floats d[16];
  for (int lane = 0; lane < emulator::kWarpSize; ++lane) {
    AddedFragments of_lane;
    all.get(lane, &of_lane);
    const int g = lane / 4, t = lane % 4;
    for (int which = 0; which < 2; ++which) {
      for (int r = 0; r < 4; ++r) {
        a[g + r % 2 * 8].value[2 * t + which + r / 2 * 8] = detail::element<T>(of_lane.a[r], which);
      }
      for (int r = 0; r < 2; ++r) {
        b.value[2 * t + which + r * 8][g] = detail::element<T>(of_lane.b[r], which);
        d[g + r * 8][2 * t + which] = of_lane.d[2 * r + which];
      }
    }
  }
  const int64_t at_once = emulator::truncates();
  bool are_finite = true;  // the factors
  if (at_once > 0) {
    detail::Ints most{};
    for (int k = 0; k < 16; ++k) detail::find_exponents(b.value[k], b.exponent[k], most);
    for (detail::Left& row : a) {
      for (int k = 0; k < 16; k += 8) {
        detail::find_exponents(*reinterpret_cast<detail::Floats*>(row.value + k),
                               *reinterpret_cast<detail::Ints*>(row.exponent + k), most);
      }
    }
    for (int j = 0; j < 8; ++j) are_finite &= most[j] < 128;
  }
  for (int i = 0; i < 16; ++i) {
    detail::Floats sum = d[i];
    detail::Ints holds = detail::Ints{} == 0;
    if (at_once == 16) {
      detail::add_truncated<16, 2>(sum, a[i], b, 0, holds);
    } else if (at_once == 8) {
      detail::add_truncated<8, 1>(sum, a[i], b, 0, holds);
      detail::add_truncated<8, 1>(sum, a[i], b, 8, holds);
    } else {
      holds = detail::Ints{};
    }
    bool all_hold = are_finite;
    for (int j = 0; j < 8; ++j) all_hold &= holds[j] != 0;
    if (!all_hold) {
      detail::Floats rounded = d[i];
      detail::add_rounded(rounded, a[i], b);
      for (int j = 0; j < 8; ++j) {
        if (holds[j] == 0 || !std::isfinite(rounded[j])) sum[j] = rounded[j];
      }
    }
    d[i] = sum;
  }
  for (int lane = 0; lane < emulator::kWarpSize; ++lane) {
    const int g = lane / 4, t = lane % 4;
    const float of_lane[4] = {d[g][2 * t], d[g][2 * t + 1], d[g + 8][2 * t], d[g + 8][2 * t + 1]};
    all.put(lane, of_lane);
  }
}

template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  constexpr const char* kName =
      __is_same(T, BFloat16) ? "mma.m16n8k16 of bf16" : "mma.m16n8k16 of f16";
  const AddedFragments mine = {{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, {d[0], d[1], d[2], d[3]}};
  const emulator::Exchange all(detail::kAllLanes, kName, &mine, sizeof(mine), multiply_16x8x16<T>);
  all.get(emulator::self().lane, &d);
}

// Register r of a holds row g (+ 8 for odd r), column t (+ 4 for r >= 2); register r of b row t (+
// 4 for r = 1), column g; d[r] as above. Each lane gets its sums over k = 0 to 3 and 4 to 7.
inline void multiply_16x8x8_tf32(emulator::Exchange& all) {
  using Row = double __attribute__((vector_size(64)));
  double a[16][8];
  Row b[8];
  for (int lane = 0; lane < emulator::kWarpSize; ++lane) {
    Fragments of_lane;
    all.get(lane, &of_lane);
    const int g = lane / 4, t = lane % 4;
    for (int r = 0; r < 4; ++r) {
      a[g + r % 2 * 8][t + r / 2 * 4] = static_cast<double>(detail::tf32(of_lane.a[r]));
    }
    for (int r = 0; r < 2; ++r) b[t + r * 4][g] = static_cast<double>(detail::tf32(of_lane.b[r]));
  }
  Row sums[16][2];
  for (int i = 0; i < 16; ++i) {
    for (int half = 0; half < 2; ++half) {
      const double* const row = a[i] + 4 * half;
      const Row* const rows = b + 4 * half;
      sums[i][half] = row[0] * rows[0] + row[1] * rows[1] + row[2] * rows[2] + row[3] * rows[3];
    }
  }
  for (int lane = 0; lane < emulator::kWarpSize; ++lane) {
    const int g = lane / 4, t = lane % 4;
    double of_lane[4][2];
    for (int r = 0; r < 4; ++r) {
      for (int half = 0; half < 2; ++half) {
        of_lane[r][half] = sums[g + r / 2 * 8][half][2 * t + r % 2];
      }
    }
    all.put(lane, of_lane);
  }
}

// Tensor cores add exact products and truncate to float32; the A100 four at a time. Doubles are
// exact enough for these sums.
inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const Fragments mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  const emulator::Exchange all(detail::kAllLanes, "mma.m16n8k8", &mine, sizeof(mine),
                               multiply_16x8x8_tf32);
  double sums[4][2];
  all.get(emulator::self().lane, &sums);
  for (int r = 0; r < 4; ++r) {
    for (const double sum : sums[r]) d[r] = detail::truncated(static_cast<double>(d[r]) + sum);
  }
}

namespace detail {

// Each is a separate instruction: lanes that meet must run the same one.
template <int kMatrices, bool kTranspose>
constexpr const char* ldmatrix_name() {
  if (kMatrices == 1) return kTranspose ? "ldmatrix.x1.trans" : "ldmatrix.x1";
  if (kMatrices == 2) return kTranspose ? "ldmatrix.x2.trans" : "ldmatrix.x2";
  return kTranspose ? "ldmatrix.x4.trans" : "ldmatrix.x4";
}

}  // namespace detail

template <int kMatrices, bool kTranspose>
void ldmatrix(uint32_t (&d)[kMatrices], const void* row) {
  struct alignas(16) Row {
    uint16_t element[8];
  };
  const int lane = emulator::self().lane;
  Row mine{};
  if (lane < 8 * kMatrices) {
    detail::check_alignment(static_cast<const Row*>(row), "ldmatrix");
    mine = *static_cast<const Row*>(row);
  }
  constexpr const char* kName = detail::ldmatrix_name<kMatrices, kTranspose>();
  const emulator::Exchange all(detail::kAllLanes, kName, &mine, sizeof(mine));
  for (int m = 0; m < kMatrices; ++m) {
    const auto at = [&](int r, int c) {
      Row of_matrix;
      all.get(8 * m + r, &of_matrix);
      return static_cast<uint32_t>(of_matrix.element[c]);
    };
    const int g = lane / 4, t = lane % 4;
    d[m] =
        kTranspose ? at(2 * t, g) | at(2 * t + 1, g) << 16 : at(g, 2 * t) | at(g, 2 * t + 1) << 16;
  }
}

inline uint32_t movmatrix_transposed(uint32_t pair) {
  const emulator::Exchange all(detail::kAllLanes, "movmatrix", &pair, sizeof(pair));
  const int g = emulator::self().lane / 4, t = emulator::self().lane % 4;
  uint32_t turned = 0;
  for (int which = 0; which < 2; ++which) {
    uint32_t of_row;
    all.get(4 * (2 * t + which) + g / 2, &of_row);
    turned |= (of_row >> g % 2 * 16 & 0xffffu) << which * 16;
  }
  return turned;
}

// ---- asynchronous copies ------------------------------------------------------------------------

namespace detail {

// The bytes of a copy, with its alignment, which the undefined-behaviour sanitizer checks.
template <int kBytes>
struct alignas(kBytes) CopiedBytes {
  unsigned char byte[kBytes];
};

// The target is poison from here to the wait that completes the copy. Hardware reads the source at
// any time between; here it is read at both ends, and must not have changed.
template <int kBytes>
void begin_copy(void* shared, const void* global, bool valid) {
  using Bytes = CopiedBytes<kBytes>;
  check_alignment(static_cast<const Bytes*>(shared), "cp.async to shared memory");
  const auto* const begin = static_cast<const char*>(shared);
  for (const auto& group : emulator::copies_in_flight()) {
    for (const emulator::Copy& copy : group) {
      const auto* const other = static_cast<const char*>(copy.shared);
      if (begin < other + copy.bytes && other < begin + kBytes) {
        emulator::fail("cp.async into a buffer whose last is in flight");
      }
    }
  }
  emulator::Copy copy = {shared, global, kBytes, valid, {}};
  if (valid) {
    emulator::count_read(global, kBytes);
    check_alignment(static_cast<const Bytes*>(global), "cp.async");
    const Bytes source = *static_cast<const Bytes*>(global);
    check_inside(static_cast<const Bytes*>(global), source, "cp.async");
    std::memcpy(copy.source, &source, kBytes);
  }
  Bytes poison;
  std::memset(&poison, emulator::kPoison, kBytes);
  *static_cast<Bytes*>(shared) = poison;
  emulator::copies_in_flight().back().push_back(copy);
}

template <int kBytes>
void end_copy(const emulator::Copy& copy) {
  using Bytes = CopiedBytes<kBytes>;
  Bytes data{};
  if (copy.valid) {
    data = *static_cast<const Bytes*>(copy.global);
    if (std::memcmp(copy.source, &data, kBytes) != 0) {
      emulator::fail("the source of a cp.async changes while it is in flight");
    }
  }
  *static_cast<Bytes*>(copy.shared) = data;
}

}  // namespace detail

inline void cp_async_16(void* shared, const void* global, bool valid = true) {
  detail::begin_copy<16>(shared, global, valid);
}

template <int kBytes>
void cp_async_few(void* shared, const void* global, bool valid = true) {
  static_assert(kBytes == 4 || kBytes == 8);
  detail::begin_copy<kBytes>(shared, global, valid);
}

inline void cp_async_commit() { emulator::copies_in_flight().emplace_back(); }

template <int kPending>
void cp_async_wait() {
  auto& groups = emulator::copies_in_flight();
  const emulator::Uncounted seen_at_issue;
  while (groups.size() > kPending + 1) {
    for (const emulator::Copy& copy : groups.front()) {
      if (copy.bytes == 16) detail::end_copy<16>(copy);
      if (copy.bytes == 8) detail::end_copy<8>(copy);
      if (copy.bytes == 4) detail::end_copy<4>(copy);
    }
    groups.erase(groups.begin());
  }
}

// ---- ordered access to global memory ------------------------------------------------------------

inline uint32_t atomic_add_acq_rel(uint32_t* address, uint32_t value) {
  emulator::count_read(address, 4);
  emulator::count_written(address, 4);
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}

inline uint32_t load_acquire(const uint32_t* address) {
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

inline void store_release(uint32_t* address, uint32_t value) {
  emulator::count_written(address, 4);
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

namespace detail {

inline void add_atomically(float* address, float value) {
  float old, sum;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  do {
    sum = old + value;
  } while (
      !__atomic_compare_exchange(address, &old, &sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

}  // namespace detail

inline void add_global(float* address, float value) {
  detail::check_alignment(address, "red");
  emulator::count_written(address, 4);
  detail::add_atomically(address, value);
}

inline bool adds_four() { return emulator::capability() >= 90; }
inline void add_global_4(float* address, const float (&value)[4]) {
  struct alignas(16) Four {
    float of[4];
  };
  if (!adds_four()) {
    for (int i = 0; i < 4; ++i) add_global(address + i, value[i]);
    return;
  }
  detail::check_alignment(reinterpret_cast<const Four*>(address), "red.v4");
  emulator::count_written(address, sizeof(value));
  for (int i = 0; i < 4; ++i) detail::add_atomically(address + i, value[i]);
}

// A hint without an effect that a kernel could see.
inline void prefetch_to_l2(const void*) {}

inline void spin() { emulator::spin(); }

// The emulator runs a kernel when the one before it has ended.
inline void wait_for_kernel_before() {}
inline void start_kernel_after() {}

// ---- plain access to global memory --------------------------------------------------------------

template <class T>
T load_global(const T* address) {
  detail::check_alignment(address, "a load");
  emulator::count_read(address, sizeof(T));
  const T value = *address;
  detail::check_inside(address, value, "a load");
  return value;
}

template <class T>
void store_global(T* address, const T& value) {
  detail::check_alignment(address, "a store");
  emulator::count_written(address, sizeof(T));
  *address = value;
}

// ---- arithmetic ---------------------------------------------------------------------------------

inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline double multiply_add(double a, double b, double c) { return std::fma(a, b, c); }

inline void forget(uint32_t&) {}

inline int thread_index() { return static_cast<int>(threadIdx.x); }

namespace detail {

// Subnormals are zeros of their sign.
inline float flushed(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

// Chooses a neighbour of a result, which an approximation may return instead: always the same one
// for the same operand. 0 .. choices - 1.
inline uint32_t choice(float operand, uint32_t choices) {
  return (std::bit_cast<uint32_t>(operand) * 0x9e3779b1u >> 27) % choices;
}

}  // namespace detail

// Within 2 units in the last place; 1 for x = 0.
inline float exp2_approximate(float x) {
  x = detail::flushed(x);
  const float power = detail::flushed(std::exp2(x));
  if (x == 0.0f || power == 0.0f || !std::isfinite(power)) return power;
  const auto bits = std::bit_cast<uint32_t>(power) + detail::choice(x, 3) - 1;
  return detail::flushed(std::bit_cast<float>(bits));
}

// Within a unit in the last place: either neighbour of the quotient, itself if it is one.
inline float reciprocal_approximate(float x) {
  x = detail::flushed(x);
  const float nearest = detail::flushed(1.0f / x);
  if (nearest == 0.0f || !std::isfinite(nearest)) return nearest;
  const float beyond = std::fma(nearest, std::fabs(x), -std::copysign(1.0f, x));
  if (beyond == 0.0f || detail::choice(x, 2) == 0) return nearest;
  return detail::flushed(std::nextafter(nearest, beyond > 0.0f ? -INFINITY : INFINITY));
}

template <class T>
uint32_t narrow_pair(float low, float high) {
  if constexpr (__is_same(T, BFloat16)) {
    return narrow_to_bfloat16(low).bits | static_cast<uint32_t>(narrow_to_bfloat16(high).bits)
                                              << 16;
  } else {
    static_assert(__is_same(T, Float16));
    return narrow_to_float16(low).bits | static_cast<uint32_t>(narrow_to_float16(high).bits) << 16;
  }
}

inline float widen_half(uint16_t bits) { return widen(Float16{bits}); }

// ---- shared memory ------------------------------------------------------------------------------

template <class T>
T* shared_piece(int offset, int bytes, int index) {
  return static_cast<T*>(emulator::shared_piece(offset, bytes, index));
}

// Pieces lie apart here, so that a place is an offset.
inline uint32_t shared_base() { return 0; }

template <class T>
T* at_place(T* piece, uint32_t place) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(piece) + place);
}

}  // namespace onepass::cuda
