// Tensors as rows of dense columns, addressed through up to three collapsed leading dimensions, so
// that slices and transposes of a batch are read in place.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace onepass {

inline constexpr int kRowDims = 3;

struct RowStride {
  int64_t stride[kRowDims];
};

// The index of a row in each of the rows' dimensions: divided once for all tensors.
struct RowIndex {
  int64_t index[kRowDims];
};

ONEPASS_HOST_DEVICE inline RowIndex row_index(const int64_t (&size)[kRowDims], int64_t row) {
  if (size[0] == 1 && size[1] == 1) return {{0, 0, row}};
  const int64_t outer = row / size[2];
  return {{outer / size[1], outer % size[1], row % size[2]}};
}

// Element offset of a row: the sum over dimensions of index[d] * stride[d].
ONEPASS_HOST_DEVICE inline int64_t row_offset(const RowIndex& row, const RowStride& stride) {
  return row.index[0] * stride.stride[0] + row.index[1] * stride.stride[1] +
         row.index[2] * stride.stride[2];
}

}  // namespace onepass
