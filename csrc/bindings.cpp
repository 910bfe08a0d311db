// onepass._C: facts about the build and the machine, and the plans of the calls that ran. Host side
// only: no tensor crosses pybind11, and the op libraries know nothing of Python.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/host.h"

namespace py = pybind11;

namespace {

// The op libraries that torch.ops.load_library has loaded already; set by attach().
const onepass::Host* cpu_host = nullptr;
const onepass::Host* cuda_host = nullptr;

void attach(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOLOAD | RTLD_LAZY);
  if (library == nullptr) throw std::runtime_error("onepass: " + path + " is not loaded");
  using Getter = const onepass::Host* (*)();
  if (const auto cpu = reinterpret_cast<Getter>(dlsym(library, "onepass_cpu_backend"))) {
    cpu_host = cpu();
  } else if (const auto cuda = reinterpret_cast<Getter>(dlsym(library, "onepass_cuda_backend"))) {
    cuda_host = cuda();
  } else {
    throw std::runtime_error("onepass: " + path + " is not an op library");
  }
}

const onepass::Host& attached() {
  if (cpu_host == nullptr) throw std::runtime_error("onepass: the op library is not attached");
  return *cpu_host;
}

void record(bool on) {
  attached().record(on);
  if (cuda_host != nullptr) cuda_host->record(on);
}

py::dict build_info() {
  py::dict info;
  info["version"] = ONEPASS_VERSION;
  info["build_type"] = ONEPASS_BUILD_TYPE;
  info["compiler"] = ONEPASS_COMPILER;
  info["torch_headers"] = ONEPASS_TORCH_HEADERS;
  info["cpu_levels"] = ONEPASS_CPU_LEVELS;
  info["cuda_archs"] = ONEPASS_CUDA_ARCHS;
  info["cuda_version"] = ONEPASS_CUDA_VERSION;
  return info;
}

py::list take() {
  py::list records;
  std::vector<onepass::Dispatch> calls = attached().take();
  if (cuda_host != nullptr) {
    std::vector<onepass::Dispatch> more = cuda_host->take();
    std::move(more.begin(), more.end(), std::back_inserter(calls));
  }
  for (const onepass::Dispatch& dispatch : calls) {
    py::dict record;
    record["op"] = dispatch.op;
    record["arguments"] = dispatch.arguments;
    record["kernel"] = dispatch.plan.kernel_name;
    record["level"] = dispatch.level;
    record["threads"] = dispatch.threads;
    record["rows_per_tile"] = dispatch.plan.rows_per_tile;
    record["splits"] = dispatch.plan.splits;
    record["workspace_bytes"] = dispatch.plan.workspace_bytes;
    record["reason"] = dispatch.plan.reason;
    records.append(std::move(record));
  }
  return records;
}

double ceiling(double (*measure)(double), double seconds) {
  const py::gil_scoped_release release;
  return measure(seconds);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build facts, CPU levels, recorded plans. No tensors.";
  m.def("attach", &attach, "Finds the loaded op library at this path.");
  m.def("build_info", &build_info, "What this package was built from and for.");
  m.def("cpu_levels", [] { return attached().levels(); }, "Levels that this machine supports.");
  m.def("cpu_level", [] { return std::string(attached().backend().name); }, "The level in use.");
  m.def("record", &record, "Starts or stops recording plans.");
  m.def("take", &take, "Plans recorded since the last take.");
  m.def(
      "fma_ceiling",
      [](double seconds) { return ceiling(attached().backend().fma_ceiling, seconds); },
      "GFLOP/s of one thread in float32 fused multiply-add, measured for about this long.");
  m.def(
      "bf16_dot_ceiling",
      [](double seconds) { return ceiling(attached().backend().bf16_dot_ceiling, seconds); },
      "GFLOP/s of one thread in bfloat16 dot products; 0 where the level has none.");
}
