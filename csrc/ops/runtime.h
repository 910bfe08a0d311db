// The back end that an operator runs on, the machine its plan may count on, and the record of
// plans.
#pragma once

#include <string>

#include "core/backend.h"
#include "ops/backend.h"
#include "ops/check.h"
#include "ops/host.h"
#include "ops/tensor.h"

namespace onepass {

const Backend& backend();  // of the library this is compiled into
Machine machine();
Context context(const Device& device);

// Of the CUDA devices that kernels are made for, as 10 * major + minor: those with the tensor-core
// instructions for bfloat16 and with copies from global to shared memory past the registers.
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

// Recording is off unless `explain` or ONEPASS_LOG=dispatch turned it on; then each call leaves its
// plan here for Python to print. Off, a call pays one relaxed load.
bool recording();
void record(Dispatch dispatch);
void set_recording(bool on);
std::vector<Dispatch> take_recorded();

// Plans and runs one operator. describe() gives the op's name and arguments, for the record.
template <class Args, class Describe>
void run_operator(const Operator<Args>& op, const Args& args, const Device& device,
                  Describe&& describe) {
  if (const int32_t got = capability_of(device); got < kOldestCapability) [[unlikely]] {
    require(false, describe().op, ": tensors must be on a CUDA device of compute capability ",
            kOldestCapability / 10, ".", kOldestCapability % 10, " or newer, got ", device,
            ", which has ", got / 10, ".", got % 10);
  }
  const Machine here = machine();
  const Plan plan = op.plan(args, here);
  if (recording()) [[unlikely]] {
    Dispatch dispatch = describe();
    dispatch.level = backend().name;
    dispatch.plan = plan;
    dispatch.threads = plan.parallel ? here.threads : 1;
    record(std::move(dispatch));
  }
  const DeviceGuard guard(device);
  const Workspace workspace(plan.workspace_bytes, device);
  op.run(args, plan, workspace.data(), context(device));
}

}  // namespace onepass
