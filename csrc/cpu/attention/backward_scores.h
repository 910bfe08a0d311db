// The scores of a tile of the backward, on their way from S and dP to P and dS.
#pragma once

#include "cpu/attention/backward_shape.h"
#include "cpu/attention/scores.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

template <class T, class M>
class ScoreGradients {
  using E = typename M::Element;
  static constexpr int n = kLanes<float>;

 public:
  ScoreGradients(const AttentionBackward& args, const BackwardShape& shape,
                 const BackwardSums& sums, const BackwardScratch<M>& scratch)
      : args_(args), shape_(shape), sums_(sums), s_(scratch), dropout_(args) {
    dbias_ = shape.wide_bias ? sums.dbias : static_cast<float*>(args.dbias.data);
    changes_ = changes_scores(args) || dropout_;
  }

  void begin(const Sequence& sequence, int64_t split) {
    sequence_ = sequence;
    split_ = split;
  }

  // Whether the mask, if there is one, lets anything through.
  bool read_mask(const BackwardTile& t) {
    if (!is_masked(args_)) return true;
    const auto keep = [&](int64_t row, const KeySet& keys) { mask_[t.first + row] = keys; };
    const MaskedKeys keys = cpu::read_mask(args_, sequence_, t.batch, t.head, t.q0 + t.first,
                                           t.last - t.first, t.k0, t.keys, keep);
    forbids_ = keys.forbids;
    return !keys.seen.empty();
  }

  // scores: S to drop(P); dscores: dP to dS, of the scaled product. Where products go over cells,
  // both become cells, and dS rows besides.
  void operator()(const BackwardTile& t) {
    const SeenKeys seen = seen_keys(args_, sequence_, t.q0 + t.first, t.q0 + t.last);
    // A tile that does not fill its cells is not `whole`: scores computed beyond its end may be
    // infinite, and are multiplied by zeros.
    const bool whole =
        seen.all_first <= t.k0 && seen.all_last >= t.k0 + t.keys && t.keys % M::kPerCell == 0;
    if (dbias_) std::fill_n(dbias_row_, t.keys, 0.0f);
    whole && !changes_ && !forbids_ ? sweep<false>(t) : sweep<true>(t);
    if (dbias_ && args_.dbias.row_stride == 0) {
      float* dbias = dbias_at(t, 0);
      for (int64_t key = 0; key < t.keys; ++key) dbias[key] += dbias_row_[key];
    }
  }

 private:
  struct Both {
    Vec<float> p;
    Vec<float> ds;
  };

  // The numbers of a row of the tile, beside its scores.
  struct RowOf {
    float lse;
    float lse_rest;  // the rounding error of it
    float delta;
    float position;  // of the query, minus that of the tile's first key
    int32_t first;   // keys that it sees
    int32_t last;
    const KeySet* mask;
    const uint16_t* drawn;
    int64_t query;
  };

  template <bool kChanged>
  void sweep(const BackwardTile& t) {
    const int64_t vectors = ceil_div(t.keys, n);
    const ScoreTerms<Vec<float>> terms(args_, t.batch, t.head);
    double dslope = 0.0;
    for (int64_t row = t.first; row < t.last; row += M::kPerCell) {
      RowOf rows[M::kPerCell];
      int64_t from = 0;  // vectors outside of these hold no key that a query of the rows sees
      int64_t to = vectors;
      const int64_t here = std::min<int64_t>(M::kPerCell, t.last - row);
      for (int64_t i = 0; i < here; ++i) rows[i] = row_of<kChanged>(t, row + i, i);
      if constexpr (kChanged) {
        from = rows[0].first / n;
        to = ceil_div(rows[here - 1].last, n);
      }
      for (int64_t v = 0; v < vectors; ++v) {
        Both result[M::kPerCell] = {};
        if (v >= from && v < to) {
          for (int64_t i = 0; i < here; ++i) {
            result[i] = one_vector<kChanged>(t, terms, rows[i], row + i, v, dslope);
          }
        }
        const int64_t at = row * shape_.keys + v * n;
        if constexpr (M::kPerCell == 1) {
          store<float>(s_.scores + at, result[0].p);
          store<float>(s_.dscores + at, result[0].ds);
        } else {
          const WordBits p = pairs_of(result[0].p, result[1].p);
          const WordBits ds = pairs_of(result[0].ds, result[1].ds);
          const int64_t cell = row * shape_.keys + v * n * M::kPerCell;
          std::memcpy(s_.p_cells + cell, &p, sizeof(p));
          std::memcpy(s_.ds_cells + cell, &ds, sizeof(ds));
          for (int64_t i = 0; i < M::kPerCell; ++i) {
            store<float>(s_.ds_rows + at + i * shape_.keys, result[i].ds);
          }
        }
      }
    }
    if (args_.dslopes) {
      sums_.dslopes[(split_ * args_.batch + t.batch) * args_.heads + t.head] += dslope;
    }
  }

  template <bool kChanged>
  RowOf row_of(const BackwardTile& t, int64_t row, int64_t slot) {
    const int64_t query = t.q0 + row;
    RowOf of{};
    of.query = query;
    const int64_t at = lse_row(args_, sequence_, t.batch, t.head, query);
    const float lse = static_cast<const float*>(args_.lse)[at];
    // A row that saw nothing has no probabilities: exp(-inf) is 0.
    of.lse = lse == kMinusInfinity<float> ? -lse : lse;
    if (args_.lse_rest) of.lse_rest = static_cast<const float*>(args_.lse_rest)[at];
    of.delta = sums_.delta[at];
    if constexpr (kChanged) {
      const KeyRange range = keys_of(args_, sequence_, query);
      of.first = static_cast<int32_t>(std::clamp<int64_t>(range.first - t.k0, 0, t.keys));
      of.last = static_cast<int32_t>(std::clamp<int64_t>(range.last - t.k0, 0, t.keys));
      of.position = static_cast<float>(query + sequence_.alignment - t.k0);
      of.mask = forbids_ ? &mask_[row] : nullptr;
      if (dropout_) of.drawn = draw_row(t, query, slot);
    }
    return of;
  }

  // The 16-bit values of a row, from the tile's first key on.
  const uint16_t* draw_row(const BackwardTile& t, int64_t query, int64_t slot) {
    const int64_t key = args_.key_offset + t.k0;
    uint16_t* values = drawn_[slot];
    for (int64_t block = key / 8; block <= (key + t.keys - 1) / 8; block += kPhiloxLanes) {
      write_in_order(
          dropout_.words(t.batch, t.head,
                         broadcast_word(static_cast<uint32_t>(args_.query_offset + query)),
                         block_of_lane() + static_cast<uint32_t>(block)),
          values + (block - key / 8) * kElementsPerBlock);
    }
    return values + key % 8;
  }

  // exp(score - lse). With thousands of keys whose scores are near 0, lse is large beside a score,
  // and their difference drops the score's last bits. So what the difference lost, exact by Dekker
  // (1971), and the rounding error of the saved lse are kept beside it: exp(d + rest) is
  // exp(d) + exp(d) rest. Products in 16 bits would not show it.
  static ONEPASS_INLINE Vec<float> probability(Vec<float> score, const RowOf& of) {
    const Vec<float> difference = score - of.lse;
    if constexpr (M::kPerCell > 1) return exp(difference - of.lse_rest);
    // NaN where a score is infinite, or a row saw no key.
    const auto or_zero = [](Vec<float> x) { return x < 1e3f ? x : Vec<float>{}; };
    const Vec<float> lost = or_zero((score - (difference + of.lse)) - of.lse_rest);
    const Vec<float> exponent = difference + lost;
    const Vec<float> p = exp(exponent);
    return fma<float>(p, or_zero(lost - (exponent - difference)), p);
  }

  template <bool kChanged>
  ONEPASS_INLINE Both one_vector(const BackwardTile& t, const ScoreTerms<Vec<float>>& terms,
                                 const RowOf& of, int64_t row, int64_t v, double& dslope) {
    const int64_t at = row * shape_.keys + v * n;
    Vec<float> score = load<float>(s_.scores + at);
    Vec<float> dp = load<float>(s_.dscores + at);
    if constexpr (!kChanged) {
      const Vec<float> p = probability(score, of);
      return {p, p * (dp - of.delta)};
    } else {
      const KeysInLanes keys(v * n);
      const int64_t left = t.keys - v * n;
      ScoreDerivative<Vec<float>> derivative{};
      score = terms(
          score, keys.ahead(of.position),
          [&] { return bias_of_keys(args_, t.batch, t.head, of.query, t.k0 + v * n, left); },
          &derivative);
      const SignedWords seen = keys.seen(of.first, of.last, of.mask);
      const Vec<float> p = probability(seen ? score : broadcast<float>(kMinusInfinity<float>), of);
      Vec<float> kept = p;
      if (dropout_) {
        const HalfBits drawn = *reinterpret_cast<const HalfBitsUnaligned*>(of.drawn + v * n);
        const Vec<float> factor = dropout_.factor(widen_bits(drawn), dropout_.scale<float>());
        kept = p * factor;
        dp = dp * factor;
      }
      const Vec<float> ds = seen ? p * (dp - of.delta) : Vec<float>{};
      if (dbias_) add_dbias(t, of.query, v, left, ds);
      if (args_.dslopes) dslope += slope_gradient(ds, derivative);
      return {kept, terms.of_product(ds, derivative, seen)};
    }
  }

  float* dbias_at(const BackwardTile& t, int64_t query) const {
    return dbias_ + t.batch * args_.dbias.batch_stride + t.head * args_.dbias.head_stride +
           query * args_.dbias.row_stride + t.k0;
  }

  void add_dbias(const BackwardTile& t, int64_t query, int64_t v, int64_t left, Vec<float> ds) {
    // Sums over queries are summed within tiles first: shorter chains lose fewer bits.
    float* dbias = (args_.dbias.row_stride != 0 ? dbias_at(t, query) : dbias_row_) + v * n;
    if (left >= n) {
      store<float>(dbias, load<float>(dbias) + ds);
    } else {
      store_partial<float>(dbias, load_partial<float>(dbias, left) + ds, left);
    }
  }

  const AttentionBackward& args_;
  const BackwardShape& shape_;
  const BackwardSums& sums_;
  const BackwardScratch<M>& s_;
  const ScoreDropout dropout_;
  Sequence sequence_{};
  int64_t split_ = 0;
  float* dbias_ = nullptr;
  bool changes_ = false;  // something besides the scale, the diagonal and a mask
  bool forbids_ = false;  // whether the mask takes a key of the tile from a query
  float dbias_row_[kTileKeys];
  KeySet mask_[kTileQueries];
  uint16_t drawn_[2][kTileKeys + 2 * kElementsPerDraw];
};

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
