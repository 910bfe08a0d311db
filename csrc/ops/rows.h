// Views tensors as rows of dense columns: leading dimensions are merged, for all tensors of an
// operator together, into at most kRowDims. And the memory of new rows, heads or tokens first.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "core/rows.h"
#include "ops/check.h"

namespace onepass {

// One tensor of a call, or none. All of a call have the same shape.
struct RowTensor {
  OptionalTensor tensor;
  TensorInfo info{};
  RowStride stride{};

  const void* data() const { return data_of(tensor); }
  // Points an argument to the rows, once they are addressed.
  void put_into(const void*& rows, RowStride& row_stride) const {
    rows = data();
    row_stride = stride;
  }
};

// The tensor, checked for itself alone.
inline RowTensor row_tensor(const char* op, const char* name, const OptionalTensor& tensor) {
  RowTensor rows{tensor};
  if (tensor) rows.info = input_of(op, name, *tensor);
  return rows;
}

// Whether the last `row_dims` dimensions are dense, like a single one.
bool has_dense_rows(const TensorInfo& info, int64_t row_dims);

// Merges the leading dimensions (all except the last `row_dims`) into row_size, most significant
// first, and sets every stride. A tensor whose rows are not dense is replaced by a contiguous copy;
// if more than kRowDims dimensions remain, so are all tensors that are not contiguous.
void address_rows(std::initializer_list<RowTensor*> tensors, int64_t row_dims,
                  int64_t (&row_size)[kRowDims]);

// A tensor whose last dimension is not dense is copied, any other is read in place.
inline const Tensor& with_dense_columns(const Tensor& tensor, Copies& copies) {
  const TensorInfo info = info_of(tensor);
  if (info.sizes[info.dims - 1] <= 1 || info.strides[info.dims - 1] == 1) return tensor;
  return copies.emplace_back(contiguous_copy(tensor));
}

// (batch, heads, rows, cols), with bshd in the memory of a (batch, rows, heads, cols); or packed.
inline Tensor empty_rows(const Shape& shape, DType dtype, const Device& device, bool bshd) {
  if (shape.dims != 4 || !bshd) return empty(shape, dtype, device);
  const auto most = [&](int d) { return std::max<int64_t>(shape.sizes[d], 1); };
  const int64_t row = most(1) * most(3);
  const int64_t strides[] = {most(2) * row, most(3), row, 1};
  return empty_strided(shape, strides, dtype, device);
}

}  // namespace onepass
