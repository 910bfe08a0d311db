// A linear layer: schemas, checks, allocation. On CUDA there is none of ours: torch's products are
// taken there.
#include "ops/linear.h"

#include <tuple>

#include "ops/check.h"
#include "ops/fields.h"
#include "ops/library.h"
#include "ops/runtime.h"

namespace onepass {

#ifdef ONEPASS_CUDA
OperatorList linear_operators() { return {}; }
#else
namespace {

// What linear_forward takes beside its input.
#define ONEPASS_LINEAR_OPTIONS(FIELD) \
  FIELD(Tensor, weight, "")           \
  FIELD(OptionalTensor, bias, "")     \
  FIELD(OptionalScalarType, out_dtype, "")

// What linear_backward takes beside doutput. A dtype asks for its gradient: input's takes the
// weight, and weight's the input.
#define ONEPASS_LINEAR_BACKWARD_OPTIONS(FIELD) \
  FIELD(OptionalTensor, input, "")             \
  FIELD(OptionalTensor, weight, "")            \
  FIELD(OptionalScalarType, input_dtype, "")   \
  FIELD(OptionalScalarType, weight_dtype, "")  \
  FIELD(OptionalScalarType, bias_dtype, "")

ONEPASS_DEFINE_OPTIONS(LinearOptions, ONEPASS_LINEAR_OPTIONS);
ONEPASS_DEFINE_OPTIONS(LinearBackwardOptions, ONEPASS_LINEAR_BACKWARD_OPTIONS);

constexpr const char* kOp = "linear";
constexpr const char* kBackward = "linear_backward";

// A tensor as a matrix of rows as long as its last dimension, copied where its rows are not dense
// or lie at no one stride.
class Rows {
 public:
  explicit Rows(const Tensor& tensor) : tensor_(tensor) {
    const TensorInfo info = info_of(tensor);
    if (set_stride(info)) return;
    tensor_ = contiguous_copy(tensor);
    stride_ = std::max<int64_t>(info.sizes[info.dims - 1], 1);
  }

  const void* data() const { return tensor_.const_data_ptr(); }
  int64_t stride() const { return stride_; }

 private:
  bool set_stride(const TensorInfo& info) {
    const int64_t last = info.dims - 1;
    if (info.sizes[last] > 1 && info.strides[last] != 1) return false;
    stride_ = std::max<int64_t>(info.sizes[last], 1);
    int64_t next = 0;  // the stride that the next dimension outwards must have; 0: any
    for (int64_t d = last - 1; d >= 0; --d) {
      if (info.sizes[d] == 1) continue;
      if (next == 0) {
        stride_ = info.strides[d];
      } else if (info.strides[d] != next) {
        return false;
      }
      next = info.strides[d] * info.sizes[d];
    }
    return true;
  }

  Tensor tensor_;
  int64_t stride_ = 0;
};

Dispatch describe(const LinearProduct& args) {
  constexpr const char* kNames[] = {"linear", "linear_backward: dinput",
                                    "linear_backward: dweight"};
  std::ostringstream text;
  text << args.rows << " x " << args.depth << " by " << args.depth << " x " << args.cols << ", "
       << name_of(args.left_dtype) << " by " << name_of(args.right_dtype) << ", output "
       << name_of(args.output_dtype);
  return {.op = kNames[static_cast<int>(args.kind)], .arguments = text.str()};
}

void run(const LinearProduct& args, const Device& device) {
  if (args.rows == 0 || (args.cols == 0 && !args.left_sums)) return;
  run_operator(backend().linear_product, args, device, [&] { return describe(args); });
}

// The product of all sizes but the last.
int64_t rows_of(const char* op, const char* name, const TensorInfo& info) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < info.dims; ++d) rows = product(op, name, rows, info.sizes[d]);
  return rows;
}

struct CheckedForward {
  TensorInfo input;
  DType input_dtype{};
  DType weight_dtype{};
  DType bias_dtype{};
  DType output_dtype{};
  int64_t rows = 0;
  int64_t in_features = 0;
  int64_t out_features = 0;
};

CheckedForward check_forward(const LinearOptions& options, const Tensor& input) {
  const auto& [weight, bias, out_dtype] = options;
  CheckedForward call{.input = input_of(kOp, "input", input)};
  const TensorInfo& shape = call.input;
  const CheckedAgainst checked(kOp, "input", shape);
  call.input_dtype = call.output_dtype = checked.first_dtype();
  const TensorInfo matrix = input_of(kOp, "weight", weight);
  require(matrix.dims == 2, kOp, ": weight must have shape (out_features, in_features), got ",
          shape_of(matrix));
  call.out_features = matrix.sizes[0];
  call.in_features = matrix.sizes[1];
  require(shape.dims >= 1 && shape.sizes[shape.dims - 1] == call.in_features, kOp,
          ": input must have a last dimension of ", call.in_features,
          ", weight's in_features, got shape ", shape_of(shape));
  checked.device("weight", matrix);
  call.weight_dtype = checked.dtype("weight", matrix.scalar_type);
  if (bias) {
    call.bias_dtype = checked.tensor("bias", input_of(kOp, "bias", *bias), &call.out_features, 1);
  }
  if (out_dtype) {
    call.output_dtype = checked.dtype("out_dtype", static_cast<int32_t>(*out_dtype));
  }
  call.rows = rows_of(kOp, "input", shape);
  return call;
}

Tensor linear_forward(const LinearOptions& options, const Tensor& input) {
  const CheckedForward call = check_forward(options, input);
  Sizes sizes(call.input.sizes, call.input.sizes + call.input.dims);
  sizes.back() = call.out_features;
  Tensor output = empty(sizes.data(), call.input.dims, call.output_dtype, call.input.device);
  const Rows left(input), right(options.weight);
  const OptionalTensor bias = dense(options.bias);
  run({.left = left.data(),
       .right = right.data(),
       .bias = data_of(bias),
       .output = output.mutable_data_ptr(),
       .left_sums = nullptr,
       .rows = call.rows,
       .cols = call.out_features,
       .depth = call.in_features,
       .left_row = left.stride(),
       .left_step = 1,
       .right_step = 1,
       .right_col = right.stride(),
       .left_dtype = call.input_dtype,
       .right_dtype = call.weight_dtype,
       .bias_dtype = call.bias_dtype,
       .output_dtype = call.output_dtype,
       .sums_dtype = call.output_dtype,
       .kind = LinearKind::kForward},
      call.input.device);
  return output;
}

struct CheckedBackward {
  TensorInfo doutput;
  DType doutput_dtype{};
  DType operand_dtypes[2]{};   // of input and weight, where they are given
  DType gradient_dtypes[3]{};  // of dinput, dweight and dbias, where they are asked for
  int64_t rows = 0;
  int64_t in_features = 0;  // 0 where neither input nor weight is given
  int64_t out_features = 0;
};

CheckedBackward check_backward(const LinearBackwardOptions& options, const Tensor& doutput) {
  const auto& [input, weight, input_dtype, weight_dtype, bias_dtype] = options;
  CheckedBackward call{.doutput = input_of(kBackward, "doutput", doutput)};
  const TensorInfo& shape = call.doutput;
  const CheckedAgainst checked(kBackward, "doutput", shape);
  require(shape.dims >= 1, kBackward, ": doutput must have at least one dimension, got ()");
  call.doutput_dtype = checked.first_dtype();
  call.out_features = shape.sizes[shape.dims - 1];
  call.rows = rows_of(kBackward, "doutput", shape);
  require(weight.has_value() || !input_dtype, kBackward,
          ": weight must be given for the gradient of input, got none");
  require(input.has_value() || !weight_dtype, kBackward,
          ": input must be given for the gradient of weight, got none");
  if (weight) {
    const TensorInfo matrix = input_of(kBackward, "weight", *weight);
    require(matrix.dims == 2 && matrix.sizes[0] == call.out_features, kBackward,
            ": weight must have shape (", call.out_features, ", in_features), got ",
            shape_of(matrix));
    checked.device("weight", matrix);
    call.operand_dtypes[1] = checked.dtype("weight", matrix.scalar_type);
    call.in_features = matrix.sizes[1];
  }
  if (input) {
    const TensorInfo rows = input_of(kBackward, "input", *input);
    if (!weight && rows.dims > 0) call.in_features = rows.sizes[rows.dims - 1];
    Sizes sizes(shape.sizes, shape.sizes + shape.dims);
    sizes.back() = call.in_features;
    call.operand_dtypes[0] = checked.tensor("input", rows, sizes.data(), shape.dims);
  }
  const auto gradient = [&](const char* name, const OptionalScalarType& dtype) {
    return dtype ? checked.dtype(name, static_cast<int32_t>(*dtype)) : call.doutput_dtype;
  };
  call.gradient_dtypes[0] = gradient("input_dtype", input_dtype);
  call.gradient_dtypes[1] = gradient("weight_dtype", weight_dtype);
  call.gradient_dtypes[2] = gradient("bias_dtype", bias_dtype);
  return call;
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(const LinearBackwardOptions& options,
                                                   const Tensor& doutput) {
  const CheckedBackward call = check_backward(options, doutput);
  const auto& [input_type, weight_type, bias_type] = call.gradient_dtypes;
  const Device& device = call.doutput.device;
  const bool wants_input = options.input_dtype.has_value();
  const bool wants_weight = options.weight_dtype.has_value();
  const bool wants_bias = options.bias_dtype.has_value();
  Sizes sizes(call.doutput.sizes, call.doutput.sizes + call.doutput.dims);
  sizes.back() = call.in_features;
  const int64_t matrix[] = {call.out_features, call.in_features};
  Tensor dinput = wants_input ? empty(sizes.data(), call.doutput.dims, input_type, device)
                              : empty_1d(0, input_type, device);
  Tensor dweight =
      wants_weight ? empty(matrix, 2, weight_type, device) : empty_1d(0, weight_type, device);
  Tensor dbias = empty_1d(wants_bias ? call.out_features : 0, bias_type, device);
  const Rows left(doutput);
  if (wants_input) {
    const Rows right(*options.weight);
    run({.left = left.data(),
         .right = right.data(),
         .bias = nullptr,
         .output = dinput.mutable_data_ptr(),
         .left_sums = nullptr,
         .rows = call.rows,
         .cols = call.in_features,
         .depth = call.out_features,
         .left_row = left.stride(),
         .left_step = 1,
         .right_step = right.stride(),
         .right_col = 1,
         .left_dtype = call.doutput_dtype,
         .right_dtype = call.operand_dtypes[1],
         .bias_dtype = bias_type,
         .output_dtype = input_type,
         .sums_dtype = bias_type,
         .kind = LinearKind::kInput},
        device);
  }
  if (wants_weight || wants_bias) {
    std::optional<Rows> right;
    if (wants_weight) right.emplace(*options.input);
    run({.left = left.data(),
         .right = right ? right->data() : nullptr,
         .bias = nullptr,
         .output = dweight.mutable_data_ptr(),
         .left_sums = wants_bias ? dbias.mutable_data_ptr() : nullptr,
         .rows = call.out_features,
         .cols = wants_weight ? call.in_features : 0,
         .depth = call.rows,
         .left_row = 1,
         .left_step = left.stride(),
         .right_step = right ? right->stride() : 1,
         .right_col = 1,
         .left_dtype = call.doutput_dtype,
         .right_dtype = wants_weight ? call.operand_dtypes[0] : call.doutput_dtype,
         .bias_dtype = bias_type,
         .output_dtype = weight_type,
         .sums_dtype = bias_type,
         .kind = LinearKind::kWeight},
        device);
  }
  return {std::move(dinput), std::move(dweight), std::move(dbias)};
}

// On the meta device there is nothing to compute; the fakes give the shapes, and these the errors.
void linear_forward_check(const LinearOptions& options, const Tensor& input) {
  check_forward(options, input);
}
void linear_backward_check(const LinearBackwardOptions& options, const Tensor& doutput) {
  check_backward(options, doutput);
}

}  // namespace

#define ONEPASS_LINEAR_ARGUMENTS "(Tensor input" ONEPASS_SCHEMA(ONEPASS_LINEAR_OPTIONS) ")"
#define ONEPASS_LINEAR_BACKWARD_ARGUMENTS \
  "(Tensor doutput" ONEPASS_SCHEMA(ONEPASS_LINEAR_BACKWARD_OPTIONS) ")"

OperatorList linear_operators() {
  return {
      entry<&Packed<&linear_forward>::call>("linear_forward" ONEPASS_LINEAR_ARGUMENTS " -> Tensor"),
      entry<&Packed<&linear_forward_check>::call>(
          "linear_forward_check" ONEPASS_LINEAR_ARGUMENTS " -> ()", true),
      // (dinput, dweight, dbias): those that are asked for; the others have no elements.
      entry<&Packed<&linear_backward>::call>("linear_backward" ONEPASS_LINEAR_BACKWARD_ARGUMENTS
                                             " -> (Tensor, Tensor, Tensor)"),
      entry<&Packed<&linear_backward_check>::call>(
          "linear_backward_check" ONEPASS_LINEAR_BACKWARD_ARGUMENTS " -> ()", true),
  };
}
#endif  // ONEPASS_CUDA

}  // namespace onepass
