// Flat lists of tensors as pieces of kPieceElements, spread over threads in one parallel region, so
// that hundreds of small tensors take no more time than one large tensor.
#pragma once

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "ops/optimizer.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {

// body(tensor, first element of the piece, elements, number of the piece) for the pieces
// [begin, end).
template <class Item, class Body>
void for_each_in_pieces(const FlatList<Item>& list, int64_t begin, int64_t end, Body&& body) {
  const int64_t* const after =
      std::upper_bound(list.first_piece, list.first_piece + list.count, begin);
  for (int64_t t = after - list.first_piece - 1; begin < end; ++t) {
    const Item& tensor = list.tensors[t];
    const int64_t last = std::min(end, list.first_piece[t + 1]);
    for (; begin < last; ++begin) {
      const int64_t first = (begin - list.first_piece[t]) * kPieceElements;
      body(tensor, first, std::min(kPieceElements, tensor.numel - first), begin);
    }
  }
}

// bytes_of(tensor): the traffic of one of its elements.
template <class Item, class BytesOf>
Plan plan_pieces(const FlatList<Item>& list, const Machine& machine, const char* kernel_name,
                 int64_t workspace_bytes, BytesOf&& bytes_of) {
  const int64_t pieces = list.pieces();
  int64_t bytes = 0;  // pieces may be as short as one element
  for (int64_t t = 0; t < list.count; ++t)
    bytes += list.tensors[t].numel * bytes_of(list.tensors[t]);
  const int64_t threads = threads_for(bytes / kBytes, pieces, machine);
  return {.workspace_bytes = workspace_bytes,
          .kernel_name = kernel_name,
          .rows_per_tile = kPieceElements,
          .splits = pieces,
          .reason = threads > 1            ? "pieces of all tensors spread over threads"
                    : pieces <= 1          ? "one piece"
                    : machine.threads <= 1 ? "one thread"
                                           : "too small for a parallel region",
          .threads = threads};
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
