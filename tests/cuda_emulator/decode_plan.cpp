// Prints how csrc/cuda/attention/decode.h cuts calls into pieces. Each line of the input is a call
// with one sequence of its batch:
//   batch heads kv_heads seq_q seq_k window_left window_right most_rows leftpad old new_rows
// and each line of the output what decode_shape() says, then for each tile of rows of a kv head
//   chunk_keys first_chunk last_chunk piece_begin piece_end ...
#include <iostream>
#include <sstream>
#include <string>

#include "cuda/attention/decode.h"

int main() {
  using namespace onepass;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream in(line);
    AttentionDecode args{};
    int64_t most_rows = 0;
    CachedKeys keys{};
    in >> args.batch >> args.heads >> args.kv_heads >> args.seq_q >> args.seq_k;
    in >> args.window_left >> args.window_right >> most_rows >> keys.first >> keys.old;
    in >> args.new_rows;
    if (!in) return 1;
    if (args.window_left < 0) args.window_left = kNoLimit;
    if (args.window_right < 0) args.window_right = kNoLimit;
    keys.last = keys.old + args.new_rows;
    args.value_dim = 64;
    const cuda::DecodeShape shape = cuda::decode_shape(args, most_rows);
    std::cout << shape.group << ' ' << shape.rows << ' ' << shape.tile_rows << ' ' << shape.kv_tiles
              << ' ' << shape.tiles << ' ' << shape.per_piece << ' ' << shape.splits << ' '
              << shape.slots << ' ' << shape.states();
    for (int64_t tile = 0; tile < shape.kv_tiles; ++tile) {
      const int64_t first = tile * shape.tile_rows;
      const int64_t last = std::min(first + shape.tile_rows, shape.rows) - 1;
      const cuda::Chunks chunks =
          cuda::chunks_of(args, keys, first / shape.group, last / shape.group);
      const cuda::Pieces pieces = {chunks, shape.per_piece};
      std::cout << " | " << chunks.keys << ' ' << chunks.first << ' ' << chunks.last;
      for (int64_t piece = 0; piece < pieces.count(); ++piece) {
        std::cout << ' ' << pieces.first(piece) << ' ' << pieces.last(piece);
      }
    }
    std::cout << '\n';
  }
}
