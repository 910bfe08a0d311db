// The work of a block of attention's backward: its tile of keys, the tiles of queries that see it
// (one iteration each), and the time when the block may add to the dQ of an iteration.
#pragma once

#include "cuda/attention/backward_ends.cuh"
#include "cuda/attention/fragments.cuh"
#include "cuda/attention/order.h"
#include "cuda/attention/table.h"

namespace onepass::cuda {

// The numbers of a call that its arguments do not contain.
struct BackwardWork {
  BackwardEnds ends;
  ScoreNumbers<float> numbers;
  BlockOrder order;  // of the pairs' tiles of keys; a block takes the queries of all heads
  float* dquery;     // sums, see backward_query.cuh; null if not wanted
  uint32_t* ticket;  // number of the next block; null: blocks add to dQ in any order
  uint32_t* added;   // (batch, heads, query_tiles) number of tiles of keys already added
  int64_t query_tiles;
  int head_slabs;
  int value_slabs;
  int stages;  // tiles of queries in shared memory
};

// A tile of queries of a head.
struct Iteration {
  int head;
  int first;
};

// Facts of an iteration, which one thread computes in 64-bit arithmetic for the whole block.
struct IterationFacts {
  Iteration iteration;
  int queries;        // of the sequence, from the iteration's first on
  bool is_whole;      // see BlockConstants; without terms
  float* sums;        // of dQ, at the first row
  const void* query;  // the first row
  const void* doutput;
  int query_piece;  // see Rows
  int doutput_piece;
};

// Constants of a block, in shared memory because registers are scarce.
struct BlockConstants {
  Sequence sequence;
  Dropout dropout;
  int batch;
  int kv_head;
  int group_size;  // heads that share the keys
  int tile;
  int shift;      // by which the first tile begins before the first key
  int first_key;  // of the block's tile
  int keys;       // of the sequence
  int queries;
  int seen_first;  // keys that any query sees: seen_first .. seen_last - 1
  int seen_last;
  int begin;  // queries that see any of the tile's keys, rounded down to a whole tile of queries
  int end;
  int iterations;

  __device__ __forceinline__ BlockConstants(const AttentionBackward& args, const BackwardWork& work,
                                            const AttentionTile& shape, bool terms)
      : dropout(dropout_of(args)),
        group_size(static_cast<int>(args.heads / args.kv_heads)),
        shift(terms ? tile_shift(args) : 0) {
    // Under a diagonal the first keys are seen by the most queries, so their tiles come first. With
    // tickets a block never waits for one that has not started.
    const BlockPlace place =
        work.order.place(work.ticket ? atomic_add_acq_rel(work.ticket, 1) : blockIdx.x);
    tile = place.turn;
    batch = place.batch;
    kv_head = place.kv_head;
    sequence = sequence_of(args, batch);
    keys = static_cast<int>(sequence.keys);
    queries = static_cast<int>(sequence.queries);
    first_key = tile * shape.keys - shift;
    seen_first = seen_last = begin = end = iterations = 0;
    const int last_key = first_key + shape.keys < keys ? first_key + shape.keys : keys;
    if (first_key >= last_key) return;
    const KeyRange range = seeing_queries(args, sequence, first_key > 0 ? first_key : 0, last_key);
    if (range.first >= range.last) return;
    const SeenKeys seen = seen_keys(args, sequence, range.first, range.last);
    seen_first = static_cast<int>(seen.first);
    seen_last = static_cast<int>(seen.last);
    begin = static_cast<int>(range.first) / shape.queries * shape.queries;
    end = static_cast<int>(range.last);
    iterations = group_size * ((end - begin + shape.queries - 1) / shape.queries);
  }

  __device__ __forceinline__ Iteration first_iteration() const {
    return {kv_head * group_size, begin};
  }
  __device__ __forceinline__ Iteration after(const Iteration& iteration,
                                             const AttentionTile& shape) const {
    return iteration.first + shape.queries < end
               ? Iteration{iteration.head, iteration.first + shape.queries}
               : Iteration{iteration.head + 1, begin};
  }
  // The keys that the queries of an iteration see.
  __device__ __forceinline__ SeenKeys keys_of(const AttentionBackward& args,
                                              const Iteration& iteration,
                                              const AttentionTile& shape) const {
    const int last = iteration.first + shape.queries;
    return seen_keys(args, sequence, iteration.first, last < queries ? last : queries);
  }
  // Whether all of them see all keys of the tile.
  __device__ __forceinline__ bool is_whole(const AttentionBackward& args,
                                           const Iteration& iteration,
                                           const AttentionTile& shape) const {
    const SeenKeys seen = keys_of(args, iteration, shape);
    return seen.all_first <= first_key && first_key + shape.keys <= seen.all_last;
  }
  __device__ __forceinline__ int64_t head_partial(const AttentionBackward& args,
                                                  const BackwardWork& work, int head) const {
    return (batch * args.heads + head) * work.ends.head_parts + tile;
  }
};

// The order in which blocks add to the dQ of an iteration: a block waits until all earlier tiles of
// keys that these queries see have been added. All threads of the block call it.
class QueryOrder {
 public:
  __device__ __forceinline__ QueryOrder(const AttentionBackward& args, const BackwardWork& work,
                                        const BlockConstants& block, const Iteration& iteration,
                                        const AttentionTile& shape) {
    if (!work.ticket) return;
    added_ = work.added + (block.batch * args.heads + iteration.head) * work.query_tiles +
             iteration.first / shape.queries;
    const auto first = static_cast<int>(block.keys_of(args, iteration, shape).first);
    before_ = static_cast<uint32_t>(block.tile - (first + block.shift) / shape.keys);
  }
  __device__ __forceinline__ void wait() const {
    if (!added_) return;
    if (threadIdx.x == 0) {
      while (load_acquire(added_) != before_) spin();
    }
    __syncthreads();
  }
  __device__ __forceinline__ void pass_on() const {
    if (!added_) return;
    __syncthreads();
    if (threadIdx.x == 0) store_release(added_, before_ + 1);
  }

 private:
  uint32_t* added_ = nullptr;  // number of tiles of keys already added
  uint32_t before_ = 0;        // number of tiles of keys that come before this one
};

}  // namespace onepass::cuda
