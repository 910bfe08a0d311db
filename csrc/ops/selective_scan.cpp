// Selective scan: schemas, checks, allocation. On CUDA there is no kernel here: torch's operators
// are used, on chunks of tokens.
#include "ops/selective_scan.h"

#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "ops/in_place.h"
#include "ops/library.h"
#include "ops/rows.h"
#include "ops/runtime.h"
#include "ops/sequences.h"

namespace onepass {

#ifdef ONEPASS_CUDA
OperatorList selective_scan_operators() { return {}; }
#else
namespace {

// The arguments that both operators have besides u.
#define ONEPASS_SELECTIVE_SCAN_OPTIONS(FIELD) \
  FIELD(Tensor, delta, "")                    \
  FIELD(Tensor, A, "")                        \
  FIELD(Tensor, B, "")                        \
  FIELD(Tensor, C, "")                        \
  FIELD(OptionalTensor, D, "")                \
  FIELD(OptionalTensor, z, "")                \
  FIELD(OptionalTensor, delta_bias, "")       \
  FIELD(OptionalTensor, initial_state, "")    \
  FIELD(OptionalTensor, cu_seqlens, "")       \
  FIELD(bool, delta_softplus, "")             \
  FIELD(bool, channels_last, "")

#define ONEPASS_SELECTIVE_SCAN_FORWARD_OPTIONS(FIELD) \
  ONEPASS_SELECTIVE_SCAN_OPTIONS(FIELD)               \
  FIELD(bool, save_states, "")

// Those of the backward after dlast_state.
#define ONEPASS_SELECTIVE_SCAN_BACKWARD_OPTIONS(FIELD) \
  FIELD(Tensor, u, "")                                 \
  ONEPASS_SELECTIVE_SCAN_OPTIONS(FIELD)                \
  FIELD(Tensor, states, "")                            \
  FIELD(StaticInt, grad_mask, "")

// Those of the update after x.
#define ONEPASS_STATE_UPDATE_OPTIONS(FIELD) \
  FIELD(Tensor, dt, "")                     \
  FIELD(Tensor, A, "")                      \
  FIELD(Tensor, B, "")                      \
  FIELD(Tensor, C, "")                      \
  FIELD(OptionalTensor, D, "")              \
  FIELD(OptionalTensor, z, "")              \
  FIELD(OptionalTensor, dt_bias, "")        \
  FIELD(bool, dt_softplus, "")

ONEPASS_DEFINE_OPTIONS(SelectiveScanOptions, ONEPASS_SELECTIVE_SCAN_FORWARD_OPTIONS);
ONEPASS_DEFINE_OPTIONS(SelectiveScanBackwardOptions, ONEPASS_SELECTIVE_SCAN_BACKWARD_OPTIONS);
ONEPASS_DEFINE_OPTIONS(StateUpdateOptions, ONEPASS_STATE_UPDATE_OPTIONS);

constexpr const char* kOp = "selective_scan";
constexpr const char* kBackward = "selective_scan_backward";
constexpr const char* kUpdate = "selective_state_update";
constexpr const char* kVerb = "updated";  // in place

ScanStride stride_of(const TensorInfo& info) {
  return {info.strides[0], info.strides[1], info.strides[2]};
}

ScanFactorStride factor_stride_of(const TensorInfo& info) {
  if (info.dims == 3) return {info.strides[0], 0, info.strides[1], info.strides[2]};
  return {info.strides[0], info.strides[1], info.strides[2], info.strides[3]};
}

// Dense memory for a result like u, in one of the two orders.
Tensor empty_tokens(bool wanted, const SelectiveScan& args, DType dtype, const TensorInfo& u,
                    void*& data) {
  if (!wanted) return empty_1d(0, dtype, u.device);
  const int64_t channels = std::max<int64_t>(args.channels, 1);
  const int64_t length = std::max<int64_t>(args.length, 1);
  const int64_t last[] = {channels * length, 1, channels};
  const int64_t first[] = {channels * length, length, 1};
  Tensor made = empty_strided(u, args.channels_last ? last : first, dtype, u.device);
  data = made.mutable_data_ptr();
  return made;
}

// Sets the fields that forward and backward share, except for the tensors' memory.
template <class Options>
void check_shared(const char* op, const TensorInfo& u, const CheckedAgainst& checked,
                  const Options& options, SelectiveScan& args) {
  require(u.dims == 3, op, ": u must have shape (batch, channels, length), got ", u);
  args.batch = u.sizes[0];
  args.channels = u.sizes[1];
  args.length = u.sizes[2];
  args.u_stride = stride_of(u);
  args.u_dtype = checked.first_dtype();
  args.delta_softplus = options.delta_softplus;
  args.channels_last = options.channels_last;

  const TensorInfo delta = input_of(op, "delta", options.delta);
  args.delta_dtype = checked.tensor("delta", delta, u);
  args.delta_stride = stride_of(delta);
  const TensorInfo A = input_of(op, "A", options.A);
  require(A.dims == 2 && A.sizes[0] == args.channels && A.sizes[1] > 0, op,
          ": A must have shape (channels, state) for ", args.channels, " channels, got ", A);
  args.A_dtype = checked.tensor("A", A, A);
  args.state = A.sizes[1];

  const TensorInfo B = input_of(op, "B", options.B);
  const bool has_groups = B.dims == 4;
  args.groups = has_groups ? B.sizes[1] : 1;
  const int64_t of_group[] = {args.batch, args.groups, args.state, args.length};
  const int64_t of_all[] = {args.batch, args.state, args.length};
  const Shape factor = has_groups ? Shape(of_group) : Shape(of_all);
  args.B_dtype = checked.tensor("B", B, factor);
  require(args.groups > 0 && args.channels % args.groups == 0, op,
          ": B must have a number of groups that divides ", args.channels, " channels, got ",
          args.groups);
  args.B_stride = factor_stride_of(B);
  const TensorInfo C = input_of(op, "C", options.C);
  args.C_dtype = checked.tensor("C", C, factor);
  args.C_stride = factor_stride_of(C);

  const Shape of_channels(&args.channels, 1);
  args.D_dtype = checked.tensor("D", options.D, of_channels);
  args.delta_bias_dtype = checked.tensor("delta_bias", options.delta_bias, of_channels);
  if (options.z) {
    const TensorInfo z = input_of(op, "z", *options.z);
    args.z_dtype = checked.tensor("z", z, u);
    args.z_stride = stride_of(z);
  }
  check_sequences(op, checked, "u", options.cu_seqlens, kScanChunk, args);
  const int64_t of_state[] = {args.sequences, args.channels, args.state};
  args.initial_state_dtype =
      checked.tensor("initial_state", options.initial_state, of_state, checked.accumulator());
}

// Points the arguments that both operators read to memory.
template <class Options>
void put_inputs(const char* op, const Options& options, const Tensor& u, SelectiveScan& args,
                Copies& copies) {
  args.u = u.const_data_ptr();
  args.delta = options.delta.const_data_ptr();
  args.A = dense_data_of(options.A, copies);
  args.B = options.B.const_data_ptr();
  args.C = options.C.const_data_ptr();
  args.D = dense_data_of(options.D, copies);
  args.z = data_of(options.z);
  args.delta_bias = dense_data_of(options.delta_bias, copies);
  args.initial_state = dense_data_of(options.initial_state, copies);
  put_sequences(op, "u", options.cu_seqlens, args, copies);
}

Dispatch describe(const char* op, const SelectiveScan& args) {
  return described(op, args.batch, " x ", args.channels, " x ", args.length, ", state ", args.state,
                   when(args.groups > 1, ", groups ", args.groups), ", channels ",
                   args.channels_last ? "last" : "first", ", ", args.u_dtype,
                   when(args.z, ", gated"), when(args.cu_seqlens, ", packed"));
}

Checked<SelectiveScanForward> check_forward(const SelectiveScanOptions& options, const Tensor& u) {
  Checked<SelectiveScanForward> call{input_of(kOp, "u", u)};
  check_shared(kOp, call.first, {kOp, "u", call.first}, options, call.args);
  return call;
}

// The state at the end of sequences without a token.
void put_first_states(const SelectiveScanOptions& options, Tensor& last_state) {
  if (options.initial_state) {
    torch::stable::copy_(last_state, *options.initial_state);
  } else {
    set_to_zero(last_state);
  }
}

std::tuple<Tensor, Tensor, Tensor> selective_scan_forward(const SelectiveScanOptions& options,
                                                          const Tensor& u) {
  auto [shape, args] = check_forward(options, u);
  const DType accumulator = accumulator_of(args.u_dtype);
  args.last_state_dtype = accumulator;
  Tensor output = empty_tokens(true, args, args.u_dtype, shape, args.output);
  const int64_t of_state[] = {args.sequences, args.channels, args.state};
  Tensor last_state = empty_if(true, of_state, accumulator, shape.device, args.last_state);
  const int64_t of_states[] = {args.batch, args.chunks, args.state, args.channels};
  Tensor states = empty_if(options.save_states, of_states, accumulator, shape.device, args.states);
  if (args.states && options.cu_seqlens) set_to_zero(states);  // some belong to no chunk
  Copies copies;
  put_inputs(kOp, options, u, args, copies);
  if (Shape(shape).is_empty()) {
    put_first_states(options, last_state);
    return {output, last_state, states};
  }
  run_operator(backend().selective_scan_forward, args, shape.device,
               [&args = args] { return describe(kOp, args); });
  return {output, last_state, states};
}

struct CheckedBackward {
  TensorInfo u;
  SelectiveScanBackward args{};
};

CheckedBackward check_backward(const SelectiveScanBackwardOptions& options,
                               const OptionalTensor& doutput, const OptionalTensor& dlast_state) {
  CheckedBackward call{input_of(kBackward, "u", options.u)};
  SelectiveScanBackward& args = call.args;
  const CheckedAgainst checked(kBackward, "u", call.u);
  check_shared(kBackward, call.u, checked, options, args);
  if (doutput) {
    const TensorInfo info = input_of(kBackward, "doutput", *doutput);
    checked.tensor_of("doutput", info, call.u, args.u_dtype, "u");
    args.doutput_stride = stride_of(info);
  }
  const int64_t of_state[] = {args.sequences, args.channels, args.state};
  if (dlast_state) {
    checked.tensor_of("dlast_state", *dlast_state, of_state, checked.accumulator());
  }
  const int64_t of_states[] = {args.batch, args.chunks, args.state, args.channels};
  checked.tensor_of("states", options.states, of_states, checked.accumulator());
  return call;
}

using Gradients =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients selective_scan_backward(const SelectiveScanBackwardOptions& options,
                                  const OptionalTensor& doutput,
                                  const OptionalTensor& dlast_state) {
  auto [shape, args] = check_backward(options, doutput, dlast_state);
  const Device device = shape.device;
  const auto wants = [&](int place, bool given = true) {
    return given && (options.grad_mask >> place & 1);
  };
  const int64_t of_channels[] = {args.channels};
  const int64_t of_A[] = {args.channels, args.state};
  const int64_t of_state[] = {args.sequences, args.channels, args.state};
  const TensorInfo factor = info_of(options.B);
  Gradients gradients = {
      empty_tokens(wants(0), args, args.u_dtype, shape, args.du),
      empty_tokens(wants(1), args, args.delta_dtype, shape, args.ddelta),
      empty_if(wants(2), of_A, args.A_dtype, device, args.dA),
      empty_if(wants(3), factor, args.B_dtype, device, args.dB),
      empty_if(wants(4), factor, args.C_dtype, device, args.dC),
      empty_if(wants(5, options.D.has_value()), of_channels, args.D_dtype, device, args.dD),
      empty_tokens(wants(6, options.z.has_value()), args, args.z_dtype, shape, args.dz),
      empty_if(wants(7, options.delta_bias.has_value()), of_channels, args.delta_bias_dtype, device,
               args.ddelta_bias),
      empty_if(wants(8, options.initial_state.has_value()), of_state, args.initial_state_dtype,
               device, args.dinitial_state),
  };
  Copies copies;
  put_inputs(kBackward, options, options.u, args, copies);
  if (Shape(shape).is_empty()) {
    std::apply([](auto&... each) { (set_to_zero(each), ...); }, gradients);
    Tensor& dstate = std::get<8>(gradients);
    if (args.dinitial_state && dlast_state) torch::stable::copy_(dstate, *dlast_state);
    return gradients;
  }
  args.states = dense_data_of(options.states, copies);
  args.doutput = data_of(doutput);
  args.dlast_state = dense_data_of(dlast_state, copies);
  run_operator(backend().selective_scan_backward, args, device,
               [&args = args] { return describe(kBackward, args); });
  return gradients;
}

// ---- one token, the state in place
// ----------------------------------------------------------------

// Tensors of an update: with heads (batch, heads, channels, ...), or without.
class UpdateCheck {
 public:
  UpdateCheck(const StateUpdateOptions& options, const Tensor& state, const Tensor& x)
      : x_info_(input_of(kUpdate, "x", x)), checked_(kUpdate, "x", x_info_) {
    const TensorInfo info = input_of(kUpdate, "state", state);
    has_heads_ = info.dims == 4;
    require(has_heads_ || info.dims == 3, kUpdate,
            ": state must have shape (batch, channels, state) or (batch, heads, channels, state), "
            "got ",
            info);
    const int64_t* sizes = info.sizes + (has_heads_ ? 1 : 0);
    args.batch = info.sizes[0];
    args.heads = has_heads_ ? info.sizes[1] : 1;
    args.channels = sizes[1];
    args.state_size = sizes[2];
    require(args.state_size > 0, kUpdate, ": state must have a last dimension of at least 1, got ",
            info);
    args.state_dtype = checked_.dtype("state", info.scalar_type);
    args.x_dtype = checked_.first_dtype();
    args.dt_softplus = options.dt_softplus;
    args.state_stride = stride_of(info, true);
    checked_.shape("x", x_info_, of_sample());
    checked_.device("state", info);
    args.x_stride = stride_of(x_info_, true);
    put("dt", options.dt, of_sample(), true, args.dt_dtype, args.dt_stride);
    args.A_dtype = checked_.tensor("A", options.A, of_numbers());
    check_groups(options);
    put("D", options.D, of_head(), false, args.D_dtype, args.D_stride);
    put("z", options.z, of_sample(), true, args.z_dtype, args.z_stride);
    put("dt_bias", options.dt_bias, of_head(), false, args.dt_bias_dtype, args.dt_bias_stride);
    check_written(options, state, info, x);
  }

  const TensorInfo& x() const { return x_info_; }
  UpdateStride stride_of(const TensorInfo& info, bool has_samples) const {
    const int64_t* next = info.strides;
    const int64_t sample = has_samples ? *next++ : 0;
    const int64_t head = has_heads_ ? *next++ : 0;
    return {sample, head, *next};
  }

  SelectiveStateUpdate args{};

 private:
  // Shapes of tensors besides B and C.
  Sizes of_sample() const { return shaped({args.batch}, {args.channels}); }
  Sizes of_head() const { return shaped({}, {args.channels}); }
  Sizes of_numbers() const { return shaped({}, {args.channels, args.state_size}); }
  Sizes shaped(Sizes before, const Sizes& after) const {
    if (has_heads_) before.push_back(args.heads);
    before.insert(before.end(), after.begin(), after.end());
    return before;
  }

  template <class Given>
  void put(const char* name, const Given& given, const Sizes& sizes, bool has_samples, DType& dtype,
           UpdateStride& stride) const {
    if constexpr (std::is_same_v<Given, OptionalTensor>) {
      if (given) put(name, *given, sizes, has_samples, dtype, stride);
    } else {
      const TensorInfo info = input_of(kUpdate, name, given);
      dtype = checked_.tensor(name, info, sizes);
      stride = stride_of(info, has_samples);
    }
  }

  void check_groups(const StateUpdateOptions& options) {
    const TensorInfo B = input_of(kUpdate, "B", options.B);
    args.groups = has_heads_ && B.dims == 3 ? B.sizes[1] : 1;
    Sizes sizes{args.batch, args.state_size};
    if (has_heads_) sizes.insert(sizes.begin() + 1, args.groups);
    args.B_dtype = checked_.tensor("B", B, sizes);
    require(args.groups > 0 && args.heads % args.groups == 0, kUpdate,
            ": B must have a number of groups that divides ", args.heads, " heads, got ",
            args.groups);
    args.C_dtype = checked_.tensor("C", options.C, sizes);
  }

  void check_written(const StateUpdateOptions& options, const Tensor& state, const TensorInfo& info,
                     const Tensor& x) const {
    require_dense_rows(kUpdate, "state", info, kVerb);
    require_own_places(kUpdate, "state", info, kVerb);
    const Place written{mutable_data_of(state.get()), info, size_of(args.state_dtype)};
    const auto read = [&](const char* name, const OptionalTensor& given) {
      if (given) require_apart(kUpdate, name, place_of(*given), "state", written, kVerb);
    };
    read("x", x);
    read("dt", options.dt);
    read("A", options.A);
    read("B", options.B);
    read("C", options.C);
    read("D", options.D);
    read("z", options.z);
    read("dt_bias", options.dt_bias);
  }

  TensorInfo x_info_;
  CheckedAgainst checked_;
  bool has_heads_ = false;
};

UpdateCheck check_update(const StateUpdateOptions& options, const Tensor& state, const Tensor& x) {
  return {options, state, x};
}

// The numbers of a group's state, dense.
const void* group_of(const Tensor& given, bool has_groups, UpdateStride& stride, Copies& copies) {
  const Tensor& tensor = with_dense_columns(given, copies);
  const TensorInfo info = info_of(tensor);
  stride = {info.strides[0], has_groups ? info.strides[1] : 0, 0};
  return tensor.const_data_ptr();
}

Tensor selective_state_update(const StateUpdateOptions& options, const Tensor& state,
                              const Tensor& x) {
  UpdateCheck call = check_update(options, state, x);
  SelectiveStateUpdate& args = call.args;
  Tensor output = empty(call.x(), args.x_dtype, call.x().device);
  if (Shape(call.x()).is_empty()) return output;
  Copies copies;
  args.state = mutable_data_of(state.get());
  args.x = x.const_data_ptr();
  args.dt = options.dt.const_data_ptr();
  const TensorInfo of_A = info_of(options.A);
  args.A_is_shared = of_A.strides[of_A.dims - 1] == 0;
  const Tensor& A = args.A_is_shared ? options.A : with_dense_columns(options.A, copies);
  args.A = A.const_data_ptr();
  args.A_stride = call.stride_of(info_of(A), false);
  const bool has_groups = info_of(options.B).dims == 3;
  args.B = group_of(options.B, has_groups, args.B_stride, copies);
  args.C = group_of(options.C, has_groups, args.C_stride, copies);
  args.D = data_of(options.D);
  args.z = data_of(options.z);
  args.dt_bias = data_of(options.dt_bias);
  args.output = output.mutable_data_ptr();
  run_operator(backend().selective_state_update, args, call.x().device, [&] {
    return described(kUpdate, args.batch, " x ", args.heads, " heads x ", args.channels, ", state ",
                     args.state_size, " of ", args.state_dtype, ", ", args.x_dtype,
                     when(args.z, ", gated"));
  });
  return output;
}

}  // namespace

OperatorList selective_scan_operators() {
  return {
      entry<&selective_scan_forward, &check_forward>(
          "selective_scan_forward",
          "Tensor u" ONEPASS_SCHEMA(ONEPASS_SELECTIVE_SCAN_FORWARD_OPTIONS),
          "(Tensor output, Tensor last_state, Tensor states)"),
      // grad_mask: 1 du, 2 ddelta, 4 dA, 8 dB, 16 dC, 32 dD, 64 dz, 128 ddelta_bias,
      // 256 dinitial_state; those not wanted have size 0.
      entry<&selective_scan_backward, &check_backward>(
          "selective_scan_backward",
          "Tensor? doutput, Tensor? dlast_state" ONEPASS_SCHEMA(
              ONEPASS_SELECTIVE_SCAN_BACKWARD_OPTIONS),
          "(Tensor du, Tensor ddelta, Tensor dA, Tensor dB, Tensor dC, Tensor dD, Tensor dz, "
          "Tensor ddelta_bias, Tensor dinitial_state)"),
      entry<&selective_state_update, &check_update>(
          "selective_state_update",
          "Tensor(a!) state, Tensor x" ONEPASS_SCHEMA(ONEPASS_STATE_UPDATE_OPTIONS), "Tensor"),
  };
}
#endif  // ONEPASS_CUDA

}  // namespace onepass
