// Modulated norms, and norms after a residual add whose branch is scaled: schemas, checks,
// allocation. Both are one operator of a back end.
#include <algorithm>

#include "ops/norm_checks.h"

namespace onepass {
namespace {

// The arguments of both directions that calls with a scaled branch add.
#define ONEPASS_BRANCH_SCALES(FIELD)        \
  FIELD(OptionalTensor, row_scale, "=None") \
  FIELD(OptionalTensor, seed, "=None")      \
  FIELD(double, weight_offset, "=1.0")      \
  FIELD(double, dropout_p, "=0.0")

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
  ONEPASS_BRANCH_SCALES(FIELD)                       \
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
  ONEPASS_BRANCH_SCALES(FIELD)                         \
  FIELD(bool, shared, "=False")

ONEPASS_DEFINE_OPTIONS(ModulatedNormOptions, ONEPASS_MODULATED_NORM_OPTIONS);
ONEPASS_DEFINE_OPTIONS(ModulatedNormBackwardOptions, ONEPASS_MODULATED_NORM_BACKWARD_OPTIONS);

// scale, shift and gate, all of one shape: each of their rows serves a group of input's rows.
struct Scales {
  RowTensor scale;
  RowTensor shift;
  RowTensor gate;
  DType scale_dtype{};
  DType shift_dtype{};
  DType gate_dtype{};
  int64_t groups = 1;

  // `shared`: the arguments have a weight, and a bias, for all rows.
  template <class Args>
  void put_into(Args& args, int64_t row_dims, bool shared) {
    args.groups = groups;
    args.tokens = groups > 0 ? args.rows / groups : 0;
    address_rows({&scale, &shift, &gate}, row_dims, args.group_size);
    gate.put_into(args.gate, args.gate_stride);
    args.gate_dtype = gate_dtype;
    if (shared) return;
    scale.put_into(args.weight, args.scale_stride);
    args.weight_dtype = scale_dtype;
  }
};

// `shape`: of the tensor named `name`, whose first dimension is the batch, with `leading`
// dimensions before the rows' own. Of scales that all rows share, the weight and the bias are
// checked and read as a plain norm's.
template <class Options>
Scales check_scales(const char* op, const char* name, const TensorInfo& shape, int64_t leading,
                    const Options& options) {
  const CheckedAgainst checked(op, name, shape);
  checked.row_scale(options.row_scale, leading);
  Scales scales{};
  if (options.shared) {
    scales.gate = row_tensor(op, "column_scale", options.gate);
    scales.gate_dtype = checked.tensor("column_scale", options.gate, options.normalized_shape,
                                       checked.first_dtype());
    return scales;
  }
  require(options.scale.has_value(), op, ": scale must be given, got none");
  scales.scale = row_tensor(op, "scale", options.scale);
  scales.shift = row_tensor(op, "shift", options.shift);
  scales.gate = row_tensor(op, "gate", options.gate);
  const TensorInfo& scale = scales.scale.info;
  // One for each row, or for each of the first dimension, with the others as 1 or left out.
  std::vector<int64_t> each(shape.sizes, shape.sizes + shape.dims);
  std::vector<int64_t> ones = each, first = each;
  if (leading > 1) {
    std::fill(ones.begin() + 1, ones.begin() + leading, 1);
    first.erase(first.begin() + 1, first.begin() + leading);
  }
  const Shape given = scale;
  const bool is_each = given == each;
  if (leading > 1) {
    require(is_each || given == ones || given == first, op, ": scale must have shape ",
            Shape(first), ", ", Shape(ones), " or ", Shape(each), ", got ", given);
  }
  scales.scale_dtype = checked.tensor("scale", scale, leading > 1 ? given : shape);
  scales.shift_dtype = scales.gate_dtype = scales.scale_dtype;
  if (options.shift) scales.shift_dtype = checked.tensor("shift", scales.shift.info, scale);
  if (options.gate) scales.gate_dtype = checked.tensor("gate", scales.gate.info, scale);
  scales.groups = Shape(shape).product(0, is_each ? leading : 1);
  return scales;
}

// The weight or the bias of a plain norm, which all rows share.
template <class Options>
const OptionalTensor& if_shared(const Options& options, const OptionalTensor& tensor) {
  static const OptionalTensor none;
  return options.shared ? tensor : none;
}

NormForm form_of(bool shared) { return shared ? NormForm::kAdd : NormForm::kModulated; }

// As its norm, and the scales.
template <class Args>
Dispatch describe_modulated(const char* op, const Args& args, bool shared) {
  return described(
      op, describe(args).arguments,
      when(!shared, ", a scale for ", args.tokens, args.tokens == 1 ? " row" : " rows"),
      when(args.gate, shared ? ", column_scale " : ", gate ", args.gate_dtype),
      when(args.row_scale, ", row_scale"));
}

// The arguments of forward and backward besides a norm's.
template <class Args, class Options>
void put_scales(Args& args, Scales& scales, int64_t leading, const TensorInfo& rows,
                const Options& options, Copies& copies) {
  scales.put_into(args, row_dims_of(options), options.shared);
  args.row_scale = dense_data_of(options.row_scale, copies);
  const int64_t samples = args.row_scale && leading > 0 ? rows.sizes[0] : 1;
  args.sample_rows = samples > 0 ? args.rows / samples : args.rows;
}

struct CheckedModulated {
  CheckedNorm norm;
  Scales scales{};
};

CheckedModulated check_modulated(const ModulatedNormOptions& options, const Tensor& input) {
  const char* op = op_name(norm_kind_of(options.kind), form_of(options.shared));
  CheckedModulated call{.norm = check_forward(op, options, if_shared(options, options.scale),
                                              if_shared(options, options.shift), input)};
  require(!options.gate || options.residual, op, ": ", options.shared ? "column_scale" : "gate",
          " must not be given without a residual, got one");
  require(!options.row_scale || options.residual, op,
          ": row_scale must not be given without a residual, got one");
  call.scales = check_scales(op, "input", call.norm.input.info, call.norm.leading, options);
  return call;
}

NormResults modulated_norm_forward(const ModulatedNormOptions& options, const Tensor& input) {
  CheckedModulated call = check_modulated(options, input);
  const TensorInfo shape = call.norm.input.info;
  NormResults results = allocate(call.norm, options);
  ModulatedNormForward args{};
  static_cast<NormForward&>(args) = call.norm.args;
  put_scales(args, call.scales, call.norm.leading, shape, options, call.norm.copies);
  if (!options.shared) {
    call.scales.shift.put_into(args.bias, args.shift_stride);
    args.bias_dtype = call.scales.shift_dtype;
  }
  if (args.rows > 0 && args.cols > 0) {
    run_operator(backend().modulated_norm_forward, args, shape.device, [&] {
      return describe_modulated(op_name(args.kind, form_of(options.shared)), args, options.shared);
    });
  }
  return results;
}

struct CheckedModulatedBackward {
  CheckedNormBackward norm;
  Scales scales{};
  RowTensor branch{};
  DType branch_dtype{};
};

CheckedModulatedBackward check_modulated_backward(const ModulatedNormBackwardOptions& options,
                                                  const OptionalTensor& doutput) {
  const char* op = backward_name(norm_kind_of(options.kind), form_of(options.shared));
  CheckedModulatedBackward call{.norm =
                                    check_backward(op, options, if_shared(options, options.scale),
                                                   if_shared(options, options.shift), doutput)};
  call.branch = row_tensor(op, "branch", options.branch);
  const TensorInfo& shape = call.norm.x.info;
  call.scales = check_scales(op, "x", shape, call.norm.leading, options);
  require(options.branch.has_value() == options.gate.has_value(), op,
          ": branch must be given with a gate only, got ", options.branch ? "one" : "none");
  if (options.branch) {
    const CheckedAgainst checked(op, "x", shape);
    call.branch_dtype = checked.tensor("branch", call.branch.info, shape);
    call.norm.args.dinput_dtype = call.branch_dtype;
  }
  return call;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> modulated_norm_backward(
    const ModulatedNormBackwardOptions& options, const OptionalTensor& doutput) {
  CheckedModulatedBackward call = check_modulated_backward(options, doutput);
  const TensorInfo x = call.norm.x.info;
  // Of the gradients of scale, shift and gate.
  const Shape sizes = options.shared ? Shape(options.normalized_shape) : info_of(*options.scale);
  auto [dinput, dresidual] = allocate(call.norm, options, call.branch);
  ModulatedNormBackward args{};
  static_cast<NormBackward&>(args) = call.norm.args;
  put_scales(args, call.scales, call.norm.leading, x, options, call.norm.copies);
  call.branch.put_into(args.branch, args.branch_stride);
  args.branch_dtype = call.branch_dtype;
  if (!options.shared) {
    args.dweight_dtype = call.scales.scale_dtype;
    args.dbias_dtype = call.scales.shift_dtype;
  } else if (!options.scale) {
    args.dweight_dtype = args.x_dtype;
  }
  const auto gradient = [&](int64_t bit, const OptionalTensor& of, DType dtype, void*& target) {
    return empty_if((options.grad_mask & bit) && of, sizes, dtype, x.device, target);
  };
  Tensor dscale = gradient(kWantWeight, options.scale, args.dweight_dtype, args.dweight);
  Tensor dshift = gradient(kWantBias, options.shift, args.dbias_dtype, args.dbias);
  Tensor dgate = gradient(kWantGate, options.gate, args.gate_dtype, args.dgate);
  if (args.groups > 0 && args.cols > 0) {
    run_operator(backend().modulated_norm_backward, args, x.device, [&] {
      return describe_modulated(backward_name(args.kind, form_of(options.shared)), args,
                                options.shared);
    });
  }
  return {dinput, dresidual, dscale, dshift, dgate};
}

}  // namespace

OperatorList modulated_norm_operators() {
  return {
      // x = residual + row_scale * gate * dropout(input), or input itself without a residual;
      // output = norm(x) * (weight_offset + scale) + shift.
      entry<&modulated_norm_forward, &check_modulated>(
          "modulated_norm_forward", "Tensor input" ONEPASS_SCHEMA(ONEPASS_MODULATED_NORM_OPTIONS),
          "(Tensor output, Tensor residual_out, Tensor mean, Tensor rstd)"),
      // grad_mask: 1 dinput, 2 dresidual, 4 dscale, 8 dshift, 16 dgate.
      entry<&modulated_norm_backward, &check_modulated_backward>(
          "modulated_norm_backward",
          "Tensor? doutput" ONEPASS_SCHEMA(ONEPASS_MODULATED_NORM_BACKWARD_OPTIONS),
          "(Tensor dinput, Tensor dresidual, Tensor dscale, Tensor dshift, Tensor dgate)"),
  };
}

}  // namespace onepass
