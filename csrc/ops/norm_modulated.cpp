// Modulated norms, and norms after a residual add whose branch is scaled: schemas, checks,
// allocation. Both are one operator of a back end.
#include "ops/norm_checks.h"

namespace onepass {
namespace {

// The arguments of modulated_norm_forward besides its input. `shared`: all rows have the same
// scale, shift and gate, namely a norm's weight and bias and the branch's column_scale.
#define ONEPASS_MODULATED_NORM_OPTIONS(FIELD)        \
  FIELD(OptionalTensor, scale, "")                   \
  FIELD(OptionalTensor, shift, "")                   \
  FIELD(OptionalTensor, residual, "")                \
  FIELD(OptionalTensor, gate, "")                    \
  FIELD(Sizes, normalized_shape, "")                 \
  FIELD(StaticInt, kind, "") /* NormKind */          \
  FIELD(double, eps, "")                             \
  FIELD(OptionalScalarType, out_dtype, "")           \
  FIELD(bool, save_statistics, "")                   \
  FIELD(OptionalTensor, row_scale, "=None")          \
  FIELD(OptionalTensor, seed, "=None")               \
  FIELD(double, weight_offset, "=1.0")               \
  FIELD(double, dropout_p, "=0.0")                   \
  FIELD(OptionalScalarType, residual_dtype, "=None") \
  FIELD(bool, shared, "=False")

// The arguments of modulated_norm_backward besides doutput.
#define ONEPASS_MODULATED_NORM_BACKWARD_OPTIONS(FIELD) \
  FIELD(OptionalTensor, dresidual_out, "")             \
  FIELD(Tensor, x, "")                                 \
  FIELD(OptionalTensor, scale, "")                     \
  FIELD(OptionalTensor, shift, "")                     \
  FIELD(OptionalTensor, branch, "")                    \
  FIELD(OptionalTensor, gate, "")                      \
  FIELD(Tensor, mean, "")                              \
  FIELD(Tensor, rstd, "")                              \
  FIELD(Sizes, normalized_shape, "")                   \
  FIELD(StaticInt, kind, "") /* NormKind */            \
  FIELD(OptionalScalarType, input_dtype, "")           \
  FIELD(OptionalScalarType, residual_dtype, "")        \
  FIELD(StaticInt, grad_mask, "")                      \
  FIELD(OptionalTensor, row_scale, "=None")            \
  FIELD(OptionalTensor, seed, "=None")                 \
  FIELD(double, weight_offset, "=1.0")                 \
  FIELD(double, dropout_p, "=0.0")                     \
  FIELD(bool, shared, "=False")

ONEPASS_DEFINE_OPTIONS(ModulatedNormOptions, ONEPASS_MODULATED_NORM_OPTIONS);
ONEPASS_DEFINE_OPTIONS(ModulatedNormBackwardOptions, ONEPASS_MODULATED_NORM_BACKWARD_OPTIONS);

NormForm form_of(bool shared) { return shared ? NormForm::kAdd : NormForm::kModulated; }

// As its norm, and the scales.
template <class Args>
Dispatch describe_modulated(const char* op, const Args& args, bool shared) {
  std::ostringstream text;
  text << describe(args).arguments;
  if (!shared) {
    text << ", a scale for " << args.tokens << (args.tokens == 1 ? " row" : " rows");
  }
  if (args.gate) text << (shared ? ", column_scale " : ", gate ") << name_of(args.gate_dtype);
  if (args.row_scale) text << ", row_scale";
  return {.op = op, .arguments = text.str()};
}

// Scales that all rows share: the weight and the bias are checked and read as a plain norm's.
template <class Options>
Scales shared_scales(const char* op, const char* name, const TensorInfo& shape,
                     const Options& options) {
  const CheckedAgainst checked(op, name, shape);
  Scales scales{};
  scales.gate = row_tensor(op, "column_scale", options.gate);
  scales.gate_dtype = checked.first_dtype();
  if (options.gate) {
    const int64_t row_dims = static_cast<int64_t>(options.normalized_shape.size());
    scales.gate_dtype =
        checked.tensor("column_scale", scales.gate.info, options.normalized_shape.data(), row_dims);
  }
  return scales;
}

template <class Options>
Scales scales_of(const char* op, const char* name, const TensorInfo& shape,
                 const Options& options) {
  if (options.shared) return shared_scales(op, name, shape, options);
  require(options.scale.has_value(), op, ": scale must be given, got none");
  return check_scales(op, name, shape, options);
}

struct CheckedModulated {
  NormOptions options;
  CheckedNorm norm;
  Scales scales;
};

CheckedModulated check_modulated(const ModulatedNormOptions& options, const Tensor& input) {
  const char* op = op_name(norm_kind_of(options.kind), form_of(options.shared));
  const NormOptions plain{.residual = options.residual,
                          .weight = options.shared ? options.scale : OptionalTensor{},
                          .bias = options.shared ? options.shift : OptionalTensor{},
                          .seed = options.seed,
                          .normalized_shape = options.normalized_shape,
                          .kind = options.kind,
                          .eps = options.eps,
                          .weight_offset = options.weight_offset,
                          .dropout_p = options.dropout_p,
                          .out_dtype = options.out_dtype,
                          .residual_dtype = options.residual_dtype,
                          .save_statistics = options.save_statistics};
  CheckedNorm norm = check_forward(op, plain, input);
  const TensorInfo& shape = norm.input.info;
  require(!options.gate || options.residual, op, ": ", options.shared ? "column_scale" : "gate",
          " must not be given without a residual, got one");
  require(!options.row_scale || options.residual, op,
          ": row_scale must not be given without a residual, got one");
  CheckedAgainst(op, "input", shape).row_scale(options.row_scale, norm.leading);
  Scales scales = scales_of(op, "input", shape, options);
  return {plain, std::move(norm), std::move(scales)};
}

// The arguments of forward and backward besides a norm's.
template <class Args, class Options>
void put_scales(Args& args, Scales& scales, const OptionalTensor& row_scale, int64_t samples,
                const Options& options) {
  const int64_t row_dims = static_cast<int64_t>(options.normalized_shape.size());
  scales.put_into(args, row_dims, options.shared);
  args.row_scale = data_of(row_scale);
  args.sample_rows = row_scale && samples > 0 ? args.rows / samples : args.rows;
}

NormResults modulated_norm_forward(const ModulatedNormOptions& options, const Tensor& input) {
  CheckedModulated call = check_modulated(options, input);
  const TensorInfo shape = call.norm.input.info;
  const OptionalTensor row_scale = dense(options.row_scale);
  NormResults results = allocate(call.norm, call.options);
  ModulatedNormForward args{};
  static_cast<NormForward&>(args) = call.norm.args;
  put_scales(args, call.scales, row_scale, call.norm.leading > 0 ? shape.sizes[0] : 1, options);
  if (!options.shared) {
    args.bias = call.scales.shift.data();
    args.bias_dtype = call.scales.shift_dtype;
    args.shift_stride = call.scales.shift.stride;
  }
  if (args.rows > 0 && args.cols > 0) {
    run_operator(backend().modulated_norm_forward, args, shape.device, [&] {
      return describe_modulated(op_name(args.kind, form_of(options.shared)), args, options.shared);
    });
  }
  return results;
}

void modulated_norm_forward_check(const ModulatedNormOptions& options, const Tensor& input) {
  check_modulated(options, input);
}

struct CheckedModulatedBackward {
  NormBackwardOptions options;
  CheckedNormBackward norm;
  Scales scales;
  RowTensor branch;
  DType branch_dtype;
};

CheckedModulatedBackward check_modulated_backward(const ModulatedNormBackwardOptions& options,
                                                  const OptionalTensor& doutput) {
  const char* op = backward_name(norm_kind_of(options.kind), form_of(options.shared));
  const NormBackwardOptions plain{.dresidual_out = options.dresidual_out,
                                  .x = options.x,
                                  .weight = options.shared ? options.scale : OptionalTensor{},
                                  .bias = options.shared ? options.shift : OptionalTensor{},
                                  .seed = options.seed,
                                  .mean = options.mean,
                                  .rstd = options.rstd,
                                  .normalized_shape = options.normalized_shape,
                                  .kind = options.kind,
                                  .weight_offset = options.weight_offset,
                                  .dropout_p = options.dropout_p,
                                  .input_dtype = options.input_dtype,
                                  .residual_dtype = options.residual_dtype,
                                  .grad_mask = options.grad_mask};
  CheckedModulatedBackward call{.options = plain,
                                .norm = check_backward(op, plain, doutput),
                                .scales = {},
                                .branch = row_tensor(op, "branch", options.branch),
                                .branch_dtype = {}};
  const TensorInfo& shape = call.norm.x.info;
  const CheckedAgainst checked(op, "x", shape);
  checked.row_scale(options.row_scale, call.norm.leading);
  call.scales = scales_of(op, "x", shape, options);
  require(options.branch.has_value() == options.gate.has_value(), op,
          ": branch must be given with a gate only, got ", options.branch ? "one" : "none");
  if (options.branch) {
    call.branch_dtype = checked.tensor("branch", call.branch.info, shape.sizes, shape.dims);
    call.norm.args.dinput_dtype = call.branch_dtype;
  }
  return call;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> modulated_norm_backward(
    const ModulatedNormBackwardOptions& options, const OptionalTensor& doutput) {
  CheckedModulatedBackward call = check_modulated_backward(options, doutput);
  const TensorInfo x = call.norm.x.info;
  // Of the gradients of scale, shift and gate.
  const int64_t row_dims = static_cast<int64_t>(options.normalized_shape.size());
  const TensorInfo scale = options.shared ? TensorInfo{} : info_of(*options.scale);
  const int64_t* const sizes = options.shared ? options.normalized_shape.data() : scale.sizes;
  const int64_t dims = options.shared ? row_dims : scale.dims;
  const NormBackwardRows rows = allocate(call.norm, call.options, doutput, call.branch);
  const OptionalTensor weight = dense(call.options.weight);
  const OptionalTensor row_scale = dense(options.row_scale);
  ModulatedNormBackward args{};
  static_cast<NormBackward&>(args) = call.norm.args;
  args.weight = data_of(weight);
  args.seed = static_cast<const int64_t*>(data_of(options.seed));
  put_scales(args, call.scales, row_scale, call.norm.leading > 0 ? x.sizes[0] : 1, options);
  args.branch = call.branch.data();
  args.branch_stride = call.branch.stride;
  args.branch_dtype = call.branch_dtype;
  if (!options.shared) {
    args.dweight_dtype = call.scales.scale_dtype;
    args.dbias_dtype = call.scales.shift_dtype;
  } else if (!options.scale) {
    args.dweight_dtype = args.x_dtype;
  }
  const auto gradient = [&](bool wanted, DType dtype, void*& target) {
    return gradient_of(wanted, sizes, dims, dtype, x.device, target);
  };
  Tensor dscale = gradient((options.grad_mask & kWantWeight) && options.scale, args.dweight_dtype,
                           args.dweight);
  Tensor dshift =
      gradient((options.grad_mask & kWantBias) && options.shift, args.dbias_dtype, args.dbias);
  Tensor dgate =
      gradient((options.grad_mask & kWantGate) && options.gate, args.gate_dtype, args.dgate);
  if (args.groups > 0 && args.cols > 0) {
    run_operator(backend().modulated_norm_backward, args, x.device, [&] {
      return describe_modulated(backward_name(args.kind, form_of(options.shared)), args,
                                options.shared);
    });
  }
  return {rows.dinput, rows.dresidual, dscale, dshift, dgate};
}

void modulated_norm_backward_check(const ModulatedNormBackwardOptions& options,
                                   const OptionalTensor& doutput) {
  check_modulated_backward(options, doutput);
}

}  // namespace

OperatorList modulated_norm_operators() {
  return {
      // x = residual + row_scale * gate * dropout(input), or input itself without a residual;
      // output = norm(x) * (weight_offset + scale) + shift.
      entry<&Packed<&modulated_norm_forward>::call>(
          "modulated_norm_forward(Tensor input" ONEPASS_SCHEMA(
              ONEPASS_MODULATED_NORM_OPTIONS) ") -> (Tensor output, Tensor residual_out, Tensor "
                                              "mean, Tensor rstd)"),
      entry<&Packed<&modulated_norm_forward_check>::call>(
          "modulated_norm_forward_check(Tensor input" ONEPASS_SCHEMA(
              ONEPASS_MODULATED_NORM_OPTIONS) ") -> ()",
          true),
      // grad_mask: 1 dinput, 2 dresidual, 4 dscale, 8 dshift, 16 dgate.
      entry<&Packed<&modulated_norm_backward>::call>(
          "modulated_norm_backward(Tensor? doutput" ONEPASS_SCHEMA(
              ONEPASS_MODULATED_NORM_BACKWARD_OPTIONS) ") -> (Tensor dinput, Tensor dresidual, "
                                                       "Tensor dscale, Tensor dshift, Tensor "
                                                       "dgate)"),
      entry<&Packed<&modulated_norm_backward_check>::call>(
          "modulated_norm_backward_check(Tensor? doutput" ONEPASS_SCHEMA(
              ONEPASS_MODULATED_NORM_BACKWARD_OPTIONS) ") -> ()",
          true),
  };
}

}  // namespace onepass
