// The back end that an operator runs on, the machine its plan may count on, and the record of
// plans.
#pragma once

#include <string>

#include "core/backend.h"
#include "ops/backend.h"
#include "ops/check.h"
#include "ops/host.h"
#include "ops/tensor.h"
#ifdef ONEPASS_EMULATE
#include <cuda_emulator/execution.h>
#endif

namespace onepass {

// Whether the host may read the memory of a call's tensors. On a device it would have to wait for
// the work before it.
#ifdef ONEPASS_CUDA
inline constexpr bool kHostReadsTensors = false;
#else
inline constexpr bool kHostReadsTensors = true;
#endif

const Backend& backend();  // of the library this is compiled into
Machine machine();
Context context(const Device& device);

// The oldest compute capability that kernels support, as 10 * major + minor: the first with
// tensor-core instructions for bfloat16 and with copies from global to shared memory that bypass
// registers.
inline constexpr int32_t kOldestCapability = 80;
int32_t capability_of(const Device& device);  // kOldestCapability on the CPU

// Makes the device torch's current one for as long as it lives; nothing on CPU.
class DeviceGuard {
 public:
  explicit DeviceGuard(const Device& device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  void* handle_ = nullptr;
};

// Recording is off unless `explain` or ONEPASS_LOG=dispatch turned it on; then each call stores its
// plan here for Python to print. While it is off, it costs a call one relaxed load.
bool recording();
void record(Dispatch dispatch);
void set_recording(bool on);
std::vector<Dispatch> take_recorded();

template <class... Parts>
Dispatch described(const char* op, const Parts&... arguments) {
  return {.op = op, .arguments = text_of(arguments...)};
}

#ifndef ONEPASS_EMULATE
// Runs an operator for run_operator(). The emulated one (tests/cuda_emulator) moves the memory that
// the arguments point to between guard bands, and can write all of it to a file.
template <class Args>
struct Execution {
  const Args& args;
  void run(const Operator<Args>& op, const Plan& plan, void* workspace, const Context& context) {
    op.run(args, plan, workspace, context);
  }
};
#endif

// Plans and runs one operator. describe() gives the op's name and arguments, for the record.
template <class Args, class Describe>
void run_operator(const Operator<Args>& op, const Args& args, const Device& device,
                  Describe&& describe) {
  if (const int32_t got = capability_of(device); got < kOldestCapability) [[unlikely]] {
    require(false, describe().op, ": tensors must be on a CUDA device of compute capability ",
            kOldestCapability / 10, ".", kOldestCapability % 10, " or newer, got ", device,
            ", which has ", got / 10, ".", got % 10);
  }
  Execution<Args> execution{args};
  const Plan plan = op.plan(execution.args, machine());
  if (recording()) [[unlikely]] {
    Dispatch dispatch = describe();
    dispatch.level = backend().name;
    dispatch.plan = plan;
    dispatch.threads = static_cast<int32_t>(plan.threads);
    record(std::move(dispatch));
  }
  const DeviceGuard guard(device);
  const Workspace workspace(plan.workspace_bytes, device);
  execution.run(op, plan, workspace.data(), context(device));
}

}  // namespace onepass
