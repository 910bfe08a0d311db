// From the sums of a product to its output: the epilogue, while the sums are in a near cache.
#pragma once

#include "cpu/activation.h"
#include "cpu/lines.h"
#include "cpu/random.h"
#include "ops/linear.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// Where the sums of a piece are kept until they are complete.
enum class Sums {
  kOutput,         // in the output, of the same size
  kPreactivation,  // in the preactivation, likewise
  kScratch,        // in scratch
};

// The place of sums of this many bytes each.
inline Sums place_of_sums(const LinearProduct& args, int64_t bytes) {
  const LinearEpilogue& epilogue = args.epilogue;
  if (epilogue.preactivation && size_of(epilogue.preactivation_dtype) == bytes) {
    return Sums::kPreactivation;
  }
  if (!epilogue.preactivation && size_of(args.output_dtype) == bytes) return Sums::kOutput;
  return Sums::kScratch;
}

// Whether sums are rounded, or something comes after them.
inline bool has_finish(const LinearProduct& args, Sums sums) {
  const LinearEpilogue& epilogue = args.epilogue;
  return sums != Sums::kOutput || epilogue.activation != Activation::kNone || epilogue.seed ||
         epilogue.residual;
}

// Of sums that are not in scratch.
template <class A>
A* sums_at(const LinearProduct& args, Sums sums, int64_t row, int64_t col) {
  void* whole = sums == Sums::kOutput ? args.output : args.epilogue.preactivation;
  return static_cast<A*>(whole) + row * args.cols + col;
}

// Sums of `rows` rows and `cols` columns from (row, col) on, `sums_row` numbers from one row to the
// next.
template <class A>
void finish_rows(const LinearProduct& args, Sums place, const A* sums, int64_t sums_row,
                 int64_t row, int64_t rows, int64_t col, int64_t cols) {
  const LinearEpilogue& epilogue = args.epilogue;
  const Dropout dropout =
      epilogue.seed ? make_dropout(epilogue.seed, epilogue.dropout_p) : Dropout{};
  KeepTile keep;
  A line[kDropoutTile];
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; j += kDropoutTile) {
      const int64_t count = std::min(kDropoutTile, cols - j);
      const int64_t at = (row + i) * args.cols + col + j;
      const A* from = sums + i * sums_row + j;
      if (epilogue.preactivation && place != Sums::kPreactivation) {
        round_line(from, count, epilogue.preactivation, epilogue.preactivation_dtype, at);
      }
      if (epilogue.activation != Activation::kNone) {
        activate(epilogue.activation, from, count, line);
        from = line;
      }
      if (epilogue.seed) {
        keep.drop(dropout, at, count, from, line);
        from = line;
      }
      if (epilogue.residual) {
        visit_numbers<A>(args.output_dtype, [&]<class R>() {
          const R* residual = static_cast<const R*>(epilogue.residual) + at;
          for_each_vector<A>(0, count, [&](int64_t c, auto lanes) {
            store<A>(line + c, load<A>(residual + c, lanes) + load<A>(from + c, lanes), lanes);
          });
        });
        from = line;
      }
      round_line(from, count, args.output, args.output_dtype, at);
    }
  }
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
