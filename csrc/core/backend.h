// The interface of a back end to every operator family: a plan made from the arguments alone, and a
// run that follows it. Back ends never allocate: ops/ allocates the memory that the plan needs.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace onepass {

// The facts that a plan may use besides the arguments. They change speed, never results.
struct Machine {
  int32_t threads;
  bool multiplies_bytes = false;  // whether the CPU has VNNI, or AVX-VNNI at the level avx2
};

struct Plan {
  int64_t workspace_bytes;  // scratch for run(), 64-byte aligned, not initialised
  const char* kernel_name;  // the function that a profiler shows
  int64_t rows_per_tile;    // rows that a kernel call takes together
  int64_t splits;           // pieces that the work is cut into; if results depend on them, they
                            // follow from the shape alone
  const char* reason;       // why the plan chose this path
  int64_t threads = 1;      // at most; each has its own part of the workspace
  bool is_second = false;   // which of either_of()'s operators made it
  alignas(8) unsigned char layout[192] = {};  // the operator's own, see operator_of()
};

// body(begin, end, state) is called for pieces of [0, count) of at least `grain`.
using ParallelBody = void (*)(int64_t begin, int64_t end, void* state);

struct Context {
  void* stream;  // CUDA stream, null on CPU
  void (*parallel_for)(int64_t count, int64_t grain, ParallelBody body, void* state);  // CPU only

  template <class F>
  void for_each(int64_t count, int64_t grain, F&& body) const {
    using Body = std::remove_reference_t<F>;
    parallel_for(
        count, grain,
        [](int64_t begin, int64_t end, void* state) { (*static_cast<Body*>(state))(begin, end); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }
};

// The two functions of one operator on one back end.
template <class Args>
struct Operator {
  Plan (*plan)(const Args& args, const Machine& machine);
  void (*run)(const Args& args, const Plan& plan, void* workspace, const Context& context);
};

// An operator whose plan decides more than a Plan holds, such as tiles and the layout of the
// workspace: plan(args, machine, layout) fills a Layout, and run(args, plan, layout, workspace,
// context) uses it, so that nothing is derived twice.
template <class Args, class Layout, auto plan, auto run>
Operator<Args> operator_of() {
  static_assert(std::is_trivially_copyable_v<Layout> && sizeof(Layout) <= sizeof(Plan::layout));
  return {.plan =
              [](const Args& args, const Machine& machine) {
                Layout layout{};
                Plan made = plan(args, machine, layout);
                std::memcpy(made.layout, &layout, sizeof(Layout));
                return made;
              },
          .run =
              [](const Args& args, const Plan& made, void* workspace, const Context& context) {
                Layout layout;
                std::memcpy(&layout, made.layout, sizeof(Layout));
                run(args, made, layout, workspace, context);
              }};
}

// Two operators for the same arguments; the plan takes the first if is_first(args).
template <class Args, bool (*is_first)(const Args&), Operator<Args> (*first)(),
          Operator<Args> (*second)()>
Operator<Args> either_of() {
  return {.plan =
              [](const Args& args, const Machine& machine) {
                const bool is_second = !is_first(args);
                Plan made = (is_second ? second() : first()).plan(args, machine);
                made.is_second = is_second;
                return made;
              },
          .run =
              [](const Args& args, const Plan& made, void* workspace, const Context& context) {
                (made.is_second ? second() : first()).run(args, made, workspace, context);
              }};
}

}  // namespace onepass
