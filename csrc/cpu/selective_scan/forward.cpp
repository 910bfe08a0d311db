// Selective scan (Gu, Dao, Mamba, 2023), forward and backward.
//
// A vector is one of channels, so that no sum runs over its lanes but those of B's and C's
// gradients, and a state of any size is computed alike. A piece of work is a block of channels of a
// sequence. Of each chunk of tokens the block's rows are widened into the cache, (tokens, kBlock);
// then some numbers of the state at a time run over the chunk's tokens in registers.
//
// Per number of the state and token: an exp and three multiply-adds; backward an exp and twelve.
// Done when it runs at the speed of these alone. The backward starts each chunk from the state that
// the forward saved and computes the chunk's states again.
//
// Gradients of B and C are sums over the channels of a group: these are cut into kMostParts parts
// at most, by the shape alone, and a part's blocks follow each other. Those of A, D and delta_bias
// are sums over tokens, chunk by chunk.
#include "cpu/kernels.h"
#include "cpu/selective_scan/chunk.h"

namespace onepass::cpu {
inline namespace ONEPASS_ISA {
namespace selective_scan {
namespace {

constexpr int64_t kTile = 4;  // numbers of the state that run together

template <class A>
struct ForwardScratch {
  Chunk<A> chunk;
  Rows<A> y, z;
};

template <class A>
void selective_scan_kernel(const SelectiveScanForward& args, const Factors<A>& factors,
                           const Sequence& sequence, const Block& block, const Numbers<A>& numbers,
                           ForwardScratch<A>& scratch) {
  const int64_t state = args.state, of_sequence = sequence.number * args.channels + block.first;
  Chunk<A>& chunk = scratch.chunk;
  Row<A> bias, D;
  read_channels(args.delta_bias, args.delta_bias_dtype, block, bias);
  read_channels(args.D, args.D_dtype, block, D);
  read_states<A>(args.A, args.A_dtype, block.first, block.channels, state, numbers.of_A);
  read_states<A>(args.initial_state, args.initial_state_dtype, of_sequence, block.channels, state,
                 numbers.h);
  for (int64_t begin = sequence.begin; begin < sequence.end; begin += kTokens) {
    const int64_t tokens = std::min(kTokens, sequence.end - begin);
    const Span span{sequence.sample, begin, tokens};
    if (args.states) {
      A* saved =
          static_cast<A*>(args.states) +
          (sequence.sample * args.chunks + sequence.chunk(args, begin)) * state * args.channels +
          block.first;
      for (int64_t n = 0; n < state; ++n) {
        std::copy_n(numbers.h[n], block.channels, saved + n * args.channels);
      }
    }
    chunk.put(args, block, span, bias, false);
    put_skip(chunk, tokens, D, scratch.y);
    for (int64_t n = 0; n < state;) {
      const A* B = factors.line(0, sequence.sample, block.group, n) + begin;
      const A* C = factors.line(1, sequence.sample, block.group, n) + begin;
      const bool is_tile = n + kTile <= state;
      for (int64_t c = 0; c < kBlock<A>; c += kLanes<A>) {
        if (is_tile) {
          scan_tile<A, kTile>(chunk, tokens, c, numbers.of_A + n, numbers.h + n, B, C, args.length,
                              scratch.y);
        } else {
          scan_tile<A, 1>(chunk, tokens, c, numbers.of_A + n, numbers.h + n, B, C, args.length,
                          scratch.y);
        }
      }
      n += is_tile ? kTile : 1;
    }
    if (args.z) put_gated(args, block, span, scratch.z, scratch.y);
    write_rows<A>(args, scratch.y, block, span, args.output, args.u_dtype);
  }
  write_states<A>(numbers.h[0], kBlock<A>, of_sequence, block.channels, state, args.last_state,
                  args.last_state_dtype);
}

// ---- plans --------------------------------------------------------------------------------------

// The workspace: the factors, what pieces leave, and what each thread has.
template <class A>
struct ForwardLayout {
  A* factors;
  Slots slots;

  ForwardLayout(const SelectiveScanForward& args, void* base) {
    Arena arena(base);
    factors = arena.take<A>(2 * Factors<A>{args, nullptr}.size());
    Arena one(nullptr);
    Numbers<A>(one, args.state);
    one.take<ForwardScratch<A>>(1);
    slots = {arena.used(), one.used()};
  }
};

Plan plan_forward(const SelectiveScanForward& args, const Machine& machine) {
  Plan plan{.workspace_bytes = 0,
            .kernel_name = "selective_scan_kernel",
            .rows_per_tile = kTokens,
            .splits = 0,
            .reason = "vectors of channels"};
  visit(args, [&]<class A>() {
    plan.splits = args.sequences * args.groups * Blocks<A>(args).per_group;
    plan.threads = threads_for(nanoseconds_of(args), plan.splits, machine);
    plan.workspace_bytes = ForwardLayout<A>(args, nullptr).slots.end(plan.threads);
  });
  return plan;
}

void run_forward(const SelectiveScanForward& args, const Plan& plan, void* workspace,
                 const Context& context) {
  visit(args, [&]<class A>() {
    const ForwardLayout<A> layout(args, workspace);
    const Factors<A> factors{args, layout.factors};
    factors.put(context, plan.threads);
    const Blocks<A> blocks(args);
    for_each_piece_in_order(context, plan.threads, plan.splits, [&](int64_t piece, int64_t slot) {
      Arena arena(layout.slots.of(workspace, slot));
      const Numbers<A> numbers(arena, args.state);
      const int64_t group = piece / blocks.per_group % args.groups;
      selective_scan_kernel<A>(args, factors,
                               Sequence(args, piece / blocks.per_group / args.groups),
                               block_of(blocks, group, piece % blocks.per_group), numbers,
                               *arena.take<ForwardScratch<A>>(1));
    });
  });
}

}  // namespace
}  // namespace selective_scan

Operator<SelectiveScanForward> selective_scan_forward() {
  return {selective_scan::plan_forward, selective_scan::run_forward};
}

}  // namespace ONEPASS_ISA
}  // namespace onepass::cpu
