// The CUDA library's runtime: torch's current device and stream.
#if defined(ONEPASS_CUDA) && !defined(ONEPASS_EMULATE)

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <atomic>
#include <stdexcept>

#include "ops/runtime.h"

extern "C" {
onepass::Backend onepass_cuda_kernels();
int onepass_cuda_capability(int device);
}

namespace onepass {

const Backend& backend() {
  static const Backend chosen = onepass_cuda_kernels();
  return chosen;
}

Machine machine() { return {.threads = 1}; }

Context context(const Device& device) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream(device.index, &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("onepass: torch has no CUDA stream for " +
                             std::to_string(device.index));
  }
  return {.stream = stream, .parallel_for = nullptr};
}

int32_t capability_of(const Device& device) {
  constexpr int32_t kDevices = 128;  // torch has no more
  static std::atomic<int32_t> known[kDevices];
  std::atomic<int32_t>& capability = known[device.index % kDevices];
  int32_t found = capability.load(std::memory_order_relaxed);
  if (found == 0) [[unlikely]] {
    found = onepass_cuda_capability(device.index);
    if (found < 0) found = kOldestCapability;  // the launch then reports the driver's error
    capability.store(found, std::memory_order_relaxed);
  }
  return found;
}

DeviceGuard::DeviceGuard(const Device& device) {
  CUDAGuardHandle guard = nullptr;
  if (aoti_torch_create_cuda_guard(device.index, &guard) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("onepass: torch cannot switch to CUDA device " +
                             std::to_string(device.index));
  }
  handle_ = guard;
}

DeviceGuard::~DeviceGuard() { aoti_torch_delete_cuda_guard(static_cast<CUDAGuardHandle>(handle_)); }

}  // namespace onepass

extern "C" __attribute__((visibility("default"))) const onepass::Host* onepass_cuda_backend() {
  static const onepass::Host host = {.backend = onepass::backend,
                                     .machine = onepass::machine,
                                     .levels = [] { return std::vector<std::string>{}; },
                                     .record = onepass::set_recording,
                                     .take = onepass::take_recorded,
                                     .regions = [] { return int64_t{0}; }};
  return &host;
}

#endif
