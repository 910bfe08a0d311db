// Gated activations: output = activation(gate) * up, and their backward, which computes the
// activation again from gate instead of keeping it.
//
// Bytes per element: gate + up + output; backward doutput + gate + up + dgate + dup. Done when it
// runs at the speed of a copy of as many bytes. Tensors of one dtype are read directly; of several
// dtypes, a tile of each is widened into L1 first.
#include "core/visit.h"
#include "cpu/activation.h"
#include "cpu/kernels.h"
#include "cpu/lines.h"
#include "cpu/parallel.h"
#include "cpu/pieces.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

// Elements of a row that a kernel call takes: three of them in float32 fit into L1.
constexpr int64_t kTile = 2048;

// The rate of work instead of kBytes where an activation is computed: silu of float32 in L1 takes
// 0.25 ns with AVX-512.
constexpr int64_t kActivationBytes = 16;

// scalar: output[i] = activation(gate[i]) * up[i]; output may be gate
template <class T, Activation kActivation>
void gate_forward_kernel(const void* gate_, const void* up_, void* output_, int64_t count) {
  using A = Accumulator<T>;
  const T* gate = static_cast<const T*>(gate_);
  const T* up = static_cast<const T*>(up_);
  T* output = static_cast<T*>(output_);
  for_each_vector<A>(0, count, [&](int64_t i, auto lanes) {
    const Activated<kActivation, A> at(load<A>(gate + i, lanes));
    store<A>(output + i, at.value() * load<A>(up + i, lanes), lanes);
  });
}

// scalar: dup[i] = doutput[i] * activation(gate[i])
//         dgate[i] = doutput[i] * up[i] * activation'(gate[i])
// Either may be null; dgate may be gate, and dup up.
template <class T, Activation kActivation>
void gate_backward_kernel(const void* doutput_, const void* gate_, const void* up_, void* dgate_,
                          void* dup_, int64_t count) {
  using A = Accumulator<T>;
  const T* doutput = static_cast<const T*>(doutput_);
  const T* gate = static_cast<const T*>(gate_);
  const T* up = static_cast<const T*>(up_);
  T* dgate = static_cast<T*>(dgate_);
  T* dup = static_cast<T*>(dup_);
  for_each_vector<A>(0, count, [&](int64_t i, auto lanes) {
    const Activated<kActivation, A> at(load<A>(gate + i, lanes));
    const Vec<A> upstream = load<A>(doutput + i, lanes);
    const Vec<A> factor = load<A>(up + i, lanes);
    if (dgate) store<A>(dgate + i, at.times_slope(upstream * factor), lanes);
    if (dup) store<A>(dup + i, upstream * at.value(), lanes);
  });
}

using ForwardKernel = void (*)(const void*, const void*, void*, int64_t);
using BackwardKernel = void (*)(const void*, const void*, const void*, void*, void*, int64_t);

// The kernel of an activation for tensors of one dtype.
template <class Kernel, class Args>
Kernel kernel_for(const Args& args, DType dtype) {
  Kernel kernel = nullptr;
  visit_activation(args.activation, [&]<Activation kActivation>() {
    visit_dtype(dtype, [&]<class T>() {
      if constexpr (std::is_same_v<Kernel, ForwardKernel>) {
        kernel = gate_forward_kernel<T, kActivation>;
      } else {
        kernel = gate_backward_kernel<T, kActivation>;
      }
    });
  });
  return kernel;
}

template <class Args>
Plan plan_tiles(const Args& args, const char* kernel_name, int64_t element_bytes,
                const Machine& machine) {
  const int64_t tiles = args.rows * ceil_div(args.cols, kTile);
  const int64_t bytes = args.rows * args.cols * element_bytes;
  return {.workspace_bytes = 0,
          .kernel_name = kernel_name,
          .rows_per_tile = 1,
          .splits = tiles,
          .reason = "one pass",
          .threads = threads_for(bytes / kActivationBytes, tiles, machine)};
}

// Calls body(the row's place, the row, first column, number of columns) for every tile.
template <class Args, class Body>
void for_each_tile(const Args& args, const Plan& plan, const Context& context, Body&& body) {
  const int64_t tiles_per_row = ceil_div(args.cols, kTile);
  for_each_piece(context, plan.threads, plan.splits, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t row = tile / tiles_per_row;
      const int64_t first = (tile - row * tiles_per_row) * kTile;
      body(row_index(args.row_size, row), row, first, std::min(kTile, args.cols - first));
    }
  });
}

const void* at(const void* base, DType dtype, int64_t element) {
  return static_cast<const char*>(base) + element * size_of(dtype);
}
void* at(void* base, DType dtype, int64_t element) {
  return base ? static_cast<char*>(base) + element * size_of(dtype) : nullptr;
}

Plan plan_forward(const GateForward& args, const Machine& machine) {
  const int64_t bytes =
      size_of(args.gate_dtype) + size_of(args.up_dtype) + size_of(args.output_dtype);
  return plan_tiles(args, "gate_forward_kernel", bytes, machine);
}

void run_forward(const GateForward& args, const Plan& plan, void*, const Context& context) {
  const bool same = args.gate_dtype == args.up_dtype;
  const auto kernel = kernel_for<ForwardKernel>(args, same ? args.gate_dtype : DType::kFloat32);
  for_each_tile(args, plan, context,
                [&](const RowIndex& index, int64_t row, int64_t first, int64_t count) {
                  const int64_t gate = row_offset(index, args.gate_stride) + first;
                  const int64_t up = row_offset(index, args.up_stride) + first;
                  const int64_t output = row * args.cols + first;
                  if (same) {
                    kernel(at(args.gate, args.gate_dtype, gate), at(args.up, args.up_dtype, up),
                           at(args.output, args.output_dtype, output), count);
                    return;
                  }
                  float gates[kTile], ups[kTile];
                  widen_line(args.gate, args.gate_dtype, gate, count, gates);
                  widen_line(args.up, args.up_dtype, up, count, ups);
                  kernel(gates, ups, gates, count);
                  round_line(gates, count, args.output, args.output_dtype, output);
                });
}

Plan plan_backward(const GateBackward& args, const Machine& machine) {
  const int64_t bytes =
      size_of(args.doutput_dtype) + 2 * size_of(args.gate_dtype) + 2 * size_of(args.up_dtype);
  return plan_tiles(args, "gate_backward_kernel", bytes, machine);
}

void run_backward(const GateBackward& args, const Plan& plan, void*, const Context& context) {
  const bool same = args.gate_dtype == args.up_dtype && args.gate_dtype == args.doutput_dtype;
  const auto kernel = kernel_for<BackwardKernel>(args, same ? args.gate_dtype : DType::kFloat32);
  for_each_tile(args, plan, context,
                [&](const RowIndex& index, int64_t row, int64_t first, int64_t count) {
                  const int64_t doutput = row_offset(index, args.doutput_stride) + first;
                  const int64_t gate = row_offset(index, args.gate_stride) + first;
                  const int64_t up = row_offset(index, args.up_stride) + first;
                  const int64_t gradient = row * args.gradient_stride + first;
                  if (same) {
                    kernel(at(args.doutput, args.doutput_dtype, doutput),
                           at(args.gate, args.gate_dtype, gate), at(args.up, args.up_dtype, up),
                           at(args.dgate, args.gate_dtype, gradient),
                           at(args.dup, args.up_dtype, gradient), count);
                    return;
                  }
                  float doutputs[kTile], gates[kTile], ups[kTile];
                  widen_line(args.doutput, args.doutput_dtype, doutput, count, doutputs);
                  widen_line(args.gate, args.gate_dtype, gate, count, gates);
                  widen_line(args.up, args.up_dtype, up, count, ups);
                  kernel(doutputs, gates, ups, gates, ups, count);
                  if (args.dgate) {
                    round_line(gates, count, args.dgate, args.gate_dtype, gradient);
                  }
                  if (args.dup) round_line(ups, count, args.dup, args.up_dtype, gradient);
                });
}

}  // namespace

Operator<GateForward> gate_forward() { return {plan_forward, run_forward}; }
Operator<GateBackward> gate_backward() { return {plan_backward, run_backward}; }

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
