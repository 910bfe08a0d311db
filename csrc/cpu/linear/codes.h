// Codes of 8 bits, packed as the factors of a product.
//
// A line, which is a row of the left factor or a column of the right one, is quantised by its
// largest magnitude (symmetric, "absmax"):
//
//   scalar: code[k] = nearest(x[k] * (127 / largest)), x[k] is about code[k] * (largest / 127)
//
// so codes are from -127 to 127, and all arithmetic on them is exact.
#pragma once

#include "cpu/activation.h"
#include "cpu/linear/packing.h"
#include "cpu/pieces.h"
#include "cpu/random.h"
#include "cpu/vec_bytes.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

inline constexpr int32_t kMostCode = 127;
// A line whose largest magnitude is below this has scale 0: 127 / largest must be finite, and
// largest / 127 normal.
inline constexpr float kLeastLargest = 1e-34f;

// Four codes in a cell. The instruction takes bytes without a sign on the left: there a code is
// stored with kLeftOffset added, for which the sums of a column start at -kLeftOffset times the sum
// of its codes. That start is the largest number on the way: at most 128 * 127 * depth.
struct ByteCodes : WordCells {
  using Element = int8_t;
  using Sum = SignedWords;
  static constexpr int kPerCell = 4;
  static constexpr int32_t kLeftOffset = 128;
  static constexpr uint32_t kOffsetCells = 0x80808080u;  // adds kLeftOffset to each code

  ONEPASS_INLINE static Sum multiply_add(Cells a, Cells b, Sum sum) {
    return multiply_add_bytes(a, b, sum);
  }
  // Consecutive codes as kLanes cells.
  ONEPASS_INLINE static Cells neighbours(const SignedWords (&codes)[4]) {
    return (Cells)saturate_to_bytes<true>(codes);
  }
};

// Two codes of 16 bits in a cell, where no instruction multiplies bytes: a pair of products is at
// most 2 * 127^2, and its sums are those of ByteCodes, bit for bit.
struct HalfCodes : WordCells {
  using Element = int16_t;
  using Sum = SignedWords;
  static constexpr int kPerCell = 2;
  static constexpr int32_t kLeftOffset = 0;
  static constexpr uint32_t kOffsetCells = 0;

  ONEPASS_INLINE static Sum multiply_add(Cells a, Cells b, Sum sum) {
    return multiply_add_halves(a, b, sum);
  }
  ONEPASS_INLINE static Cells neighbours(const SignedWords (&codes)[2]) {
    const HalfBits halves[] = {narrow_bits((WordBits)codes[0] & 0xffffu),
                               narrow_bits((WordBits)codes[1] & 0xffffu)};
    Cells cells;
    std::memcpy(&cells, halves, sizeof(cells));
    return cells;
  }
};

// The scale of a line and its inverse, from the bits of its largest magnitude. A line that is not
// finite has the scale NaN.
inline void set_scale(int32_t largest, float& scale, float& inverse) {
  constexpr int32_t kInfinity = 0x7f800000;
  float most;
  std::memcpy(&most, &largest, sizeof(most));
  if (largest >= kInfinity) {
    scale = std::numeric_limits<float>::quiet_NaN();
    inverse = 0.0f;
  } else if (most < kLeastLargest) {
    scale = inverse = 0.0f;
  } else {
    scale = most / kMostCode;
    inverse = kMostCode / most;
  }
}

// Lines of a factor that are packed side by side: a strip's rows, or a panel's columns.
template <class M, int64_t kWidth>
struct Lines {
  static constexpr int kVectors = kWidth / M::kLanes;

  uint32_t* cells = nullptr;  // (cells of k, kWidth)
  float* scale = nullptr;     // (kWidth,) of each line; NaN where a number is not finite
  int32_t* start = nullptr;   // (kWidth,) the sums' starts; null for a left factor

  int32_t largest[kWidth] = {};  // the bits of the largest magnitude
  float inverse[kWidth] = {};
  SignedWords total[kVectors] = {};  // of the codes of each line

  // From the largest magnitudes.
  void set_scales() {
    for (int64_t i = 0; i < kWidth; ++i) set_scale(largest[i], scale[i], inverse[i]);
  }

  // Vector v of `count` cells from number `cell` on.
  template <int kCount>
  ONEPASS_INLINE void put(int64_t cell, int64_t count, int v, const Vec<float> (&codes)[kCount]) {
    uint32_t* to = cells + cell * kWidth + v * M::kLanes;
    const bool is_right = start != nullptr;
    const WordBits offset = WordBits{} + (is_right ? 0u : M::kOffsetCells);
    const auto put_one = [&](int i) __attribute__((always_inline)) {
      const WordBits one = (WordBits)codes[i] ^ offset;
      std::memcpy(to + i * kWidth, &one, sizeof(one));
    };
    if (count == kCount) {
#pragma GCC unroll 16
      for (int i = 0; i < kCount; ++i) put_one(i);
    } else {
      for (int i = 0; i < count; ++i) put_one(i);
    }
    if constexpr (M::kLeftOffset != 0) {
      if (!is_right) return;
      const WordBits ones = WordBits{} + 0x01010101u;
      SignedWords sum = total[v], other = {};
#pragma GCC unroll 16
      for (int i = 0; i < kCount; i += 2) {  // cells beyond `count` are zeros
        sum = M::multiply_add(ones, (WordBits)codes[i], sum);
        if (i + 1 < kCount) other = M::multiply_add(ones, (WordBits)codes[i + 1], other);
      }
      total[v] = sum + other;
    }
  }

  void set_starts() {
    if (start == nullptr) return;
    for (int v = 0; v < kVectors; ++v) {
      // Without a sign: a line that is not finite may have any codes.
      const WordBits starts = (WordBits)total[v] * static_cast<uint32_t>(-M::kLeftOffset);
      std::memcpy(start + v * M::kLanes, &starts, sizeof(starts));
    }
  }
};

ONEPASS_INLINE SignedWords magnitude_bits(Vec<float> x) { return (SignedWords)absolute(x); }
ONEPASS_INLINE SignedWords larger_word(SignedWords a, SignedWords b) { return a > b ? a : b; }

// The codes of x * inverse. That of a number that is not finite may be any; its line has no scale.
ONEPASS_INLINE SignedWords code_of(Vec<float> scaled) { return nearest_word(scaled); }

// Rounds down after adding a number of 16 bits from [0, 1): the expectation is x, to 2^-16. By
// rounding, a product with the inverse may exceed 127, so the sum is clamped.
ONEPASS_INLINE SignedWords random_code_of(Vec<float> scaled, Vec<float> uniform) {
  const Vec<float> most = broadcast<float>(kMostCode);
  const Vec<float> sum = smaller(larger(scaled + uniform, -most), most);
  const SignedWords whole = __builtin_convertvector(sum, SignedWords);  // towards zero
  return whole + (__builtin_convertvector(whole, Vec<float>) > sum);
}

// The bits of the largest magnitude in a line.
inline int32_t largest_of(const float* line, int64_t depth) {
  constexpr int n = kLanes<float>;
  SignedWords most[2] = {};
  int64_t k = 0;
  for (; k + 2 * n <= depth; k += 2 * n) {
    most[0] = larger_word(most[0], magnitude_bits(load<float>(line + k)));
    most[1] = larger_word(most[1], magnitude_bits(load<float>(line + k + n)));
  }
  for_each_vector<float>(k, depth, [&](int64_t j, auto lanes) {
    most[0] = larger_word(most[0], magnitude_bits(load<float>(line + j, lanes)));
  });
  most[0] = larger_word(most[0], most[1]);
  int32_t largest = 0;
  for (int j = 0; j < n; ++j) largest = std::max(largest, most[0][j]);
  return largest;
}

// Lines that are dense along k: line(i) is where line i begins. With kRandom, line i takes the
// random numbers of the elements from first_element + i * depth on.
template <bool kRandom, class M, int64_t kWidth, class Line>
void pack_lines(Line&& line, int64_t count, int64_t depth, const int64_t* seed,
                int64_t first_element, Lines<M, kWidth>& to) {
  constexpr int n = M::kLanes;
  for (int64_t i = 0; i < count; ++i) to.largest[i] = largest_of(line(i), depth);
  to.set_scales();
  const Dropout key = kRandom ? make_dropout(seed, 0.0) : Dropout{};
  KeepTile random;
  // A row of the square: kLanes cells of a line.
  const auto cells_of = [&](int64_t i, int64_t k, int64_t here,
                            auto is_whole) __attribute__((always_inline)) {
    const float* from = line(i) + k;
    const Vec<float> inverse = broadcast<float>(to.inverse[i]);
    if (kRandom) random.fill(key, first_element + i * depth + k, here, kRoundingStream);
    SignedWords codes[M::kPerCell];
#pragma GCC unroll 4
    for (int part = 0; part < M::kPerCell; ++part) {
      const float* at = from + part * n;
      const Vec<float> numbers = is_whole ? load<float>(at) : load_up_to(at, here - part * n);
      codes[part] = kRandom ? random_code_of(numbers * inverse, random.uniform(part * n))
                            : code_of(numbers * inverse);
    }
    return (Vec<float>)M::neighbours(codes);
  };
  const int64_t cells = ceil_div(depth, M::kPerCell);
  for (int64_t k = 0; k < depth; k += kSquare<M>) {
    const int64_t here = std::min(kSquare<M>, depth - k);
    for (int v = 0; v < to.kVectors; ++v) {
      const int64_t lines = std::clamp<int64_t>(count - v * n, 0, n);
      Vec<float> square[n];
      for (int64_t i = lines; i < n; ++i) square[i] = Vec<float>{};
      if (here == kSquare<M> && lines == n) {
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i) square[i] = cells_of(v * n + i, k, here, std::true_type());
      } else if (here == kSquare<M>) {
        for (int i = 0; i < lines; ++i) square[i] = cells_of(v * n + i, k, here, std::true_type());
      } else {
        for (int i = 0; i < lines; ++i) square[i] = cells_of(v * n + i, k, here, std::false_type());
      }
      transpose(square);
      to.template put<n>(k / M::kPerCell, std::min<int64_t>(cells - k / M::kPerCell, n), v, square);
    }
  }
  to.set_starts();
}

// Lines that lie side by side, `apart` of them for each of `to`: element k of all of them is dense,
// `step` elements after k - 1. Several at once, because a row of memory that is read whole comes
// faster, and where `step` is a power of two the rows of 128 bytes push each other out of L1.
template <class M, int64_t kWidth>
void pack_lines_across(const float* from, int64_t step, int64_t count, int64_t apart, int64_t depth,
                       Lines<M, kWidth>* to, int64_t groups) {
  constexpr int n = M::kLanes;
  constexpr int64_t kAhead = 8;  // rows: each may be in another page
  // Groups without a tail; vectors may reach into the next one's lines.
  const int64_t whole = count < kWidth ? 0 : (count - kWidth) / apart + 1;
  const auto numbers = [&](int64_t k, int64_t group, int v) __attribute__((always_inline)) {
    const float* at = from + k * step + group * apart + v * n;
    __builtin_prefetch(at + kAhead * step);
    return group < whole ? load<float>(at) : load_up_to(at, count - group * apart - v * n);
  };
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t g = 0; g < groups; ++g) {
#pragma GCC unroll 2
      for (int v = 0; v < to->kVectors; ++v) {
        auto* largest = reinterpret_cast<float*>(to[g].largest) + v * n;
        const auto most = (SignedWords)load<float>(largest);
        store<float>(largest, (Vec<float>)larger_word(most, magnitude_bits(numbers(k, g, v))));
      }
    }
  }
  for (int64_t g = 0; g < groups; ++g) to[g].set_scales();
  constexpr int kBits = 32 / M::kPerCell;
  constexpr uint32_t kMask = (1u << kBits) - 1;
  for (int64_t k = 0; k < depth; k += M::kPerCell) {
    const int64_t parts = std::min<int64_t>(depth - k, M::kPerCell);
    for (int64_t g = 0; g < groups; ++g) {
#pragma GCC unroll 2
      for (int v = 0; v < to->kVectors; ++v) {
        const Vec<float> inverse = load<float>(to[g].inverse + v * n);
        WordBits cell = {};
#pragma GCC unroll 4
        for (int part = 0; part < M::kPerCell; ++part) {
          if (part >= parts) break;
          const SignedWords code = code_of(numbers(k + part, g, v) * inverse);
          cell |= ((WordBits)code & kMask) << (part * kBits);
        }
        const Vec<float> one[] = {(Vec<float>)cell};
        to[g].template put<1>(k / M::kPerCell, 1, v, one);
      }
    }
  }
  for (int64_t g = 0; g < groups; ++g) to[g].set_starts();
}

// Calls f<Bytes>() if the CPU multiplies bytes, else f<Halves>().
template <class Bytes, class Halves, class F>
decltype(auto) visit_bytes(bool multiplies_bytes, F&& f) {
  if constexpr (kMayMultiplyBytes) {
    if (multiplies_bytes) return f.template operator()<Bytes>();
  }
  return f.template operator()<Halves>();
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
