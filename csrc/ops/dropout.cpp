// Dropout, alone or with a residual add: schema, checks, allocation.
#include "ops/dropout.h"

#include <algorithm>
#include <tuple>

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

const char* name_of(const DropoutOptions& options) {
  return options.residual ? "add_dropout" : "dropout";
}

Checked<DropoutForward> check_dropout(const DropoutOptions& options, const Tensor& input) {
  const auto& [residual, seed, p, out_dtype] = options;
  const char* op = name_of(options);
  Checked<DropoutForward> call{input_of(op, "input", input)};
  auto& [shape, args] = call;
  const CheckedAgainst checked(op, "input", shape);
  args.input_dtype = checked.first_dtype();
  args.residual_dtype = checked.tensor("residual", residual, shape);
  require(!residual || !out_dtype, op, ": out_dtype must not be given with a residual, got one");
  args.output_dtype =
      checked.dtype("out_dtype", out_dtype, residual ? args.residual_dtype : args.input_dtype);
  require_probability(op, "p", p);
  require(seed.has_value() || (p == 0.0 && residual), op,
          ": seed must be given but for p = 0 with a residual, got none");
  if (seed) checked.seed("seed", *seed);
  args.dropout_p = p;
  args.numel = Shape(shape).numel();
  return call;
}

Tensor dropout_forward(const DropoutOptions& options, const Tensor& input) {
  auto [shape, args] = check_dropout(options, input);
  Tensor output = empty(shape, args.output_dtype, shape.device);
  Copies copies;
  args.input = dense_data_of(input, copies);
  args.residual = dense_data_of(options.residual, copies);
  args.seed = seed_of(options.seed);
  args.output = output.mutable_data_ptr();
  if (args.numel > 0) {
    run_operator(backend().dropout_forward, args, shape.device, [&, &args = args] {
      return described(name_of(options), args.numel, " elements, input ", args.input_dtype,
                       ", output ", args.output_dtype, ", p ", args.dropout_p);
    });
  }
  return output;
}

// ---- scaled branches ----------------------------------------------------------------------------

#define ONEPASS_BRANCH_SCALES(FIELD)      \
  FIELD(OptionalTensor, column_scale, "") \
  FIELD(OptionalTensor, row_scale, "")    \
  FIELD(OptionalTensor, seed, "")         \
  FIELD(double, p, "")

// The arguments of branch_forward besides its input.
#define ONEPASS_BRANCH_OPTIONS(FIELD) \
  FIELD(OptionalTensor, residual, "") \
  ONEPASS_BRANCH_SCALES(FIELD)        \
  FIELD(OptionalScalarType, out_dtype, "")

// The arguments of branch_backward besides doutput.
#define ONEPASS_BRANCH_BACKWARD_OPTIONS(FIELD) \
  FIELD(OptionalTensor, branch, "")            \
  ONEPASS_BRANCH_SCALES(FIELD)                 \
  FIELD(OptionalScalarType, input_dtype, "")   \
  FIELD(StaticInt, grad_mask, "")

ONEPASS_DEFINE_OPTIONS(BranchOptions, ONEPASS_BRANCH_OPTIONS);
ONEPASS_DEFINE_OPTIONS(BranchBackwardOptions, ONEPASS_BRANCH_BACKWARD_OPTIONS);

// Bits of grad_mask.
constexpr int64_t kWantInput = 1;
constexpr int64_t kWantColumnScale = 2;

constexpr const char* kBranch = "add_dropout";
constexpr const char* kBackward = "add_dropout_backward";

// Sets the fields that both directions have, and gives the dimensions of a row: the last one where
// columns have a scale, else as many as are dense in `rows`.
template <class Options, class Args>
int64_t check_scales(const char* op, const CheckedAgainst& checked, const TensorInfo& shape,
                     const Options& options, std::initializer_list<const RowTensor*> rows,
                     Args& args) {
  checked.dropout("p", options.p, options.seed);
  args.column_scale_dtype = checked.first_dtype();
  int64_t row_dims = shape.dims > 0 ? 1 : 0;
  if (options.column_scale) {
    require(shape.dims > 0, op, ": column_scale must not be given for one element, got one");
    args.column_scale_dtype = checked.tensor("column_scale", *options.column_scale,
                                             Shape(shape.sizes + shape.dims - 1, 1));
  } else if (shape.dims > 1 && std::all_of(rows.begin(), rows.end(), [&](const RowTensor* tensor) {
               return !tensor->tensor || has_dense_rows(tensor->info, shape.dims - 1);
             })) {
    row_dims = shape.dims - 1;
  }
  checked.row_scale(options.row_scale, shape.dims - 1);
  args.rows = Shape(shape).product(0, shape.dims - row_dims);
  args.cols = Shape(shape).product(shape.dims - row_dims, shape.dims);
  const int64_t samples = options.row_scale && shape.dims > 1 ? shape.sizes[0] : 1;
  args.sample_rows = samples > 0 ? args.rows / samples : 0;
  args.dropout_p = options.p;
  return row_dims;
}

template <class Options, class Args>
void put_scales(const Options& options, Args& args, Copies& copies) {
  args.column_scale = dense_data_of(options.column_scale, copies);
  args.row_scale = dense_data_of(options.row_scale, copies);
  args.seed = seed_of(options.seed);
}

// `of`: the dtypes of the rows.
template <class Args>
Dispatch describe(const char* op, const Args& args, const std::string& of) {
  return described(op, args.rows, " x ", args.cols, of,
                   when(args.column_scale, ", column_scale ", args.column_scale_dtype),
                   when(args.row_scale, ", row_scale"), when(args.seed, ", p ", args.dropout_p));
}

struct CheckedBranch {
  BranchForward args{};
  RowTensor input;
  RowTensor residual;
  int64_t row_dims = 0;
};

CheckedBranch check_branch(const BranchOptions& options, const Tensor& input) {
  CheckedBranch call{.input = row_tensor(kBranch, "input", input),
                     .residual = row_tensor(kBranch, "residual", options.residual)};
  BranchForward& args = call.args;
  const TensorInfo& shape = call.input.info;
  const CheckedAgainst checked(kBranch, "input", shape);
  args.input_dtype = args.residual_dtype = checked.first_dtype();
  if (options.residual) args.residual_dtype = checked.tensor("residual", call.residual.info, shape);
  args.output_dtype = checked.dtype("out_dtype", options.out_dtype, args.residual_dtype);
  call.row_dims =
      check_scales(kBranch, checked, shape, options, {&call.input, &call.residual}, args);
  return call;
}

Tensor branch_forward(const BranchOptions& options, const Tensor& input) {
  CheckedBranch call = check_branch(options, input);
  BranchForward& args = call.args;
  const TensorInfo shape = call.input.info;
  Tensor output = empty(shape, args.output_dtype, shape.device);
  Copies copies;
  put_scales(options, args, copies);
  address_rows({&call.input, &call.residual}, call.row_dims, args.row_size);
  call.input.put_into(args.input, args.input_stride);
  call.residual.put_into(args.residual, args.residual_stride);
  args.output = output.mutable_data_ptr();
  if (args.rows > 0 && args.cols > 0) {
    run_operator(backend().branch_forward, args, shape.device, [&] {
      return describe(kBranch, args,
                      text_of(", input ", args.input_dtype, ", output ", args.output_dtype));
    });
  }
  return output;
}

struct CheckedBranchBackward {
  BranchBackward args{};
  RowTensor doutput;
  RowTensor branch;
  int64_t row_dims = 0;
};

CheckedBranchBackward check_branch_backward(const BranchBackwardOptions& options,
                                            const Tensor& doutput) {
  CheckedBranchBackward call{.doutput = row_tensor(kBackward, "doutput", doutput),
                             .branch = row_tensor(kBackward, "branch", options.branch)};
  BranchBackward& args = call.args;
  const TensorInfo& shape = call.doutput.info;
  const CheckedAgainst checked(kBackward, "doutput", shape);
  args.doutput_dtype = args.branch_dtype = checked.first_dtype();
  args.dinput_dtype = checked.dtype("input_dtype", options.input_dtype, args.doutput_dtype);
  const bool sums = options.grad_mask & kWantColumnScale;
  require(!sums || options.column_scale, kBackward,
          ": column_scale must be given for its gradient, got none");
  require(!sums || options.branch, kBackward,
          ": branch must be given for column_scale's gradient, got none");
  if (options.branch) {
    args.branch_dtype = args.dinput_dtype = checked.tensor("branch", call.branch.info, shape);
  }
  call.row_dims =
      check_scales(kBackward, checked, shape, options, {&call.doutput, &call.branch}, args);
  return call;
}

std::tuple<Tensor, Tensor> branch_backward(const BranchBackwardOptions& options,
                                           const Tensor& doutput) {
  CheckedBranchBackward call = check_branch_backward(options, doutput);
  BranchBackward& args = call.args;
  const TensorInfo shape = call.doutput.info;
  const bool sums = options.grad_mask & kWantColumnScale;
  Tensor dinput =
      empty_if(options.grad_mask & kWantInput, shape, args.dinput_dtype, shape.device, args.dinput);
  Tensor dcolumn_scale = empty_if(sums, Shape(&args.cols, 1), args.column_scale_dtype, shape.device,
                                  args.dcolumn_scale);
  Copies copies;
  put_scales(options, args, copies);
  if (!sums) call.branch = {};
  address_rows({&call.doutput, &call.branch}, call.row_dims, args.row_size);
  call.doutput.put_into(args.doutput, args.doutput_stride);
  call.branch.put_into(args.branch, args.branch_stride);
  if (args.cols > 0 && (args.rows > 0 || sums)) {
    run_operator(backend().branch_backward, args, shape.device, [&] {
      return describe(kBackward, args,
                      text_of(", doutput ", args.doutput_dtype, ", dinput ", args.dinput_dtype));
    });
  }
  return {dinput, dcolumn_scale};
}

}  // namespace

OperatorList dropout_operators() {
  return {
      // output = dropout(input) + residual. Its own backward: the same map on the gradient.
      entry<&dropout_forward, &check_dropout>(
          "dropout_forward", "Tensor input" ONEPASS_SCHEMA(ONEPASS_DROPOUT_OPTIONS), "Tensor"),
      // output = residual + row_scale * column_scale * dropout(input), in residual's dtype;
      // out_dtype is that of a call without a residual.
      entry<&branch_forward, &check_branch>(
          "branch_forward", "Tensor input" ONEPASS_SCHEMA(ONEPASS_BRANCH_OPTIONS), "Tensor"),
      // grad_mask: 1 dinput, 2 dcolumn_scale.
      entry<&branch_backward, &check_branch_backward>(
          "branch_backward", "Tensor doutput" ONEPASS_SCHEMA(ONEPASS_BRANCH_BACKWARD_OPTIONS),
          "(Tensor dinput, Tensor dcolumn_scale)"),
  };
}

}  // namespace onepass
