// Dropout, alone or with a residual add: schema, checks, allocation.
#include "ops/dropout.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>

#include "ops/check.h"
#include "ops/fields.h"
#include "ops/library.h"
#include "ops/rows.h"
#include "ops/runtime.h"

namespace onepass {
namespace {

// The arguments of dropout_forward besides its input.
#define ONEPASS_DROPOUT_OPTIONS(FIELD) \
  FIELD(OptionalTensor, residual, "")  \
  FIELD(OptionalTensor, seed, "")      \
  FIELD(double, p, "")                 \
  FIELD(OptionalScalarType, out_dtype, "")

ONEPASS_DEFINE_OPTIONS(DropoutOptions, ONEPASS_DROPOUT_OPTIONS);

struct CheckedDropout {
  DropoutForward args{};
  TensorInfo input;
};

CheckedDropout check_dropout(const DropoutOptions& options, const Tensor& input) {
  const auto& [residual, seed, p, out_dtype] = options;
  const char* op = residual ? "add_dropout" : "dropout";
  CheckedDropout call{.input = input_of(op, "input", input)};
  DropoutForward& args = call.args;
  const TensorInfo& shape = call.input;
  const CheckedAgainst checked(op, "input", shape);
  args.input_dtype = args.output_dtype = checked.first_dtype();
  if (residual) {
    args.residual_dtype = args.output_dtype =
        checked.tensor("residual", input_of(op, "residual", *residual), shape.sizes, shape.dims);
  }
  if (out_dtype) {
    require(!residual, op, ": out_dtype must not be given with a residual, got one");
    args.output_dtype = checked.dtype("out_dtype", static_cast<int32_t>(*out_dtype));
  }
  require_probability(op, "p", p);
  require(seed.has_value() || (p == 0.0 && residual), op,
          ": seed must be given but for p = 0 with a residual, got none");
  if (seed) checked.seed(*seed);
  args.dropout_p = p;
  args.numel = 1;
  for (int64_t d = 0; d < shape.dims; ++d) args.numel *= shape.sizes[d];
  return call;
}

Tensor dropout_forward(const DropoutOptions& options, const Tensor& input) {
  CheckedDropout call = check_dropout(options, input);
  DropoutForward& args = call.args;
  Tensor output = empty(call.input.sizes, call.input.dims, args.output_dtype, call.input.device);
  const OptionalTensor dense_input = dense(input);
  const OptionalTensor dense_residual = dense(options.residual);
  args.input = data_of(dense_input);
  args.residual = data_of(dense_residual);
  args.seed = static_cast<const int64_t*>(data_of(options.seed));
  args.output = output.mutable_data_ptr();
  if (args.numel > 0) {
    run_operator(backend().dropout_forward, args, call.input.device, [&]() -> Dispatch {
      std::ostringstream text;
      text << args.numel << " elements, input " << name_of(args.input_dtype) << ", output "
           << name_of(args.output_dtype) << ", p " << args.dropout_p;
      return {.op = options.residual ? "add_dropout" : "dropout", .arguments = text.str()};
    });
  }
  return output;
}

// On the meta device there is nothing to compute; the fake gives the shapes, and this the errors.
void dropout_forward_check(const DropoutOptions& options, const Tensor& input) {
  check_dropout(options, input);
}

// ---- scaled branches ----------------------------------------------------------------------------

// The arguments of branch_forward besides its input.
#define ONEPASS_BRANCH_OPTIONS(FIELD)     \
  FIELD(OptionalTensor, residual, "")     \
  FIELD(OptionalTensor, column_scale, "") \
  FIELD(OptionalTensor, row_scale, "")    \
  FIELD(OptionalTensor, seed, "")         \
  FIELD(double, p, "")                    \
  FIELD(OptionalScalarType, out_dtype, "")

// The arguments of branch_backward besides doutput.
#define ONEPASS_BRANCH_BACKWARD_OPTIONS(FIELD) \
  FIELD(OptionalTensor, branch, "")            \
  FIELD(OptionalTensor, column_scale, "")      \
  FIELD(OptionalTensor, row_scale, "")         \
  FIELD(OptionalTensor, seed, "")              \
  FIELD(double, p, "")                         \
  FIELD(OptionalScalarType, input_dtype, "")   \
  FIELD(StaticInt, grad_mask, "")

ONEPASS_DEFINE_OPTIONS(BranchOptions, ONEPASS_BRANCH_OPTIONS);
ONEPASS_DEFINE_OPTIONS(BranchBackwardOptions, ONEPASS_BRANCH_BACKWARD_OPTIONS);

// Bits of grad_mask.
constexpr int64_t kWantInput = 1;
constexpr int64_t kWantColumnScale = 2;

// Sets the fields that both directions have, and gives the dimensions of a row: the last one where
// columns have a scale, else as many as are dense in `rows`.
template <class Args>
int64_t check_scales(const char* op, const CheckedAgainst& checked, const TensorInfo& shape,
                     const OptionalTensor& column_scale, const OptionalTensor& row_scale,
                     const OptionalTensor& seed, double p,
                     std::initializer_list<const RowTensor*> rows, Args& args) {
  require_probability(op, "p", p);
  require((p > 0.0) == seed.has_value(), op, ": seed must be given with p > 0 only, got ",
          seed ? "one" : "none");
  if (seed) checked.seed(*seed);
  args.column_scale_dtype = checked.first_dtype();
  int64_t row_dims = shape.dims > 0 ? 1 : 0;
  if (column_scale) {
    require(shape.dims > 0, op, ": column_scale must not be given for one element, got one");
    args.column_scale_dtype =
        checked.tensor("column_scale", input_of(op, "column_scale", *column_scale),
                       shape.sizes + shape.dims - 1, 1);
  } else if (shape.dims > 1 && std::all_of(rows.begin(), rows.end(), [&](const RowTensor* tensor) {
               return !tensor->tensor || has_dense_rows(tensor->info, shape.dims - 1);
             })) {
    row_dims = shape.dims - 1;
  }
  checked.row_scale(row_scale, shape.dims - 1);
  args.rows = args.cols = 1;
  for (int64_t d = 0; d < shape.dims - row_dims; ++d) args.rows *= shape.sizes[d];
  for (int64_t d = shape.dims - row_dims; d < shape.dims; ++d) args.cols *= shape.sizes[d];
  const int64_t samples = row_scale && shape.dims > 1 ? shape.sizes[0] : 1;
  args.sample_rows = samples > 0 ? args.rows / samples : 0;
  args.dropout_p = p;
  return row_dims;
}

struct CheckedBranch {
  BranchForward args{};
  RowTensor input;
  RowTensor residual;
  int64_t row_dims = 0;
};

CheckedBranch check_branch(const BranchOptions& options, const Tensor& input) {
  const char* op = "add_dropout";
  CheckedBranch call{.input = {input}, .residual = {options.residual}};
  call.input.info = input_of(op, "input", input);
  BranchForward& args = call.args;
  const TensorInfo& shape = call.input.info;
  const CheckedAgainst checked(op, "input", shape);
  args.input_dtype = args.output_dtype = args.residual_dtype = checked.first_dtype();
  if (options.residual) {
    call.residual.info = input_of(op, "residual", *options.residual);
    args.residual_dtype = args.output_dtype =
        checked.tensor("residual", call.residual.info, shape.sizes, shape.dims);
  }
  if (options.out_dtype) {
    args.output_dtype = checked.dtype("out_dtype", static_cast<int32_t>(*options.out_dtype));
  }
  call.row_dims = check_scales(op, checked, shape, options.column_scale, options.row_scale,
                               options.seed, options.p, {&call.input, &call.residual}, args);
  return call;
}

Tensor branch_forward(const BranchOptions& options, const Tensor& input) {
  CheckedBranch call = check_branch(options, input);
  BranchForward& args = call.args;
  const TensorInfo shape = call.input.info;
  Tensor output = empty(shape.sizes, shape.dims, args.output_dtype, shape.device);
  const OptionalTensor column_scale = dense(options.column_scale);
  const OptionalTensor row_scale = dense(options.row_scale);
  address_rows({&call.input, &call.residual}, call.row_dims, args.row_size);
  args.input = call.input.data();
  args.input_stride = call.input.stride;
  args.residual = call.residual.data();
  args.residual_stride = call.residual.stride;
  args.column_scale = data_of(column_scale);
  args.row_scale = data_of(row_scale);
  args.seed = static_cast<const int64_t*>(data_of(options.seed));
  args.output = output.mutable_data_ptr();
  if (args.rows > 0 && args.cols > 0) {
    run_operator(backend().branch_forward, args, shape.device, [&]() -> Dispatch {
      std::ostringstream text;
      text << args.rows << " x " << args.cols << ", input " << name_of(args.input_dtype)
           << ", output " << name_of(args.output_dtype);
      if (args.column_scale) text << ", column_scale " << name_of(args.column_scale_dtype);
      if (args.row_scale) text << ", row_scale";
      if (args.seed) text << ", p " << args.dropout_p;
      return {.op = "add_dropout", .arguments = text.str()};
    });
  }
  return output;
}

void branch_forward_check(const BranchOptions& options, const Tensor& input) {
  check_branch(options, input);
}

struct CheckedBranchBackward {
  BranchBackward args{};
  RowTensor doutput;
  RowTensor branch;
  int64_t row_dims = 0;
};

CheckedBranchBackward check_branch_backward(const BranchBackwardOptions& options,
                                            const Tensor& doutput) {
  const char* op = "add_dropout_backward";
  CheckedBranchBackward call{.doutput = {doutput}, .branch = {options.branch}};
  call.doutput.info = input_of(op, "doutput", doutput);
  BranchBackward& args = call.args;
  const TensorInfo& shape = call.doutput.info;
  const CheckedAgainst checked(op, "doutput", shape);
  args.doutput_dtype = args.dinput_dtype = args.branch_dtype = checked.first_dtype();
  if (options.input_dtype) {
    args.dinput_dtype = checked.dtype("input_dtype", static_cast<int32_t>(*options.input_dtype));
  }
  const bool sums = options.grad_mask & kWantColumnScale;
  require(!sums || options.column_scale, op,
          ": column_scale must be given for its gradient, got none");
  require(!sums || options.branch, op,
          ": branch must be given for column_scale's gradient, got none");
  if (options.branch) {
    call.branch.info = input_of(op, "branch", *options.branch);
    args.branch_dtype = checked.tensor("branch", call.branch.info, shape.sizes, shape.dims);
    args.dinput_dtype = args.branch_dtype;
  }
  call.row_dims = check_scales(op, checked, shape, options.column_scale, options.row_scale,
                               options.seed, options.p, {&call.doutput, &call.branch}, args);
  return call;
}

std::tuple<Tensor, Tensor> branch_backward(const BranchBackwardOptions& options,
                                           const Tensor& doutput) {
  CheckedBranchBackward call = check_branch_backward(options, doutput);
  BranchBackward& args = call.args;
  const TensorInfo shape = call.doutput.info;
  const bool wants_input = options.grad_mask & kWantInput;
  const bool sums = options.grad_mask & kWantColumnScale;
  Tensor dinput = wants_input ? empty(shape.sizes, shape.dims, args.dinput_dtype, shape.device)
                              : empty_1d(0, args.dinput_dtype, shape.device);
  Tensor dcolumn_scale = empty_1d(sums ? args.cols : 0, args.column_scale_dtype, shape.device);
  const OptionalTensor column_scale = dense(options.column_scale);
  const OptionalTensor row_scale = dense(options.row_scale);
  if (!sums) call.branch = {};
  address_rows({&call.doutput, &call.branch}, call.row_dims, args.row_size);
  args.doutput = call.doutput.data();
  args.doutput_stride = call.doutput.stride;
  args.branch = call.branch.data();
  args.branch_stride = call.branch.stride;
  args.column_scale = data_of(column_scale);
  args.row_scale = data_of(row_scale);
  args.seed = static_cast<const int64_t*>(data_of(options.seed));
  if (wants_input) args.dinput = dinput.mutable_data_ptr();
  if (sums) args.dcolumn_scale = dcolumn_scale.mutable_data_ptr();
  if (args.cols > 0 && (args.rows > 0 || sums)) {
    run_operator(backend().branch_backward, args, shape.device, [&]() -> Dispatch {
      std::ostringstream text;
      text << args.rows << " x " << args.cols << ", doutput " << name_of(args.doutput_dtype)
           << ", dinput " << name_of(args.dinput_dtype);
      if (args.column_scale) text << ", column_scale " << name_of(args.column_scale_dtype);
      if (args.row_scale) text << ", row_scale";
      if (args.seed) text << ", p " << args.dropout_p;
      return {.op = "add_dropout_backward", .arguments = text.str()};
    });
  }
  return {dinput, dcolumn_scale};
}

void branch_backward_check(const BranchBackwardOptions& options, const Tensor& doutput) {
  check_branch_backward(options, doutput);
}

}  // namespace

#define ONEPASS_DROPOUT_ARGUMENTS "(Tensor input" ONEPASS_SCHEMA(ONEPASS_DROPOUT_OPTIONS) ")"

OperatorList dropout_operators() {
  return {
      // output = dropout(input) + residual. Its own backward: the same map on the gradient.
      entry<&Packed<&dropout_forward>::call>("dropout_forward" ONEPASS_DROPOUT_ARGUMENTS
                                             " -> Tensor"),
      entry<&Packed<&dropout_forward_check>::call>(
          "dropout_forward_check" ONEPASS_DROPOUT_ARGUMENTS " -> ()", true),
      // output = residual + row_scale * column_scale * dropout(input), in residual's dtype;
      // out_dtype is that of a call without a residual.
      entry<&Packed<&branch_forward>::call>(
          "branch_forward(Tensor input" ONEPASS_SCHEMA(ONEPASS_BRANCH_OPTIONS) ") -> Tensor"),
      entry<&Packed<&branch_forward_check>::call>(
          "branch_forward_check(Tensor input" ONEPASS_SCHEMA(ONEPASS_BRANCH_OPTIONS) ") -> ()",
          true),
      // grad_mask: 1 dinput, 2 dcolumn_scale.
      entry<&Packed<&branch_backward>::call>("branch_backward(Tensor doutput" ONEPASS_SCHEMA(
          ONEPASS_BRANCH_BACKWARD_OPTIONS) ") -> (Tensor dinput, Tensor dcolumn_scale)"),
      entry<&Packed<&branch_backward_check>::call>(
          "branch_backward_check(Tensor doutput" ONEPASS_SCHEMA(
              ONEPASS_BRANCH_BACKWARD_OPTIONS) ") -> ()",
          true),
  };
}

}  // namespace onepass
