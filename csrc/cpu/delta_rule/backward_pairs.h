// Gradients of q, k and g in a head's chunk, from those of the pairs of its tokens and of what q
// and k read from and write into the state. A sum over g in a decay is a sum over all that passes
// its token: each kind is summed on its own, as differences of sums over all pairs would drown in
// the rounding of those that do not decay.
#pragma once

#include "cpu/delta_rule/backward_products.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace delta_rule {

// Rows of keys, and the gradients of pairs, [t][s]: of of_keys, for s < t, and of of_queries.
template <class A>
struct KeyGradients {
  A *dq_before, *dk_before, *dk_after;
  A *dq, *dk;  // sums over the heads of a key head
  A* dleft;    // (key_dim,)
  Line<A>*dkeys, *dqueries;
  A* dg;                 // (kTokens,), or rows with a decay for each channel
  A *of_query, *of_key;  // rows, with a decay for each channel

  KeyGradients(const DeltaRule& args, const Chunk<A>& chunk, Arena& arena)
      : dleft(nullptr), dkeys(nullptr), dqueries(nullptr), dg(nullptr) {
    for (A** each : {&dq_before, &dk_before, &dk_after, &dq, &dk}) *each = chunk.rows(arena);
    dleft = arena.take<A>(chunk.widths.key_stride);
    for (auto* each : {&dkeys, &dqueries}) *each = arena.take<Line<A>>(kTokens);
    dg = args.g_has_channels ? chunk.rows(arena) : arena.take<A>(kTokens);
    of_query = args.g_has_channels ? chunk.rows(arena) : nullptr;
    of_key = args.g_has_channels ? chunk.rows(arena) : nullptr;
  }
};

// ---- a decay for a head -------------------------------------------------------------------------

// dg[i]: what comes from before the chunk to t >= i, what goes from s < i to its end, what passes
// the whole chunk, and pairs with s < i <= t, whose gradients times decays are in `pairs`.
template <class A>
void put_dg(const Chunk<A>& chunk, const A* from_before, const A* to_after, A through,
            const Line<A>* pairs, A* dg) {
  const int64_t tokens = chunk.tokens;
  double sums[kTokens];
  // What pairs with s bring over the token at hand: with later tokens of its block, and of others.
  alignas(64) Line<A> of_block;
  alignas(64) Line<A> of_others;
  for (A* line : {of_block, of_others}) std::fill_n(line, kTokens, A(0));
  for (int64_t i = tokens - 1; i >= 0; --i) {
    const bool is_next = i % kBlock == kBlock - 1;
    Vec<A> over{};
    for (int64_t s = 0; s < i; s += kLanes<A>) {
      Vec<A> block = load<A>(of_block + s), others = load<A>(of_others + s);
      if (is_next) {
        others += block;
        store<A>(of_others + s, others);
        block = Vec<A>{};
      }
      block += load<A>(pairs[i] + s);
      store<A>(of_block + s, block);
      const Vec<A> all = block + others;
      over += s + kLanes<A> <= i ? all : keep_columns<A>(all, s, 0, i);
    }
    sums[i] = sum_of_lanes<A>(over);
  }
  double after = through, before = 0;
  for (int64_t i = 0; i < tokens; ++i) {
    sums[i] += after;
    after += to_after[i];
  }
  for (int64_t i = tokens - 1; i >= 0; --i) {
    before += from_before[i];
    dg[i] = static_cast<A>(sums[i] + before);
  }
}

template <class A>
void put_key_gradients(const Chunk<A>& chunk, KeyGradients<A>& own) {
  const int64_t tokens = chunk.tokens, stride = chunk.widths.key_stride, width = chunk.widths.key;
  A from_before[kTokens], to_after[kTokens];
  for (int64_t t = 0; t < tokens; ++t) {
    const Vec<A> before = broadcast<A>(chunk.before[t]), after = broadcast<A>(chunk.after[t]);
    Vec<A> read{}, written{};
    for (int64_t i = t * stride; i < t * stride + width; i += kLanes<A>) {
      const Vec<A> dq = load<A>(own.dq_before + i), dk = load<A>(own.dk_before + i);
      const Vec<A> put = load<A>(own.dk_after + i);
      read = fma<A>(dq, load<A>(chunk.q_before + i), read);
      read = fma<A>(dk, load<A>(chunk.k_before + i), read);
      written = fma<A>(put, load<A>(chunk.k_after + i), written);
      store<A>(own.dq + i, fma<A>(before, dq, load<A>(own.dq + i)));
      store<A>(own.dk + i, fma<A>(after, put, fma<A>(before, dk, load<A>(own.dk + i))));
    }
    from_before[t] = sum_of_lanes<A>(read);
    to_after[t] = sum_of_lanes<A>(written);
  }
  // It is part of each token's gradient, so its digits count: summed in double.
  double through = 0;
  for (int64_t n = 0; n < width; ++n) through += own.dleft[n];
  alignas(64) Line<A> pairs[kTokens];
  const int64_t columns = padded<A>(tokens);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t s = 0; s < columns; s += kLanes<A>) {
      const Vec<A> of_key = load<A>(own.dkeys[t] + s), of_query = load<A>(own.dqueries[t] + s);
      if (s > t) {  // both are 0
        continue;
      }
      const Vec<A> both = fma<A>(of_key, load<A>(chunk.of_keys[t] + s),
                                 of_query * load<A>(chunk.of_queries[t] + s));
      store<A>(pairs[t] + s, keep_columns<A>(both, s, 0, t));
      const Vec<A> decay = load<A>(chunk.decay[t] + s);
      store<A>(own.dkeys[t] + s, decay * of_key);
      store<A>(own.dqueries[t] + s, decay * of_query);
    }
  }
  const A of_all = static_cast<A>(chunk.left[0] * through);
  put_dg(chunk, from_before, to_after, of_all, pairs, own.dg);
  const Panel<A> k{chunk.k, stride}, q{chunk.q, stride};
  for_each_tile<A>(tokens, width, QueryGradient<A>{{own.dqueries[0], kTokens, 1}, k, own.dq});
  for_each_tile<A>(tokens, width, KeyGradient<A>{own.dkeys, own.dqueries, k, q, tokens, own.dk});
}

// ---- a decay for each channel -------------------------------------------------------------------

// What does not come from pairs.
template <class A>
void put_channel_state_gradients(const Chunk<A>& chunk, KeyGradients<A>& own) {
  const int64_t tokens = chunk.tokens, stride = chunk.widths.key_stride;
  for (int64_t n = 0; n < chunk.widths.key; n += kLanes<A>) {
    // Sums over tokens restart with each block, for short chains.
    Vec<A> passed = load<A>(chunk.left + n) * load<A>(own.dleft + n), of_block{};
    for (int64_t t = 0; t < tokens; ++t) {
      if (t % kBlock == 0) {
        passed += of_block;
        of_block = Vec<A>{};
      }
      const int64_t i = t * stride + n, block = t / kBlock * stride + n;
      const Vec<A> dq = load<A>(own.dq_before + i), dk = load<A>(own.dk_before + i);
      const Vec<A> put = load<A>(own.dk_after + i);
      const Vec<A> before = load<A>(chunk.up_to + i) * load<A>(chunk.blocks_before + block);
      const Vec<A> after = load<A>(chunk.beyond + i) * load<A>(chunk.blocks_after + block);
      store<A>(own.dq + i, fma<A>(before, dq, load<A>(own.dq + i)));
      store<A>(own.dk + i, fma<A>(after, put, fma<A>(before, dk, load<A>(own.dk + i))));
      store<A>(own.dg + i, passed + of_block);
      of_block = fma<A>(put, load<A>(chunk.k_after + i), of_block);
    }
    passed = of_block = Vec<A>{};
    for (int64_t t = tokens - 1; t >= 0; --t) {
      if (t % kBlock == kBlock - 1) {
        passed += of_block;
        of_block = Vec<A>{};
      }
      const int64_t i = t * stride + n;
      of_block = fma<A>(load<A>(own.dq_before + i), load<A>(chunk.q_before + i), of_block);
      of_block = fma<A>(load<A>(own.dk_before + i), load<A>(chunk.k_before + i), of_block);
      store<A>(own.dg + i, load<A>(own.dg + i) + (passed + of_block));
    }
  }
}

// Pairs of tokens t of a block with tokens s before it.
template <class A>
void put_gradients_before_block(Chunk<A>& chunk, int64_t first, int64_t last,
                                KeyGradients<A>& own) {
  const int64_t stride = chunk.widths.key_stride, width = chunk.widths.key;
  put_reach(chunk, first / kBlock);
  const auto rows = [&](const Line<A>* pairs, A* to) {
    for_each_tile<A>(
        last - first, width,
        RowProduct<A>{{pairs[first], kTokens, 1}, {chunk.scaled, stride}, first, stride, to});
  };
  rows(own.dqueries, own.of_query);
  rows(own.dkeys, own.of_key);
  for (int64_t n = 0; n < width; n += kLanes<A>) {
    Vec<A> passed{};
    for (int64_t t = last - 1; t >= first; --t) {
      const int64_t i = t * stride + n, j = (t - first) * stride + n;
      const Vec<A> decay = load<A>(chunk.up_to + i);
      const Vec<A> dq = load<A>(own.of_query + j), dk = load<A>(own.of_key + j);
      store<A>(own.dq + i, fma<A>(decay, dq, load<A>(own.dq + i)));
      store<A>(own.dk + i, fma<A>(decay, dk, load<A>(own.dk + i)));
      passed = fma<A>(load<A>(chunk.q_local + i), dq, passed);
      passed = fma<A>(load<A>(chunk.k_local + i), dk, passed);
      store<A>(own.dg + i, load<A>(own.dg + i) + passed);
    }
  }
  const auto columns = [&](const Line<A>* pairs, const A* local, A* to) {
    for_each_tile<A>(first, width,
                     RowProduct<A>{{pairs[first], 1, kTokens},
                                   {local + first * stride, stride},
                                   last - first,
                                   stride,
                                   to});
  };
  columns(own.dqueries, chunk.q_local, own.of_query);
  columns(own.dkeys, chunk.k_local, own.of_key);
  for (int64_t n = 0; n < width; n += kLanes<A>) {
    Vec<A> passed{}, of_block{};
    for (int64_t s = 0; s < first; ++s) {
      if (s % kBlock == 0) {
        passed += of_block;
        of_block = Vec<A>{};
      }
      const int64_t i = s * stride + n;
      const Vec<A> dk = load<A>(own.of_query + i) + load<A>(own.of_key + i);
      store<A>(own.dk + i, fma<A>(load<A>(chunk.reach + i), dk, load<A>(own.dk + i)));
      store<A>(own.dg + i, load<A>(own.dg + i) + (passed + of_block));
      of_block = fma<A>(load<A>(chunk.scaled + i), dk, of_block);
    }
  }
}

// Pairs of tokens of one block.
template <class A>
void put_gradients_of_block(const Chunk<A>& chunk, int64_t first, int64_t last,
                            KeyGradients<A>& own) {
  const int64_t stride = chunk.widths.key_stride;
  for (int64_t n = 0; n < chunk.widths.key; n += kLanes<A>) {
    for (int64_t s = first; s < last; ++s) {
      const Vec<A> k = load<A>(chunk.k + s * stride + n);
      Vec<A> passing[kBlock];  // of each t, what a pair brings to all g of (s, t]
      Vec<A> decay = broadcast<A>(1), dk{};
      for (int64_t t = s; t < last; ++t) {
        const int64_t i = t * stride + n;
        if (t > s) decay *= load<A>(chunk.decay_of_token + i);
        const Vec<A> of_query = broadcast<A>(own.dqueries[t][s]);
        const Vec<A> of_key = broadcast<A>(own.dkeys[t][s]);
        const Vec<A> factor =
            decay * fma<A>(of_key, load<A>(chunk.k + i), of_query * load<A>(chunk.q + i));
        const Vec<A> decayed = decay * k;
        dk += factor;
        store<A>(own.dq + i, fma<A>(of_query, decayed, load<A>(own.dq + i)));
        store<A>(own.dk + i, fma<A>(of_key, decayed, load<A>(own.dk + i)));
        passing[t - s] = factor * k;
      }
      const int64_t of_s = s * stride + n;
      store<A>(own.dk + of_s, load<A>(own.dk + of_s) + dk);
      Vec<A> passed{};
      for (int64_t t = last - 1; t > s; --t) {
        const int64_t i = t * stride + n;
        passed += passing[t - s];
        store<A>(own.dg + i, load<A>(own.dg + i) + passed);
      }
    }
  }
}

template <class A>
void put_channel_gradients(Chunk<A>& chunk, KeyGradients<A>& own) {
  put_channel_state_gradients(chunk, own);
  for (int64_t first = 0; first < chunk.tokens; first += kBlock) {
    const int64_t last = std::min(chunk.tokens, first + kBlock);
    if (first > 0) put_gradients_before_block(chunk, first, last, own);
    put_gradients_of_block(chunk, first, last, own);
  }
}

}  // namespace delta_rule
}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
