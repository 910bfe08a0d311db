// The products of a linear layer, for the operators that are made of them: the strides of the
// matrices, and the call of the back end. On CUDA torch's products are used.
#pragma once

#include "ops/linear.h"
#include "ops/tensor.h"

namespace onepass {

// A factor of a product: its element (i, j) lies row * i + column * j elements from the first.
struct Factor {
  const void* data;
  int64_t row;
  int64_t column;
  DType dtype;

  Factor transposed() const { return {data, column, row, dtype}; }
  Factor from_row(int64_t first) const {
    return {static_cast<const char*>(data) + first * row * size_of(dtype), row, column, dtype};
  }
};

// A tensor as a matrix whose columns are its last dimension and of which one stride is 1. It is
// copied if no stride is 1, if its rows have no common stride, or if dense_rows demands it.
class Matrix {
 public:
  explicit Matrix(const Tensor& tensor, bool dense_rows = false);

  const Factor& factor() const { return factor_; }

 private:
  bool set_row(const TensorInfo& info, int64_t columns);

  Tensor tensor_;
  Factor factor_{};
};

struct ProductSize {
  int64_t rows;
  int64_t cols;
  int64_t depth;
};

// left (rows, depth) times right (depth, cols). Sums of left, and a bias, have the dtype `sums`.
LinearProduct product_of(LinearKind kind, const Factor& left, const Factor& right,
                         const ProductSize& size, void* output, DType output_dtype, DType sums);

void run_product(const LinearProduct& args, const Device& device);

}  // namespace onepass
