// Group norm, with or without an activation after it: schemas, checks, allocation.
#include "ops/group_norm.h"

#include <tuple>

#include "ops/library.h"
#include "ops/rows.h"
#include "ops/runtime.h"

namespace onepass {
namespace {

// The arguments of group_norm_forward besides input. channels_last: the order of the output's
// memory; an input in this order is read in place, another is copied.
#define ONEPASS_GROUP_NORM_OPTIONS(FIELD)                            \
  FIELD(OptionalTensor, weight, "")                                  \
  FIELD(OptionalTensor, bias, "")                                    \
  FIELD(int64_t, num_groups, "")                                     \
  FIELD(double, eps, "")                                             \
  FIELD(StaticInt, activation_kind, "") /* Activation, or 0: none */ \
  FIELD(bool, channels_last, "")                                     \
  FIELD(OptionalScalarType, out_dtype, "")                           \
  FIELD(bool, save_statistics, "")

// The arguments of group_norm_backward besides doutput.
#define ONEPASS_GROUP_NORM_BACKWARD_OPTIONS(FIELD) \
  FIELD(Tensor, input, "")                         \
  FIELD(OptionalTensor, weight, "")                \
  FIELD(OptionalTensor, bias, "")                  \
  FIELD(Tensor, mean, "")                          \
  FIELD(Tensor, rstd, "")                          \
  FIELD(int64_t, num_groups, "")                   \
  FIELD(StaticInt, activation_kind, "")            \
  FIELD(bool, channels_last, "")                   \
  FIELD(StaticInt, grad_mask, "")

ONEPASS_DEFINE_OPTIONS(GroupNormOptions, ONEPASS_GROUP_NORM_OPTIONS);
ONEPASS_DEFINE_OPTIONS(GroupNormBackwardOptions, ONEPASS_GROUP_NORM_BACKWARD_OPTIONS);

// Bits of grad_mask.
constexpr int64_t kWantInput = 1;
constexpr int64_t kWantWeight = 2;
constexpr int64_t kWantBias = 4;

constexpr const char* kOp = "group_norm";
constexpr const char* kBackward = "group_norm_backward";

// Those of a dense tensor.
Sizes dense_strides(const Shape& shape, bool channels_last) {
  Sizes strides(shape.dims);
  int64_t stride = 1;
  const auto put = [&](int64_t d) {
    strides[d] = stride;
    stride *= std::max<int64_t>(shape.sizes[d], 1);
  };
  if (channels_last) put(1);
  for (int64_t d = shape.dims - 1; d >= 0; --d) {
    if (d != 1 || !channels_last) put(d);
  }
  return strides;
}

// Whether a tensor can be read in place; if so, its strides.
bool has_images(const TensorInfo& info, bool channels_last, ImageStride& stride) {
  stride = {info.sizes[0] > 1 ? info.strides[0] : Shape(info).product(1, info.dims), 1};
  if (!channels_last) return has_dense_rows(info, info.dims - 1);
  if (info.sizes[1] != 1 && info.strides[1] != 1) return false;
  int64_t pixels = 1;
  stride.pixel = info.sizes[1];
  for (int64_t d = info.dims - 1; d > 1; --d) {
    if (info.sizes[d] == 1) continue;
    if (pixels == 1) stride.pixel = info.strides[d];
    if (info.strides[d] != stride.pixel * pixels) return false;
    pixels *= info.sizes[d];
  }
  return true;
}

// The tensor itself, or a copy that can be read so.
Tensor as_images(const Tensor& tensor, const TensorInfo& info, bool channels_last,
                 ImageStride& stride) {
  if (has_images(info, channels_last, stride)) return tensor;
  Tensor copy = strided_copy(tensor, dense_strides(info, channels_last).data());
  has_images(info_of(copy), channels_last, stride);
  return copy;
}

// Like a tensor, dense and in either order; of size 0 if it is not wanted.
Tensor empty_images(bool wanted, const TensorInfo& like, bool channels_last, DType dtype,
                    void*& data) {
  if (!wanted) return empty_1d(0, dtype, like.device);
  const Sizes strides = dense_strides(like, channels_last);
  Tensor images = empty_strided(like, strides.data(), dtype, like.device);
  data = images.mutable_data_ptr();
  return images;
}

// Sets the fields that forward and backward share, except for the tensors' memory.
template <class Options>
void check_shared(const char* op, const TensorInfo& shape, const CheckedAgainst& checked,
                  const Options& options, GroupNorm& args) {
  args.input_dtype = checked.first_dtype();
  require(shape.dims >= 2, op, ": input must have at least 2 dimensions, got shape ", shape);
  args.batch = shape.sizes[0];
  args.channels = shape.sizes[1];
  args.pixels = Shape(shape).product(2, shape.dims);
  args.groups = options.num_groups;
  require(args.groups > 0, op, ": num_groups must be positive, got ", args.groups);
  require(args.channels % args.groups == 0, op,
          ": input must have a number of channels that num_groups divides, got ", args.channels,
          " and ", args.groups);
  const Shape channels(&args.channels, 1);
  args.weight_dtype = checked.tensor("weight", options.weight, channels, args.input_dtype);
  args.bias_dtype = checked.tensor("bias", options.bias, channels, args.input_dtype);
  args.activation = static_cast<Activation>(options.activation_kind);
  require(options.activation_kind == static_cast<int64_t>(Activation::kNone) ||
              args.activation == Activation::kSilu,
          op, ": activation_kind must be 0 (none) or 2 (silu), got ", options.activation_kind);
  require(!options.channels_last || shape.dims == 4 || shape.dims == 5, op,
          ": channels_last must be False unless input has 4 or 5 dimensions, got True for ",
          shape.dims);
  args.channels_last = options.channels_last || args.pixels == 1;
}

bool is_empty(const GroupNorm& args) {
  return args.batch == 0 || args.channels == 0 || args.pixels == 0;
}

Dispatch describe(const char* op, const GroupNorm& args) {
  return described(op, args.batch, " x ", args.channels, " x ", args.pixels, ", ", args.groups,
                   " groups, channels ", args.channels_last ? "last" : "first", ", input ",
                   args.input_dtype, when(args.weight, ", weight ", args.weight_dtype),
                   when(args.activation != Activation::kNone, ", ", name_of(args.activation)));
}

Checked<GroupNormForward> check_forward(const GroupNormOptions& options, const Tensor& input) {
  Checked<GroupNormForward> call{input_of(kOp, "input", input)};
  auto& [shape, args] = call;
  const CheckedAgainst checked(kOp, "input", shape);
  check_shared(kOp, shape, checked, options, args);
  args.output_dtype = checked.dtype("out_dtype", options.out_dtype, args.input_dtype);
  args.eps = options.eps;
  return call;
}

std::tuple<Tensor, Tensor, Tensor> group_norm_forward(const GroupNormOptions& options,
                                                      const Tensor& input) {
  auto [shape, args] = check_forward(options, input);
  const bool last = options.channels_last;
  const bool saves = options.save_statistics;
  const DType kept = accumulator_of(args.input_dtype);
  const int64_t sizes[] = {args.batch, args.groups};
  Tensor output = empty_images(true, shape, last, args.output_dtype, args.output);
  Tensor mean = empty_if(saves, sizes, kept, shape.device, args.mean);
  Tensor rstd = empty_if(saves, sizes, kept, shape.device, args.rstd);
  if (is_empty(args)) {
    set_to_zero(mean);
    set_to_zero(rstd);
    return {output, mean, rstd};
  }
  const Tensor images = as_images(input, shape, last, args.input_stride);
  Copies copies;
  args.input = images.const_data_ptr();
  args.weight = dense_data_of(options.weight, copies);
  args.bias = dense_data_of(options.bias, copies);
  run_operator(backend().group_norm_forward, args, shape.device,
               [&args = args] { return describe(kOp, args); });
  return {output, mean, rstd};
}

struct CheckedBackward {
  TensorInfo input;
  TensorInfo doutput;
  GroupNormBackward args{};
};

CheckedBackward check_backward(const GroupNormBackwardOptions& options, const Tensor& doutput) {
  CheckedBackward call{input_of(kBackward, "input", options.input),
                       input_of(kBackward, "doutput", doutput)};
  GroupNormBackward& args = call.args;
  const CheckedAgainst checked(kBackward, "input", call.input);
  check_shared(kBackward, call.input, checked, options, args);
  args.doutput_dtype = checked.tensor("doutput", call.doutput, call.input);
  const int64_t sizes[] = {args.batch, args.groups};
  checked.tensor_of("mean", options.mean, sizes, checked.accumulator());
  checked.tensor_of("rstd", options.rstd, sizes, checked.accumulator());
  args.dweight_dtype = args.weight_dtype;
  args.dbias_dtype = args.bias_dtype;
  return call;
}

std::tuple<Tensor, Tensor, Tensor> group_norm_backward(const GroupNormBackwardOptions& options,
                                                       const Tensor& doutput) {
  auto [shape, upstream, args] = check_backward(options, doutput);
  const bool last = options.channels_last;
  const Shape channels(&args.channels, 1);
  const bool want_input = options.grad_mask & kWantInput;
  const bool want_weight = (options.grad_mask & kWantWeight) && options.weight;
  const bool want_bias = (options.grad_mask & kWantBias) && options.bias;
  Tensor dinput = empty_images(want_input, shape, last, args.input_dtype, args.dinput);
  Tensor dweight = empty_if(want_weight, channels, args.dweight_dtype, shape.device, args.dweight);
  Tensor dbias = empty_if(want_bias, channels, args.dbias_dtype, shape.device, args.dbias);
  if (is_empty(args)) {
    set_to_zero(dweight);
    set_to_zero(dbias);
    return {dinput, dweight, dbias};
  }
  const Tensor images = as_images(options.input, shape, last, args.input_stride);
  const Tensor gradients = as_images(doutput, upstream, last, args.doutput_stride);
  Copies copies;
  args.input = images.const_data_ptr();
  args.doutput = gradients.const_data_ptr();
  args.weight = dense_data_of(options.weight, copies);
  args.bias = dense_data_of(options.bias, copies);
  args.mean = dense_data_of(options.mean, copies);
  args.rstd = dense_data_of(options.rstd, copies);
  if (want_input || want_weight || want_bias) {
    run_operator(backend().group_norm_backward, args, shape.device,
                 [&args = args] { return describe(kBackward, args); });
  }
  return {dinput, dweight, dbias};
}

}  // namespace

OperatorList group_norm_operators() {
  return {
      // output = activation(group_norm(input)); statistics that are not kept have size 0.
      entry<&group_norm_forward, &check_forward>(
          "group_norm_forward", "Tensor input" ONEPASS_SCHEMA(ONEPASS_GROUP_NORM_OPTIONS),
          "(Tensor output, Tensor mean, Tensor rstd)"),
      // grad_mask: 1 dinput, 2 dweight, 4 dbias.
      entry<&group_norm_backward, &check_backward>(
          "group_norm_backward",
          "Tensor doutput" ONEPASS_SCHEMA(ONEPASS_GROUP_NORM_BACKWARD_OPTIONS),
          "(Tensor dinput, Tensor dweight, Tensor dbias)"),
  };
}

}  // namespace onepass
