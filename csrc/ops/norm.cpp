// Layer norm and RMS norm, alone or after a residual add: schemas, checks, allocation. The back
// ends have the kernels; all calls of them pass the checks here.
#include "ops/norm.h"

#include "ops/norm_checks.h"

namespace onepass {
namespace {

constexpr const char* kNames[kNormKinds][3] = {
    {"layer_norm", "add_layer_norm", "modulated_layer_norm"},
    {"rms_norm", "add_rms_norm", "modulated_rms_norm"}};
constexpr const char* kBackwardNames[kNormKinds][3] = {
    {"layer_norm_backward", "add_layer_norm_backward", "modulated_layer_norm_backward"},
    {"rms_norm_backward", "add_rms_norm_backward", "modulated_rms_norm_backward"}};

NormForm form_of(bool adds) { return adds ? NormForm::kAdd : NormForm::kPlain; }

}  // namespace

const char* op_name(NormKind kind, NormForm form) {
  return kNames[static_cast<int64_t>(kind)][static_cast<int64_t>(form)];
}
const char* backward_name(NormKind kind, NormForm form) {
  return kBackwardNames[static_cast<int64_t>(kind)][static_cast<int64_t>(form)];
}

NormKind norm_kind_of(int64_t number) {
  require(number >= 0 && number < kNormKinds, "norm: kind must be 0 (layer) or 1 (RMS), got ",
          number);
  return static_cast<NormKind>(number);
}

Dispatch describe(const NormForward& args) {
  return described(
      op_name(args.kind, form_of(args.residual)), args.rows, " x ", args.cols, ", input ",
      args.input_dtype,
      when(args.residual, ", residual ", args.residual_dtype, " to ", args.residual_out_dtype),
      when(args.weight, ", weight ", args.weight_dtype), ", output ", args.output_dtype,
      when(args.seed, ", dropout ", args.dropout_p));
}

Dispatch describe(const NormBackward& args) {
  return {
      .op = backward_name(args.kind, form_of(args.dresidual_out)),
      .arguments = text_of(args.rows, " x ", args.cols, ", doutput ", args.doutput_dtype, ", x ",
                           args.x_dtype, when(args.dresidual_out, ", with dresidual_out"),
                           when(args.seed, ", dropout ", args.dropout_p))};
}

namespace {

CheckedNorm check_norm_forward(const NormOptions& options, const Tensor& input) {
  const NormForm form = form_of(options.residual.has_value());
  return check_forward(op_name(norm_kind_of(options.kind), form), options, options.weight,
                       options.bias, input);
}

NormResults norm_forward(const NormOptions& options, const Tensor& input) {
  CheckedNorm call = check_norm_forward(options, input);
  const Device device = call.input.info.device;
  NormResults results = allocate(call, options);
  const NormForward& args = call.args;
  if (args.cols > 0) {
    run_operator(backend().norm_forward, args, device, [&] { return describe(args); });
  }
  return results;
}

CheckedNormBackward check_norm_backward(const NormBackwardOptions& options,
                                        const OptionalTensor& doutput) {
  return check_backward(backward_name(norm_kind_of(options.kind), NormForm::kPlain), options,
                        options.weight, options.bias, doutput);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm_backward(const NormBackwardOptions& options,
                                                         const OptionalTensor& doutput) {
  CheckedNormBackward call = check_norm_backward(options, doutput);
  NormBackward& args = call.args;
  const Device device = call.x.info.device;
  RowTensor none{};
  auto [dinput, dresidual] = allocate(call, options, none);
  const auto gradient = [&](int64_t bit, const OptionalTensor& of, DType dtype, void*& target) {
    return empty_if((options.grad_mask & bit) && of, options.normalized_shape, dtype, device,
                    target);
  };
  Tensor dweight = gradient(kWantWeight, options.weight, args.dweight_dtype, args.dweight);
  Tensor dbias = gradient(kWantBias, options.bias, args.dbias_dtype, args.dbias);
  if (args.cols > 0) {
    run_operator(backend().norm_backward, args, device, [&] { return describe(args); });
  }
  return {dinput, dresidual, dweight, dbias};
}

}  // namespace

OperatorList norm_operators() {
  OperatorList operators = {
      // x = residual + dropout(input), rounded to residual_dtype, or input itself without a
      // residual; output = norm(x). Outputs that are not wanted have size 0.
      entry<&norm_forward, &check_norm_forward>(
          "norm_forward", "Tensor input" ONEPASS_SCHEMA(ONEPASS_NORM_OPTIONS),
          "(Tensor output, Tensor residual_out, Tensor mean, Tensor rstd)"),
      // grad_mask: 1 dinput, 2 dresidual, 4 dweight, 8 dbias.
      entry<&norm_backward, &check_norm_backward>(
          "norm_backward", "Tensor? doutput" ONEPASS_SCHEMA(ONEPASS_NORM_BACKWARD_OPTIONS),
          "(Tensor dinput, Tensor dresidual, Tensor dweight, Tensor dbias)"),
  };
  const OperatorList modulated = modulated_norm_operators();
  operators.insert(operators.end(), modulated.begin(), modulated.end());
  return operators;
}

}  // namespace onepass
