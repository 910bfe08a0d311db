// Cross entropy of logits, and of a linear layer's output: schemas, checks, allocation.
#include "ops/loss.h"

#include <algorithm>
#include <array>
#include <tuple>

#include "ops/check.h"
#include "ops/fields.h"
#include "ops/library.h"
#include "ops/linear_product.h"
#include "ops/rows.h"
#include "ops/runtime.h"

namespace onepass {
namespace {

// The arguments of both operators besides input.
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
constexpr int64_t kStatistics = 3;  // of a row: maximum, factor, of_target

DType accumulator_of(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

struct CheckedLoss {
  LossCall args;
  TensorInfo input;
  TensorInfo target;
};

CheckedLoss check_loss(const char* op, const TensorInfo& input, const LossOptions& options) {
  CheckedLoss call{.args = {}, .input = input, .target = {}};
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

CheckedLoss check_loss(const char* op, const Tensor& input, const LossOptions& options) {
  return check_loss(op, input_of(op, "input", input), options);
}

void check_z_loss(const char* op, double z_loss) {
  require(std::isfinite(z_loss), op, ": z_loss must be finite, got ", z_loss);
}

DType check_forward(const LossForwardOptions& options, const CheckedLoss& call) {
  check_z_loss(kOp, options.z_loss);
  if (!options.out_dtype) return call.args.dtype;
  return CheckedAgainst(kOp, "input", call.input)
      .dtype("out_dtype", static_cast<int32_t>(*options.out_dtype));
}

// Checked where that costs nothing; elsewhere the row's loss and gradient are NaN.
void require_targets(const char* op, const LossCall& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    const int64_t target = args.target[row * args.target_stride];
    require((target >= 0 && target < args.cols) || target == args.ignore_index, op,
            ": target must lie between 0 and ", args.cols - 1, " or be ignore_index, ",
            args.ignore_index, ", got ", target);
  }
}

// The addresses of the tensors that are read; holds their copies where one was needed.
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
  args.of_target = line_of(lines, args, 2);
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
  args.of_target = line_of(lines, args, 2);
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

// ---- of a linear layer's output -----------------------------------------------------------------
//
// logits = input linear_weight^T + linear_bias. Their rows are computed in chunks, which share one
// buffer: for each chunk the loss, then its gradient in place, and the products of the gradient
// with linear_weight (dinput) and with input (dlinear_weight, to which each chunk adds). So the
// logits are never in memory as a whole. A chunk reads linear_weight twice, and reads and writes
// its gradient: with kChunkBytes that is a tenth of the time of its products in float32 (`onepass
// bench loss`).

#ifndef ONEPASS_CUDA  // on CUDA it is written in Python, with torch's products
#define ONEPASS_LINEAR_LOSS_OPTIONS(FIELD) \
  FIELD(Tensor, linear_weight, "")         \
  FIELD(Tensor, target, "")                \
  FIELD(OptionalTensor, linear_bias, "")   \
  FIELD(OptionalTensor, weight, "")        \
  FIELD(int64_t, ignore_index, "")         \
  FIELD(double, label_smoothing, "")       \
  FIELD(double, softcap, "")               \
  FIELD(double, z_loss, "")                \
  FIELD(OptionalTensor, dloss, "")         \
  FIELD(StaticInt, gradient_mask, "") /* of kWantsInput, ... */

ONEPASS_DEFINE_OPTIONS(LinearLossOptions, ONEPASS_LINEAR_LOSS_OPTIONS);

constexpr const char* kLinearOp = "linear_cross_entropy";
constexpr int64_t kWantsInput = 1, kWantsWeight = 2, kWantsBias = 4, kWantsAll = 7;

struct CheckedLinearLoss {
  TensorInfo input{};
  int64_t sizes[2]{};  // of the logits
  int64_t strides[2]{};
  LossCall args{};  // of all rows
  int64_t in_features = 0;
  DType weight_dtype{};
  DType bias_dtype{};
};

CheckedLinearLoss check_linear_loss(const LinearLossOptions& options, const Tensor& input) {
  CheckedLinearLoss call{.input = input_of(kLinearOp, "input", input)};
  const TensorInfo& shape = call.input;
  const CheckedAgainst checked(kLinearOp, "input", shape);
  require(shape.dims == 1 || shape.dims == 2, kLinearOp,
          ": input must have shape (in_features,) or (rows, in_features), other dimensions being "
          "flattened, got ",
          shape_of(shape));
  call.in_features = shape.sizes[shape.dims - 1];
  const TensorInfo matrix = input_of(kLinearOp, "linear_weight", options.linear_weight);
  require(matrix.dims == 2 && matrix.sizes[1] == call.in_features, kLinearOp,
          ": linear_weight must have shape (classes, ", call.in_features, "), got ",
          shape_of(matrix));
  checked.device("linear_weight", matrix);
  call.weight_dtype = checked.dtype("linear_weight", matrix.scalar_type);
  const int64_t classes = matrix.sizes[0];
  if (options.linear_bias) {
    call.bias_dtype = checked.tensor(
        "linear_bias", input_of(kLinearOp, "linear_bias", *options.linear_bias), &classes, 1);
  }
  call.sizes[0] = shape.dims == 2 ? shape.sizes[0] : classes;
  call.sizes[1] = classes;
  call.strides[0] = shape.dims == 2 ? classes : 1;
  call.strides[1] = 1;
  const TensorInfo logits{call.sizes, call.strides, shape.dims, shape.scalar_type, shape.device};
  const LossOptions of_logits{options.target,       options.weight,
                              options.ignore_index, options.label_smoothing,
                              options.softcap,      static_cast<int64_t>(Reduction::kNone)};
  call.args = check_loss(kLinearOp, logits, of_logits).args;
  check_z_loss(kLinearOp, options.z_loss);
  require(options.gradient_mask >= 0 && options.gradient_mask <= kWantsAll, kLinearOp,
          ": gradient_mask must be one of 0 to ", kWantsAll, ", got ", options.gradient_mask);
  require(options.dloss.has_value() == (options.gradient_mask != 0), kLinearOp,
          ": dloss must be given for gradients and only then, got ",
          options.dloss ? "one" : "none");
  if (options.dloss) {
    checked.tensor("dloss", input_of(kLinearOp, "dloss", *options.dloss), shape.sizes,
                   shape.dims - 1);
  }
  return call;
}

void linear_loss_check(const LinearLossOptions& options, const Tensor& input) {
  check_linear_loss(options, input);
}

// Bytes per column of a chunk of logits: 256 rows in float32, 512 in 16 bits.
constexpr int64_t kChunkBytes = 1024;

// The state that the chunks of a call share.
class LinearLoss {
 public:
  LinearLoss(const LinearLossOptions& options, const Tensor& input, const CheckedLinearLoss& call)
      : call_(call),
        options_(options),
        input_(input),
        linear_weight_(options.linear_weight),
        linear_bias_(dense(options.linear_bias)),
        weight_(dense(options.weight)),
        accumulator_(accumulator_of(call.args.dtype)),
        chunks_(std::max<int64_t>(
            (call.args.rows * size_of(call.args.dtype) + kChunkBytes - 1) / kChunkBytes, 1)),
        loss_(empty(call.input.sizes, call.input.dims - 1, accumulator_, call.input.device)),
        dinput_(gradient(kWantsInput, call.input.sizes, call.input.dims)),
        dlinear_weight_(gradient(kWantsWeight, weight_sizes().data(), 2)),
        dlinear_bias_(gradient(kWantsBias, weight_sizes().data(), 1)),
        logits_(of_chunk(call.args.cols, call.args.dtype)),
        statistics_(of_chunk(kStatistics, accumulator_)) {}

  std::tuple<Tensor, Tensor, Tensor, Tensor> run() {
    LossCall args = call_.args;
    args.target = static_cast<const int64_t*>(options_.target.const_data_ptr());
    args.weight = data_of(weight_);
    args.input = logits_.const_data_ptr();
    args.input_stride = args.cols;
    require_targets(kLinearOp, args);
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      const int64_t row = call_.args.rows * chunk / chunks_;
      args.rows = call_.args.rows * (chunk + 1) / chunks_ - row;
      make_logits(row, args.rows);
      LossCall of_chunk = args;
      of_chunk.target += row * args.target_stride;
      run_loss(of_chunk, row);
      if (options_.gradient_mask & kWantsInput) make_dinput(row, args.rows);
      if (options_.gradient_mask & (kWantsWeight | kWantsBias)) add_dweight(row, args.rows);
    }
    return {std::move(loss_), std::move(dinput_), std::move(dlinear_weight_),
            std::move(dlinear_bias_)};
  }

 private:
  std::array<int64_t, 2> weight_sizes() const { return {call_.args.cols, call_.in_features}; }

  Tensor gradient(int64_t wants, const int64_t* sizes, int64_t dims) const {
    return options_.gradient_mask & wants ? empty(sizes, dims, accumulator_, call_.input.device)
                                          : empty_1d(0, accumulator_, call_.input.device);
  }

  // Numbers of each row of the longest chunk.
  Tensor of_chunk(int64_t numbers, DType dtype) const {
    const int64_t sizes[] = {(call_.args.rows + chunks_ - 1) / chunks_, numbers};
    return empty(sizes, 2, dtype, call_.input.device);
  }

  static const void* rows_from(const Matrix& matrix, int64_t row, DType dtype) {
    return static_cast<const char*>(matrix.data()) + row * matrix.row() * size_of(dtype);
  }

  void make_logits(int64_t row, int64_t rows) {
    run_product({.left = rows_from(input_, row, call_.args.dtype),
                 .right = linear_weight_.data(),
                 .bias = data_of(linear_bias_),
                 .output = logits_.mutable_data_ptr(),
                 .left_sums = nullptr,
                 .rows = rows,
                 .cols = call_.args.cols,
                 .depth = call_.in_features,
                 .left_row = input_.row(),
                 .left_step = input_.column(),
                 .right_step = linear_weight_.column(),
                 .right_col = linear_weight_.row(),
                 .left_dtype = call_.args.dtype,
                 .right_dtype = call_.weight_dtype,
                 .bias_dtype = call_.bias_dtype,
                 .output_dtype = call_.args.dtype,
                 .sums_dtype = accumulator_,
                 .kind = LinearKind::kForward},
                call_.input.device);
  }

  // The loss of a chunk; its gradient takes the place of the logits.
  void run_loss(const LossCall& args, int64_t row) {
    if (args.rows == 0) return;
    const Device& device = call_.input.device;
    LossForward forward{};
    static_cast<LossCall&>(forward) = args;
    char* lines = static_cast<char*>(statistics_.mutable_data_ptr());
    forward.z_loss = options_.z_loss;
    forward.loss = static_cast<char*>(loss_.mutable_data_ptr()) + row * size_of(accumulator_);
    forward.loss_dtype = accumulator_;
    forward.maximum = line_of(lines, args, 0);
    forward.factor = line_of(lines, args, 1);
    forward.of_target = line_of(lines, args, 2);
    run_operator(backend().loss_forward, forward, device, [&] { return describe(kOp, args); });
    if (!options_.dloss || args.cols == 0) return;
    const TensorInfo dloss = info_of(*options_.dloss);
    LossBackward backward{};
    static_cast<LossCall&>(backward) = args;
    backward.dloss_dtype = *dtype_of(dloss.scalar_type);
    backward.dloss_stride = dloss.dims ? dloss.strides[0] : 0;
    backward.dloss = static_cast<const char*>(options_.dloss->const_data_ptr()) +
                     row * backward.dloss_stride * size_of(backward.dloss_dtype);
    backward.maximum = forward.maximum;
    backward.factor = forward.factor;
    backward.of_target = forward.of_target;
    backward.dinput = logits_.mutable_data_ptr();
    backward.dinput_stride = args.input_stride;
    run_operator(backend().loss_backward, backward, device,
                 [&] { return describe(kInplace, args); });
  }

  void make_dinput(int64_t row, int64_t rows) {
    run_product({.left = logits_.const_data_ptr(),
                 .right = linear_weight_.data(),
                 .bias = nullptr,
                 .output = static_cast<char*>(dinput_.mutable_data_ptr()) +
                           row * call_.in_features * size_of(accumulator_),
                 .left_sums = nullptr,
                 .rows = rows,
                 .cols = call_.in_features,
                 .depth = call_.args.cols,
                 .left_row = call_.args.cols,
                 .left_step = 1,
                 .right_step = linear_weight_.row(),
                 .right_col = linear_weight_.column(),
                 .left_dtype = call_.args.dtype,
                 .right_dtype = call_.weight_dtype,
                 .bias_dtype = accumulator_,
                 .output_dtype = accumulator_,
                 .sums_dtype = accumulator_,
                 .kind = LinearKind::kInput},
                call_.input.device);
  }

  void add_dweight(int64_t row, int64_t rows) {
    const bool wants_weight = options_.gradient_mask & kWantsWeight;
    const bool wants_bias = options_.gradient_mask & kWantsBias;
    run_product({.left = logits_.const_data_ptr(),
                 .right = wants_weight ? rows_from(input_, row, call_.args.dtype) : nullptr,
                 .bias = nullptr,
                 .output = dlinear_weight_.mutable_data_ptr(),
                 .left_sums = wants_bias ? dlinear_bias_.mutable_data_ptr() : nullptr,
                 .rows = call_.args.cols,
                 .cols = wants_weight ? call_.in_features : 0,
                 .depth = rows,
                 .left_row = 1,
                 .left_step = call_.args.cols,
                 .right_step = input_.row(),
                 .right_col = input_.column(),
                 .left_dtype = call_.args.dtype,
                 .right_dtype = call_.args.dtype,
                 .bias_dtype = accumulator_,
                 .output_dtype = accumulator_,
                 .sums_dtype = accumulator_,
                 .kind = LinearKind::kWeight,
                 .accumulate = row > 0},
                call_.input.device);
  }

  const CheckedLinearLoss& call_;
  const LinearLossOptions& options_;
  const Matrix input_;
  const Matrix linear_weight_;
  const OptionalTensor linear_bias_;
  const OptionalTensor weight_;
  const DType accumulator_;
  const int64_t chunks_;
  Tensor loss_;
  Tensor dinput_;
  Tensor dlinear_weight_;
  Tensor dlinear_bias_;
  Tensor logits_;
  Tensor statistics_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_loss(const LinearLossOptions& options,
                                                       const Tensor& input) {
  const CheckedLinearLoss call = check_linear_loss(options, input);
  return LinearLoss(options, input, call).run();
}
#endif  // ONEPASS_CUDA

}  // namespace

#define ONEPASS_LOSS_FORWARD_ARGUMENTS                 \
  "(Tensor input" ONEPASS_SCHEMA(ONEPASS_LOSS_OPTIONS) \
      ONEPASS_SCHEMA(ONEPASS_LOSS_FORWARD_OPTIONS) ")"
#define ONEPASS_LOSS_BACKWARD_ARGUMENTS(INPUT) \
  "(" INPUT ONEPASS_SCHEMA(ONEPASS_LOSS_OPTIONS) ONEPASS_SCHEMA(ONEPASS_LOSS_BACKWARD_OPTIONS) ")"

#define ONEPASS_LINEAR_LOSS_ARGUMENTS \
  "(Tensor input" ONEPASS_SCHEMA(ONEPASS_LINEAR_LOSS_OPTIONS) ")"

OperatorList loss_operators() {
  return {
      // statistics: (3, rows). total_weight has size 0 unless the reduction is a mean.
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
#ifndef ONEPASS_CUDA
      // Losses and gradients in float32, float64 for float64; those not wanted have size 0.
      entry<&Packed<&linear_loss>::call>("linear_loss" ONEPASS_LINEAR_LOSS_ARGUMENTS
                                         " -> (Tensor loss, Tensor dinput, Tensor dlinear_weight, "
                                         "Tensor dlinear_bias)"),
      entry<&Packed<&linear_loss_check>::call>(
          "linear_loss_check" ONEPASS_LINEAR_LOSS_ARGUMENTS " -> ()", true),
#endif
  };
}

}  // namespace onepass
