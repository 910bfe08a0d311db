#include "ops/linear_product.h"

#include <optional>
#include <sstream>

#include "ops/runtime.h"

namespace onepass {

#ifndef ONEPASS_CUDA
Matrix::Matrix(const Tensor& tensor, bool dense_rows) : tensor_(tensor) {
  const TensorInfo info = info_of(tensor);
  const int64_t last = info.dims - 1;
  const int64_t columns = std::max<int64_t>(info.sizes[last], 1);
  column_ = columns > 1 ? info.strides[last] : 1;
  if (set_row(info, columns) && (column_ == 1 || (row_ == 1 && !dense_rows))) return;
  tensor_ = contiguous_copy(tensor);
  row_ = columns;
  column_ = 1;
}

bool Matrix::set_row(const TensorInfo& info, int64_t columns) {
  row_ = column_ == 1 ? columns : 1;
  std::optional<int64_t> next;  // the stride that the next dimension outwards must have
  for (int64_t d = info.dims - 2; d >= 0; --d) {
    if (info.sizes[d] == 1) continue;
    if (!next) {
      row_ = info.strides[d];
    } else if (info.strides[d] != *next) {
      return false;
    }
    next = info.strides[d] * info.sizes[d];
  }
  return true;
}

namespace {

Dispatch describe(const LinearProduct& args) {
  constexpr const char* kNames[] = {"linear", "linear_backward: dinput",
                                    "linear_backward: dweight"};
  std::ostringstream text;
  if (args.cols == 0) {
    text << args.rows << " sums of " << args.depth << ", " << name_of(args.left_dtype);
    return {.op = "linear_backward: dbias", .arguments = text.str()};
  }
  text << args.rows << " x " << args.depth << " by " << args.depth << " x " << args.cols << ", "
       << name_of(args.left_dtype) << " by " << name_of(args.right_dtype) << ", output "
       << name_of(args.output_dtype);
  const LinearEpilogue& epilogue = args.epilogue;
  if (epilogue.activation != Activation::kNone) text << ", " << name_of(epilogue.activation);
  if (epilogue.seed) text << ", dropout " << epilogue.dropout_p;
  if (epilogue.residual) text << ", residual";
  return {.op = kNames[static_cast<int>(args.kind)], .arguments = text.str()};
}

}  // namespace

void run_product(const LinearProduct& args, const Device& device) {
  if (args.rows == 0 || (args.cols == 0 && !args.left_sums)) return;
  run_operator(backend().linear_product, args, device, [&] { return describe(args); });
}

#endif  // ONEPASS_CUDA

}  // namespace onepass
