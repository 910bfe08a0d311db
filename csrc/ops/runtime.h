// The back end that an operator runs on, the machine its plan may count on, and the record of
// plans.
#pragma once

#include <string>

#include "core/backend.h"
#include "ops/backend.h"
#include "ops/host.h"
#include "ops/tensor.h"

namespace onepass {

const Backend& backend();  // of the library this is compiled into
Machine machine();
Context context(const Device& device);

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
