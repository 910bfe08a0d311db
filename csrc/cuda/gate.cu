// Gated activations on CUDA: output = activation(gate) * up, and their backward, which recomputes
// the activation from gate instead of keeping it.
//
// One pass: each input is read once and each output written once, in packs of eight elements.
// Several short rows share a block, and a long row has several blocks. Bytes per element:
// gate + up + output; backward doutput + gate + up + dgate + dup. Done when it runs at the speed of
// a copy of as many bytes.
#include "cuda/activation.cuh"
#include "cuda/backend.h"
#include "cuda/launch.cuh"
#include "cuda/vec.cuh"
#include "ops/gate.h"

namespace onepass::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kIterationsPerBlock = 4;

// Elements of a pack that are computed at the same time. All eight would need too many registers.
template <class A>
constexpr int kSide = 16 / sizeof(A);

// Rotates a pack: the next kSide elements come to the front, and the results at the front go to
// the end.
template <class A>
__device__ __forceinline__ void turn_round(A (&pack)[kPack], const A (&computed)[kSide<A>]) {
  ONEPASS_UNROLL
  for (int e = 0; e < kPack - kSide<A>; ++e) pack[e] = pack[e + kSide<A>];
  ONEPASS_UNROLL
  for (int e = 0; e < kSide<A>; ++e) pack[kPack - kSide<A> + e] = computed[e];
}

// The rows and columns of a thread: one pack in each iteration, neighbouring threads beside each
// other.
struct Work {
  int threads_per_row;
  int64_t iterations;      // of a row
  int64_t blocks_per_row;  // 1 where rows share a block
};

Work work_of(int64_t cols) {
  const int64_t packs = (cols + kPack - 1) / kPack;
  int threads = 1;
  while (threads < kThreads && threads < packs) threads *= 2;
  const int64_t iterations = (packs + threads - 1) / threads;
  return {threads, iterations, (iterations + kIterationsPerBlock - 1) / kIterationsPerBlock};
}

// Calls body(row, its place, columns, pack) for each pack of a thread. With kAligned a pack is
// accessed in 16-byte pieces; an incomplete pack at a row's end is taken element by element.
template <bool kAligned, class Args, class Body>
__device__ __forceinline__ void for_each_pack(const Args& args, const Work& work, Body&& body) {
  const int rows_per_block = kThreads / work.threads_per_row;
  const int group = static_cast<int>(threadIdx.x) / work.threads_per_row;
  const int thread = static_cast<int>(threadIdx.x) % work.threads_per_row;
  const int64_t block = static_cast<int64_t>(blockIdx.x);
  const int64_t of_rows = block / work.blocks_per_row;
  const int64_t row = of_rows * rows_per_block + group;
  if (row >= args.rows) return;
  const RowIndex index = row_index(args.row_size, row);
  const int64_t first = (block - of_rows * work.blocks_per_row) * kIterationsPerBlock;
  const int64_t last =
      first + kIterationsPerBlock < work.iterations ? first + kIterationsPerBlock : work.iterations;
  for (int64_t iteration = first; iteration < last; ++iteration) {
    const bool is_whole = (iteration + 1) * kPack * work.threads_per_row <= args.cols;
    if (kAligned && (is_whole || args.cols % kPack == 0)) {
      body(row, index, StridedColumns<true>{work.threads_per_row, thread, args.cols}, iteration);
    } else {
      body(row, index, StridedColumns<false>{work.threads_per_row, thread, args.cols}, iteration);
    }
  }
}

// The values of a pack.
template <class Types, class Columns>
__device__ __forceinline__ void load_pack_of(const void* base, DType dtype, int64_t offset,
                                             const Columns& columns, int64_t pack,
                                             typename Types::A (&value)[kPack]) {
  const auto kept = Types::load(base, dtype, offset, columns, pack);
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) value[e] = Types::value(kept, e);
}

// The least number of resident blocks is stated as 1: with 2 or 3 the compiler would spill
// registers to make room.
template <class Types, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1)
    gate_forward_kernel(const GateForward args, const Work work) {
  using A = typename Types::A;
  for_each_pack<kAligned>(
      args, work, [&](int64_t row, const RowIndex& index, const auto& columns, int64_t pack) {
        A gate[kPack], up[kPack];
        load_pack_of<Types>(args.gate, args.gate_dtype, row_offset(index, args.gate_stride),
                            columns, pack, gate);
        load_pack_of<Types>(args.up, args.up_dtype, row_offset(index, args.up_stride), columns,
                            pack, up);
        // scalar: gate = activation(gate) * up
        visit_activation(args.activation, [&]<Activation kActivation>() {
          ONEPASS_ROLL
          for (int side = 0; side < kPack / kSide<A>; ++side) {
            A output[kSide<A>], done[kSide<A>] = {};
            ONEPASS_UNROLL
            for (int e = 0; e < kSide<A>; ++e) {
              output[e] = Activated<kActivation, A>(gate[e]).value() * up[e];
            }
            turn_round(gate, output);
            turn_round(up, done);
          }
        });
        Types::store(args.output, args.output_dtype, row * args.cols, columns, pack,
                     Types::round(gate, args.output_dtype));
      });
}

template <class Types, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1)
    gate_backward_kernel(const GateBackward args, const Work work) {
  using A = typename Types::A;
  for_each_pack<kAligned>(
      args, work, [&](int64_t row, const RowIndex& index, const auto& columns, int64_t pack) {
        A doutput[kPack], gate[kPack], up[kPack];
        load_pack_of<Types>(args.doutput, args.doutput_dtype,
                            row_offset(index, args.doutput_stride), columns, pack, doutput);
        load_pack_of<Types>(args.gate, args.gate_dtype, row_offset(index, args.gate_stride),
                            columns, pack, gate);
        load_pack_of<Types>(args.up, args.up_dtype, row_offset(index, args.up_stride), columns,
                            pack, up);
        // scalar: gate, up = doutput * up * activation'(gate), doutput * activation(gate)
        visit_activation(args.activation, [&]<Activation kActivation>() {
          ONEPASS_ROLL
          for (int side = 0; side < kPack / kSide<A>; ++side) {
            A dgate[kSide<A>], dup[kSide<A>], done[kSide<A>] = {};
            ONEPASS_UNROLL
            for (int e = 0; e < kSide<A>; ++e) {
              const Activated<kActivation, A> at(gate[e]);
              dgate[e] = at.times_slope(doutput[e] * up[e]);
              dup[e] = doutput[e] * at.value();
            }
            turn_round(gate, dgate);
            turn_round(up, dup);
            turn_round(doutput, done);
          }
        });
        const int64_t offset = row * args.gradient_stride;
        if (args.dgate) {
          Types::store(args.dgate, args.gate_dtype, offset, columns, pack,
                       Types::round(gate, args.gate_dtype));
        }
        if (args.dup) {
          Types::store(args.dup, args.up_dtype, offset, columns, pack,
                       Types::round(up, args.up_dtype));
        }
      });
}

// Whether all rows of a tensor begin at multiples of 16 bytes.
template <class Args>
bool is_aligned(const Args& args, const void* base, DType dtype, const RowStride& stride) {
  bool aligned = reinterpret_cast<uintptr_t>(base) % 16 == 0;
  for (int d = 0; d < kRowDims; ++d) {
    if (args.row_size[d] > 1) aligned = aligned && stride.stride[d] * size_of(dtype) % 16 == 0;
  }
  return aligned;
}

// The same for a tensor with one stride between its rows.
template <class Args>
bool is_aligned(const Args& args, const void* base, DType dtype, int64_t stride) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 &&
         (args.rows == 1 || stride * size_of(dtype) % 16 == 0);
}

bool is_aligned(const GateForward& args) {
  return is_aligned(args, args.gate, args.gate_dtype, args.gate_stride) &&
         is_aligned(args, args.up, args.up_dtype, args.up_stride) &&
         is_aligned(args, args.output, args.output_dtype, args.cols);
}

bool is_aligned(const GateBackward& args) {
  return is_aligned(args, args.doutput, args.doutput_dtype, args.doutput_stride) &&
         is_aligned(args, args.gate, args.gate_dtype, args.gate_stride) &&
         is_aligned(args, args.up, args.up_dtype, args.up_stride) &&
         is_aligned(args, args.dgate, args.gate_dtype, args.gradient_stride) &&
         is_aligned(args, args.dup, args.up_dtype, args.gradient_stride);
}

// The decisions of a plan.
struct GateLayout {
  Work work;
  bool aligned;
};

template <class Args>
Plan plan_of(const Args& args, const char* kernel_name, GateLayout& layout) {
  layout = {work_of(args.cols), is_aligned(args)};
  const Work& work = layout.work;
  const int64_t rows_per_block = kThreads / work.threads_per_row;
  return {.workspace_bytes = 0,
          .kernel_name = kernel_name,
          .rows_per_tile = rows_per_block,
          .splits = (args.rows + rows_per_block - 1) / rows_per_block * work.blocks_per_row,
          .reason = layout.aligned ? "16-byte accesses" : "unaligned: single elements"};
}

Plan plan_forward(const GateForward& args, const Machine&, GateLayout& layout) {
  return plan_of(args, "gate_forward_kernel", layout);
}

Plan plan_backward(const GateBackward& args, const Machine&, GateLayout& layout) {
  return plan_of(args, "gate_backward_kernel", layout);
}

// Calls start<Types, kAligned>().
template <class Args, class Start>
void visit_types(const Args& args, bool aligned, bool same, Start&& start) {
  visit_bool(aligned, [&]<bool kAligned>() {
    if (!same) return start.template operator()<Mixed, kAligned>();
    visit_dtype(args.gate_dtype,
                [&]<class T>() { start.template operator()<Same<T>, kAligned>(); });
  });
}

void run_forward(const GateForward& args, const Plan& plan, const GateLayout& layout, void*,
                 const Context& context) {
  const LaunchShape shape{.blocks = plan.splits, .threads = kThreads};
  const bool same = args.gate_dtype == args.up_dtype;
  visit_types(args, layout.aligned, same, [&]<class Types, bool kAligned>() {
    launch<gate_forward_kernel<Types, kAligned>>(shape, context.stream, args, layout.work);
  });
}

void run_backward(const GateBackward& args, const Plan& plan, const GateLayout& layout, void*,
                  const Context& context) {
  const LaunchShape shape{.blocks = plan.splits, .threads = kThreads};
  const bool same = args.gate_dtype == args.up_dtype && args.gate_dtype == args.doutput_dtype;
  visit_types(args, layout.aligned, same, [&]<class Types, bool kAligned>() {
    launch<gate_backward_kernel<Types, kAligned>>(shape, context.stream, args, layout.work);
  });
}

}  // namespace

Operator<GateForward> gate_forward() {
  return operator_of<GateForward, GateLayout, plan_forward, run_forward>();
}
Operator<GateBackward> gate_backward() {
  return operator_of<GateBackward, GateLayout, plan_backward, run_backward>();
}

}  // namespace onepass::cuda
