// Prints in which order csrc/cuda/attention/order.h has the blocks of calls come. Each line of the
// input is a call:
//   batch kv_heads heads tiles pair_bytes l2_bytes multiprocessors
// and each line of the output how many pairs take turns, then of every block: batch kv_head head
// turn.
#include <iostream>
#include <sstream>
#include <string>

#include "cuda/attention/order.h"

int main() {
  using namespace onepass::cuda;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream in(line);
    int64_t batch = 0, kv_heads = 0, heads = 0, tiles = 0, pair_bytes = 0;
    BlockRoom room{};
    in >> batch >> kv_heads >> heads >> tiles >> pair_bytes >> room.l2_bytes >>
        room.multiprocessors;
    if (!in) return 1;
    const BlockOrder order = order_of_blocks(batch, kv_heads, heads, tiles, pair_bytes, room);
    std::cout << order.group;
    for (int64_t block = 0; block < batch * kv_heads * heads * tiles; ++block) {
      const BlockPlace place = order.place(static_cast<unsigned>(block));
      std::cout << ' ' << place.batch << ' ' << place.kv_head << ' ' << place.head << ' '
                << place.turn;
    }
    std::cout << '\n';
  }
}
