// The product of rows that are quantised on the fly with a weight of codes of 8 bits:
//
//   scalar: output[i][j] = (sum over k of code_left[i][k] * code_right[j][k])
//                          * scale_left[i] * scale_right[j] + bias[j]
//
// Rows are quantised first, by their largest magnitude. The weight's words are then multiplied as
// they lie: a piece of columns stays in L2 for all rows. Sums of codes are exact, so that rows,
// threads and CPU levels change no bit. Done when few rows run at the speed of a read, and many at
// that of the integer multiply-adds.
//
// A row with NaN or Inf has no scale: its sums are those of its products that are not finite.
#include "cpu/linear/codes_by_codes.h"

#include <cmath>

#include "cpu/linear/codes.h"
#include "cpu/linear/finish.h"
#include "cpu/linear/weight_codes.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

constexpr int64_t kPieceColumns = 64;
constexpr int64_t kCodesPerWord = 4;

// Vectors of columns that are computed side by side.
template <int kRows>
constexpr int kWordVectors = kRows <= 2 ? 4 : kPanelVectors;

struct Layout {
  bool has_byte_products;
  Sums sums;
  bool finish;
  int64_t left_row;  // bytes from a row of codes to the next
  int64_t left_scales;
  Slots slots;
};

// Four codes of the left factor in a word, each with 128 added, because the instruction takes bytes
// without a sign there: the sums of a column begin at -128 times the sum of its codes.
struct ByteWords {
  static constexpr int64_t kBytes = 1;  // of a code
  static constexpr bool kNeedsCodeSums = true;

  ONEPASS_INLINE static void put(const SignedWords (&codes)[4], char* to) {
    const Bytes bytes = saturate_to_bytes<true>(codes) ^ 0x80;
    std::memcpy(to, &bytes, sizeof(bytes));
  }
  ONEPASS_INLINE static void add_total(WordBits words, SignedWords& total) {
    total = multiply_add_bytes(WordBits{} + 0x01010101u, words, total);
  }
  ONEPASS_INLINE static WordBits start(SignedWords total) { return (WordBits)total * -128u; }

  template <int kRows>
  ONEPASS_INLINE static void multiply_add(const char* left, int64_t left_row, WordBits words,
                                          SignedWords* sum, int step) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const WordBits four = WordCells::broadcast_cell(left + r * left_row);
      sum[r * step] = multiply_add_bytes(four, words, sum[r * step]);
    }
  }
};

// Codes of 16 bits, where no instruction multiplies bytes: of four neighbours the first and third
// in a word, then the second and fourth.
struct HalfWords {
  static constexpr int64_t kBytes = 2;
  static constexpr bool kNeedsCodeSums = false;

  ONEPASS_INLINE static void put(const SignedWords (&codes)[4], char* to) {
    constexpr int n = kLanes<float>;
    int32_t line[4 * n];
    std::memcpy(line, codes, sizeof(line));
    int16_t halves[4 * n];
    for (int i = 0; i < 4 * n; i += 4) {
      for (int j = 0; j < 4; ++j) halves[i + j / 2 + j % 2 * 2] = static_cast<int16_t>(line[i + j]);
    }
    std::memcpy(to, halves, sizeof(halves));
  }

  template <int kRows>
  ONEPASS_INLINE static void multiply_add(const char* left, int64_t left_row, WordBits words,
                                          SignedWords* sum, int step) {
    typedef int16_t Halves __attribute__((vector_size(kVectorBytes)));
    WordBits even = (WordBits)((Halves)(words << 8) >> 8), odd = (WordBits)((Halves)words >> 8);
    keep_in_register(even);
    keep_in_register(odd);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const char* at = left + r * left_row;
      SignedWords& one = sum[r * step];
      one = multiply_add_halves(WordCells::broadcast_cell(at), even, one);
      one = multiply_add_halves(WordCells::broadcast_cell(at + 4), odd, one);
    }
  }
};

template <class M>
class CodesByCodes {
 public:
  CodesByCodes(const LinearProduct& args, const Layout& layout, void* workspace)
      : args_(args),
        weight_(args.quantized),
        layout_(layout),
        base_(static_cast<char*>(workspace)),
        left_scales_(reinterpret_cast<float*>(base_ + layout.left_scales)) {}

  void quantize_row(int64_t row, int64_t slot) const {
    Arena own(layout_.slots.of(base_, slot));
    float* line = own.take<float>(round_up(args_.depth, kStep));
    widen_line(args_.left, args_.left_dtype, row * args_.left_row, args_.depth, line);
    std::fill(line + args_.depth, line + round_up(args_.depth, kStep), 0.0f);
    float inverse;
    set_scale(largest_of(line, args_.depth), left_scales_[row], inverse);
    for (int64_t k = 0; k < args_.depth; k += kStep) {
      SignedWords codes[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        codes[i] = code_of(load<float>(line + k + i * kLanes<float>) * inverse);
      }
      M::put(codes, base_ + row * layout_.left_row + k * M::kBytes);
    }
  }

  void piece(int64_t number, int64_t slot) const {
    const int64_t begin = number * kPieceColumns;
    const int64_t cols = std::min(kPieceColumns, args_.cols - begin);
    Arena own(layout_.slots.of(base_, slot));
    float* bias = own.take<float>(kPieceColumns);
    float* scales = own.take<float>(kPieceColumns);
    float* scratch = own.take<float>(kStripRows * kPieceColumns);
    std::fill_n(bias, kPieceColumns, 0.0f);
    if (args_.bias) widen_line(args_.bias, args_.bias_dtype, begin, cols, bias);
    widen_line(weight_.scales, weight_.scales_dtype, begin, cols, scales);
    for (int64_t row = 0; row < args_.rows; row += kStripRows) {
      const int64_t rows = std::min<int64_t>(kStripRows, args_.rows - row);
      const bool in_scratch = layout_.sums == Sums::kScratch;
      const Strip strip{
          .left = base_ + row * layout_.left_row,
          .left_scales = left_scales_ + row,
          .right_scales = scales,
          .bias = bias,
          .sums = in_scratch ? scratch : sums_at<float>(args_, layout_.sums, row, begin),
          .sums_row = in_scratch ? kPieceColumns : args_.cols};
      visit_strip(rows, [&]<int kRows>() {
        constexpr int64_t kColumns = kWordVectors<kRows> * kLanes<float>;
        for (int64_t j = 0; j < cols; j += kColumns) {
          codes_by_codes_kernel<kRows>(strip, begin, j, std::min(kColumns, cols - j));
        }
      });
      for (int64_t i = 0; i < rows; ++i) {
        if (std::isnan(strip.left_scales[i])) put_not_finite(strip, row, i, begin, cols);
      }
      if (layout_.finish) {
        finish_rows(args_, layout_.sums, strip.sums, strip.sums_row, row, rows, begin, cols);
      }
    }
  }

  static constexpr int64_t kStep = 4 * kLanes<float>;  // numbers that become codes together

 private:
  // Some rows by a piece of columns.
  struct Strip {
    const char* left;
    const float* left_scales;
    const float* right_scales;
    const float* bias;
    float* sums;
    int64_t sums_row;
  };

  // Columns j to j + columns of the piece that begins with column `begin`.
  template <int kRows>
  [[gnu::noinline]] void codes_by_codes_kernel(const Strip& strip, int64_t begin, int64_t j,
                                               int64_t columns) const {
    constexpr int kVectors = kWordVectors<kRows>;
    constexpr int64_t n = kLanes<float>;
    const uint32_t* words[kVectors];
    set_words(weight_, begin + j, columns, words);
    SignedWords sum[kRows][kVectors] = {}, total[kVectors] = {};
    const char* left = strip.left;
    for (int64_t word = 0; word < weight_.words_of_k; ++word) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        WordBits four;
        std::memcpy(&four, words[v], sizeof(four));
        if (kRows <= 4) __builtin_prefetch(words[v] + kAhead, 0, 2);
        words[v] += kPanelColumns;
        if constexpr (M::kNeedsCodeSums) M::add_total(four, total[v]);
        M::template multiply_add<kRows>(left, layout_.left_row, four, &sum[0][v], kVectors);
      }
      left += kCodesPerWord * M::kBytes;
    }
    const auto put = [&](int v, auto count) {
      const int64_t at = j + v * n;
      const Vec<float> scale = load<float>(strip.right_scales + at);
      const Vec<float> bias = load<float>(strip.bias + at);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        WordBits whole = (WordBits)sum[r][v];
        if constexpr (M::kNeedsCodeSums) whole += M::start(total[v]);
        const Vec<float> other = broadcast<float>(strip.left_scales[r]);
        const Vec<float> number = __builtin_convertvector((SignedWords)whole, Vec<float>) *
                                  smaller(other, scale) * larger(other, scale);
        store<float>(strip.sums + r * strip.sums_row + at, number + bias, count);
      }
    };
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const int64_t left_over = columns - v * n;
      if (left_over >= n) {
        put(v, WholeVector<float>{});
      } else if (left_over > 0) {
        put(v, Tail{left_over});
      }
    }
  }

  void put_not_finite(const Strip& strip, int64_t row, int64_t i, int64_t begin,
                      int64_t cols) const {
    const auto number = [&](int64_t k) {
      float one;
      widen_line(args_.left, args_.left_dtype, (row + i) * args_.left_row + k, 1, &one);
      return one;
    };
    int64_t first = 0, last = args_.depth;
    while (std::isfinite(number(first))) ++first;
    while (std::isfinite(number(last - 1))) --last;
    for (int64_t j = 0; j < cols; ++j) {
      float sum = strip.bias[j];
      for (int64_t k = first; k < last && !std::isnan(sum); ++k) {
        const float left = number(k);
        if (std::isfinite(left)) continue;
        sum += left * (value_of(weight_, begin + j, k) * strip.right_scales[j]);
      }
      strip.sums[i * strip.sums_row + j] = sum;
    }
  }

  static constexpr int64_t kAhead = 32 * kPanelColumns;  // words

  const LinearProduct& args_;
  const QuantizedWeight& weight_;
  const Layout& layout_;
  char* base_;
  float* left_scales_;
};

Plan plan_codes_by_codes(const LinearProduct& args, const Machine& machine, Layout& layout) {
  layout.has_byte_products = kMayMultiplyBytes && machine.multiplies_bytes;
  return visit_bytes<ByteWords, HalfWords>(layout.has_byte_products, [&]<class M>() -> Plan {
    layout.sums = place_of_sums(args, sizeof(float));
    layout.finish = has_finish(args, layout.sums);
    const int64_t pieces = ceil_div(args.cols, kPieceColumns);
    const double products = static_cast<double>(args.rows) * static_cast<double>(args.cols) *
                            static_cast<double>(args.depth);
    const double read = static_cast<double>(args.cols) * static_cast<double>(args.depth) / kBytes;
    const auto nanoseconds =
        static_cast<int64_t>(std::min(std::max(products / (2 * kMultiplyAdds), read), 1e15));
    const int64_t threads = threads_for(nanoseconds, pieces, machine);
    // The line more keeps rows out of the same ways of L1 where depth is a power of two.
    const int64_t line = round_up(args.depth, CodesByCodes<M>::kStep);
    layout.left_row = round_up(line * M::kBytes, 64) + 64;
    Arena arena(nullptr);
    arena.take<char>((args.rows + kStripRows) * layout.left_row);
    layout.left_scales = arena.used();
    arena.take<float>(args.rows);
    Arena own(nullptr);
    own.take<float>(2 * kPieceColumns + kStripRows * kPieceColumns);
    layout.slots = {.begin = arena.used(),
                    .bytes = std::max(own.used(), line * static_cast<int64_t>(sizeof(float)))};
    return {.workspace_bytes = layout.slots.end(threads),
            .kernel_name = "codes_by_codes_kernel",
            .rows_per_tile = kStripRows,
            .splits = pieces,
            .reason = layout.has_byte_products ? "int8 dot products, codes are read in place"
                                               : "int8 by products of 16 bits (no VNNI), codes are "
                                                 "read in place",
            .threads = threads};
  });
}

void run_codes_by_codes(const LinearProduct& args, const Plan& plan, const Layout& layout,
                        void* workspace, const Context& context) {
  visit_bytes<ByteWords, HalfWords>(layout.has_byte_products, [&]<class M>() {
    const CodesByCodes<M> product(args, layout, workspace);
    for_each_piece_in_order(context, plan.threads, args.rows,
                            [&](int64_t row, int64_t slot) { product.quantize_row(row, slot); });
    for_each_piece_in_order(context, plan.threads, plan.splits,
                            [&](int64_t number, int64_t slot) { product.piece(number, slot); });
  });
}

}  // namespace

Operator<LinearProduct> codes_by_codes() {
  return operator_of<LinearProduct, Layout, plan_codes_by_codes, run_codes_by_codes>();
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
