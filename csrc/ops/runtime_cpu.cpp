// The CPU library's runtime: the level is picked once, when the library is first used, from cpuid
// and ONEPASS_CPU_ISA; threads are torch's own.
#ifndef ONEPASS_CUDA

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <torch/csrc/stable/c/shim.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

#include "ops/runtime.h"

// cmake/cpu.cmake says LEVEL(name) for each level that is built, from the least to the most
// capable.
#define LEVEL(name) onepass::Backend onepass_cpu_kernels_##name();
extern "C" {
ONEPASS_CPU_LEVELS
}
#undef LEVEL

namespace onepass {
namespace {

struct Level {
  const char* name;
  bool supported;
  Backend (*kernels)();
};

bool supports([[maybe_unused]] std::string_view level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (level == "avx2") return __builtin_cpu_supports("x86-64-v3");
  const bool avx512 = __builtin_cpu_supports("x86-64-v4");
  if (level == "avx512") return avx512;
  if (level == "avx512_bf16") return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
  return true;
}

std::vector<Level> levels() {
#define LEVEL(name) {#name, supports(#name), onepass_cpu_kernels_##name},
  return {ONEPASS_CPU_LEVELS};
#undef LEVEL
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

// Whether the CPU has the instruction of multiply_add_bytes (cpu/vec_bytes.h) for a level.
// ONEPASS_CPU_VNNI=0 says that it has not.
bool multiplies_bytes([[maybe_unused]] std::string_view level) {
#if defined(__x86_64__)
  const char* told = std::getenv("ONEPASS_CPU_VNNI");
  if (told != nullptr && std::strcmp(told, "0") == 0) return false;
  if (level == "avx2") {
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
    constexpr uint32_t kAvxVnni = 1 << 4;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & kAvxVnni) != 0;
  }
  return level.starts_with("avx512") && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

std::atomic<int64_t> regions{0};

void parallel_for(int64_t count, int64_t grain, ParallelBody body, void* state) {
  if (count <= grain) {
    if (count > 0) body(0, count, state);
    return;
  }
  regions.fetch_add(1, std::memory_order_relaxed);
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
  static const bool bytes = multiplies_bytes(backend().name);
  return {.threads = static_cast<int32_t>(threads), .multiplies_bytes = bytes};
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
                                     .take = onepass::take_recorded,
                                     .regions = [] { return onepass::regions.load(); }};
  return &host;
}

#endif  // ONEPASS_CUDA
