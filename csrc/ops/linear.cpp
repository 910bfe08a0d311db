// A linear layer: schemas, checks, allocation. On CUDA there is no kernel here: torch's products
// are used.
#include "ops/linear.h"

#include <optional>
#include <tuple>

#include "ops/check.h"
#include "ops/fields.h"
#include "ops/library.h"
#include "ops/linear_product.h"
#include "ops/runtime.h"

namespace onepass {

#ifdef ONEPASS_CUDA
OperatorList linear_operators() { return {}; }
#else
namespace {

// The arguments of linear_forward besides its input.
#define ONEPASS_LINEAR_OPTIONS(FIELD) \
  FIELD(Tensor, weight, "")           \
  FIELD(OptionalTensor, bias, "")     \
  FIELD(OptionalScalarType, out_dtype, "")

// The arguments of linear_epilogue_forward besides its input: those of linear_forward, and the
// epilogue's, output = residual + dropout(activation(preactivation)), in residual's dtype.
#define ONEPASS_EPILOGUE_OPTIONS(FIELD)                  \
  FIELD(Tensor, weight, "")                              \
  FIELD(OptionalTensor, bias, "")                        \
  FIELD(OptionalTensor, residual, "")                    \
  FIELD(OptionalTensor, seed, "")                        \
  FIELD(double, dropout_p, "")                           \
  FIELD(StaticInt, activation_kind, "") /* Activation */ \
  FIELD(bool, save_preactivation, "")

// The arguments of linear_epilogue_backward besides doutput.
#define ONEPASS_EPILOGUE_BACKWARD_OPTIONS(FIELD)         \
  FIELD(OptionalTensor, preactivation, "")               \
  FIELD(OptionalTensor, seed, "")                        \
  FIELD(double, dropout_p, "")                           \
  FIELD(StaticInt, activation_kind, "") /* Activation */ \
  FIELD(OptionalScalarType, out_dtype, "")

// The arguments of linear_backward besides doutput. A gradient is computed if its dtype is given:
// input's needs the weight, and weight's the input.
#define ONEPASS_LINEAR_BACKWARD_OPTIONS(FIELD) \
  FIELD(OptionalTensor, input, "")             \
  FIELD(OptionalTensor, weight, "")            \
  FIELD(OptionalScalarType, input_dtype, "")   \
  FIELD(OptionalScalarType, weight_dtype, "")  \
  FIELD(OptionalScalarType, bias_dtype, "")

ONEPASS_DEFINE_OPTIONS(LinearOptions, ONEPASS_LINEAR_OPTIONS);
ONEPASS_DEFINE_OPTIONS(EpilogueOptions, ONEPASS_EPILOGUE_OPTIONS);
ONEPASS_DEFINE_OPTIONS(EpilogueBackwardOptions, ONEPASS_EPILOGUE_BACKWARD_OPTIONS);
ONEPASS_DEFINE_OPTIONS(LinearBackwardOptions, ONEPASS_LINEAR_BACKWARD_OPTIONS);

constexpr const char* kOp = "linear";
constexpr const char* kBackward = "linear_backward";
constexpr const char* kEpilogueBackward = "linear_epilogue_backward";

// Whether a weight and so its gradient are laid out as (in_features, out_features): autograd would
// copy a gradient of another layout.
bool lies_transposed(const OptionalTensor& weight) {
  if (!weight) return false;
  const TensorInfo info = info_of(*weight);
  return info.strides[0] == 1 && info.strides[1] != 1;
}

// The left factor. A few rows that are not dense are copied: the copy is small beside the weight,
// which a kernel can read in place if the rows are dense.
Matrix left_of(const Tensor& tensor, int64_t rows) {
  constexpr int64_t kFewRows = 16;
  return Matrix(tensor, rows <= kFewRows);
}

// The product of all sizes except the last.
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
  Sizes sizes{};  // of the output
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
  call.sizes.assign(shape.sizes, shape.sizes + shape.dims);
  call.sizes.back() = call.out_features;
  return call;
}

LinearProduct product_of(const CheckedForward& call, const Matrix& input, const Matrix& weight,
                         const OptionalTensor& bias, Tensor& output) {
  return {.left = input.data(),
          .right = weight.data(),
          .bias = data_of(bias),
          .output = output.mutable_data_ptr(),
          .left_sums = nullptr,
          .rows = call.rows,
          .cols = call.out_features,
          .depth = call.in_features,
          .left_row = input.row(),
          .left_step = input.column(),
          .right_step = weight.column(),
          .right_col = weight.row(),
          .left_dtype = call.input_dtype,
          .right_dtype = call.weight_dtype,
          .bias_dtype = call.bias_dtype,
          .output_dtype = call.output_dtype,
          .sums_dtype = call.output_dtype,
          .kind = LinearKind::kForward};
}

Tensor linear_forward(const LinearOptions& options, const Tensor& input) {
  const CheckedForward call = check_forward(options, input);
  Tensor output = empty(call.sizes.data(), call.input.dims, call.output_dtype, call.input.device);
  const OptionalTensor bias = dense(options.bias);
  const Matrix left = left_of(input, call.rows), right(options.weight);
  run_product(product_of(call, left, right, bias, output), call.input.device);
  return output;
}

Activation require_activation(const char* op, int64_t activation) {
  require(activation >= 0 && activation < kLinearActivations, op,
          ": activation_kind must be one of 0 to ", kLinearActivations - 1, ", got ", activation);
  return static_cast<Activation>(activation);
}

struct CheckedEpilogue {
  CheckedForward linear;
  Activation activation{};
};

CheckedEpilogue check_epilogue(const EpilogueOptions& options, const Tensor& input) {
  CheckedEpilogue call{.linear = check_forward({options.weight, options.bias, {}}, input)};
  const TensorInfo& shape = call.linear.input;
  const CheckedAgainst checked(kOp, "input", shape);
  if (options.residual) {
    call.linear.output_dtype =
        checked.tensor("residual", input_of(kOp, "residual", *options.residual),
                       call.linear.sizes.data(), shape.dims);
  }
  checked.dropout(options.dropout_p, options.seed);
  call.activation = require_activation(kOp, options.activation_kind);
  return call;
}

std::tuple<Tensor, Tensor> linear_epilogue_forward(const EpilogueOptions& options,
                                                   const Tensor& input) {
  const CheckedEpilogue call = check_epilogue(options, input);
  const auto& [checked, activation] = call;
  const int64_t dims = checked.input.dims;
  const Device& device = checked.input.device;
  Tensor output = empty(checked.sizes.data(), dims, checked.output_dtype, device);
  Tensor preactivation = options.save_preactivation
                             ? empty(checked.sizes.data(), dims, checked.input_dtype, device)
                             : empty_1d(0, checked.input_dtype, device);
  const Matrix left = left_of(input, checked.rows), right(options.weight);
  const OptionalTensor bias = dense(options.bias), residual = dense(options.residual);
  LinearProduct args = product_of(checked, left, right, bias, output);
  args.epilogue = {
      .residual = data_of(residual),
      .preactivation = options.save_preactivation ? preactivation.mutable_data_ptr() : nullptr,
      .seed = static_cast<const int64_t*>(data_of(options.seed)),
      .dropout_p = options.dropout_p,
      .activation = activation,
      .preactivation_dtype = checked.input_dtype};
  run_product(args, device);
  return {std::move(output), std::move(preactivation)};
}

EpilogueBackward check_epilogue_backward(const EpilogueBackwardOptions& options,
                                         const Tensor& doutput, TensorInfo& shape) {
  shape = input_of(kEpilogueBackward, "doutput", doutput);
  const CheckedAgainst checked(kEpilogueBackward, "doutput", shape);
  EpilogueBackward args{};
  args.doutput_dtype = args.dpreactivation_dtype = checked.first_dtype();
  args.activation = require_activation(kEpilogueBackward, options.activation_kind);
  require(options.preactivation.has_value() == (args.activation != Activation::kNone),
          kEpilogueBackward, ": preactivation must be given with an activation and only then, got ",
          options.preactivation ? "one" : "none");
  if (options.preactivation) {
    args.preactivation_dtype = checked.tensor(
        "preactivation", input_of(kEpilogueBackward, "preactivation", *options.preactivation),
        shape.sizes, shape.dims);
  }
  checked.dropout(options.dropout_p, options.seed);
  args.dropout_p = options.dropout_p;
  if (options.out_dtype) {
    args.dpreactivation_dtype =
        checked.dtype("out_dtype", static_cast<int32_t>(*options.out_dtype));
  }
  args.numel = 1;
  for (int64_t d = 0; d < shape.dims; ++d) {
    args.numel = product(kEpilogueBackward, "doutput", args.numel, shape.sizes[d]);
  }
  return args;
}

Tensor linear_epilogue_backward(const EpilogueBackwardOptions& options, const Tensor& doutput) {
  TensorInfo shape;
  EpilogueBackward args = check_epilogue_backward(options, doutput, shape);
  Tensor dpreactivation = empty(shape.sizes, shape.dims, args.dpreactivation_dtype, shape.device);
  const OptionalTensor upstream = dense(doutput), preactivation = dense(options.preactivation);
  args.doutput = data_of(upstream);
  args.preactivation = data_of(preactivation);
  args.seed = static_cast<const int64_t*>(data_of(options.seed));
  args.dpreactivation = dpreactivation.mutable_data_ptr();
  if (args.numel > 0) {
    run_operator(backend().epilogue_backward, args, shape.device, [&]() -> Dispatch {
      std::ostringstream text;
      text << args.numel << " elements of " << name_of(args.doutput_dtype);
      if (args.preactivation) text << ", " << name_of(args.activation);
      if (args.seed) text << ", dropout " << args.dropout_p;
      return {.op = kEpilogueBackward, .arguments = text.str()};
    });
  }
  return dpreactivation;
}

struct CheckedBackward {
  TensorInfo doutput;
  DType doutput_dtype{};
  DType operand_dtypes[2]{};   // of input and weight, where they are given
  DType gradient_dtypes[3]{};  // of dinput, dweight and dbias, if they are wanted
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
  const bool is_transposed = lies_transposed(options.weight);
  const int64_t transposed[] = {1, std::max<int64_t>(call.out_features, 1)};
  Tensor dweight = !wants_weight   ? empty_1d(0, weight_type, device)
                   : is_transposed ? empty_strided(matrix, transposed, 2, weight_type, device)
                                   : empty(matrix, 2, weight_type, device);
  Tensor dbias = empty_1d(wants_bias ? call.out_features : 0, bias_type, device);
  const Matrix left = left_of(doutput, call.rows);
  if (wants_input) {
    const Matrix right(*options.weight);
    run_product({.left = left.data(),
                 .right = right.data(),
                 .bias = nullptr,
                 .output = dinput.mutable_data_ptr(),
                 .left_sums = nullptr,
                 .rows = call.rows,
                 .cols = call.in_features,
                 .depth = call.out_features,
                 .left_row = left.row(),
                 .left_step = left.column(),
                 .right_step = right.row(),
                 .right_col = right.column(),
                 .left_dtype = call.doutput_dtype,
                 .right_dtype = call.operand_dtypes[1],
                 .bias_dtype = bias_type,
                 .output_dtype = input_type,
                 .sums_dtype = bias_type,
                 .kind = LinearKind::kInput},
                device);
  }
  if (wants_weight || wants_bias) {
    std::optional<Matrix> right;
    if (wants_weight) right.emplace(*options.input);
    LinearProduct args{.left = left.data(),
                       .right = right ? right->data() : nullptr,
                       .bias = nullptr,
                       .output = dweight.mutable_data_ptr(),
                       .left_sums = wants_bias ? dbias.mutable_data_ptr() : nullptr,
                       .rows = call.out_features,
                       .cols = wants_weight ? call.in_features : 0,
                       .depth = call.rows,
                       .left_row = left.column(),
                       .left_step = left.row(),
                       .right_step = right ? right->row() : 1,
                       .right_col = right ? right->column() : 1,
                       .left_dtype = call.doutput_dtype,
                       .right_dtype = wants_weight ? call.operand_dtypes[0] : call.doutput_dtype,
                       .bias_dtype = bias_type,
                       .output_dtype = weight_type,
                       .sums_dtype = bias_type,
                       .kind = LinearKind::kWeight};
    if (wants_weight && is_transposed) {
      LinearProduct turned = args;
      std::swap(turned.left, turned.right);
      std::swap(turned.rows, turned.cols);
      std::swap(turned.left_row, turned.right_col);
      std::swap(turned.left_step, turned.right_step);
      std::swap(turned.left_dtype, turned.right_dtype);
      turned.left_sums = nullptr;
      run_product(turned, device);
      args.cols = 0;
    }
    run_product(args, device);
  }
  return {std::move(dinput), std::move(dweight), std::move(dbias)};
}

// On the meta device there is nothing to compute; the fakes give the shapes, and these the errors.
void linear_forward_check(const LinearOptions& options, const Tensor& input) {
  check_forward(options, input);
}
void linear_epilogue_forward_check(const EpilogueOptions& options, const Tensor& input) {
  check_epilogue(options, input);
}
void linear_epilogue_backward_check(const EpilogueBackwardOptions& options, const Tensor& doutput) {
  TensorInfo shape;
  check_epilogue_backward(options, doutput, shape);
}
void linear_backward_check(const LinearBackwardOptions& options, const Tensor& doutput) {
  check_backward(options, doutput);
}

}  // namespace

#define ONEPASS_LINEAR_ARGUMENTS "(Tensor input" ONEPASS_SCHEMA(ONEPASS_LINEAR_OPTIONS) ")"
#define ONEPASS_EPILOGUE_ARGUMENTS "(Tensor input" ONEPASS_SCHEMA(ONEPASS_EPILOGUE_OPTIONS) ")"
#define ONEPASS_EPILOGUE_BACKWARD_ARGUMENTS \
  "(Tensor doutput" ONEPASS_SCHEMA(ONEPASS_EPILOGUE_BACKWARD_OPTIONS) ")"
#define ONEPASS_LINEAR_BACKWARD_ARGUMENTS \
  "(Tensor doutput" ONEPASS_SCHEMA(ONEPASS_LINEAR_BACKWARD_OPTIONS) ")"

OperatorList linear_operators() {
  return {
      entry<&Packed<&linear_forward>::call>("linear_forward" ONEPASS_LINEAR_ARGUMENTS " -> Tensor"),
      entry<&Packed<&linear_forward_check>::call>(
          "linear_forward_check" ONEPASS_LINEAR_ARGUMENTS " -> ()", true),
      // (output, preactivation), which has no elements where it is not to be saved.
      entry<&Packed<&linear_epilogue_forward>::call>(
          "linear_epilogue_forward" ONEPASS_EPILOGUE_ARGUMENTS " -> (Tensor, Tensor)"),
      entry<&Packed<&linear_epilogue_forward_check>::call>(
          "linear_epilogue_forward_check" ONEPASS_EPILOGUE_ARGUMENTS " -> ()", true),
      entry<&Packed<&linear_epilogue_backward>::call>(
          "linear_epilogue_backward" ONEPASS_EPILOGUE_BACKWARD_ARGUMENTS " -> Tensor"),
      entry<&Packed<&linear_epilogue_backward_check>::call>(
          "linear_epilogue_backward_check" ONEPASS_EPILOGUE_BACKWARD_ARGUMENTS " -> ()", true),
      // (dinput, dweight, dbias); those that are not wanted have no elements.
      entry<&Packed<&linear_backward>::call>("linear_backward" ONEPASS_LINEAR_BACKWARD_ARGUMENTS
                                             " -> (Tensor, Tensor, Tensor)"),
      entry<&Packed<&linear_backward_check>::call>(
          "linear_backward_check" ONEPASS_LINEAR_BACKWARD_ARGUMENTS " -> ()", true),
  };
}
#endif  // ONEPASS_CUDA

}  // namespace onepass
