// A linear layer whose weight is quantised and frozen: schemas, checks, allocation. On CUDA there
// is no kernel here: the weight is dequantised for torch's products.
#include "ops/quantized_linear.h"

#include <tuple>

#include "core/math.h"
#include "ops/library.h"
#include "ops/linear_product.h"
#include "ops/runtime.h"

namespace onepass {

#ifdef ONEPASS_CUDA
OperatorList quantized_linear_operators() { return {}; }
#else
namespace {

// The weight, as ops/quantized_linear.h states it.
#define ONEPASS_QUANTIZED_WEIGHT(FIELD) \
  FIELD(Tensor, codes, "")              \
  FIELD(Tensor, scales, "")             \
  FIELD(OptionalTensor, shifts, "")

// The arguments of the forward besides input:
// output = residual + activation(input weight^T + bias), in residual's dtype or input's.
#define ONEPASS_QUANTIZED_LINEAR_OPTIONS(FIELD)            \
  ONEPASS_QUANTIZED_WEIGHT(FIELD)                          \
  FIELD(OptionalTensor, bias, "")                          \
  FIELD(OptionalTensor, residual, "")                      \
  FIELD(StaticInt, format_kind, "")     /* WeightFormat */ \
  FIELD(StaticInt, activation_kind, "") /* Activation */   \
  FIELD(bool, quantize_input, "")

// Those of the backward besides doutput, without an activation. A gradient is computed if its dtype
// is given.
#define ONEPASS_QUANTIZED_LINEAR_BACKWARD_OPTIONS(FIELD) \
  ONEPASS_QUANTIZED_WEIGHT(FIELD)                        \
  FIELD(int64_t, in_features, "")                        \
  FIELD(StaticInt, format_kind, "")                      \
  FIELD(OptionalScalarType, input_dtype, "")             \
  FIELD(OptionalScalarType, bias_dtype, "")

ONEPASS_DEFINE_OPTIONS(QuantizedLinearOptions, ONEPASS_QUANTIZED_LINEAR_OPTIONS);
ONEPASS_DEFINE_OPTIONS(QuantizedLinearBackwardOptions, ONEPASS_QUANTIZED_LINEAR_BACKWARD_OPTIONS);

constexpr const char* kOp = "quantized_linear";
constexpr const char* kBackward = "quantized_linear_backward";
constexpr int64_t kGroupStep = 8;

// The weight without its memory.
template <class Options>
QuantizedWeight check_weight(const char* op, const CheckedAgainst& checked, const Options& options,
                             int64_t in_features, int64_t& out_features) {
  const auto& [codes, scales, shifts] = std::tie(options.codes, options.scales, options.shifts);
  require_choice(op, "format_kind", options.format_kind, 0, kWeightFormats - 1);
  QuantizedWeight weight{};
  weight.format = static_cast<WeightFormat>(options.format_kind);
  const TensorInfo of_scales = input_of(op, "scales", scales);
  require(of_scales.dims == 2, op, ": scales must have shape (groups, out_features), got ",
          of_scales);
  const int64_t groups = of_scales.sizes[0];
  out_features = of_scales.sizes[1];
  require(groups >= 1 && in_features % groups == 0 &&
              (groups == 1 || in_features / groups % kGroupStep == 0),
          op, ": scales must have one group, or groups of a multiple of ", kGroupStep,
          " of the in_features, ", in_features, ", got ", of_scales);
  weight.group = in_features / groups;
  checked.device("scales", of_scales);
  weight.scales_dtype = checked.dtype("scales", of_scales.scalar_type);
  if (shifts) checked.tensor_of("shifts", *shifts, of_scales, weight.scales_dtype, "scales");
  weight.words_of_k = ceil_div(in_features, codes_per_word(weight.format));
  const int64_t sizes[] = {ceil_div(out_features, kPanelColumns), weight.words_of_k, kPanelColumns};
  const TensorInfo of_codes = input_of(op, "codes", codes);
  require(Shape(of_codes) == sizes && is(ScalarType::Int, of_codes.scalar_type), op,
          ": codes must be an int32 tensor of shape ", Shape(sizes), " for ",
          name_of(weight.format), ", got ", of_codes, " of ", TypeName{of_codes.scalar_type});
  checked.device("codes", of_codes);
  return weight;
}

template <class Options>
void put_weight(const Options& options, QuantizedWeight& weight, Copies& copies) {
  weight.words = dense_data_of<uint32_t>(options.codes, copies);
  weight.scales = dense_data_of(options.scales, copies);
  weight.shifts = dense_data_of(options.shifts, copies);
}

struct CheckedForward {
  TensorInfo input;
  DType input_dtype{};
  DType bias_dtype{};
  DType output_dtype{};
  QuantizedWeight weight{};
  int64_t rows = 0;
  int64_t in_features = 0;
  int64_t out_features = 0;
  Sizes sizes{};  // of the output
  Activation activation{};
};

CheckedForward check_forward(const QuantizedLinearOptions& options, const Tensor& input) {
  CheckedForward call{.input = input_of(kOp, "input", input)};
  const TensorInfo& shape = call.input;
  const CheckedAgainst checked(kOp, "input", shape);
  call.input_dtype = checked.first_dtype();
  require(shape.dims >= 1, kOp, ": input must have at least one dimension, got ()");
  call.in_features = shape.sizes[shape.dims - 1];
  call.weight = check_weight(kOp, checked, options, call.in_features, call.out_features);
  require(!options.quantize_input || (call.weight.format == WeightFormat::kInt8 &&
                                      call.weight.group == call.in_features && !options.shifts),
          kOp, ": quantize_input must be False unless int8 codes have one scale for each row, got ",
          name_of(call.weight.format), " in groups of ", call.weight.group);
  call.bias_dtype = checked.tensor("bias", options.bias, Shape(&call.out_features, 1));
  call.rows = product(kOp, "input", shape, shape.dims - 1);
  call.sizes.assign(shape.sizes, shape.sizes + shape.dims);
  call.sizes.back() = call.out_features;
  call.output_dtype = checked.tensor("residual", options.residual, call.sizes, call.input_dtype);
  require_choice(kOp, "activation_kind", options.activation_kind, 0, kLinearActivations - 1);
  call.activation = static_cast<Activation>(options.activation_kind);
  return call;
}

Tensor quantized_linear_forward(const QuantizedLinearOptions& options, const Tensor& input) {
  CheckedForward call = check_forward(options, input);
  const Device& device = call.input.device;
  Tensor output = empty(call.sizes, call.output_dtype, device);
  const Matrix left(input, /*dense_rows=*/true);
  Copies copies;
  put_weight(options, call.weight, copies);
  LinearProduct args =
      product_of(LinearKind::kForward, left.factor(), {nullptr, 1, 1, call.input_dtype},
                 {call.rows, call.out_features, call.in_features}, output.mutable_data_ptr(),
                 call.output_dtype, call.output_dtype);
  args.bias = dense_data_of(options.bias, copies);
  args.bias_dtype = call.bias_dtype;
  args.epilogue.residual = dense_data_of(options.residual, copies);
  args.epilogue.activation = call.activation;
  args.quantized = call.weight;
  args.quantizes_factors = options.quantize_input;
  run_product(args, device);
  return output;
}

struct CheckedBackward {
  TensorInfo doutput;
  DType doutput_dtype{};
  DType input_dtype{};
  DType bias_dtype{};
  QuantizedWeight weight{};
  int64_t rows = 0;
  int64_t out_features = 0;
};

CheckedBackward check_backward(const QuantizedLinearBackwardOptions& options,
                               const Tensor& doutput) {
  CheckedBackward call{.doutput = input_of(kBackward, "doutput", doutput)};
  const TensorInfo& shape = call.doutput;
  const CheckedAgainst checked(kBackward, "doutput", shape);
  call.doutput_dtype = checked.first_dtype();
  require(options.in_features >= 0, kBackward, ": in_features must not be negative, got ",
          options.in_features);
  call.weight = check_weight(kBackward, checked, options, options.in_features, call.out_features);
  require(shape.dims >= 1 && shape.sizes[shape.dims - 1] == call.out_features, kBackward,
          ": doutput must have a last dimension of ", call.out_features,
          ", the scales' out_features, got shape ", shape);
  call.rows = product(kBackward, "doutput", shape, shape.dims - 1);
  call.input_dtype = checked.dtype("input_dtype", options.input_dtype, call.doutput_dtype);
  call.bias_dtype = checked.dtype("bias_dtype", options.bias_dtype, call.doutput_dtype);
  return call;
}

std::tuple<Tensor, Tensor> quantized_linear_backward(const QuantizedLinearBackwardOptions& options,
                                                     const Tensor& doutput) {
  CheckedBackward call = check_backward(options, doutput);
  const Device& device = call.doutput.device;
  Sizes sizes(call.doutput.sizes, call.doutput.sizes + call.doutput.dims);
  sizes.back() = options.in_features;
  Tensor dinput = empty_if(options.input_dtype.has_value(), sizes, call.input_dtype, device);
  Tensor dbias = empty_1d(options.bias_dtype ? call.out_features : 0, call.bias_dtype, device);
  Copies copies;
  const Matrix left(doutput);
  if (options.input_dtype) {
    put_weight(options, call.weight, copies);
    LinearProduct args =
        product_of(LinearKind::kInput, left.factor(), {nullptr, 1, 1, left.factor().dtype},
                   {call.rows, options.in_features, call.out_features}, dinput.mutable_data_ptr(),
                   call.input_dtype, call.bias_dtype);
    args.quantized = call.weight;
    run_product(args, device);
  }
  if (options.bias_dtype) {
    LinearProduct args = product_of(
        LinearKind::kWeight, left.factor().transposed(), {nullptr, 1, 1, left.factor().dtype},
        {call.out_features, 0, call.rows}, nullptr, call.bias_dtype, call.bias_dtype);
    args.left_sums = dbias.mutable_data_ptr();
    run_product(args, device);
  }
  return {std::move(dinput), std::move(dbias)};
}

}  // namespace

OperatorList quantized_linear_operators() {
  return {
      entry<&quantized_linear_forward, &check_forward>(
          "quantized_linear_forward",
          "Tensor input" ONEPASS_SCHEMA(ONEPASS_QUANTIZED_LINEAR_OPTIONS), "Tensor"),
      // (dinput, dbias); those that are not wanted have no elements.
      entry<&quantized_linear_backward, &check_backward>(
          "quantized_linear_backward",
          "Tensor doutput" ONEPASS_SCHEMA(ONEPASS_QUANTIZED_LINEAR_BACKWARD_OPTIONS),
          "(Tensor, Tensor)"),
  };
}
#endif  // ONEPASS_CUDA

}  // namespace onepass
