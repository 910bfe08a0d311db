// Causal convolution of each channel alone: schemas, checks, allocation. On CUDA there is no kernel
// here: torch's convolution is used.
#include "ops/causal_conv.h"

#include <tuple>

#include "ops/in_place.h"
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

// Those of the update after x.
#define ONEPASS_CAUSAL_CONV_UPDATE_OPTIONS(FIELD) \
  FIELD(Tensor, weight, "")                       \
  FIELD(OptionalTensor, bias, "")                 \
  FIELD(bool, silu, "")

ONEPASS_DEFINE_OPTIONS(CausalConvOptions, ONEPASS_CAUSAL_CONV_FORWARD_OPTIONS);
ONEPASS_DEFINE_OPTIONS(CausalConvBackwardOptions, ONEPASS_CAUSAL_CONV_BACKWARD_OPTIONS);
ONEPASS_DEFINE_OPTIONS(CausalConvUpdateOptions, ONEPASS_CAUSAL_CONV_UPDATE_OPTIONS);

// Bits of grad_mask.
constexpr int64_t kWantInput = 1;
constexpr int64_t kWantWeight = 2;
constexpr int64_t kWantBias = 4;
constexpr int64_t kWantInitialState = 8;

constexpr const char* kOp = "causal_conv1d";
constexpr const char* kBackward = "causal_conv1d_backward";
constexpr const char* kUpdate = "causal_conv1d_update";
constexpr const char* kVerb = "updated";  // in place

// Of dense memory in one of the two orders.
Sizes dense_strides(const CausalConv& args) {
  const int64_t channels = std::max<int64_t>(args.channels, 1);
  const int64_t length = std::max<int64_t>(args.length, 1);
  if (args.channels_last) return {channels * length, 1, channels};
  return {channels * length, length, 1};
}

// The elements of a tensor if its lines are dense, or of a copy.
const void* lines_of(const Tensor& tensor, const TensorInfo& info, const CausalConv& args,
                     LineStride& stride, Copies& copies) {
  const int line = args.channels_last ? 2 : 1, element = 3 - line;
  if (info.sizes[element] == 1 || info.strides[element] == 1) {
    stride = {info.strides[0], info.strides[line]};
    return tensor.const_data_ptr();
  }
  const Sizes strides = dense_strides(args);
  stride = {strides[0], strides[line]};
  copies.push_back(strided_copy(tensor, strides.data()));
  return copies.back().const_data_ptr();
}

Tensor empty_lines(bool wanted, const CausalConv& args, const TensorInfo& like, void*& data) {
  if (!wanted) return empty_1d(0, args.input_dtype, like.device);
  Tensor lines = empty_strided(like, dense_strides(args).data(), args.input_dtype, like.device);
  data = lines.mutable_data_ptr();
  return lines;
}

template <class Options, class Args>
void check_weight(const char* op, const CheckedAgainst& checked, const Options& options,
                  Args& args) {
  const TensorInfo weight = input_of(op, "weight", options.weight);
  require(weight.dims == 2 && weight.sizes[0] == args.channels, op,
          ": weight must have shape (channels, width) for ", args.channels, " channels, got ",
          weight);
  args.width = weight.sizes[1];
  require(args.width >= kLeastConvWidth && args.width <= kMostConvWidth, op,
          ": weight must have a width of ", kLeastConvWidth, " to ", kMostConvWidth, ", got ",
          args.width);
  args.weight_dtype = checked.tensor("weight", weight, weight);
  args.bias_dtype =
      checked.tensor("bias", options.bias, Shape(&args.channels, 1), args.input_dtype);
}

// Sets the fields that forward and backward share, except for the tensors' memory.
template <class Options>
void check_shared(const char* op, const TensorInfo& shape, const CheckedAgainst& checked,
                  const Options& options, CausalConv& args) {
  require(shape.dims == 3, op, ": x must have shape (batch, channels, length), got ", shape);
  args.batch = shape.sizes[0];
  args.channels = shape.sizes[1];
  args.length = shape.sizes[2];
  args.input_dtype = checked.first_dtype();
  args.channels_last = options.channels_last;
  args.silu = options.silu;
  check_weight(op, checked, options, args);
  if (options.initial_state) {
    const int64_t sizes[] = {args.batch, args.channels, args.width - 1};
    checked.tensor_of("initial_state", *options.initial_state, sizes, args.input_dtype, "x");
  }
  if (options.seq_idx) {
    require(!options.initial_state, op,
            ": initial_state must not be given beside seq_idx, got one");
    const TensorInfo info = input_of(op, "seq_idx", *options.seq_idx);
    const int64_t sizes[] = {args.batch, args.length};
    require(Shape(info) == sizes && is(ScalarType::Int, info.scalar_type), op,
            ": seq_idx must be an int32 tensor of shape ", Shape(sizes), ", got ", info, " of ",
            TypeName{info.scalar_type});
    checked.device("seq_idx", info);
  }
}

// Points the arguments that both operators read to memory.
template <class Options>
void put_inputs(const Options& options, const Tensor& x, const TensorInfo& info, CausalConv& args,
                Copies& copies) {
  args.input = lines_of(x, info, args, args.input_stride, copies);
  args.weight = dense_data_of(options.weight, copies);
  args.bias = dense_data_of(options.bias, copies);
  args.initial_state = dense_data_of(options.initial_state, copies);
  args.sequence = dense_data_of<int32_t>(options.seq_idx, copies);
}

Dispatch describe(const char* op, const CausalConv& args) {
  return described(op, args.batch, " x ", args.channels, " x ", args.length, ", width ", args.width,
                   ", channels ", args.channels_last ? "last" : "first", ", ", args.input_dtype,
                   when(args.silu, ", silu"), when(args.sequence, ", packed"));
}

Checked<CausalConvForward> check_forward(const CausalConvOptions& options, const Tensor& x) {
  Checked<CausalConvForward> call{input_of(kOp, "x", x)};
  check_shared(kOp, call.first, {kOp, "x", call.first}, options, call.args);
  return call;
}

Tensor causal_conv1d_forward(const CausalConvOptions& options, const Tensor& x) {
  auto [shape, args] = check_forward(options, x);
  Tensor output = empty_lines(true, args, shape, args.output);
  if (Shape(shape).is_empty()) return output;
  Copies copies;
  put_inputs(options, x, shape, args, copies);
  run_operator(backend().causal_conv_forward, args, shape.device,
               [&args = args] { return describe(kOp, args); });
  return output;
}

struct CheckedBackward {
  TensorInfo x;
  TensorInfo doutput;
  CausalConvBackward args{};
};

CheckedBackward check_backward(const CausalConvBackwardOptions& options, const Tensor& doutput) {
  CheckedBackward call{input_of(kBackward, "x", options.x),
                       input_of(kBackward, "doutput", doutput)};
  const CheckedAgainst checked(kBackward, "x", call.x);
  check_shared(kBackward, call.x, checked, options, call.args);
  checked.tensor_of("doutput", call.doutput, call.x, checked.first_dtype(), "x");
  return call;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_backward(
    const CausalConvBackwardOptions& options, const Tensor& doutput) {
  auto [shape, upstream, args] = check_backward(options, doutput);
  const auto wants = [&](int64_t bit, bool given = true) {
    return given && (options.grad_mask & bit);
  };
  const int64_t of_weight[] = {args.channels, args.width};
  const int64_t of_state[] = {args.batch, args.channels, args.width - 1};
  const Device device = shape.device;
  Tensor dx = empty_lines(wants(kWantInput), args, shape, args.dinput);
  Tensor dweight = empty_if(wants(kWantWeight), of_weight, args.weight_dtype, device, args.dweight);
  Tensor dbias = empty_if(wants(kWantBias, options.bias.has_value()), Shape(&args.channels, 1),
                          args.bias_dtype, device, args.dbias);
  Tensor dstate = empty_if(wants(kWantInitialState, options.initial_state.has_value()), of_state,
                           args.input_dtype, device, args.dinitial_state);
  if (Shape(shape).is_empty()) {
    for (Tensor* sums : {&dweight, &dbias, &dstate}) set_to_zero(*sums);
    return {dx, dweight, dbias, dstate};
  }
  Copies copies;
  put_inputs(options, options.x, shape, args, copies);
  args.doutput = lines_of(doutput, upstream, args, args.doutput_stride, copies);
  if (args.dinput || args.dweight || args.dbias || args.dinitial_state) {
    run_operator(backend().causal_conv_backward, args, device,
                 [&args = args] { return describe(kBackward, args); });
  }
  return {dx, dweight, dbias, dstate};
}

struct CheckedUpdate {
  TensorInfo x;
  CausalConvUpdate args{};
};

CheckedUpdate check_update(const CausalConvUpdateOptions& options, const Tensor& conv_state,
                           const Tensor& x) {
  CheckedUpdate call{input_of(kUpdate, "x", x)};
  const TensorInfo& info = call.x;
  CausalConvUpdate& args = call.args;
  const CheckedAgainst checked(kUpdate, "x", info);
  require(info.dims == 2 || info.dims == 3, kUpdate,
          ": x must have shape (batch, channels) or (batch, channels, tokens), got ", info);
  args.batch = info.sizes[0];
  args.channels = info.sizes[1];
  args.tokens = info.dims == 3 ? info.sizes[2] : 1;
  args.input_stride = {info.strides[0], info.strides[1], info.dims == 3 ? info.strides[2] : 0};
  args.input_dtype = checked.first_dtype();
  args.silu = options.silu;
  check_weight(kUpdate, checked, options, args);
  const TensorInfo state = input_of(kUpdate, "conv_state", conv_state);
  args.before = state.dims == 3 ? state.sizes[2] : 0;
  require(args.before >= args.width - 1, kUpdate,
          ": conv_state must have shape (batch, channels, at least ", args.width - 1, "), got ",
          state);
  const int64_t of_state[] = {args.batch, args.channels, args.before};
  checked.tensor_of("conv_state", state, of_state, args.input_dtype, "x");
  args.state_stride = {state.strides[0], state.strides[1], state.strides[2]};
  require_own_places(kUpdate, "conv_state", state, kVerb);
  const Place written{mutable_data_of(conv_state.get()), state, size_of(args.input_dtype)};
  require_apart(kUpdate, "x", place_of(x), "conv_state", written, kVerb);
  require_apart(kUpdate, "weight", place_of(options.weight), "conv_state", written, kVerb);
  if (options.bias) {
    require_apart(kUpdate, "bias", place_of(*options.bias), "conv_state", written, kVerb);
  }
  return call;
}

Tensor causal_conv1d_update(const CausalConvUpdateOptions& options, const Tensor& conv_state,
                            const Tensor& x) {
  auto [shape, args] = check_update(options, conv_state, x);
  Tensor output = empty(shape, args.input_dtype, shape.device);
  if (Shape(shape).is_empty()) return output;
  Copies copies;
  args.state = mutable_data_of(conv_state.get());
  args.input = x.const_data_ptr();
  args.weight = dense_data_of(options.weight, copies);
  args.bias = dense_data_of(options.bias, copies);
  args.output = output.mutable_data_ptr();
  run_operator(backend().causal_conv_update, args, shape.device, [&args = args] {
    return described(kUpdate, args.batch, " x ", args.channels, " x ", args.tokens, ", width ",
                     args.width, ", after ", args.before, ", ", args.input_dtype,
                     when(args.silu, ", silu"));
  });
  return output;
}

}  // namespace

OperatorList causal_conv_operators() {
  return {
      entry<&causal_conv1d_forward, &check_forward>(
          "causal_conv1d_forward", "Tensor x" ONEPASS_SCHEMA(ONEPASS_CAUSAL_CONV_FORWARD_OPTIONS),
          "Tensor"),
      // grad_mask: 1 dx, 2 dweight, 4 dbias, 8 dinitial_state; those not wanted have size 0.
      entry<&causal_conv1d_backward, &check_backward>(
          "causal_conv1d_backward",
          "Tensor doutput" ONEPASS_SCHEMA(ONEPASS_CAUSAL_CONV_BACKWARD_OPTIONS),
          "(Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_state)"),
      entry<&causal_conv1d_update, &check_update>(
          "causal_conv1d_update",
          "Tensor(a!) conv_state, Tensor x" ONEPASS_SCHEMA(ONEPASS_CAUSAL_CONV_UPDATE_OPTIONS),
          "Tensor"),
  };
}
#endif  // ONEPASS_CUDA

}  // namespace onepass
