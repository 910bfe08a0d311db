// Gated activations: schemas, checks, allocation.
#include "ops/gate.h"

#include <tuple>

#include "ops/library.h"
#include "ops/rows.h"
#include "ops/runtime.h"

namespace onepass {
namespace {

// The arguments of gate_forward besides gate. Without up, gate holds both, one after the other in
// the last dimension: the gate first, or last if gate_last.
#define ONEPASS_GATE_OPTIONS(FIELD)                      \
  FIELD(OptionalTensor, up, "")                          \
  FIELD(StaticInt, activation_kind, "") /* Activation */ \
  FIELD(bool, gate_last, "")

// The arguments of gate_backward besides doutput.
#define ONEPASS_GATE_BACKWARD_OPTIONS(FIELD) \
  FIELD(Tensor, gate, "")                    \
  ONEPASS_GATE_OPTIONS(FIELD)                \
  FIELD(StaticInt, grad_mask, "")

ONEPASS_DEFINE_OPTIONS(GateOptions, ONEPASS_GATE_OPTIONS);
ONEPASS_DEFINE_OPTIONS(GateBackwardOptions, ONEPASS_GATE_BACKWARD_OPTIONS);

// Bits of grad_mask, where up is given.
constexpr int64_t kWantGate = 1;
constexpr int64_t kWantUp = 2;

// The rule of torch's own products.
DType promoted(DType one, DType other) { return one == other ? one : DType::kFloat32; }

// The factors, read in place, and the shape of their product.
struct Factors {
  RowTensor gate;  // both, where up is none
  RowTensor up{};
  Sizes sizes{};
  DType gate_dtype{};
  DType up_dtype{};
  Activation activation{};
  bool gate_last = false;

  bool are_halves() const { return !up.tensor; }
  int64_t row_dims() const { return sizes.empty() ? 0 : 1; }
  int64_t cols() const { return sizes.empty() ? 1 : sizes.back(); }
  int64_t rows() const { return Shape(sizes.data(), sizes.size() - row_dims()).numel(); }

  // Where gate and up begin in tensors of the layout of gate and up.
  template <class Byte>
  std::pair<Byte*, Byte*> beginnings(Byte* of_gate, Byte* of_up) const {
    if (!are_halves()) return {of_gate, of_up};
    Byte* second = of_gate + cols() * size_of(gate_dtype);
    return gate_last ? std::pair{second, of_gate} : std::pair{of_gate, second};
  }

  template <class Args>
  void put_into(Args& args) const {
    std::tie(args.gate, args.up) =
        beginnings(static_cast<const char*>(gate.data()), static_cast<const char*>(up.data()));
    args.gate_stride = gate.stride;
    args.up_stride = are_halves() ? gate.stride : up.stride;
    args.gate_dtype = gate_dtype;
    args.up_dtype = up_dtype;
    args.activation = activation;
  }
};

template <class Options>
Factors check_factors(const char* op, const Tensor& gate, const Options& options) {
  Factors call{.gate = row_tensor(op, "gate", gate), .gate_last = options.gate_last};
  const TensorInfo& shape = call.gate.info;
  const CheckedAgainst checked(op, "gate", shape);
  call.gate_dtype = call.up_dtype = checked.first_dtype();
  call.sizes.assign(shape.sizes, shape.sizes + shape.dims);
  require_choice(op, "activation_kind", options.activation_kind, 1, kActivations - 1);
  call.activation = static_cast<Activation>(options.activation_kind);
  if (options.up) {
    require(!options.gate_last, op, ": gate_last must be False where up is given, got True");
    call.up = row_tensor(op, "up", options.up);
    call.up_dtype = checked.tensor("up", call.up.info, shape);
  } else {
    require(shape.dims > 0 && shape.sizes[shape.dims - 1] % 2 == 0, op,
            ": gate must have a last dimension of two halves where up is not given, got ", shape);
    call.sizes.back() /= 2;
  }
  return call;
}

// Rows that follow each other in every tensor are one long row.
template <class Args, class... Strides>
void set_rows(Args& args, const Factors& call, bool contiguous, const Strides&... strides) {
  args.rows = call.rows();
  args.cols = call.cols();
  contiguous = contiguous && args.row_size[0] == 1 && args.row_size[1] == 1;
  if (contiguous && ((strides.stride[kRowDims - 1] == args.cols || args.rows == 1) && ...)) {
    args.cols *= args.rows;
    args.rows = args.row_size[kRowDims - 1] = 1;
  }
}

template <class Args>
Dispatch describe(const char* op, const Factors& call, const Args& args) {
  return described(op, name_of(call.activation), " of ", call.rows(), " x ", call.cols(),
                   when(call.are_halves(), ", halves of one tensor"),
                   when(args.rows == 1, ", contiguous"), ", gate ", call.gate_dtype, ", up ",
                   call.up_dtype);
}

constexpr const char* kOp = "gated_activation";
constexpr const char* kBackward = "gated_activation_backward";

Factors check_forward(const GateOptions& options, const Tensor& gate) {
  return check_factors(kOp, gate, options);
}

Tensor gate_forward(const GateOptions& options, const Tensor& gate) {
  Factors call = check_forward(options, gate);
  const Device device = call.gate.info.device;
  GateForward args{};
  args.output_dtype = promoted(call.gate_dtype, call.up_dtype);
  Tensor output = empty(call.sizes, args.output_dtype, device);
  address_rows({&call.gate, &call.up}, call.row_dims(), args.row_size);
  call.put_into(args);
  args.output = output.mutable_data_ptr();
  set_rows(args, call, true, args.gate_stride, args.up_stride);
  if (args.rows > 0 && args.cols > 0) {
    run_operator(backend().gate_forward, args, device, [&] { return describe(kOp, call, args); });
  }
  return output;
}

struct CheckedBackward {
  Factors factors;
  RowTensor doutput;
  DType doutput_dtype{};
};

CheckedBackward check_backward(const GateBackwardOptions& options, const Tensor& doutput) {
  CheckedBackward call{.factors = check_factors(kBackward, options.gate, options),
                       .doutput = row_tensor(kBackward, "doutput", doutput)};
  const CheckedAgainst checked(kBackward, "gate", call.factors.gate.info);
  call.doutput_dtype = checked.tensor("doutput", call.doutput.info, call.factors.sizes);
  return call;
}

std::tuple<Tensor, Tensor> gate_backward(const GateBackwardOptions& options,
                                         const Tensor& doutput) {
  CheckedBackward checked = check_backward(options, doutput);
  Factors& call = checked.factors;
  const TensorInfo shape = call.gate.info;
  const bool halves = call.are_halves();
  const bool want_gate = halves || (options.grad_mask & kWantGate);
  const bool want_up = !halves && (options.grad_mask & kWantUp);
  void* of_gate = nullptr;
  void* of_up = nullptr;
  Tensor dgate = empty_if(want_gate, shape, call.gate_dtype, shape.device, of_gate);
  Tensor dup = empty_if(want_up, shape, call.up_dtype, shape.device, of_up);
  GateBackward args{};
  address_rows({&call.gate, &call.up, &checked.doutput}, call.row_dims(), args.row_size);
  call.put_into(args);
  checked.doutput.put_into(args.doutput, args.doutput_stride);
  args.doutput_dtype = checked.doutput_dtype;
  std::tie(args.dgate, args.dup) =
      call.beginnings(static_cast<char*>(of_gate), static_cast<char*>(of_up));
  args.gradient_stride = halves ? 2 * call.cols() : call.cols();
  set_rows(args, call, !halves, args.gate_stride, args.up_stride, args.doutput_stride);
  if (args.rows > 0 && args.cols > 0) {
    run_operator(backend().gate_backward, args, shape.device,
                 [&] { return describe(kBackward, call, args); });
  }
  return {dgate, dup};
}

}  // namespace

OperatorList gate_operators() {
  return {
      // output = activation(gate) * up, in the dtype that torch promotes both to.
      entry<&gate_forward, &check_forward>(
          "gate_forward", "Tensor gate" ONEPASS_SCHEMA(ONEPASS_GATE_OPTIONS), "Tensor"),
      // Without up, dgate has both halves. grad_mask: 1 dgate, 2 dup.
      entry<&gate_backward, &check_backward>(
          "gate_backward", "Tensor doutput" ONEPASS_SCHEMA(ONEPASS_GATE_BACKWARD_OPTIONS),
          "(Tensor dgate, Tensor dup)"),
  };
}

}  // namespace onepass
