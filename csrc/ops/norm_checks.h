// Shared by the operators of the norm family, before the back end: options, checks, allocation.
#pragma once

#include <tuple>
#include <utility>

#include "ops/library.h"
#include "ops/norm.h"
#include "ops/rows.h"
#include "ops/runtime.h"

namespace onepass {

// The arguments of norm_forward besides its input.
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

// The arguments of norm_backward besides doutput.
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

// Bits of grad_mask; weight and bias are scale and shift too.
inline constexpr int64_t kWantInput = 1;
inline constexpr int64_t kWantResidual = 2;
inline constexpr int64_t kWantWeight = 4;
inline constexpr int64_t kWantBias = 8;
inline constexpr int64_t kWantGate = 16;

enum class NormForm { kPlain, kAdd, kModulated };

const char* op_name(NormKind kind, NormForm form);
const char* backward_name(NormKind kind, NormForm form);
NormKind norm_kind_of(int64_t number);

// For the log.
Dispatch describe(const NormForward& args);
Dispatch describe(const NormBackward& args);

OperatorList modulated_norm_operators();

// The functions below take any options that have the fields they use.
template <class Options>
int64_t row_dims_of(const Options& options) {
  return static_cast<int64_t>(options.normalized_shape.size());
}

// Sets rows and cols, and gives the dimensions before normalized_shape: the statistics' shape.
template <class Args>
int64_t check_rows(const char* op, const char* name, const Shape& input,
                   const Sizes& normalized_shape, Args& args) {
  const Shape row = normalized_shape;
  const int64_t leading = input.dims - row.dims;
  require(row.dims > 0, op, ": normalized_shape must have at least one dimension, got ()");
  require(leading >= 0 && Shape(input.sizes + leading, row.dims) == row, op, ": ", name,
          " must end in normalized_shape ", row, ", got shape ", input);
  args.rows = input.product(0, leading);
  args.cols = row.numel();
  return leading;
}

struct CheckedNorm {
  const OptionalTensor& weight;  // of all rows
  const OptionalTensor& bias;
  NormForward args{};
  RowTensor input;
  RowTensor residual;
  int64_t leading = 0;  // dimensions before normalized_shape
  Copies copies{};
};

// Throws unless everything fits.
template <class Options>
CheckedNorm check_forward(const char* op, const Options& options, const OptionalTensor& weight,
                          const OptionalTensor& bias, const Tensor& input) {
  CheckedNorm call{.weight = weight,
                   .bias = bias,
                   .input = row_tensor(op, "input", input),
                   .residual = row_tensor(op, "residual", options.residual)};
  NormForward& args = call.args;
  const TensorInfo& shape = call.input.info;
  const CheckedAgainst checked(op, "input", shape);
  call.leading = check_rows(op, "input", shape, options.normalized_shape, args);
  args.kind = norm_kind_of(options.kind);
  args.input_dtype = args.residual_dtype = checked.first_dtype();
  if (options.residual) args.residual_dtype = checked.tensor("residual", call.residual.info, shape);
  args.weight_dtype = checked.tensor("weight", weight, options.normalized_shape);
  args.bias_dtype = checked.tensor("bias", bias, options.normalized_shape);
  require(!bias || args.kind != NormKind::kRms, op, ": bias must not be given, got one");
  args.output_dtype = checked.dtype("out_dtype", options.out_dtype, args.input_dtype);
  args.residual_out_dtype =
      checked.dtype("residual_dtype", options.residual_dtype, args.residual_dtype);
  require(options.dropout_p == 0.0 || options.residual, op,
          ": dropout_p must be 0 without a residual, got ", options.dropout_p);
  checked.dropout("dropout_p", options.dropout_p, options.seed);
  args.eps = options.eps;
  args.weight_offset = options.weight_offset;
  args.dropout_p = options.dropout_p;
  return call;
}

using NormResults = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// Allocates the results of a forward, and points its arguments to them and to its tensors.
template <class Options>
NormResults allocate(CheckedNorm& call, const Options& options) {
  NormForward& args = call.args;
  const TensorInfo shape = call.input.info;
  const Shape leading(shape.sizes, call.leading);
  const DType kept = accumulator_of(args.input_dtype);
  const bool has_mean = options.save_statistics && args.kind != NormKind::kRms;
  const auto result = [&](bool wanted, const Shape& sizes, DType dtype, void*& target) {
    return empty_if(wanted, sizes, dtype, shape.device, target);
  };
  NormResults results = {
      result(true, shape, args.output_dtype, args.output),
      result(options.residual.has_value(), shape, args.residual_out_dtype, args.residual_out),
      result(has_mean, leading, kept, args.mean),
      result(options.save_statistics, leading, kept, args.rstd)};
  address_rows({&call.input, &call.residual}, row_dims_of(options), args.row_size);
  call.input.put_into(args.input, args.input_stride);
  call.residual.put_into(args.residual, args.residual_stride);
  args.weight = dense_data_of(call.weight, call.copies);
  args.bias = dense_data_of(call.bias, call.copies);
  args.seed = seed_of(options.seed);
  return results;
}

struct CheckedNormBackward {
  const OptionalTensor& weight;  // of all rows
  NormBackward args{};
  RowTensor x;
  RowTensor dresidual_out;
  RowTensor doutput;
  int64_t leading = 0;  // dimensions before normalized_shape
  Copies copies{};
};

template <class Options>
CheckedNormBackward check_backward(const char* op, const Options& options,
                                   const OptionalTensor& weight, const OptionalTensor& bias,
                                   const OptionalTensor& doutput) {
  CheckedNormBackward call{.weight = weight,
                           .x = row_tensor(op, "x", options.x),
                           .dresidual_out = row_tensor(op, "dresidual_out", options.dresidual_out),
                           .doutput = row_tensor(op, "doutput", doutput)};
  NormBackward& args = call.args;
  const TensorInfo& shape = call.x.info;
  const CheckedAgainst checked(op, "x", shape);
  call.leading = check_rows(op, "x", shape, options.normalized_shape, args);
  args.kind = norm_kind_of(options.kind);
  args.x_dtype = args.doutput_dtype = checked.first_dtype();
  args.dinput_dtype = checked.dtype("input_dtype", options.input_dtype, args.x_dtype);
  args.dresidual_dtype = checked.dtype("residual_dtype", options.residual_dtype, args.x_dtype);
  if (doutput) args.doutput_dtype = checked.tensor("doutput", call.doutput.info, shape);
  if (options.dresidual_out) {
    checked.tensor_of("dresidual_out", call.dresidual_out.info, shape, args.x_dtype, "x");
  }
  args.weight_dtype = checked.tensor("weight", weight, options.normalized_shape);
  args.dweight_dtype = args.weight_dtype;
  args.dbias_dtype = checked.tensor("bias", bias, options.normalized_shape, args.x_dtype);
  const Shape leading(shape.sizes, call.leading);
  checked.tensor_of("rstd", options.rstd, leading, checked.accumulator());
  if (args.kind != NormKind::kRms) {
    checked.tensor_of("mean", options.mean, leading, checked.accumulator());
  }
  checked.dropout("dropout_p", options.dropout_p, options.seed);
  args.weight_offset = options.weight_offset;
  args.dropout_p = options.dropout_p;
  return call;
}

// Allocates (dinput, dresidual), and points the arguments to them and to the call's tensors.
// `branch`: addressed as rows together with these; may be no tensor.
template <class Options>
std::pair<Tensor, Tensor> allocate(CheckedNormBackward& call, const Options& options,
                                   RowTensor& branch) {
  NormBackward& args = call.args;
  const TensorInfo shape = call.x.info;
  const auto gradient = [&](int64_t bit, DType dtype, void*& target) {
    return empty_if(options.grad_mask & bit, shape, dtype, shape.device, target);
  };
  std::pair<Tensor, Tensor> gradients = {
      gradient(kWantInput, args.dinput_dtype, args.dinput),
      gradient(kWantResidual, args.dresidual_dtype, args.dresidual)};
  if (!call.doutput.tensor) {
    call.doutput.tensor = zeros(shape, args.x_dtype, shape.device);
    call.doutput.info = info_of(*call.doutput.tensor);
  }
  address_rows({&call.x, &call.doutput, &call.dresidual_out, &branch}, row_dims_of(options),
               args.row_size);
  call.x.put_into(args.x, args.x_stride);
  call.doutput.put_into(args.doutput, args.doutput_stride);
  call.dresidual_out.put_into(args.dresidual_out, args.dresidual_out_stride);
  if (args.kind != NormKind::kRms) args.mean = dense_data_of(options.mean, call.copies);
  args.rstd = dense_data_of(options.rstd, call.copies);
  args.weight = dense_data_of(call.weight, call.copies);
  args.seed = seed_of(options.seed);
  return gradients;
}

}  // namespace onepass
