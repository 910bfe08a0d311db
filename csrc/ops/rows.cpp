#include "ops/rows.h"

namespace onepass {

bool has_dense_rows(const TensorInfo& info, int64_t row_dims) {
  int64_t expected = 1;
  for (int64_t d = info.dims - 1; d >= info.dims - row_dims; --d) {
    if (info.sizes[d] != 1 && info.strides[d] != expected) return false;
    expected *= info.sizes[d];
  }
  return true;
}

namespace {

void make_contiguous(RowTensor& rows) {
  rows.tensor = contiguous_copy(*rows.tensor);
  rows.info = info_of(*rows.tensor);
}

// False if more than kRowDims dimensions remain.
bool merge(std::initializer_list<RowTensor*> tensors, int64_t row_dims,
           int64_t (&row_size)[kRowDims]) {
  for (int64_t& size : row_size) size = 1;
  for (RowTensor* rows : tensors) rows->stride = {};
  const TensorInfo& shape = (*tensors.begin())->info;
  int slot = kRowDims - 1;
  bool open = false;  // whether row_size[slot] holds a dimension already
  for (int64_t d = shape.dims - row_dims - 1; d >= 0; --d) {
    if (shape.sizes[d] == 1) continue;
    bool merges = open;
    for (const RowTensor* rows : tensors) {
      if (!rows->tensor) continue;
      merges = merges && rows->info.strides[d] == rows->stride.stride[slot] * row_size[slot];
    }
    if (!merges) {
      if (open && --slot < 0) return false;
      for (RowTensor* rows : tensors) {
        if (rows->tensor) rows->stride.stride[slot] = rows->info.strides[d];
      }
    }
    row_size[slot] *= shape.sizes[d];
    open = true;
  }
  return true;
}

}  // namespace

void address_rows(std::initializer_list<RowTensor*> tensors, int64_t row_dims,
                  int64_t (&row_size)[kRowDims]) {
  for (RowTensor* rows : tensors) {
    if (rows->tensor && !has_dense_rows(rows->info, row_dims)) make_contiguous(*rows);
  }
  if (merge(tensors, row_dims, row_size)) return;
  for (RowTensor* rows : tensors) {
    if (rows->tensor) make_contiguous(*rows);
  }
  merge(tensors, row_dims, row_size);
}

}  // namespace onepass
