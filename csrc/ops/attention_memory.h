// How the operators of attention find the rows of their tensors, and allocate results.
#pragma once

#include "ops/attention_checks.h"
#include "ops/rows.h"

namespace onepass {

// A tensor whose last dimension is not dense is copied, any other is read in place.
inline Strided rows_of(const Tensor& tensor, AttentionLayout layout, Copies& copies) {
  TensorInfo info = info_of(tensor);
  const void* data = tensor.const_data_ptr();
  if (info.sizes[info.dims - 1] != 1 && info.strides[info.dims - 1] != 1) {
    copies.push_back(contiguous_copy(tensor));
    info = info_of(copies.back());
    data = copies.back().const_data_ptr();
  }
  const auto stride = [&](int64_t d) { return info.sizes[d] == 1 ? 0 : info.strides[d]; };
  void* const rows = const_cast<void*>(data);
  switch (layout) {
    case AttentionLayout::kPacked:
      return {rows, 0, stride(1), stride(0)};
    case AttentionLayout::kPaged:
      return {rows, stride(0), stride(2), stride(1)};
    default:
      return {rows, stride(0), stride(1), stride(2)};
  }
}

template <class T>
const T* elements_of(const OptionalTensor& tensor, Copies& copies) {
  if (!tensor || tensor->is_contiguous()) return static_cast<const T*>(data_of(tensor));
  copies.push_back(contiguous_copy(*tensor));
  return static_cast<const T*>(copies.back().const_data_ptr());
}

// The gradient of `tensor`, of size 0 if it is not wanted.
inline Tensor empty_gradient(bool wanted, const Tensor& tensor, bool bshd) {
  const TensorInfo info = info_of(tensor);
  const DType dtype = *dtype_of(info.scalar_type);
  return wanted ? empty_rows(info.sizes, info.dims, dtype, info.device, bshd)
                : empty_1d(0, dtype, info.device);
}

}  // namespace onepass
