// In which order the blocks of attention's tiles come: arithmetic that launches and kernels share.
//
// A device starts blocks by their numbers, one wherever another has ended, so that the last ones
// should be short. Under a diagonal some tiles of a head have far more to do than others: those
// come first, and several heads take turns, because of heads one after the other the last one
// begins with long tiles when all others are done. A model of a device
// (tests/attention/test_block_order.py) is busy for 87 to 95 % of the time with heads one after
// the other, and for 97 % and more in turns.
//
// Not all heads: the tiles of a head find in the L2 cache what they share. As many take turns as
// have room in half of it (an A100's and an H100's is two halves, which keep copies of their own),
// and no fewer than have blocks at the same time in any case; up to the next power of two, because
// that is what numbers of heads mostly are, and a smaller group is left over where they are not
// divided.
//
// No kernel is persistent: with a counter of tiles it would come by them in just this order, and
// what starting a block costs is covered where a multiprocessor has another one.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace onepass::cuda {

struct BlockPlace {
  int batch;
  int kv_head;
  int head;  // of query, where those that share a kv head have blocks of their own
  int turn;  // 0: the tile of a head that has the most to do
};

// Of pairs of (batch, kv head).
struct BlockOrder {
  unsigned pairs;
  unsigned kv_heads;
  unsigned heads;  // of a pair that have blocks of their own
  unsigned tiles;  // of a head
  unsigned group;  // pairs that take turns; the first ones may be fewer

  ONEPASS_HOST_DEVICE BlockPlace place(unsigned block) const {
    const unsigned of_group = group * heads * tiles;
    const unsigned after = pairs * heads * tiles - 1 - block;
    const unsigned last = pairs - after / of_group * group;  // after the block's group
    const unsigned first = last > group ? last - group : 0;
    const unsigned members = (last - first) * heads;
    const unsigned within = members * tiles - 1 - after % of_group;
    const unsigned member = within % members;
    const unsigned pair = first + member / heads, kv_head = pair % kv_heads;
    return {static_cast<int>(pair / kv_heads), static_cast<int>(kv_head),
            static_cast<int>(kv_head * heads + member % heads), static_cast<int>(within / members)};
  }
};

// What of a device an order depends on.
struct BlockRoom {
  size_t l2_bytes;
  int64_t multiprocessors;
};

// Of blocks that share `pair_bytes` of their pair, two on a multiprocessor.
inline BlockOrder order_of_blocks(int64_t batch, int64_t kv_heads, int64_t heads, int64_t tiles,
                                  int64_t pair_bytes, const BlockRoom& room) {
  const int64_t pairs = batch * kv_heads;
  const int64_t blocks = std::max<int64_t>(heads * tiles, 1);
  const int64_t fit = static_cast<int64_t>(room.l2_bytes / 2) / std::max<int64_t>(pair_bytes, 1);
  const int64_t at_once = (2 * room.multiprocessors + blocks - 1) / blocks;
  const auto group = std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>({fit, at_once, 1})));
  return {static_cast<unsigned>(pairs), static_cast<unsigned>(kv_heads),
          static_cast<unsigned>(heads), static_cast<unsigned>(tiles),
          static_cast<unsigned>(std::min<uint64_t>(group, std::max<int64_t>(pairs, 1)))};
}

}  // namespace onepass::cuda
