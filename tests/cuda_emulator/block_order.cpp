// Prints in which order csrc/cuda/attention/order.h has the blocks of calls come. Each line of the
// input is a call:
//   pairs heads tiles pair_bytes l2_bytes multiprocessors
// and each line of the output how many pairs take turns, then of every block: pair head turn.
#include <iostream>
#include <sstream>
#include <string>

#include "cuda/attention/order.h"

int main() {
  using namespace onepass::cuda;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream in(line);
    int64_t pairs = 0, heads = 0, tiles = 0, pair_bytes = 0;
    BlockRoom room{};
    in >> pairs >> heads >> tiles >> pair_bytes >> room.l2_bytes >> room.multiprocessors;
    if (!in) return 1;
    const BlockOrder order = order_of_blocks(pairs, heads, tiles, pair_bytes, room);
    std::cout << order.group;
    for (int64_t block = 0; block < pairs * heads * tiles; ++block) {
      const BlockPlace place = order.place(static_cast<unsigned>(block));
      std::cout << ' ' << place.pair << ' ' << place.head << ' ' << place.turn;
    }
    std::cout << '\n';
  }
}
