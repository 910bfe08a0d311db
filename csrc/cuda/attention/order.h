// The order of the blocks of attention's tiles: arithmetic that launches and kernels share.
//
// A device starts blocks in the order of their numbers, each as soon as another one ends, so the
// last blocks should be short. Under a diagonal some tiles of a head have far more work than
// others. These come first, and several heads take turns: if heads came one after the other, the
// last head would begin its long tiles when all other heads are done. A model of a device
// (tests/attention/test_block_order.py) is busy for 87 to 95 % of the time with heads one after
// the other, and for 97 % and more in turns.
//
// Not all heads take turns, because the tiles of a head share data in the L2 cache. The group has
// as many heads as fit half of the cache (that of an A100 or H100 has two halves, with separate
// copies), and at least as many as run at the same time anyway, rounded up to a power of two:
// numbers of heads mostly are powers of two, and if the group does not divide their number, a
// smaller group is left over.
//
// No kernel is persistent: a persistent kernel with a counter of tiles would take them in this same
// order, and the cost of starting a block is hidden while its multiprocessor runs another one.
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
  int head;  // query head, if the query heads of a kv head have separate blocks
  int turn;  // 0: the tile of a head with the most work
};

// The order of the blocks of all pairs (batch, kv head).
struct BlockOrder {
  unsigned pairs;
  unsigned kv_heads;
  unsigned heads;  // heads of a pair that have separate blocks
  unsigned tiles;  // of a head
  unsigned group;  // pairs that take turns; the first group may be smaller

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

// The properties of a device that the order depends on.
struct BlockRoom {
  size_t l2_bytes;
  int64_t multiprocessors;
};

// The order of blocks that share `pair_bytes` per pair; two blocks fit a multiprocessor.
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
