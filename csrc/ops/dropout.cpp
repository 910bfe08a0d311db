// Dropout, alone or with a residual add: schema, checks, allocation.
#include "ops/dropout.h"

#include <torch/csrc/stable/ops.h>

#include "ops/check.h"
#include "ops/fields.h"
#include "ops/library.h"
#include "ops/runtime.h"

namespace onepass {
namespace {

// What dropout_forward takes beside its input.
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

}  // namespace

#define ONEPASS_DROPOUT_ARGUMENTS "(Tensor input" ONEPASS_SCHEMA(ONEPASS_DROPOUT_OPTIONS) ")"

OperatorList dropout_operators() {
  return {
      // output = dropout(input) + residual. Its own backward: the same map on the gradient.
      entry<&Packed<&dropout_forward>::call>("dropout_forward" ONEPASS_DROPOUT_ARGUMENTS
                                             " -> Tensor"),
      entry<&Packed<&dropout_forward_check>::call>(
          "dropout_forward_check" ONEPASS_DROPOUT_ARGUMENTS " -> ()", true),
  };
}

}  // namespace onepass
