// Causal convolution of each channel alone: schemas, checks, allocation. On CUDA there is no kernel
// here: torch's convolution is used.
#include "ops/causal_conv.h"

#include <tuple>

#include "ops/check.h"
#include "ops/fields.h"
#include "ops/library.h"
#include "ops/runtime.h"

namespace onepass {

#ifdef ONEPASS_CUDA
OperatorList causal_conv_operators() { return {}; }
#else
namespace {

// The arguments that both operators have besides weight.
#define ONEPASS_CAUSAL_CONV_OPTIONS(FIELD) \
  FIELD(OptionalTensor, bias, "")          \
  FIELD(OptionalTensor, initial_state, "") \
  FIELD(OptionalTensor, seq_idx, "")       \
  FIELD(bool, silu, "")                    \
  FIELD(bool, channels_last, "")

// Those of the backward after doutput.
#define ONEPASS_CAUSAL_CONV_BACKWARD_OPTIONS(FIELD) \
  FIELD(Tensor, x, "")                              \
  FIELD(Tensor, weight, "")                         \
  ONEPASS_CAUSAL_CONV_OPTIONS(FIELD)                \
  FIELD(StaticInt, grad_mask, "")

// Those of the forward after x.
#define ONEPASS_CAUSAL_CONV_FORWARD_OPTIONS(FIELD) \
  FIELD(Tensor, weight, "")                        \
  ONEPASS_CAUSAL_CONV_OPTIONS(FIELD)

ONEPASS_DEFINE_OPTIONS(CausalConvOptions, ONEPASS_CAUSAL_CONV_FORWARD_OPTIONS);
ONEPASS_DEFINE_OPTIONS(CausalConvBackwardOptions, ONEPASS_CAUSAL_CONV_BACKWARD_OPTIONS);

// Bits of grad_mask.
constexpr int64_t kWantInput = 1;
constexpr int64_t kWantWeight = 2;
constexpr int64_t kWantBias = 4;
constexpr int64_t kWantInitialState = 8;

constexpr const char* kOp = "causal_conv1d";
constexpr const char* kBackward = "causal_conv1d_backward";

// Of dense memory in one of the two orders.
void dense_strides(const CausalConv& args, int64_t (&strides)[3]) {
  strides[0] = std::max<int64_t>(args.channels, 1) * std::max<int64_t>(args.length, 1);
  strides[1] = args.channels_last ? 1 : std::max<int64_t>(args.length, 1);
  strides[2] = args.channels_last ? std::max<int64_t>(args.channels, 1) : 1;
}

// The tensor itself if its lines are dense, or a copy.
Tensor as_lines(const Tensor& tensor, const TensorInfo& info, const CausalConv& args,
                LineStride& stride) {
  const int line = args.channels_last ? 2 : 1, element = 3 - line;
  if (info.sizes[element] == 1 || info.strides[element] == 1) {
    stride = {info.strides[0], info.strides[line]};
    return tensor;
  }
  int64_t strides[3];
  dense_strides(args, strides);
  stride = {strides[0], strides[line]};
  return strided_copy(tensor, strides);
}

// Sets the fields that forward and backward share, except for the tensors' memory.
template <class Options>
void check_shared(const char* op, const TensorInfo& shape, const CheckedAgainst& checked,
                  const Options& options, CausalConv& args) {
  require(shape.dims == 3, op, ": x must have shape (batch, channels, length), got ",
          shape_of(shape));
  args.batch = shape.sizes[0];
  args.channels = shape.sizes[1];
  args.length = shape.sizes[2];
  args.input_dtype = args.bias_dtype = checked.first_dtype();
  args.channels_last = options.channels_last;
  args.silu = options.silu;
  const TensorInfo weight = input_of(op, "weight", options.weight);
  require(weight.dims == 2 && weight.sizes[0] == args.channels, op,
          ": weight must have shape (channels, width) for ", args.channels, " channels, got ",
          shape_of(weight));
  args.width = weight.sizes[1];
  require(args.width >= kLeastConvWidth && args.width <= kMostConvWidth, op,
          ": weight must have a width of ", kLeastConvWidth, " to ", kMostConvWidth, ", got ",
          args.width);
  args.weight_dtype = checked.tensor("weight", weight, weight.sizes, 2);
  if (options.bias) {
    args.bias_dtype =
        checked.tensor("bias", input_of(op, "bias", *options.bias), &args.channels, 1);
  }
  if (options.initial_state) {
    const int64_t sizes[] = {args.batch, args.channels, args.width - 1};
    const DType found = checked.tensor(
        "initial_state", input_of(op, "initial_state", *options.initial_state), sizes, 3);
    require(found == args.input_dtype, op, ": initial_state must have x's dtype ",
            name_of(args.input_dtype), ", got ", name_of(found));
  }
  if (options.seq_idx) {
    const TensorInfo info = input_of(op, "seq_idx", *options.seq_idx);
    require(info.dims == 2 && info.sizes[0] == args.batch && info.sizes[1] == args.length &&
                is_int32(info.scalar_type),
            op, ": seq_idx must be an int32 tensor of shape (", args.batch, ", ", args.length,
            "), got ", shape_of(info), " of ", TypeName{info.scalar_type});
    checked.device("seq_idx", info);
  }
}

// Dense copies of the small tensors, for as long as the call runs.
template <class Options>
struct SmallTensors {
  OptionalTensor weight, bias, initial_state, sequence;

  SmallTensors(const Options& options, CausalConv& args)
      : weight(dense(options.weight)),
        bias(dense(options.bias)),
        initial_state(dense(options.initial_state)),
        sequence(dense(options.seq_idx)) {
    args.weight = data_of(weight);
    args.bias = data_of(bias);
    args.initial_state = data_of(initial_state);
    args.sequence = static_cast<const int32_t*>(data_of(sequence));
  }
};

bool is_empty(const CausalConv& args) {
  return args.batch == 0 || args.channels == 0 || args.length == 0;
}

Dispatch describe(const char* op, const CausalConv& args) {
  std::ostringstream text;
  text << args.batch << " x " << args.channels << " x " << args.length << ", width " << args.width
       << ", channels " << (args.channels_last ? "last" : "first") << ", "
       << name_of(args.input_dtype) << (args.silu ? ", silu" : "")
       << (args.sequence ? ", packed" : "");
  return {.op = op, .arguments = text.str()};
}

Tensor empty_lines(bool wanted, const CausalConv& args, const TensorInfo& shape) {
  if (!wanted) return empty_1d(0, args.input_dtype, shape.device);
  int64_t strides[3];
  dense_strides(args, strides);
  return empty_strided(shape.sizes, strides, 3, args.input_dtype, shape.device);
}

Tensor causal_conv1d_forward(const CausalConvOptions& options, const Tensor& x) {
  const TensorInfo shape = input_of(kOp, "x", x);
  CausalConvForward args{};
  check_shared(kOp, shape, {kOp, "x", shape}, options, args);
  Tensor output = empty_lines(true, args, shape);
  if (is_empty(args)) return output;
  const Tensor lines = as_lines(x, shape, args, args.input_stride);
  const SmallTensors small(options, args);
  args.input = lines.const_data_ptr();
  args.output = output.mutable_data_ptr();
  run_operator(backend().causal_conv_forward, args, shape.device,
               [&] { return describe(kOp, args); });
  return output;
}

// On the meta device there is nothing to compute; the fake gives the shapes, and this the errors.
void causal_conv1d_forward_check(const CausalConvOptions& options, const Tensor& x) {
  const TensorInfo shape = input_of(kOp, "x", x);
  CausalConv args{};
  check_shared(kOp, shape, {kOp, "x", shape}, options, args);
}

TensorInfo check_backward(const CausalConvBackwardOptions& options, const Tensor& doutput,
                          CausalConvBackward& args) {
  const TensorInfo shape = input_of(kBackward, "x", options.x);
  const CheckedAgainst checked(kBackward, "x", shape);
  check_shared(kBackward, shape, checked, options, args);
  const DType found =
      checked.tensor("doutput", input_of(kBackward, "doutput", doutput), shape.sizes, shape.dims);
  require(found == args.input_dtype, kBackward, ": doutput must have x's dtype ",
          name_of(args.input_dtype), ", got ", name_of(found));
  return shape;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_backward(
    const CausalConvBackwardOptions& options, const Tensor& doutput) {
  CausalConvBackward args{};
  const TensorInfo shape = check_backward(options, doutput, args);
  const auto wants = [&](int64_t bit, bool given) { return given && (options.grad_mask & bit); };
  const auto gradient = [&](bool wanted, std::initializer_list<int64_t> sizes, DType dtype) {
    return wanted ? empty(sizes.begin(), static_cast<int64_t>(sizes.size()), dtype, shape.device)
                  : empty_1d(0, dtype, shape.device);
  };
  const bool want_input = wants(kWantInput, true), want_weight = wants(kWantWeight, true);
  const bool want_bias = wants(kWantBias, options.bias.has_value());
  const bool want_state = wants(kWantInitialState, options.initial_state.has_value());
  Tensor dx = empty_lines(want_input, args, shape);
  Tensor dweight = gradient(want_weight, {args.channels, args.width}, args.weight_dtype);
  Tensor dbias = gradient(want_bias, {args.channels}, args.bias_dtype);
  Tensor dstate =
      gradient(want_state, {args.batch, args.channels, args.width - 1}, args.input_dtype);
  if (is_empty(args)) {
    for (Tensor* sums : {&dweight, &dbias, &dstate}) set_to_zero(*sums);
    return {dx, dweight, dbias, dstate};
  }
  const Tensor lines = as_lines(options.x, shape, args, args.input_stride);
  const Tensor upstream = as_lines(doutput, info_of(doutput), args, args.doutput_stride);
  const SmallTensors small(options, args);
  args.input = lines.const_data_ptr();
  args.doutput = upstream.const_data_ptr();
  if (want_input) args.dinput = dx.mutable_data_ptr();
  if (want_weight) args.dweight = dweight.mutable_data_ptr();
  if (want_bias) args.dbias = dbias.mutable_data_ptr();
  if (want_state) args.dinitial_state = dstate.mutable_data_ptr();
  if (want_input || want_weight || want_bias || want_state) {
    run_operator(backend().causal_conv_backward, args, shape.device,
                 [&] { return describe(kBackward, args); });
  }
  return {dx, dweight, dbias, dstate};
}

void causal_conv1d_backward_check(const CausalConvBackwardOptions& options, const Tensor& doutput) {
  CausalConvBackward args{};
  check_backward(options, doutput, args);
}

}  // namespace

#define ONEPASS_CAUSAL_CONV_ARGUMENTS \
  "(Tensor x" ONEPASS_SCHEMA(ONEPASS_CAUSAL_CONV_FORWARD_OPTIONS) ")"
#define ONEPASS_CAUSAL_CONV_BACKWARD_ARGUMENTS \
  "(Tensor doutput" ONEPASS_SCHEMA(ONEPASS_CAUSAL_CONV_BACKWARD_OPTIONS) ")"

OperatorList causal_conv_operators() {
  return {
      entry<&Packed<&causal_conv1d_forward>::call>(
          "causal_conv1d_forward" ONEPASS_CAUSAL_CONV_ARGUMENTS " -> Tensor"),
      entry<&Packed<&causal_conv1d_forward_check>::call>(
          "causal_conv1d_forward_check" ONEPASS_CAUSAL_CONV_ARGUMENTS " -> ()", true),
      // grad_mask: 1 dx, 2 dweight, 4 dbias, 8 dinitial_state; those not wanted have size 0.
      entry<&Packed<&causal_conv1d_backward>::call>(
          "causal_conv1d_backward" ONEPASS_CAUSAL_CONV_BACKWARD_ARGUMENTS
          " -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_state)"),
      entry<&Packed<&causal_conv1d_backward_check>::call>(
          "causal_conv1d_backward_check" ONEPASS_CAUSAL_CONV_BACKWARD_ARGUMENTS " -> ()", true),
  };
}
#endif  // ONEPASS_CUDA

}  // namespace onepass
