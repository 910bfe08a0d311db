// Gated activations: output = activation(gate) * up, and their backward, which computes the
// activation again from gate instead of keeping it.
//
// Bytes per element: gate + up + output; backward doutput + gate + up + dgate + dup. Done when it
// runs at the speed of a copy of as many bytes. Tensors of one dtype are read directly; of several
// dtypes, a tile of each is widened into L1 first.
#include <initializer_list>

#include "core/visit.h"
#include "cpu/activation.h"
#include "cpu/kernels.h"
#include "cpu/lines.h"
#include "cpu/parallel.h"
#include "cpu/pieces.h"
#include "cpu/vec_two.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace {

// Elements of a row that a kernel call takes: three of them in float32 fit into L1.
constexpr int64_t kTile = 2048;

// Outputs from this size on are stored past the caches, which would read every line before it is
// written; inputs are prefetched then. The forward and a first reading of its output, two threads,
// AVX-512 with 2 MiB of L2, times faster than through the caches, inputs in the caches / not there:
// float32 2 MiB 0.70 / 1.11, 8 MiB 1.02 / 1.20, 16 MiB 1.19 / 1.23; bfloat16 0.80 / 1.07,
// 0.88 / 1.17, 1.03 / 1.21.
constexpr int64_t kStreamedBytes = int64_t{16} << 20;

// The rate of work instead of kBytes where an activation is computed: silu of float32 in L1 takes
// 0.25 ns with AVX-512.
constexpr int64_t kActivationBytes = 16;

// scalar: output[i] = activation(gate[i]) * up[i]; output may be gate
template <class T, Activation kActivation, bool kStream>
void gate_forward_kernel(const void* gate_, const void* up_, void* output_, int64_t count) {
  using A = Accumulator<T>;
  const T* gate = static_cast<const T*>(gate_);
  const T* up = static_cast<const T*>(up_);
  T* output = static_cast<T*>(output_);
  const auto product = [](Vec<A> g, Vec<A> u) __attribute__((always_inline)) {
    return Activated<kActivation, A>(g).value() * u;
  };
  for_each_two<A>(
      count,
      [&](int64_t i) {
        const Two<A> g = load_two<kStream, A>(gate + i), u = load_two<kStream, A>(up + i);
        store_two<kStream, A>(output + i, {product(g.first, u.first), product(g.second, u.second)});
      },
      [&](int64_t i, auto lanes) {
        store<A>(output + i, product(load<A>(gate + i, lanes), load<A>(up + i, lanes)), lanes);
      });
}

// scalar: dup[i] = doutput[i] * activation(gate[i])
//         dgate[i] = doutput[i] * up[i] * activation'(gate[i])
// Either may be null; dgate may be gate, and dup up.
template <class T, Activation kActivation, bool kStream>
void gate_backward_kernel(const void* doutput_, const void* gate_, const void* up_, void* dgate_,
                          void* dup_, int64_t count) {
  using A = Accumulator<T>;
  const T* doutput = static_cast<const T*>(doutput_);
  const T* gate = static_cast<const T*>(gate_);
  const T* up = static_cast<const T*>(up_);
  T* dgate = static_cast<T*>(dgate_);
  T* dup = static_cast<T*>(dup_);
  struct Gradients {
    Vec<A> gate, up;
  };
  const auto gradients = [](Vec<A> d, Vec<A> g, Vec<A> u) __attribute__((always_inline)) {
    const Activated<kActivation, A> at(g);
    return Gradients{at.times_slope(d * u), d * at.value()};
  };
  for_each_two<A>(
      count,
      [&](int64_t i) {
        const Two<A> d = load_two<kStream, A>(doutput + i), g = load_two<kStream, A>(gate + i);
        const Two<A> u = load_two<kStream, A>(up + i);
        const Gradients first = gradients(d.first, g.first, u.first);
        const Gradients second = gradients(d.second, g.second, u.second);
        if (dgate) store_two<kStream, A>(dgate + i, {first.gate, second.gate});
        if (dup) store_two<kStream, A>(dup + i, {first.up, second.up});
      },
      [&](int64_t i, auto lanes) {
        const Gradients of = gradients(load<A>(doutput + i, lanes), load<A>(gate + i, lanes),
                                       load<A>(up + i, lanes));
        if (dgate) store<A>(dgate + i, of.gate, lanes);
        if (dup) store<A>(dup + i, of.up, lanes);
      });
}

using ForwardKernel = void (*)(const void*, const void*, void*, int64_t);
using BackwardKernel = void (*)(const void*, const void*, const void*, void*, void*, int64_t);

// The kernel of an activation for tensors of one dtype.
template <class Kernel, bool kStream, class Args>
Kernel kernel_for(const Args& args, DType dtype) {
  Kernel kernel = nullptr;
  visit_activation(args.activation, [&]<Activation kActivation>() {
    visit_dtype(dtype, [&]<class T>() {
      constexpr bool kPast = kStream && sizeof(T) <= 4;  // not float64
      if constexpr (std::is_same_v<Kernel, ForwardKernel>) {
        kernel = gate_forward_kernel<T, kActivation, kPast>;
      } else {
        kernel = gate_backward_kernel<T, kActivation, kPast>;
      }
    });
  });
  return kernel;
}

// The kernels of a call whose tensors have one dtype: `streaming` for tiles that begin at a
// multiple of kVectorBytes, if the call streams at all.
template <class Kernel>
struct Kernels {
  Kernel plain;
  Kernel streaming;

  template <class Args>
  Kernels(const Args& args, DType dtype, bool streams)
      : plain(kernel_for<Kernel, false>(args, dtype)),
        streaming(streams ? kernel_for<Kernel, true>(args, dtype) : plain) {}

  Kernel of(std::initializer_list<const void*> outputs) const {
    uintptr_t addresses = 0;
    for (const void* output : outputs) addresses |= reinterpret_cast<uintptr_t>(output);
    return addresses % kVectorBytes == 0 ? streaming : plain;
  }
};

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

// Whether a call's stores go past the caches: `written` bytes per element.
template <class Args>
bool streams_of(const Args& args, int64_t written) {
  return kStreams && args.rows * args.cols * written >= kStreamedBytes;
}

// Calls body(the row's place, the row, first column, number of columns) for every tile.
template <class Args, class Body>
void for_each_tile(const Args& args, const Plan& plan, const Context& context, bool streams,
                   Body&& body) {
  const int64_t tiles_per_row = ceil_div(args.cols, kTile);
  for_each_piece(context, plan.threads, plan.splits, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t row = tile / tiles_per_row;
      const int64_t first = (tile - row * tiles_per_row) * kTile;
      body(row_index(args.row_size, row), row, first, std::min(kTile, args.cols - first));
    }
    if (streams) fence_streams();
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
  const bool streams = same && streams_of(args, size_of(args.output_dtype));
  const Kernels<ForwardKernel> kernels(args, same ? args.gate_dtype : DType::kFloat32, streams);
  for_each_tile(args, plan, context, streams,
                [&](const RowIndex& index, int64_t row, int64_t first, int64_t count) {
                  const int64_t gate = row_offset(index, args.gate_stride) + first;
                  const int64_t up = row_offset(index, args.up_stride) + first;
                  const int64_t output = row * args.cols + first;
                  if (same) {
                    void* to = at(args.output, args.output_dtype, output);
                    kernels.of({to})(at(args.gate, args.gate_dtype, gate),
                                     at(args.up, args.up_dtype, up), to, count);
                    return;
                  }
                  float gates[kTile], ups[kTile];
                  widen_line(args.gate, args.gate_dtype, gate, count, gates);
                  widen_line(args.up, args.up_dtype, up, count, ups);
                  kernels.plain(gates, ups, gates, count);
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
  const int64_t written =
      (args.dgate ? size_of(args.gate_dtype) : 0) + (args.dup ? size_of(args.up_dtype) : 0);
  const bool streams = same && streams_of(args, written);
  const Kernels<BackwardKernel> kernels(args, same ? args.gate_dtype : DType::kFloat32, streams);
  for_each_tile(args, plan, context, streams,
                [&](const RowIndex& index, int64_t row, int64_t first, int64_t count) {
                  const int64_t doutput = row_offset(index, args.doutput_stride) + first;
                  const int64_t gate = row_offset(index, args.gate_stride) + first;
                  const int64_t up = row_offset(index, args.up_stride) + first;
                  const int64_t gradient = row * args.gradient_stride + first;
                  if (same) {
                    void* dgate = at(args.dgate, args.gate_dtype, gradient);
                    void* dup = at(args.dup, args.up_dtype, gradient);
                    kernels.of({dgate, dup})(at(args.doutput, args.doutput_dtype, doutput),
                                             at(args.gate, args.gate_dtype, gate),
                                             at(args.up, args.up_dtype, up), dgate, dup, count);
                    return;
                  }
                  float doutputs[kTile], gates[kTile], ups[kTile];
                  widen_line(args.doutput, args.doutput_dtype, doutput, count, doutputs);
                  widen_line(args.gate, args.gate_dtype, gate, count, gates);
                  widen_line(args.up, args.up_dtype, up, count, ups);
                  kernels.plain(doutputs, gates, ups, gates, ups, count);
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
