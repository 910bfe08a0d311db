// Cross entropy of logits, and of a linear layer's output: schemas, checks, allocation.
#include "ops/loss.h"

#include <algorithm>
#include <tuple>

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

struct CheckedLoss {
  LossCall args;
  TensorInfo input;
  TensorInfo target;
  DType loss_dtype{};  // of the forward
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
          shape);
  args.rows = shape.dims == 2 ? shape.sizes[0] : 1;
  args.cols = shape.sizes[shape.dims - 1];
  call.target = input_of(op, "target", options.target);
  require(is(ScalarType::Long, call.target.scalar_type), op,
          ": target must have dtype int64, indices of classes (torch.nn.functional.cross_entropy "
          "takes their probabilities), got ",
          TypeName{call.target.scalar_type});
  const Shape of_target(shape.sizes, shape.dims - 1);
  require(Shape(call.target) == of_target, op, ": target must have shape ", of_target, ", got ",
          call.target);
  checked.device("target", call.target);
  args.target_stride = of_target.dims ? call.target.strides[0] : 0;
  if (options.weight) {
    checked.tensor_of("weight", *options.weight, Shape(&args.cols, 1), checked.accumulator());
  }
  args.ignore_index = options.ignore_index;
  args.label_smoothing = options.label_smoothing;
  require_probability(op, "label_smoothing", options.label_smoothing);
  require_softcap(op, options.softcap);
  args.softcap = options.softcap;
  require_choice(op, "reduction_kind", options.reduction_kind, 0, kReductions - 1);
  args.reduction = static_cast<Reduction>(options.reduction_kind);
  return call;
}

CheckedLoss check_loss(const char* op, const Tensor& input, const LossOptions& options) {
  return check_loss(op, input_of(op, "input", input), options);
}

void check_z_loss(const char* op, double z_loss) {
  require(std::isfinite(z_loss), op, ": z_loss must be finite, got ", z_loss);
}

CheckedLoss check_forward(const LossForwardOptions& options, const Tensor& input) {
  CheckedLoss call = check_loss(kOp, input, options);
  check_z_loss(kOp, options.z_loss);
  const CheckedAgainst checked(kOp, "input", call.input);
  call.loss_dtype = checked.dtype("out_dtype", options.out_dtype, call.args.dtype);
  return call;
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
      : input_{input, call.input} {
    LossCall& args = call.args;
    address_rows({&input_}, 1, row_size_);
    args.input = input_.data();
    args.input_stride = input_.stride.stride[kRowDims - 1];
    args.target = static_cast<const int64_t*>(options.target.const_data_ptr());
    args.weight = dense_data_of(options.weight, copies_);
    if constexpr (kHostReadsTensors) require_targets(op, args);
  }

 private:
  RowTensor input_;
  Copies copies_;
  int64_t row_size_[kRowDims];
};

Dispatch describe(const char* op, const LossCall& args) {
  return described(op, args.rows, " x ", args.cols, ", ", args.dtype, ", ", name_of(args.reduction),
                   when(args.weight, ", weights"),
                   when(args.label_smoothing != 0.0, ", label_smoothing ", args.label_smoothing),
                   when(args.softcap != 0.0, ", softcap ", args.softcap));
}

// Points the arguments of either direction to the parts of (kStatistics, rows).
template <class Args, class Data>
void put_statistics(Args& args, Data* statistics) {
  using Byte = std::conditional_t<std::is_const_v<Data>, const char, char>;
  const auto part = [&](int64_t number) {
    const int64_t bytes = args.rows * size_of(accumulator_of(args.dtype));
    return static_cast<Byte*>(statistics) + number * bytes;
  };
  args.maximum = part(0);
  args.factor = part(1);
  args.of_target = part(2);
}

// Points the arguments to the gradients of the losses, from one row's on.
void put_dloss(LossBackward& args, const Tensor& tensor, int64_t row = 0) {
  const TensorInfo dloss = info_of(tensor);
  args.dloss_dtype = *dtype_of(dloss.scalar_type);
  args.dloss_stride = dloss.dims ? dloss.strides[0] : 0;
  args.dloss = static_cast<const char*>(tensor.const_data_ptr()) +
               row * args.dloss_stride * size_of(args.dloss_dtype);
}

std::tuple<Tensor, Tensor, Tensor> loss_forward(const LossForwardOptions& options,
                                                const Tensor& input) {
  CheckedLoss call = check_forward(options, input);
  const Operands operands(kOp, input, options, call);
  LossForward args{};
  static_cast<LossCall&>(args) = call.args;
  args.loss_dtype = call.loss_dtype;
  args.z_loss = options.z_loss;
  const Device device = call.input.device;
  const DType accumulator = accumulator_of(args.dtype);
  const bool is_reduced = args.reduction != Reduction::kNone;
  const bool is_mean = args.reduction == Reduction::kMean;
  const int64_t statistics_shape[] = {kStatistics, args.rows};
  const Shape one(nullptr, 0);
  Tensor loss = empty(is_reduced ? one : Shape(call.target), args.loss_dtype, device);
  Tensor statistics = empty(statistics_shape, accumulator, device);
  Tensor total_weight = empty_if(is_mean, one, accumulator, device, args.total_weight);
  args.loss = loss.mutable_data_ptr();
  put_statistics(args, statistics.mutable_data_ptr());
  if (args.rows > 0 || is_reduced) {
    run_operator(backend().loss_forward, args, device, [&] { return describe(kOp, args); });
  }
  return {loss, statistics, total_weight};
}

CheckedLoss check_gradient(const char* op, const LossBackwardOptions& options,
                           const Tensor& input) {
  const CheckedLoss call = check_loss(op, input, options);
  const LossCall& args = call.args;
  const CheckedAgainst checked(op, "input", call.input);
  const Shape one(nullptr, 0);
  const bool is_reduced = args.reduction != Reduction::kNone;
  checked.tensor("dloss", options.dloss, is_reduced ? one : Shape(call.target));
  const int64_t statistics[] = {kStatistics, args.rows};
  checked.tensor_of("statistics", options.statistics, statistics, checked.accumulator());
  const int64_t nothing[] = {0};
  checked.tensor_of("total_weight", options.total_weight,
                    args.reduction == Reduction::kMean ? one : Shape(nothing),
                    checked.accumulator());
  return call;
}

void run_backward(const char* op, const LossBackwardOptions& options, const Tensor& input,
                  CheckedLoss& call, void* dinput, int64_t dinput_stride) {
  const Operands operands(op, input, options, call);
  Copies copies;
  LossBackward args{};
  static_cast<LossCall&>(args) = call.args;
  put_dloss(args, options.dloss);
  put_statistics(args, dense_data_of(options.statistics, copies));
  args.total_weight =
      args.reduction == Reduction::kMean ? options.total_weight.const_data_ptr() : nullptr;
  args.dinput = dinput;
  args.dinput_stride = dinput_stride;
  if (args.rows > 0 && args.cols > 0) {
    run_operator(backend().loss_backward, args, call.input.device,
                 [&] { return describe(op, args); });
  }
}

CheckedLoss check_backward(const LossBackwardOptions& options, const Tensor& input) {
  return check_gradient(kBackward, options, input);
}

Tensor loss_backward(const LossBackwardOptions& options, const Tensor& input) {
  CheckedLoss call = check_backward(options, input);
  Tensor dinput = empty(call.input, call.args.dtype, call.input.device);
  run_backward(kBackward, options, input, call, dinput.mutable_data_ptr(), call.args.cols);
  return dinput;
}

// The gradient over the logits themselves.
CheckedLoss check_inplace(const LossBackwardOptions& options, const Tensor& input) {
  const CheckedLoss call = check_gradient(kInplace, options, input);
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

// ---- of a linear layer's output -----------------------------------------------------------------
//
// logits = input linear_weight^T + linear_bias. Their rows are computed in chunks, which share one
// buffer: for each chunk the loss, then its gradient in place, and the products of the gradient
// with linear_weight (dinput) and with input (dlinear_weight, to which each chunk adds). So the
// logits are never in memory as a whole. A chunk reads linear_weight twice, and reads and writes
// its gradient: with kChunkBytes that is a tenth of the time of its products in float32 (`onepass
// bench loss`).

#ifndef ONEPASS_CUDA  // on CUDA it is written in Python, with torch's products
#define ONEPASS_LINEAR_LOSS_OPTIONS(FIELD)                       \
  FIELD(Tensor, linear_weight, "")                               \
  FIELD(Tensor, target, "")                                      \
  FIELD(OptionalTensor, linear_bias, "")                         \
  FIELD(OptionalTensor, weight, "")                              \
  FIELD(int64_t, ignore_index, "")                               \
  FIELD(double, label_smoothing, "")                             \
  FIELD(double, softcap, "")                                     \
  FIELD(double, z_loss, "")                                      \
  FIELD(OptionalTensor, dloss, "")                               \
  FIELD(StaticInt, gradient_mask, "")  /* of kWantsInput, ... */ \
  FIELD(bool, round_factors, "=False") /* of float32 products */

ONEPASS_DEFINE_OPTIONS(LinearLossOptions, ONEPASS_LINEAR_LOSS_OPTIONS);

constexpr const char* kLinearOp = "linear_cross_entropy";
constexpr int64_t kWantsInput = 1, kWantsWeight = 2, kWantsBias = 4, kWantsAll = 7;

struct CheckedLinearLoss {
  TensorInfo input{};
  int64_t sizes[2]{};  // of the logits
  int64_t strides[2]{};
  LossCall args{};  // of all rows
  int64_t in_features = 0;
  DType bias_dtype{};
};

CheckedLinearLoss check_linear_loss(const LinearLossOptions& options, const Tensor& input) {
  CheckedLinearLoss call{.input = input_of(kLinearOp, "input", input)};
  const TensorInfo& shape = call.input;
  const CheckedAgainst checked(kLinearOp, "input", shape);
  require(shape.dims == 1 || shape.dims == 2, kLinearOp,
          ": input must have shape (in_features,) or (rows, in_features), other dimensions being "
          "flattened, got ",
          shape);
  call.in_features = shape.sizes[shape.dims - 1];
  const TensorInfo matrix = input_of(kLinearOp, "linear_weight", options.linear_weight);
  require(matrix.dims == 2 && matrix.sizes[1] == call.in_features, kLinearOp,
          ": linear_weight must have shape (classes, ", call.in_features, "), got ", matrix);
  checked.device("linear_weight", matrix);
  checked.dtype("linear_weight", matrix.scalar_type);
  const int64_t classes = matrix.sizes[0];
  call.bias_dtype = checked.tensor("linear_bias", options.linear_bias, Shape(&classes, 1));
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
  require_choice(kLinearOp, "gradient_mask", options.gradient_mask, 0, kWantsAll);
  require(options.dloss.has_value() == (options.gradient_mask != 0), kLinearOp,
          ": dloss must be given for gradients and only then, got ",
          options.dloss ? "one" : "none");
  checked.tensor("dloss", options.dloss, Shape(shape.sizes, shape.dims - 1));
  return call;
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
        linear_bias_(dense_data_of(options.linear_bias, copies_)),
        accumulator_(accumulator_of(call.args.dtype)),
        chunks_(std::max<int64_t>(
            (call.args.rows * size_of(call.args.dtype) + kChunkBytes - 1) / kChunkBytes, 1)),
        loss_(empty(Shape(call.input.sizes, call.input.dims - 1), accumulator_, call.input.device)),
        dinput_(gradient(kWantsInput, call.input)),
        dlinear_weight_(gradient(kWantsWeight, info_of(options.linear_weight))),
        dlinear_bias_(gradient(kWantsBias, Shape(&call.args.cols, 1))),
        logits_(of_chunk(call.args.cols, call.args.dtype)),
        statistics_(of_chunk(kStatistics, accumulator_)) {}

  std::tuple<Tensor, Tensor, Tensor, Tensor> run() {
    LossCall args = call_.args;
    args.target = static_cast<const int64_t*>(options_.target.const_data_ptr());
    args.weight = dense_data_of(options_.weight, copies_);
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
  Tensor gradient(int64_t wants, const Shape& shape) const {
    return empty_if(options_.gradient_mask & wants, shape, accumulator_, call_.input.device);
  }

  // Numbers of each row of the longest chunk.
  Tensor of_chunk(int64_t numbers, DType dtype) const {
    const int64_t sizes[] = {(call_.args.rows + chunks_ - 1) / chunks_, numbers};
    return empty(sizes, dtype, call_.input.device);
  }

  Factor logits() const { return {logits_.const_data_ptr(), call_.args.cols, 1, call_.args.dtype}; }

  void make_logits(int64_t row, int64_t rows) {
    LinearProduct args =
        product_of(LinearKind::kForward, input_.factor().from_row(row),
                   linear_weight_.factor().transposed(), {rows, call_.args.cols, call_.in_features},
                   logits_.mutable_data_ptr(), call_.args.dtype, accumulator_);
    args.bias = linear_bias_;
    args.bias_dtype = call_.bias_dtype;
    run(args);
  }

  // The loss of a chunk; its gradient takes the place of the logits.
  void run_loss(const LossCall& args, int64_t row) {
    if (args.rows == 0) return;
    const Device& device = call_.input.device;
    LossForward forward{};
    static_cast<LossCall&>(forward) = args;
    forward.z_loss = options_.z_loss;
    forward.loss = static_cast<char*>(loss_.mutable_data_ptr()) + row * size_of(accumulator_);
    forward.loss_dtype = accumulator_;
    put_statistics(forward, statistics_.mutable_data_ptr());
    run_operator(backend().loss_forward, forward, device, [&] { return describe(kOp, args); });
    if (!options_.dloss || args.cols == 0) return;
    LossBackward backward{};
    static_cast<LossCall&>(backward) = args;
    put_dloss(backward, *options_.dloss, row);
    put_statistics(backward, statistics_.const_data_ptr());
    backward.dinput = logits_.mutable_data_ptr();
    backward.dinput_stride = args.input_stride;
    run_operator(backend().loss_backward, backward, device,
                 [&] { return describe(kInplace, args); });
  }

  void make_dinput(int64_t row, int64_t rows) {
    char* const dinput = static_cast<char*>(dinput_.mutable_data_ptr()) +
                         row * call_.in_features * size_of(accumulator_);
    run(product_of(LinearKind::kInput, logits(), linear_weight_.factor(),
                   {rows, call_.in_features, call_.args.cols}, dinput, accumulator_, accumulator_));
  }

  void add_dweight(int64_t row, int64_t rows) {
    const bool wants_weight = options_.gradient_mask & kWantsWeight;
    const bool wants_bias = options_.gradient_mask & kWantsBias;
    LinearProduct args =
        product_of(LinearKind::kWeight, logits().transposed(), input_.factor().from_row(row),
                   {call_.args.cols, wants_weight ? call_.in_features : 0, rows},
                   dlinear_weight_.mutable_data_ptr(), accumulator_, accumulator_);
    if (wants_bias) args.left_sums = dlinear_bias_.mutable_data_ptr();
    args.accumulate = row > 0;
    run(args);
  }

  void run(LinearProduct product) {
    product.rounds_factors = options_.round_factors;
    run_product(product, call_.input.device);
  }

  const CheckedLinearLoss& call_;
  const LinearLossOptions& options_;
  Copies copies_;
  const Matrix input_;
  const Matrix linear_weight_;
  const void* const linear_bias_;
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

#define ONEPASS_LOSS_FORWARD_ARGUMENTS \
  ONEPASS_SCHEMA(ONEPASS_LOSS_OPTIONS) ONEPASS_SCHEMA(ONEPASS_LOSS_FORWARD_OPTIONS)
#define ONEPASS_LOSS_BACKWARD_ARGUMENTS \
  ONEPASS_SCHEMA(ONEPASS_LOSS_OPTIONS) ONEPASS_SCHEMA(ONEPASS_LOSS_BACKWARD_OPTIONS)

OperatorList loss_operators() {
  return {
      // statistics: (3, rows). total_weight has size 0 unless the reduction is a mean.
      entry<&loss_forward, &check_forward>("loss_forward",
                                           "Tensor input" ONEPASS_LOSS_FORWARD_ARGUMENTS,
                                           "(Tensor loss, Tensor statistics, Tensor total_weight)"),
      entry<&loss_backward, &check_backward>(
          "loss_backward", "Tensor input" ONEPASS_LOSS_BACKWARD_ARGUMENTS, "Tensor"),
      entry<&loss_backward_inplace, &check_inplace>(
          "loss_backward_inplace", "Tensor(a!) input" ONEPASS_LOSS_BACKWARD_ARGUMENTS, "()"),
#ifndef ONEPASS_CUDA
      // Losses and gradients in float32, float64 for float64; those not wanted have size 0.
      entry<&linear_loss, &check_linear_loss>(
          "linear_loss", "Tensor input" ONEPASS_SCHEMA(ONEPASS_LINEAR_LOSS_OPTIONS),
          "(Tensor loss, Tensor dinput, Tensor dlinear_weight, Tensor dlinear_bias)"),
#endif
  };
}

}  // namespace onepass
