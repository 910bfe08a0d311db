// Cross entropy: schemas, checks, allocation.
#include "ops/loss.h"

#include <tuple>

#include "ops/check.h"
#include "ops/fields.h"
#include "ops/library.h"
#include "ops/rows.h"
#include "ops/runtime.h"

namespace onepass {
namespace {

// What both operators take beside input.
#define ONEPASS_LOSS_OPTIONS(FIELD)  \
  FIELD(Tensor, target, "")          \
  FIELD(OptionalTensor, weight, "")  \
  FIELD(int64_t, ignore_index, "")   \
  FIELD(double, label_smoothing, "") \
  FIELD(double, softcap, "")         \
  FIELD(StaticInt, reduction_kind, "") /* Reduction */

#define ONEPASS_LOSS_FORWARD_OPTIONS(FIELD) \
  FIELD(double, z_loss, "")                 \
  FIELD(OptionalScalarType, out_dtype, "")

#define ONEPASS_LOSS_BACKWARD_OPTIONS(FIELD) \
  FIELD(Tensor, dloss, "")                   \
  FIELD(Tensor, statistics, "")              \
  FIELD(Tensor, total_weight, "")

ONEPASS_DEFINE_OPTIONS(LossOptions, ONEPASS_LOSS_OPTIONS);
ONEPASS_EXTEND_OPTIONS(LossForwardOptions, LossOptions, ONEPASS_LOSS_FORWARD_OPTIONS);
ONEPASS_EXTEND_OPTIONS(LossBackwardOptions, LossOptions, ONEPASS_LOSS_BACKWARD_OPTIONS);

constexpr const char* kOp = "cross_entropy";
constexpr const char* kBackward = "cross_entropy_backward";
constexpr const char* kInplace = "cross_entropy_backward_inplace";
constexpr int64_t kStatistics = 2;  // of a row: its maximum and its factor

DType accumulator_of(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

struct CheckedLoss {
  LossCall args;
  TensorInfo input;
  TensorInfo target;
};

CheckedLoss check_loss(const char* op, const Tensor& input, const LossOptions& options) {
  CheckedLoss call{.args = {}, .input = input_of(op, "input", input), .target = {}};
  LossCall& args = call.args;
  const TensorInfo& shape = call.input;
  const CheckedAgainst checked(op, "input", shape);
  args.dtype = checked.first_dtype();
  require(shape.dims == 1 || shape.dims == 2, op,
          ": input must have shape (classes,) or (rows, classes), other dimensions being "
          "flattened, got ",
          shape_of(shape));
  args.rows = shape.dims == 2 ? shape.sizes[0] : 1;
  args.cols = shape.sizes[shape.dims - 1];
  call.target = input_of(op, "target", options.target);
  require(is_int64(call.target.scalar_type), op,
          ": target must have dtype int64, indices of classes (torch.nn.functional.cross_entropy "
          "takes their probabilities), got ",
          TypeName{call.target.scalar_type});
  const Shape of_target{shape.sizes, shape.dims - 1};
  require(call.target.dims == of_target.dims &&
              std::equal(shape.sizes, shape.sizes + of_target.dims, call.target.sizes),
          op, ": target must have shape ", of_target, ", got ", shape_of(call.target));
  checked.device("target", call.target);
  args.target_stride = of_target.dims ? call.target.strides[0] : 0;
  if (options.weight) {
    const TensorInfo weight = input_of(op, "weight", *options.weight);
    const DType dtype = checked.tensor("weight", weight, &args.cols, 1);
    require(dtype == accumulator_of(args.dtype), op, ": weight must have dtype ",
            name_of(accumulator_of(args.dtype)), ", got ", name_of(dtype));
  }
  args.ignore_index = options.ignore_index;
  args.label_smoothing = options.label_smoothing;
  require_probability(op, "label_smoothing", options.label_smoothing);
  const float softcap = static_cast<float>(options.softcap);  // as kernels take it
  require(options.softcap == 0.0 || (softcap > 0.0f && std::isfinite(softcap)), op,
          ": softcap must be 0 or a positive number that float32 holds, got ", options.softcap);
  args.softcap = options.softcap;
  require(options.reduction_kind >= 0 && options.reduction_kind < kReductions, op,
          ": reduction_kind must be one of 0 to ", kReductions - 1, ", got ",
          options.reduction_kind);
  args.reduction = static_cast<Reduction>(options.reduction_kind);
  return call;
}

DType check_forward(const LossForwardOptions& options, const CheckedLoss& call) {
  require(std::isfinite(options.z_loss), kOp, ": z_loss must be finite, got ", options.z_loss);
  if (!options.out_dtype) return call.args.dtype;
  return CheckedAgainst(kOp, "input", call.input)
      .dtype("out_dtype", static_cast<int32_t>(*options.out_dtype));
}

// Where that costs nothing; elsewhere the row's loss and gradient are NaN.
void require_targets(const char* op, const LossCall& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    const int64_t target = args.target[row * args.target_stride];
    require((target >= 0 && target < args.cols) || target == args.ignore_index, op,
            ": target must lie between 0 and ", args.cols - 1, " or be ignore_index, ",
            args.ignore_index, ", got ", target);
  }
}

// The addresses of what is read; holds what had to be copied.
class Operands {
 public:
  Operands(const char* op, const Tensor& input, const LossOptions& options, CheckedLoss& call)
      : input_{input, call.input}, weight_(dense(options.weight)) {
    LossCall& args = call.args;
    address_rows({&input_}, 1, row_size_);
    args.input = input_.data();
    args.input_stride = input_.stride.stride[kRowDims - 1];
    args.target = static_cast<const int64_t*>(options.target.const_data_ptr());
    args.weight = data_of(weight_);
    if constexpr (kHostReadsTensors) require_targets(op, args);
  }

 private:
  RowTensor input_;
  OptionalTensor weight_;
  int64_t row_size_[kRowDims];
};

Dispatch describe(const char* op, const LossCall& args) {
  std::ostringstream text;
  text << args.rows << " x " << args.cols << ", " << name_of(args.dtype) << ", "
       << name_of(args.reduction);
  if (args.weight) text << ", weights";
  if (args.label_smoothing != 0.0) text << ", label_smoothing " << args.label_smoothing;
  if (args.softcap != 0.0) text << ", softcap " << args.softcap;
  return {.op = op, .arguments = text.str()};
}

// The part of (kStatistics, rows) that holds one of them.
template <class Byte>
Byte* line_of(Byte* statistics, const LossCall& args, int64_t line) {
  return statistics + line * args.rows * size_of(accumulator_of(args.dtype));
}

std::tuple<Tensor, Tensor, Tensor> loss_forward(const LossForwardOptions& options,
                                                const Tensor& input) {
  CheckedLoss call = check_loss(kOp, input, options);
  LossForward args{};
  args.loss_dtype = check_forward(options, call);
  const Operands operands(kOp, input, options, call);
  static_cast<LossCall&>(args) = call.args;
  args.z_loss = options.z_loss;
  const Device device = call.input.device;
  const DType accumulator = accumulator_of(args.dtype);
  const bool is_reduced = args.reduction != Reduction::kNone;
  const bool is_mean = args.reduction == Reduction::kMean;
  const int64_t statistics_shape[] = {kStatistics, args.rows};
  const int64_t nothing = 0;
  Tensor loss =
      empty(call.target.sizes, is_reduced ? 0 : call.target.dims, args.loss_dtype, device);
  Tensor statistics = empty(statistics_shape, 2, accumulator, device);
  Tensor total_weight = empty(&nothing, is_mean ? 0 : 1, accumulator, device);
  args.loss = loss.mutable_data_ptr();
  char* lines = static_cast<char*>(statistics.mutable_data_ptr());
  args.maximum = line_of(lines, args, 0);
  args.factor = line_of(lines, args, 1);
  args.total_weight = is_mean ? total_weight.mutable_data_ptr() : nullptr;
  if (args.rows > 0 || is_reduced) {
    run_operator(backend().loss_forward, args, device, [&] { return describe(kOp, args); });
  }
  return {loss, statistics, total_weight};
}

// On the meta device there is nothing to compute; the fake gives the shapes, and this the errors.
void loss_forward_check(const LossForwardOptions& options, const Tensor& input) {
  check_forward(options, check_loss(kOp, input, options));
}

CheckedLoss check_backward(const char* op, const LossBackwardOptions& options,
                           const Tensor& input) {
  const CheckedLoss call = check_loss(op, input, options);
  const LossCall& args = call.args;
  const CheckedAgainst checked(op, "input", call.input);
  const TensorInfo dloss = input_of(op, "dloss", options.dloss);
  const bool is_reduced = args.reduction != Reduction::kNone;
  checked.tensor("dloss", dloss, call.target.sizes, is_reduced ? 0 : call.target.dims);
  const auto accumulated = [&](const char* name, const Tensor& tensor, const int64_t* sizes,
                               int64_t dims) {
    const DType dtype = checked.tensor(name, input_of(op, name, tensor), sizes, dims);
    require(dtype == accumulator_of(args.dtype), op, ": ", name, " must have dtype ",
            name_of(accumulator_of(args.dtype)), ", got ", name_of(dtype));
  };
  const int64_t statistics_shape[] = {kStatistics, args.rows};
  const int64_t nothing = 0;
  accumulated("statistics", options.statistics, statistics_shape, 2);
  accumulated("total_weight", options.total_weight, &nothing,
              args.reduction == Reduction::kMean ? 0 : 1);
  return call;
}

void run_backward(const char* op, const LossBackwardOptions& options, const Tensor& input,
                  CheckedLoss& call, void* dinput, int64_t dinput_stride) {
  const Operands operands(op, input, options, call);
  LossBackward args{};
  static_cast<LossCall&>(args) = call.args;
  const TensorInfo dloss = info_of(options.dloss);
  const Tensor statistics = *dense(options.statistics);
  const char* lines = static_cast<const char*>(statistics.const_data_ptr());
  args.dloss = options.dloss.const_data_ptr();
  args.dloss_dtype = *dtype_of(dloss.scalar_type);
  args.dloss_stride = dloss.dims ? dloss.strides[0] : 0;
  args.maximum = line_of(lines, args, 0);
  args.factor = line_of(lines, args, 1);
  args.total_weight =
      args.reduction == Reduction::kMean ? options.total_weight.const_data_ptr() : nullptr;
  args.dinput = dinput;
  args.dinput_stride = dinput_stride;
  if (args.rows > 0 && args.cols > 0) {
    run_operator(backend().loss_backward, args, call.input.device,
                 [&] { return describe(op, args); });
  }
}

Tensor loss_backward(const LossBackwardOptions& options, const Tensor& input) {
  CheckedLoss call = check_backward(kBackward, options, input);
  Tensor dinput = empty(call.input.sizes, call.input.dims, call.args.dtype, call.input.device);
  run_backward(kBackward, options, input, call, dinput.mutable_data_ptr(), call.args.cols);
  return dinput;
}

void loss_backward_check(const LossBackwardOptions& options, const Tensor& input) {
  check_backward(kBackward, options, input);
}

// The gradient over the logits themselves.
CheckedLoss check_inplace(const LossBackwardOptions& options, const Tensor& input) {
  const CheckedLoss call = check_backward(kInplace, options, input);
  const TensorInfo& info = call.input;
  const bool is_dense = call.args.cols <= 1 || info.strides[info.dims - 1] == 1;
  const bool is_apart = call.args.rows <= 1 || info.strides[0] >= call.args.cols;
  require(is_dense && is_apart, kInplace,
          ": input must have dense rows that do not overlap, got strides ",
          Shape{info.strides, info.dims});
  return call;
}

void loss_backward_inplace(const LossBackwardOptions& options, const Tensor& input) {
  CheckedLoss call = check_inplace(options, input);
  const int64_t row_stride = call.input.dims == 2 ? call.input.strides[0] : call.args.cols;
  run_backward(kInplace, options, input, call, mutable_data_of(input.get()), row_stride);
}

void loss_backward_inplace_check(const LossBackwardOptions& options, const Tensor& input) {
  check_inplace(options, input);
}

}  // namespace

#define ONEPASS_LOSS_FORWARD_ARGUMENTS                 \
  "(Tensor input" ONEPASS_SCHEMA(ONEPASS_LOSS_OPTIONS) \
      ONEPASS_SCHEMA(ONEPASS_LOSS_FORWARD_OPTIONS) ")"
#define ONEPASS_LOSS_BACKWARD_ARGUMENTS(INPUT) \
  "(" INPUT ONEPASS_SCHEMA(ONEPASS_LOSS_OPTIONS) ONEPASS_SCHEMA(ONEPASS_LOSS_BACKWARD_OPTIONS) ")"

OperatorList loss_operators() {
  return {
      // statistics: (2, rows). total_weight has size 0 unless the reduction is a mean.
      entry<&Packed<&loss_forward>::call>("loss_forward" ONEPASS_LOSS_FORWARD_ARGUMENTS
                                          " -> (Tensor loss, Tensor statistics, Tensor "
                                          "total_weight)"),
      entry<&Packed<&loss_forward_check>::call>(
          "loss_forward_check" ONEPASS_LOSS_FORWARD_ARGUMENTS " -> ()", true),
      entry<&Packed<&loss_backward>::call>(
          "loss_backward" ONEPASS_LOSS_BACKWARD_ARGUMENTS("Tensor input") " -> Tensor"),
      entry<&Packed<&loss_backward_check>::call>(
          "loss_backward_check" ONEPASS_LOSS_BACKWARD_ARGUMENTS("Tensor input") " -> ()", true),
      entry<&Packed<&loss_backward_inplace>::call>(
          "loss_backward_inplace" ONEPASS_LOSS_BACKWARD_ARGUMENTS("Tensor(a!) input") " -> ()"),
      entry<&Packed<&loss_backward_inplace_check>::call>(
          "loss_backward_inplace_check" ONEPASS_LOSS_BACKWARD_ARGUMENTS("Tensor input") " -> ()",
          true),
  };
}

}  // namespace onepass
