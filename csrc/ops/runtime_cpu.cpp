// The CPU library's runtime: the level is picked once, when the library is first used, from cpuid
// and ONEPASS_CPU_ISA; threads are torch's own.
#ifndef ONEPASS_CUDA

#include <torch/csrc/stable/c/shim.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "ops/runtime.h"

extern "C" {
onepass::Backend onepass_cpu_kernels_baseline();
#if defined(__x86_64__)
onepass::Backend onepass_cpu_kernels_avx2();
onepass::Backend onepass_cpu_kernels_avx512();
onepass::Backend onepass_cpu_kernels_avx512_bf16();
#endif
}

namespace onepass {
namespace {

struct Level {
  const char* name;
  bool supported;
  Backend (*kernels)();
};

// From the least to the most capable.
std::vector<Level> levels() {
  std::vector<Level> all = {{"baseline", true, onepass_cpu_kernels_baseline}};
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("x86-64-v4");
  all.push_back({"avx2", __builtin_cpu_supports("x86-64-v3") != 0, onepass_cpu_kernels_avx2});
  all.push_back({"avx512", avx512, onepass_cpu_kernels_avx512});
  all.push_back({"avx512_bf16", avx512 && __builtin_cpu_supports("avx512bf16"),
                 onepass_cpu_kernels_avx512_bf16});
#endif
  return all;
}

std::vector<std::string> supported_levels() {
  std::vector<std::string> names;
  for (const Level& level : levels()) {
    if (level.supported) names.emplace_back(level.name);
  }
  return names;
}

Backend pick() {
  const char* wanted = std::getenv("ONEPASS_CPU_ISA");
  const bool any = wanted == nullptr || *wanted == '\0';
  const Level* best = nullptr;
  const std::vector<Level> all = levels();
  std::string names;
  for (const Level& level : all) {
    if (!level.supported) continue;
    names += (names.empty() ? "" : ", ") + std::string(level.name);
    if (any || std::strcmp(wanted, level.name) == 0) best = &level;
  }
  if (best == nullptr) {
    throw std::runtime_error("onepass: ONEPASS_CPU_ISA must be one of " + names + ", got " +
                             wanted);
  }
  return best->kernels();
}

void parallel_for(int64_t count, int64_t grain, ParallelBody body, void* state) {
  if (torch_parallel_for(0, count, grain, body, state) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("onepass: a parallel region failed");
  }
}

}  // namespace

const Backend& backend() {
  static const Backend chosen = pick();
  return chosen;
}

Machine machine() {
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  return {.threads = static_cast<int32_t>(threads)};
}

int32_t capability_of(const Device&) { return kOldestCapability; }

DeviceGuard::DeviceGuard(const Device&) {}
DeviceGuard::~DeviceGuard() = default;

Context context(const Device&) { return {.stream = nullptr, .parallel_for = parallel_for}; }

}  // namespace onepass

extern "C" __attribute__((visibility("default"))) const onepass::Host* onepass_cpu_backend() {
  static const onepass::Host host = {.backend = onepass::backend,
                                     .machine = onepass::machine,
                                     .levels = onepass::supported_levels,
                                     .record = onepass::set_recording,
                                     .take = onepass::take_recorded};
  return &host;
}

#endif  // ONEPASS_CUDA
