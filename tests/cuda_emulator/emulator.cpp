// The emulator's scheduler. This file is compiled without the thread sanitizer, so that calls of
// the scheduler do not count as communication between fibers; the functions below tell the
// sanitizers what they must know.
#include "emulator.h"

#include <algorithm>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "accesses.h"
#include "context.h"

#if defined(EMULATOR_ADDRESS)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(EMULATOR_THREAD)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* tag);
void __tsan_release(void* tag);
}
#endif

namespace emulator {
namespace {

#if defined(EMULATOR_ACCESSES)
constexpr bool kSeesAccesses = true;
#else
constexpr bool kSeesAccesses = false;
#endif

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kGapBytes = 64;
constexpr int kMaxPieces = 64;
constexpr size_t kMaxFibers = 1024;  // each costs the thread sanitizer almost a megabyte
constexpr int kMaxIdleRounds = 100000;

#if defined(EMULATOR_THREAD)
void acquire(void* tag) { __tsan_acquire(tag); }
void release(void* tag) { __tsan_release(tag); }
#else
void acquire(void*) {}
void release(void*) {}
#endif

// Code that runs on a separate stack, and the sanitizers' handles for it.
struct Fiber {
  Context context;
  const void* stack = nullptr;
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;
  void* fiber = nullptr;
};

// Stacks end at different places of a page: otherwise the data of all lanes would be in the same
// few sets of the cache.
constexpr size_t kEnds = 64;
constexpr size_t kBetweenEnds = 17 * 64;

struct Stack {
  std::unique_ptr<char[]> memory{new char[kStackBytes]};
  size_t bytes;           // the part that is used
  void* fiber = nullptr;  // the thread sanitizer's
};

// Lanes that meet: one per mask that a warp uses. Everything that the next meeting of the same
// lanes could overwrite exists twice and is used in turn; no lane can be two meetings ahead.
struct Meeting {
  unsigned mask;
  const char* what = nullptr;
  unsigned arrived = 0;
  uint64_t generation = 0;
  alignas(16) unsigned char deposits[2][kWarpSize][kMaxDeposit];
  char tags[2];
};

// Reserved, so that no fiber reallocates: to the sanitizer, memory that a fiber frees is its own.
constexpr size_t kMaxMasks = 64;

struct Warp {
  std::vector<std::unique_ptr<Meeting>> meetings;
  unsigned lanes = 0;  // the mask of all its lanes
  WarpAccesses accesses;
  Warp() { meetings.reserve(kMaxMasks); }
};

struct Block;

enum class State { kReady, kAtBarrier, kInMeeting, kSpinning, kDone };

struct Thread : Fiber {
  Self self;
  Stack* memory = nullptr;
  Block* block = nullptr;
  int warp = 0;
  State state = State::kReady;
  Meeting* meeting = nullptr;
  uint64_t waits_beyond = 0;  // the generation of the barrier or meeting that must have passed
  std::vector<std::vector<Copy>> copies;
  Callers callers;
  bool counts = true;
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::unique_ptr<char[]> arena;
  size_t arena_bytes = 0;
  size_t shared_bytes = 0;
  int live = 0;
  int at_barrier = 0;
  uint64_t generation = 0;
  char tags[2];
  char start_tag;
};

struct Machine {  // the one device
  Fiber host;
  Fiber* left = nullptr;       // the fiber that ran before
  std::vector<Thread*> round;  // threads that run in turn before the host does
  size_t turn = 0;             // the next one's index
  bool only_spinning = true;   // in this round
  const std::function<void()>* kernel = nullptr;
  std::vector<std::unique_ptr<Stack>> stacks;
  std::deque<Stack*> free_stacks;
  size_t rested = 0;                          // the first of these: not used in this launch
  std::vector<std::unique_ptr<Block>> ended;  // kept: freed memory would be reused in this launch
  std::mt19937_64 random{0};
  Counters counters;
  std::vector<std::string> kernels;
  std::vector<Launch> launched;
  std::exception_ptr failure;  // of a fiber
  char end_tag;
};

Machine& machine() {
  static Machine* one = new Machine;
  return *one;
}

Thread* running = nullptr;

// Tells the sanitizers, on the new stack, that it is used.
void arrive(Fiber& fiber) {
#if defined(EMULATOR_ADDRESS)
  Fiber& left = *machine().left;
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &left.stack, &left.stack_bytes);
#else
  (void)fiber;
#endif
}

void change(Fiber& from, Fiber& to, [[maybe_unused]] bool for_good = false) {
#if defined(EMULATOR_ADDRESS)
  machine().left = &from;
  __sanitizer_start_switch_fiber(for_good ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);
#elif defined(EMULATOR_THREAD)
  __tsan_switch_to_fiber(to.fiber, 1);  // 1: the switch itself orders nothing
#endif
  switch_stacks(from.context, to.context);
  arrive(from);
}

// The next of the round, or the host after the last one. Threads switch to one another directly:
// lanes of a warp mostly wait at the same place, so that the processor predicts the return.
Fiber& next_of_round() {
  Machine& m = machine();
  if (m.failure || m.turn == m.round.size()) return m.host;
  Thread& next = *m.round[m.turn++];
  m.only_spinning = m.only_spinning && next.state == State::kSpinning;
  running = &next;
  detail::running = &next.self;
  return next;
}

// Called when lanes have met: their accesses before it belong together.
void end_accesses(Warp& warp) {
  if (!kSeesAccesses) return;
  warp.accesses.end(machine().launched.back().kernel);
}

void open_barrier_if_all_are_there(Block& block) {
  if (block.live > 0 && block.at_barrier == block.live) {
    for (Warp& warp : block.warps) end_accesses(warp);
    block.at_barrier = 0;
    ++block.generation;
  }
}

void yield() {
  Thread& thread = *running;
  const bool done = thread.state == State::kDone;
  if (done) {
    --thread.block->live;
    open_barrier_if_all_are_there(*thread.block);
  }
  Machine& m = machine();
  m.only_spinning = m.only_spinning && thread.state == State::kSpinning;
  change(thread, next_of_round(), done);
}

void run_thread() {
  Machine& m = machine();
  Thread& thread = *running;
  arrive(thread);
  acquire(&thread.block->start_tag);
  try {
    (*m.kernel)();
    for (const auto& group : thread.copies) {
      if (!group.empty()) fail("a thread ends with a cp.async in flight");
    }
  } catch (...) {  // launch() throws it: no exception can leave this stack
    m.failure = std::current_exception();
  }
  release(&m.end_tag);
  thread.state = State::kDone;
  yield();
}

std::string name_of(const Thread& thread) {
  const auto text = [](const dim3& d) {
    return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) +
           ")";
  };
  return "thread " + text(thread.self.thread) + " of block " + text(thread.self.block);
}

Stack* take_stack() {
  Machine& m = machine();
#if defined(EMULATOR_THREAD)
  // To the sanitizer, blocks of a launch that one fiber runs are ordered, and it would miss their
  // races. So a fiber runs a second block only if there are many fibers, and long after the first.
  const bool from_before = m.rested > 0 || m.stacks.size() >= kMaxFibers;
  if (m.rested > 0) --m.rested;
#else
  const bool from_before = true;
#endif
  if (from_before && !m.free_stacks.empty()) {
    Stack* stack = m.free_stacks.front();
    m.free_stacks.pop_front();
    return stack;
  }
  const size_t unused = m.stacks.size() % kEnds * kBetweenEnds;
  m.stacks.push_back(std::make_unique<Stack>());
  m.stacks.back()->bytes = kStackBytes - unused;
#if defined(EMULATOR_THREAD)
  m.stacks.back()->fiber = __tsan_create_fiber(0);
#endif
  return m.stacks.back().get();
}

std::unique_ptr<Block> make_block(const Launch& launch, dim3 index) {
  auto block = std::make_unique<Block>();
  const int count = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
  block->threads.resize(count);
  block->warps.resize((count + kWarpSize - 1) / kWarpSize);
  block->live = count;
  block->shared_bytes = launch.shared_bytes;
  const size_t arena_bytes = launch.shared_bytes + (kMaxPieces + 1) * kGapBytes + 16;
  block->arena_bytes = arena_bytes;
  block->arena.reset(new char[arena_bytes]);
  std::fill_n(block->arena.get(), arena_bytes, static_cast<char>(kPoison));
#if defined(EMULATOR_ADDRESS)
  __asan_poison_memory_region(block->arena.get(), arena_bytes);
#endif
  for (int i = 0; i < count; ++i) {
    Thread& thread = block->threads[i];
    const unsigned x = i % launch.block.x, rest = i / launch.block.x;
    thread.self = {.thread = {x, rest % launch.block.y, rest / launch.block.y},
                   .block = index,
                   .block_size = launch.block,
                   .grid_size = launch.grid,
                   .lane = i % kWarpSize};
    thread.block = block.get();
    thread.warp = i / kWarpSize;
    block->warps[thread.warp].lanes |= 1u << thread.self.lane;
    thread.memory = take_stack();
    thread.fiber = thread.memory->fiber;
    char* stack = thread.memory->memory.get();
    thread.stack = stack;
    thread.stack_bytes = thread.memory->bytes;
#if defined(EMULATOR_ADDRESS)
    __asan_unpoison_memory_region(stack, kStackBytes);  // the last fiber has left poison
#endif
    prepare(thread.context, stack, thread.stack_bytes, run_thread);
  }
  release(&block->start_tag);
  return block;
}

void end_block(std::unique_ptr<Block> block) {
  for (Warp& warp : block->warps) end_accesses(warp);
  for (Thread& thread : block->threads) machine().free_stacks.push_back(thread.memory);
#if defined(EMULATOR_ADDRESS)
  __asan_unpoison_memory_region(block->arena.get(), block->arena_bytes);
#endif
#if defined(EMULATOR_THREAD)
  machine().ended.push_back(std::move(block));
#endif
}

bool can_run(const Thread& thread) {
  switch (thread.state) {
    case State::kReady:
    case State::kSpinning:
      return true;
    case State::kAtBarrier:
      return thread.block->generation > thread.waits_beyond;
    case State::kInMeeting:
      return thread.meeting->generation > thread.waits_beyond;
    default:
      return false;
  }
}

// Adds the threads that can run, of all warps of a block or of one.
void add_ready(std::vector<Thread*>& ready, Block& block, int first = 0, int count = 1024) {
  const int end = std::min(static_cast<int>(block.threads.size()), first + count);
  for (int i = first; i < end; ++i) {
    if (can_run(block.threads[i])) ready.push_back(&block.threads[i]);
  }
}

// All threads wait, and none can continue.
[[noreturn]] void report_deadlock(const std::vector<std::unique_ptr<Block>>& blocks) {
  for (const auto& block : blocks) {
    for (const Thread& thread : block->threads) {
      if (thread.state != State::kInMeeting) continue;
      for (int lane = 0; lane < kWarpSize; ++lane) {
        const unsigned missing = thread.meeting->mask & ~thread.meeting->arrived;
        if (missing >> lane & 1) {
          fail("lane " + std::to_string(lane) + " is named in the mask of " + thread.meeting->what +
               " and did not arrive, for " + name_of(thread));
        }
      }
    }
  }
  fail("some threads of a block wait at a barrier that the others do not reach");
}

}  // namespace

const Self* detail::running = nullptr;

void fail(const std::string& what) { throw std::runtime_error("emulator: " + what); }
void fail_misaligned(const char* what, size_t bytes) {
  fail(std::string(what) + " of " + std::to_string(bytes) + " bytes at a misaligned address");
}

std::map<uintptr_t, uintptr_t>& guard_bands() {
  static auto* const all = new std::map<uintptr_t, uintptr_t>;
  return *all;
}

void check_beside(const void* address, size_t bytes, const char* what) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const auto next = guard_bands().lower_bound(begin + bytes);
  if (next == guard_bands().begin() || std::prev(next)->second <= begin) return;
  fail(std::string(what) + " of " + std::to_string(bytes) + " bytes beside a tensor");
}

const Counters& counters() { return machine().counters; }
void forget_counted() {
  machine().counters = {};
  machine().launched.clear();
}
std::vector<std::string>& kernels() { return machine().kernels; }
const std::vector<Launch>& launched() { return machine().launched; }

static void see(Access access, const void* address, size_t bytes, const void* code) {
  const Thread& thread = *running;
  WarpAccesses& warp = thread.block->warps[thread.warp].accesses;
  warp.add(access, thread.self.lane, reinterpret_cast<uintptr_t>(address), bytes,
           thread.callers.site(code));
}

void count_read(const void* address, size_t bytes) {
  machine().counters.global_read += bytes;
  if (kSeesAccesses) see(Access::kGlobalRead, address, bytes, __builtin_return_address(0));
}
void count_written(const void* address, size_t bytes) {
  machine().counters.global_written += bytes;
  if (kSeesAccesses) see(Access::kGlobalWrite, address, bytes, __builtin_return_address(0));
}

Callers* callers() { return running ? &running->callers : nullptr; }

void see_access(const void* address, size_t bytes, bool writes, const void* code) {
  if (!running || !running->counts) return;
  const Block& block = *running->block;
  const auto* const begin = static_cast<const char*>(address);
  if (begin < block.arena.get() || begin >= block.arena.get() + block.arena_bytes) return;
  see(writes ? Access::kSharedWrite : Access::kSharedRead, address, bytes, code);
}

Uncounted::Uncounted() { running->counts = false; }
Uncounted::~Uncounted() { running->counts = true; }

std::vector<std::vector<Copy>>& copies_in_flight() {
  auto& groups = running->copies;
  if (groups.empty()) groups.emplace_back();  // made here because most threads never need one
  return groups;
}

void reseed() { machine().random.seed(static_cast<uint64_t>(settings().at("seed"))); }

void block_barrier() {
  Thread& thread = *running;
  Block& block = *thread.block;
  void* tag = &block.tags[block.generation % 2];
  release(tag);
  thread.state = State::kAtBarrier;
  thread.waits_beyond = block.generation;
  ++block.at_barrier;
  open_barrier_if_all_are_there(block);
  yield();
  thread.state = State::kReady;
  acquire(tag);
}

// Not memcpy, which the sanitizers would intercept.
static void copy(void* to, const void* from, size_t bytes) {
  using Word = uint64_t __attribute__((may_alias, aligned(1)));
  if (bytes % sizeof(Word) == 0) {
    auto* target = static_cast<volatile Word*>(to);
    for (size_t i = 0; i < bytes / sizeof(Word); ++i) target[i] = static_cast<const Word*>(from)[i];
    return;
  }
  auto* target = static_cast<volatile unsigned char*>(to);
  for (size_t i = 0; i < bytes; ++i) target[i] = static_cast<const unsigned char*>(from)[i];
}

// Returns the parity of the meeting's slots, after all lanes of the mask have arrived.
static int meet(unsigned mask, const char* what, const void* deposit, size_t bytes, bool orders,
                Exchange::Finish finish = nullptr) {
  Thread& thread = *running;
  const int lane = thread.self.lane;
  if (!(mask >> lane & 1)) {
    fail(std::string(what) + " by " + name_of(thread) + ", whose lane is not in the mask");
  }
  auto& meetings = thread.block->warps[thread.warp].meetings;
  auto found = std::find_if(meetings.begin(), meetings.end(),
                            [&](const auto& meeting) { return meeting->mask == mask; });
  if (found == meetings.end()) {
    if (meetings.size() == kMaxMasks) fail("a warp meets under more masks than the emulator keeps");
    meetings.push_back(std::make_unique<Meeting>());
    found = meetings.end() - 1;
    (*found)->mask = mask;
  }
  Meeting& meeting = **found;
  const int parity = static_cast<int>(meeting.generation % 2);
  if (meeting.arrived == 0) {
    meeting.what = what;
  } else if (meeting.what != what && std::string(meeting.what) != what) {
    fail("lanes of one mask meet in " + std::string(meeting.what) + " and in " + what);
  }
  copy(meeting.deposits[parity][lane], deposit, bytes);
  if (orders) release(&meeting.tags[parity]);
  thread.state = State::kInMeeting;
  thread.meeting = &meeting;
  thread.waits_beyond = meeting.generation;
  meeting.arrived |= 1u << lane;
  if (meeting.arrived == mask) {
    if (Warp& warp = thread.block->warps[thread.warp]; mask == warp.lanes) end_accesses(warp);
    Exchange all(meeting.deposits[parity]);
    if (finish) finish(all);
    meeting.arrived = 0;
    ++meeting.generation;
  }
  yield();
  thread.state = State::kReady;
  if (orders) acquire(&meeting.tags[parity]);
  return parity;
}

void warp_barrier(unsigned mask, const char* what) { meet(mask, what, nullptr, 0, true); }

Exchange::Exchange(unsigned mask, const char* what, const void* mine, size_t bytes, Finish finish) {
  if (bytes > kMaxDeposit) fail("an exchange of more bytes than a deposit holds");
  const int parity = meet(mask, what, mine, bytes, false, finish);
  deposits_ = running->meeting->deposits[parity];
}

void Exchange::copy_unseen(void* to, const void* from, size_t bytes) {
  emulator::copy(to, from, bytes);
}

void spin() {
  running->state = State::kSpinning;
  yield();
  running->state = State::kReady;
}

void* shared_piece(size_t offset, size_t bytes, int index) {
  Block& block = *running->block;
  if (offset + bytes > block.shared_bytes) {
    fail("the kernel takes " + std::to_string(offset + bytes) +
         " bytes of shared memory and was launched with " + std::to_string(block.shared_bytes));
  }
  if (index >= kMaxPieces) fail("more pieces of shared memory than the emulator has gaps for");
  const auto address = reinterpret_cast<uintptr_t>(block.arena.get());
  char* base = reinterpret_cast<char*>((address + 15) / 16 * 16);
  char* piece = base + offset + (index + 1) * kGapBytes;
#if defined(EMULATOR_ADDRESS)
  __asan_unpoison_memory_region(piece, bytes);
#endif
  return piece;
}

void launch(const Launch& launch, const std::function<void()>& kernel) {
  Machine& m = machine();
  const size_t threads = static_cast<size_t>(launch.block.x) * launch.block.y * launch.block.z;
  if (threads == 0 || threads > 1024) fail("a block of " + std::to_string(threads) + " threads");
  if (launch.shared_bytes > max_shared_bytes()) {
    fail(std::to_string(launch.shared_bytes) + " bytes of shared memory in one block");
  }
  ++m.counters.launches;
  m.counters.shared = std::max<uint64_t>(m.counters.shared, launch.shared_bytes);
  m.launched.push_back(launch);
  m.kernel = &kernel;
#if defined(EMULATOR_THREAD)
  m.host.fiber = __tsan_get_current_fiber();
  m.rested = m.free_stacks.size();  // their blocks are of earlier launches
#endif
  std::vector<dim3> order;
  for (unsigned z = 0; z < launch.grid.z; ++z) {
    for (unsigned y = 0; y < launch.grid.y; ++y) {
      for (unsigned x = 0; x < launch.grid.x; ++x) order.push_back({x, y, z});
    }
  }
  // Blocks that wait for one another are started in order, as the hardware does.
  if (launch.resident == 1) std::shuffle(order.begin(), order.end(), m.random);
  const auto together =
      static_cast<size_t>(std::max<int64_t>(launch.resident, settings().at("resident")));
  struct Blocks : std::vector<std::unique_ptr<Block>> {
    ~Blocks() {  // some are left if a check has failed
      for (auto& block : *this) end_block(std::move(block));
    }
  } blocks;
  // In about every second block warps run one by one, each as far as it can: without a barrier, one
  // gets far ahead, and the fault shows. Blocks that wait for one another must take turns.
  bool one_by_one = false;
  int ahead = 0;  // the warp that runs
  size_t next = 0;
  int idle_rounds = 0;
  while (next < order.size() || !blocks.empty()) {
    while (next < order.size() && blocks.size() < together) {
      blocks.push_back(make_block(launch, order[next++]));
      one_by_one = together == 1 && m.random() % 2 == 0;
    }
    m.round.clear();
    if (one_by_one) add_ready(m.round, *blocks.front(), ahead * kWarpSize, kWarpSize);
    if (m.round.empty()) {
      for (auto& block : blocks) add_ready(m.round, *block);
      if (m.round.empty()) report_deadlock(blocks);
      if (one_by_one) {
        ahead = m.round[m.random() % m.round.size()]->warp;
        std::erase_if(m.round, [&](const Thread* thread) { return thread->warp != ahead; });
      }
    }
    std::shuffle(m.round.begin(), m.round.end(), m.random);
    m.turn = 0;
    m.only_spinning = true;
    change(m.host, next_of_round());
    running = nullptr;
    detail::running = nullptr;
    if (m.failure) std::rethrow_exception(std::exchange(m.failure, nullptr));
    idle_rounds = m.only_spinning ? idle_rounds + 1 : 0;
    if (idle_rounds > kMaxIdleRounds) fail("blocks spin and wait for one another");
    std::erase_if(blocks, [](auto& block) {
      if (block->live > 0) return false;
      end_block(std::move(block));
      return true;
    });
  }
  acquire(&m.end_tag);
  m.ended.clear();
}

}  // namespace emulator
