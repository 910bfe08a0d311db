// The three products of a linear layer, each as one product of two matrices:
//
//   scalar: output[i][j] = bias[j] + sum over k of left[i][k] * right[k][j]
//
// The output is divided into pieces of rows x columns, which threads take one at a time. For a
// piece kCells cells of k are packed at a time: the right matrix as panels of kPanel columns, which
// stay in L2 for all rows, and then the left one as strips of kStripRows rows, each of which stays
// in L1 for all panels. Packing converts, and puts the operands of a tile next to each other; it
// costs 1 / rows and 1 / columns of the products. For few rows it does not pay: few_rows.h.
//
// A sum runs over a chain of kChain cells in a register; the chains are added one after the other.
// Neither depends on the pieces, so that a row of the output is the same bits with any other rows
// and on any number of threads. Done when the tiles run at the speed of the multiply-adds, or with
// few rows at that of memory.
#include "core/visit.h"
#include "cpu/kernels.h"
#include "cpu/linear/codes_by_codes.h"
#include "cpu/linear/few_rows_of_codes.h"
#include "cpu/linear/finish.h"
#include "cpu/linear/packing.h"
#include "cpu/linear/quantized.h"
#include "cpu/linear/weight_codes.h"
#include "cpu/multiply.h"
#include "cpu/pieces.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

// Additions in a chain. torch sums a product of a matrix and a vector lane by lane: there a chain
// of 96 is further from float64 than the numerics rule allows.
constexpr int64_t kChain = 64;
// Cells of k that are packed at a time: some chains, after each of which the sums of a tile go to
// L1 and come back.
constexpr int64_t kCells = 3 * kChain;
// The largest piece of the output.
constexpr int64_t kMostRows = 960;
constexpr int64_t kMostCols = 512;
// A left matrix of at most this many rows and bytes is packed once for all columns.
constexpr int64_t kFewRows = 2 * kStripRows;
constexpr int64_t kMostLeftBytes = 1 << 20;

struct Layout {
  int64_t down;    // pieces that the rows are cut into
  int64_t across;  // and the columns, at whole panels
  bool left_once;  // the left matrix is packed once for all of k, not with each piece
  bool few_rows;   // the right one is not packed
  Sums sums;
  bool finish;  // a strip's sums are rounded, or something comes after them
  Slots slots;
};

// Scratch of a thread.
template <class M>
struct Scratch {
  typename M::Element* left;      // (strips or 1, cells, kStrip) of cells
  typename M::Element* right;     // (panels, cells, kPanel) of cells
  typename M::Number* sums;       // (rows, cols) of a piece, or (0,)
  typename M::Number* bias;       // (cols,) of a piece
  typename M::Number* left_sums;  // (rows,) of a piece, or (rows, chains) for shifts of codes
  // (kStripRows, kPanel) sums between two chains: in the output, rows that lie a multiple of 4 KiB
  // apart push each other out of L1.
  typename M::Number* tile;
};

template <class M>
constexpr bool kTakesFewRows = sizeof(typename M::Number) == sizeof(float);

// At least one, because left_sums may be all there is to compute.
template <class M>
int64_t panels_of(const LinearProduct& args) {
  return std::max<int64_t>(ceil_div(args.cols, kPanel<M>), 1);
}

// Elements from a row of the left matrix to the next, where they are few. The line more keeps cells
// of all rows out of the same ways of L1 where depth is a power of two.
template <class M>
int64_t few_rows_stride(const LinearProduct& args) {
  constexpr int64_t kLine = kLineBytes / sizeof(typename M::Element);
  return round_up(args.depth, kLine) + kLine;
}

// Columns of a block of a product with few rows.
template <class M>
int64_t few_rows_columns(const LinearProduct& args) {
  if (args.quantized.words) return kMostCodeVectors * M::kLanes;
  return args.right_step == 1 ? kPanel<M> : kAcrossColumns<M>;
}

template <class M>
Scratch<M> scratch_of(const LinearProduct& args, const Layout& layout, Arena& arena) {
  const int64_t rows = ceil_div(args.rows, layout.down);
  const int64_t cols = ceil_div(panels_of<M>(args), layout.across) * kPanel<M>;
  Scratch<M> scratch;
  if (layout.few_rows) {
    const int64_t block = layout.sums == Sums::kScratch ? args.rows * few_rows_columns<M>(args) : 0;
    scratch.left =
        arena.take<typename M::Element>(padded_few_rows(args.rows) * few_rows_stride<M>(args));
    scratch.sums = arena.take<typename M::Number>(block);
    scratch.bias = arena.take<typename M::Number>(cols);
    scratch.left_sums = arena.take<typename M::Number>(
        args.quantized.shifts ? args.rows * chains_of(args.quantized, args.depth) : 0);
    return scratch;
  }
  const int64_t cells = layout.left_once ? ceil_div(args.depth, M::kPerCell) : kCells;
  const int64_t strips = layout.left_once ? ceil_div(rows, kStripRows) : 1;
  scratch.left = arena.take<typename M::Element>(strips * cells * kStrip<M> * M::kPerCell);
  scratch.right = arena.take<typename M::Element>(cols * kCells * M::kPerCell);
  scratch.sums = arena.take<typename M::Number>(layout.sums == Sums::kScratch ? rows * cols : 0);
  scratch.bias = arena.take<typename M::Number>(cols);
  scratch.tile = arena.take<typename M::Number>(kStripRows * kPanel<M>);
  scratch.left_sums = arena.take<typename M::Number>(args.left_sums ? rows + kStrip<M> : 0);
  return scratch;
}

// Where the sums of a strip and a panel are read and stored.
template <class A>
struct Sink {
  const A* from;  // sums so far; or null, if they begin with the bias
  int64_t from_row;
  A* to;
  int64_t to_row;
  int64_t columns;  // of the panel
  const A* bias;    // (columns,); or null
};

template <class M, int kRows>
[[gnu::noinline]] void linear_kernel(const typename M::Element* strip,
                                     const typename M::Element* panel, int64_t cells,
                                     const Sink<typename M::Number>& sink) {
  typename M::Sum sum[kRows][kPanelVectors] = {};
  add_products<M>(strip, M::kPerCell, kStrip<M> * M::kPerCell, panel, kPanel<M> * M::kPerCell,
                  cells, sum);
  using A = typename M::Number;
  const auto put = [&](int v, auto count) {
    A* to = sink.to + v * M::kLanes;
    if (sink.from) {
      const A* from = sink.from + v * M::kLanes;
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        store<A>(to + r * sink.to_row, load<A>(from + r * sink.from_row, count) + sum[r][v], count);
      }
    } else {
      const Vec<A> bias = sink.bias ? load<A>(sink.bias + v * M::kLanes, count) : Vec<A>{};
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) store<A>(to + r * sink.to_row, sum[r][v] + bias, count);
    }
  };
  for_each_panel_vector<typename M::Number>(sink.columns, put);
}

template <class M, class F>
void visit_operand(DType dtype, F&& f) {
  if constexpr (M::kPerCell == 2) {
    if (dtype == DType::kFloat32) {
      f.template operator()<float>();
    } else {
      f.template operator()<BFloat16>();
    }
  } else if constexpr (sizeof(typename M::Element) == 8) {
    f.template operator()<double>();
  } else {
    visit_dtype_up_to_float32(dtype, f);
  }
}

template <class M>
class Linear {
  using A = typename M::Number;
  using Element = typename M::Element;

 public:
  Linear(const LinearProduct& args, const Layout& layout, const Scratch<M>& scratch)
      : args_(args), layout_(layout), scratch_(scratch) {}

  void pack_all_left() const {
    const int64_t strips = strips_of(args_.rows);
    for (int64_t k = 0; k < args_.depth; k += kElements) {
      for (int64_t s = 0; s < strips; ++s) pack_strip(0, args_.rows, s, k, left_at(s, strips, k));
    }
  }

  // Likewise, for few_rows.
  void pack_few_rows() const {
    visit_operand<M>(args_.left_dtype, [&]<class T>() {
      const T* left = static_cast<const T*>(args_.left);
      pack_rows<M>([&](int64_t i) { return left + i * args_.left_row; }, args_.rows, args_.depth,
                   few_rows_stride<M>(args_), scratch_.left);
    });
    const int64_t stride = few_rows_stride<M>(args_);
    for (int64_t i = args_.rows; i < padded_few_rows(args_.rows); ++i) {
      std::fill_n(scratch_.left + i * stride, stride, Element{});
    }
    if constexpr (kTakesFewRows<M>) {
      if (!args_.quantized.shifts) return;
      const int64_t chains = chains_of(args_.quantized, args_.depth);
      for (int64_t i = 0; i < args_.rows; ++i) {
        sum_chains<M>(args_.quantized, args_.depth, scratch_.left + i * stride,
                      scratch_.left_sums + i * chains);
      }
    }
  }

  // A piece of columns, read in place.
  void few_rows(int64_t number) const {
    const int64_t panels = panels_of<M>(args_);
    const int64_t begin = panels * number / layout_.across * kPanel<M>;
    const int64_t end = std::min(panels * (number + 1) / layout_.across * kPanel<M>, args_.cols);
    const bool in_scratch = layout_.sums == Sums::kScratch;
    const int64_t block = few_rows_columns<M>(args_);
    if (args_.bias) widen_line(args_.bias, args_.bias_dtype, begin, end - begin, scratch_.bias);
    FewRows<M> few{.left = scratch_.left,
                   .left_row = few_rows_stride<M>(args_),
                   .sums = scratch_.sums,
                   .sums_row = in_scratch ? block : args_.cols,
                   .bias = nullptr,
                   .add = false,
                   .rows = args_.rows};
    visit_operand<M>(args_.right_dtype, [&]<class T>() {
      for (int64_t col = begin; col < end; col += block) {
        const int64_t cols = std::min(block, end - col), after = end - col - cols;
        const T* right = static_cast<const T*>(args_.right) + col * args_.right_col;
        if (!in_scratch) few.sums = sums_at<A>(args_, layout_.sums, 0, col);
        if (args_.bias) few.bias = scratch_.bias + col - begin;
        if (args_.quantized.words) {
          const float* sums = args_.quantized.shifts ? scratch_.left_sums : nullptr;
          multiply_few_rows_of_codes(args_, few, sums, col, cols);
          if (sums) put_not_finite(few, col, cols);
        } else {
          visit_few_rows(args_.rows, [&]<int kRows>() {
            if (args_.right_step == 1) {
              multiply_few_rows<M, T, kChain, kRows>(few, right, args_.right_col, cols, args_.depth,
                                                     after);
            } else {
              multiply_few_rows_across<M, T, kChain, kRows>(few, right, args_.right_step, cols,
                                                            args_.depth, after);
            }
          });
        }
        if (layout_.finish) {
          finish_rows(args_, layout_.sums, few.sums, few.sums_row, 0, args_.rows, col, cols);
        }
      }
    });
  }

  // Sums of rows with NaN or Inf, of codes with shifts, which kernels add apart: those of the
  // products that are not finite.
  void put_not_finite(const FewRows<M>& few, int64_t col, int64_t cols) const {
    const QuantizedWeight& weight = args_.quantized;
    const int64_t chains = chains_of(weight, args_.depth);
    for (int64_t i = 0; i < args_.rows; ++i) {
      const A* of_chains = scratch_.left_sums + i * chains;
      if (std::all_of(of_chains, of_chains + chains, [](A s) { return std::isfinite(s); }))
        continue;
      const Element* row = few.left + i * few.left_row;
      int64_t first = 0, last = args_.depth;
      while (first < last && std::isfinite(widen(row[first]))) ++first;
      while (first < last && std::isfinite(widen(row[last - 1]))) --last;
      for (int64_t j = 0; j < cols && first < last; ++j) {
        A sum = few.bias ? few.bias[j] : A{0};
        for (int64_t k = first; k < last; ++k) {
          const A left = widen(row[k]);
          if (!std::isfinite(left)) sum += left * number_of(weight, args_.cols, col + j, k);
        }
        few.sums[i * few.sums_row + j] = sum;
      }
    }
  }

  void piece(int64_t number) const {
    const int64_t down = number % layout_.down, across = number / layout_.down;
    const int64_t row = args_.rows * down / layout_.down;
    const int64_t rows = args_.rows * (down + 1) / layout_.down - row;
    const int64_t panels = panels_of<M>(args_);
    const int64_t col = panels * across / layout_.across * kPanel<M>;
    const int64_t end = panels * (across + 1) / layout_.across * kPanel<M>;
    const int64_t cols = std::min(end, args_.cols) - col;
    const bool sums_left = args_.left_sums && across == 0;
    if (args_.bias) widen_line(args_.bias, args_.bias_dtype, col, cols, scratch_.bias);
    if (sums_left && args_.accumulate) {
      widen_line(args_.left_sums, args_.sums_dtype, row, rows, scratch_.left_sums);
    } else if (sums_left) {
      std::fill_n(scratch_.left_sums, rows, A{0});
    }

    const bool in_scratch = layout_.sums == Sums::kScratch;
    A* sums = in_scratch ? scratch_.sums : sums_at<A>(args_, layout_.sums, row, col);
    const int64_t sums_row = in_scratch ? cols : args_.cols;
    const int64_t strips = strips_of(rows);
    int64_t k = 0;
    do {
      const int64_t count = std::min(kElements, args_.depth - k);
      const int64_t cells = ceil_div(count, M::kPerCell);
      const bool is_last = k + count == args_.depth;
      // With few rows packing is most of the work, otherwise the tiles.
      Ahead right_ahead = right_at(is_last ? nullptr : args_.right, col, cols, k + count);
      const int64_t panels_here = std::max<int64_t>(ceil_div(cols, kPanel<M>), 1);
      const int64_t squares = panels_here * std::max<int64_t>(ceil_div(count, kSquare<M>), 1);
      const int64_t lines_packing = layout_.left_once ? ceil_div(right_ahead.lines(), squares) : 0;
      const int64_t lines_computing = ceil_div(right_ahead.lines(), strips * panels_here);
      for (int64_t j = 0; j < cols; j += kPanel<M>) {
        const int64_t columns = std::min(kPanel<M>, cols - j);
        Element* panel = scratch_.right + j * kCells * M::kPerCell;
        if (args_.quantized.words) {
          pack_codes<M>(args_, col + j, columns, k, count, panel);
          continue;
        }
        visit_operand<M>(args_.right_dtype, [&]<class T>() {
          pack_right<M, T>(args_, col + j, columns, k, count, panel, right_ahead, lines_packing);
        });
      }
      for (int64_t s = 0; s < strips; ++s) {
        const int64_t first = s * rows / strips;
        const int64_t height = (s + 1) * rows / strips - first;
        Ahead left_ahead = left_after(row, rows, s, k);
        const int64_t left_lines = ceil_div(left_ahead.lines(), panels_here);
        Ahead residual_ahead = residual_at(row + first, is_last ? height : 0, col, cols);
        const int64_t residual_lines = ceil_div(residual_ahead.lines(), panels_here);
        Element* strip = scratch_.left;
        if (layout_.left_once) {
          strip = left_at(s, strips, k);
        } else {
          pack_strip(row, rows, s, k, strip);
        }
        if (sums_left) {
          add_left<M>(args_, row + first, height, k, count, strip, scratch_.left_sums + first);
        }
        for (int64_t j = 0; j < cols; j += kPanel<M>) {
          A* out = sums + first * sums_row + j;
          const int64_t columns = std::min(kPanel<M>, cols - j);
          Sink<A> sink{.from = k > 0 || args_.accumulate ? out : nullptr,
                       .from_row = sums_row,
                       .to = scratch_.tile,
                       .to_row = kPanel<M>,
                       .columns = columns,
                       .bias = args_.bias ? scratch_.bias + j : nullptr};
          for (int64_t i = 0; i < height; ++i) __builtin_prefetch(out + i * sums_row, 1);
          const Element* panel = scratch_.right + j * kCells * M::kPerCell;
          int64_t cell = 0;
          do {
            if (cell + kChain >= cells) {
              sink.to = out;
              sink.to_row = sums_row;
            }
            visit_strip(height, [&]<int kRows>() {
              linear_kernel<M, kRows>(strip + cell * kStrip<M> * M::kPerCell,
                                      panel + cell * kPanel<M> * M::kPerCell,
                                      std::min(kChain, cells - cell), sink);
            });
            sink.from = scratch_.tile;
            sink.from_row = kPanel<M>;
            cell += kChain;
          } while (cell < cells);
          left_ahead.take(left_lines);
          right_ahead.take(lines_computing);
          residual_ahead.take(residual_lines);
        }
        if (is_last && layout_.finish) {
          finish_rows(args_, layout_.sums, sums + first * sums_row, sums_row, row + first, height,
                      col, cols);
        }
      }
      k += count;
    } while (k < args_.depth);
    if (sums_left) {
      round_line(scratch_.left_sums, rows, args_.left_sums, args_.sums_dtype, row);
    }
  }

 private:
  static constexpr int64_t kElements = kCells * M::kPerCell;  // of k

  static int64_t strips_of(int64_t rows) { return ceil_div(rows, kStripRows); }

  // Of all that are packed once: chain by chain, strip by strip.
  Element* left_at(int64_t strip, int64_t strips, int64_t k) const {
    const int64_t cells = ceil_div(std::min(kElements, args_.depth - k), M::kPerCell);
    return scratch_.left + (k / M::kPerCell * strips + strip * cells) * kStrip<M> * M::kPerCell;
  }

  void pack_strip(int64_t row, int64_t rows, int64_t strip, int64_t k, Element* to) const {
    const int64_t strips = strips_of(rows);
    const int64_t first = strip * rows / strips;
    const int64_t height = (strip + 1) * rows / strips - first;
    visit_operand<M>(args_.left_dtype, [&]<class T>() {
      pack_left<M, T>(args_, row + first, height, k, std::min(kElements, args_.depth - k), to);
    });
  }

  // The memory that right panels of `cols` columns are packed from.
  Ahead right_at(const void* right, int64_t col, int64_t cols, int64_t k) const {
    const int64_t count = std::min(kElements, args_.depth - k);
    const int64_t size = size_of(args_.right_dtype);
    if (right == nullptr) return {nullptr, 0, 0, 0};
    const char* first =
        static_cast<const char*>(right) + (k * args_.right_step + col * args_.right_col) * size;
    if (args_.right_step == 1) return {first, cols, count * size, args_.right_col * size};
    return {first, count, cols * size, args_.right_step * size};
  }

  // The residual that is added to a strip when its sums are complete.
  Ahead residual_at(int64_t row, int64_t rows, int64_t col, int64_t cols) const {
    const int64_t size = size_of(args_.output_dtype);
    if (args_.epilogue.residual == nullptr) return {nullptr, 0, 0, 0};
    const char* first =
        static_cast<const char*>(args_.epilogue.residual) + (row * args_.cols + col) * size;
    return {first, rows, cols * size, args_.cols * size};
  }

  // The memory that the next strip is packed from.
  Ahead left_after(int64_t row, int64_t rows, int64_t strip, int64_t k) const {
    const int64_t strips = strips_of(rows);
    if (layout_.left_once || strip + 1 == strips) return {nullptr, 0, 0, 0};
    const int64_t next = row + (strip + 1) * rows / strips;
    const int64_t height = row + (strip + 2) * rows / strips - next;
    const int64_t count = std::min(kElements, args_.depth - k);
    const int64_t size = size_of(args_.left_dtype);
    const char* first =
        static_cast<const char*>(args_.left) + (next * args_.left_row + k * args_.left_step) * size;
    if (args_.left_step == 1) return {first, height, count * size, args_.left_row * size};
    return {first, count, height * size, args_.left_step * size};
  }

  const LinearProduct& args_;
  const Layout& layout_;
  const Scratch<M> scratch_;
};

// Calls f<M>() with the multiplier of a call.
template <class F>
decltype(auto) visit_multiplier(const LinearProduct& args, F&& f) {
  if (args.output_dtype == DType::kFloat64) return f.template operator()<Fma64>();
  if constexpr (kHasPairProducts) {
    const DType dtype = args.left_dtype;
    const bool are_pairs =
        dtype == DType::kBFloat16 || (dtype == DType::kFloat32 && args.rounds_factors);
    if (are_pairs && args.right_dtype == dtype) return f.template operator()<Dot>();
  }
  return f.template operator()<Fma>();
}

// The right matrix is read once. Threads take it in pieces, so that others can take over the pieces
// of a thread that is delayed.
constexpr int64_t kPieceBytes = 1 << 20;
constexpr int64_t kMostPieces = 4;  // of a thread

// Whether the factors are of another dtype than the pairs.
template <class M>
bool rounds(const LinearProduct& args) {
  return M::kPerCell == 2 && args.left_dtype == DType::kFloat32;
}

template <class M>
bool has_few_rows(const LinearProduct& args) {
  if (args.quantized.words && args.kind != LinearKind::kForward) return false;
  return kTakesFewRows<M> && args.rows <= kMostFusedRows && args.left_step == 1 &&
         args.kind != LinearKind::kWeight;
}

template <class M>
Plan plan_few_rows(const LinearProduct& args, const Machine& machine, Layout& layout) {
  const int64_t panels = panels_of<M>(args);
  const int64_t bytes = args.quantized.words ? args.cols * args.quantized.words_of_k * 4
                                             : args.cols * args.depth * size_of(args.right_dtype);
  const int64_t nanoseconds =
      std::max(bytes / kBytes, args.rows * args.cols * args.depth / kMultiplyAdds);
  const int64_t threads = threads_for(nanoseconds, panels, machine);
  const int64_t pieces = std::clamp<int64_t>(bytes / threads / kPieceBytes, 1, kMostPieces);
  layout.down = 1;
  layout.across = std::min(threads * pieces, panels);
  Arena arena(nullptr);
  scratch_of<M>(args, layout, arena);
  layout.slots = {.begin = 0, .bytes = arena.used()};
  return {.workspace_bytes = layout.slots.end(threads),
          .kernel_name =
              args.quantized.words ? "linear_few_rows_of_codes_kernel" : "linear_few_rows_kernel",
          .rows_per_tile = args.rows,
          .splits = layout.across,
          .reason = args.quantized.words ? "few rows: codes are read in place"
                    : rounds<M>(args)    ? "few rows: the weight is read in place, and rounded"
                                         : "few rows: the weight is read in place",
          .threads = threads};
}

Plan plan_linear(const LinearProduct& args, const Machine& machine, Layout& layout) {
  return visit_multiplier(args, [&]<class M>() -> Plan {
    const int64_t panels = panels_of<M>(args);
    const int64_t left_bytes = ceil_div(args.rows, kStripRows) * args.depth * kStrip<M> *
                               static_cast<int64_t>(sizeof(typename M::Element));
    layout.left_once = args.rows <= kFewRows && left_bytes <= kMostLeftBytes;
    layout.sums = place_of_sums(args, sizeof(typename M::Number));
    layout.finish = has_finish(args, layout.sums);
    layout.few_rows = has_few_rows<M>(args);
    if (layout.few_rows) return plan_few_rows<M>(args, machine, layout);
    layout.down = ceil_div(args.rows, kMostRows);
    layout.across = layout.left_once ? panels : ceil_div(panels, kMostCols / kPanel<M>);
    const double left = static_cast<double>(args.rows) * static_cast<double>(args.depth);
    const double work = std::max(left * static_cast<double>(args.cols) / kMultiplyAdds,
                                 left * static_cast<double>(size_of(args.left_dtype)) / kBytes);
    const auto nanoseconds = static_cast<int64_t>(std::min(work, 1e15));
    const int64_t threads =
        threads_for(nanoseconds, panels * ceil_div(args.rows, kStripRows), machine);
    // As many pieces for each thread.
    if (layout.down * layout.across % threads != 0) {
      if (args.rows >= threads * layout.down * 4 * kStripRows) {
        layout.down = ceil_div(layout.down, threads) * threads;
      } else {
        layout.across = std::min(ceil_div(layout.across, threads) * threads, panels);
      }
    }
    const int64_t pieces = layout.down * layout.across;
    Arena arena(nullptr);
    scratch_of<M>(args, layout, arena);
    const int64_t taken = std::min(threads, pieces);
    layout.slots = {.begin = 0, .bytes = arena.used()};
    return {.workspace_bytes = layout.slots.end(taken),
            .kernel_name = "linear_kernel",
            .rows_per_tile = kStripRows,
            .splits = pieces,
            .reason = args.cols == 0 ? "sums of rows"
                      : args.quantized.words && M::kPerCell == 2
                          ? "bfloat16 dot products, dequantised while packing"
                      : args.quantized.words ? "multiply-adds, dequantised while packing"
                      : rounds<M>(args)      ? "bfloat16 dot products, rounded while packing"
                      : M::kPerCell == 2     ? "bfloat16 dot products"
                                             : "multiply-adds, converted while packing",
            .threads = taken};
  });
}

void run_linear(const LinearProduct& args, const Plan& plan, const Layout& layout, void* workspace,
                const Context& context) {
  visit_multiplier(args, [&]<class M>() {
    std::atomic<int64_t> next{0};
    context.for_each(plan.threads, 1, [&](int64_t slot, int64_t) {
      Arena own(layout.slots.of(workspace, slot));
      const Linear<M> linear(args, layout, scratch_of<M>(args, layout, own));
      if (layout.few_rows) {
        linear.pack_few_rows();
      } else if (layout.left_once) {
        linear.pack_all_left();
      }
      for (int64_t piece = next.fetch_add(1); piece < plan.splits; piece = next.fetch_add(1)) {
        if constexpr (kTakesFewRows<M>) {
          if (layout.few_rows) {
            linear.few_rows(piece);
            continue;
          }
        }
        linear.piece(piece);
      }
    });
  });
}

Operator<LinearProduct> wide_product() {
  return operator_of<LinearProduct, Layout, plan_linear, run_linear>();
}

bool takes_codes(const LinearProduct& args) { return quantizes(args) || multiplies_codes(args); }

Operator<LinearProduct> product_of_codes(const LinearProduct& args) {
  return multiplies_codes(args) ? codes_by_codes() : quantized_product();
}

Plan plan_codes(const LinearProduct& args, const Machine& machine) {
  return product_of_codes(args).plan(args, machine);
}

void run_codes(const LinearProduct& args, const Plan& plan, void* workspace,
               const Context& context) {
  product_of_codes(args).run(args, plan, workspace, context);
}

Operator<LinearProduct> products_of_codes() { return {.plan = plan_codes, .run = run_codes}; }

}  // namespace

Operator<LinearProduct> linear_product() {
  return either_of<LinearProduct, takes_codes, products_of_codes, wide_product>();
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
