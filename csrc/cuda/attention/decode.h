// How decoding on CUDA is divided among blocks: arithmetic that plans and kernels share.
//
// A sequence's keys are divided into chunks, counted from its first key. A query row and a chunk
// give a state: maximum, sum, weighted values. States are joined in the order of the keys: those of
// kRunChunks chunks to a run, and the runs to the result. Where chunks begin, and so every bit of
// the result, depends on the sequence's own length and the window alone: not on the batch, on pages
// or padding, or on the assignment of work to blocks.
//
// The assignment may depend on everything. A plan cannot read lengths, which are on the device, so
// grid and workspace are sized by the capacity of the cache; blocks beyond a sequence's end exit.
//   - Few tiles of query rows: a block takes a chunk and stores its state. There are at most
//     kMostChunks, however long the sequence, so that one kv head of a batch of one still keeps
//     that many blocks busy; the states of 16 rows are at most an eighth of the bytes read.
//   - More: a block takes a run. The states are a sixteenth of that, and a sequence that is longer
//     than the others of its batch is still spread over several blocks.
//   - More than fill any device: a block takes a whole sequence and stores no state.
// The grid does not depend on the number of multiprocessors. A block with several chunks would
// drain its queues between them (the values of its warps reuse their memory), as successive blocks
// do. And 1,024 chunks (32k keys, 8 heads) on 396 places (132 multiprocessors times three blocks)
// are up to three per place either way. It would pay if a block loaded its next chunk while it
// finishes one.
//
// So the workspace has at most kFewTiles * (kMostChunks + 2) or kManyTiles * kMostRuns tiles of
// states, however many sequences, queries and keys there are; or, where whole sequences have
// several runs, one tile for each tile of the output.
#pragma once

#include <algorithm>

#include "ops/attention_decode.h"

namespace onepass::cuda {

inline constexpr int64_t kLeastChunkKeys = 128;
inline constexpr int64_t kChunkUnit = 64;  // keys of the warps of a block in one iteration
inline constexpr int64_t kMostChunks = 128;
inline constexpr int64_t kRunChunks = 16;
inline constexpr int64_t kFewTiles = 128;    // below, a block takes a chunk
inline constexpr int64_t kManyTiles = 1024;  // from here on, a whole sequence
inline constexpr int64_t kLeastSplits = 8;
inline constexpr int64_t kWholeSequence = int64_t{1} << 40;  // chunks of a piece
// The most new rows that decoding blocks append themselves: where a kv head has one tile, and so
// each chunk one reader. More are worth a launch of their own.
inline constexpr int64_t kMostOwnRows = 16;

ONEPASS_HOST_DEVICE constexpr int64_t ceil_div(int64_t value, int64_t by) {
  return (value + by - 1) / by;
}

// Keys of a chunk where a query sees at most `keys` at once: the least that gives at most
// kMostChunks chunks, in whole units.
ONEPASS_HOST_DEVICE constexpr int64_t chunk_keys(int64_t keys) {
  const int64_t least = ceil_div(ceil_div(keys, kMostChunks), kChunkUnit) * kChunkUnit;
  return least > kLeastChunkKeys ? least : kLeastChunkKeys;
}

// The chunks that some query rows of a sequence see; where there are none, one that no row sees.
struct Chunks {
  int64_t keys;   // of each
  int64_t first;  // numbers, counted from the sequence's first key
  int64_t last;   // after the last one
};

ONEPASS_HOST_DEVICE constexpr int64_t window_keys(const AttentionDecode& args) {
  return args.window_left + args.window_right + 1;
}

// Of queries first_query .. last_query of a sequence.
ONEPASS_HOST_DEVICE inline Chunks chunks_of(const AttentionDecode& args, const CachedKeys& keys,
                                            int64_t first_query, int64_t last_query) {
  const int64_t length = keys.last > keys.first ? keys.last - keys.first : 0;
  const int64_t window = window_keys(args);
  const int64_t size = chunk_keys(length < window ? length : window);
  const int64_t first = cached_keys_of(args, keys, first_query).first - keys.first;
  const int64_t last = cached_keys_of(args, keys, last_query).last - keys.first;
  if (first >= last) return {size, 0, 1};
  return {size, first / size, ceil_div(last, size)};
}

// Chunks in pieces of equal size, aligned to multiples of it: piece i is [first(i), last(i)).
struct Pieces {
  Chunks chunks;
  int64_t per_piece;

  ONEPASS_HOST_DEVICE constexpr int64_t count() const {
    return (chunks.last - 1) / per_piece - chunks.first / per_piece + 1;
  }
  ONEPASS_HOST_DEVICE constexpr int64_t first(int64_t piece) const {
    const int64_t chunk = (chunks.first / per_piece + piece) * per_piece;
    return chunk > chunks.first ? chunk : chunks.first;
  }
  ONEPASS_HOST_DEVICE constexpr int64_t last(int64_t piece) const {
    const int64_t chunk = (chunks.first / per_piece + piece + 1) * per_piece;
    return chunk < chunks.last ? chunk : chunks.last;
  }
};

// The most chunks that `queries` neighbouring queries of any sequence of the call can see.
inline int64_t most_chunks(const AttentionDecode& args, int64_t queries) {
  const int64_t seen = std::min(args.seq_k, window_keys(args) + queries - 1);
  const int64_t room = ceil_div(args.seq_k, kLeastChunkKeys);
  const int64_t touched = ceil_div(seen, kLeastChunkKeys) + 1;
  return std::max<int64_t>(std::min({room, touched, kMostChunks + 2}), 1);
}

// The most runs that `chunks` neighbouring chunks can touch.
constexpr int64_t most_runs(int64_t chunks) { return (chunks - 1) / kRunChunks + 2; }
inline constexpr int64_t kMostRuns = most_runs(kMostChunks + 2);

// The numbers that are the same for all blocks of a call.
struct DecodeShape {
  int64_t group;       // query heads of a kv head
  int64_t rows;        // of a kv head: query * group + head
  int64_t tile_rows;   // of a tile, the last one of a kv head may have fewer
  int64_t kv_tiles;    // of a kv head
  int64_t tiles;       // of the call: (batch, kv_heads, kv_tiles)
  int64_t per_piece;   // chunks
  int64_t splits;      // blocks of a tile: block i takes pieces i, i + splits, ...
  int64_t slots;       // states of a tile in the workspace
  int64_t value_cols;  // of a state: value_dim in whole 16 bytes
  bool writes_own;     // blocks write the new rows of their chunks

  ONEPASS_HOST_DEVICE int64_t states() const { return tiles * slots * tile_rows; }
};

// A function of the call's sizes alone. `most_rows` is how many rows the kernel's tile has.
inline DecodeShape decode_shape(const AttentionDecode& args, int64_t most_rows) {
  DecodeShape shape{};
  shape.group = args.heads / args.kv_heads;
  shape.rows = shape.group * args.seq_q;
  if (shape.rows == 0) return shape;
  shape.tile_rows = std::min(shape.rows, most_rows);
  shape.kv_tiles = ceil_div(shape.rows, most_rows);
  shape.tiles = args.batch * args.kv_heads * shape.kv_tiles;
  shape.value_cols = ceil_div(args.value_dim, 4) * 4;
  shape.writes_own = shape.kv_tiles == 1 && args.new_rows <= kMostOwnRows;
  const int64_t queries = ceil_div(shape.tile_rows - 1, shape.group) + 1;
  const int64_t chunks = most_chunks(args, std::min(queries, args.seq_q));
  const int64_t runs = std::min(most_runs(chunks), chunks);
  int64_t pieces = 1;
  shape.per_piece = kWholeSequence;
  if (shape.tiles < kFewTiles) {
    shape.per_piece = 1;
    pieces = chunks;
  } else if (shape.tiles < kManyTiles) {
    shape.per_piece = kRunChunks;
    pieces = runs;
  }
  shape.splits = std::min(pieces, std::max(ceil_div(kManyTiles, shape.tiles), kLeastSplits));
  // One piece needs none, unless it joins runs there.
  shape.slots = pieces > 1 ? pieces : shape.per_piece == kWholeSequence && runs > 1 ? 1 : 0;
  return shape;
}

}  // namespace onepass::cuda
