// Runs calls of operators again that the tests' library wrote to files: `replay FILE...`. This
// program is built with a sanitizer, which that library cannot be inside Python. The results must
// be the same bits as there.
#include <cstdio>
#include <exception>
#include <fstream>
#include <string>

#include "accesses.h"
#include "cuda/backend.h"
#include "image.h"
#include "kept.h"

namespace onepass::cuda {

// Definitions of functions that the program is linked without.
struct Absent {
  template <class Args>
  operator Operator<Args>() const {
    return {.plan = [](const Args&, const Machine&) -> Plan {
              emulator::fail("linked without this operator");
            },
            .run = nullptr};
  }
};

#define ABSENT __attribute__((weak))
#define ABSENT_OPERATOR(name, Args) \
  ABSENT Operator<Args> name() { return Absent(); }
ONEPASS_OPERATORS(ABSENT_OPERATOR)
ABSENT Operator<AttentionForward> tiled_attention_forward() { return Absent(); }
ABSENT Operator<AttentionBackward> tiled_attention_backward() { return Absent(); }
ABSENT Operator<AttentionForward> plain_attention_forward() { return Absent(); }
ABSENT Operator<AttentionBackward> plain_attention_backward() { return Absent(); }

}  // namespace onepass::cuda

namespace {

using namespace onepass;

// An operator of any arguments: a reference is passed as an address.
struct AnyOperator {
  Plan (*plan)(const void* args, const Machine& machine);
  void (*run)(const void* args, const Plan& plan, void* workspace, const Context& context);
};

void replay(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const auto op = emulator::read_operator<AnyOperator>(file);
  emulator::Image image(file);
  const Plan plan = op.plan(image.args(), Machine{.threads = 1});
  const emulator::Guarded workspace(plan.workspace_bytes, 0, 0);
  emulator::reseed();
  op.run(image.args(), plan, workspace.data(), Context{});
  workspace.check(plan.kernel_name);
  const std::string difference = image.difference();
  if (!difference.empty()) {
    emulator::fail(std::string(plan.kernel_name) + " comes to something else: " + difference);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    for (int i = 1; i < argc; ++i) replay(argv[i]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
  std::printf("%d\n", argc - 1);
  emulator::print_accesses();
}
