#include "ops/linear_product.h"

#include <optional>

#include "ops/runtime.h"

namespace onepass {

#ifndef ONEPASS_CUDA
Matrix::Matrix(const Tensor& tensor, bool dense_rows) : tensor_(tensor) {
  const TensorInfo info = info_of(tensor);
  const int64_t last = info.dims - 1;
  const int64_t columns = std::max<int64_t>(info.sizes[last], 1);
  auto& [data, row, column, dtype] = factor_;
  dtype = *dtype_of(info.scalar_type);
  column = columns > 1 ? info.strides[last] : 1;
  if (!set_row(info, columns) || (column != 1 && (row != 1 || dense_rows))) {
    tensor_ = contiguous_copy(tensor);
    row = columns;
    column = 1;
  }
  data = tensor_.const_data_ptr();
}

bool Matrix::set_row(const TensorInfo& info, int64_t columns) {
  int64_t& row = factor_.row;
  row = factor_.column == 1 ? columns : 1;
  std::optional<int64_t> next;  // the stride that the next dimension outwards must have
  for (int64_t d = info.dims - 2; d >= 0; --d) {
    if (info.sizes[d] == 1) continue;
    if (!next) {
      row = info.strides[d];
    } else if (info.strides[d] != *next) {
      return false;
    }
    next = info.strides[d] * info.sizes[d];
  }
  return true;
}

LinearProduct product_of(LinearKind kind, const Factor& left, const Factor& right,
                         const ProductSize& size, void* output, DType output_dtype, DType sums) {
  return {.left = left.data,
          .right = right.data,
          .bias = nullptr,
          .output = output,
          .left_sums = nullptr,
          .rows = size.rows,
          .cols = size.cols,
          .depth = size.depth,
          .left_row = left.row,
          .left_step = left.column,
          .right_step = right.row,
          .right_col = right.column,
          .left_dtype = left.dtype,
          .right_dtype = right.dtype,
          .bias_dtype = sums,
          .output_dtype = output_dtype,
          .sums_dtype = sums,
          .kind = kind};
}

namespace {

Dispatch describe(const LinearProduct& args) {
  constexpr const char* kNames[] = {"linear", "linear_backward: dinput",
                                    "linear_backward: dweight"};
  constexpr const char* kQuantizedNames[] = {"quantized_linear",
                                             "quantized_linear_backward: dinput"};
  if (args.cols == 0) {
    return described("linear_backward: dbias", args.rows, " sums of ", args.depth, ", ",
                     args.left_dtype);
  }
  const LinearEpilogue& epilogue = args.epilogue;
  const QuantizedWeight& weight = args.quantized;
  return described(
      (weight.words ? kQuantizedNames : kNames)[static_cast<int>(args.kind)], args.rows, " x ",
      args.depth, " by ", args.depth, " x ", args.cols, ", ", args.left_dtype, " by ",
      weight.words ? name_of(weight.format) : name_of(args.right_dtype), ", output ",
      args.output_dtype,
      when(epilogue.activation != Activation::kNone, ", ", name_of(epilogue.activation)),
      when(epilogue.seed, ", dropout ", epilogue.dropout_p), when(epilogue.residual, ", residual"));
}

}  // namespace

void run_product(const LinearProduct& args, const Device& device) {
  if (args.rows == 0 || (args.cols == 0 && !args.left_sums)) return;
  run_operator(backend().linear_product, args, device, [&] { return describe(args); });
}

#endif  // ONEPASS_CUDA

}  // namespace onepass
