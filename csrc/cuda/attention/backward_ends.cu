// The first and last kernel of attention's backward: see backward_ends.cuh. Both read their inputs
// once; doutput and output are the largest.
#include "cuda/attention/backward_ends.cuh"
#include "cuda/attention/tiles.cuh"
#include "cuda/launch.cuh"
#include "cuda/vec.cuh"

namespace onepass::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostRowLanes = 8;  // lanes that share a row
constexpr int kLeastRowLanes = 2;
constexpr int kBlockRows = kThreads / kLeastRowLanes;

// One lane for each chain of a row, rounded up to a power of two, so that few lanes are idle.
template <class A>
int row_lanes(int64_t cols) {
  int lanes = kLeastRowLanes;
  while (lanes < kMostRowLanes && lanes * kDeltaChain<A> < cols) lanes *= 2;
  return lanes;
}

bool has_aligned_rows(const Strided& rows, DType dtype, int64_t cols) {
  return has_whole_pieces(rows, dtype, cols) && cols % kPack == 0;
}

int64_t row_parts(const Attention& args) { return (args.seq_q + kBlockRows - 1) / kBlockRows; }

// The columns of a chain.
template <bool kAligned_>
struct ChainColumns {
  static constexpr bool kAligned = kAligned_;
  int first;
  int64_t cols;

  __device__ __forceinline__ int of(int pack, int e) const { return first + pack * kPack + e; }
  __device__ __forceinline__ bool has(int pack, int e) const { return of(pack, e) < cols; }
  template <class T>
  __device__ __forceinline__ T* in(T* row, int pack, int e) const {
    return row + of(pack, e);
  }
};

// The chain of the product of two rows that begins at column `first`.
template <class Types, bool kAligned>
__device__ __forceinline__ typename Types::A chain_of(const AttentionBackward& args,
                                                      int64_t doutput, int64_t output, int first) {
  const ChainColumns<kAligned> columns{first, args.value_dim};
  typename Types::A chain = 0;
  ONEPASS_UNROLL
  for (int pack = 0; pack < kDeltaChain<typename Types::A> / kPack; ++pack) {
    const auto left = Types::load(args.doutput.data, args.dtype, doutput, columns, pack);
    const auto right = Types::load(args.output.data, args.dtype, output, columns, pack);
    ONEPASS_UNROLL
    for (int e = 0; e < kPack; ++e) {
      chain = multiply_add(Types::value(left, e), Types::value(right, e), chain);
    }
  }
  return chain;
}

// One block per kBlockRows rows of a (batch, head). row_lanes: a power of two.
template <class Types>
__global__ void __launch_bounds__(kThreads)
    attention_delta_kernel(const AttentionBackward args, const BackwardEnds ends,
                           const bool aligned, const int row_lanes) {
  using A = typename Types::A;
  SharedMemory shared;
  double* scratch = shared.take<double>(kReduceScratch<1>);
  const int64_t part = blockIdx.x % ends.sink_parts;
  const int64_t batch = blockIdx.x / ends.sink_parts / args.heads;
  const int64_t head = blockIdx.x / ends.sink_parts % args.heads;
  const Sequence sequence = sequence_of(args, batch);
  const A sink = ends.dsinks ? load_as<A>(args.sinks, args.sinks_dtype, head) : A(0);
  const int lane = static_cast<int>(threadIdx.x) & (row_lanes - 1);  // of a row
  const int row = static_cast<int>(threadIdx.x) / row_lanes, rows_at_once = kThreads / row_lanes;
  const int first_lane = static_cast<int>(threadIdx.x) % kLanes - lane;
  double dsink = 0.0;  // the addends may cancel, and there are few
  for (int first = row; first < kBlockRows; first += rows_at_once) {
    const int64_t query = part * kBlockRows + first;
    const auto offset = [&](const Strided& rows) {
      return batch * rows.batch_stride + head * rows.head_stride +
             (sequence.first_q + query) * rows.row_stride;
    };
    A sum = 0;
    for (int col = 0; col < args.value_dim; col += row_lanes * kDeltaChain<A>) {
      A chain = 0;
      if (query < sequence.queries) {
        visit_bool(aligned, [&]<bool kAligned>() {
          chain = chain_of<Types, kAligned>(args, offset(args.doutput), offset(args.output),
                                            col + lane * kDeltaChain<A>);
        });
      }
      ONEPASS_ROLL
      for (int i = 0; i < row_lanes; i += kLeastRowLanes) {
        A next[kLeastRowLanes];
        ONEPASS_UNROLL
        for (int j = 0; j < kLeastRowLanes; ++j) {
          next[j] = __shfl_sync(kAllLanes, chain, first_lane + i + j);
        }
        ONEPASS_UNROLL
        for (int j = 0; j < kLeastRowLanes; ++j) sum += next[j];
      }
    }
    if (query >= sequence.queries || lane != 0) continue;
    const int64_t at = lse_row(args, sequence, batch, head, query);
    if (args.dlse) sum -= load_global(static_cast<const A*>(args.dlse) + at);
    store_global(static_cast<A*>(ends.delta) + at, sum);
    if (ends.dsinks) dsink += load_lse<A>(args, at).probability(sink) * sum;
  }
  start_kernel_after();
  if (ends.dsinks) store_partial(dsink, ends.dsinks, blockIdx.x, scratch);
}

// One block per sum: over a (batch, head), or over a head of all batches. In double: the sums are
// few.
template <class A>
__global__ void __launch_bounds__(kThreads)
    attention_sums_kernel(const A* partials, const int64_t parts, const int64_t heads,
                          const int64_t batches, void* sums, const DType dtype) {
  SharedMemory shared;
  double* scratch = shared.take<double>(kReduceScratch<1>);
  const int64_t head = blockIdx.x % heads, first_batch = blockIdx.x / heads;
  double sum[1] = {0.0};
  for (int64_t batch = first_batch; batch < first_batch + batches; ++batch) {
    const A* const row = partials + (batch * heads + head) * parts;
    for (int64_t i = threadIdx.x; i < parts; i += kThreads) sum[0] += load_global(row + i);
  }
  reduce_row(sum, kThreads, scratch);
  if (threadIdx.x != 0) return;
  if (dtype == DType::kFloat64) {
    store_global(static_cast<double*>(sums) + blockIdx.x, sum[0]);
  } else {
    visit_dtype_up_to_float32(dtype, [&]<class S>() {
      store_global(static_cast<S*>(sums) + blockIdx.x,
                   onepass::narrow<S>(static_cast<float>(sum[0])));
    });
  }
}

// summed: over the batches too.
template <class A>
void add_up(const AttentionBackward& args, const void* partials, int64_t parts, bool summed,
            void* sums, DType dtype, void* stream) {
  launch<attention_sums_kernel<A>>({.blocks = summed ? args.heads : args.batch * args.heads,
                                    .threads = kThreads,
                                    .shared_bytes = kReduceScratch<1> * sizeof(double)},
                                   stream, static_cast<const A*>(partials), parts, args.heads,
                                   summed ? args.batch : 1, sums, dtype);
}

int64_t round_up_to_16(int64_t bytes) { return (bytes + 15) / 16 * 16; }

// Bytes of delta and of the two kinds of partial sums.
struct EndsBytes {
  EndsBytes(const AttentionBackward& args, int64_t head_parts) {
    const int64_t size = args.dtype == DType::kFloat64 ? 8 : 4, heads = args.batch * args.heads;
    delta = round_up_to_16(args.heads * args.total_q * size);
    dsinks = round_up_to_16(args.dsinks ? heads * row_parts(args) * 8 : 0);
    head_sums = round_up_to_16(head_gradient(args) ? heads * head_parts * size : 0);
  }
  int64_t delta;
  int64_t dsinks;
  int64_t head_sums;
};

}  // namespace

int64_t ends_bytes(const AttentionBackward& args, int64_t head_parts) {
  const EndsBytes bytes(args, head_parts);
  return bytes.delta + bytes.dsinks + bytes.head_sums;
}

BackwardEnds ends_in(void* workspace, const AttentionBackward& args, int64_t head_parts) {
  const EndsBytes bytes(args, head_parts);
  char* const dsinks = static_cast<char*>(workspace) + bytes.delta;
  return {.delta = workspace,
          .dsinks = args.dsinks ? reinterpret_cast<double*>(dsinks) : nullptr,
          .head_sums = head_gradient(args) ? dsinks + bytes.dsinks : nullptr,
          .sink_parts = row_parts(args),
          .head_parts = head_parts};
}

void begin_backward(const AttentionBackward& args, const BackwardEnds& ends, void* stream) {
  const bool aligned = has_aligned_rows(args.doutput, args.dtype, args.value_dim) &&
                       has_aligned_rows(args.output, args.dtype, args.value_dim);
  visit_bool(args.dtype == DType::kFloat64, [&]<bool kDouble>() {
    using Types = std::conditional_t<kDouble, Same<double>, Mixed>;
    launch<attention_delta_kernel<Types>>({.blocks = args.batch * args.heads * ends.sink_parts,
                                           .threads = kThreads,
                                           .shared_bytes = kReduceScratch<1> * sizeof(double)},
                                          stream, args, ends, aligned,
                                          row_lanes<typename Types::A>(args.value_dim));
  });
}

void finish_backward(const AttentionBackward& args, const BackwardEnds& ends, void* stream) {
  if (args.dsinks) {
    add_up<double>(args, ends.dsinks, ends.sink_parts, true, args.dsinks, args.sinks_dtype, stream);
  }
  if (!head_gradient(args)) return;
  visit_bool(args.dtype == DType::kFloat64, [&]<bool kDouble>() {
    using A = std::conditional_t<kDouble, double, float>;
    add_up<A>(args, ends.head_sums, ends.head_parts, batches_share_numbers(args),
              head_gradient(args), DType::kFloat32, stream);
  });
}

}  // namespace onepass::cuda
