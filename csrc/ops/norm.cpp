// Layer norm and RMS norm, alone or behind a residual add: schemas, checks, allocation. The kernels
// are the back end's; every one of them is reached through the checks here.
#include "ops/norm.h"

#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "ops/check.h"
#include "ops/rows.h"
#include "ops/runtime.h"

namespace onepass {
namespace {

using torch::headeronly::ScalarType;

using OptionalTensor = std::optional<Tensor>;
using Sizes = std::vector<int64_t>;

// Bits of grad_mask.
constexpr int64_t kWantInput = 1;
constexpr int64_t kWantResidual = 2;
constexpr int64_t kWantWeight = 4;
constexpr int64_t kWantBias = 8;

const char* op_name(bool rms, bool add) {
  return rms ? (add ? "add_rms_norm" : "rms_norm") : (add ? "add_layer_norm" : "layer_norm");
}

RowTensor row_tensor(const OptionalTensor& tensor) {
  RowTensor rows{tensor};
  if (tensor) rows.info = info_of(*tensor);
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
  return {.op = op_name(args.rms, args.residual != nullptr), .arguments = text.str()};
}

Dispatch describe(const NormBackward& args) {
  std::ostringstream text;
  text << args.rows << " x " << args.cols << ", doutput " << name_of(args.doutput_dtype) << ", x "
       << name_of(args.x_dtype) << (args.dresidual_out ? ", with dresidual_out" : "");
  if (args.seed) text << ", dropout " << args.dropout_p;
  return {.op = std::string(op_name(args.rms, args.dresidual_out != nullptr)) + "_backward",
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

CheckedForward check_forward(const Tensor& input, const OptionalTensor& residual,
                             const OptionalTensor& weight, const OptionalTensor& bias,
                             const OptionalTensor& seed, const Sizes& normalized_shape, bool rms,
                             double eps, double weight_offset, double dropout_p,
                             const std::optional<ScalarType>& out_dtype,
                             const std::optional<ScalarType>& residual_dtype) {
  const char* op = op_name(rms, residual.has_value());
  CheckedForward call{.input = row_tensor(input), .residual = row_tensor(residual)};
  NormForward& args = call.args;
  const TensorInfo& shape = call.input.info;
  const CheckedAgainst checked(op, "input", shape);
  check_normalized_shape(op, "input", shape, normalized_shape);
  const int64_t row_dims = static_cast<int64_t>(normalized_shape.size());
  args.input_dtype = args.residual_dtype = checked.first_dtype();
  if (residual) {
    args.residual_dtype = checked.tensor("residual", call.residual.info, shape.sizes, shape.dims);
  }
  if (weight) {
    args.weight_dtype =
        checked.tensor("weight", info_of(*weight), normalized_shape.data(), row_dims);
  }
  if (bias) {
    args.bias_dtype = checked.tensor("bias", info_of(*bias), normalized_shape.data(), row_dims);
  }
  require(!bias || !rms, op, ": bias must not be given, got one");
  args.output_dtype = args.input_dtype;
  if (out_dtype) args.output_dtype = checked.dtype("out_dtype", static_cast<int32_t>(*out_dtype));
  args.residual_out_dtype = args.residual_dtype;
  if (residual_dtype) {
    args.residual_out_dtype =
        checked.dtype("residual_dtype", static_cast<int32_t>(*residual_dtype));
  }
  require_probability(op, "dropout_p", dropout_p);
  require(dropout_p == 0.0 || residual, op, ": dropout_p must be 0 without a residual, got ",
          dropout_p);
  require((dropout_p > 0.0) == seed.has_value(), op,
          ": seed must be given with dropout_p > 0 only, got ", seed ? "one" : "none");
  if (seed) checked.seed(*seed);

  call.leading = set_size(args, shape, normalized_shape);
  call.weight = dense(weight);
  call.bias = dense(bias);
  args.eps = eps;
  args.weight_offset = weight_offset;
  args.dropout_p = dropout_p;
  args.rms = rms;
  return call;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_forward(
    const Tensor& input, const OptionalTensor& residual, const OptionalTensor& weight,
    const OptionalTensor& bias, const OptionalTensor& seed, const Sizes& normalized_shape, bool rms,
    double eps, double weight_offset, double dropout_p, std::optional<ScalarType> out_dtype,
    std::optional<ScalarType> residual_dtype, bool save_statistics) {
  CheckedForward call = check_forward(input, residual, weight, bias, seed, normalized_shape, rms,
                                      eps, weight_offset, dropout_p, out_dtype, residual_dtype);
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
  Tensor mean = statistics(save_statistics && !rms);
  Tensor rstd = statistics(save_statistics);

  address_rows({&call.input, &call.residual}, static_cast<int64_t>(normalized_shape.size()),
               args.row_size);
  args.input = call.input.data();
  args.input_stride = call.input.stride;
  args.residual = call.residual.data();
  args.residual_stride = call.residual.stride;
  args.weight = data_of(call.weight);
  args.bias = data_of(call.bias);
  args.seed = static_cast<const int64_t*>(data_of(seed));
  args.output = output.mutable_data_ptr();
  if (residual) args.residual_out = residual_out.mutable_data_ptr();
  if (save_statistics && !rms) args.mean = mean.mutable_data_ptr();
  if (save_statistics) args.rstd = rstd.mutable_data_ptr();
  if (args.cols > 0) {
    run_operator(backend().norm.forward, args, shape.device, [&] { return describe(args); });
  }
  return {output, residual_out, mean, rstd};
}

#ifndef ONEPASS_CUDA
// On the meta device there is nothing to compute; the fake gives the shapes, and this the errors.
void norm_forward_check(const Tensor& input, const OptionalTensor& residual,
                        const OptionalTensor& weight, const OptionalTensor& bias,
                        const OptionalTensor& seed, const Sizes& normalized_shape, bool rms,
                        double eps, double weight_offset, double dropout_p,
                        std::optional<ScalarType> out_dtype,
                        std::optional<ScalarType> residual_dtype, bool) {
  check_forward(input, residual, weight, bias, seed, normalized_shape, rms, eps, weight_offset,
                dropout_p, out_dtype, residual_dtype);
}
#endif

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_backward(
    const OptionalTensor& doutput, const OptionalTensor& dresidual_out, const Tensor& x,
    const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& seed,
    const Tensor& mean, const Tensor& rstd, const Sizes& normalized_shape, bool rms,
    double weight_offset, double dropout_p, std::optional<ScalarType> input_dtype,
    std::optional<ScalarType> residual_dtype, int64_t grad_mask) {
  const char* op = rms ? "rms_norm_backward" : "layer_norm_backward";
  NormBackward args{};
  RowTensor x_rows = row_tensor(x);
  const TensorInfo shape = x_rows.info;
  const CheckedAgainst checked(op, "x", shape);
  check_normalized_shape(op, "x", shape, normalized_shape);
  const int64_t row_dims = static_cast<int64_t>(normalized_shape.size());
  args.x_dtype = args.dinput_dtype = args.dresidual_dtype = checked.first_dtype();
  if (input_dtype) {
    args.dinput_dtype = checked.dtype("input_dtype", static_cast<int32_t>(*input_dtype));
  }
  if (residual_dtype) {
    args.dresidual_dtype = checked.dtype("residual_dtype", static_cast<int32_t>(*residual_dtype));
  }
  RowTensor doutput_rows =
      row_tensor(doutput ? doutput : OptionalTensor(zeros_like(x, args.x_dtype)));
  args.doutput_dtype = checked.tensor("doutput", doutput_rows.info, shape.sizes, shape.dims);
  RowTensor dresidual_out_rows = row_tensor(dresidual_out);
  if (dresidual_out) {
    const DType dtype =
        checked.tensor("dresidual_out", dresidual_out_rows.info, shape.sizes, shape.dims);
    require(dtype == args.x_dtype, op, ": dresidual_out must have dtype ", name_of(args.x_dtype),
            " like x, got ", name_of(dtype));
  }
  if (weight) {
    args.weight_dtype =
        checked.tensor("weight", info_of(*weight), normalized_shape.data(), row_dims);
  }
  DType bias_dtype = args.x_dtype;
  if (bias) {
    bias_dtype = checked.tensor("bias", info_of(*bias), normalized_shape.data(), row_dims);
  }
  args.dweight_dtype = args.weight_dtype;
  args.dbias_dtype = bias_dtype;
  const int64_t leading = set_size(args, shape, normalized_shape);
  const DType statistics_dtype =
      args.x_dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const auto check_statistics = [&](const char* name, const Tensor& tensor) {
    const DType dtype = checked.tensor(name, info_of(tensor), shape.sizes, leading);
    require(dtype == statistics_dtype, op, ": ", name, " must have dtype ",
            name_of(statistics_dtype), ", got ", name_of(dtype));
  };
  check_statistics("rstd", rstd);
  if (!rms) check_statistics("mean", mean);
  require_probability(op, "dropout_p", dropout_p);
  require((dropout_p > 0.0) == seed.has_value(), op,
          ": seed must be given with dropout_p > 0 only, got ", seed ? "one" : "none");
  if (seed) checked.seed(*seed);
  const bool want_input = grad_mask & kWantInput;
  const bool want_residual = grad_mask & kWantResidual;
  const bool want_weight = (grad_mask & kWantWeight) && weight;
  const bool want_bias = (grad_mask & kWantBias) && bias;

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

  address_rows({&x_rows, &doutput_rows, &dresidual_out_rows}, row_dims, args.row_size);
  const OptionalTensor dense_weight = dense(weight);
  const OptionalTensor dense_mean = rms ? std::nullopt : dense(mean);
  const OptionalTensor dense_rstd = dense(rstd);
  args.x = x_rows.data();
  args.x_stride = x_rows.stride;
  args.doutput = doutput_rows.data();
  args.doutput_stride = doutput_rows.stride;
  args.dresidual_out = dresidual_out_rows.data();
  args.dresidual_out_stride = dresidual_out_rows.stride;
  args.weight = data_of(dense_weight);
  args.mean = data_of(dense_mean);
  args.rstd = data_of(dense_rstd);
  args.seed = static_cast<const int64_t*>(data_of(seed));
  if (want_input) args.dinput = dinput.mutable_data_ptr();
  if (want_residual) args.dresidual = dresidual.mutable_data_ptr();
  if (want_weight) args.dweight = dweight.mutable_data_ptr();
  if (want_bias) args.dbias = dbias.mutable_data_ptr();
  args.weight_offset = weight_offset;
  args.dropout_p = dropout_p;
  args.rms = rms;
  if (args.cols > 0) {
    run_operator(backend().norm.backward, args, shape.device, [&] { return describe(args); });
  }
  return {dinput, dresidual, dweight, dbias};
}

}  // namespace

#define ONEPASS_NORM_FORWARD_ARGUMENTS                                                     \
  "(Tensor input, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? seed, "          \
  "SymInt[] normalized_shape, bool rms, float eps, float weight_offset, float dropout_p, " \
  "ScalarType? out_dtype, ScalarType? residual_dtype, bool save_statistics)"

#ifndef ONEPASS_CUDA
STABLE_TORCH_LIBRARY_FRAGMENT(onepass, m) {
  // x = residual + dropout(input), rounded to residual_dtype, or input itself without a residual;
  // output = norm(x). Outputs that are not asked for have size 0.
  m.def("norm_forward" ONEPASS_NORM_FORWARD_ARGUMENTS
        " -> (Tensor output, Tensor residual_out, Tensor mean, Tensor rstd)");
  m.def("norm_forward_check" ONEPASS_NORM_FORWARD_ARGUMENTS " -> ()");
  // grad_mask: 1 dinput, 2 dresidual, 4 dweight, 8 dbias.
  m.def(
      "norm_backward(Tensor? doutput, Tensor? dresidual_out, Tensor x, Tensor? weight, "
      "Tensor? bias, Tensor? seed, Tensor mean, Tensor rstd, SymInt[] normalized_shape, bool rms, "
      "float weight_offset, float dropout_p, ScalarType? input_dtype, "
      "ScalarType? residual_dtype, int grad_mask) "
      "-> (Tensor dinput, Tensor dresidual, Tensor dweight, Tensor dbias)");
}
STABLE_TORCH_LIBRARY_IMPL(onepass, CompositeExplicitAutograd, m) {
  m.impl("norm_forward_check", TORCH_BOX(&norm_forward_check));
}
STABLE_TORCH_LIBRARY_IMPL(onepass, CPU, m) {
  m.impl("norm_forward", TORCH_BOX(&norm_forward));
  m.impl("norm_backward", TORCH_BOX(&norm_backward));
}
#else
STABLE_TORCH_LIBRARY_IMPL(onepass, CUDA, m) {
  m.impl("norm_forward", TORCH_BOX(&norm_forward));
  m.impl("norm_backward", TORCH_BOX(&norm_backward));
}
#endif

}  // namespace onepass
