// Rotary embedding of query and key on CUDA: output[a] = input[a] * cos[a] - input[b] * sin[a] and
// output[b] = input[b] * cos[b] + input[a] * sin[b] of pairs (a, b) of columns, or transposed.
//
// A thread has eight pairs of columns of one token, as two packs, and passes over some of the heads
// of query and key: cos and sin are read once for all of them and stay in registers, as a factor
// for each of the 16 columns and one for its partner. Other threads copy the columns that are not
// rotated. Traffic: one read and one write of query and key, and cos and sin once for each group of
// heads. Done when it runs at the speed of a copy of query and key.
#include <algorithm>

#include "cuda/backend.h"
#include "cuda/launch.cuh"
#include "cuda/vec.cuh"
#include "ops/rotary.h"

namespace onepass::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostHeads = 8;         // that a thread passes over
constexpr int64_t kFewThreads = 1 << 17;  // with fewer, a thread passes over fewer heads

// A thread has two runs of so many neighbouring columns: two packs, else a pair.
template <bool kAligned>
inline constexpr int kWidth = kAligned ? kPack : 1;

template <bool kAligned>
__device__ __forceinline__ StridedColumns<kAligned> neighbours() {
  return {1, 0, kWidth<kAligned>};
}

// The values of kWidth neighbouring elements.
template <class T, bool kAligned>
struct Few {
  Accumulator<T> value[kWidth<kAligned>];

  __device__ __forceinline__ void load(const T* from) {
    const Raw<T> raw = load_pack(from, neighbours<kAligned>(), 0);
    ONEPASS_UNROLL
    for (int e = 0; e < kWidth<kAligned>; ++e) value[e] = element<T>(raw, e);
  }

  __device__ __forceinline__ void store(T* to) const {
    Accumulator<T> pack[kPack] = {};
    ONEPASS_UNROLL
    for (int e = 0; e < kWidth<kAligned>; ++e) pack[e] = value[e];
    store_pack(to, neighbours<kAligned>(), 0, narrow<T>(pack));
  }
};

// The numbers of a pack's four pairs, as they lie in a table that has one for each pair.
template <class T>
struct alignas(sizeof(T) == 2 ? 8 : 16) Pairs {
  T number[kPack / 2];
};

// cos or sin of a thread's columns, `first` and `second` being where they begin.
template <class A, bool kInterleaved, bool kAligned>
__device__ __forceinline__ void load_table(const RotaryForward& args, const RotaryTable& table,
                                           int64_t row, int64_t first, int64_t second,
                                           A (&value)[2][kWidth<kAligned>]) {
  constexpr int kWide = kWidth<kAligned>;
  const auto load = [&]<class C>() {
    const C* numbers = static_cast<const C*>(table.data) + row;
    Few<C, kAligned> few;
    if (!args.half_width) {
      few.load(numbers + first);
      ONEPASS_UNROLL
      for (int e = 0; e < kWide; ++e) value[0][e] = few.value[e];
      few.load(numbers + second);
      ONEPASS_UNROLL
      for (int e = 0; e < kWide; ++e) value[1][e] = few.value[e];
    } else if constexpr (kInterleaved && kAligned) {
      const auto load_pairs = [&](int64_t column, A(&to)[kWide]) {
        const Pairs<C> pairs = load_global(reinterpret_cast<const Pairs<C>*>(numbers + column / 2));
        Raw<C> raw{};
        ONEPASS_UNROLL
        for (int e = 0; e < kWide; ++e) set_element(raw, e, pairs.number[e / 2]);
        ONEPASS_UNROLL
        for (int e = 0; e < kWide; ++e) to[e] = element<C>(raw, e);
      };
      load_pairs(first, value[0]);
      load_pairs(second, value[1]);
    } else {
      few.load(numbers + (kInterleaved ? first / 2 : first));
      ONEPASS_UNROLL
      for (int e = 0; e < kWide; ++e) value[0][e] = value[1][e] = few.value[e];
    }
  };
  if constexpr (sizeof(A) == 8) {
    load.template operator()<double>();
  } else {
    visit_dtype_up_to_float32(args.table_dtype, load);
  }
}

// The row of the tables that a token has; a negative one is none.
__device__ __forceinline__ int64_t row_of(const RotaryForward& args, int64_t batch, int64_t token) {
  if (!args.positions) return token;
  const int64_t at = batch * args.positions_batch_stride + token * args.positions_stride;
  const int64_t row = args.wide_positions
                          ? load_global(static_cast<const int64_t*>(args.positions) + at)
                          : load_global(static_cast<const int32_t*>(args.positions) + at);
  return row < args.rows ? row : -1;
}

// body(input, output) of a thread's heads.
template <class T, class Body>
__device__ __forceinline__ void for_each_head(const RotaryForward& args, int64_t batch,
                                              int64_t token, int64_t first, int64_t last,
                                              Body&& body) {
  for (int64_t head = first; head < last; ++head) {
    const bool of_query = head < args.query.heads;
    const RotatedHeads& heads = of_query ? args.query : args.key;
    const int64_t own = of_query ? head : head - args.query.heads;
    const auto at = [&](const HeadStride& stride) {
      return batch * stride.batch + own * stride.head + token * stride.token;
    };
    body(static_cast<const T*>(heads.input) + at(heads.input_stride),
         static_cast<T*>(heads.output) + at(heads.output_stride));
  }
}

template <class T, bool kInterleaved, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    rotary_forward_kernel(const RotaryForward args, const int64_t heads_per_thread) {
  using A = Accumulator<T>;
  constexpr int kWide = kWidth<kAligned>;
  const int64_t rotating = args.rotary_dim / 2 / kWide;  // threads of a row
  const int64_t copying = (args.head_dim - args.rotary_dim) / kWide;
  const int64_t heads = args.query.heads + args.key.heads;
  int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const auto part = [&](int64_t size) {
    const int64_t own = index % size;
    index /= size;
    return own;
  };
  const int64_t place = part(rotating + copying);
  const int64_t token = part(args.tokens);
  const int64_t batch = part(args.batch);
  const int64_t first_head = index * heads_per_thread;
  if (first_head >= heads) return;
  const int64_t end = first_head + heads_per_thread;
  const int64_t last_head = end < heads ? end : heads;

  if (place >= rotating) {
    const int64_t column = args.rotary_dim + (place - rotating) * kWide;
    for_each_head<T>(args, batch, token, first_head, last_head, [&](const T* x, T* y) {
      store_pack(y + column, neighbours<kAligned>(), 0,
                 load_pack(x + column, neighbours<kAligned>(), 0));
    });
    return;
  }

  // Neighbouring packs are of neighbouring threads; a pack has both columns of its pairs if those
  // are neighbours.
  const int64_t first = kInterleaved && !kAligned ? 2 * place : kWide * place;
  const int64_t second = kInterleaved && !kAligned ? first + 1 : args.rotary_dim / 2 + first;
  A own[2][kWide], sine[2][kWide], other[2][kWide];
  const int64_t row = row_of(args, batch, token);
  const auto table = [&](const RotaryTable& of, A(&value)[2][kWide]) {
    if (row >= 0) {
      load_table<A, kInterleaved, kAligned>(args, of, batch * of.batch_stride + row * of.row_stride,
                                            first, second, value);
      return;
    }
    ONEPASS_UNROLL
    for (int e = 0; e < kWide; ++e) value[0][e] = value[1][e] = std::bit_cast<float>(0x7fc00000u);
  };
  table(args.cos, own);
  table(args.sin, sine);

  // Of pair (a, b): other[a] = -sin[a] and other[b] = sin[b]; transposed sin[b] and -sin[a].
  constexpr bool kNeighbours = kInterleaved && kAligned;
  ONEPASS_UNROLL
  for (int h = 0; h < 2; ++h) {
    ONEPASS_UNROLL
    for (int e = 0; e < kWide; ++e) {
      const bool is_first = kNeighbours ? e % 2 == 0 : h == 0;
      const A partners = kNeighbours ? sine[h][e ^ 1] : sine[1 - h][e];
      const A number = args.transposed ? partners : sine[h][e];
      other[h][e] = is_first == args.transposed ? number : -number;
    }
  }

  for_each_head<T>(args, batch, token, first_head, last_head, [&](const T* x, T* y) {
    Few<T, kAligned> half[2], turned;
    half[0].load(x + first);
    half[1].load(x + second);
    ONEPASS_UNROLL
    for (int h = 0; h < 2; ++h) {
      ONEPASS_UNROLL
      for (int e = 0; e < kWide; ++e) {
        const A partner = kNeighbours ? half[h].value[e ^ 1] : half[1 - h].value[e];
        turned.value[e] = multiply_add(half[h].value[e], own[h][e], partner * other[h][e]);
      }
      turned.store(y + (h ? second : first));
    }
  });
}

// Whether packs lie at multiples of 16 bytes everywhere.
bool is_aligned(const RotaryForward& args) {
  const auto base = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  const auto strides = [](const HeadStride& stride) {
    return (stride.batch | stride.head | stride.token) % kPack == 0;
  };
  const auto heads = [&](const RotatedHeads& heads) {
    return base(heads.input) && base(heads.output) && strides(heads.input_stride) &&
           strides(heads.output_stride);
  };
  const auto table = [&](const RotaryTable& table) {
    return base(table.data) && (table.batch_stride | table.row_stride) % kPack == 0;
  };
  return args.rotary_dim % (2 * kPack) == 0 && args.head_dim % kPack == 0 && heads(args.query) &&
         heads(args.key) && table(args.cos) && table(args.sin);
}

Plan plan_forward(const RotaryForward& args, const Machine&) {
  const bool aligned = is_aligned(args);
  const int64_t heads = args.query.heads + args.key.heads;
  const int64_t of_row = (args.head_dim - args.rotary_dim / 2) / (aligned ? kPack : 1);
  const int64_t of_group = args.batch * args.tokens * of_row;
  int64_t each = kMostHeads;
  const auto groups = [&] { return (heads + each - 1) / each; };
  while (each > 1 && groups() * of_group < kFewThreads) each /= 2;
  return {.workspace_bytes = 0,
          .kernel_name = "rotary_forward_kernel",
          .rows_per_tile = each,
          .splits = groups(),
          .reason = aligned ? "16-byte accesses" : "unaligned: single elements"};
}

void run_forward(const RotaryForward& args, const Plan& plan, void*, const Context& context) {
  visit_bool(is_aligned(args), [&]<bool kAligned>() {
    const int64_t of_row = (args.head_dim - args.rotary_dim / 2) / kWidth<kAligned>;
    const int64_t threads = plan.splits * args.batch * args.tokens * of_row;
    const LaunchShape shape{.blocks = (threads + kThreads - 1) / kThreads, .threads = kThreads};
    visit_dtype(args.dtype, [&]<class T>() {
      visit_bool(args.interleaved, [&]<bool kInterleaved>() {
        launch<rotary_forward_kernel<T, kInterleaved, kAligned>>(shape, context.stream, args,
                                                                 plan.rows_per_tile);
      });
    });
  });
}

}  // namespace

Operator<RotaryForward> rotary_forward() { return {plan_forward, run_forward}; }

}  // namespace onepass::cuda
