// Runs calls of operators again that the tests' library wrote to files: `replay FILE...`. This
// program lives under a sanitizer, as that library cannot inside Python. What a call comes to must
// be, to the bit, what it came to there.
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <string>

#include "cuda/backend.h"
#include "emulator.h"
#include "image.h"

namespace onepass::cuda {

// Families whose kernels the program is linked without.
#define ABSENT __attribute__((weak))
ABSENT Operator<NormForward> norm_forward() { return {}; }
ABSENT Operator<NormBackward> norm_backward() { return {}; }
ABSENT Operator<DropoutForward> dropout_forward() { return {}; }
ABSENT Operator<GradientNorm> gradient_norm() { return {}; }
ABSENT Operator<ScaleGradients> scale_gradients() { return {}; }
ABSENT Operator<OptimizerStep> optimizer_step() { return {}; }
ABSENT AttentionBackend attention_backend() { return {}; }
ABSENT Operator<AttentionDecode> attention_decode() { return {}; }

}  // namespace onepass::cuda

extern "C" onepass::Backend onepass_cuda_kernels();

namespace {

using namespace onepass;

// An operator of whatever arguments: a reference is handed over as an address.
struct AnyOperator {
  Plan (*plan)(const void* args, const Machine& machine);
  void (*run)(const void* args, const Plan& plan, void* workspace, const Context& context);
};

void replay(const std::string& path) {
  static const Backend backend = onepass_cuda_kernels();
  std::ifstream file(path, std::ios::binary);
  int64_t place = 0;  // of the operator in the back end's table
  file.read(reinterpret_cast<char*>(&place), sizeof(place));
  AnyOperator op;
  std::memcpy(&op, reinterpret_cast<const char*>(&backend) + place, sizeof(op));
  if (!op.run) emulator::fail("linked without this operator");
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
}
