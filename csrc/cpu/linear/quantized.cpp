// A product whose factors are quantised on the fly (SwitchBackQ: Wortsman et al., "Stable and
// low-precision training for large-scale vision-language models", 2023):
//
//   scalar: output[i][j] = (sum over k of code_left[i][k] * code_right[k][j])
//                          * scale_left[i] * scale_right[j] + bias[j]
//
// Two passes. The first reads each factor once, takes a line's largest magnitude while the line is
// in a near cache, and packs its codes into the workspace as the tiles read them: a quarter of the
// factor's bytes, or half where codes take 16 bits. The second computes pieces of the output, in
// tiles as in product.cpp. Sums of codes are exact, so neither pieces, threads nor CPU levels
// change a bit. Done when tiles run at the speed of the integer multiply-adds, and packing at that
// of memory.
//
// The smaller scale is multiplied first: the two together could overflow where a sum does not.
//
// A line with NaN or Inf has no scale. Each of its sums is computed again, as the bias plus those
// float32 products that have such a factor: it is float32's Inf or NaN.
#include "cpu/linear/quantized.h"

#include <cmath>

#include "core/visit.h"
#include "cpu/kernels.h"
#include "cpu/linear/codes.h"
#include "cpu/linear/finish.h"
#include "cpu/pieces.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

// Cells of k between which the sums of a tile go to memory and come back: a strip of them stays in
// L1 for all panels.
constexpr int64_t kCells = 192;
// The largest piece of the output. Its panels stay in L2 for all of its strips.
constexpr int64_t kPieceStrips = 16;
constexpr int64_t kPiecePanels = 8;
// Panels, or strips, that are packed together.
constexpr int64_t kMostGroup = 8;

struct Layout {
  bool has_byte_products;
  Sums sums;
  bool finish;
  int64_t strips;  // of the left factor
  int64_t panels;  // of the right one
  int64_t cells;   // of k
  int64_t piece_panels;
  int64_t panel_group;  // panels that are packed together
  int64_t strip_group;  // strips likewise
  // In the workspace.
  int64_t left_scales;
  int64_t right_cells;
  int64_t right_scales;
  int64_t starts;
  Slots slots;
};

template <class M>
class Quantized {
 public:
  Quantized(const LinearProduct& args, const Layout& layout, void* workspace)
      : args_(args),
        layout_(layout),
        base_(static_cast<char*>(workspace)),
        left_(reinterpret_cast<uint32_t*>(base_)),
        left_scales_(reinterpret_cast<float*>(base_ + layout.left_scales)),
        right_(reinterpret_cast<uint32_t*>(base_ + layout.right_cells)),
        right_scales_(reinterpret_cast<float*>(base_ + layout.right_scales)),
        starts_(reinterpret_cast<int32_t*>(base_ + layout.starts)) {}

  void pack(int64_t number) const {
    const int64_t of_panels = ceil_div(layout_.panels, layout_.panel_group);
    if (number < of_panels) {
      const int64_t panel = number * layout_.panel_group;
      pack_panels(panel, std::min(layout_.panel_group, layout_.panels - panel));
    } else {
      const int64_t strip = (number - of_panels) * layout_.strip_group;
      pack_strips(strip, std::min(layout_.strip_group, layout_.strips - strip));
    }
  }

  void piece(int64_t number, int64_t slot) const {
    const int64_t down = ceil_div(layout_.strips, kPieceStrips);
    const int64_t strip = number % down * kPieceStrips;
    const int64_t strips = std::min(kPieceStrips, layout_.strips - strip);
    const int64_t panel = number / down * layout_.piece_panels;
    const int64_t panels = std::min(layout_.piece_panels, layout_.panels - panel);
    const int64_t col = panel * kPanel<M>;
    const int64_t cols = std::min(panels * kPanel<M>, args_.cols - col);
    const bool in_scratch = layout_.sums == Sums::kScratch;
    Arena own(layout_.slots.of(base_, slot));
    float* bias = args_.bias ? own.take<float>(panels * kPanel<M>) : nullptr;
    if (bias) widen_line(args_.bias, args_.bias_dtype, col, cols, bias);
    float* sums = in_scratch ? own.take<float>(strips * kStripRows * cols)
                             : sums_at<float>(args_, layout_.sums, row_of(strip), col);
    const int64_t sums_row = in_scratch ? cols : args_.cols;
    Span* spans = own.take<Span>(panels * kPanel<M>);
    const bool some = find_not_finite(col, cols, spans);
    for (int64_t cell = 0; cell < layout_.cells; cell += kCells) {
      const int64_t cells = std::min(kCells, layout_.cells - cell);
      const bool is_last = cell + cells == layout_.cells;
      for (int64_t s = 0; s < strips; ++s) {
        const int64_t row = row_of(strip + s), height = row_of(strip + s + 1) - row;
        float* line = sums + (row - row_of(strip)) * sums_row;
        for (int64_t p = 0; p < panels; ++p) {
          const int64_t at = (panel + p) * kPanel<M>;
          const Tile tile{.left = left_cells(strip + s, cell),
                          .right = right_cells(panel + p, cell),
                          .cells = cells,
                          .start = cell == 0 ? starts_ + at : nullptr,
                          .left_scales = is_last ? left_scales_ + (strip + s) * kStrip<M> : nullptr,
                          .right_scales = right_scales_ + at,
                          .bias = bias ? bias + p * kPanel<M> : nullptr,
                          .sums = line + p * kPanel<M>,
                          .sums_row = sums_row,
                          .columns = std::min(kPanel<M>, args_.cols - at)};
          visit_strip(height, [&]<int kRows>() { quantized_kernel<kRows>(tile); });
        }
        if (!is_last) continue;
        for (int64_t i = 0; i < height; ++i) {
          const bool is_finite = !std::isnan(left_scales_[(strip + s) * kStrip<M> + i]);
          if (some || !is_finite) {
            put_not_finite(row + i, is_finite, col, cols, spans, bias, line + i * sums_row);
          }
        }
        if (layout_.finish) {
          finish_rows(args_, layout_.sums, line, sums_row, row, height, col, cols);
        }
      }
    }
  }

 private:
  // Where a line holds numbers that are not finite.
  struct Span {
    int64_t begin;
    int64_t end;
  };

  // A strip by a panel, over some cells of k.
  struct Tile {
    const typename M::Element* left;
    const typename M::Element* right;
    int64_t cells;
    const int32_t* start;      // of the sums, or null: they go on
    const float* left_scales;  // or null: the sums are not complete
    const float* right_scales;
    const float* bias;
    float* sums;  // whole numbers until they are complete
    int64_t sums_row;
    int64_t columns;
  };

  template <int kRows>
  [[gnu::noinline]] static void quantized_kernel(const Tile& tile) {
    SignedWords sum[kRows][kPanelVectors] = {};
    add_products<M>(tile.left, M::kPerCell, kStrip<M> * M::kPerCell, tile.right,
                    kPanel<M> * M::kPerCell, tile.cells, sum);
    const auto put = [&](int v, auto count) {
      const int64_t col = v * M::kLanes;
      float* to = tile.sums + col;
      const WordBits start =
          tile.start ? (WordBits)load<float>(reinterpret_cast<const float*>(tile.start) + col)
                     : WordBits{};
      const Vec<float> scale = load<float>(tile.right_scales + col);
      const Vec<float> bias = tile.bias ? load<float>(tile.bias + col) : Vec<float>{};
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        float* at = to + r * tile.sums_row;
        WordBits bits = (WordBits)sum[r][v] + start;
        if (!tile.start) bits += (WordBits)load<float>(at, count);
        const auto whole = (SignedWords)bits;
        if (tile.left_scales) {
          const Vec<float> other = broadcast<float>(tile.left_scales[r]);
          const Vec<float> number = __builtin_convertvector(whole, Vec<float>) *
                                    smaller(other, scale) * larger(other, scale);
          store<float>(at, tile.bias ? number + bias : number, count);
        } else {
          store<float>(at, (Vec<float>)whole, count);
        }
      }
    };
    for_each_panel_vector<float>(tile.columns, put);
  }

  int64_t row_of(int64_t strip) const { return std::min(strip * kStripRows, args_.rows); }

  const typename M::Element* left_cells(int64_t strip, int64_t cell) const {
    return reinterpret_cast<const typename M::Element*>(left_) +
           (strip * layout_.cells + cell) * kStrip<M> * M::kPerCell;
  }

  const typename M::Element* right_cells(int64_t panel, int64_t cell) const {
    return reinterpret_cast<const typename M::Element*>(right_) +
           (panel * layout_.cells + cell) * kPanel<M> * M::kPerCell;
  }

  void pack_strips(int64_t strip, int64_t strips) const {
    Lines<M, kStrip<M>> lines[kMostGroup];
    for (int64_t s = 0; s < strips; ++s) {
      lines[s].cells = left_ + (strip + s) * layout_.cells * kStrip<M>;
      lines[s].scale = left_scales_ + (strip + s) * kStrip<M>;
    }
    const int64_t row = row_of(strip), rows = row_of(strip + strips) - row;
    if (args_.left_step != 1) {
      return pack_lines_across(left_at(row, 0), args_.left_step, rows, kStripRows, args_.depth,
                               lines, strips);
    }
    visit_bool(args_.rounding_seed != nullptr, [&]<bool kRandom>() {
      for (int64_t s = 0; s < strips; ++s) {
        const int64_t first = row + s * kStripRows;
        const float* from = left_at(first, 0);
        pack_lines<kRandom>([&](int64_t i) { return from + i * args_.left_row; },
                            std::min<int64_t>(kStripRows, row + rows - first), args_.depth,
                            args_.rounding_seed, first * args_.depth, lines[s]);
      }
    });
  }

  void pack_panels(int64_t panel, int64_t panels) const {
    Lines<M, kPanel<M>> lines[kMostGroup];
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t col = (panel + p) * kPanel<M>;
      lines[p].cells = right_ + col * layout_.cells;
      lines[p].scale = right_scales_ + col;
      lines[p].start = starts_ + col;
    }
    const int64_t col = panel * kPanel<M>;
    const int64_t cols = std::min(panels * kPanel<M>, args_.cols - col);
    if (args_.right_step != 1) {
      return pack_lines_across(right_at(0, col), args_.right_step, cols, kPanel<M>, args_.depth,
                               lines, panels);
    }
    for (int64_t p = 0; p < panels; ++p) {
      const float* from = right_at(0, col + p * kPanel<M>);
      pack_lines<false>([&](int64_t j) { return from + j * args_.right_col; },
                        std::min(kPanel<M>, cols - p * kPanel<M>), args_.depth, nullptr, 0,
                        lines[p]);
    }
  }

  template <class At>
  Span span_of(At&& at) const {
    int64_t begin = 0, end = args_.depth;
    while (begin < end && std::isfinite(at(begin))) ++begin;
    while (begin < end && std::isfinite(at(end - 1))) --end;
    return {begin, end};
  }

  // Finds the span of each column without a scale; the others' are empty. Returns
  // whether there is one.
  bool find_not_finite(int64_t col, int64_t cols, Span* spans) const {
    bool some = false;
    for (int64_t j = 0; j < cols; ++j) {
      spans[j] = {0, 0};
      if (!std::isnan(right_scales_[col + j])) continue;
      spans[j] = span_of([&](int64_t k) { return *right_at(k, col + j); });
      some = true;
    }
    return some;
  }

  // Computes sums of a row again: all if it has no scale, else those of columns without one.
  void put_not_finite(int64_t row, bool is_finite, int64_t col, int64_t cols, const Span* columns,
                      const float* bias, float* sums) const {
    const Span of_row =
        is_finite ? Span{0, 0} : span_of([&](int64_t k) { return *left_at(row, k); });
    for (int64_t j = 0; j < cols; ++j) {
      const Span& of_column = columns[j];
      if (is_finite && of_column.begin == of_column.end) continue;
      float sum = bias ? bias[j] : 0.0f;
      const auto add = [&](const Span& span) {
        for (int64_t k = span.begin; k < span.end && !std::isnan(sum); ++k) {
          const float left = *left_at(row, k), right = *right_at(k, col + j);
          if (!std::isfinite(left) || !std::isfinite(right)) sum += left * right;
        }
      };
      add(of_row);
      add(of_column);  // some of them again, which changes no Inf and no NaN
      sums[j] = sum;
    }
  }

  const float* left_at(int64_t row, int64_t k) const {
    return static_cast<const float*>(args_.left) + row * args_.left_row + k * args_.left_step;
  }

  const float* right_at(int64_t k, int64_t col) const {
    return static_cast<const float*>(args_.right) + k * args_.right_step + col * args_.right_col;
  }

  const LinearProduct& args_;
  const Layout& layout_;
  char* base_;
  uint32_t* left_;
  float* left_scales_;
  uint32_t* right_;
  float* right_scales_;
  int32_t* starts_;
};

Plan plan_quantized(const LinearProduct& args, const Machine& machine, Layout& layout) {
  layout.has_byte_products = kMayMultiplyBytes && machine.multiplies_bytes;
  return visit_bytes<ByteCodes, HalfCodes>(layout.has_byte_products, [&]<class M>() -> Plan {
    layout.sums = place_of_sums(args, sizeof(float));
    layout.finish = has_finish(args, layout.sums);
    layout.strips = ceil_div(args.rows, kStripRows);
    layout.panels = ceil_div(args.cols, kPanel<M>);
    layout.cells = ceil_div(args.depth, M::kPerCell);
    const double products = static_cast<double>(args.rows) * static_cast<double>(args.cols) *
                            static_cast<double>(args.depth);
    const double packed = static_cast<double>(args.rows + args.cols) *
                          static_cast<double>(args.depth) * sizeof(float);
    const double work = products / (2 * kMultiplyAdds) + packed / kBytes;
    const auto nanoseconds = static_cast<int64_t>(std::min(work, 1e15));
    const int64_t threads = threads_for(nanoseconds, layout.strips * layout.panels, machine);
    // At least two pieces for each thread.
    const int64_t down = ceil_div(layout.strips, kPieceStrips);
    layout.piece_panels =
        std::clamp<int64_t>(layout.panels * down / (2 * threads), 1, kPiecePanels);
    layout.panel_group = std::clamp<int64_t>(layout.panels / (2 * threads), 1, kMostGroup);
    layout.strip_group = std::clamp<int64_t>(layout.strips / (2 * threads), 1, kMostGroup);
    const int64_t pieces = down * ceil_div(layout.panels, layout.piece_panels);
    Arena arena(nullptr);
    arena.take<uint32_t>(layout.strips * kStrip<M> * layout.cells);
    layout.left_scales = arena.used();
    arena.take<float>(layout.strips * kStrip<M>);
    layout.right_cells = arena.used();
    arena.take<uint32_t>(layout.panels * kPanel<M> * layout.cells);
    layout.right_scales = arena.used();
    arena.take<float>(layout.panels * kPanel<M>);
    layout.starts = arena.used();
    arena.take<int32_t>(layout.panels * kPanel<M>);
    layout.slots.begin = arena.used();
    const int64_t cols = layout.piece_panels * kPanel<M>;
    if (args.bias) arena.take<float>(cols);
    if (layout.sums == Sums::kScratch) arena.take<float>(kPieceStrips * kStripRows * cols);
    arena.take<int64_t>(2 * cols);  // spans
    layout.slots.bytes = arena.used() - layout.slots.begin;
    return {.workspace_bytes = layout.slots.end(threads),
            .kernel_name = "quantized_kernel",
            .rows_per_tile = kStripRows,
            .splits = pieces,
            .reason = layout.has_byte_products
                          ? "int8 dot products, quantised while packing"
                          : "int8 by products of 16 bits (no VNNI), quantised while "
                            "packing",
            .threads = threads};
  });
}

void run_quantized(const LinearProduct& args, const Plan& plan, const Layout& layout,
                   void* workspace, const Context& context) {
  visit_bytes<ByteCodes, HalfCodes>(layout.has_byte_products, [&]<class M>() {
    const Quantized<M> quantized(args, layout, workspace);
    const int64_t packs =
        ceil_div(layout.panels, layout.panel_group) + ceil_div(layout.strips, layout.strip_group);
    for_each_piece_in_order(context, plan.threads, packs,
                            [&](int64_t number, int64_t) { quantized.pack(number); });
    for_each_piece_in_order(context, plan.threads, plan.splits,
                            [&](int64_t number, int64_t slot) { quantized.piece(number, slot); });
  });
}

}  // namespace

Operator<LinearProduct> quantized_product() {
  return operator_of<LinearProduct, Layout, plan_quantized, run_quantized>();
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
