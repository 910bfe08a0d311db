// How run_operator() (csrc/ops/runtime.h) runs an operator in the tests' library: on an image of
// its memory. The kernels are the shipping ones, under the emulator.
#pragma once

#include <cstddef>
#include <functional>

#include "core/backend.h"
#include "image.h"

namespace onepass {

// The part that does not depend on the type of the arguments.
class EmulatedRun {
 public:
  EmulatedRun(const void* args, size_t bytes);
  // plan(args) returns the plan; run(workspace) runs the operator.
  void run(const void* op, const Plan& plan, const std::function<Plan(const void*)>& planned,
           const std::function<void(void*)>& run);
  void* args() const { return image_.args(); }

 private:
  emulator::Image image_;
};

template <class Args>
class Execution {
  EmulatedRun run_;

 public:
  const Args& args;

  explicit Execution(Args given)
      : run_((clear_padding(given), &given), sizeof(Args)),
        args(*static_cast<const Args*>(run_.args())) {}
  void run(const Operator<Args>& op, const Plan& plan, void*, const Context& context) {
    run_.run(
        &op, plan,
        [&](const void* blind) {
          return op.plan(*static_cast<const Args*>(blind), {.threads = 1});
        },
        [&](void* workspace) { op.run(args, plan, workspace, context); });
  }
};

}  // namespace onepass
