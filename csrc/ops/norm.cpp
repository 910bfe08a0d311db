// Layer norm and RMS norm, alone or after a residual add: schemas, checks, allocation. The kernels
// are the back end's; every one of them is reached through the checks here.
#include "ops/norm.h"

#include <tuple>

#include "ops/check.h"
#include "ops/fields.h"
#include "ops/library.h"
#include "ops/rows.h"
#include "ops/runtime.h"

namespace onepass {
namespace {

// What norm_forward takes beside its input.
#define ONEPASS_NORM_OPTIONS(FIELD)             \
  FIELD(OptionalTensor, residual, "")           \
  FIELD(OptionalTensor, weight, "")             \
  FIELD(OptionalTensor, bias, "")               \
  FIELD(OptionalTensor, seed, "")               \
  FIELD(Sizes, normalized_shape, "")            \
  FIELD(StaticInt, kind, "") /* NormKind */     \
  FIELD(double, eps, "")                        \
  FIELD(double, weight_offset, "")              \
  FIELD(double, dropout_p, "")                  \
  FIELD(OptionalScalarType, out_dtype, "")      \
  FIELD(OptionalScalarType, residual_dtype, "") \
  FIELD(bool, save_statistics, "")

// What norm_backward takes beside doutput.
#define ONEPASS_NORM_BACKWARD_OPTIONS(FIELD)    \
  FIELD(OptionalTensor, dresidual_out, "")      \
  FIELD(Tensor, x, "")                          \
  FIELD(OptionalTensor, weight, "")             \
  FIELD(OptionalTensor, bias, "")               \
  FIELD(OptionalTensor, seed, "")               \
  FIELD(Tensor, mean, "")                       \
  FIELD(Tensor, rstd, "")                       \
  FIELD(Sizes, normalized_shape, "")            \
  FIELD(StaticInt, kind, "") /* NormKind */     \
  FIELD(double, weight_offset, "")              \
  FIELD(double, dropout_p, "")                  \
  FIELD(OptionalScalarType, input_dtype, "")    \
  FIELD(OptionalScalarType, residual_dtype, "") \
  FIELD(StaticInt, grad_mask, "")

ONEPASS_DEFINE_OPTIONS(NormOptions, ONEPASS_NORM_OPTIONS);
ONEPASS_DEFINE_OPTIONS(NormBackwardOptions, ONEPASS_NORM_BACKWARD_OPTIONS);

// Bits of grad_mask.
constexpr int64_t kWantInput = 1;
constexpr int64_t kWantResidual = 2;
constexpr int64_t kWantWeight = 4;
constexpr int64_t kWantBias = 8;

constexpr const char* kNames[kNormKinds][2] = {{"layer_norm", "add_layer_norm"},
                                               {"rms_norm", "add_rms_norm"}};

const char* op_name(NormKind kind, bool add) { return kNames[static_cast<int64_t>(kind)][add]; }

NormKind kind_of(int64_t number) {
  require(number >= 0 && number < kNormKinds, "norm: kind must be 0 (layer) or 1 (RMS), got ",
          number);
  return static_cast<NormKind>(number);
}

RowTensor row_tensor(const char* op, const char* name, const OptionalTensor& tensor) {
  RowTensor rows{tensor};
  if (tensor) rows.info = input_of(op, name, *tensor);
  return rows;
}

void check_normalized_shape(const char* op, const char* name, const TensorInfo& input,
                            const Sizes& shape) {
  const int64_t row_dims = static_cast<int64_t>(shape.size());
  require(row_dims > 0, op, ": normalized_shape must have at least one dimension, got ()");
  require(input.dims >= row_dims &&
              std::equal(shape.begin(), shape.end(), input.sizes + input.dims - row_dims),
          op, ": ", name, " must end in normalized_shape ", Shape{shape.data(), row_dims},
          ", got shape ", shape_of(input));
}

// Sets rows and cols; the statistics' shape is the leading dimensions.
template <class Args>
int64_t set_size(Args& args, const TensorInfo& input, const Sizes& normalized_shape) {
  const int64_t leading = input.dims - static_cast<int64_t>(normalized_shape.size());
  args.rows = 1;
  args.cols = 1;
  for (int64_t d = 0; d < leading; ++d) args.rows *= input.sizes[d];
  for (int64_t d = leading; d < input.dims; ++d) args.cols *= input.sizes[d];
  return leading;
}

Dispatch describe(const NormForward& args) {
  std::ostringstream text;
  text << args.rows << " x " << args.cols << ", input " << name_of(args.input_dtype);
  if (args.residual) {
    text << ", residual " << name_of(args.residual_dtype) << " to "
         << name_of(args.residual_out_dtype);
  }
  if (args.weight) text << ", weight " << name_of(args.weight_dtype);
  text << ", output " << name_of(args.output_dtype);
  if (args.seed) text << ", dropout " << args.dropout_p;
  return {.op = op_name(args.kind, args.residual != nullptr), .arguments = text.str()};
}

Dispatch describe(const NormBackward& args) {
  std::ostringstream text;
  text << args.rows << " x " << args.cols << ", doutput " << name_of(args.doutput_dtype) << ", x "
       << name_of(args.x_dtype) << (args.dresidual_out ? ", with dresidual_out" : "");
  if (args.seed) text << ", dropout " << args.dropout_p;
  return {.op = std::string(op_name(args.kind, args.dresidual_out != nullptr)) + "_backward",
          .arguments = text.str()};
}

struct CheckedForward {
  NormForward args{};
  RowTensor input;
  RowTensor residual;
  OptionalTensor weight{};
  OptionalTensor bias{};
  int64_t leading = 0;  // dimensions before normalized_shape
};

CheckedForward check_forward(const NormOptions& options, const Tensor& input) {
  const NormKind kind = kind_of(options.kind);
  const char* op = op_name(kind, options.residual.has_value());
  CheckedForward call{.input = row_tensor(op, "input", input),
                      .residual = row_tensor(op, "residual", options.residual)};
  NormForward& args = call.args;
  const TensorInfo& shape = call.input.info;
  const CheckedAgainst checked(op, "input", shape);
  check_normalized_shape(op, "input", shape, options.normalized_shape);
  const int64_t row_dims = static_cast<int64_t>(options.normalized_shape.size());
  args.input_dtype = args.residual_dtype = checked.first_dtype();
  if (options.residual) {
    args.residual_dtype = checked.tensor("residual", call.residual.info, shape.sizes, shape.dims);
  }
  if (options.weight) {
    args.weight_dtype = checked.tensor("weight", input_of(op, "weight", *options.weight),
                                       options.normalized_shape.data(), row_dims);
  }
  if (options.bias) {
    args.bias_dtype = checked.tensor("bias", input_of(op, "bias", *options.bias),
                                     options.normalized_shape.data(), row_dims);
  }
  require(!options.bias || kind != NormKind::kRms, op, ": bias must not be given, got one");
  args.output_dtype = args.input_dtype;
  if (options.out_dtype)
    args.output_dtype = checked.dtype("out_dtype", static_cast<int32_t>(*options.out_dtype));
  args.residual_out_dtype = args.residual_dtype;
  if (options.residual_dtype) {
    args.residual_out_dtype =
        checked.dtype("residual_dtype", static_cast<int32_t>(*options.residual_dtype));
  }
  require(options.dropout_p == 0.0 || options.residual, op,
          ": dropout_p must be 0 without a residual, got ", options.dropout_p);
  checked.dropout(options.dropout_p, options.seed);

  call.leading = set_size(args, shape, options.normalized_shape);
  call.weight = dense(options.weight);
  call.bias = dense(options.bias);
  args.eps = options.eps;
  args.weight_offset = options.weight_offset;
  args.dropout_p = options.dropout_p;
  args.kind = kind;
  return call;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_forward(const NormOptions& options,
                                                        const Tensor& input) {
  CheckedForward call = check_forward(options, input);
  const OptionalTensor& residual = options.residual;
  NormForward& args = call.args;
  const TensorInfo shape = call.input.info;
  const DType statistics_dtype =
      args.input_dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const auto statistics = [&](bool wanted) {
    return wanted ? empty(shape.sizes, call.leading, statistics_dtype, shape.device)
                  : empty_1d(0, statistics_dtype, shape.device);
  };
  Tensor output = empty(shape.sizes, shape.dims, args.output_dtype, shape.device);
  Tensor residual_out = residual
                            ? empty(shape.sizes, shape.dims, args.residual_out_dtype, shape.device)
                            : empty_1d(0, args.residual_out_dtype, shape.device);
  const bool has_mean = options.save_statistics && args.kind != NormKind::kRms;
  Tensor mean = statistics(has_mean);
  Tensor rstd = statistics(options.save_statistics);

  address_rows({&call.input, &call.residual}, static_cast<int64_t>(options.normalized_shape.size()),
               args.row_size);
  args.input = call.input.data();
  args.input_stride = call.input.stride;
  args.residual = call.residual.data();
  args.residual_stride = call.residual.stride;
  args.weight = data_of(call.weight);
  args.bias = data_of(call.bias);
  args.seed = static_cast<const int64_t*>(data_of(options.seed));
  args.output = output.mutable_data_ptr();
  if (residual) args.residual_out = residual_out.mutable_data_ptr();
  if (has_mean) args.mean = mean.mutable_data_ptr();
  if (options.save_statistics) args.rstd = rstd.mutable_data_ptr();
  if (args.cols > 0) {
    run_operator(backend().norm_forward, args, shape.device, [&] { return describe(args); });
  }
  return {output, residual_out, mean, rstd};
}

// On the meta device there is nothing to compute; the fake gives the shapes, and this the errors.
void norm_forward_check(const NormOptions& options, const Tensor& input) {
  check_forward(options, input);
}

struct CheckedBackward {
  NormBackward args{};
  RowTensor x;
  RowTensor dresidual_out;
  int64_t leading = 0;  // dimensions before normalized_shape
};

CheckedBackward check_backward(const NormBackwardOptions& options, const OptionalTensor& doutput) {
  const NormKind kind = kind_of(options.kind);
  const char* op = kind == NormKind::kRms ? "rms_norm_backward" : "layer_norm_backward";
  CheckedBackward call{.x = row_tensor(op, "x", options.x),
                       .dresidual_out = row_tensor(op, "dresidual_out", options.dresidual_out)};
  NormBackward& args = call.args;
  const TensorInfo& shape = call.x.info;
  const CheckedAgainst checked(op, "x", shape);
  const Sizes& normalized_shape = options.normalized_shape;
  check_normalized_shape(op, "x", shape, normalized_shape);
  const int64_t row_dims = static_cast<int64_t>(normalized_shape.size());
  args.x_dtype = args.doutput_dtype = args.dinput_dtype = args.dresidual_dtype =
      checked.first_dtype();
  if (options.input_dtype) {
    args.dinput_dtype = checked.dtype("input_dtype", static_cast<int32_t>(*options.input_dtype));
  }
  if (options.residual_dtype) {
    args.dresidual_dtype =
        checked.dtype("residual_dtype", static_cast<int32_t>(*options.residual_dtype));
  }
  if (doutput) {
    args.doutput_dtype =
        checked.tensor("doutput", input_of(op, "doutput", *doutput), shape.sizes, shape.dims);
  }
  if (options.dresidual_out) {
    const DType dtype =
        checked.tensor("dresidual_out", call.dresidual_out.info, shape.sizes, shape.dims);
    require(dtype == args.x_dtype, op, ": dresidual_out must have dtype ", name_of(args.x_dtype),
            " like x, got ", name_of(dtype));
  }
  if (options.weight) {
    args.weight_dtype = checked.tensor("weight", input_of(op, "weight", *options.weight),
                                       normalized_shape.data(), row_dims);
  }
  args.dbias_dtype = args.x_dtype;
  if (options.bias) {
    args.dbias_dtype = checked.tensor("bias", input_of(op, "bias", *options.bias),
                                      normalized_shape.data(), row_dims);
  }
  args.dweight_dtype = args.weight_dtype;
  call.leading = set_size(args, shape, normalized_shape);
  const DType statistics_dtype =
      args.x_dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const auto check_statistics = [&](const char* name, const Tensor& tensor) {
    const DType dtype = checked.tensor(name, input_of(op, name, tensor), shape.sizes, call.leading);
    require(dtype == statistics_dtype, op, ": ", name, " must have dtype ",
            name_of(statistics_dtype), ", got ", name_of(dtype));
  };
  check_statistics("rstd", options.rstd);
  if (kind != NormKind::kRms) check_statistics("mean", options.mean);
  checked.dropout(options.dropout_p, options.seed);
  args.weight_offset = options.weight_offset;
  args.dropout_p = options.dropout_p;
  args.kind = kind;
  return call;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_backward(const NormBackwardOptions& options,
                                                         const OptionalTensor& doutput) {
  CheckedBackward call = check_backward(options, doutput);
  NormBackward& args = call.args;
  const TensorInfo shape = call.x.info;
  const Sizes& normalized_shape = options.normalized_shape;
  const int64_t row_dims = static_cast<int64_t>(normalized_shape.size());
  const bool want_input = options.grad_mask & kWantInput;
  const bool want_residual = options.grad_mask & kWantResidual;
  const bool want_weight = (options.grad_mask & kWantWeight) && options.weight;
  const bool want_bias = (options.grad_mask & kWantBias) && options.bias;

  const auto rows_output = [&](bool wanted, DType dtype) {
    return wanted ? empty(shape.sizes, shape.dims, dtype, shape.device)
                  : empty_1d(0, dtype, shape.device);
  };
  const auto cols_output = [&](bool wanted, DType dtype) {
    return wanted ? empty(normalized_shape.data(), row_dims, dtype, shape.device)
                  : empty_1d(0, dtype, shape.device);
  };
  Tensor dinput = rows_output(want_input, args.dinput_dtype);
  Tensor dresidual = rows_output(want_residual, args.dresidual_dtype);
  Tensor dweight = cols_output(want_weight, args.dweight_dtype);
  Tensor dbias = cols_output(want_bias, args.dbias_dtype);

  RowTensor doutput_rows{doutput ? doutput : OptionalTensor(zeros_like(options.x, args.x_dtype))};
  doutput_rows.info = info_of(*doutput_rows.tensor);
  address_rows({&call.x, &doutput_rows, &call.dresidual_out}, row_dims, args.row_size);
  const OptionalTensor dense_weight = dense(options.weight);
  const OptionalTensor dense_mean =
      args.kind == NormKind::kRms ? std::nullopt : dense(options.mean);
  const OptionalTensor dense_rstd = dense(options.rstd);
  args.x = call.x.data();
  args.x_stride = call.x.stride;
  args.doutput = doutput_rows.data();
  args.doutput_stride = doutput_rows.stride;
  args.dresidual_out = call.dresidual_out.data();
  args.dresidual_out_stride = call.dresidual_out.stride;
  args.weight = data_of(dense_weight);
  args.mean = data_of(dense_mean);
  args.rstd = data_of(dense_rstd);
  args.seed = static_cast<const int64_t*>(data_of(options.seed));
  if (want_input) args.dinput = dinput.mutable_data_ptr();
  if (want_residual) args.dresidual = dresidual.mutable_data_ptr();
  if (want_weight) args.dweight = dweight.mutable_data_ptr();
  if (want_bias) args.dbias = dbias.mutable_data_ptr();
  if (args.cols > 0) {
    run_operator(backend().norm_backward, args, shape.device, [&] { return describe(args); });
  }
  return {dinput, dresidual, dweight, dbias};
}

void norm_backward_check(const NormBackwardOptions& options, const OptionalTensor& doutput) {
  check_backward(options, doutput);
}

}  // namespace

OperatorList norm_operators() {
  return {
      // x = residual + dropout(input), rounded to residual_dtype, or input itself without a
      // residual; output = norm(x). Outputs that are not asked for have size 0.
      entry<&Packed<&norm_forward>::call>("norm_forward(Tensor input" ONEPASS_SCHEMA(
          ONEPASS_NORM_OPTIONS) ") -> (Tensor output, Tensor residual_out, Tensor mean, Tensor "
                                "rstd)"),
      entry<&Packed<&norm_forward_check>::call>(
          "norm_forward_check(Tensor input" ONEPASS_SCHEMA(ONEPASS_NORM_OPTIONS) ") -> ()", true),
      // grad_mask: 1 dinput, 2 dresidual, 4 dweight, 8 dbias.
      entry<&Packed<&norm_backward>::call>("norm_backward(Tensor? doutput" ONEPASS_SCHEMA(
          ONEPASS_NORM_BACKWARD_OPTIONS) ") -> (Tensor dinput, Tensor dresidual, Tensor dweight, "
                                         "Tensor dbias)"),
      entry<&Packed<&norm_backward_check>::call>(
          "norm_backward_check(Tensor? doutput" ONEPASS_SCHEMA(
              ONEPASS_NORM_BACKWARD_OPTIONS) ") -> ()",
          true),
  };
}

}  // namespace onepass
