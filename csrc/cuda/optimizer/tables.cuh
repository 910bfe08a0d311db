// Lists of tensors, passed as kernel parameters. A launch copies its parameters, so nothing has to
// be copied to the device first, and a CUDA graph holds everything that it replays. Tensors that do
// not fit go into another launch: that takes less host time than copying a table, and it can be
// captured, as a copy from pageable memory cannot.
#pragma once

#include <algorithm>

#include "cuda/launch.cuh"
#include "ops/optimizer.h"

namespace onepass::cuda {

inline constexpr int kStepThreads = 128;  // of a block
inline constexpr int kStepWarps = kStepThreads / kLanes;

// Both kinds of entries begin with the number of the tensor's first piece, counted within the
// launch. A tensor without elements has the number of the next tensor.
struct FlatEntry {
  void* data;
  int64_t numel;
  uint32_t first_piece;
  DType dtype : 8;
  bool aligned : 1;
};

struct StepEntry {
  void* param;
  void* gradient;
  void* moments[kMoments];
  float* scales[kMoments];
  void* master;
  void* average;
  float* step;
  int64_t numel;
  uint32_t first_piece;
  int32_t index;
  int32_t group;
  DType param_dtype : 4;
  DType gradient_dtype : 4;
  DType average_dtype : 4;
  MomentType moment_type : 4;
  Master master_kind : 4;
  bool aligned : 1;
};
static_assert(sizeof(FlatEntry) == 24 && sizeof(StepEntry) == 112);

// Header: the other parameters of a kernel.
template <class Entry_, class Header>
struct Table {
  using Entry = Entry_;
  static constexpr int kCapacity = static_cast<int>(
      (kMaxParameterBytes - sizeof(Header) - 2 * sizeof(uint32_t)) / sizeof(Entry));

  Header header;
  uint32_t count;   // tensors
  uint32_t pieces;  // of all of them
  Entry tensors[kCapacity];
};

// The tensor that a piece belongs to.
template <class Table>
__device__ __forceinline__ int tensor_of(const Table& table, uint32_t piece) {
  int begin = 0, end = static_cast<int>(table.count);
  while (end - begin > 1) {
    const int middle = (begin + end) / 2;
    if (table.tensors[middle].first_piece <= piece) {
      begin = middle;
    } else {
      end = middle;
    }
  }
  return begin;
}

// The number after the last piece of a tensor.
template <class Table>
__device__ __forceinline__ uint32_t last_piece(const Table& table, int tensor) {
  const bool is_last = tensor + 1 == static_cast<int>(table.count);
  return is_last ? table.pieces : table.tensors[tensor + 1].first_piece;
}

// The tensor that a piece belongs to, searched from `tensor` on.
template <class Table>
__device__ __forceinline__ int next_tensor(const Table& table, int tensor, uint32_t piece) {
  while (piece < table.pieces && last_piece(table, tensor) <= piece) ++tensor;
  return tensor;
}

__device__ __forceinline__ uint32_t min_of(uint32_t a, uint32_t b) { return a < b ? a : b; }

// The length of a block's run of pieces: more than one if enough blocks remain to keep a device
// busy. It depends on the list alone, so that sums are the same on every device.
inline int64_t run_of(int64_t pieces, int64_t most) {
  constexpr int64_t kEnoughBlocks = 1024;
  return std::clamp<int64_t>(pieces / kEnoughBlocks, 1, most);
}

inline int64_t blocks_of(int64_t pieces, int64_t run) {
  return std::max<int64_t>(1, (pieces + run - 1) / run);
}

template <class Table, class Item>
int64_t tables_of(const FlatList<Item>& list) {
  return std::max<int64_t>(1, (list.count + Table::kCapacity - 1) / Table::kCapacity);
}

// The reason in a plan.
inline const char* launches_text(int64_t tables) {
  return tables == 1 ? "one launch" : "more tensors than the parameters of one launch hold";
}

// Fills `table` with tensors from number `begin` on, as many as fit; entry_of(tensor) does not set
// first_piece.
template <class Table, class Item, class EntryOf>
void fill(Table& table, const FlatList<Item>& list, int64_t begin, EntryOf&& entry_of) {
  const int64_t end = std::min<int64_t>(list.count, begin + Table::kCapacity);
  table.count = static_cast<uint32_t>(end - begin);
  table.pieces = static_cast<uint32_t>(list.first_piece[end] - list.first_piece[begin]);
  for (int64_t i = begin; i < end; ++i) {
    table.tensors[i - begin] = entry_of(list.tensors[i]);
    table.tensors[i - begin].first_piece =
        static_cast<uint32_t>(list.first_piece[i] - list.first_piece[begin]);
  }
}

inline bool is_aligned(const void* base) { return reinterpret_cast<uintptr_t>(base) % 16 == 0; }

inline FlatEntry flat_entry(const FlatTensor& tensor) {
  FlatEntry entry{};
  entry.data = tensor.data;
  entry.numel = tensor.numel;
  entry.dtype = tensor.dtype;
  entry.aligned = is_aligned(tensor.data);
  return entry;
}

// True for all threads of the block that arrives last. They see all writes of other blocks before
// those blocks' last barrier, and all writes of their first threads before they arrived. The ticket
// must begin at zero.
__device__ __forceinline__ bool is_last_block(uint32_t* ticket, uint32_t* shared) {
  if (threadIdx.x == 0) *shared = atomic_add_acq_rel(ticket, 1);
  __syncthreads();
  return *shared == gridDim.x - 1;
}

}  // namespace onepass::cuda
