// Blocks of channels: a chunk's tokens as rows of a block, and the numbers of its states, read from
// tensors of any dtype and strides, and rounded to them.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cpu/lines.h"
#include "cpu/vec_squares.h"
#include "ops/selective_scan.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace selective_scan {

constexpr int64_t kTokens = kScanChunk;
template <class A>
constexpr int64_t kBlock = 2 * kLanes<A>;  // channels

template <class A>
using Row = A[kBlock<A>];
template <class A>
using Rows = Row<A>[kTokens];
template <class A>
using Lines = A[kLanes<A>][kTokens];

// scalar: rows[t][lane + i] = lines[i][t]
template <class A>
void put_columns(const Lines<A>& lines, int64_t tokens, int64_t lane, Row<A>* rows) {
  int64_t t = 0;
  if constexpr (std::is_same_v<A, float>) {
    for (; t + kLanes<A> <= tokens; t += kLanes<A>) {
      Vec<A> square[kLanes<A>];
      for (int i = 0; i < kLanes<A>; ++i) square[i] = load<A>(lines[i] + t);
      transpose(square);
      for (int i = 0; i < kLanes<A>; ++i) store<A>(rows[t + i] + lane, square[i]);
    }
  }
  for (; t < tokens; ++t) {
    for (int i = 0; i < kLanes<A>; ++i) rows[t][lane + i] = lines[i][t];
  }
}

// scalar: lines[i][t] = rows[t][lane + i]
template <class A>
void take_columns(const Row<A>* rows, int64_t tokens, int64_t lane, Lines<A>& lines) {
  int64_t t = 0;
  if constexpr (std::is_same_v<A, float>) {
    for (; t + kLanes<A> <= tokens; t += kLanes<A>) {
      Vec<A> square[kLanes<A>];
      for (int i = 0; i < kLanes<A>; ++i) square[i] = load<A>(rows[t + i] + lane);
      transpose(square);
      for (int i = 0; i < kLanes<A>; ++i) store<A>(lines[i] + t, square[i]);
    }
  }
  for (; t < tokens; ++t) {
    for (int i = 0; i < kLanes<A>; ++i) lines[i][t] = rows[t][lane + i];
  }
}

// to[i] += sum over the lanes of from[i]
template <class A>
void add_lanes(const Vec<A>* from, int64_t count, A* to) {
  int64_t i = 0;
  if constexpr (std::is_same_v<A, float>) {
    for (; i + kLanes<A> <= count; i += kLanes<A>) {
      Vec<float> square[kParts][4];
      std::copy_n(from + i, kLanes<A>, &square[0][0]);
      store<A>(to + i, load<A>(to + i) + sums_of_lanes(square));
    }
  }
  for (; i < count; ++i) to[i] += sum_of_lanes<A>(from[i]);
}

// A block of channels; none has channels of two groups.
struct Block {
  int64_t group, first, channels;
};

// Tokens of a chunk.
struct Span {
  int64_t sample, begin, tokens;
};

// Rows of a block from a tensor (batch, channels, length); lanes beyond its channels are 0.
template <class A>
void read_rows(const void* tensor, DType dtype, const ScanStride& stride, const Block& block,
               const Span& span, Row<A>* rows) {
  const int64_t origin =
      span.sample * stride.sample + block.first * stride.channel + span.begin * stride.token;
  if (stride.channel == 1) {
    visit_numbers<A>(dtype, [&]<class T>() {
      const T* from = static_cast<const T*>(tensor) + origin;
      for (int64_t t = 0; t < span.tokens; ++t) {
        if (block.channels < kBlock<A>) std::fill_n(rows[t], kBlock<A>, A(0));
        for_each_vector<A>(0, block.channels, [&](int64_t c, auto lanes) {
          store<A>(rows[t] + c, load<A>(from + t * stride.token + c, lanes));
        });
      }
    });
    return;
  }
  for (int64_t c = 0; c < kBlock<A>; c += kLanes<A>) {
    alignas(64) Lines<A> lines;
    for (int64_t i = 0; i < kLanes<A>; ++i) {
      if (c + i < block.channels) {
        widen_strided(tensor, dtype, origin + (c + i) * stride.channel, stride.token, span.tokens,
                      lines[i]);
      } else {
        std::fill_n(lines[i], span.tokens, A(0));
      }
    }
    put_columns<A>(lines, span.tokens, c, rows);
  }
}

// Rounds rows of a block to a dense tensor (batch, channels, length) in the order of results.
template <class A>
void write_rows(const SelectiveScan& args, const Row<A>* rows, const Block& block, const Span& span,
                void* tensor, DType dtype) {
  if (args.channels_last) {
    for (int64_t t = 0; t < span.tokens; ++t) {
      const int64_t token = span.sample * args.length + span.begin + t;
      round_line(rows[t], block.channels, tensor, dtype, token * args.channels + block.first);
    }
    return;
  }
  for (int64_t c = 0; c < block.channels; c += kLanes<A>) {
    alignas(64) Lines<A> lines;
    take_columns<A>(rows, span.tokens, c, lines);
    for (int64_t i = 0; i < std::min<int64_t>(kLanes<A>, block.channels - c); ++i) {
      const int64_t line = span.sample * args.channels + block.first + c + i;
      round_line(lines[i], span.tokens, tensor, dtype, line * args.length + span.begin);
    }
  }
}

// scalar: states[n][c] = tensor[(channel + c) * state + n], or 0 of null and beyond the channels
template <class A>
void read_states(const void* tensor, DType dtype, int64_t channel, int64_t channels, int64_t state,
                 Row<A>* states) {
  std::fill_n(&states[0][0], state * kBlock<A>, A(0));
  if (!tensor) return;
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t n = 0; n < state; n += kTokens) {
      A line[kTokens];
      const int64_t count = std::min(kTokens, state - n);
      widen_line(tensor, dtype, (channel + c) * state + n, count, line);
      for (int64_t i = 0; i < count; ++i) states[n + i][c] = line[i];
    }
  }
}

// scalar: tensor[(channel + c) * state + n] = from[n * stride + c]
template <class A>
void write_states(const A* from, int64_t stride, int64_t channel, int64_t channels, int64_t state,
                  void* tensor, DType dtype) {
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t n = 0; n < state; n += kTokens) {
      A line[kTokens];
      const int64_t count = std::min(kTokens, state - n);
      for (int64_t i = 0; i < count; ++i) line[i] = from[(n + i) * stride + c];
      round_line(line, count, tensor, dtype, (channel + c) * state + n);
    }
  }
}

}  // namespace selective_scan
}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
