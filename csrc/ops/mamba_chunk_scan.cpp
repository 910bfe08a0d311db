// The scan of Mamba 2: schemas, checks, allocation. On CUDA there is no kernel here: torch's
// operators are used, on chunks of tokens.
#include "ops/mamba_chunk_scan.h"

#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "ops/library.h"
#include "ops/rows.h"
#include "ops/runtime.h"
#include "ops/sequences.h"

namespace onepass {

#ifdef ONEPASS_CUDA
OperatorList mamba_chunk_scan_operators() { return {}; }
#else
namespace {

// The arguments that both operators have besides x.
#define ONEPASS_CHUNK_SCAN_OPTIONS(FIELD)   \
  FIELD(Tensor, dt, "")                     \
  FIELD(Tensor, A, "")                      \
  FIELD(Tensor, B, "")                      \
  FIELD(Tensor, C, "")                      \
  FIELD(OptionalTensor, D, "")              \
  FIELD(OptionalTensor, z, "")              \
  FIELD(OptionalTensor, dt_bias, "")        \
  FIELD(OptionalTensor, initial_states, "") \
  FIELD(OptionalTensor, cu_seqlens, "")     \
  FIELD(bool, dt_softplus, "")              \
  FIELD(double, dt_min, "")                 \
  FIELD(double, dt_max, "")

#define ONEPASS_CHUNK_SCAN_FORWARD_OPTIONS(FIELD) \
  ONEPASS_CHUNK_SCAN_OPTIONS(FIELD)               \
  FIELD(bool, save_states, "")

// Those of the backward after dfinal_states.
#define ONEPASS_CHUNK_SCAN_BACKWARD_OPTIONS(FIELD) \
  FIELD(Tensor, x, "")                             \
  ONEPASS_CHUNK_SCAN_OPTIONS(FIELD)                \
  FIELD(Tensor, states, "")                        \
  FIELD(StaticInt, grad_mask, "")

ONEPASS_DEFINE_OPTIONS(ChunkScanOptions, ONEPASS_CHUNK_SCAN_FORWARD_OPTIONS);
ONEPASS_DEFINE_OPTIONS(ChunkScanBackwardOptions, ONEPASS_CHUNK_SCAN_BACKWARD_OPTIONS);

constexpr const char* kOp = "mamba_chunk_scan";
constexpr const char* kBackward = "mamba_chunk_scan_backward";

ChunkScanStride stride_of(const TensorInfo& info) {
  return {info.strides[0], info.strides[1], info.strides[2]};
}

// D, a number for each head or for each of its columns.
void check_skip(const char* op, const CheckedAgainst& checked, const OptionalTensor& given,
                MambaChunkScan& args) {
  if (!given) return;
  const TensorInfo D = input_of(op, "D", *given);
  const int64_t of_columns[] = {args.heads, args.head_dim};
  args.D_has_columns = D.dims == 2;
  args.D_dtype = checked.tensor("D", D, Shape(of_columns, args.D_has_columns ? 2 : 1));
}

// Sets the fields that forward and backward share, except for the tensors' memory.
template <class Options>
void check_shared(const char* op, const TensorInfo& x, const CheckedAgainst& checked,
                  const Options& options, MambaChunkScan& args) {
  require(x.dims == 4 && x.sizes[3] > 0, op,
          ": x must have shape (batch, length, heads, head_dim), got ", x);
  args.batch = x.sizes[0];
  args.length = x.sizes[1];
  args.heads = x.sizes[2];
  args.head_dim = x.sizes[3];
  args.x_dtype = checked.first_dtype();
  args.dt_softplus = options.dt_softplus;
  args.dt_min = options.dt_min;
  args.dt_max = options.dt_max;
  require(args.dt_min <= args.dt_max, op, ": dt_min must be at most dt_max, ", args.dt_max,
          ", got ", args.dt_min);

  args.dt_dtype = checked.tensor("dt", options.dt, Shape(x.sizes, 3));
  const Shape of_heads(&args.heads, 1);
  args.A_dtype = checked.tensor("A", options.A, of_heads);
  const TensorInfo B = input_of(op, "B", options.B);
  require(B.dims == 4 && B.sizes[3] > 0, op,
          ": B must have shape (batch, length, groups, state), got ", B);
  args.groups = B.sizes[2];
  args.state = B.sizes[3];
  const int64_t of_group[] = {args.batch, args.length, args.groups, args.state};
  args.B_dtype = checked.tensor("B", B, of_group);
  require(args.groups > 0 && args.heads % args.groups == 0, op,
          ": B must have a number of groups that divides ", args.heads, " heads, got ",
          args.groups);
  args.C_dtype = checked.tensor("C", options.C, of_group);
  check_skip(op, checked, options.D, args);
  args.z_dtype = checked.tensor("z", options.z, x);
  args.dt_bias_dtype = checked.tensor("dt_bias", options.dt_bias, of_heads);
  check_sequences(op, checked, "x", options.cu_seqlens, kChunkScanTokens, args);
  const int64_t of_state[] = {args.sequences, args.heads, args.head_dim, args.state};
  args.initial_states_dtype =
      checked.tensor("initial_states", options.initial_states, of_state, checked.accumulator());
}

// The memory of a tensor of rows.
const void* rows_of(const Tensor& given, ChunkScanStride& stride, Copies& copies) {
  const Tensor& tensor = with_dense_columns(given, copies);
  stride = stride_of(info_of(tensor));
  return tensor.const_data_ptr();
}

// Points the arguments that both operators read to memory.
template <class Options>
void put_inputs(const char* op, const Options& options, const Tensor& x, MambaChunkScan& args,
                Copies& copies) {
  args.x = rows_of(x, args.x_stride, copies);
  args.dt = options.dt.const_data_ptr();
  args.dt_stride = stride_of(info_of(options.dt));
  args.A = dense_data_of(options.A, copies);
  args.B = rows_of(options.B, args.B_stride, copies);
  args.C = rows_of(options.C, args.C_stride, copies);
  args.D = dense_data_of(options.D, copies);
  if (options.z) args.z = rows_of(*options.z, args.z_stride, copies);
  args.dt_bias = dense_data_of(options.dt_bias, copies);
  args.initial_states = dense_data_of(options.initial_states, copies);
  put_sequences(op, "x", options.cu_seqlens, args, copies);
}

Dispatch describe(const char* op, const MambaChunkScan& args) {
  return described(op, args.batch, " x ", args.length, " x ", args.heads, " heads of ",
                   args.head_dim, ", state ", args.state,
                   when(args.groups > 1, ", groups ", args.groups), ", ", args.x_dtype,
                   when(args.z, ", gated"), when(args.cu_seqlens, ", packed"));
}

Checked<MambaChunkScanForward> check_forward(const ChunkScanOptions& options, const Tensor& x) {
  Checked<MambaChunkScanForward> call{input_of(kOp, "x", x)};
  check_shared(kOp, call.first, {kOp, "x", call.first}, options, call.args);
  return call;
}

// The states at the end of sequences without a token.
void put_first_states(const ChunkScanOptions& options, Tensor& final_states) {
  if (options.initial_states) {
    torch::stable::copy_(final_states, *options.initial_states);
  } else {
    set_to_zero(final_states);
  }
}

std::tuple<Tensor, Tensor, Tensor> mamba_chunk_scan_forward(const ChunkScanOptions& options,
                                                            const Tensor& x) {
  auto [shape, args] = check_forward(options, x);
  const DType accumulator = accumulator_of(args.x_dtype);
  Tensor output = empty_if(true, shape, args.x_dtype, shape.device, args.output);
  const int64_t of_state[] = {args.sequences, args.heads, args.head_dim, args.state};
  Tensor final_states = empty_if(true, of_state, accumulator, shape.device, args.final_states);
  const int64_t of_states[] = {args.batch, args.chunks, args.heads, args.state, args.head_dim};
  Tensor states = empty_if(options.save_states, of_states, accumulator, shape.device, args.states);
  if (args.states && options.cu_seqlens) set_to_zero(states);  // some belong to no chunk
  Copies copies;
  put_inputs(kOp, options, x, args, copies);
  if (Shape(shape).is_empty()) {
    put_first_states(options, final_states);
    return {output, final_states, states};
  }
  run_operator(backend().mamba_chunk_scan_forward, args, shape.device,
               [&args = args] { return describe(kOp, args); });
  return {output, final_states, states};
}

Checked<MambaChunkScanBackward> check_backward(const ChunkScanBackwardOptions& options,
                                               const OptionalTensor& doutput,
                                               const OptionalTensor& dfinal_states) {
  Checked<MambaChunkScanBackward> call{input_of(kBackward, "x", options.x)};
  MambaChunkScanBackward& args = call.args;
  const CheckedAgainst checked(kBackward, "x", call.first);
  check_shared(kBackward, call.first, checked, options, args);
  if (doutput) checked.tensor_of("doutput", *doutput, call.first, args.x_dtype, "x");
  const int64_t of_state[] = {args.sequences, args.heads, args.head_dim, args.state};
  if (dfinal_states) {
    checked.tensor_of("dfinal_states", *dfinal_states, of_state, checked.accumulator());
  }
  const int64_t of_states[] = {args.batch, args.chunks, args.heads, args.state, args.head_dim};
  checked.tensor_of("states", options.states, of_states, checked.accumulator());
  return call;
}

using Gradients =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients mamba_chunk_scan_backward(const ChunkScanBackwardOptions& options,
                                    const OptionalTensor& doutput,
                                    const OptionalTensor& dfinal_states) {
  auto [shape, args] = check_backward(options, doutput, dfinal_states);
  const Device device = shape.device;
  const auto like = [&](int place, const OptionalTensor& of, DType dtype, void*& data) {
    const bool wanted = of && (options.grad_mask >> place & 1);
    return wanted ? empty_if(true, info_of(*of), dtype, device, data) : empty_1d(0, dtype, device);
  };
  Gradients gradients = {
      like(0, options.x, args.x_dtype, args.dx),
      like(1, options.dt, args.dt_dtype, args.ddt),
      like(2, options.A, args.A_dtype, args.dA),
      like(3, options.B, args.B_dtype, args.dB),
      like(4, options.C, args.C_dtype, args.dC),
      like(5, options.D, args.D_dtype, args.dD),
      like(6, options.z, args.z_dtype, args.dz),
      like(7, options.dt_bias, args.dt_bias_dtype, args.ddt_bias),
      like(8, options.initial_states, args.initial_states_dtype, args.dinitial_states),
  };
  Copies copies;
  put_inputs(kBackward, options, options.x, args, copies);
  if (Shape(shape).is_empty()) {
    std::apply([](auto&... each) { (set_to_zero(each), ...); }, gradients);
    Tensor& dstates = std::get<8>(gradients);
    if (args.dinitial_states && dfinal_states) torch::stable::copy_(dstates, *dfinal_states);
    return gradients;
  }
  args.states = dense_data_of(options.states, copies);
  if (doutput) args.doutput = rows_of(*doutput, args.doutput_stride, copies);
  args.dfinal_states = dense_data_of(dfinal_states, copies);
  run_operator(backend().mamba_chunk_scan_backward, args, device,
               [&args = args] { return describe(kBackward, args); });
  return gradients;
}

}  // namespace

OperatorList mamba_chunk_scan_operators() {
  return {
      entry<&mamba_chunk_scan_forward, &check_forward>(
          "mamba_chunk_scan_forward", "Tensor x" ONEPASS_SCHEMA(ONEPASS_CHUNK_SCAN_FORWARD_OPTIONS),
          "(Tensor output, Tensor final_states, Tensor states)"),
      // grad_mask: 1 dx, 2 ddt, 4 dA, 8 dB, 16 dC, 32 dD, 64 dz, 128 ddt_bias,
      // 256 dinitial_states; those not wanted have size 0.
      entry<&mamba_chunk_scan_backward, &check_backward>(
          "mamba_chunk_scan_backward",
          "Tensor? doutput, Tensor? dfinal_states" ONEPASS_SCHEMA(
              ONEPASS_CHUNK_SCAN_BACKWARD_OPTIONS),
          "(Tensor dx, Tensor ddt, Tensor dA, Tensor dB, Tensor dC, Tensor dD, Tensor dz, "
          "Tensor ddt_bias, Tensor dinitial_states)"),
  };
}
#endif  // ONEPASS_CUDA

}  // namespace onepass
