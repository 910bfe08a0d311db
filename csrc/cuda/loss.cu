// Cross entropy on CUDA: the loss of rows of logits, and its gradient.
//
// A row of up to 1,024 columns has a warp, a longer one has a block. The forward reads a row once:
// each thread keeps a running maximum and the sum of exponentials relative to it, and these are
// then merged. The backward reads the row and writes the gradient, possibly over the row. Rows with
// an odd number of columns begin at any address. So packs of eight are aligned to 16 bytes of
// memory, and the first and last pack of a row may be incomplete: which elements a thread adds
// depends on the address of the row. Bytes per element: input; backward input + dinput; with class
// weights and label smoothing, the weights as well. Done when the forward runs at the speed of a
// read, the backward at that of a copy.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "cuda/backend.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"
#include "ops/loss.h"

namespace onepass::cuda {
namespace {

constexpr int kMaxThreads = kMaxWarps * kLanes;
constexpr int kWarpsPerBlock = 4;  // of rows that have one warp each
constexpr int64_t kWarpColumns = 1024;

template <class A>
__device__ __forceinline__ A lowest() {
  return -std::numeric_limits<A>::infinity();
}

__device__ __forceinline__ float exponential(float x) {
  return exp2_approximate(x * 1.44269504088896341f);
}
__device__ __forceinline__ double exponential(double x) { return std::exp(x); }

// How the threads of a block share rows.
struct Geometry {
  int threads_per_row;
  int threads;

  int64_t blocks(int64_t rows) const {
    const int64_t rows_per_block = threads / threads_per_row;
    return (rows + rows_per_block - 1) / rows_per_block;
  }
};

Geometry geometry_of(int64_t cols) {
  if (cols <= kWarpColumns) return {kLanes, kLanes * kWarpsPerBlock};
  const int64_t packs = cols / kPack + 2;
  const int64_t warps = std::min<int64_t>((packs + kLanes - 1) / kLanes, kMaxWarps);
  return {static_cast<int>(warps) * kLanes, static_cast<int>(warps) * kLanes};
}

__device__ __forceinline__ void meet(int threads_per_row) {
  if (threads_per_row == kLanes) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// A thread's place.
struct Place {
  int threads_per_row;
  int group;  // of the rows of a block
  int thread;
  int64_t row;

  __device__ __forceinline__ explicit Place(int threads)
      : threads_per_row(threads),
        group(static_cast<int>(threadIdx.x) / threads_per_row),
        thread(static_cast<int>(threadIdx.x) % threads_per_row),
        row(static_cast<int64_t>(blockIdx.x) * (blockDim.x / threads_per_row) + group) {}
};

// Columns for load_pack and store_pack: neighbouring elements, some of them outside the row.
struct CutColumns {
  static constexpr bool kAligned = false;
  int64_t first;
  int64_t cols;

  __device__ __forceinline__ int64_t of(auto, int e) const { return first + e; }
  __device__ __forceinline__ bool has(auto, int e) const {
    return first + e >= 0 && first + e < cols;
  }
  template <class T>
  __device__ __forceinline__ T* in(T* row, auto, int e) const {
    return row + first + e;
  }
};

// A row as packs. With kAligned they begin at multiples of 16 bytes of memory, so the first one may
// lack elements at its front. Rows of a second tensor must then begin at the same distance from
// such a multiple.
template <class T, bool kAligned>
class Packs {
 public:
  __device__ __forceinline__ Packs(const T* row, int64_t cols) : cols_(cols) {
    if constexpr (kAligned) {
      lacking_ = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
      end_ = (cols + lacking_) / kPack;
    }
  }

  __device__ __forceinline__ int64_t column(int64_t pack, int e) const {
    return pack * kPack - lacking_ + e;
  }
  __device__ __forceinline__ bool has(int64_t pack, int e) const { return cut(pack).has(pack, e); }

  // Calls take(pack, elements, whether all of them are in the row) with a thread's packs, in order.
  // The next whole pack is loaded before the current one is used.
  template <class Take>
  __device__ __forceinline__ void for_each(const T* row, const Place& at, Take take) const {
    for (int64_t pack = at.thread; column(pack, 0) < cols_; pack += at.threads_per_row) {
      if (!is_whole(pack)) {
        take(pack, load_pack(row, cut(pack), pack), std::false_type{});
        continue;
      }
      if constexpr (kAligned) {
        Raw<T> next = load_whole(row, pack);
        for (;; pack += at.threads_per_row) {
          const Raw<T> raw = next;
          const bool is_last = pack + at.threads_per_row >= end_;
          if (!is_last) next = load_whole(row, pack + at.threads_per_row);
          take(pack, raw, std::true_type{});
          if (is_last) break;
        }
      }
    }
  }

  // Writes zeros to a row, which is not read.
  __device__ __forceinline__ void clear(T* row, const Place& at) const {
    for (int64_t pack = at.thread; column(pack, 0) < cols_; pack += at.threads_per_row) {
      if (is_whole(pack)) {
        store(row, pack, Raw<T>{}, std::true_type{});
      } else {
        store(row, pack, Raw<T>{}, std::false_type{});
      }
    }
  }

  template <bool kWhole>
  __device__ __forceinline__ void store(T* row, int64_t pack, const Raw<T>& raw,
                                        std::bool_constant<kWhole>) const {
    if constexpr (kWhole) {
      store_pack(row + column(pack, 0), whole(), 0, raw);
    } else {
      store_pack(row, cut(pack), pack, raw);
    }
  }

 private:
  static __device__ __forceinline__ StridedColumns<true> whole() { return {1, 0, kPack}; }
  __device__ __forceinline__ bool is_whole(int64_t pack) const {
    return kAligned && pack < end_ && column(pack, 0) >= 0;
  }
  __device__ __forceinline__ CutColumns cut(int64_t pack) const { return {column(pack, 0), cols_}; }
  __device__ __forceinline__ Raw<T> load_whole(const T* row, int64_t pack) const {
    return load_pack(row + column(pack, 0), whole(), 0);
  }

  int64_t cols_;
  int lacking_ = 0;
  int64_t end_ = 0;  // of the packs that lack nothing
};

// A logit after softcap, and its derivative by the logit in memory.
template <class A>
struct Logit {
  A value;
  A slope;
};

template <class A>
__device__ __forceinline__ Logit<A> logit_of(A x, A softcap) {
  if (softcap == A(0)) return {x, A(1)};
  const A tangent = std::tanh(x / softcap);
  return {softcap * tangent, multiply_add(-tangent, tangent, A(1))};
}

// The factor that rescales sums relative to `maximum` to a larger maximum.
template <class A>
__device__ __forceinline__ A shrunk(A maximum, A larger) {
  return maximum == larger ? A(1) : exponential(maximum - larger);
}

template <class A>
__device__ __forceinline__ void merge(LossSums<A>& into, const LossSums<A>& other) {
  const A larger = other.maximum > into.maximum ? other.maximum : into.maximum;
  into.exponentials = into.exponentials * shrunk(into.maximum, larger) +
                      other.exponentials * shrunk(other.maximum, larger);
  into.logits = logits_below(into, larger) + logits_below(other, larger);
  into.weights += other.weights;
  into.maximum = larger;
}

// Whether a call asks for nothing that costs every element: softcap, or the logits of all classes.
__device__ __forceinline__ bool is_plain(const LossCall& args) {
  return args.softcap == 0.0 && args.label_smoothing == 0.0;
}

template <bool kPlain, class T, bool kWhole>
__device__ __forceinline__ void add_pack(const LossForward& args, const Packs<T, true>& packs,
                                         int64_t pack, const Raw<T>& raw,
                                         std::bool_constant<kWhole>,
                                         LossSums<Accumulator<T>>& sums) {
  using A = Accumulator<T>;
  A x[kPack];
  A larger = sums.maximum;
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    x[e] = element<T>(raw, e);
    if constexpr (!kPlain) x[e] = logit_of(x[e], static_cast<A>(args.softcap)).value;
    if constexpr (!kWhole) x[e] = packs.has(pack, e) ? x[e] : lowest<A>();
    larger = std::fmax(larger, x[e]);  // NaN is left to the exponentials
  }
  sums.exponentials *= shrunk(sums.maximum, larger);
  if constexpr (!kPlain) sums.logits = logits_below(sums, larger);
  sums.maximum = larger;
  // If all logits so far are -Inf, 0 is added.
  const A above = larger == lowest<A>() ? A(0) : larger;
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) sums.exponentials += exponential(x[e] - above);
  if (kPlain || args.label_smoothing == 0.0) return;
  const A* weight = static_cast<const A*>(args.weight);
  ONEPASS_UNROLL
  for (int e = 0; e < kPack; ++e) {
    if (!kWhole && !packs.has(pack, e)) continue;
    const A of_class = weight ? load_global(weight + packs.column(pack, e)) : A(1);
    sums.logits += of_class * (x[e] - above);
    sums.weights += of_class;
  }
}

template <bool kPlain, class T>
__device__ __forceinline__ LossSums<Accumulator<T>> sums_of(const LossForward& args,
                                                            const Place& at) {
  LossSums<Accumulator<T>> sums{lowest<Accumulator<T>>(), 0, 0, 0};
  const T* row = static_cast<const T*>(args.input) + at.row * args.input_stride;
  const Packs<T, true> packs(row, args.cols);
  packs.for_each(row, at, [&](int64_t pack, const Raw<T>& raw, auto whole) {
    add_pack<kPlain>(args, packs, pack, raw, whole, sums);
  });
  return sums;
}

// For thread 0 of a row: writes the loss and the statistics of the row.
template <class T>
__device__ __forceinline__ void finish_row(const LossForward& args, int64_t row, int64_t target,
                                           const LossSums<Accumulator<T>>& sums, void* workspace) {
  using A = Accumulator<T>;
  constexpr A kNan = std::numeric_limits<A>::quiet_NaN();
  LossOfRow<A> of_row{};
  A maximum = 0, weight = 0;
  if (target != args.ignore_index && (target < 0 || target >= args.cols)) {
    of_row = {kNan, kNan, kNan};
    weight = kNan;
  } else if (target != args.ignore_index) {
    // The logit of the target is read a second time.
    const T* x = static_cast<const T*>(args.input) + row * args.input_stride + target;
    const Raw<T> raw = load_pack(x, CutColumns{0, 1}, 0);
    const Logit<A> logit = logit_of(element<T>(raw, 0), static_cast<A>(args.softcap));
    weight = args.weight ? load_global(static_cast<const A*>(args.weight) + target) : A(1);
    maximum = sums.maximum;
    of_row = loss_of<A>(args, sums,
                        {logit.value, logit.slope, exponential(logit.value - maximum), weight});
  }
  store_global(static_cast<A*>(args.maximum) + row, maximum);
  store_global(static_cast<A*>(args.factor) + row, of_row.factor);
  store_global(static_cast<A*>(args.of_target) + row, of_row.of_target);
  store_global(static_cast<A*>(workspace) + row, of_row.loss);
  store_global(static_cast<A*>(workspace) + args.rows + row, weight);
}

__device__ __forceinline__ int64_t target_of(const LossCall& args, int64_t row) {
  return load_global(args.target + row * args.target_stride);
}

template <class T>
__global__ void __launch_bounds__(kMaxThreads, 1)
    loss_forward_kernel(const LossForward args, const int threads_per_row, void* workspace) {
  using A = Accumulator<T>;
  SharedMemory shared;
  int64_t* targets = shared.take<int64_t>(kWarpsPerBlock);
  LossSums<A>* of_warps = shared.take<LossSums<A>>(kMaxWarps);
  const Place at(threads_per_row);
  if (at.row >= args.rows) return;  // whole warps, which meet at no other barrier
  if (at.thread == 0) targets[at.group] = target_of(args, at.row);
  meet(threads_per_row);
  const int64_t target = targets[at.group];
  LossSums<A> sums{lowest<A>(), 0, 0, 0};
  if (target != args.ignore_index) {
    sums = is_plain(args) ? sums_of<true, T>(args, at) : sums_of<false, T>(args, at);
    ONEPASS_UNROLL
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
      merge(sums, {__shfl_xor_sync(kAllLanes, sums.maximum, lanes),
                   __shfl_xor_sync(kAllLanes, sums.exponentials, lanes),
                   __shfl_xor_sync(kAllLanes, sums.logits, lanes),
                   __shfl_xor_sync(kAllLanes, sums.weights, lanes)});
    }
    if (threads_per_row > kLanes) {
      if (at.thread % kLanes == 0) of_warps[at.thread / kLanes] = sums;
      __syncthreads();
      if (at.thread == 0) {
        for (int warp = 1; warp < threads_per_row / kLanes; ++warp) merge(sums, of_warps[warp]);
      }
    }
  }
  if (at.thread == 0) finish_row<T>(args, at.row, target, sums, workspace);
}

// Writes the losses of the rows, or their sum or mean, by one block.
template <class T>
__global__ void __launch_bounds__(kMaxThreads, 1)
    loss_reduce_kernel(const LossForward args, const void* workspace) {
  using A = Accumulator<T>;
  const A* losses = static_cast<const A*>(workspace);
  const auto put = [&](double loss, int64_t place) {
    if constexpr (sizeof(A) == 8) {
      store_global(static_cast<double*>(args.loss) + place, loss);
    } else {
      visit_dtype_up_to_float32(args.loss_dtype, [&]<class L>() {
        store_global(static_cast<L*>(args.loss) + place, onepass::narrow<L>(static_cast<A>(loss)));
      });
    }
  };
  SharedMemory shared;
  double* scratch = shared.take<double>(kReduceScratch<2>);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kMaxThreads + threadIdx.x;
  if (args.reduction == Reduction::kNone) {
    if (first < args.rows) put(load_global(losses + first), first);
    return;
  }
  double sums[2] = {};  // losses, weights
  for (int64_t row = first; row < args.rows; row += kMaxThreads) {
    sums[0] += load_global(losses + row);
    if (args.total_weight) sums[1] += load_global(losses + args.rows + row);
  }
  reduce_row(sums, kMaxThreads, scratch);
  if (threadIdx.x != 0) return;
  put(args.total_weight ? sums[0] / sums[1] : sums[0], 0);
  if (args.total_weight) store_global(static_cast<A*>(args.total_weight), static_cast<A>(sums[1]));
}

// The numbers that all threads of a row need.
template <class A>
struct RowHead {
  int64_t target;  // -1: the row is ignored
  A maximum;
  LossScales<A> scales;
};

template <class T>
__device__ __forceinline__ RowHead<Accumulator<T>> head_of(const LossBackward& args, int64_t row) {
  using A = Accumulator<T>;
  const int64_t target = target_of(args, row);
  if (target == args.ignore_index) return {-1, A(0), {}};
  const CutColumns one{0, 1};
  A gradient;
  if constexpr (sizeof(A) == 8) {
    gradient = load_global(static_cast<const double*>(args.dloss) + row * args.dloss_stride);
  } else {
    gradient =
        Mixed::value(Mixed::load(args.dloss, args.dloss_dtype, row * args.dloss_stride, one, 0), 0);
  }
  if (args.total_weight) gradient /= load_global(static_cast<const A*>(args.total_weight));
  const bool is_class = target >= 0 && target < args.cols;  // else its factor is NaN
  const A factor = load_global(static_cast<const A*>(args.factor) + row);
  const A of_target = load_global(static_cast<const A*>(args.of_target) + row);
  return {is_class ? target : args.cols, load_global(static_cast<const A*>(args.maximum) + row),
          loss_scales(args, gradient, factor, of_target)};
}

template <bool kPlain, class T, bool kAligned>
__device__ __forceinline__ void write_gradients(const LossBackward& args, const Place& at,
                                                const Packs<T, kAligned>& packs, const T* row,
                                                T* drow, const RowHead<Accumulator<T>>& head) {
  using A = Accumulator<T>;
  const A* weight = static_cast<const A*>(args.weight);
  packs.for_each(row, at, [&](int64_t pack, const Raw<T>& raw, auto whole) {
    A gradient[kPack];
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      const A x = element<T>(raw, e);
      if constexpr (kPlain) {
        gradient[e] = head.scales.of_softmax * exponential(x - head.maximum);
      } else {
        const Logit<A> logit = logit_of(x, static_cast<A>(args.softcap));
        A others = 0;
        if (args.label_smoothing != 0.0 && (whole || packs.has(pack, e))) {
          others =
              head.scales.of_class * (weight ? load_global(weight + packs.column(pack, e)) : A(1));
        }
        const A of_softmax = head.scales.of_softmax * exponential(logit.value - head.maximum);
        gradient[e] = (of_softmax - others) * logit.slope;
      }
    }
    const int64_t apart = head.target - packs.column(pack, 0);
    if (apart >= 0 && apart < kPack) {
      const int target = static_cast<int>(apart);
      ONEPASS_UNROLL
      for (int e = 0; e < kPack; ++e) {
        if (e == target) gradient[e] = head.scales.of_target;
      }
    }
    packs.store(drow, pack, narrow<T>(gradient), whole);
  });
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads, 1)
    loss_backward_kernel(const LossBackward args, const int threads_per_row) {
  using A = Accumulator<T>;
  SharedMemory shared;
  RowHead<A>* heads = shared.take<RowHead<A>>(kWarpsPerBlock);
  const Place at(threads_per_row);
  if (at.row >= args.rows) return;  // whole warps, which meet at no other barrier
  if (at.thread == 0) heads[at.group] = head_of<T>(args, at.row);
  meet(threads_per_row);
  const RowHead<A> head = heads[at.group];
  const T* row = static_cast<const T*>(args.input) + at.row * args.input_stride;
  T* drow = static_cast<T*>(args.dinput) + at.row * args.dinput_stride;
  const Packs<T, kAligned> packs(row, args.cols);
  if (head.target < 0) {
    packs.clear(drow, at);
  } else if (is_plain(args)) {
    write_gradients<true>(args, at, packs, row, drow, head);
  } else {
    write_gradients<false>(args, at, packs, row, drow, head);
  }
}

Plan plan_rows(const LossCall& args, const Geometry& geometry, const char* kernel_name,
               const char* reason) {
  return {.workspace_bytes = 0,
          .kernel_name = kernel_name,
          .rows_per_tile = geometry.threads / geometry.threads_per_row,
          .splits = geometry.blocks(args.rows),
          .reason = reason};
}

Plan plan_forward(const LossForward& args, const Machine&, Geometry& geometry) {
  geometry = geometry_of(args.cols);
  Plan plan = plan_rows(args, geometry, "loss_forward_kernel", "16-byte accesses");
  const int64_t number = args.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  plan.workspace_bytes = 2 * args.rows * number;  // losses, weights
  return plan;
}

void run_forward(const LossForward& args, const Plan& plan, const Geometry& geometry,
                 void* workspace, const Context& context) {
  visit_dtype(args.dtype, [&]<class T>() {
    using A = Accumulator<T>;
    if (args.rows > 0) {
      const size_t shared = kWarpsPerBlock * sizeof(int64_t) + kMaxWarps * sizeof(LossSums<A>);
      launch<loss_forward_kernel<T>>({.blocks = plan.splits,
                                      .threads = static_cast<unsigned>(geometry.threads),
                                      .shared_bytes = shared},
                                     context.stream, args, geometry.threads_per_row, workspace);
    }
    const bool is_reduced = args.reduction != Reduction::kNone;
    launch<loss_reduce_kernel<T>>(
        {.blocks = is_reduced ? 1 : (args.rows + kMaxThreads - 1) / kMaxThreads,
         .threads = kMaxThreads,
         .shared_bytes = kReduceScratch<2> * sizeof(double)},
        context.stream, args, workspace);
  });
}

// Whether the rows of both tensors begin at the same distance from multiples of 16 bytes.
bool is_aligned(const LossBackward& args) {
  const int64_t size = size_of(args.dtype);
  const uintptr_t apart =
      reinterpret_cast<uintptr_t>(args.input) - reinterpret_cast<uintptr_t>(args.dinput);
  return apart % 16 == 0 &&
         (args.rows == 1 || (args.input_stride - args.dinput_stride) * size % 16 == 0);
}

// The decisions of the backward's plan.
struct BackwardLayout {
  Geometry geometry;
  bool aligned;
};

Plan plan_backward(const LossBackward& args, const Machine&, BackwardLayout& layout) {
  layout = {geometry_of(args.cols), is_aligned(args)};
  return plan_rows(args, layout.geometry, "loss_backward_kernel",
                   layout.aligned ? "16-byte accesses" : "unaligned: single elements");
}

void run_backward(const LossBackward& args, const Plan& plan, const BackwardLayout& layout, void*,
                  const Context& context) {
  const Geometry& geometry = layout.geometry;
  visit_dtype(args.dtype, [&]<class T>() {
    const LaunchShape shape{
        .blocks = plan.splits,
        .threads = static_cast<unsigned>(geometry.threads),
        .shared_bytes = kWarpsPerBlock * (sizeof(RowHead<Accumulator<T>>) + 16)};
    visit_bool(layout.aligned, [&]<bool kAligned>() {
      launch<loss_backward_kernel<T, kAligned>>(shape, context.stream, args,
                                                geometry.threads_per_row);
    });
  });
}

}  // namespace

Operator<LossForward> loss_forward() {
  return operator_of<LossForward, Geometry, plan_forward, run_forward>();
}
Operator<LossBackward> loss_backward() {
  return operator_of<LossBackward, BackwardLayout, plan_backward, run_backward>();
}

}  // namespace onepass::cuda
