// Sequences that scans go through chunk by chunk: samples, or parts of a packed batch of 1.
#pragma once

#include <cstdint>

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// Consecutive tokens of a sample with a state of their own. Args: a scan's contract. kTokens: of a
// chunk.
template <class Args, int64_t kTokens>
struct SequenceOf {
  int64_t sample, begin, end, number;

  SequenceOf(const Args& args, int64_t number)
      : sample(args.cu_seqlens ? 0 : number),
        begin(args.cu_seqlens ? args.cu_seqlens[number] : 0),
        end(args.cu_seqlens ? args.cu_seqlens[number + 1] : args.length),
        number(number) {}

  // Of the chunk that begins at this token.
  int64_t chunk(const Args& args, int64_t token) const {
    return token / kTokens + (args.cu_seqlens ? number : 0);
  }
};

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
