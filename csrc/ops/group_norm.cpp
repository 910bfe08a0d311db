// Group norm, with or without an activation after it: schemas, checks, allocation.
#include "ops/group_norm.h"

#include <tuple>

#include "ops/check.h"
#include "ops/fields.h"
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

DType statistics_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// Those of a dense tensor.
std::vector<int64_t> dense_strides(const TensorInfo& info, bool channels_last) {
  const int64_t dims = info.dims;
  std::vector<int64_t> strides(dims);
  int64_t stride = 1;
  const auto put = [&](int64_t d) {
    strides[d] = stride;
    stride *= std::max<int64_t>(info.sizes[d], 1);
  };
  if (channels_last) put(1);
  for (int64_t d = dims - 1; d >= 0; --d) {
    if (d != 1 || !channels_last) put(d);
  }
  return strides;
}

// Whether a tensor can be read in place; if so, its strides.
bool has_images(const TensorInfo& info, bool channels_last, ImageStride& stride) {
  int64_t sample = 1;
  for (int64_t d = 1; d < info.dims; ++d) sample *= info.sizes[d];
  stride = {info.sizes[0] > 1 ? info.strides[0] : sample, 1};
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

Tensor empty_images(bool wanted, const TensorInfo& shape, bool channels_last, DType dtype) {
  if (!wanted) return empty_1d(0, dtype, shape.device);
  return empty_strided(shape.sizes, dense_strides(shape, channels_last).data(), shape.dims, dtype,
                       shape.device);
}

// Sets the fields that forward and backward share, except for the tensors' memory.
template <class Options>
void check_shared(const char* op, const TensorInfo& shape, const CheckedAgainst& checked,
                  const Options& options, GroupNorm& args) {
  args.input_dtype = args.weight_dtype = args.bias_dtype = checked.first_dtype();
  require(shape.dims >= 2, op, ": input must have at least 2 dimensions, got shape ",
          shape_of(shape));
  args.batch = shape.sizes[0];
  args.channels = shape.sizes[1];
  args.pixels = 1;
  for (int64_t d = 2; d < shape.dims; ++d) args.pixels *= shape.sizes[d];
  args.groups = options.num_groups;
  require(args.groups > 0, op, ": num_groups must be positive, got ", args.groups);
  require(args.channels % args.groups == 0, op,
          ": input must have a number of channels that num_groups divides, got ", args.channels,
          " and ", args.groups);
  if (options.weight) {
    args.weight_dtype =
        checked.tensor("weight", input_of(op, "weight", *options.weight), &args.channels, 1);
  }
  if (options.bias) {
    args.bias_dtype =
        checked.tensor("bias", input_of(op, "bias", *options.bias), &args.channels, 1);
  }
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
  std::ostringstream text;
  text << args.batch << " x " << args.channels << " x " << args.pixels << ", " << args.groups
       << " groups, channels " << (args.channels_last ? "last" : "first") << ", input "
       << name_of(args.input_dtype);
  if (args.weight) text << ", weight " << name_of(args.weight_dtype);
  if (args.activation != Activation::kNone) text << ", " << name_of(args.activation);
  return {.op = op, .arguments = text.str()};
}

GroupNormForward check_forward(const GroupNormOptions& options, const TensorInfo& shape) {
  GroupNormForward args{};
  const CheckedAgainst checked(kOp, "input", shape);
  check_shared(kOp, shape, checked, options, args);
  args.output_dtype = args.input_dtype;
  if (options.out_dtype) {
    args.output_dtype = checked.dtype("out_dtype", static_cast<int32_t>(*options.out_dtype));
  }
  args.eps = options.eps;
  return args;
}

std::tuple<Tensor, Tensor, Tensor> group_norm_forward(const GroupNormOptions& options,
                                                      const Tensor& input) {
  const TensorInfo shape = input_of(kOp, "input", input);
  GroupNormForward args = check_forward(options, shape);
  const DType kept = statistics_dtype(args.input_dtype);
  const int64_t sizes[] = {args.batch, args.groups};
  const auto statistics = [&] {
    return options.save_statistics ? empty(sizes, 2, kept, shape.device)
                                   : empty_1d(0, kept, shape.device);
  };
  Tensor output = empty_images(true, shape, options.channels_last, args.output_dtype);
  Tensor mean = statistics(), rstd = statistics();
  if (is_empty(args)) {
    if (options.save_statistics) {
      set_to_zero(mean);
      set_to_zero(rstd);
    }
    return {output, mean, rstd};
  }
  const Tensor images = as_images(input, shape, options.channels_last, args.input_stride);
  const OptionalTensor weight = dense(options.weight), bias = dense(options.bias);
  args.input = images.const_data_ptr();
  args.weight = data_of(weight);
  args.bias = data_of(bias);
  args.output = output.mutable_data_ptr();
  if (options.save_statistics) {
    args.mean = mean.mutable_data_ptr();
    args.rstd = rstd.mutable_data_ptr();
  }
  run_operator(backend().group_norm_forward, args, shape.device,
               [&] { return describe(kOp, args); });
  return {output, mean, rstd};
}

// On the meta device there is nothing to compute; the fake gives the shapes, and this the errors.
void group_norm_forward_check(const GroupNormOptions& options, const Tensor& input) {
  check_forward(options, input_of(kOp, "input", input));
}

GroupNormBackward check_backward(const GroupNormBackwardOptions& options, const TensorInfo& shape,
                                 const TensorInfo& doutput) {
  GroupNormBackward args{};
  const CheckedAgainst checked(kBackward, "input", shape);
  check_shared(kBackward, shape, checked, options, args);
  args.doutput_dtype = checked.tensor("doutput", doutput, shape.sizes, shape.dims);
  const DType kept = statistics_dtype(args.input_dtype);
  const int64_t sizes[] = {args.batch, args.groups};
  const auto check_statistics = [&](const char* name, const Tensor& tensor) {
    const DType dtype = checked.tensor(name, input_of(kBackward, name, tensor), sizes, 2);
    require(dtype == kept, kBackward, ": ", name, " must have dtype ", name_of(kept), ", got ",
            name_of(dtype));
  };
  check_statistics("mean", options.mean);
  check_statistics("rstd", options.rstd);
  args.dweight_dtype = args.weight_dtype;
  args.dbias_dtype = args.bias_dtype;
  return args;
}

std::tuple<Tensor, Tensor, Tensor> group_norm_backward(const GroupNormBackwardOptions& options,
                                                       const Tensor& doutput) {
  const TensorInfo shape = input_of(kBackward, "input", options.input);
  const TensorInfo upstream = input_of(kBackward, "doutput", doutput);
  GroupNormBackward args = check_backward(options, shape, upstream);
  const auto of_channels = [&](bool wanted, DType dtype) {
    return empty_1d(wanted ? args.channels : 0, dtype, shape.device);
  };
  const bool want_input = options.grad_mask & kWantInput;
  const bool want_weight = (options.grad_mask & kWantWeight) && options.weight;
  const bool want_bias = (options.grad_mask & kWantBias) && options.bias;
  Tensor dinput = empty_images(want_input, shape, options.channels_last, args.input_dtype);
  Tensor dweight = of_channels(want_weight, args.dweight_dtype);
  Tensor dbias = of_channels(want_bias, args.dbias_dtype);
  if (is_empty(args)) {
    set_to_zero(dweight);
    set_to_zero(dbias);
    return {dinput, dweight, dbias};
  }
  const bool last = options.channels_last;
  const Tensor images = as_images(options.input, shape, last, args.input_stride);
  const Tensor gradients = as_images(doutput, upstream, last, args.doutput_stride);
  const OptionalTensor weight = dense(options.weight), bias = dense(options.bias);
  const OptionalTensor mean = dense(options.mean), rstd = dense(options.rstd);
  args.input = images.const_data_ptr();
  args.doutput = gradients.const_data_ptr();
  args.weight = data_of(weight);
  args.bias = data_of(bias);
  args.mean = data_of(mean);
  args.rstd = data_of(rstd);
  if (want_input) args.dinput = dinput.mutable_data_ptr();
  if (want_weight) args.dweight = dweight.mutable_data_ptr();
  if (want_bias) args.dbias = dbias.mutable_data_ptr();
  if (want_input || want_weight || want_bias) {
    run_operator(backend().group_norm_backward, args, shape.device,
                 [&] { return describe(kBackward, args); });
  }
  return {dinput, dweight, dbias};
}

void group_norm_backward_check(const GroupNormBackwardOptions& options, const Tensor& doutput) {
  check_backward(options, input_of(kBackward, "input", options.input),
                 input_of(kBackward, "doutput", doutput));
}

}  // namespace

OperatorList group_norm_operators() {
  return {
      // output = activation(group_norm(input)); statistics that are not kept have size 0.
      entry<&Packed<&group_norm_forward>::call>("group_norm_forward(Tensor input" ONEPASS_SCHEMA(
          ONEPASS_GROUP_NORM_OPTIONS) ") -> (Tensor output, Tensor mean, Tensor rstd)"),
      entry<&Packed<&group_norm_forward_check>::call>(
          "group_norm_forward_check(Tensor input" ONEPASS_SCHEMA(
              ONEPASS_GROUP_NORM_OPTIONS) ") -> ()",
          true),
      // grad_mask: 1 dinput, 2 dweight, 4 dbias.
      entry<&Packed<&group_norm_backward>::call>(
          "group_norm_backward(Tensor doutput" ONEPASS_SCHEMA(
              ONEPASS_GROUP_NORM_BACKWARD_OPTIONS) ") -> (Tensor dinput, Tensor dweight, Tensor "
                                                   "dbias)"),
      entry<&Packed<&group_norm_backward_check>::call>(
          "group_norm_backward_check(Tensor doutput" ONEPASS_SCHEMA(
              ONEPASS_GROUP_NORM_BACKWARD_OPTIONS) ") -> ()",
          true),
  };
}

}  // namespace onepass
