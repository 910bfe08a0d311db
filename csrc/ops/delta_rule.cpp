// Linear attention with a delta rule: schemas, checks, allocation. On CUDA there is no kernel here:
// torch's operators are used, on chunks of tokens.
#include "ops/delta_rule.h"

#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "ops/in_place.h"
#include "ops/library.h"
#include "ops/rows.h"
#include "ops/runtime.h"
#include "ops/sequences.h"

namespace onepass {

#ifdef ONEPASS_CUDA
OperatorList delta_rule_operators() { return {}; }
#else
namespace {

// The arguments that all three operators have besides q.
#define ONEPASS_DELTA_RULE_INPUTS(FIELD) \
  FIELD(Tensor, k, "")                   \
  FIELD(Tensor, v, "")                   \
  FIELD(Tensor, g, "")                   \
  FIELD(Tensor, beta, "")

#define ONEPASS_DELTA_RULE_FLAGS(FIELD) \
  FIELD(OptionalTensor, cu_seqlens, "") \
  FIELD(double, scale, "")              \
  FIELD(bool, qk_l2norm, "")            \
  FIELD(bool, g_has_channels, "")

#define ONEPASS_DELTA_RULE_OPTIONS(FIELD)  \
  ONEPASS_DELTA_RULE_INPUTS(FIELD)         \
  FIELD(OptionalTensor, initial_state, "") \
  ONEPASS_DELTA_RULE_FLAGS(FIELD)

#define ONEPASS_DELTA_RULE_FORWARD_OPTIONS(FIELD) \
  ONEPASS_DELTA_RULE_OPTIONS(FIELD)               \
  FIELD(bool, save_states, "")

// Those of the backward after dfinal_state.
#define ONEPASS_DELTA_RULE_BACKWARD_OPTIONS(FIELD) \
  FIELD(Tensor, q, "")                             \
  ONEPASS_DELTA_RULE_OPTIONS(FIELD)                \
  FIELD(Tensor, states, "")                        \
  FIELD(StaticInt, grad_mask, "")

// Those of the update after q.
#define ONEPASS_DELTA_RULE_UPDATE_OPTIONS(FIELD) \
  ONEPASS_DELTA_RULE_INPUTS(FIELD)               \
  ONEPASS_DELTA_RULE_FLAGS(FIELD)

ONEPASS_DEFINE_OPTIONS(DeltaRuleOptions, ONEPASS_DELTA_RULE_FORWARD_OPTIONS);
ONEPASS_DEFINE_OPTIONS(DeltaRuleBackwardOptions, ONEPASS_DELTA_RULE_BACKWARD_OPTIONS);
ONEPASS_DEFINE_OPTIONS(DeltaRuleUpdateOptions, ONEPASS_DELTA_RULE_UPDATE_OPTIONS);

constexpr const char* kOp = "delta_rule";
constexpr const char* kBackward = "delta_rule_backward";
constexpr const char* kUpdate = "delta_rule_update";
constexpr const char* kVerb = "updated";  // in place

DeltaRuleStride stride_of(const TensorInfo& info) {
  return {info.strides[0], info.strides[1], info.strides[2]};
}

// Sizes of the states.
Sizes of_state(const DeltaRule& args) {
  return {args.sequences, args.heads, args.key_dim, args.value_dim};
}
Sizes of_states(const DeltaRule& args) {
  return {args.batch, args.chunks, args.heads, args.key_dim, args.value_dim};
}

// Sets the fields that all operators share, except for the tensors' memory.
template <class Options>
void check_shared(const char* op, const TensorInfo& q, const CheckedAgainst& checked,
                  const Options& options, DeltaRule& args) {
  require(q.dims == 4 && q.sizes[3] > 0, op,
          ": q must have shape (batch, length, heads, head_dim), got ", q);
  args.batch = q.sizes[0];
  args.length = q.sizes[1];
  args.key_heads = q.sizes[2];
  args.key_dim = q.sizes[3];
  args.q_dtype = checked.first_dtype();
  args.scale = options.scale;
  args.qk_l2norm = options.qk_l2norm;
  args.g_has_channels = options.g_has_channels;
  args.k_dtype = checked.tensor("k", options.k, q);
  const TensorInfo v = input_of(op, "v", options.v);
  require(v.dims == 4 && v.sizes[3] > 0, op,
          ": v must have shape (batch, length, heads, head_dim), got ", v);
  args.heads = v.sizes[2];
  args.value_dim = v.sizes[3];
  const int64_t of_heads[] = {args.batch, args.length, args.heads, args.key_dim};
  const int64_t of_values[] = {args.batch, args.length, args.heads, args.value_dim};
  args.v_dtype = checked.tensor("v", v, of_values);
  require(args.key_heads == args.heads || (args.key_heads > 0 && args.heads % args.key_heads == 0),
          op, ": v must have a multiple of q's heads, ", args.key_heads, ", got ", args.heads);
  args.g_dtype = checked.tensor("g", options.g, Shape(of_heads, args.g_has_channels ? 4 : 3));
  args.beta_dtype = checked.tensor("beta", options.beta, Shape(of_heads, 3));
  check_sequences(op, checked, "q", options.cu_seqlens, kDeltaRuleTokens, args);
}

// The memory of a tensor of rows.
const void* rows_of(const Tensor& given, DeltaRuleStride& stride, Copies& copies) {
  const Tensor& tensor = with_dense_columns(given, copies);
  stride = stride_of(info_of(tensor));
  return tensor.const_data_ptr();
}

// Points the arguments that all operators read to memory.
template <class Options>
void put_inputs(const char* op, const Options& options, const Tensor& q, DeltaRule& args,
                Copies& copies) {
  args.q = rows_of(q, args.q_stride, copies);
  args.k = rows_of(options.k, args.k_stride, copies);
  args.v = rows_of(options.v, args.v_stride, copies);
  if (args.g_has_channels) {
    args.g = rows_of(options.g, args.g_stride, copies);
  } else {
    args.g = options.g.const_data_ptr();
    args.g_stride = stride_of(info_of(options.g));
  }
  args.beta = options.beta.const_data_ptr();
  args.beta_stride = stride_of(info_of(options.beta));
  put_sequences(op, "q", options.cu_seqlens, args, copies);
}

Dispatch describe(const char* op, const DeltaRule& args) {
  return described(op, args.batch, " x ", args.length, " x ", args.heads, " heads of ",
                   args.key_dim, " x ", args.value_dim,
                   when(args.heads > args.key_heads, ", key heads ", args.key_heads), ", ",
                   args.v_dtype, when(args.g_has_channels, ", a decay for each channel"),
                   when(args.cu_seqlens, ", packed"));
}

// Whether there is a token with a head.
bool is_empty(const DeltaRule& args) { return args.batch * args.length * args.heads == 0; }

template <class Args, class Options>
Checked<Args> check_call(const char* op, const Options& options, const Tensor& q) {
  Checked<Args> call{input_of(op, "q", q)};
  const CheckedAgainst checked(op, "q", call.first);
  check_shared(op, call.first, checked, options, call.args);
  call.args.initial_state_dtype = checked.tensor("initial_state", options.initial_state,
                                                 of_state(call.args), checked.accumulator());
  return call;
}

Checked<DeltaRuleForward> check_forward(const DeltaRuleOptions& options, const Tensor& q) {
  return check_call<DeltaRuleForward>(kOp, options, q);
}

std::tuple<Tensor, Tensor, Tensor> delta_rule_forward(const DeltaRuleOptions& options,
                                                      const Tensor& q) {
  auto [shape, args] = check_forward(options, q);
  const DType accumulator = accumulator_of(args.q_dtype);
  const Device device = shape.device;
  Tensor output = empty_if(true, info_of(options.v), args.v_dtype, device, args.output);
  Tensor final_state = empty_if(true, of_state(args), accumulator, device, args.final_state);
  Tensor states = empty_if(options.save_states, of_states(args), accumulator, device, args.states);
  if (args.states && options.cu_seqlens) set_to_zero(states);  // some belong to no chunk
  Copies copies;
  put_inputs(kOp, options, q, args, copies);
  if (is_empty(args)) {
    if (options.initial_state) {
      torch::stable::copy_(final_state, *options.initial_state);
    } else {
      set_to_zero(final_state);
    }
    return {output, final_state, states};
  }
  args.initial_state = dense_data_of(options.initial_state, copies);
  run_operator(backend().delta_rule_forward, args, device,
               [&args = args] { return describe(kOp, args); });
  return {output, final_state, states};
}

Checked<DeltaRuleBackward> check_backward(const DeltaRuleBackwardOptions& options,
                                          const OptionalTensor& doutput,
                                          const OptionalTensor& dfinal_state) {
  auto call = check_call<DeltaRuleBackward>(kBackward, options, options.q);
  const CheckedAgainst checked(kBackward, "q", call.first);
  const TensorInfo v = info_of(options.v);
  if (doutput) checked.tensor_of("doutput", *doutput, v, call.args.v_dtype, "v");
  if (dfinal_state) {
    checked.tensor_of("dfinal_state", *dfinal_state, of_state(call.args), checked.accumulator());
  }
  checked.tensor_of("states", options.states, of_states(call.args), checked.accumulator());
  return call;
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients delta_rule_backward(const DeltaRuleBackwardOptions& options,
                              const OptionalTensor& doutput, const OptionalTensor& dfinal_state) {
  auto [shape, args] = check_backward(options, doutput, dfinal_state);
  const Device device = shape.device;
  const auto like = [&](int place, const OptionalTensor& of, DType dtype, void*& data) {
    const bool wanted = of && (options.grad_mask >> place & 1);
    return wanted ? empty_if(true, info_of(*of), dtype, device, data) : empty_1d(0, dtype, device);
  };
  Gradients gradients = {
      like(0, options.q, args.q_dtype, args.dq),
      like(1, options.k, args.k_dtype, args.dk),
      like(2, options.v, args.v_dtype, args.dv),
      like(3, options.g, args.g_dtype, args.dg),
      like(4, options.beta, args.beta_dtype, args.dbeta),
      like(5, options.initial_state, args.initial_state_dtype, args.dinitial_state),
  };
  Copies copies;
  put_inputs(kBackward, options, options.q, args, copies);
  if (is_empty(args)) {
    std::apply([](auto&... each) { (set_to_zero(each), ...); }, gradients);
    Tensor& dstate = std::get<5>(gradients);
    if (args.dinitial_state && dfinal_state) torch::stable::copy_(dstate, *dfinal_state);
    return gradients;
  }
  args.initial_state = dense_data_of(options.initial_state, copies);
  args.states = dense_data_of(options.states, copies);
  if (doutput) args.doutput = rows_of(*doutput, args.doutput_stride, copies);
  args.dfinal_state = dense_data_of(dfinal_state, copies);
  run_operator(backend().delta_rule_backward, args, device,
               [&args = args] { return describe(kBackward, args); });
  return gradients;
}

// ---- few tokens, the state in place -------------------------------------------------------------

Checked<DeltaRuleUpdate> check_update(const DeltaRuleUpdateOptions& options, const Tensor& state,
                                      const Tensor& q) {
  Checked<DeltaRuleUpdate> call{input_of(kUpdate, "q", q)};
  DeltaRuleUpdate& args = call.args;
  const CheckedAgainst checked(kUpdate, "q", call.first);
  check_shared(kUpdate, call.first, checked, options, args);
  const TensorInfo info = input_of(kUpdate, "state", state);
  args.state_dtype = checked.tensor("state", info, of_state(args));
  args.state_sequence_stride = info.strides[0];
  args.state_head_stride = info.strides[1];
  args.state_row_stride = info.strides[2];
  require_dense_rows(kUpdate, "state", info, kVerb);
  require_own_places(kUpdate, "state", info, kVerb);
  const Place written{mutable_data_of(state.get()), info, size_of(args.state_dtype)};
  const auto read = [&](const char* name, const Tensor& given) {
    require_apart(kUpdate, name, place_of(given), "state", written, kVerb);
  };
  read("q", q);
  read("k", options.k);
  read("v", options.v);
  read("g", options.g);
  read("beta", options.beta);
  if (options.cu_seqlens) {
    const Tensor& given = *options.cu_seqlens;
    const Place offsets{given.const_data_ptr(), info_of(given), sizeof(int32_t)};
    require_apart(kUpdate, "cu_seqlens", offsets, "state", written, kVerb);
  }
  return call;
}

Tensor delta_rule_update(const DeltaRuleUpdateOptions& options, const Tensor& state,
                         const Tensor& q) {
  auto [shape, args] = check_update(options, state, q);
  Tensor output = empty_if(true, info_of(options.v), args.v_dtype, shape.device, args.output);
  Copies copies;
  put_inputs(kUpdate, options, q, args, copies);
  if (is_empty(args)) return output;
  args.state = mutable_data_of(state.get());
  run_operator(backend().delta_rule_update, args, shape.device,
               [&args = args] { return describe(kUpdate, args); });
  return output;
}

}  // namespace

OperatorList delta_rule_operators() {
  return {
      entry<&delta_rule_forward, &check_forward>(
          "delta_rule_forward", "Tensor q" ONEPASS_SCHEMA(ONEPASS_DELTA_RULE_FORWARD_OPTIONS),
          "(Tensor output, Tensor final_state, Tensor states)"),
      // grad_mask: 1 dq, 2 dk, 4 dv, 8 dg, 16 dbeta, 32 dinitial_state; those not wanted have
      // size 0.
      entry<&delta_rule_backward, &check_backward>(
          "delta_rule_backward",
          "Tensor? doutput, Tensor? dfinal_state" ONEPASS_SCHEMA(
              ONEPASS_DELTA_RULE_BACKWARD_OPTIONS),
          "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dinitial_state)"),
      entry<&delta_rule_update, &check_update>(
          "delta_rule_update",
          "Tensor(a!) state, Tensor q" ONEPASS_SCHEMA(ONEPASS_DELTA_RULE_UPDATE_OPTIONS), "Tensor"),
  };
}
#endif  // ONEPASS_CUDA

}  // namespace onepass
