// The numbers of a quantised weight, ops/quantized_linear.h: words of codes as vectors of columns,
// and as the panels that tiles read.
#pragma once

#include <algorithm>

#include "cpu/linear/packing.h"
#include "cpu/lines.h"
#include "cpu/pieces.h"
#include "cpu/vec_bytes.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// The numbers of formats that are looked up, by code. Not inline: that would be a symbol of its
// own.
constexpr float kNf4Numbers[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};
constexpr float kInt4Numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
constexpr float kMxfp4Numbers[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// How words become numbers: bytes and nibbles in two's complement, or nibbles looked up.
enum class Codes { kBytes, kNibbles, kLookedUp };

// A word of codes of each lane, as numbers.
template <Codes kCodes>
class Words {
 public:
  static constexpr int kPerWord = kCodes == Codes::kBytes ? 4 : 8;
  static constexpr int kBits = 32 / kPerWord;

  explicit Words(WeightFormat format) : numbers_(numbers_of(format)) {}

  // The place along k of code i.
  static constexpr int place_of(int i) { return kPerWord == 4 ? i : 2 * (i % 4) + i / 4; }

  // Of code i, which is a constant where this is inlined.
  ONEPASS_INLINE Vec<float> number(WordBits words, int i) const {
    if constexpr (kCodes == Codes::kLookedUp) {
      return numbers_.at(words, kBits * i);
    } else {
      const WordBits top = i == kPerWord - 1 ? words : words << (32 - kBits - kBits * i);
      return __builtin_convertvector((SignedWords)top >> (32 - kBits), Vec<float>);
    }
  }

  // Cell i along k for a multiplier's products.
  template <class M>
  ONEPASS_INLINE typename M::Cells cells(WordBits words, int i) const {
    if constexpr (M::kPerCell == 1) {
      return number(words, i);
    } else if constexpr (kCodes == Codes::kBytes) {  // which bfloat16 holds exactly
      return high_halves(number(words, 2 * i), number(words, 2 * i + 1));
    } else {
      return numbers_.pairs_at(words, kBits * i);
    }
  }
  // The place along k of cell i.
  template <class M>
  static constexpr int place_of_cell(int i) {
    return M::kPerCell == 1 ? place_of(i) : 2 * i;
  }

 private:
  static const float (&numbers_of(WeightFormat format))[16] {
    return format == WeightFormat::kNf4     ? kNf4Numbers
           : format == WeightFormat::kMxfp4 ? kMxfp4Numbers
                                            : kInt4Numbers;
  }

  SixteenNumbers numbers_;
};

// Calls f<codes>() for a format.
template <class F>
decltype(auto) visit_codes_of(WeightFormat format, F&& f) {
  if (format == WeightFormat::kInt8) return f.template operator()<Codes::kBytes>();
  if constexpr (!kLooksUpSixteen) {
    if (format == WeightFormat::kInt4) return f.template operator()<Codes::kNibbles>();
  }
  return f.template operator()<Codes::kLookedUp>();
}

// The first word of row j.
inline const uint32_t* words_of_row(const QuantizedWeight& weight, int64_t j) {
  return weight.words + j / kPanelColumns * weight.words_of_k * kPanelColumns + j % kPanelColumns;
}

// The number of a weight in row j, column k, without scale and shift.
inline float value_of(const QuantizedWeight& weight, int64_t j, int64_t k) {
  const int64_t codes = codes_per_word(weight.format);
  const uint32_t word = words_of_row(weight, j)[k / codes * kPanelColumns];
  if (weight.format == WeightFormat::kInt8) return static_cast<int8_t>(word >> k % 4 * 8);
  const uint32_t code = word >> (k % 8 / 2 + k % 2 * 4) * 4 & 15;
  if (weight.format == WeightFormat::kInt4) return static_cast<float>((code ^ 8) - 8.0);
  return (weight.format == WeightFormat::kNf4 ? kNf4Numbers : kMxfp4Numbers)[code];
}

// The same with them; `rows` are the weight's.
inline float number_of(const QuantizedWeight& weight, int64_t rows, int64_t j, int64_t k) {
  const int64_t at = k / weight.group * rows + j;
  float scale, shift = 0.0f;
  widen_line(weight.scales, weight.scales_dtype, at, 1, &scale);
  if (weight.shifts) widen_line(weight.shifts, weight.scales_dtype, at, 1, &shift);
  return value_of(weight, j, k) * scale + shift;
}

// The first words of vectors of columns, from column col on. Vectors beyond the last column have
// the last one's: they are computed, and not stored.
template <int kVectors>
void set_words(const QuantizedWeight& weight, int64_t col, int64_t columns,
               const uint32_t* (&words)[kVectors]) {
  constexpr int64_t n = kLanes<float>;
  for (int v = 0; v < kVectors; ++v) {
    words[v] = words_of_row(weight, col + std::min<int64_t>(v * n, (columns - 1) / n * n));
  }
}

// Scales or shifts of a vector of columns.
template <class Count>
ONEPASS_INLINE Vec<float> load_scales(const void* scales, DType dtype, int64_t at, Count count) {
  switch (dtype) {
    case DType::kFloat32:
      return load<float>(static_cast<const float*>(scales) + at, count);
    case DType::kBFloat16:
      return load<float>(static_cast<const BFloat16*>(scales) + at, count);
    default:
      return load<float>(static_cast<const Float16*>(scales) + at, count);
  }
}

// Numbers of kLanes columns, for k from first to first + count, which go to put(k, numbers).
// `first` is the first code of a word; columns beyond the weight's are 0.
template <Codes kCodes, class Put>
ONEPASS_INLINE void for_each_number(const QuantizedWeight& weight, int64_t cols, int64_t col,
                                    int64_t first, int64_t count, Put&& put) {
  using W = Words<kCodes>;
  constexpr int64_t n = kLanes<float>;
  const W codes(weight.format);
  const uint32_t* words = words_of_row(weight, col) + first / W::kPerWord * kPanelColumns;
  const int64_t there = std::min(cols - col, n);
  Vec<float> scale = {}, shift = {};
  int64_t end = 0;  // of the group
  const auto load_group = [&](int64_t k) {
    const int64_t group = k / weight.group, at = group * cols + col;
    end = (group + 1) * weight.group;
    const auto numbers = [&](const void* of) {
      return there == n ? load_scales(of, weight.scales_dtype, at, WholeVector<float>{})
                        : load_scales(of, weight.scales_dtype, at, Tail{there});
    };
    scale = numbers(weight.scales);
    if (weight.shifts) shift = numbers(weight.shifts);
  };
  for (int64_t k = 0; k < count; k += W::kPerWord) {
    if (first + k >= end) load_group(first + k);
    WordBits word;
    std::memcpy(&word, words, sizeof(word));
    words += kPanelColumns;
    const int64_t here = std::min<int64_t>(count - k, W::kPerWord);
    Vec<float> number[W::kPerWord];
#pragma GCC unroll 8
    for (int i = 0; i < W::kPerWord; ++i) {
      number[W::place_of(i)] = fma<float>(codes.number(word, i), scale, shift);
    }
    if (here == W::kPerWord) {
#pragma GCC unroll 8
      for (int i = 0; i < W::kPerWord; ++i) put(k + i, number[i]);
    } else {
      for (int i = 0; i < here; ++i) put(k + i, number[i]);
    }
  }
}

// pack_codes() for float64: rare, so number by number.
inline void pack_wide_codes(const LinearProduct& args, int64_t col, int64_t cols, int64_t k,
                            int64_t count, double* panel) {
  const QuantizedWeight& weight = args.quantized;
  const bool is_forward = args.kind == LinearKind::kForward;
  const int64_t rows = is_forward ? args.cols : args.depth;  // of the weight
  const auto* scales = static_cast<const double*>(weight.scales);
  const auto* shifts = static_cast<const double*>(weight.shifts);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t c = 0; c < kPanel<Fma64>; ++c) {
      double& number = panel[i * kPanel<Fma64> + c];
      const int64_t row = is_forward ? col + c : k + i, column = is_forward ? k + i : col + c;
      const int64_t at = c < cols ? column / weight.group * rows + row : 0;
      number = c < cols ? value_of(weight, row, column) * scales[at] : 0.0;
      if (c < cols && shifts) number += shifts[at];
    }
  }
}

// A panel of a product's right factor from codes, as pack_right() makes it: `count` elements of k
// from the k-th on, which is a multiple of 16, of `cols` columns.
template <class M>
void pack_codes(const LinearProduct& args, int64_t col, int64_t cols, int64_t k, int64_t count,
                typename M::Element* panel) {
  constexpr int64_t n = kLanes<float>;
  if constexpr (std::is_same_v<M, Fma64>) {
    return pack_wide_codes(args, col, cols, k, count, panel);
  } else {
    const QuantizedWeight& weight = args.quantized;
    visit_codes_of(weight.format, [&]<Codes kCodes>() {
      if (args.kind == LinearKind::kForward) {
        for (int v = 0; v < kPanelVectors; ++v) {
          typename M::Element* to = panel + v * n * M::kPerCell;
          if (v * n >= cols) {
            for (int64_t cell = 0; cell < ceil_div(count, M::kPerCell); ++cell) {
              std::fill_n(to + cell * kPanel<M> * M::kPerCell, n * M::kPerCell,
                          typename M::Element{});
            }
            continue;
          }
          Vec<float> low = {};
          for_each_number<kCodes>(
              weight, args.cols, col + v * n, k, count, [&](int64_t i, Vec<float> numbers) {
                if constexpr (M::kPerCell == 1) {
                  store<float>(to + i * kPanel<M>, numbers);
                } else {
                  if (i % 2 == 0) low = numbers;
                  if (i % 2 == 0 && i + 1 < count) return;
                  const WordBits pairs = pairs_of(low, i % 2 == 0 ? Vec<float>{} : numbers);
                  std::memcpy(to + i / 2 * kPanel<M> * 2, &pairs, sizeof(pairs));
                }
              });
        }
        return;
      }
      // k runs over the weight's rows, which are the lanes of its words: blocks are transposed.
      constexpr int64_t kStep = Words<kCodes>::kPerWord;
      constexpr int64_t kBlock = std::max(kPanelColumns, kSquare<M>);  // of k
      for (int64_t j = 0; j < count; j += kBlock) {
        const int64_t rows = std::min(count - j, kBlock);
        const int64_t first = col / kStep * kStep, last = col + cols;
        alignas(64) float block[kPanel<M> + kStep][kBlock];
        for (int64_t row = 0; row < rows; row += n) {
          for_each_number<kCodes>(
              weight, args.depth, k + j + row, first, last - first,
              [&](int64_t i, Vec<float> numbers) { store<float>(&block[i][row], numbers); });
        }
        const float* from = &block[col - first][0];
        pack_panel<M>([&](int64_t c) { return from + c * kBlock; }, cols, rows, kPanel<M>,
                      panel + j * kPanel<M>);
      }
    });
  }
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
