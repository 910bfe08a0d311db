// The products of a linear layer, for the operators that are made of them: the strides of the
// matrices, and the call of the back end. On CUDA torch's products are used.
#pragma once

#include "ops/linear.h"
#include "ops/tensor.h"

namespace onepass {

// A tensor as a matrix whose columns are its last dimension and of which one stride is 1. It is
// copied if no stride is 1, if its rows have no common stride, or if dense_rows demands it.
class Matrix {
 public:
  explicit Matrix(const Tensor& tensor, bool dense_rows = false);

  const void* data() const { return tensor_.const_data_ptr(); }
  int64_t row() const { return row_; }        // elements from a row to the next
  int64_t column() const { return column_; }  // likewise; one of both is 1

 private:
  bool set_row(const TensorInfo& info, int64_t columns);

  Tensor tensor_;
  int64_t row_ = 0;
  int64_t column_ = 0;
};

void run_product(const LinearProduct& args, const Device& device);

}  // namespace onepass
