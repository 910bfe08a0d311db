// One token of a selective scan, with the state in place: Mamba 1 (a channel's own A and step) and
// Mamba 2 (a head's).
//
// Bytes per number of the state: read and written once, and A's where each has its own. Done when
// it runs at the speed of these. A vector is one of numbers of the state; steps and gates are
// computed for a vector of channels at a time.
#include "cpu/kernels.h"
#include "cpu/selective_scan/chunk.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace selective_scan {
namespace {

constexpr int64_t kChannels = 64;  // of a piece

// What a thread has of a piece: the group's B and C, (state,), a row of A, and lines of channels.
template <class A>
struct UpdateScratch {
  A* B;
  A* C;
  A* of_A;
  A* x;
  A* step;
  A* product;  // step * x
  A* other;    // D, then z
  A* y;
  Vec<A>* sums;  // of each channel, lane by lane

  UpdateScratch(Arena& arena, int64_t state) {
    for (auto* each : {&B, &C, &of_A}) *each = arena.take<A>(state);
    for (auto* each : {&x, &step, &product, &other, &y}) *each = arena.take<A>(kChannels);
    sums = arena.take<Vec<A>>(kChannels);
  }
};

// Channels [first, first + count) of a head.
struct HeadChannels {
  int64_t sample, head, first, count;
};

// Their numbers in a tensor, 0 of null.
template <class A>
void read_channels(const void* tensor, DType dtype, const UpdateStride& stride,
                   const HeadChannels& channels, A* line) {
  std::fill_n(line, kChannels, A(0));
  if (!tensor) return;
  const int64_t origin = channels.sample * stride.sample + channels.head * stride.head +
                         channels.first * stride.channel;
  widen_strided(tensor, dtype, origin, stride.channel, channels.count, line);
}

// step, and product = step * x
template <class A>
void put_steps(const SelectiveStateUpdate& args, const HeadChannels& channels,
               const UpdateScratch<A>& scratch) {
  read_channels(args.x, args.x_dtype, args.x_stride, channels, scratch.x);
  read_channels(args.dt, args.dt_dtype, args.dt_stride, channels, scratch.step);
  read_channels(args.dt_bias, args.dt_bias_dtype, args.dt_bias_stride, channels, scratch.other);
  for (int64_t c = 0; c < channels.count; c += kLanes<A>) {
    Vec<A> step = load<A>(scratch.step + c) + load<A>(scratch.other + c);
    if (args.dt_softplus) step = softplus(step).value;
    store<A>(scratch.step + c, step);
    store<A>(scratch.product + c, step * load<A>(scratch.x + c));
  }
}

// A channel: its state becomes h = exp(step A) h + product B. Returns the sum of C h, by lanes.
// decay_at(n, lanes): exp(step A) of numbers from n on.
template <class A, class T, class Decay>
ONEPASS_INLINE Vec<A> update_channel(Decay&& decay_at, A product, const UpdateScratch<A>& scratch,
                                     int64_t state, T* h) {
  const Vec<A> products = broadcast<A>(product);
  Vec<A> sum{};
  for_each_vector<A>(0, state, [&](int64_t n, auto lanes) {
    const Vec<A> next =
        fma<A>(decay_at(n, lanes), load<A>(h + n, lanes), products * load<A>(scratch.B + n, lanes));
    store<A>(h + n, next, lanes);
    sum = fma<A>(next, load<A>(scratch.C + n, lanes), sum);
  });
  return sum;
}

template <class A, class T>
void update_states(const SelectiveStateUpdate& args, const HeadChannels& channels,
                   const UpdateScratch<A>& scratch) {
  T* states = static_cast<T*>(args.state) + channels.sample * args.state_stride.sample +
              channels.head * args.state_stride.head + channels.first * args.state_stride.channel;
  const int64_t origin =
      channels.head * args.A_stride.head + channels.first * args.A_stride.channel;
  for (int64_t c = 0; c < channels.count; ++c) {
    const int64_t row = origin + c * args.A_stride.channel;
    const Vec<A> step = broadcast<A>(scratch.step[c]);
    T* h = states + c * args.state_stride.channel;
    const auto update = [&](auto&& decay_at) {
      scratch.sums[c] =
          update_channel<A, T>(decay_at, scratch.product[c], scratch, args.state_size, h);
    };
    if (args.A_is_shared) {
      widen_line(args.A, args.A_dtype, row, 1, scratch.of_A);
      const Vec<A> decay = decay_of(step * broadcast<A>(scratch.of_A[0]));
      update([&](int64_t, auto) { return decay; });
    } else {
      const A* of_A = scratch.of_A;
      if (args.A_dtype == kAccumulator<A>) {
        of_A = static_cast<const A*>(args.A) + row;
      } else {
        widen_line(args.A, args.A_dtype, row, args.state_size, scratch.of_A);
      }
      update([&](int64_t n, auto lanes) { return decay_of(step * load<A>(of_A + n, lanes)); });
    }
  }
}

template <class A>
void put_outputs(const SelectiveStateUpdate& args, const HeadChannels& channels,
                 const UpdateScratch<A>& scratch) {
  std::fill_n(scratch.y, kChannels, A(0));
  add_lanes<A>(scratch.sums, channels.count, scratch.y);
  read_channels(args.D, args.D_dtype, args.D_stride, channels, scratch.other);
  for (int64_t c = 0; c < channels.count; c += kLanes<A>) {
    store<A>(scratch.y + c,
             fma<A>(load<A>(scratch.other + c), load<A>(scratch.x + c), load<A>(scratch.y + c)));
  }
  if (args.z) {
    read_channels(args.z, args.z_dtype, args.z_stride, channels, scratch.other);
    for (int64_t c = 0; c < channels.count; c += kLanes<A>) {
      const Vec<A> gate = Activated<Activation::kSilu, A>(load<A>(scratch.other + c)).value();
      store<A>(scratch.y + c, load<A>(scratch.y + c) * gate);
    }
  }
  round_line(scratch.y, channels.count, args.output, args.x_dtype,
             (channels.sample * args.heads + channels.head) * args.channels + channels.first);
}

template <class F>
void visit(const SelectiveStateUpdate& args, F&& f) {
  args.x_dtype == DType::kFloat64 ? f.template operator()<double>()
                                  : f.template operator()<float>();
}

template <class A>
Slots slots_of(const SelectiveStateUpdate& args) {
  Arena one(nullptr);
  UpdateScratch<A>(one, args.state_size);
  return {0, one.used()};
}

Plan plan_update(const SelectiveStateUpdate& args, const Machine& machine) {
  Plan plan{.workspace_bytes = 0,
            .kernel_name = "selective_state_update_kernel",
            .rows_per_tile = kChannels,
            .splits = args.batch * args.heads * ceil_div(args.channels, kChannels),
            .reason = "vectors of the state"};
  const int64_t numbers = args.batch * args.heads * args.channels * args.state_size;
  plan.threads = threads_for(numbers / kExponentials, plan.splits, machine);
  visit(args, [&]<class A>() { plan.workspace_bytes = slots_of<A>(args).end(plan.threads); });
  return plan;
}

template <class A>
void selective_state_update_kernel(const SelectiveStateUpdate& args, int64_t piece,
                                   const UpdateScratch<A>& scratch) {
  const int64_t blocks = ceil_div(args.channels, kChannels);
  const int64_t first = piece % blocks * kChannels;
  const HeadChannels channels{piece / blocks / args.heads, piece / blocks % args.heads, first,
                              std::min(kChannels, args.channels - first)};
  const int64_t group = channels.head / (args.heads / args.groups);
  const auto of_group = [&](const UpdateStride& stride) {
    return channels.sample * stride.sample + group * stride.head;
  };
  widen_line(args.B, args.B_dtype, of_group(args.B_stride), args.state_size, scratch.B);
  widen_line(args.C, args.C_dtype, of_group(args.C_stride), args.state_size, scratch.C);
  put_steps(args, channels, scratch);
  visit_numbers<A>(args.state_dtype,
                   [&]<class T>() { update_states<A, T>(args, channels, scratch); });
  put_outputs(args, channels, scratch);
}

void run_update(const SelectiveStateUpdate& args, const Plan& plan, void* workspace,
                const Context& context) {
  visit(args, [&]<class A>() {
    const Slots slots = slots_of<A>(args);
    for_each_piece_in_order(context, plan.threads, plan.splits, [&](int64_t piece, int64_t slot) {
      Arena arena(slots.of(workspace, slot));
      selective_state_update_kernel<A>(args, piece, UpdateScratch<A>(arena, args.state_size));
    });
  });
}

}  // namespace
}  // namespace selective_scan

Operator<SelectiveStateUpdate> selective_state_update() {
  return {selective_scan::plan_update, selective_scan::run_update};
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
