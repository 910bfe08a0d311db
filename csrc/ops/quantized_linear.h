// Quantised weights, the right factor of a product in ops/linear.h:
//
//   weight[j][k] = scale[k / group][j] * value(code[j][k]) + shift[k / group][j]
//
// Codes lie in words of 32 bits, and words in panels of kPanelColumns rows of the weight, which are
// columns of the output: words[j / 16][k / n][j % 16] holds n codes of neighbours along k. Rows and
// codes that fill up the last panel and word are 0. In a word, from the lowest bits:
//
//   8 bits, n = 4: code i is that of k + i
//   4 bits, n = 8: code i is that of k + 2 (i % 4) + i / 4, so that the halves of the word, shifted
//                  right by 4 i, begin with the codes of neighbours
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace onepass {

// What a code stands for. In Python, onepass.reference.quantized_linear.Format.
enum class WeightFormat {
  kInt8,   // itself, in two's complement, -127 to 127
  kInt4,   // likewise, -8 to 7
  kNf4,    // quantiles of a normal distribution (Dettmers et al., "QLoRA", 2023)
  kMxfp4,  // a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats, 2023)
};
inline constexpr int kWeightFormats = 4;
constexpr const char* name_of(WeightFormat format) {
  constexpr const char* names[] = {"int8", "int4", "nf4", "mxfp4"};
  return names[static_cast<int>(format)];
}

inline constexpr int64_t kPanelColumns = 16;

struct QuantizedWeight {
  const uint32_t* words;  // (panels, words of k, kPanelColumns); null: the factor is not quantised
  const void* scales;     // (depth / group, columns) contiguous
  const void* shifts;     // likewise; null: 0
  int64_t words_of_k;
  int64_t group;  // numbers along k that share a scale: all, or a multiple of 8
  DType scales_dtype;
  WeightFormat format;
};

constexpr int64_t codes_per_word(WeightFormat format) {
  return format == WeightFormat::kInt8 ? 4 : 8;
}

}  // namespace onepass
