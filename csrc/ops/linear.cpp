// A linear layer: schemas, checks, allocation. On CUDA there is no kernel here: torch's products
// are used.
#include "ops/linear.h"

#include <optional>
#include <tuple>

#include "ops/library.h"
#include "ops/linear_product.h"
#include "ops/runtime.h"

namespace onepass {

#ifdef ONEPASS_CUDA
OperatorList linear_operators() { return {}; }
#else
namespace {

// The arguments of linear_forward besides its input.
#define ONEPASS_LINEAR_OPTIONS(FIELD)      \
  FIELD(Tensor, weight, "")                \
  FIELD(OptionalTensor, bias, "")          \
  FIELD(OptionalScalarType, out_dtype, "") \
  FIELD(StaticInt, factor_mask, "=0")

// The arguments of linear_epilogue_forward besides its input: those of linear_forward, and the
// epilogue's, output = residual + dropout(activation(preactivation)), in residual's dtype. The
// rounding seed is of the backward: dinput's product rounds doutput to codes stochastically.
#define ONEPASS_EPILOGUE_OPTIONS(FIELD)                  \
  FIELD(Tensor, weight, "")                              \
  FIELD(OptionalTensor, bias, "")                        \
  FIELD(OptionalTensor, residual, "")                    \
  FIELD(OptionalTensor, seed, "")                        \
  FIELD(double, dropout_p, "")                           \
  FIELD(StaticInt, activation_kind, "") /* Activation */ \
  FIELD(bool, save_preactivation, "")                    \
  FIELD(StaticInt, factor_mask, "=0")                    \
  FIELD(OptionalTensor, rounding_seed, "=None")

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
  FIELD(OptionalScalarType, bias_dtype, "")    \
  FIELD(StaticInt, factor_mask, "=0")          \
  FIELD(OptionalTensor, rounding_seed, "=None")

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

// Sets how factors are taken; `quantized` is this product's bit of the mask.
void set_factors(LinearProduct& args, int64_t mask, int64_t quantized) {
  args.rounds_factors = (mask & kRoundedFactors) != 0;
  args.quantizes_factors = (mask & quantized) != 0;
}

struct CheckedForward {
  TensorInfo input;
  DType input_dtype{};
  DType bias_dtype{};
  DType output_dtype{};
  int64_t rows = 0;
  int64_t in_features = 0;
  int64_t out_features = 0;
  Sizes sizes{};  // of the output
  Activation activation{};
};

CheckedForward check_forward(const LinearOptions& options, const Tensor& input) {
  const auto& [weight, bias, out_dtype, factor_mask] = options;
  CheckedForward call{.input = input_of(kOp, "input", input)};
  const TensorInfo& shape = call.input;
  const CheckedAgainst checked(kOp, "input", shape);
  call.input_dtype = checked.first_dtype();
  const TensorInfo matrix = input_of(kOp, "weight", weight);
  require(matrix.dims == 2, kOp, ": weight must have shape (out_features, in_features), got ",
          matrix);
  call.out_features = matrix.sizes[0];
  call.in_features = matrix.sizes[1];
  require(shape.dims >= 1 && shape.sizes[shape.dims - 1] == call.in_features, kOp,
          ": input must have a last dimension of ", call.in_features,
          ", weight's in_features, got shape ", shape);
  checked.device("weight", matrix);
  checked.dtype("weight", matrix.scalar_type);
  call.bias_dtype = checked.tensor("bias", bias, Shape(&call.out_features, 1));
  call.output_dtype = checked.dtype("out_dtype", out_dtype, call.input_dtype);
  require_choice(kOp, "factor_mask", factor_mask, 0, kAllFactorBits);
  call.rows = product(kOp, "input", shape, shape.dims - 1);
  call.sizes.assign(shape.sizes, shape.sizes + shape.dims);
  call.sizes.back() = call.out_features;
  return call;
}

LinearProduct product_of(const CheckedForward& call, const Matrix& input, const Matrix& weight,
                         const OptionalTensor& bias, Tensor& output, Copies& copies) {
  LinearProduct args =
      product_of(LinearKind::kForward, input.factor(), weight.factor().transposed(),
                 {call.rows, call.out_features, call.in_features}, output.mutable_data_ptr(),
                 call.output_dtype, call.output_dtype);
  args.bias = dense_data_of(bias, copies);
  args.bias_dtype = call.bias_dtype;
  return args;
}

Tensor linear_forward(const LinearOptions& options, const Tensor& input) {
  const CheckedForward call = check_forward(options, input);
  Tensor output = empty(call.sizes, call.output_dtype, call.input.device);
  const Matrix left = left_of(input, call.rows), right(options.weight);
  Copies copies;
  LinearProduct args = product_of(call, left, right, options.bias, output, copies);
  set_factors(args, options.factor_mask, kQuantizedForward);
  run_product(args, call.input.device);
  return output;
}

Activation require_activation(const char* op, int64_t activation) {
  require_choice(op, "activation_kind", activation, 0, kLinearActivations - 1);
  return static_cast<Activation>(activation);
}

CheckedForward check_epilogue(const EpilogueOptions& options, const Tensor& input) {
  CheckedForward call =
      check_forward({options.weight, options.bias, {}, options.factor_mask}, input);
  const CheckedAgainst checked(kOp, "input", call.input);
  call.output_dtype = checked.tensor("residual", options.residual, call.sizes, call.output_dtype);
  checked.dropout("dropout_p", options.dropout_p, options.seed);
  if (options.rounding_seed) checked.seed("rounding_seed", *options.rounding_seed);
  call.activation = require_activation(kOp, options.activation_kind);
  return call;
}

std::tuple<Tensor, Tensor> linear_epilogue_forward(const EpilogueOptions& options,
                                                   const Tensor& input) {
  const CheckedForward call = check_epilogue(options, input);
  const Device& device = call.input.device;
  Tensor output = empty(call.sizes, call.output_dtype, device);
  LinearEpilogue epilogue{};
  Tensor preactivation = empty_if(options.save_preactivation, call.sizes, call.input_dtype, device,
                                  epilogue.preactivation);
  const Matrix left = left_of(input, call.rows), right(options.weight);
  Copies copies;
  epilogue.residual = dense_data_of(options.residual, copies);
  epilogue.seed = seed_of(options.seed);
  epilogue.dropout_p = options.dropout_p;
  epilogue.activation = call.activation;
  epilogue.preactivation_dtype = call.input_dtype;
  LinearProduct args = product_of(call, left, right, options.bias, output, copies);
  args.epilogue = epilogue;
  set_factors(args, options.factor_mask, kQuantizedForward);
  run_product(args, device);
  return {std::move(output), std::move(preactivation)};
}

Checked<EpilogueBackward> check_epilogue_backward(const EpilogueBackwardOptions& options,
                                                  const Tensor& doutput) {
  constexpr const char* op = kEpilogueBackward;
  Checked<EpilogueBackward> call{input_of(op, "doutput", doutput)};
  auto& [shape, args] = call;
  const CheckedAgainst checked(op, "doutput", shape);
  args.doutput_dtype = checked.first_dtype();
  args.activation = require_activation(op, options.activation_kind);
  require(options.preactivation.has_value() == (args.activation != Activation::kNone), op,
          ": preactivation must be given with an activation and only then, got ",
          options.preactivation ? "one" : "none");
  args.preactivation_dtype = checked.tensor("preactivation", options.preactivation, shape);
  checked.dropout("dropout_p", options.dropout_p, options.seed);
  args.dropout_p = options.dropout_p;
  args.dpreactivation_dtype = checked.dtype("out_dtype", options.out_dtype, args.doutput_dtype);
  args.numel = product(op, "doutput", shape, shape.dims);
  return call;
}

Tensor linear_epilogue_backward(const EpilogueBackwardOptions& options, const Tensor& doutput) {
  auto [shape, args] = check_epilogue_backward(options, doutput);
  Tensor dpreactivation = empty(shape, args.dpreactivation_dtype, shape.device);
  Copies copies;
  args.doutput = dense_data_of(doutput, copies);
  args.preactivation = dense_data_of(options.preactivation, copies);
  args.seed = seed_of(options.seed);
  args.dpreactivation = dpreactivation.mutable_data_ptr();
  if (args.numel > 0) {
    run_operator(backend().epilogue_backward, args, shape.device, [&args = args] {
      return described(kEpilogueBackward, args.numel, " elements of ", args.doutput_dtype,
                       when(args.preactivation, ", ", name_of(args.activation)),
                       when(args.seed, ", dropout ", args.dropout_p));
    });
  }
  return dpreactivation;
}

struct CheckedBackward {
  TensorInfo doutput;
  DType doutput_dtype{};
  DType gradient_dtypes[3]{};  // of dinput, dweight and dbias, if they are wanted
  int64_t rows = 0;
  int64_t in_features = 0;  // 0 where neither input nor weight is given
  int64_t out_features = 0;
};

CheckedBackward check_backward(const LinearBackwardOptions& options, const Tensor& doutput) {
  const auto& [input, weight, input_dtype, weight_dtype, bias_dtype, factor_mask, rounding_seed] =
      options;
  CheckedBackward call{.doutput = input_of(kBackward, "doutput", doutput)};
  const TensorInfo& shape = call.doutput;
  const CheckedAgainst checked(kBackward, "doutput", shape);
  require(shape.dims >= 1, kBackward, ": doutput must have at least one dimension, got ()");
  call.doutput_dtype = checked.first_dtype();
  call.out_features = shape.sizes[shape.dims - 1];
  call.rows = product(kBackward, "doutput", shape, shape.dims - 1);
  require(weight.has_value() || !input_dtype, kBackward,
          ": weight must be given for the gradient of input, got none");
  require(input.has_value() || !weight_dtype, kBackward,
          ": input must be given for the gradient of weight, got none");
  if (weight) {
    const TensorInfo matrix = input_of(kBackward, "weight", *weight);
    require(matrix.dims == 2 && matrix.sizes[0] == call.out_features, kBackward,
            ": weight must have shape (", call.out_features, ", in_features), got ", matrix);
    checked.device("weight", matrix);
    checked.dtype("weight", matrix.scalar_type);
    call.in_features = matrix.sizes[1];
  }
  if (input) {
    const TensorInfo rows = input_of(kBackward, "input", *input);
    if (!weight && rows.dims > 0) call.in_features = rows.sizes[rows.dims - 1];
    Sizes sizes(shape.sizes, shape.sizes + shape.dims);
    sizes.back() = call.in_features;
    checked.tensor("input", rows, sizes);
  }
  require_choice(kBackward, "factor_mask", factor_mask, 0, kAllFactorBits);
  if (rounding_seed) checked.seed("rounding_seed", *rounding_seed);
  const DType dtype = call.doutput_dtype;
  call.gradient_dtypes[0] = checked.dtype("input_dtype", input_dtype, dtype);
  call.gradient_dtypes[1] = checked.dtype("weight_dtype", weight_dtype, dtype);
  call.gradient_dtypes[2] = checked.dtype("bias_dtype", bias_dtype, dtype);
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
  Tensor dinput = empty_if(wants_input, sizes, input_type, device);
  const bool is_transposed = wants_weight && lies_transposed(options.weight);
  const int64_t transposed[] = {1, std::max<int64_t>(call.out_features, 1)};
  Tensor dweight = is_transposed ? empty_strided(matrix, transposed, weight_type, device)
                                 : empty_if(wants_weight, matrix, weight_type, device);
  Tensor dbias = empty_1d(wants_bias ? call.out_features : 0, bias_type, device);
  const bool is_random =
      wants_input && options.rounding_seed && (options.factor_mask & kQuantizedInput) != 0;
  const Matrix left =
      is_random ? Matrix(doutput, /*dense_rows=*/true) : left_of(doutput, call.rows);
  if (wants_input) {
    const Matrix right(*options.weight);
    LinearProduct args = product_of(LinearKind::kInput, left.factor(), right.factor(),
                                    {call.rows, call.in_features, call.out_features},
                                    dinput.mutable_data_ptr(), input_type, bias_type);
    set_factors(args, options.factor_mask, kQuantizedInput);
    args.rounding_seed = seed_of(options.rounding_seed);
    run_product(args, device);
  }
  if (wants_weight || wants_bias) {
    std::optional<Matrix> right;
    if (wants_weight) right.emplace(*options.input);
    LinearProduct args =
        product_of(LinearKind::kWeight, left.factor().transposed(),
                   right ? right->factor() : Factor{nullptr, 1, 1, call.doutput_dtype},
                   {call.out_features, wants_weight ? call.in_features : 0, call.rows},
                   dweight.mutable_data_ptr(), weight_type, bias_type);
    if (wants_bias) args.left_sums = dbias.mutable_data_ptr();
    set_factors(args, options.factor_mask, kQuantizedWeight);
    const bool is_float32 =
        args.left_dtype == DType::kFloat32 && args.right_dtype == args.left_dtype;
    if (is_transposed || (args.quantizes_factors && is_float32)) {
      LinearProduct product = args;
      if (is_transposed) {
        std::swap(product.left, product.right);
        std::swap(product.rows, product.cols);
        std::swap(product.left_row, product.right_col);
        std::swap(product.left_step, product.right_step);
        std::swap(product.left_dtype, product.right_dtype);
      }
      product.left_sums = nullptr;  // they are of rows of the left factor, as it is
      run_product(product, device);
      args.cols = 0;
    }
    run_product(args, device);
  }
  return {std::move(dinput), std::move(dweight), std::move(dbias)};
}

}  // namespace

OperatorList linear_operators() {
  return {
      entry<&linear_forward, &check_forward>(
          "linear_forward", "Tensor input" ONEPASS_SCHEMA(ONEPASS_LINEAR_OPTIONS), "Tensor"),
      // (output, preactivation), which has no elements where it is not to be saved.
      entry<&linear_epilogue_forward, &check_epilogue>(
          "linear_epilogue_forward", "Tensor input" ONEPASS_SCHEMA(ONEPASS_EPILOGUE_OPTIONS),
          "(Tensor, Tensor)"),
      entry<&linear_epilogue_backward, &check_epilogue_backward>(
          "linear_epilogue_backward",
          "Tensor doutput" ONEPASS_SCHEMA(ONEPASS_EPILOGUE_BACKWARD_OPTIONS), "Tensor"),
      // (dinput, dweight, dbias); those that are not wanted have no elements.
      entry<&linear_backward, &check_backward>(
          "linear_backward", "Tensor doutput" ONEPASS_SCHEMA(ONEPASS_LINEAR_BACKWARD_OPTIONS),
          "(Tensor, Tensor, Tensor)"),
  };
}
#endif  // ONEPASS_CUDA

}  // namespace onepass
