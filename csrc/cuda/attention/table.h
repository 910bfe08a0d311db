// The tiles of the tensor-core kernels, in one place.
//
// A bucket is the head dimension that a kernel is compiled for; smaller ones use the same kernel
// and leave out slabs of 32 columns. Warps share a tile by rows alone, so that a row's maximum and
// sum stay in four lanes. Nothing here has been timed on a device yet: sizes follow what
// flash-attention found on the A100 (two of these blocks fit a multiprocessor), within the shared
// memory of each architecture and without spilling registers (tests/test_cuda_binary.py).
#pragma once

#include <cstdint>

namespace onepass::cuda {

struct AttentionTile {
  int queries;
  int keys;
  int warps;

  constexpr int threads() const { return 32 * warps; }
  constexpr int rows_per_warp() const { return queries / warps; }
};

inline constexpr int kBuckets[] = {64, 128, 256};

constexpr int bucket_of(int64_t dim) { return dim <= 64 ? 64 : dim <= 128 ? 128 : 256; }

// Forward. With 32 rows a warp reads each fragment of K and V once for two products; at 256 columns
// the sums alone are 128 registers for 16 rows. `terms`: with more to a score than the product,
// whose addresses want registers too.
constexpr AttentionTile forward_tile(int bucket, bool terms) {
  if (bucket == 64 && !terms) return {.queries = 128, .keys = 96, .warps = 4};
  if (bucket == 128 && terms) return {.queries = 128, .keys = 32, .warps = 4};
  if (bucket <= 128) return {.queries = 128, .keys = 64, .warps = 4};
  return {.queries = 64, .keys = 64, .warps = 4};
}

// Q, then K, then V; the output takes the place of Q.
constexpr int forward_shared_bytes(int bucket, const AttentionTile& tile) {
  return (tile.queries + 2 * tile.keys) * bucket * 2;
}

}  // namespace onepass::cuda
